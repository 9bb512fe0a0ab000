//! Threads that fill slots hand them in here and get empty ones. Every caller also polls the copies.
//!
//! A copy engine pauses for some microseconds between copies of separate calls, but not between those of one call. So
//! full slots are batched as long as the engine is busy.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::worker_pool::{Job, Lane, Marks, Shared};
use crate::error::Result;
use crate::plan::Chunk;

/// Bytes that are worth a call: larger batches are hardly faster.
const BATCH: usize = 16 << 20;
/// Poll interval for copies of a thread without a slot: a small part of a batch's duration.
const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Time limit for the copies of a call: about a thousand times what they take.
const LONGEST: Duration = Duration::from_secs(60);

/// A filled slot.
pub(super) struct Full {
    pub(super) slot: usize,
    /// The owner of the slot.
    pub(super) filler: usize,
    pub(super) job: Job,
    /// The chunk that is complete once this is copied; its other parts were handed in before.
    pub(super) arrived: Option<Chunk>,
}

pub(super) struct SlotPool(Mutex<State>);

struct State {
    /// `None` until the ring is registered with the GPU.
    lane: Option<Lane>,
    waiting: VecDeque<Full>,
    under_way: VecDeque<Batch>,
    /// Each filler's empty slots: those of others are in other cores' caches. The last one copied is reused first.
    empty: Vec<Vec<usize>>,
}

/// The copies of one call.
struct Batch {
    begun: Instant,
    marks: Marks,
    full: Vec<Full>,
}

impl SlotPool {
    /// A pool for this many fillers with this many slots each; threads that share slots are one filler.
    pub(super) fn new(fillers: usize, slots: usize) -> Self {
        let empty = (0..fillers).map(|filler| (filler * slots..(filler + 1) * slots).collect()).collect();
        Self(Mutex::new(State { lane: None, waiting: VecDeque::new(), under_way: VecDeque::new(), empty }))
    }

    /// Sets the lane for copies.
    pub(super) fn open(&self, lane: Lane) {
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

    /// Waits for an empty slot of this filler; `None` if the load was cancelled.
    pub(super) fn slot(&self, filler: usize, shared: &Shared) -> Result<Option<usize>> {
        self.until(shared, |state| state.empty.get_mut(filler).and_then(Vec::pop))
    }

    pub(super) fn hand_in(&self, full: Full) -> Result<()> {
        let mut state = self.state();
        state.waiting.push_back(full);
        state.attend()
    }

    /// Polls the copies, for a caller that waits for something else.
    pub(super) fn attend(&self) -> Result<()> {
        self.state().attend()
    }

    /// Waits until everything that was handed in has been copied.
    pub(super) fn finish(&self, shared: &Shared) -> Result<()> {
        self.until(shared, |state| (state.waiting.is_empty() && state.under_way.is_empty()).then_some(()))?;
        Ok(())
    }

    /// Polls the copies until `found` returns a value; `None` if the load was cancelled.
    fn until<T>(
        &self,
        shared: &Shared,
        mut answer: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Option<T>> {
        while !shared.is_stopped() {
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Frees copied slots, and submits full ones if they are worth a call or the engine would become idle.
    fn attend(&mut self) -> Result<()> {
        let Some(lane) = &mut self.lane else { return Ok(()) };
        while let Some(batch) = self.under_way.front() {
            if !lane.is_over(&batch.marks)? {
                if batch.begun.elapsed() > LONGEST {
                    let what = "copying what was read to GPU memory".into();
                    return Err(onehop_gpu::Error::Silent { what, seconds: LONGEST.as_secs() }.into());
                }
                break;
            }
            for full in self.under_way.pop_front().into_iter().flat_map(|batch| batch.full) {
                self.empty.get_mut(full.filler).into_iter().for_each(|empty| empty.push(full.slot));
                full.arrived.into_iter().for_each(|chunk| lane.tell(&chunk, full.job.gpus.clone()));
            }
        }
        let most = (BATCH / lane.slot).max(1);
        while self.waiting.len() >= most || (self.under_way.is_empty() && !self.waiting.is_empty()) {
            let full: Vec<Full> = self.waiting.drain(..most.min(self.waiting.len())).collect();
            let begun = Instant::now();
            match lane.copy(full.iter().map(|full| (full.slot, &full.job))) {
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

    use super::*;
    use crate::error::Error;
    use crate::plan::Copy;

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
        slots.open(Lane { slot: 4096, copiers: vec![Box::new(copier)], arrived: vec![arrived] });
        let first = Full { slot: 0, filler: 0, job: part(0), arrived: None };
        assert!(matches!(slots.hand_in(first), Err(Error::Gpu(_))));
        let whole = part(0).chunk;
        let last = Full { slot: 1, filler: 0, job: part(4096), arrived: Some(whole.clone()) };
        slots.hand_in(last).unwrap();
        slots.attend().unwrap();
        assert_eq!(arrivals.try_recv(), Ok(whole));
        assert_eq!(*copied.lock().unwrap(), [0, 4096]);
    }
}
