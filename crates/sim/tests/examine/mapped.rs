//! Doorbells that the host maps and writes as memory.

use std::sync::atomic::Ordering::{Acquire, Release};

use onehop_os::HostMem;
use onehop_proto::{nvm, regs};
use onehop_sim::Rule;

use crate::host::Host;

/// A host that rings by memory, as soon as the controller is enabled.
struct Mapped {
    host: Host,
    doorbells: HostMem,
}

impl Mapped {
    fn new(spec: &str) -> Self {
        let host = Host::enabled(spec);
        let doorbells = HostMem::anonymous(host.sim.doorbell_bytes() as usize).unwrap();
        host.sim.map_doorbells(doorbells.clone()).unwrap();
        Self { host, doorbells }
    }

    fn word(&self, qid: u16, is_cq: bool) -> &std::sync::atomic::AtomicU32 {
        let at = regs::doorbell(qid, is_cq, self.host.cap().dstrd()) - regs::offset::DOORBELLS;
        self.doorbells.word(at as usize).unwrap()
    }

    /// Runs a flush, rung by memory only.
    fn flush(&mut self) {
        let cid = self.host.push(1, nvm::flush(1));
        self.word(1, false).store(self.host.queues[&1].tail, Release);
        assert!(self.host.sim.poll_doorbells(), "the tail was written");
        self.host.wait_for(|host| host.sim.stats().io_commands() > 0);
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let cqe = loop {
            if let Some(cqe) = self.host.poll_silently(1) {
                break cqe;
            }
            assert!(std::time::Instant::now() < until, "no completion: {:?}", self.host.sim.violations());
        };
        assert_eq!(cqe.cid(), cid);
        self.word(1, true).store(self.host.queues[&1].head, Release);
    }
}

#[test]
fn commands_run_around_the_rings_without_a_register_write() {
    for spec in ["mem:1M", "mem:1M?workers=0", "mem:1M?workers=0&dstrd=4&queues=300"] {
        let mut mapped = Mapped::new(spec);
        mapped.host.create_pair(1, 4);
        for _ in 0..50 {
            mapped.flush();
        }
        assert!(mapped.host.sim.poll_doorbells(), "the last head was written");
        assert!(!mapped.host.sim.poll_doorbells(), "nothing has been written since");
        mapped.host.clean();
    }
}

/// A new queue's first tail may equal its predecessor's last: it must not be mistaken for an old value.
#[test]
fn a_new_queue_starts_from_zero() {
    let mut mapped = Mapped::new("mem:1M?workers=0");
    for _ in 0..3 {
        mapped.host.create_pair(1, 8);
        assert_eq!((mapped.word(1, false).load(Acquire), mapped.word(1, true).load(Acquire)), (0, 0));
        mapped.flush();
        mapped.host.delete_pair(1);
    }
    mapped.host.create_pair(1, 8);
    mapped.flush();
    mapped.host.disable();
    assert_eq!(mapped.word(1, false).load(Acquire), 0);
    mapped.host.enable();
    mapped.host.create_pair(1, 8);
    mapped.flush();
    mapped.host.clean();
}

#[test]
fn what_was_written_before_a_register_access_comes_before_it() {
    let mut mapped = Mapped::new("mem:1M?workers=0");
    mapped.host.create_pair(1, 8);
    mapped.host.push(1, nvm::flush(1));
    mapped.word(1, false).store(1, Release);
    let cc = mapped.host.regs.read32(regs::offset::CC);
    mapped.host.regs.write32(regs::offset::CC, regs::Cc(cc).with_shn(1).0);
    assert!(mapped.host.poll_silently(1).is_some());
    mapped.host.clean();
}

#[test]
fn values_that_cannot_be_are_reported_once() {
    let mapped = Mapped::new("mem:1M?workers=0");
    mapped.word(0, false).store(77, Release);
    mapped.host.sim.poll_doorbells();
    mapped.host.sim.poll_doorbells();
    mapped.host.broke_only(Rule::DoorbellValue);
    let none = HostMem::anonymous(4096).unwrap();
    assert!(mapped.host.sim.map_doorbells(none.clone()).is_err(), "they are mapped already");
    let wide = onehop_sim::open("mem:1M?dstrd=4").unwrap();
    assert!(wide.map_doorbells(none).is_err(), "the last doorbells do not lie in one page");
}
