//! The daemon's side of a ring. Its program may write the memory at any time: entries are copied once and the copy is
//! checked, the daemon's own indices are kept elsewhere, and an impossible index breaks the ring.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use onehop_os::{Guard, HostMem};

use super::{COMPLETED, COMPLETION, REQUEST, Request, RingRegion, SEEN, SUBMISSION, SUBMITTED, TAKEN, word};
use crate::{Result, RingName};

/// A submission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Submission {
    /// The program's index, to be returned.
    pub index: i32,
    /// The program's user data, to be returned.
    pub userdata: u64,
    /// The request; `None` if the index is invalid.
    pub request: Option<Request>,
}

/// The completion of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// The entry's.
    pub index: i32,
    /// The entry's.
    pub userdata: u64,
    /// The number of bytes, or a negative error number.
    pub result: i64,
}

/// The result of [`RingServer::take`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// The number of entries taken.
    pub count: usize,
    /// Whether more can be taken at once.
    pub more: bool,
    /// When to call it again even without a post, because entries wait for a full batch.
    pub due: Option<Instant>,
}

#[derive(Default)]
struct RingServerState {
    /// The next submission to take.
    taken: u32,
    /// The slot of the next completion.
    completed: u32,
    /// Entries that are taken and not completed.
    in_flight: u32,
    /// Since when an incomplete batch is waiting.
    waiting: Option<Instant>,
}

/// The daemon's side of a ring.
pub struct RingServer {
    ring: RingRegion,
    guard: Guard,
    name: RingName,
    state: Mutex<RingServerState>,
    broken: AtomicBool,
}

impl RingServer {
    /// Uses memory that a program registered, and initializes its semaphore.
    ///
    /// # Errors
    /// When it is too small, or cannot be guarded.
    pub fn new(mem: HostMem, name: RingName) -> Result<Self> {
        let guard = Guard::new(&mem)?;
        let ring = RingRegion::new(mem)?;
        ring.done.initialise()?;
        Ok(Self { ring, guard, name, state: Mutex::default(), broken: AtomicBool::new(false) })
    }

    /// The parameters in its name.
    #[must_use]
    pub fn name(&self) -> &RingName {
        &self.name
    }

    /// The length of its memory.
    #[must_use]
    pub fn memory_len(&self) -> usize {
        self.ring.mem.len()
    }

    /// Whether the ring is no longer served: an index was impossible, or its memory is gone.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire) || self.guard.is_lost()
    }

    /// Takes the entries that its depth allows, at most `most`.
    pub fn take(&self, now: Instant, most: usize, out: &mut Vec<Submission>) -> Taken {
        if self.is_broken() {
            return Taken::default();
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.take_some(&mut state, now, most, out).unwrap_or_else(|_| {
            self.broken.store(true, Ordering::Release);
            Taken::default()
        })
    }

    fn take_some(
        &self,
        state: &mut RingServerState,
        now: Instant,
        most: usize,
        out: &mut Vec<Submission>,
    ) -> Result<Taken> {
        let ring = &self.ring;
        let available = ring.distance(state.taken, ring.load_index(SUBMITTED)?);
        if available == 0 {
            state.waiting = None;
            return Ok(Taken::default());
        }
        let unseen = ring.distance(ring.load_index(SEEN)?, state.completed);
        // No more than there is room for completions.
        let room = (ring.slots - 1).saturating_sub(state.in_flight).saturating_sub(unseen);
        let batch = self.name.depth.unsigned_abs();
        let count = match self.name.depth {
            0 => available.min(room),
            1.. if batch > available.min(room) => return Ok(Taken::default()),
            1.. => available.min(room) / batch * batch,
            ..0 if available < batch && !self.name.timeout.is_zero() => {
                let since = *state.waiting.get_or_insert(now);
                let due = since.checked_add(self.name.timeout);
                if due.is_some_and(|due| now < due) {
                    return Ok(Taken { due, ..Taken::default() });
                }
                available.min(room)
            }
            ..0 => available.min(room),
        };
        state.waiting = None;
        // `most` does not split a batch, so that a larger batch is taken, too.
        let most = u32::try_from(most).unwrap_or(u32::MAX).max(batch).max(1);
        let taken = if self.name.depth > 0 { count.min(most / batch * batch) } else { count.min(most) };
        for place in 0..taken {
            out.push(self.entry(ring.after(state.taken, place))?);
        }
        state.taken = ring.after(state.taken, taken);
        state.in_flight += taken;
        ring.store_index(TAKEN, state.taken)?;
        Ok(Taken { count: taken as usize, more: taken > 0 && taken < available, due: None })
    }

    fn entry(&self, place: u32) -> Result<Submission> {
        let mut submission = [0; SUBMISSION];
        self.ring.mem.read(self.ring.submission(place), &mut submission)?;
        let (index, userdata) = (word(&submission) as i32, word(&submission[8..]));
        let slot = u32::try_from(index).ok().filter(|slot| *slot < self.ring.slots);
        let request = slot.map(|slot| {
            let mut bytes = [0; REQUEST];
            self.ring.mem.read(self.ring.request(slot), &mut bytes)?;
            Ok::<_, crate::Error>(Request::from_bytes(&bytes))
        });
        Ok(Submission { index, userdata, request: request.transpose()? })
    }

    /// Completes entries. Each entry from [`Self::take`] is completed once.
    pub fn complete(&self, done: &[Done]) {
        if done.is_empty() {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.write_completions(&mut state, done).is_err() {
            self.broken.store(true, Ordering::Release);
        }
        drop(state);
        self.ring.done.post();
    }

    fn write_completions(&self, state: &mut RingServerState, done: &[Done]) -> Result<()> {
        state.in_flight = state.in_flight.saturating_sub(done.len() as u32);
        for done in done {
            let mut bytes = [0; COMPLETION];
            bytes[..4].copy_from_slice(&done.index.to_le_bytes());
            bytes[8..16].copy_from_slice(&done.result.to_le_bytes());
            bytes[16..].copy_from_slice(&done.userdata.to_le_bytes());
            // There was room when it was taken. A program that has changed its index since overwrites its own
            // completions.
            self.ring.mem.write(self.ring.completion(state.completed), &bytes)?;
            state.completed = self.ring.after(state.completed, 1);
        }
        self.ring.store_index(COMPLETED, state.completed)
    }
}
