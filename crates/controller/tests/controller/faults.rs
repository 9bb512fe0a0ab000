//! Every fault: what a host sees of it, and when.

use onehop_controller::{Fault, FaultKind, Pair};
use onehop_proto::queue::Memory;
use onehop_proto::{Cqe, Sqe, Status, nvm};

use crate::memory::Mem;
use crate::rig::{DATA_BUS, PAGE, Rig, Setup};

const MS: u64 = 1_000_000;

/// A read of one block into a page of its own.
fn read(lba: u64) -> Sqe {
    nvm::read(1, lba, 1).unwrap().with_prps(DATA_BUS + lba * PAGE, 0)
}

fn rig(faults: &[Fault]) -> Rig {
    let rig = Rig::new(&Setup { faults: faults.to_vec(), ..Setup::default() });
    for lba in 0..64 {
        rig.mem().store(rig.shared.pair.namespace.plus(lba * 512), 0xb10c_0000 + lba as u32);
    }
    rig
}

/// Submits eight reads; returns the identifiers and statuses of those completed at once.
fn eight(rig: &mut Rig) -> Vec<Cqe> {
    for lba in 0..8 {
        rig.stage(read(lba));
    }
    rig.ring();
    rig.run();
    rig.completions()
}

fn cids(found: &[Cqe]) -> Vec<u16> {
    found.iter().map(Cqe::cid).collect()
}

/// The word in the page of a block.
fn got(rig: &Rig, lba: u64) -> u32 {
    let mem: &Mem = rig.mem();
    mem.load(rig.shared.data.plus(lba * PAGE))
}

/// The completions after some time.
fn after(rig: &mut Rig, nanos: u64) -> Vec<Cqe> {
    rig.advance(nanos);
    for _ in 0..3 {
        rig.run();
    }
    rig.completions()
}

#[test]
fn late_and_lost() {
    let late = Fault { n: 3, delay: MS, ..Fault::new(FaultKind::Late) };
    let lost = Fault { n: 5, ..Fault::new(FaultKind::Lost) };
    let mut rig = rig(&[late, lost]);
    assert_eq!(cids(&eight(&mut rig)), [0, 1, 3, 5, 6, 7]);
    assert_eq!((got(&rig, 1), got(&rig, 2), got(&rig, 4)), (0xb10c_0001, 0, 0));
    assert_eq!(after(&mut rig, MS - 1), []);
    assert_eq!(cids(&after(&mut rig, 1)), [2]);
    assert_eq!((got(&rig, 2), got(&rig, 4)), (0xb10c_0002, 0));
    assert_eq!(after(&mut rig, 1000 * MS), []);
    let (_, shared) = rig.stop();
    assert_eq!((shared.report().fired, shared.broken()), (2, vec![]));
}

#[test]
fn failures() {
    let status = Status::INTERNAL_ERROR.with_crd(2);
    let once = Fault { n: 2, count: 1, value: status.0.into(), ..Fault::new(FaultKind::Fail) };
    let hard = Status::UNRECOVERED_READ.with_dnr();
    let media =
        Fault { first: 4, last: 5, value: hard.0.into(), opcodes: 1 << 2, ..Fault::new(FaultKind::Fail) };
    let mut rig = rig(&[once, media]);
    let found = eight(&mut rig);
    let statuses: Vec<_> = found.iter().map(Cqe::status).collect();
    let ok = Status::SUCCESS;
    assert_eq!(statuses, [ok, status, ok, ok, hard, hard, ok, ok]);
    assert_eq!((got(&rig, 1), got(&rig, 4), got(&rig, 6)), (0, 0, 0xb10c_0006));
    // The retry works; a write of the bad block does.
    assert_eq!(rig.one(read(1)), ok);
    assert_eq!(rig.one(nvm::write_zeroes(1, 4, 1).unwrap()), ok);
    assert_eq!(rig.one(read(5)), hard);
    assert_eq!(rig.stop().1.report().errors, 4);
}

#[test]
fn every_nth_of_some_opcodes() {
    let fault = Fault { every: 3, count: 2, opcodes: 1 << 2, value: 6, ..Fault::new(FaultKind::Fail) };
    let mut rig = rig(&[fault]);
    let mut failed = Vec::new();
    for i in 0..20 {
        if i % 2 == 0 {
            assert_eq!(rig.one(nvm::flush(1)), Status::SUCCESS);
        } else if !rig.one(read(i)).is_ok() {
            failed.push(i);
        }
    }
    assert_eq!(failed, [5, 11]);
}

#[test]
fn held_completions() {
    let hold = Fault { n: 2, value: 3, delay: MS, ..Fault::new(FaultKind::Reorder) };
    let mut held = rig(&[hold]);
    assert_eq!(cids(&eight(&mut held)), [0, 2, 3, 4, 5, 6, 7, 1]);
    // The others never come, so its time does.
    let mut waits = rig(&[Fault { value: 100, ..hold }]);
    assert_eq!(eight(&mut waits).len(), 7);
    assert_eq!(got(&waits, 1), 0xb10c_0001, "it was executed");
    assert_eq!(after(&mut waits, MS - 1), []);
    assert_eq!(cids(&after(&mut waits, 1)), [1]);
}

#[test]
fn torn_reads() {
    let torn = Fault { n: 2, delay: MS, ..Fault::new(FaultKind::Torn) };
    let mut rig = rig(&[torn]);
    assert_eq!(cids(&eight(&mut rig)), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((got(&rig, 0), got(&rig, 1)), (0xb10c_0000, 0));
    assert_eq!(after(&mut rig, MS), []);
    assert_eq!(got(&rig, 1), 0xb10c_0001);
    // Only reads can be torn.
    assert_eq!(rig.one(nvm::flush(1)), Status::SUCCESS);
    assert_eq!(rig.stop().1.report().completions, 9);
}

#[test]
fn strange_completions() {
    let wrong = Fault { n: 2, ..Fault::new(FaultKind::WrongCid) };
    let dup = Fault { n: 4, ..Fault::new(FaultKind::Dup) };
    let mut rig = rig(&[wrong, dup]);
    let found = cids(&eight(&mut rig));
    assert_eq!(found.len(), 9);
    // The host's next command may have any identifier near its last; one of those would collide.
    assert!(found[1].abs_diff(1) > 0x4000, "identifier {} is near those in use", found[1]);
    assert_eq!([&found[..1], &found[2..]].concat(), [0, 2, 3, 3, 4, 5, 6, 7]);
    // The command with the wrong identifier is still outstanding.
    rig.stage_as(read(1), 1);
    rig.ring();
    rig.run();
    assert_eq!(rig.completions()[0].status(), Status::CID_CONFLICT.with_dnr());
}

#[test]
fn a_second_completion_takes_no_reserved_room() {
    let dup = Fault { n: 2, ..Fault::new(FaultKind::Dup) };
    let mut rig = rig(&[dup]);
    for lba in 0..15 {
        rig.stage(read(lba));
    }
    rig.ring();
    rig.run();
    // Fifteen fit, including the duplicate of the second command; the last command waits.
    let first = cids(&rig.completions());
    assert_eq!(first, [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
    rig.run();
    assert_eq!(cids(&rig.completions()), [14]);
}

#[test]
fn completions_for_others() {
    let other = Fault { n: 2, ..Fault::new(FaultKind::OtherCid) };
    let mut both = rig(&[other]);
    let found = cids(&eight(&mut both));
    assert_eq!((found.len(), found[0]), (8, 0));
    assert!((2..8).contains(&found[1]), "identifier {} is not another's", found[1]);
    assert_eq!(found[2..], [2, 3, 4, 5, 6, 7]);
    // Without another command, the identifier is an unused one.
    let mut alone = rig(&[Fault { n: 1, ..other }]);
    alone.stage_as(read(1), 7);
    alone.ring();
    alone.run();
    assert_ne!(alone.completions()[0].cid(), 7);
}

#[test]
fn stale_phases() {
    let stale = Fault { n: 3, delay: MS, ..Fault::new(FaultKind::StalePhase) };
    let mut rig = rig(&[stale]);
    // The host stops at the entry with the old phase, and finds the others behind it later.
    assert_eq!(cids(&eight(&mut rig)), [0, 1]);
    assert_eq!(after(&mut rig, MS - 1), []);
    assert_eq!(cids(&after(&mut rig, 1)), [2, 3, 4, 5, 6, 7]);
    assert_eq!(rig.one(read(9)), Status::SUCCESS);
}

#[test]
fn lagging_heads() {
    let lag = Fault { n: 2, value: 4, ..Fault::new(FaultKind::SqhdLag) };
    let mut rig = rig(&[lag]);
    for (lba, head) in [(0, 1), (1, 1), (2, 3)] {
        rig.stage(read(lba));
        rig.ring();
        rig.run();
        assert_eq!(rig.completions()[0].sqhd(), head);
    }
}

#[test]
fn death() {
    let dead = Fault { n: 4, ..Fault::new(FaultKind::Dead) };
    let mut rig = rig(&[dead]);
    assert_eq!(cids(&eight(&mut rig)), [0, 1, 2]);
    assert_eq!(after(&mut rig, 1000 * MS), []);
    // New queues revive it; the fault keeps counting, and its fourth command is over.
    rig.renew();
    for lba in 0..8 {
        assert_eq!(rig.one(read(lba)), Status::SUCCESS);
    }
    assert_eq!(rig.stop().1.report().fired, 1);
}

#[test]
fn without_room_to_wait_nothing_waits() {
    let late = Fault { delay: MS, ..Fault::new(FaultKind::Late) };
    let pair = Pair { parked_count: 2, ..Setup::default().pair };
    let mut rig = Rig::new(&Setup { pair, faults: vec![late], ..Setup::default() });
    assert_eq!(cids(&eight(&mut rig)), [2, 3, 4, 5, 6, 7]);
    assert_eq!(cids(&after(&mut rig, MS)), [0, 1]);
    assert_eq!(rig.stop().1.report().crowded, 6);
}
