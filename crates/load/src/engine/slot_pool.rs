//! Threads that fill slots hand them in here and get empty ones. Every caller also polls the copies.
//!
//! A copy engine pauses for some microseconds between copies of separate calls, but not between those of one call. So
//! full slots are batched as long as the engine is busy.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::worker_pool::{Lane, Marks};
use crate::error::Result;

/// Bytes that are worth a call: larger batches are hardly faster.
const BATCH: usize = 16 << 20;
/// Poll interval for copies of a thread without a slot: a small part of a batch's duration.
const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Time limit for the copies of a call: about a thousand times what they take.
const LONGEST: Duration = Duration::from_secs(60);

/// A slot with what was read into it.
pub(super) struct Full<P> {
    pub(super) slot: usize,
    /// The owner of the slot.
    pub(super) filler: usize,
    pub(super) part: P,
}

/// Copies out of the slots, and reports of their end.
pub(super) trait Copies {
    /// What was read into a slot.
    type Part;
    /// Bytes of a slot.
    fn slot_bytes(&self) -> usize;
    /// Begins to copy what was read into these slots.
    fn copy(&mut self, full: &[Full<Self::Part>]) -> Result<Marks>;
    /// Whether these slots may be filled again.
    fn is_over(&mut self, marks: &Marks, full: &[Full<Self::Part>]) -> Result<bool>;
    /// Reports that a slot has been copied.
    fn tell(&self, part: Self::Part);
}

pub(super) struct SlotPool<L: Copies = Lane>(Mutex<State<L>>);

struct State<L: Copies> {
    /// None until the GPU knows the ring.
    lane: Option<L>,
    waiting: VecDeque<Full<L::Part>>,
    under_way: VecDeque<Batch<L::Part>>,
    /// Each filler's empty slots: those of others are in other processors' caches. What was copied last is taken first.
    empty: Vec<Vec<usize>>,
}

/// The copies of one call.
struct Batch<P> {
    begun: Instant,
    marks: Marks,
    full: Vec<Full<P>>,
}

impl<L: Copies> SlotPool<L> {
    /// For so many fillers with so many slots each; whoever shares slots is one filler.
    pub(super) fn new(fillers: usize, slots: usize) -> Self {
        let empty = (0..fillers).map(|filler| (filler * slots..(filler + 1) * slots).collect()).collect();
        Self(Mutex::new(State { lane: None, waiting: VecDeque::new(), under_way: VecDeque::new(), empty }))
    }

    /// Copies go this way from now on.
    pub(super) fn open(&self, lane: L) {
        self.state().lane = Some(lane);
    }

    /// An empty slot of this filler, if there is one.
    pub(super) fn free(&self, filler: usize) -> Result<Option<usize>> {
        let mut state = self.state();
        if state.empty.get(filler).is_some_and(Vec::is_empty) {
            state.attend()?;
        }
        Ok(state.empty.get_mut(filler).and_then(Vec::pop))
    }

    /// An empty slot of this filler; none when the load was given up.
    pub(super) fn slot(&self, filler: usize, is_stopped: impl Fn() -> bool) -> Result<Option<usize>> {
        self.until(is_stopped, |state| state.empty.get_mut(filler).and_then(Vec::pop))
    }

    pub(super) fn hand_in(&self, full: Full<L::Part>) -> Result<()> {
        let mut state = self.state();
        state.waiting.push_back(full);
        state.attend()
    }

    /// Changes the lane, if it is open.
    pub(super) fn with_lane<R>(&self, change: impl FnOnce(&mut L) -> R) -> Option<R> {
        self.state().lane.as_mut().map(change)
    }

    /// Takes a slot back that was not filled.
    pub(super) fn give_back(&self, filler: usize, slot: usize) {
        self.state().empty.get_mut(filler).into_iter().for_each(|empty| empty.push(slot));
    }

    /// The same as [`Self::attend`], unless another thread is at it.
    pub(super) fn try_attend(&self) -> Result<()> {
        match self.0.try_lock() {
            Ok(mut state) => state.attend(),
            Err(TryLockError::Poisoned(state)) => state.into_inner().attend(),
            Err(TryLockError::WouldBlock) => Ok(()),
        }
    }

    /// Looks after the copies, for one that has something else to wait for.
    pub(super) fn attend(&self) -> Result<()> {
        self.state().attend()
    }

    /// Waits until everything that was handed in has been copied.
    pub(super) fn finish(&self, is_stopped: impl Fn() -> bool) -> Result<()> {
        self.until(is_stopped, |state| {
            (state.waiting.is_empty() && state.under_way.is_empty()).then_some(())
        })?;
        Ok(())
    }

    /// Polls the copies until `found` returns a value; `None` if the load was cancelled.
    fn until<T>(
        &self,
        is_stopped: impl Fn() -> bool,
        mut answer: impl FnMut(&mut State<L>) -> Option<T>,
    ) -> Result<Option<T>> {
        while !is_stopped() {
            let mut state = self.state();
            if let Some(answer) = answer(&mut state) {
                return Ok(Some(answer));
            }
            state.attend()?;
            if let Some(answer) = answer(&mut state) {
                return Ok(Some(answer));
            }
            drop(state);
            std::thread::sleep(COPY_POLL_INTERVAL);
        }
        Ok(None)
    }

    fn state(&self) -> MutexGuard<'_, State<L>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Copies> State<L> {
    /// Gives back what was copied, and hands over what is full if it is worth a call or the engine would run dry.
    fn attend(&mut self) -> Result<()> {
        let Some(lane) = &mut self.lane else { return Ok(()) };
        while let Some(batch) = self.under_way.front() {
            if !lane.is_over(&batch.marks, &batch.full)? {
                if batch.begun.elapsed() > LONGEST {
                    let what = "copying what was read to GPU memory".into();
                    return Err(onehop_gpu::Error::Silent { what, seconds: LONGEST.as_secs() }.into());
                }
                break;
            }
            for full in self.under_way.pop_front().into_iter().flat_map(|batch| batch.full) {
                self.empty.get_mut(full.filler).into_iter().for_each(|empty| empty.push(full.slot));
                lane.tell(full.part);
            }
        }
        let most = (BATCH / lane.slot_bytes()).max(1);
        while self.waiting.len() >= most || (self.under_way.is_empty() && !self.waiting.is_empty()) {
            let full: Vec<_> = self.waiting.drain(..most.min(self.waiting.len())).collect();
            let begun = Instant::now();
            match lane.copy(&full) {
                Ok(marks) => self.under_way.push_back(Batch { begun, marks, full }),
                Err(error) => {
                    // Other threads may come here before they learn of the failure: a chunk with lost parts must not be
                    // reported as complete.
                    full.into_iter().rev().for_each(|full| self.waiting.push_front(full));
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Mutex};

    use onehop_gpu::{Copier, Emulated, Gpu, Mark, Place, Rows};

    use super::super::worker_pool::{Copiers, Job, Part};
    use super::*;
    use crate::error::Error;
    use crate::plan::{Chunk, Copy};

    /// Refuses the first call.
    struct Refuses {
        copier: Box<dyn Copier>,
        copied: Arc<Mutex<Vec<usize>>>,
        first: bool,
    }

    impl Copier for Refuses {
        fn copy(&mut self, rows: &Rows) -> onehop_gpu::Result<()> {
            if std::mem::take(&mut self.first) {
                return Err(onehop_gpu::Error::Silent { what: "a copy".into(), seconds: 0 });
            }
            self.copied.lock().unwrap().push(rows.to);
            self.copier.copy(rows)
        }
        fn mark(&mut self) -> onehop_gpu::Result<Mark> {
            self.copier.mark()
        }
        fn is_over(&mut self, mark: Mark) -> onehop_gpu::Result<bool> {
            self.copier.is_over(mark)
        }
        fn wait(&mut self, mark: Mark) -> onehop_gpu::Result<()> {
            self.copier.wait(mark)
        }
    }

    fn part(to: u64) -> Job {
        let copies = vec![Copy { slot: 0, to, row: 4096, rows: 1, step: 4096 }];
        Job { chunk: Chunk { index: 0, file: 0, reads: Vec::new(), copies, direct: None }, gpus: 0..1 }
    }

    #[test]
    fn no_part_of_a_chunk_is_lost_to_a_copy_that_failed() {
        let (slots, copied, (arrived, arrivals)) = (SlotPool::new(1, 2), Arc::default(), channel());
        let gpu = Emulated::new();
        let memory = |place| gpu.alloc(place, 8192).unwrap();
        let copier = gpu.copier(&memory(Place::PinnedHost), &memory(Place::Vram)).unwrap();
        let copier = Refuses { copier, copied: Arc::clone(&copied), first: true };
        slots.open(Lane {
            slot: 4096,
            copiers: Copiers::Arenas(vec![Box::new(copier)]),
            arrived: vec![arrived],
        });
        let first = Full { slot: 0, filler: 0, part: Part { job: part(0), arrived: None } };
        assert!(matches!(slots.hand_in(first), Err(Error::Gpu(_))));
        let whole = part(0).chunk;
        let last = Part { job: part(4096), arrived: Some(whole.clone()) };
        let last = Full { slot: 1, filler: 0, part: last };
        slots.hand_in(last).unwrap();
        slots.attend().unwrap();
        assert_eq!(arrivals.try_recv(), Ok(whole));
        assert_eq!(*copied.lock().unwrap(), [0, 4096]);
    }
}
