//! The null controller: every command answered once, in the requested order; broken entries detected.

use onehop_controller::layout::flag;
use onehop_controller::{NULL_FAR_LOCAL_WORDS, NULL_LOCAL_WORDS, Pair, Rule, null, null_far, seal, sealed};
use onehop_proto::kernel::WorkItem;
use onehop_proto::{Sqe, Status};

use crate::rig::{Rig, Setup};
use crate::rng::Rng;
use crate::warp::LaneThreads;

fn rig(pair: Pair, lanes: u32) -> Rig {
    Rig::with(&Setup { pair, lanes, ..Setup::default() }, NULL_LOCAL_WORDS, null::<LaneThreads>)
}

/// The variant for queues behind a bus.
fn far(pair: Pair, lanes: u32) -> Rig {
    Rig::with(&Setup { pair, lanes, ..Setup::default() }, NULL_FAR_LOCAL_WORDS, null_far::<LaneThreads>)
}

type MakeRig = fn(Pair, u32) -> Rig;

fn entry(i: u64) -> Sqe {
    let work = WorkItem { lba: i * 8, prp1: 0x40_0000_0000 + (i << 12), prp2: 0, blocks: 8, control: 2 };
    sealed(work, 1).command(1)
}

#[test]
fn every_command_is_answered_once() {
    let manners: [(u32, u32, MakeRig); 7] = [
        (0, 32, rig),
        (flag::REVERSE, 32, rig),
        (flag::REVERSE | flag::CHECK_CIDS, 32, rig),
        (flag::FENCE, 3, rig),
        (0, 32, far),
        (flag::REVERSE | flag::CHECK_CIDS, 32, far),
        (0, 3, far),
    ];
    for (flags, lanes, make) in manners {
        let pair = Pair { flags, sq_entries: 257, cq_entries: 200, ..Setup::default().pair };
        let mut rig = make(pair, lanes);
        let mut rng = Rng(u64::from(flags) + 1);
        let (mut sent, mut in_flight) = (0, Vec::new());
        while sent < 5000 {
            let count = 1 + rng.below(199);
            for i in 0..count {
                in_flight.push(rig.stage(entry(sent + i)));
            }
            sent += count;
            rig.ring();
            let mut found = Vec::new();
            while found.len() < count as usize {
                rig.run();
                let now = rig.completions();
                assert!(now.iter().all(|cqe| cqe.status().is_ok()));
                found.extend(now.iter().map(|cqe| cqe.cid()));
            }
            let most = (4 * lanes).min(128) as usize;
            if flags & flag::REVERSE != 0 && count as usize <= most {
                let backwards: Vec<_> = in_flight.iter().rev().copied().collect();
                assert_eq!(found, backwards);
            }
            found.sort_unstable();
            in_flight.sort_unstable();
            assert_eq!(found, in_flight);
            in_flight.clear();
        }
        let (_, shared) = rig.stop();
        assert_eq!((shared.report().commands, shared.broken()), (sent, vec![]), "flags {flags}");
    }
}

#[test]
fn a_small_completion_queue_is_never_overrun() {
    let pair = Pair { sq_entries: 128, cq_entries: 5, ..Setup::default().pair };
    let mut rig = rig(pair, 32);
    for i in 0..100 {
        rig.stage(entry(i));
    }
    rig.ring();
    let mut found = Vec::new();
    while found.len() < 100 {
        rig.run();
        let now = rig.completions();
        assert!(now.len() <= 4);
        found.extend(now.iter().map(|cqe| cqe.cid()));
    }
    assert_eq!(found, (0..100).collect::<Vec<_>>());
    assert_eq!(rig.stop().1.broken(), []);
}

#[test]
fn broken_entries_and_identifiers_are_found() {
    finds_what_is_broken(rig);
    finds_what_is_broken(far);
}

fn finds_what_is_broken(make: MakeRig) {
    let pair = Pair { flags: flag::CHECK_CIDS, sq_entries: 64, cq_entries: 64, ..Setup::default().pair };
    let mut rig = make(pair, 32);
    for i in 0..40 {
        let mut sqe = entry(i);
        if i == 7 {
            sqe.dw[10] ^= 1;
        }
        rig.stage_as(sqe, if i == 20 { 3 } else { i as u16 });
    }
    // An identifier that shares another's slot in the table, but is unique.
    rig.stage_as(entry(99), 1024 + 30);
    rig.ring();
    rig.run();
    let found = rig.completions();
    assert_eq!(found.len(), 41);
    for (i, cqe) in found.iter().enumerate() {
        let expected = match i {
            7 => Status::INVALID_FIELD.with_dnr(),
            3 if !cqe.status().is_ok() => Status::CID_CONFLICT.with_dnr(),
            20 if !cqe.status().is_ok() => Status::CID_CONFLICT.with_dnr(),
            _ => Status::SUCCESS,
        };
        assert_eq!(cqe.status(), expected, "command {i}");
    }
    let (_, shared) = rig.stop();
    let mut seen: Vec<_> = shared.violations().iter().map(|v| (v.rule().unwrap(), v.cid)).collect();
    seen.sort_by_key(|(_, cid)| *cid);
    assert_eq!(seen, [(Rule::CidInUse, 3), (Rule::Seal, 7)]);
    assert_eq!(shared.report().unchecked, 1);
}

#[test]
fn it_feeds_itself() {
    let pair = Pair {
        flags: flag::FEED | flag::REVERSE,
        sq_entries: 1024,
        cq_entries: 1024,
        ..Setup::default().pair
    };
    let rig = rig(pair, 32);
    for i in 0..1024u64 {
        let at = rig.shared.pair.sq.plus(i * 64);
        rig.mem().put(at, &entry(i).with_cid(i as u16).dw);
    }
    let (mem, control) = (rig.mem().clone(), rig.shared.pair.control);
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        onehop_proto::queue::Memory::store(&mem, control, 1);
    });
    rig.run();
    stopper.join().unwrap();
    let report = rig.shared.report();
    assert!(report.commands > 1000 && report.violations == 0, "{report:?}");
    assert_eq!(report.commands, report.turns * 128);
    assert_eq!(report.idle, 0);
}

#[test]
fn the_seal_matches_the_documentation() {
    // Fixed, because other programs make entries as well: the same command always has the same number.
    let sqe = entry(1).with_cid(77);
    assert_eq!(sqe.prp2(), seal(&sqe));
    assert_eq!(sqe.prp2() as u32, seal(&Sqe { dw: sqe.dw }.with_cid(0)) as u32);
    assert_eq!((sqe.prp2() >> 32) as u32, (sqe.prp2() as u32).rotate_left(16) ^ 0x6f6e_6568);
}
