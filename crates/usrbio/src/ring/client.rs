//! The program's side of a ring.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_os::HostMem;

use super::{COMPLETED, Request, RingRegion, SEEN, SUBMITTED, TAKEN, word};
use crate::{Error, Result};

/// A completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The slot that [`Client::prepare`] returned.
    pub index: i32,
    /// The number of bytes, or a negative error number.
    pub result: i64,
    /// The request's user data.
    pub userdata: u64,
}

/// The program's side of a ring. One thread at a time may enqueue requests; others wait.
pub struct Client {
    ring: RingRegion,
    /// Free slots. Also serializes submissions.
    free: Mutex<Vec<u32>>,
    taking: Mutex<()>,
}

/// See [`Client::hold`].
pub struct HeldClient<'a> {
    _free: MutexGuard<'a, Vec<u32>>,
    _taking: MutexGuard<'a, ()>,
}

impl Client {
    /// Uses memory that was registered with a daemon.
    ///
    /// # Errors
    /// When it is too small.
    pub fn new(mem: HostMem) -> Result<Self> {
        let ring = RingRegion::new(mem)?;
        let free = (0..ring.slots - 1).rev().collect();
        Ok(Self { ring, free: Mutex::new(free), taking: Mutex::default() })
    }

    /// Locks out other threads while the result lives. A thread that forks needs this: a lock that another thread held
    /// would stay locked in the child.
    #[must_use]
    pub fn hold(&self) -> HeldClient<'_> {
        let taking = self.taking();
        HeldClient { _free: self.free(), _taking: taking }
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locked before `free`.
    fn taking(&self) -> MutexGuard<'_, ()> {
        self.taking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a request. Returns its slot. The daemon does not read it before its semaphore is posted.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn prepare(&self, request: &Request) -> Result<i32> {
        let mut free = self.free();
        let next = self.ring.load_index(SUBMITTED)?;
        let after = self.ring.after(next, 1);
        if after == self.ring.load_index(TAKEN)? {
            return Err(Error::Full);
        }
        let slot = free.pop().ok_or(Error::Full)?;
        self.ring.mem.write(self.ring.request(slot), &request.to_bytes())?;
        let mut submission = [0; 16];
        submission[..4].copy_from_slice(&slot.to_le_bytes());
        submission[8..].copy_from_slice(&request.userdata.to_le_bytes());
        self.ring.mem.write(self.ring.submission(next), &submission)?;
        self.ring.store_index(SUBMITTED, after)?;
        Ok(slot as i32)
    }

    /// Takes at most `most` completions. Returns how many.
    ///
    /// # Errors
    /// When the ring's contents are inconsistent.
    pub fn take(&self, out: &mut Vec<Completion>, most: usize) -> Result<usize> {
        let _taking = self.taking();
        let seen = self.ring.load_index(SEEN)?;
        let count = self.ring.distance(seen, self.ring.load_index(COMPLETED)?).min(most.min(1 << 24) as u32);
        if count == 0 {
            return Ok(0);
        }
        for place in 0..count {
            let mut bytes = [0; 24];
            self.ring.mem.read(self.ring.completion(self.ring.after(seen, place)), &mut bytes)?;
            let first = word(&bytes) as u32;
            let (result, userdata) = (word(&bytes[8..]) as i64, word(&bytes[16..]));
            out.push(Completion { index: first as i32, result, userdata });
        }
        self.ring.store_index(SEEN, self.ring.after(seen, count))?;
        let mut free = self.free();
        for done in &out[out.len() - count as usize..] {
            // A daemon that sends invalid indices must not free a slot twice.
            let known = u32::try_from(done.index).ok().filter(|slot| *slot < self.ring.slots - 1);
            if free.len() < self.ring.slots as usize - 1 {
                free.extend(known);
            }
        }
        Ok(count as usize)
    }

    /// Waits until the daemon posts a completion, up to `limit`.
    pub fn wait(&self, limit: Duration) {
        let _ = self.ring.done.wait(limit);
    }

    /// The number of entries.
    #[must_use]
    pub fn entries(&self) -> i32 {
        self.ring.slots as i32 - 1
    }
}
