//! Threads that fill slots hand them in here and get empty ones. Every caller also polls the copies.
//!
//! A copy engine pauses for some microseconds between copies of separate calls, but not between those of one call. So
//! full slots are batched as long as the engine is busy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::slot_shares::SlotShares;
use super::worker_pool::LoadLane;
use crate::error::{Error, Result};

/// Bytes that are worth a call: larger batches are hardly faster.
const BATCH: usize = 16 << 20;
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
        self.queue().waiting.push_back(full);
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

    /// Parts of one group that are worth a call, or keep the group's engine busy.
    fn next_batch(
        &mut self,
        most: usize,
        group: impl Fn(&Full<P>) -> usize,
        is_idle: impl Fn(usize) -> bool,
    ) -> Vec<Full<P>> {
        let count = |of| self.waiting.iter().filter(|full| group(full) == of).count();
        let is_due = |of: &usize| is_idle(*of) || count(*of) >= most;
        let Some(due) = self.waiting.iter().map(&group).find(is_due) else { return Vec::new() };
        let mut batch = Vec::new();
        for full in std::mem::take(&mut self.waiting) {
            if batch.len() < most && group(&full) == due {
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
    fn attend(&mut self, queue: &Mutex<SlotQueue<L::Part>>) -> Result<()> {
        let Some(lane) = &mut self.lane else { return Ok(()) };
        let queue = || queue.lock().unwrap_or_else(PoisonError::into_inner);
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
        let most = (BATCH / lane.slot_bytes()).max(1);
        loop {
            let is_idle = |group| self.batches.iter().all(|batch| batch.group != group);
            let full = queue().next_batch(most, |full| lane.group(&full.part), is_idle);
            let Some(first) = full.first() else { return Ok(()) };
            let (begun, group) = (Instant::now(), lane.group(&first.part));
            match lane.copy(&full) {
                Ok(end) => self.batches.push_back(CopyBatch { begun, group, end, full }),
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

    use super::super::worker_pool::{Copiers, LoadPart};
    use super::*;
    use crate::error::Error;
    use crate::plan::{Arenas, Chunk, Copy};

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

    fn chunk(to: u64) -> Chunk {
        let copies = vec![Copy { slot: 0, to, row: 4096, rows: 1, step: 4096 }];
        Chunk { index: 0, file: 0, reads: Vec::new(), copies, passes: Vec::new(), direct: None }
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
            arenas: Arenas::alone(),
            arrived: vec![(0, arrived)],
            passes: None,
        });
        let first = Full { slot: 0, filler: 0, part: LoadPart { chunk: chunk(0), arrived: None } };
        assert!(matches!(slots.hand_in(first), Err(Error::Gpu(_))));
        let whole = chunk(0);
        let last = LoadPart { chunk: chunk(4096), arrived: Some(whole.clone()) };
        let last = Full { slot: 1, filler: 0, part: last };
        slots.hand_in(last).unwrap();
        slots.try_attend().unwrap();
        assert_eq!(arrivals.try_recv(), Ok(whole));
        assert_eq!(*copied.lock().unwrap(), [0, 4096]);
    }

    /// Stays in its first copy until it is released; every copy is over at once.
    struct Holds {
        begun: std::sync::mpsc::Sender<()>,
        release: std::sync::mpsc::Receiver<()>,
        copied: Arc<Mutex<Vec<usize>>>,
    }

    impl SlotCopier for Holds {
        type Part = ();
        type End = ();

        fn slot_bytes(&self) -> usize {
            BATCH
        }

        fn copy(&mut self, full: &[Full<()>]) -> Result<()> {
            if self.copied.lock().unwrap().is_empty() {
                self.begun.send(()).unwrap();
                self.release.recv().unwrap();
            }
            self.copied.lock().unwrap().extend(full.iter().map(|full| full.slot));
            Ok(())
        }

        fn is_over(&mut self, (): &mut ()) -> Result<bool> {
            Ok(true)
        }

        fn report(&self, (): ()) {}
    }

    #[test]
    fn a_thread_that_hands_in_does_not_wait_for_one_that_copies() {
        let (slots, copied) = (SlotPool::<Holds>::new(2, 1), Arc::default());
        let ((begun, begins), (let_go, release)) = (channel(), channel());
        slots.open(Holds { begun, release, copied: Arc::clone(&copied) });
        std::thread::scope(|scope| {
            scope.spawn(|| slots.hand_in(Full { slot: 0, filler: 0, part: () }).unwrap());
            begins.recv().unwrap();
            // This thread would never release it if it waited.
            slots.hand_in(Full { slot: 1, filler: 1, part: () }).unwrap();
            let_go.send(()).unwrap();
        });
        // The thread that copied took the other's part too.
        assert_eq!(*copied.lock().unwrap(), [0, 1]);
    }

    /// Two GPUs, whose copies the test ends.
    #[derive(Clone, Default)]
    struct Answers(Arc<Mutex<Answered>>);

    #[derive(Default)]
    struct Answered {
        /// Whether each GPU's state is unknown, and whether its copies have ended.
        unknown: [bool; 2],
        over: [bool; 2],
        /// Slots whose copies failed, and parts that were reported.
        failed: Vec<usize>,
        reported: Vec<usize>,
    }

    impl SlotCopier for Answers {
        type Part = usize;
        type End = usize;

        fn slot_bytes(&self) -> usize {
            BATCH / 4
        }

        fn group(&self, gpu: &usize) -> usize {
            *gpu
        }

        fn copy(&mut self, full: &[Full<usize>]) -> Result<usize> {
            assert!(full.iter().all(|one| one.part == full[0].part), "GPUs were mixed");
            Ok(full[0].part)
        }

        fn is_over(&mut self, gpu: &mut usize) -> Result<bool> {
            let answers = self.0.lock().unwrap();
            if answers.unknown[*gpu] {
                return Err(onehop_gpu::Error::Silent { what: "a copy".into(), seconds: 0 }.into());
            }
            Ok(answers.over[*gpu])
        }

        fn fail(&self, _: Error, full: &[Full<usize>]) -> Result<()> {
            self.0.lock().unwrap().failed.extend(full.iter().map(|full| full.slot));
            Ok(())
        }

        fn report(&self, gpu: usize) {
            self.0.lock().unwrap().reported.push(gpu);
        }
    }

    /// All slots that become free, polled until there are as many or long enough for any that should not.
    fn freed(slots: &SlotPool<Answers>, count: usize) -> Vec<usize> {
        let (mut freed, begun) = (Vec::new(), Instant::now());
        while freed.len() < count && begun.elapsed() < LONGEST {
            freed.extend(slots.free(0).unwrap());
        }
        for _ in 0..20 {
            slots.lane().next_look = Instant::now();
            freed.extend(slots.free(0).unwrap());
        }
        freed.sort_unstable();
        freed
    }

    #[test]
    fn a_slot_is_set_aside_once_and_found_once() {
        let (slots, answers) = (SlotPool::new(1, 4), Answers::default());
        slots.open(answers.clone());
        answers.0.lock().unwrap().unknown[0] = true;
        // One GPU does not answer, and the other one's copies are pending meanwhile.
        for gpu in [0, 1, 0, 1] {
            let slot = slots.free(0).unwrap().unwrap();
            slots.hand_in(Full { slot, filler: 0, part: gpu }).unwrap();
        }
        assert!(freed(&slots, 0).is_empty(), "a slot was filled again that a GPU may read");
        let failed = std::mem::take(&mut answers.0.lock().unwrap().failed);
        assert_eq!(failed.len(), 2);
        assert_eq!(answers.0.lock().unwrap().reported, [0, 0], "the other GPU's parts are not over");
        // It responds, and its copies go on.
        answers.0.lock().unwrap().unknown[0] = false;
        assert!(freed(&slots, 0).is_empty());
        answers.0.lock().unwrap().over[0] = true;
        let mut expected = failed;
        expected.sort_unstable();
        assert_eq!(freed(&slots, 2), expected);
        answers.0.lock().unwrap().over[1] = true;
        let others = freed(&slots, 2);
        assert!(others.len() == 2 && others.iter().all(|slot| !expected.contains(slot)), "{others:?}");
        assert_eq!(answers.0.lock().unwrap().reported, [0, 0, 1, 1]);
        assert!(answers.0.lock().unwrap().failed.is_empty());
    }

    #[test]
    fn a_gpu_that_does_not_end_its_copies_holds_up_no_other() {
        let (slots, answers) = (SlotPool::new(1, 4), Answers::default());
        slots.open(answers.clone());
        answers.0.lock().unwrap().over[1] = true;
        let stuck = slots.free(0).unwrap().unwrap();
        slots.hand_in(Full { slot: stuck, filler: 0, part: 0 }).unwrap();
        for round in 1..100 {
            let slot = slots.free(0).unwrap().unwrap();
            assert_ne!(slot, stuck);
            slots.hand_in(Full { slot, filler: 0, part: 1 }).unwrap();
            slots.try_attend().unwrap();
            assert_eq!(answers.0.lock().unwrap().reported, vec![1; round]);
        }
    }

    #[test]
    fn a_slot_that_was_set_aside_is_empty_when_its_copy_has_ended() {
        let (slots, answers) = (SlotPool::new(1, 1), Answers::default());
        slots.open(answers.clone());
        let slot = slots.free(0).unwrap().unwrap();
        slots.set_aside(0, slot, 0);
        assert!(freed(&slots, 0).is_empty());
        answers.0.lock().unwrap().unknown[0] = true;
        assert!(freed(&slots, 0).is_empty());
        *answers.0.lock().unwrap() = Answered { over: [true; 2], ..Answered::default() };
        assert_eq!(freed(&slots, 1), [slot]);
    }
}
