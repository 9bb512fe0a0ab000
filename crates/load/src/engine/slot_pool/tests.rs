//! Tests of the pool.

use std::sync::Arc;
use std::sync::mpsc::channel;

use onehop_gpu::{Copier, Emulated, Gpu, Mark, Place, Rows};

use super::*;
use crate::engine::worker_pool::{Copiers, LoadPart};
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

    fn groups(&self) -> usize {
        2
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
    // Both are in flight, and no more of this GPU's may begin.
    let stuck = [0, 0].map(|gpu| {
        let slot = slots.free(0).unwrap().unwrap();
        slots.hand_in(Full { slot, filler: 0, part: gpu }).unwrap();
        slot
    });
    for round in 1..100 {
        let slot = slots.free(0).unwrap().unwrap();
        assert!(!stuck.contains(&slot));
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

/// Parts of two groups, in the order of `waiting`, as group and bytes.
fn batch(waiting: &[(usize, usize)], most: usize, least: [usize; 2]) -> Vec<(usize, usize)> {
    let full = |(slot, part): (usize, &(usize, usize))| Full { slot, filler: 0, part: *part };
    let waiting = waiting.iter().enumerate().map(full).collect();
    let mut queue = SlotQueue { waiting, empty: Vec::new(), shares: None };
    let before = queue.waiting.len();
    let batch = queue.next_batch(most, |full| full.part, |group| least[group]);
    assert_eq!(batch.len() + queue.waiting.len(), before, "a part was lost");
    batch.into_iter().map(|full| full.part).collect()
}

#[test]
fn a_batch_is_of_one_group_and_as_long_as_is_worth_a_call() {
    let waiting = [(0, 10), (1, 30), (0, 10), (0, 10), (1, 30)];
    assert_eq!(batch(&waiting, 100, [0, 0]), [(0, 10); 3]);
    assert_eq!(batch(&waiting, 15, [0, 0]), [(0, 10); 2]);
    // Group 0 has copies in flight and little to add.
    assert_eq!(batch(&waiting, 100, [31, 0]), [(1, 30); 2]);
    assert_eq!(batch(&waiting, 100, [30, 61]), [(0, 10); 3]);
    assert_eq!(batch(&waiting, 100, [31, 61]), []);
}
