//! The driver's own kernel, `run_owner`, on one thread, against the controllers on another.

use std::cell::Cell;

use onehop_controller::layout::{control, flag};
use onehop_controller::{
    Exit, Fault, FaultKind, NULL_LOCAL_WORDS, Pair, SERVE_LOCAL_WORDS, null, sealed, serve,
};
use onehop_proto::kernel::{
    self, ItemOutcome, Job, LOCAL_WORDS, Lanes, OwnerQueue, Taken, WorkItem, run_owner, scratch_bytes,
    scratch_init,
};
use onehop_proto::queue::{Memory, Rings};
use onehop_proto::{GpuAddr, Status};

use crate::memory::{Mem, memory_of};
use crate::rig::{DATA_BUS, Memories, PAGE, Setup};
use crate::warp::LaneThreads;

/// A warp for the driver's kernels, with the machine's clock.
struct Driver {
    mem: Timed,
    local: Vec<Cell<u32>>,
}

/// Memory with a running clock.
struct Timed(Mem, std::time::Instant);

impl Timed {
    fn now(&self) -> u64 {
        self.1.elapsed().as_nanos() as u64
    }
}

impl std::ops::Deref for Timed {
    type Target = Mem;

    fn deref(&self) -> &Mem {
        &self.0
    }
}

memory_of!(
    Driver.mem,
    fn pause(&self) {
        std::thread::yield_now();
    }
);

impl Lanes for Driver {
    fn lanes(&self) -> u32 {
        32
    }

    fn each(&self, f: impl FnMut(u32)) {
        (0..32).for_each(f);
    }

    fn once(&self, mut f: impl FnMut()) {
        f();
    }

    fn local(&self, index: u32) -> u32 {
        self.local[index as usize].get()
    }

    fn set_local(&self, index: u32, value: u32) {
        self.local[index as usize].set(value);
    }

    fn add_local(&self, index: u32, value: u32) -> u32 {
        let old = self.local(index);
        self.set_local(index, old.wrapping_add(value));
        old
    }
}

impl kernel::Warp for Driver {
    fn take(
        &self,
        limit: u32,
        look: impl FnMut(u32) -> ([u32; 2], bool),
        mut act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken {
        let there: Vec<_> =
            (0..limit).map(look).take_while(|(_, yes)| *yes).map(|(words, _)| words).collect();
        let all_well = (0..).zip(&there).fold(true, |well, (place, words)| well & act(place, *words));
        Taken { count: there.len() as u32, last: there.last().map_or(0, |words| words[0]), all_well }
    }

    fn exchange_local(&self, index: u32, old: u32, new: u32) -> u32 {
        let seen = self.local(index);
        if seen == old {
            self.set_local(index, new);
        }
        seen
    }

    fn fetch(&self, to: u32, from: GpuAddr) {
        (to..).zip(self.load_constant(from)).for_each(|(i, word)| self.set_local(i, word));
    }

    fn wait_fetches(&self) {}
}

const SECOND: u64 = 1_000_000_000;

/// Executes work with the driver's kernel; returns its exit and the outcomes.
fn execute(shared: &Memories, works: &[WorkItem], stall: u64) -> (kernel::Exit, Vec<ItemOutcome>) {
    let driver = Driver {
        mem: Timed(shared.mem.clone(), std::time::Instant::now()),
        local: vec![Cell::new(0xdead_beef); LOCAL_WORDS as usize],
    };
    let (mem, pair) = (&shared.mem, shared.pair);
    let count = works.len() as u32;
    let window = pair.sq_entries.min(pair.cq_entries) - 1;
    let rings = Rings {
        sq: pair.sq,
        cq: pair.cq,
        sq_door: pair.sq_door,
        cq_door: pair.cq_door,
        sq_entries: pair.sq_entries,
        cq_entries: pair.cq_entries,
    };
    let queue = OwnerQueue { rings, scratch: mem.alloc(u64::from(scratch_bytes(window))), window };
    scratch_init(&driver, queue.scratch);
    let list = mem.alloc(u64::from(count * WorkItem::BYTES));
    for (i, work) in works.iter().enumerate() {
        mem.put(list.plus(i as u64 * u64::from(WorkItem::BYTES)), &work.words());
    }
    let job = Job {
        works: list,
        outcomes: mem.alloc(u64::from(count * ItemOutcome::BYTES)),
        count,
        nsid: 1,
        retries: 3,
        retry_delay: [0, 1000, 1000, 1000],
        stall,
        deadline: 60 * SECOND,
        poison: mem.alloc(4),
    };
    let exit = run_owner(&driver, || queue, &job, 0, count);
    let outcome =
        |i: u64| ItemOutcome::from_word(mem.load(job.outcomes.plus(i * u64::from(ItemOutcome::BYTES))));
    (kernel::Exit::from_words(exit).unwrap(), (0..u64::from(count)).map(outcome).collect())
}

/// Runs a controller beside `host`, and stops it.
fn with_controller<T>(
    setup: &Setup,
    locals: u32,
    run: fn(&LaneThreads, GpuAddr) -> Exit,
    host: impl FnOnce(&Memories) -> T,
) -> T {
    let shared = Memories::new(setup);
    let (mem, at) = (shared.mem.clone(), shared.at);
    let thread = std::thread::spawn(move || run(&LaneThreads::new(&mem, 32, locals, None), at));
    let result = host(&shared);
    shared.mem.store(shared.pair.control, control::STOP);
    assert_eq!(thread.join().unwrap(), Exit::Stopped);
    result
}

fn setup(flags: u32, faults: Vec<Fault>) -> Setup {
    let pair = Pair { flags, sq_entries: 64, cq_entries: 64, ..Setup::default().pair };
    Setup { pair, faults, ..Setup::default() }
}

/// Reads and writes of one block, each with a page quarter of its own.
fn transfers(count: u64, opcode: u32) -> Vec<WorkItem> {
    let work = |i: u64| WorkItem {
        lba: i,
        prp1: DATA_BUS + i / 8 * PAGE + i % 8 * 512,
        prp2: 0,
        blocks: 1,
        control: opcode,
    };
    (0..count).map(work).collect()
}

#[test]
fn what_the_kernel_writes_it_reads_back() {
    for flags in [0, flag::REVERSE] {
        with_controller(&setup(flags, Vec::new()), SERVE_LOCAL_WORDS, serve::<LaneThreads>, |shared| {
            let (mem, data) = (&shared.mem, shared.data);
            let word = |i: u64| (i as u32).wrapping_mul(0x9e37_79b1);
            (0..500 * 128).for_each(|i| mem.store(data.plus(4 * i), word(i)));
            let done = vec![ItemOutcome::Done(Status::SUCCESS); 500];
            assert_eq!(execute(shared, &transfers(500, 1), SECOND), (kernel::Exit::Finished, done.clone()));
            // New queues for a new launch.
            renew(shared);
            (0..500 * 128).for_each(|i| mem.store(data.plus(4 * i), 0));
            assert_eq!(execute(shared, &transfers(500, 2), SECOND), (kernel::Exit::Finished, done));
            assert!((0..500 * 128).all(|i| mem.load(data.plus(4 * i)) == word(i)));
            assert_eq!(shared.broken(), []);
        });
    }
}

/// Makes the controller restart with empty queues.
fn renew(shared: &Memories) {
    let (mem, pair) = (&shared.mem, shared.pair);
    let until = |value| {
        while shared.report().resting != value {
            std::thread::yield_now();
        }
    };
    mem.store(pair.control, control::REST);
    until(1);
    mem.put(pair.cq, &vec![0; pair.cq_entries as usize * 4]);
    mem.put(pair.sq_door, &[0]);
    mem.put(pair.cq_door, &[0]);
    mem.fence();
    mem.store_release(pair.control, control::RUN);
    until(0);
}

#[test]
fn the_kernel_meets_faults() {
    let retry =
        Fault { every: 7, count: 3, value: Status::INTERNAL_ERROR.0.into(), ..Fault::new(FaultKind::Fail) };
    with_controller(&setup(0, vec![retry]), SERVE_LOCAL_WORDS, serve::<LaneThreads>, |shared| {
        let (exit, outcomes) = execute(shared, &transfers(300, 2), SECOND);
        assert_eq!(exit, kernel::Exit::Finished);
        assert!(outcomes.iter().all(|o| *o == ItemOutcome::Done(Status::SUCCESS)));
    });
    let hard = Status::UNRECOVERED_READ.with_dnr();
    let media = Fault { first: 9, last: 9, value: hard.0.into(), ..Fault::new(FaultKind::Fail) };
    with_controller(&setup(0, vec![media]), SERVE_LOCAL_WORDS, serve::<LaneThreads>, |shared| {
        let (exit, outcomes) = execute(shared, &transfers(20, 2), SECOND);
        assert_eq!(
            (exit, outcomes[9], outcomes[10]),
            (kernel::Exit::Finished, ItemOutcome::Done(hard), ItemOutcome::Done(Status::SUCCESS))
        );
    });
    let lost = Fault { n: 5, ..Fault::new(FaultKind::Lost) };
    with_controller(&setup(0, vec![lost]), SERVE_LOCAL_WORDS, serve::<LaneThreads>, |shared| {
        let (exit, outcomes) = execute(shared, &transfers(300, 2), SECOND / 20);
        assert_eq!(exit, kernel::Exit::TimedOut);
        assert_eq!(outcomes.iter().filter(|o| **o == ItemOutcome::Unknown).count(), 1);
    });
    for kind in [FaultKind::WrongCid, FaultKind::Dup] {
        let fault = Fault { n: 5, ..Fault::new(kind) };
        with_controller(&setup(0, vec![fault]), SERVE_LOCAL_WORDS, serve::<LaneThreads>, |shared| {
            let (exit, _) = execute(shared, &transfers(300, 2), SECOND / 20);
            assert!(matches!(exit, kernel::Exit::UnexpectedCompletion(_)), "{kind:?}: {exit:?}");
        });
    }
    for kind in [FaultKind::StalePhase, FaultKind::Late, FaultKind::SqhdLag, FaultKind::Reorder] {
        // The rig's clock stands still, so a delay of zero is due at once, but not before the next turn.
        let fault = Fault { every: 5, value: 3, ..Fault::new(kind) };
        with_controller(
            &setup(flag::REVERSE, vec![fault]),
            SERVE_LOCAL_WORDS,
            serve::<LaneThreads>,
            |shared| {
                let (exit, outcomes) = execute(shared, &transfers(300, 2), SECOND);
                assert_eq!(exit, kernel::Exit::Finished, "{kind:?}");
                assert!(outcomes.iter().all(|o| *o == ItemOutcome::Done(Status::SUCCESS)), "{kind:?}");
                assert_eq!(shared.broken(), [], "{kind:?}");
            },
        );
    }
    let dead = Fault { n: 5, ..Fault::new(FaultKind::Dead) };
    with_controller(&setup(0, vec![dead]), SERVE_LOCAL_WORDS, serve::<LaneThreads>, |shared| {
        let (exit, outcomes) = execute(shared, &transfers(300, 2), SECOND / 20);
        assert_eq!(exit, kernel::Exit::TimedOut);
        assert_eq!(outcomes.iter().filter(|o| matches!(o, ItemOutcome::Done(_))).count(), 4);
    });
}

#[test]
fn the_kernel_and_the_null_controller() {
    let flags = flag::REVERSE | flag::CHECK_CIDS;
    let works: Vec<_> = transfers(5000, 2).into_iter().map(|work| sealed(work, 1)).collect();
    with_controller(&setup(flags, Vec::new()), NULL_LOCAL_WORDS, null::<LaneThreads>, |shared| {
        let (exit, outcomes) = execute(shared, &works, SECOND);
        assert_eq!(exit, kernel::Exit::Finished);
        assert!(outcomes.iter().all(|o| *o == ItemOutcome::Done(Status::SUCCESS)));
        assert_eq!(shared.broken(), []);
    });
    // An entry that differs from what was sealed comes back as an error.
    let mut spoilt = works;
    spoilt[77].lba ^= 1;
    with_controller(&setup(flags, Vec::new()), NULL_LOCAL_WORDS, null::<LaneThreads>, |shared| {
        let (_, outcomes) = execute(shared, &spoilt, SECOND);
        assert_eq!(outcomes[77], ItemOutcome::Done(Status::INVALID_FIELD.with_dnr()));
        assert_eq!(outcomes.iter().filter(|o| **o == ItemOutcome::Done(Status::SUCCESS)).count(), 4999);
    });
}
