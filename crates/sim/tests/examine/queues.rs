//! Creating, sharing and deleting I/O queues.

use onehop_proto::admin::{self, Priority};
use onehop_proto::regs::{Cc, offset};
use onehop_proto::{BusAddr, Status, nvm};
use onehop_sim::Rule;

use crate::host::{Host, pattern};

fn cq(host: &mut Host, qid: u16, size_z: u16, addr: u64) -> Status {
    host.admin(admin::create_cq(qid, size_z, BusAddr(addr), true, None)).status()
}

fn sq(host: &mut Host, qid: u16, size_z: u16, addr: u64, cqid: u16) -> Status {
    host.admin(admin::create_sq(qid, size_z, BusAddr(addr), cqid, true, Priority::Urgent)).status()
}

#[test]
fn creation_is_checked() {
    let mut host = Host::enabled("mem:1M?workers=0&queues=4&mqes=63");
    let buf = host.buffer(65536);
    let at = buf.addr();
    for (qid, size_z, want) in [
        (0, 7, Status::INVALID_QUEUE_ID),
        (5, 7, Status::INVALID_QUEUE_ID),
        (1, 0, Status::INVALID_QUEUE_SIZE),
        (1, 64, Status::INVALID_QUEUE_SIZE),
        (1, 63, Status::SUCCESS),
        (1, 7, Status::INVALID_QUEUE_ID),
    ] {
        let got = cq(&mut host, qid, size_z, at);
        assert!(got.is(want), "cq {qid} {size_z}: {got:?}");
    }
    for (qid, size_z, cqid, want) in [
        (0, 7, 1, Status::INVALID_QUEUE_ID),
        (5, 7, 1, Status::INVALID_QUEUE_ID),
        (1, 0, 1, Status::INVALID_QUEUE_SIZE),
        (1, 64, 1, Status::INVALID_QUEUE_SIZE),
        (1, 7, 0, Status::INVALID_QUEUE_ID),
        (1, 7, 5, Status::INVALID_QUEUE_ID),
        (1, 7, 2, Status::CQ_INVALID),
        (1, 7, 1, Status::SUCCESS),
        (1, 7, 1, Status::INVALID_QUEUE_ID),
    ] {
        let got = sq(&mut host, qid, size_z, at + 4096, cqid);
        assert!(got.is(want), "sq {qid} {size_z} {cqid}: {got:?}");
    }
    host.clean();
    let bad_vector = admin::create_cq(2, 7, BusAddr(at), true, Some(4000));
    assert!(host.admin(bad_vector).status().is(Status::INVALID_INTERRUPT_VECTOR));
}

#[test]
fn queue_memory_is_checked() {
    let mut host = Host::enabled("mem:1M?workers=0");
    let buf = host.buffer(8192);
    assert!(cq(&mut host, 1, 7, buf.addr() + 512).is(Status::INVALID_PRP_OFFSET));
    host.broke_only(Rule::QueueMisaligned);
    assert!(cq(&mut host, 1, 1023, buf.addr()).is(Status::DATA_TRANSFER_ERROR));
    host.broke(Rule::DmaPastEnd);
    assert!(cq(&mut host, 1, 7, 0x7000).is(Status::DATA_TRANSFER_ERROR));
    host.broke(Rule::DmaUnmapped);
    let scattered = admin::create_cq(1, 7, BusAddr(buf.addr()), false, None);
    assert!(host.admin(scattered).status().is(Status::INVALID_FIELD));
}

#[test]
fn entry_sizes_are_checked_when_queues_are_made() {
    let mut host = Host::enabled("mem:1M?workers=0");
    host.regs.write32(offset::CC, Cc::enabled(12, 0).with_iocqes(0).0);
    let buf = host.buffer(8192);
    assert!(cq(&mut host, 1, 7, buf.addr()).is(Status::INVALID_QUEUE_SIZE));
    host.broke_only(Rule::EntrySize);
}

#[test]
fn deletion_goes_submission_first() {
    let mut host = Host::new("mem:1M?workers=0");
    assert!(host.admin(admin::delete_cq(1)).status().is(Status::INVALID_QUEUE_DELETION));
    host.broke_only(Rule::QueueOrder);
    assert!(host.admin(admin::delete_sq(0)).status().is(Status::INVALID_QUEUE_ID));
    assert!(host.admin(admin::delete_sq(2)).status().is(Status::INVALID_QUEUE_ID));
    assert!(host.admin(admin::delete_cq(0)).status().is(Status::INVALID_QUEUE_ID));
    host.delete_pair(1);
    host.ring_sq(1, 1);
    host.broke(Rule::DoorbellUnknownQueue);
    host.ring_cq(1, 1);
    host.ring_cq(2, 1);
    let heads: Vec<_> = host.sim.violations().into_iter().filter(|v| v.detail.starts_with("head")).collect();
    assert!(heads[0].detail.ends_with("that has been deleted"), "{heads:?}");
    assert!(heads[1].detail.ends_with("that does not exist"), "{heads:?}");
    host.create_pair(1, 8);
    assert!(host.write(1, &[1; 512], 512).is_ok());
}

#[test]
fn deleting_a_queue_aborts_what_is_in_it() {
    let mut host = Host::new("mem:1M?workers=0&fault=lost@n=1&fault=late@n=2,delay=9s");
    let lost = host.submit(1, nvm::flush(1));
    let late = host.submit(1, nvm::flush(1));
    host.admin_ok(admin::delete_sq(1));
    let mut aborted = [host.poll(1).unwrap(), host.poll(1).unwrap()];
    aborted.sort_by_key(onehop_proto::Cqe::cid);
    assert_eq!(aborted.iter().map(|c| c.cid()).collect::<Vec<_>>(), [lost, late]);
    assert!(aborted.iter().all(|c| c.status().is(Status::ABORTED_SQ_DELETION)));
    host.clean();
}

#[test]
fn several_submission_queues_share_a_completion_queue() {
    let mut host = Host::enabled("mem:1M?workers=0");
    let shared = host.queue(16);
    let (cq_at, sq_at) = (shared.cq.addr(), shared.sq.addr());
    host.queues.insert(1, shared);
    assert!(cq(&mut host, 1, 15, cq_at).is_ok());
    assert!(sq(&mut host, 1, 15, sq_at, 1).is_ok());
    let mut second = host.queue(16);
    assert!(sq(&mut host, 2, 15, second.sq.addr(), 1).is_ok());
    second.put(&nvm::flush(1).with_cid(77));
    host.ring_sq(2, 1);
    let cqe = host.wait(1);
    assert_eq!((cqe.sqid(), cqe.cid(), cqe.sqhd()), (2, 77, 1));
    let cqe = host.run(1, nvm::flush(1));
    assert_eq!((cqe.sqid(), cqe.sqhd()), (1, 1));
    assert!(host.admin(admin::delete_cq(1)).status().is(Status::INVALID_QUEUE_DELETION));
}

#[test]
fn queues_may_be_scattered_where_that_is_allowed() {
    let mut host = Host::enabled("mem:1M?workers=0&cqr=0&scatter=1");
    let queue = {
        let (sq, cq) = (host.buffer(512 * 64), host.buffer(512 * 16));
        crate::host::Queue { sq, cq, size: 512, tail: 0, head: 0, phase: true, sqhd: 0, next_cid: 1 }
    };
    let list_of = |host: &Host, buf: &crate::host::Buf| {
        let list = host.buffer(4096);
        for (i, run) in buf.map.runs().iter().enumerate() {
            list.mem.write(i * 8, &run.addr.0.to_le_bytes()).unwrap();
        }
        list
    };
    let (sq_list, cq_list) = (list_of(&host, &queue.sq), list_of(&host, &queue.cq));
    host.admin_ok(admin::create_cq(1, 511, BusAddr(cq_list.addr()), false, None));
    host.admin_ok(admin::create_sq(1, 511, BusAddr(sq_list.addr()), 1, false, Priority::Urgent));
    host.queues.insert(1, queue);
    let data = pattern(3, 40960);
    for _ in 0..30 {
        assert!(host.write(5, &data, 512).is_ok());
        assert_eq!(host.read(5, 80, 512).unwrap(), data);
    }
    for _ in 0..1000 {
        host.run(1, nvm::flush(1));
    }
    host.clean();
}

#[test]
fn wraps_with_the_smallest_queue() {
    for mode in ["workers=0", "workers=1"] {
        let mut host = Host::with_queue(&format!("mem:1M?{mode}"), 2);
        for i in 0..9 {
            assert!(host.write(i, &pattern(i, 512), 512).is_ok());
        }
        for i in 0..9 {
            assert_eq!(host.read(i, 1, 512).unwrap(), pattern(i, 512));
        }
        host.clean();
    }
}

#[test]
fn interrupts_are_raised_where_they_are_wanted() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    let mut host = Host::enabled("mem:1M?workers=0");
    let seen = Arc::new(AtomicU32::new(0));
    let count = seen.clone();
    host.sim.on_interrupt(move |vector| {
        count.fetch_add(1 << (8 * vector), Ordering::Relaxed);
    });
    let queue = host.queue(8);
    let (sq, cq) = (BusAddr(queue.sq.addr()), BusAddr(queue.cq.addr()));
    host.admin_ok(admin::create_cq(1, 7, cq, true, Some(2)));
    host.admin_ok(admin::create_sq(1, 7, sq, 1, true, Priority::Urgent));
    host.queues.insert(1, queue);
    host.run(1, nvm::flush(1));
    host.regs.write32(offset::INTMS, 1 << 2);
    host.run(1, nvm::flush(1));
    assert_eq!(seen.load(Ordering::Relaxed), 0x0001_0002);
}
