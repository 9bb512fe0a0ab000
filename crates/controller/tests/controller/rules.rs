//! Every rule broken once: the status, and the reported violation.

use onehop_controller::layout::KEPT;
use onehop_controller::{NULL_LOCAL_WORDS, Pair, Rule, null};
use onehop_proto::queue::Memory;
use onehop_proto::{Sqe, Status, nvm};

use crate::rig::{DATA_BUS, LIST_BUS, PAGE, Rig, Setup};
use crate::rng::Rng;
use crate::warp::LaneThreads;

fn read() -> Sqe {
    nvm::read(1, 0, 1).unwrap().with_prps(DATA_BUS, 0)
}

/// Submits one command to a fresh controller; returns the status, and the reported rule, identifier and detail.
fn answer(sqe: Sqe) -> (Status, Vec<(Rule, u32, u64)>) {
    let mut rig = Rig::new(&Setup::default());
    let status = rig.one(sqe);
    // After a violation the next command works.
    assert_eq!(rig.one(read()), Status::SUCCESS);
    let (_, shared) = rig.stop();
    assert_eq!(shared.report().errors, u64::from(!status.is_ok()));
    let seen = shared.violations();
    (status, seen.iter().map(|v| (v.rule().unwrap(), v.cid, v.detail)).collect())
}

fn refused(status: Status, rule: Rule, detail: u64) -> (Status, Vec<(Rule, u32, u64)>) {
    (status, vec![(rule, 0, detail)])
}

#[test]
fn commands() {
    let field = Status::INVALID_FIELD.with_dnr();
    let offset = Status::INVALID_PRP_OFFSET.with_dnr();
    let unreachable = Status::DATA_TRANSFER_ERROR;
    assert_eq!(answer(read()), (Status::SUCCESS, vec![]));
    assert_eq!(answer(nvm::read(1, 512, 1).unwrap()), (Status::LBA_OUT_OF_RANGE.with_dnr(), vec![]));
    assert_eq!(answer(nvm::read(1, 511, 2).unwrap()), (Status::LBA_OUT_OF_RANGE.with_dnr(), vec![]));
    assert_eq!(answer(nvm::read(7, 0, 1).unwrap()), (Status::INVALID_NAMESPACE.with_dnr(), vec![]));
    assert_eq!(answer(nvm::flush(7)), (Status::INVALID_NAMESPACE.with_dnr(), vec![]));
    let opcode = Status::INVALID_OPCODE.with_dnr();
    assert_eq!(answer(Sqe::new(0x0c, 1)), refused(opcode, Rule::Opcode, 0x0c));
    let reserved = refused(field, Rule::ReservedField, 13 | 1 << 63);
    assert_eq!(answer(read().with_dw(13, 1 << 31)), reserved);
    assert_eq!(answer(read().with_dw(0, 0x4002)), refused(field, Rule::Psdt, 0x4002));
    let long = nvm::read(1, 0, 512).unwrap().with_prps(DATA_BUS, LIST_BUS);
    let setup = Setup { pair: Pair { max_bytes: 65536, ..Setup::default().pair }, ..Setup::default() };
    let mut rig = Rig::new(&setup);
    assert_eq!((rig.one(long), rig.shared.broken()), (field, vec![Rule::Mdts]));

    assert_eq!(answer(read().with_prps(DATA_BUS + 2, 0)), refused(offset, Rule::Prp1, DATA_BUS + 2));
    let two = nvm::read(1, 0, 16).unwrap();
    let prp2 = DATA_BUS + PAGE + 8;
    assert_eq!(answer(two.with_prps(DATA_BUS, prp2)), refused(offset, Rule::Prp2, prp2));
    let three = nvm::read(1, 0, 24).unwrap();
    assert_eq!(answer(three.with_prps(DATA_BUS, LIST_BUS + 4)), refused(offset, Rule::Prp2, LIST_BUS + 4));
    for bus in [0, DATA_BUS - 4, DATA_BUS + 64 * PAGE, LIST_BUS - PAGE, LIST_BUS + 4 * PAGE, u64::MAX - 3] {
        let unmapped = refused(unreachable, Rule::DmaUnmapped, bus);
        assert_eq!(answer(read().with_prps(bus, 0)), unmapped, "{bus:#x}");
    }
    let nowhere = refused(unreachable, Rule::DmaUnmapped, 8 * PAGE);
    assert_eq!(answer(three.with_prps(DATA_BUS, 8 * PAGE)), nowhere);
    let list = LIST_BUS + 4 * PAGE - 8;
    // The list is the last mapped qword: a zero, as an entry of it is unmapped; as a chain pointer too.
    assert_eq!(answer(three.with_prps(DATA_BUS, list)), refused(unreachable, Rule::DmaUnmapped, 0));
}

#[test]
fn entries_of_lists() {
    let three = nvm::read(1, 0, 24).unwrap();
    let bad = DATA_BUS + PAGE + 512;
    for index in [0, 1] {
        let mut rig = Rig::new(&Setup::default());
        let (mem, lists) = (rig.mem().clone(), rig.shared.lists);
        for i in 0..2 {
            let entry = if i == index { bad } else { DATA_BUS + 2 * PAGE };
            mem.put(lists.plus(8 * i), &[entry as u32, (entry >> 32) as u32]);
        }
        assert_eq!(rig.one(three.with_prps(DATA_BUS, LIST_BUS)), Status::INVALID_PRP_OFFSET.with_dnr());
        let seen = rig.shared.violations();
        assert_eq!((seen[0].rule(), seen[0].detail), (Some(Rule::PrpList), bad));
    }
    // A data range that ends within a page.
    let mut rig = Rig::new(&Setup::default());
    let (mem, pair) = (rig.mem().clone(), rig.shared.pair);
    mem.store(pair.ranges.plus(8), (PAGE + 512) as u32);
    let two = nvm::read(1, 0, 16).unwrap().with_prps(DATA_BUS, DATA_BUS + PAGE);
    assert_eq!(rig.one(two), Status::DATA_TRANSFER_ERROR);
    assert_eq!(rig.shared.broken(), [Rule::DmaPastEnd]);
}

#[test]
fn identifiers() {
    let fault = onehop_controller::Fault {
        n: 1,
        ..onehop_controller::Fault::new(onehop_controller::FaultKind::Lost)
    };
    let mut rig = Rig::new(&Setup { faults: vec![fault], ..Setup::default() });
    rig.stage_as(read(), 9);
    rig.stage_as(read(), 9);
    rig.stage_as(read(), 0xffff);
    rig.ring();
    rig.run();
    let found: Vec<_> = rig.completions().iter().map(|c| (c.cid(), c.status())).collect();
    assert_eq!(found, [(9, Status::CID_CONFLICT.with_dnr()), (0xffff, Status::SUCCESS)]);
    // The lost one is still outstanding.
    rig.stage_as(read(), 9);
    rig.ring();
    rig.run();
    assert_eq!(rig.completions()[0].status(), Status::CID_CONFLICT.with_dnr());
    let (_, shared) = rig.stop();
    assert_eq!(shared.broken(), [Rule::CidInUse, Rule::CidReserved, Rule::CidInUse]);
}

/// A controller of either kind.
fn each_kind(test: impl Fn(Rig)) {
    test(Rig::new(&Setup::default()));
    test(Rig::with(&Setup::default(), NULL_LOCAL_WORDS, null::<LaneThreads>));
}

#[test]
fn doorbells_out_of_range() {
    each_kind(|rig| {
        let pair = rig.shared.pair;
        rig.mem().ring(pair.sq_door, 16);
        for _ in 0..3 {
            rig.run();
        }
        rig.mem().ring(pair.sq_door, 0);
        rig.run();
        let (_, shared) = rig.stop();
        let seen: Vec<_> = shared.violations().iter().map(|v| (v.rule(), v.detail)).collect();
        assert_eq!(seen, [(Some(Rule::DoorbellValue), 16)]);
        assert_eq!(shared.report().commands, 0);
    });
}

#[test]
fn completion_doorbells() {
    let mut rig = Rig::new(&Setup::default());
    assert_eq!(rig.one(read()), Status::SUCCESS);
    rig.run();
    for (head, rule) in [(99, Rule::DoorbellValue), (2, Rule::CqHeadPastPosted), (0, Rule::CqHeadPastPosted)]
    {
        rig.mem().ring(rig.shared.pair.cq_door, head);
        rig.run();
        let last = rig.shared.violations().pop().unwrap();
        assert_eq!((last.rule(), last.detail), (Some(rule), u64::from(head)));
    }
    rig.mem().ring(rig.shared.pair.cq_door, 1);
    assert_eq!(rig.one(read()), Status::SUCCESS);
    assert_eq!(rig.stop().1.report().violations, 3);
}

#[test]
fn more_than_fits_into_the_submission_queue() {
    // SQHD lags: the host does not know that the slots are free, so it may not use them.
    let fault = onehop_controller::Fault {
        value: 99,
        ..onehop_controller::Fault::new(onehop_controller::FaultKind::SqhdLag)
    };
    let mut rig = Rig::new(&Setup { faults: vec![fault], ..Setup::default() });
    for _ in 0..15 {
        rig.stage(read());
    }
    rig.ring();
    rig.run();
    let found = rig.completions();
    assert_eq!((found.len(), found[14].sqhd()), (15, 0));
    rig.stage(read());
    rig.ring();
    rig.run();
    assert_eq!((rig.completions().len(), rig.shared.broken()), (0, vec![Rule::SqOverrun]));
}

#[test]
fn more_than_fits_into_the_completion_queue() {
    let pair = Pair { cq_entries: 4, ..Setup::default().pair };
    let mut rig = Rig::new(&Setup { pair, ..Setup::default() });
    for _ in 0..10 {
        rig.stage(read());
    }
    rig.ring();
    let mut found = Vec::new();
    for _ in 0..10 {
        for _ in 0..3 {
            rig.run();
        }
        let now = rig.take();
        assert!(now.len() <= 3, "an unconsumed entry was overwritten");
        found.extend(now.iter().map(|c| c.cid()));
        rig.mem().ring(rig.shared.pair.cq_door, found.len() as u32 % 4);
    }
    assert_eq!(found, (0..10).collect::<Vec<_>>());
    let (_, shared) = rig.stop();
    assert_eq!(shared.report().violations, 3, "{:?}", shared.violations());
    assert!(shared.broken().iter().all(|rule| *rule == Rule::CqOverrun));
}

#[test]
fn the_list_of_violations_is_bounded() {
    let mut rig = Rig::new(&Setup::default());
    for _ in 0..2 * KEPT {
        rig.one(Sqe::new(0x7f, 1));
    }
    let (_, shared) = rig.stop();
    assert_eq!((shared.report().violations, shared.violations().len() as u32), (2 * KEPT, KEPT));
}

#[test]
fn random_commands_access_only_allocated_memory() {
    // The arena refuses every access to unallocated memory, so such a store panics in the controller.
    let mut rng = Rng(77);
    let mut answered = 0;
    for round in 0..40 {
        let mut rig = Rig::new(&Setup::default());
        let (mem, pair, lists) = (rig.mem().clone(), rig.shared.pair, rig.shared.lists);
        for i in 0..4 * PAGE / 4 {
            let near = if i % 2 == 0 { rng.next() as u32 & 0x0003_f00f } else { (DATA_BUS >> 32) as u32 };
            mem.store(lists.plus(4 * i), if rng.below(9) == 0 { rng.next() as u32 } else { near });
        }
        for _ in 0..100 {
            for _ in 0..rng.below(6) {
                let mut sqe = Sqe::default();
                sqe.dw
                    .iter_mut()
                    .for_each(|dword| *dword = if rng.below(40) == 0 { rng.next() as u32 } else { 0 });
                sqe.dw[0] ^= [0, 1, 2, 5, 8][rng.below(5) as usize];
                sqe.dw[1] ^= 1;
                sqe.dw[10] ^= rng.below(520) as u32;
                sqe.dw[12] ^= rng.below(80) as u32;
                let offset = if rng.below(3) == 0 { 4 * rng.below(1 << 16) } else { PAGE * rng.below(64) };
                let prp2 = [DATA_BUS + offset, LIST_BUS + 8 * rng.below(2048), LIST_BUS + offset / 4];
                let sqe = sqe.with_prps(DATA_BUS + offset, prp2[rng.below(3) as usize]);
                rig.stage_as(sqe, rng.below(1 << 16) as u16);
            }
            rig.ring();
            if rng.below(20) == 0 {
                mem.ring(pair.sq_door, rng.next() as u32 & 0x1f);
            }
            assert!(rig.run(), "round {round}: it has ended");
            answered += rig.completions().len();
            if rng.below(20) == 0 {
                mem.ring(pair.cq_door, rng.next() as u32 & 0x1f);
            }
        }
        rig.stop();
    }
    assert!(answered > 1000, "{answered}");
}
