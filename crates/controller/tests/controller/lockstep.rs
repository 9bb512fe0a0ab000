//! Lanes that are threads: only barriers keep them in step. So a lane that disagrees, or that overwrites what a slower
//! one has yet to read, fails or hangs here as it would on a GPU.

use std::sync::Arc;

use onehop_controller::layout::{Litmus, Tally, control, flag};
use onehop_controller::litmus::{LITMUS_LOCAL_WORDS, complete, consume, fetch, submit};
use onehop_controller::{
    Exit, NULL_FAR_LOCAL_WORDS, NULL_LOCAL_WORDS, Pair, SERVE_LOCAL_WORDS, null, null_far, sealed, serve,
};
use onehop_proto::kernel::WorkItem;
use onehop_proto::queue::{Event, Memory, Owner, Rings, Slot};
use onehop_proto::{GpuAddr, Sqe, nvm};

use crate::memory::Mem;
use crate::rig::{DATA_BUS, Memories, PAGE, Setup};
use crate::warp::{Lane, Lockstep};

const LANES: u32 = 4;

type Run = fn(&Lane, GpuAddr) -> Exit;

/// Starts a warp whose lanes are threads; returns a closure that joins them and compares their exits.
fn start(mem: &Mem, at: GpuAddr, locals: u32, run: Run) -> impl FnOnce() -> Exit {
    let warp = Lockstep::new(LANES, locals);
    let lanes: Vec<_> = (0..LANES)
        .map(|lane| {
            let (mem, warp) = (mem.clone(), Arc::clone(&warp));
            std::thread::spawn(move || run(&Lane::new(&mem, &warp, lane), at))
        })
        .collect();
    move || {
        let exits: Vec<_> = lanes.into_iter().map(|lane| lane.join().unwrap()).collect();
        assert!(exits.iter().all(|exit| *exit == exits[0]), "{exits:?}");
        exits[0]
    }
}

/// Has a controller execute commands, several at once, and checks each answer.
fn drive(pair: Pair, locals: u32, run: Run, count: u32, command: impl Fn(u32) -> Sqe) -> Memories {
    let shared = Memories::new(&Setup { pair, ..Setup::default() });
    let (mem, pair) = (&shared.mem, shared.pair);
    let end = start(mem, shared.at, locals, run);
    let rings = Rings {
        sq: pair.sq,
        cq: pair.cq,
        sq_door: pair.sq_door,
        cq_door: pair.cq_door,
        sq_entries: pair.sq_entries,
        cq_entries: pair.cq_entries,
    };
    let mut owner = Owner::<Mem, _>::new(rings, vec![Slot::default(); 9]);
    let (mut sent, mut done) = (0, 0);
    while done < count {
        while sent < count && owner.stage(mem, &command(sent), sent).is_ok() {
            sent += 1;
        }
        owner.publish(mem);
        match owner.poll(mem) {
            Some(Event::Done { cqe, .. }) => {
                assert!(cqe.status().is_ok(), "{:?}", cqe.status());
                done += 1;
            }
            Some(Event::UnexpectedCompletion(cqe)) => panic!("{cqe:?} belongs to no command"),
            None => std::thread::yield_now(),
        }
    }
    mem.store(pair.control, control::STOP);
    assert_eq!(end(), Exit::Stopped);
    let report = shared.report();
    assert_eq!((report.commands, report.completions), (count.into(), count.into()));
    assert_eq!(shared.broken(), []);
    shared
}

#[test]
fn lanes_of_the_model_agree() {
    for flags in [0, flag::REVERSE] {
        let pair = Pair { flags, ..Setup::default().pair };
        // A page is written, read elsewhere, compared, and so on, all in flight at once on blocks of their own.
        let shared = drive(pair, SERVE_LOCAL_WORDS, serve::<Lane>, 300, |i| {
            let (blocks, bus) = (u64::from(i % 32) * 16, DATA_BUS + u64::from(i % 32) * 2 * PAGE);
            let sqe = match i / 32 % 3 {
                0 => nvm::write(1, blocks, 16),
                1 => nvm::compare(1, blocks, 16),
                _ => nvm::read(1, blocks, 16),
            };
            sqe.unwrap().with_prps(bus, bus + PAGE)
        });
        assert_eq!(shared.report().errors, 0);
    }
}

#[test]
fn lanes_of_the_null_controller_agree() {
    let command = |i: u32| {
        let work = WorkItem { lba: u64::from(i), prp1: 4096, prp2: 0, blocks: 1, control: 2 };
        sealed(work, 1).command(1)
    };
    for flags in [0, flag::REVERSE | flag::CHECK_CIDS | flag::FENCE] {
        let pair = Pair { flags, ..Setup::default().pair };
        drive(pair, NULL_LOCAL_WORDS, null::<Lane>, 2000, command);
        drive(pair, NULL_FAR_LOCAL_WORDS, null_far::<Lane>, 2000, command);
    }
}

#[test]
fn lanes_of_the_experiments_agree() {
    let sides: [(Run, Run); 2] = [(submit, fetch), (complete, consume)];
    for (writer, reader) in sides {
        let mem = Mem::new(1 << 20);
        let setup = Litmus {
            payload: mem.alloc(16 * 64),
            flags: mem.alloc(16 * 16),
            taken: mem.alloc(4),
            control: mem.alloc(4),
            limit: u64::MAX,
            slots: 16,
            words: 16,
            batch: 4,
            messages: 2000,
            ..Litmus::default()
        };
        let side = |run: Run, checks| {
            let side = Litmus { tally: mem.alloc(u64::from(Tally::BYTES)), checks, ..setup };
            let at = mem.alloc(u64::from(Litmus::BYTES));
            mem.put(at, &side.words());
            (start(&mem, at, LITMUS_LOCAL_WORDS, run), side.tally)
        };
        let (write, read) = (side(writer, 0), side(reader, 1));
        assert_eq!((write.0(), read.0()), (Exit::Stopped, Exit::Stopped));
        let tally = Tally::from_words(&mem.take(read.1));
        assert_eq!((tally.good, tally.messages), (2000, 2000), "{tally:?}");
    }
}
