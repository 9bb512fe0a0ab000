//! Threads that fill slots hand them in here and get empty ones. Every caller also polls the copies.
//!
//! A copy engine pauses for some microseconds between copies of separate calls, but not between those of one call. So
//! full slots are batched as long as the engine is busy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::slot_shares::SlotShares;
use super::worker_pool::LoadLane;
use crate::error::{Error, Result};

/// Bytes that are worth a call: larger batches are hardly faster.
const BATCH: usize = 16 << 20;
/// Batches of a group in flight: the engine has the next when one ends, although it takes some microseconds until that is
/// seen. A second one has at least `SECOND` bytes: fewer arrive sooner together with others.
const IN_FLIGHT: usize = 2;
const SECOND: usize = 256 << 10;
/// Poll interval for copies of a thread without a slot: a small part of a batch's duration.
const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Time limit for the copies of a call: about a thousand times what they take.
const LONGEST: Duration = Duration::from_secs(60);

/// Poll interval for abandoned copies.
const ASIDE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A slot with the bytes that were read into it.
pub(super) struct Full<P> {
    pub(super) slot: usize,
    /// The owner of the slot.
    pub(super) filler: usize,
    pub(super) part: P,
}

/// Copies out of the slots, and reports of their end.
pub(super) trait SlotCopier {
    /// What was read into a slot.
    type Part;
    /// The end of some copies.
    type End;
    /// Bytes of a slot.
    fn slot_bytes(&self) -> usize;
    /// Bytes that are worth a call while others are in flight.
    fn batch_bytes(&self) -> usize {
        BATCH
    }
    /// Bytes that a part copies, about.
    fn bytes(&self, _: &Self::Part) -> usize {
        self.slot_bytes()
    }
    /// How many groups there are.
    fn groups(&self) -> usize {
        1
    }
    /// Parts of one group are copied together. Copies of one group do not wait for those of another.
    fn group(&self, _: &Self::Part) -> usize {
        0
    }
    /// Begins to copy the bytes in these slots, all of one group.
    fn copy(&mut self, full: &[Full<Self::Part>]) -> Result<Self::End>;
    /// Whether copies have ended. Failed ones have, too, unless [`Error::is_under_way`].
    fn is_over(&mut self, end: &mut Self::End) -> Result<bool>;
    /// The copies out of these slots failed; the error if everything else fails with them.
    fn fail(&self, error: Error, _: &[Full<Self::Part>]) -> Result<()> {
        Err(error)
    }
    /// Reports that a slot has been copied.
    fn report(&self, part: Self::Part);
}

/// A slot is handed in under a lock of its own: threads that fill slots never wait for one that calls the driver.
/// A thread that needs both locks takes the lane's first.
pub(super) struct SlotPool<L: SlotCopier = LoadLane> {
    queue: Mutex<SlotQueue<L::Part>>,
    /// Parts that wait in `queue`, to be read without its lock.
    waiting: AtomicUsize,
    lane: Mutex<UnderWay<L>>,
    /// A thread found the lane taken when it handed in its part.
    is_missed: AtomicBool,
}

struct SlotQueue<P> {
    waiting: VecDeque<Full<P>>,
    /// Each filler's empty slots: those of others are in other CPUs' caches. The slot copied last is taken first.
    empty: Vec<Vec<usize>>,
    /// Set where fillers share all slots, which are in the first list then.
    shares: Option<SlotShares>,
}

struct UnderWay<L: SlotCopier> {
    /// None until the ring is registered with the GPU.
    lane: Option<L>,
    batches: VecDeque<CopyBatch<L>>,
    aside: Vec<SlotsAside<L::End>>,
    /// When those are polled again.
    next_look: Instant,
}

/// The copies of one call.
struct CopyBatch<L: SlotCopier> {
    begun: Instant,
    group: usize,
    end: L::End,
    full: Vec<Full<L::Part>>,
}

/// Slots that the GPU may still use after their callers have stopped waiting. They are empty once that has ended.
struct SlotsAside<E> {
    end: E,
    /// Each with its filler.
    slots: Vec<(usize, usize)>,
}

impl<L: SlotCopier> SlotPool<L> {
    /// For `fillers` fillers with `slots` slots each; fillers that share slots count as one.
    pub(super) fn new(fillers: usize, slots: usize) -> Self {
        let empty = (0..fillers).map(|filler| (filler * slots..(filler + 1) * slots).collect()).collect();
        Self::of(empty, None)
    }

    /// For any number of fillers that share `slots` slots, divided as [`SlotShares`] says.
    pub(super) fn shared(slots: usize) -> Self {
        Self::of(vec![(0..slots).collect()], Some(SlotShares::new(slots)))
    }

    fn of(empty: Vec<Vec<usize>>, shares: Option<SlotShares>) -> Self {
        Self {
            queue: Mutex::new(SlotQueue { waiting: VecDeque::new(), empty, shares }),
            waiting: AtomicUsize::new(0),
            lane: Mutex::new(UnderWay {
                lane: None,
                batches: VecDeque::new(),
                aside: Vec::new(),
                next_look: Instant::now(),
            }),
            is_missed: AtomicBool::new(false),
        }
    }

    /// Copies go through this lane from now on.
    pub(super) fn open(&self, lane: L) {
        self.lane().lane = Some(lane);
    }

    /// An empty slot of this filler, if there is one.
    pub(super) fn free(&self, filler: usize) -> Result<Option<usize>> {
        if let Some(slot) = self.queue().pop(filler) {
            return Ok(Some(slot));
        }
        self.try_attend()?;
        Ok(self.queue().pop(filler))
    }

    /// An empty slot of this filler; none if the load was cancelled.
    pub(super) fn slot(&self, filler: usize, is_stopped: impl Fn() -> bool) -> Result<Option<usize>> {
        while !is_stopped() {
            if let Some(slot) = self.free(filler)? {
                return Ok(Some(slot));
            }
            std::thread::sleep(COPY_POLL_INTERVAL);
        }
        Ok(None)
    }

    pub(super) fn hand_in(&self, full: Full<L::Part>) -> Result<()> {
        let mut queue = self.queue();
        queue.waiting.push_back(full);
        self.waiting.store(queue.waiting.len(), Ordering::SeqCst);
        drop(queue);
        // A second time for parts that others handed in meanwhile, and no more: this thread has files to read.
        for _ in 0..2 {
            if !self.attend_if_free()? {
                self.is_missed.store(true, Ordering::SeqCst);
                break;
            }
            if !self.is_missed.swap(false, Ordering::SeqCst) {
                break;
            }
        }
        Ok(())
    }

    /// Changes the lane, if it is open.
    pub(super) fn with_lane<R>(&self, change: impl FnOnce(&mut L) -> R) -> Option<R> {
        self.lane().lane.as_mut().map(change)
    }

    /// The slots of a filler if it may have no more and all of them are set aside.
    pub(super) fn all_aside(&self, filler: usize) -> Option<usize> {
        // A thread that has the lane may wait for the driver.
        let lane = self.lane.try_lock().ok()?;
        let queue = self.queue();
        let shares = queue.shares.as_ref()?;
        let held = shares.held(filler);
        let aside = lane.aside.iter().flat_map(|aside| &aside.slots).filter(|(of, _)| *of == filler).count();
        (held > 0 && aside == held && !shares.may_take(filler)).then_some(held)
    }

    /// Returns a slot that was not filled.
    pub(super) fn put_back(&self, filler: usize, slot: usize) {
        self.queue().push(filler, slot);
    }

    /// Returns a slot that the GPU may use until `end`.
    pub(super) fn set_aside(&self, filler: usize, slot: usize, end: L::End) {
        self.lane().aside.push(SlotsAside { end, slots: vec![(filler, slot)] });
    }

    /// Polls the copies, unless another thread does.
    pub(super) fn try_attend(&self) -> Result<()> {
        self.attend_if_free().map(|_| ())
    }

    /// False if another thread has the lane.
    fn attend_if_free(&self) -> Result<bool> {
        match self.lane.try_lock() {
            Ok(mut lane) => lane.attend(self)?,
            Err(TryLockError::Poisoned(lane)) => lane.into_inner().attend(self)?,
            Err(TryLockError::WouldBlock) => return Ok(false),
        }
        Ok(true)
    }

    /// Waits until everything that was handed in has been copied.
    pub(super) fn finish(&self, is_stopped: impl Fn() -> bool) -> Result<()> {
        while !is_stopped() {
            let mut lane = self.lane();
            lane.attend(self)?;
            if lane.batches.is_empty() && self.queue().waiting.is_empty() {
                break;
            }
            drop(lane);
            std::thread::sleep(COPY_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Slots that are empty.
    #[cfg(test)]
    pub(super) fn free_slots(&self) -> usize {
        self.queue().empty.iter().map(Vec::len).sum()
    }

    fn queue(&self) -> MutexGuard<'_, SlotQueue<L::Part>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lane(&self) -> MutexGuard<'_, UnderWay<L>> {
        self.lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P> SlotQueue<P> {
    fn pop(&mut self, filler: usize) -> Option<usize> {
        let Some(shares) = &mut self.shares else { return self.empty.get_mut(filler)?.pop() };
        if !shares.may_take(filler) {
            return None;
        }
        let slot = self.empty.first_mut()?.pop()?;
        shares.take(filler);
        Some(slot)
    }

    fn push(&mut self, filler: usize, slot: usize) {
        let list = if let Some(shares) = &mut self.shares {
            shares.put_back(filler);
            0
        } else {
            filler
        };
        self.empty.get_mut(list).into_iter().for_each(|empty| empty.push(slot));
    }

    /// Parts of one group that has `least` bytes waiting: `most` bytes, or a part more.
    fn next_batch(
        &mut self,
        most: usize,
        of: impl Fn(&Full<P>) -> (usize, usize),
        least: impl Fn(usize) -> usize,
    ) -> Vec<Full<P>> {
        let mut sums: Vec<(usize, usize)> = Vec::new();
        let due = self.waiting.iter().map(&of).find_map(|(group, bytes)| {
            let known = sums.iter().position(|(known, _)| *known == group);
            let place = known.unwrap_or_else(|| {
                sums.push((group, 0));
                sums.len() - 1
            });
            let (_, sum) = sums.get_mut(place)?;
            *sum += bytes;
            (*sum >= least(group)).then_some(group)
        });
        let Some(due) = due else { return Vec::new() };
        let (mut batch, mut sum) = (Vec::new(), 0);
        for full in std::mem::take(&mut self.waiting) {
            let (group, bytes) = of(&full);
            if sum < most && group == due {
                sum += bytes;
                batch.push(full);
            } else {
                self.waiting.push_back(full);
            }
        }
        batch
    }
}

impl<L: SlotCopier> UnderWay<L> {
    /// Releases the slots that were copied, and begins the copies that are worth a call.
    fn attend(&mut self, pool: &SlotPool<L>) -> Result<()> {
        let Some(lane) = &mut self.lane else { return Ok(()) };
        let queue = || pool.queue();
        if !self.aside.is_empty() && Instant::now() >= self.next_look {
            self.aside.retain_mut(|aside| {
                let is_over = lane.is_over(&mut aside.end).unwrap_or_else(|error| !error.is_under_way());
                if is_over {
                    let mut queue = queue();
                    aside.slots.drain(..).for_each(|(filler, slot)| queue.push(filler, slot));
                }
                !is_over
            });
            self.next_look = Instant::now() + ASIDE_POLL_INTERVAL;
        }
        let (mut next, mut pending) = (0, Vec::new());
        while let Some(batch) = self.batches.get_mut(next) {
            let is_over =
                if pending.contains(&batch.group) { Ok(false) } else { lane.is_over(&mut batch.end) };
            let failed = match is_over {
                Ok(true) => None,
                Ok(false) if batch.begun.elapsed() <= LONGEST => {
                    pending.push(batch.group);
                    next += 1;
                    continue;
                }
                Ok(false) => {
                    let what = "copying to GPU memory".into();
                    Some(onehop_gpu::Error::Silent { what, seconds: LONGEST.as_secs() }.into())
                }
                Err(error) => Some(error),
            };
            let is_under_way = failed.as_ref().is_some_and(Error::is_under_way);
            if let Some(error) = failed {
                lane.fail(error, &batch.full)?;
            }
            let Some(CopyBatch { end, full, .. }) = self.batches.remove(next) else { break };
            let slots = full.iter().map(|full| (full.filler, full.slot));
            if is_under_way {
                self.aside.push(SlotsAside { end, slots: slots.collect() });
            } else {
                let mut queue = queue();
                slots.for_each(|(filler, slot)| queue.push(filler, slot));
            }
            full.into_iter().for_each(|full| lane.report(full.part));
        }
        let most = lane.batch_bytes();
        let parts = most.div_ceil(lane.slot_bytes());
        loop {
            let in_flight = |group| self.batches.iter().filter(|batch| batch.group == group).count();
            let least = |group| match in_flight(group) {
                0 => 0,
                in_flight if in_flight < IN_FLIGHT => SECOND,
                _ => most,
            };
            let waiting = pool.waiting.load(Ordering::SeqCst);
            let all_wait = || waiting < parts && (0..lane.groups()).all(|group| least(group) == most);
            if waiting == 0 || all_wait() {
                return Ok(());
            }
            let full = {
                let mut queue = queue();
                let of = |full: &Full<_>| (lane.group(&full.part), lane.bytes(&full.part));
                let full = queue.next_batch(most, of, least);
                pool.waiting.store(queue.waiting.len(), Ordering::SeqCst);
                full
            };
            let Some(first) = full.first() else { return Ok(()) };
            let (begun, group) = (Instant::now(), lane.group(&first.part));
            match lane.copy(&full) {
                Ok(end) => self.batches.push_back(CopyBatch { begun, group, end, full }),
                Err(error) => {
                    // Other threads may come here before they learn of the failure: a chunk with lost parts must not be
                    // reported as complete.
                    let mut queue = queue();
                    full.into_iter().rev().for_each(|full| queue.waiting.push_front(full));
                    pool.waiting.store(queue.waiting.len(), Ordering::SeqCst);
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
