//! Shadow doorbells.

use std::sync::atomic::Ordering::{Acquire, Release};

use onehop_proto::{BusAddr, Status, admin, nvm};
use onehop_sim::Rule;

use crate::host::{Buf, Host};

struct Shadow {
    doorbells: Buf,
    events: Buf,
    stride: usize,
}

impl Shadow {
    fn new(host: &mut Host) -> Self {
        let shadow =
            Self { doorbells: host.buffer(4096), events: host.buffer(4096), stride: 4 << host.cap().dstrd() };
        let (db, ev) = (BusAddr(shadow.doorbells.addr()), BusAddr(shadow.events.addr()));
        host.admin_ok(admin::doorbell_buffer_config(db, ev));
        shadow
    }

    /// Sets a shadow doorbell; returns whether the controller wants to be rung for it.
    fn set(&self, index: usize, value: u32) -> bool {
        let word = self.doorbells.mem.word(index * self.stride).unwrap();
        let old = word.swap(value, Release);
        let event = self.events.mem.word(index * self.stride).unwrap().load(Acquire);
        (value as u16).wrapping_sub(event as u16).wrapping_sub(1) < (value as u16).wrapping_sub(old as u16)
    }
}

#[test]
fn rings_only_when_asked() {
    for dstrd in [0, 2] {
        let mut host = Host::enabled(&format!("mem:1M?workers=0&dbbuf=1&dstrd={dstrd}"));
        let shadow = Shadow::new(&mut host);
        host.create_pair(1, 16);
        let mut rung = 0;
        for _ in 0..100 {
            let cid = host.push(1, nvm::flush(1));
            let tail = host.queues[&1].tail;
            assert!(shadow.set(2, tail), "the controller sleeps, and wants to be rung");
            host.ring(1);
            assert_eq!(host.poll_silently(1).map(|c| c.cid()), Some(cid));
            let head = host.queues[&1].head;
            if shadow.set(3, head) {
                host.ring_cq(1, head);
                rung += 1;
            }
        }
        assert!(rung < 20, "heads are hardly ever rung: {rung}");
        host.clean();
    }
}

#[test]
fn a_shadow_that_was_forgotten_is_noticed() {
    let mut host = Host::enabled("mem:1M?workers=0&dbbuf=1");
    let shadow = Shadow::new(&mut host);
    host.create_pair(1, 16);
    host.push(1, nvm::flush(1));
    host.ring(1);
    host.broke_only(Rule::ShadowDoorbell);
    assert_eq!(host.poll_silently(1), None, "the shadow counts");
    shadow.set(2, 1);
    host.ring(1);
    assert!(host.poll_silently(1).is_some());
}

#[test]
fn shadow_values_are_checked_too() {
    let mut host = Host::enabled("mem:1M?workers=0&dbbuf=1");
    let shadow = Shadow::new(&mut host);
    host.create_pair(1, 16);
    shadow.set(2, 16);
    host.ring_sq(1, 1);
    host.broke_only(Rule::DoorbellValue);
}

#[test]
fn buffers_are_pages_and_end_with_the_reset() {
    let mut host = Host::enabled("mem:1M?workers=0&dbbuf=1");
    let buf = host.buffer(8192);
    let config = |a, b| admin::doorbell_buffer_config(BusAddr(a), BusAddr(b));
    let at = buf.addr();
    assert!(host.admin(config(at, at + 512)).status().is(Status::INVALID_FIELD));
    assert!(host.admin(config(at, 0x5000)).status().is(Status::DATA_TRANSFER_ERROR));
    let _shadow = Shadow::new(&mut host);
    host.disable();
    host.enable();
    host.create_pair(1, 8);
    host.run(1, nvm::flush(1));
}
