//! Threads that fill slots hand them in here and get empty ones. Every caller also polls the copies.
//!
//! A copy engine pauses for some microseconds between copies of separate calls, but not between those of one call. So
//! full slots are batched as long as the engine is busy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::worker_pool::{LoadLane, Marks};
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
pub(super) trait SlotCopier {
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

/// A slot is handed in under a lock of its own: threads that fill slots never wait for one that calls the driver.
/// A thread that needs both locks takes the lane's first.
pub(super) struct SlotPool<L: SlotCopier = LoadLane> {
    queue: Mutex<SlotQueue<L::Part>>,
    lane: Mutex<UnderWay<L>>,
    /// A thread found the lane taken when it handed in its part.
    is_missed: AtomicBool,
}

struct SlotQueue<P> {
    waiting: VecDeque<Full<P>>,
    /// Each filler's empty slots: those of others are in other processors' caches. What was copied last is taken first.
    empty: Vec<Vec<usize>>,
}

struct UnderWay<L: SlotCopier> {
    /// None until the GPU knows the ring.
    lane: Option<L>,
    batches: VecDeque<CopyBatch<L::Part>>,
}

/// The copies of one call.
struct CopyBatch<P> {
    begun: Instant,
    marks: Marks,
    full: Vec<Full<P>>,
}

impl<L: SlotCopier> SlotPool<L> {
    /// For so many fillers with so many slots each; fillers that share slots count as one.
    pub(super) fn new(fillers: usize, slots: usize) -> Self {
        let empty = (0..fillers).map(|filler| (filler * slots..(filler + 1) * slots).collect()).collect();
        Self {
            queue: Mutex::new(SlotQueue { waiting: VecDeque::new(), empty }),
            lane: Mutex::new(UnderWay { lane: None, batches: VecDeque::new() }),
            is_missed: AtomicBool::new(false),
        }
    }

    /// Copies go this way from now on.
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

    /// An empty slot of this filler; none when the load was given up.
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
        self.queue().waiting.push_back(full);
        // Once more for what others handed in meanwhile, and no oftener: this thread has files to read.
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

    /// Takes a slot back that was not filled.
    pub(super) fn give_back(&self, filler: usize, slot: usize) {
        self.queue().push(filler, slot);
    }

    /// Polls the copies, unless another thread does.
    pub(super) fn try_attend(&self) -> Result<()> {
        self.attend_if_free().map(|_| ())
    }

    /// False if another thread has the lane.
    fn attend_if_free(&self) -> Result<bool> {
        match self.lane.try_lock() {
            Ok(mut lane) => lane.attend(&self.queue)?,
            Err(TryLockError::Poisoned(lane)) => lane.into_inner().attend(&self.queue)?,
            Err(TryLockError::WouldBlock) => return Ok(false),
        }
        Ok(true)
    }

    /// Waits until everything that was handed in has been copied.
    pub(super) fn finish(&self, is_stopped: impl Fn() -> bool) -> Result<()> {
        while !is_stopped() {
            let mut lane = self.lane();
            lane.attend(&self.queue)?;
            if lane.batches.is_empty() && self.queue().waiting.is_empty() {
                break;
            }
            drop(lane);
            std::thread::sleep(COPY_POLL_INTERVAL);
        }
        Ok(())
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
        self.empty.get_mut(filler).and_then(Vec::pop)
    }

    fn push(&mut self, filler: usize, slot: usize) {
        self.empty.get_mut(filler).into_iter().for_each(|empty| empty.push(slot));
    }

    /// What is worth a call, or keeps the engine from running dry.
    fn next_batch(&mut self, most: usize, is_idle: bool) -> Vec<Full<P>> {
        if self.waiting.len() < most && !is_idle {
            return Vec::new();
        }
        self.waiting.drain(..most.min(self.waiting.len())).collect()
    }
}

impl<L: SlotCopier> UnderWay<L> {
    /// Releases the slots that were copied, and begins the copies that are worth a call.
    fn attend(&mut self, queue: &Mutex<SlotQueue<L::Part>>) -> Result<()> {
        let Some(lane) = &mut self.lane else { return Ok(()) };
        let queue = || queue.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(batch) = self.batches.front() {
            if !lane.is_over(&batch.marks, &batch.full)? {
                if batch.begun.elapsed() > LONGEST {
                    let what = "copying what was read to GPU memory".into();
                    return Err(onehop_gpu::Error::Silent { what, seconds: LONGEST.as_secs() }.into());
                }
                break;
            }
            let full = self.batches.pop_front().map(|batch| batch.full).unwrap_or_default();
            let mut slots = queue();
            full.iter().for_each(|full| slots.push(full.filler, full.slot));
            drop(slots);
            full.into_iter().for_each(|full| lane.tell(full.part));
        }
        let most = (BATCH / lane.slot_bytes()).max(1);
        loop {
            let full = queue().next_batch(most, self.batches.is_empty());
            if full.is_empty() {
                return Ok(());
            }
            let begun = Instant::now();
            match lane.copy(&full) {
                Ok(marks) => self.batches.push_back(CopyBatch { begun, marks, full }),
                Err(error) => {
                    // Other threads may come here before they learn of the failure: a chunk with lost parts must not be
                    // reported as complete.
                    let mut queue = queue();
                    full.into_iter().rev().for_each(|full| queue.waiting.push_front(full));
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use onehop_gpu::{Copier, Emulated, Gpu, Mark, Place, Rows};

    use super::super::worker_pool::{Copiers, LoadPart, ReadJob};
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

    fn part(to: u64) -> ReadJob {
        let copies = vec![Copy { slot: 0, to, row: 4096, rows: 1, step: 4096 }];
        ReadJob { chunk: Chunk { index: 0, file: 0, reads: Vec::new(), copies, direct: None }, gpus: 0..1 }
    }

    #[test]
    fn no_part_of_a_chunk_is_lost_to_a_copy_that_failed() {
        let (slots, copied, (arrived, arrivals)) = (SlotPool::new(1, 2), Arc::default(), channel());
        let gpu = Emulated::new();
        let memory = |place| gpu.alloc(place, 8192).unwrap();
        let copier = gpu.copier(&memory(Place::PinnedHost), &memory(Place::Vram)).unwrap();
        let copier = Refuses { copier, copied: Arc::clone(&copied), first: true };
        slots.open(LoadLane {
            slot: 4096,
            copiers: Copiers::Arenas(vec![Box::new(copier)]),
            arrived: vec![arrived],
        });
        let first = Full { slot: 0, filler: 0, part: LoadPart { job: part(0), arrived: None } };
        assert!(matches!(slots.hand_in(first), Err(Error::Gpu(_))));
        let whole = part(0).chunk;
        let last = LoadPart { job: part(4096), arrived: Some(whole.clone()) };
        let last = Full { slot: 1, filler: 0, part: last };
        slots.hand_in(last).unwrap();
        slots.try_attend().unwrap();
        assert_eq!(arrivals.try_recv(), Ok(whole));
        assert_eq!(*copied.lock().unwrap(), [0, 4096]);
    }

    /// Stays in its first copy until it is let go; every copy is over at once.
    struct Holds {
        begun: std::sync::mpsc::Sender<()>,
        release: std::sync::mpsc::Receiver<()>,
        copied: Arc<Mutex<Vec<usize>>>,
    }

    impl SlotCopier for Holds {
        type Part = ();

        fn slot_bytes(&self) -> usize {
            BATCH
        }

        fn copy(&mut self, full: &[Full<()>]) -> Result<Marks> {
            if self.copied.lock().unwrap().is_empty() {
                self.begun.send(()).unwrap();
                self.release.recv().unwrap();
            }
            self.copied.lock().unwrap().extend(full.iter().map(|full| full.slot));
            Ok(Marks::new())
        }

        fn is_over(&mut self, _: &Marks, _: &[Full<()>]) -> Result<bool> {
            Ok(true)
        }

        fn tell(&self, (): ()) {}
    }

    #[test]
    fn a_thread_that_hands_in_does_not_wait_for_one_that_copies() {
        let (slots, copied) = (SlotPool::<Holds>::new(2, 1), Arc::default());
        let ((begun, begins), (let_go, release)) = (channel(), channel());
        slots.open(Holds { begun, release, copied: Arc::clone(&copied) });
        std::thread::scope(|scope| {
            scope.spawn(|| slots.hand_in(Full { slot: 0, filler: 0, part: () }).unwrap());
            begins.recv().unwrap();
            // This thread would never let go if it waited.
            slots.hand_in(Full { slot: 1, filler: 1, part: () }).unwrap();
            let_go.send(()).unwrap();
        });
        // The thread that copied took the other's part too.
        assert_eq!(*copied.lock().unwrap(), [0, 1]);
    }
}
