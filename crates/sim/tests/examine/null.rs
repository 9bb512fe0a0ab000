//! The null controller: completes at once, moves nothing.

use onehop_proto::{Cqe, nvm};

use crate::host::Host;

#[test]
fn completes_batches_in_order() {
    for mode in ["workers=0", "workers=1"] {
        let mut host = Host::with_queue(&format!("mem:1M?{mode}&null=1&mqes=63"), 64);
        host.create_pair(2, 16);
        for round in 0..100 {
            let cids: Vec<_> = (0..10).map(|_| host.push(1, nvm::read(1, round, 8).unwrap())).collect();
            host.ring(1);
            let seen: Vec<_> = (0..10).map(|_| host.poll(1).unwrap().cid()).collect();
            assert_eq!(seen, cids);
            host.run(2, nvm::flush(1));
        }
        let stats = host.sim.stats();
        assert_eq!((stats.engine_commands, stats.io_commands()), (1100, 1100));
        host.clean();
    }
}

#[test]
fn completes_batches_in_reverse() {
    let mut host = Host::with_queue("mem:1M?workers=0&null=reverse", 16);
    for _ in 0..20 {
        let cids: Vec<_> = (0..7).map(|_| host.push(1, nvm::flush(1))).collect();
        host.ring(1);
        let seen: Vec<_> = (0..7).map(|_| host.poll(1).unwrap()).collect();
        assert_eq!(seen.iter().rev().map(Cqe::cid).collect::<Vec<_>>(), cids);
        assert!(seen.iter().all(|c| u32::from(c.sqhd()) == host.queues[&1].tail));
    }
    host.clean();
}

#[test]
fn waits_for_room() {
    let mut host = Host::with_queue("mem:1M?workers=0&null=1", 4);
    for _ in 0..3 {
        host.push(1, nvm::flush(1));
    }
    host.ring(1);
    for _ in 0..3 {
        assert!(host.poll_silently(1).is_some());
    }
    for _ in 0..3 {
        host.push(1, nvm::flush(1));
    }
    host.ring(1);
    assert_eq!(host.poll_silently(1), None, "the queue is full of unreleased entries");
    host.ring_cq(1, 2);
    assert_eq!(host.poll_silently(1).map(|c| c.cid()), Some(4));
    assert_eq!(host.poll_silently(1).map(|c| c.cid()), Some(5));
    assert_eq!(host.poll_silently(1), None);
    host.ring_cq(1, 0);
    assert_eq!(host.poll_silently(1).map(|c| c.cid()), Some(6));
}

#[test]
fn forgets_its_queues_at_a_reset() {
    let mut host = Host::with_queue("mem:1M?workers=0&null=1", 8);
    host.run(1, nvm::flush(1));
    host.delete_pair(1);
    host.create_pair(1, 4);
    host.run(1, nvm::flush(1));
    host.disable();
    host.enable();
    host.ring_sq(1, 1);
    host.broke_only(onehop_sim::Rule::DoorbellUnknownQueue);
}

#[test]
fn its_own_cost_can_be_measured() {
    let each = onehop_sim::null_ceiling(1024, 32, 100).unwrap();
    assert!(each > 0.0 && each < 50_000.0, "{each} ns");
}
