//! Power is lost while the driver resets the controller: it must not take the reset for the reason why the registers
//! changed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use onehop_drive::{Drive, Error};
use onehop_os::{ControllerBackend, Registers};
use onehop_proto::regs::offset;
use onehop_sim::Sim;

use super::options;

/// Registers of a drive that loses its power right before an access.
struct Failing {
    inner: Arc<dyn Registers>,
    sim: Sim,
    /// Accesses until then; zero means never. Polling one register repeatedly counts as one access.
    left: AtomicU32,
    polls: AtomicBool,
}

impl Failing {
    fn step(&self, at: u32) {
        let polls = at == offset::CSTS;
        if self.polls.swap(polls, Ordering::SeqCst) && polls {
            return;
        }
        let left = self.left.load(Ordering::SeqCst);
        self.left.store(left.saturating_sub(1), Ordering::SeqCst);
        if left == 1 {
            self.sim.power_cycle();
        }
    }
}

impl Registers for Failing {
    fn read32(&self, at: u32) -> u32 {
        self.step(at);
        self.inner.read32(at)
    }
    fn write32(&self, at: u32, value: u32) {
        self.step(at);
        self.inner.write32(at, value);
    }
    fn size(&self) -> u32 {
        self.inner.size()
    }
}

#[test]
fn a_flush_reports_what_a_power_loss_took_at_any_step_of_a_reset() {
    let mut steps = 0;
    for step in 1.. {
        let sim = onehop_sim::open("mem:1M?vwc=1&to=1").unwrap();
        let port = sim.port();
        let regs = Arc::new(Failing {
            inner: port.regs.clone(),
            sim: sim.clone(),
            left: AtomicU32::new(0),
            polls: AtomicBool::new(false),
        });
        let drive = Drive::open(ControllerBackend { regs: regs.clone(), ..port }, options()).unwrap();
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        queue.write(ns, 0, 1, &drive.buffer(512).unwrap(), 0).unwrap();
        regs.left.store(step, Ordering::SeqCst);
        drive.reset().unwrap();
        if regs.left.swap(0, Ordering::SeqCst) > 0 {
            // The reset was over before: nothing is lost, and nothing reported.
            queue.flush(ns).unwrap();
            break;
        }
        let flushed = queue.flush(ns);
        assert!(matches!(flushed, Err(Error::WritesLost { .. })), "step {step}: {flushed:?}");
        queue.flush(ns).unwrap();
        steps = step;
    }
    // From the first read of CC to the last doorbell of the admin queue.
    assert!(steps > 30, "{steps}");
}
