//! Where the threads that fill slots hand them in, and get them back empty. Whoever comes here looks after the copies.
//!
//! A copy engine pauses for some microseconds between copies that come one by one, but not between those of one call. So
//! what is full waits for company as long as the engine has something to do.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::worker_pool::{Job, Lane, Marks, Shared};
use crate::error::Result;
use crate::plan::Chunk;

/// Bytes that are worth a call: as many go nearly as fast as any number.
const BATCH: usize = 16 << 20;
/// How long a thread without a slot sleeps before it looks for copies that are over: a small part of what a batch takes.
const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// How long the copies of one call may take: some thousand times what they do.
const LONGEST: Duration = Duration::from_secs(60);

/// A slot with what was read into it.
pub(super) struct Full {
    pub(super) slot: usize,
    /// Whose slot it is.
    pub(super) filler: usize,
    pub(super) job: Job,
    /// The chunk that has arrived once this is copied: others of its parts went before.
    pub(super) arrived: Option<Chunk>,
}

pub(super) struct SlotPool(Mutex<State>);

struct State {
    /// None until the GPU knows the ring.
    lane: Option<Lane>,
    waiting: VecDeque<Full>,
    under_way: VecDeque<Batch>,
    /// Each filler's empty slots: those of others are in other processors' caches. What was copied last is taken first.
    empty: Vec<Vec<usize>>,
}

/// The copies of one call.
struct Batch {
    begun: Instant,
    marks: Marks,
    full: Vec<Full>,
}

impl SlotPool {
    /// For so many fillers with so many slots each; whoever shares slots is one filler.
    pub(super) fn new(fillers: usize, slots: usize) -> Self {
        let empty = (0..fillers).map(|filler| (filler * slots..(filler + 1) * slots).collect()).collect();
        Self(Mutex::new(State { lane: None, waiting: VecDeque::new(), under_way: VecDeque::new(), empty }))
    }

    /// Copies go this way from now on.
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

    /// An empty slot of this filler; none when the load was given up.
    pub(super) fn slot(&self, filler: usize, shared: &Shared) -> Result<Option<usize>> {
        self.until(shared, |state| state.empty.get_mut(filler).and_then(Vec::pop))
    }

    pub(super) fn hand_in(&self, full: Full) -> Result<()> {
        let mut state = self.state();
        state.waiting.push_back(full);
        state.attend()
    }

    /// Looks after the copies, for one that has something else to wait for.
    pub(super) fn attend(&self) -> Result<()> {
        self.state().attend()
    }

    /// Waits until everything that was handed in has been copied.
    pub(super) fn finish(&self, shared: &Shared) -> Result<()> {
        self.until(shared, |state| (state.waiting.is_empty() && state.under_way.is_empty()).then_some(()))?;
        Ok(())
    }

    /// Looks after the copies until there is an answer; none when the load was given up.
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
    /// Gives back what was copied, and hands over what is full if it is worth a call or the engine would run dry.
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
                    // Others come here before they hear of it: no chunk is told whose first parts were lost.
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

    use super::super::worker_pool::Copiers;
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
        slots.open(Lane {
            slot: 4096,
            copiers: Copiers::Arenas(vec![Box::new(copier)]),
            arrived: vec![arrived],
        });
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
