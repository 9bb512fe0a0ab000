//! The gate of a lent queue, as its host keeps it: see `onehop_proto::kernel::Lent`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

use onehop_gpu::Region;
use onehop_proto::kernel::{Gate, signal};

use crate::Result;
use crate::durability::Durability;

/// Says who may go in, and knows whether anybody is inside.
pub(crate) struct Keeper {
    signals: Region,
    /// The count of threads inside lies in the first word.
    inside: Region,
    epoch: AtomicU32,
    /// Set when it was shut: it is never opened again.
    shut: AtomicBool,
    /// Told before the controller may lose what threads have written.
    writes: Option<Arc<Durability>>,
}

impl Keeper {
    /// A gate that is closed, before the queue's first life.
    pub(crate) fn new(signals: Region, inside: Region, writes: Option<Arc<Durability>>) -> Self {
        let shut = AtomicBool::new(false);
        let gate = Self { signals, inside, epoch: AtomicU32::new(1), shut, writes };
        gate.say(signal::LOST, 0);
        gate.close();
        gate
    }

    fn say(&self, at: u32, value: u32) {
        // The region is a page of host memory: the word is always there.
        let _ = self.signals.signal(at as usize, value);
    }

    fn state(&self, of: impl Fn(u32) -> Gate) -> Gate {
        let epoch = self.epoch.load(Ordering::Acquire);
        let gate = if self.shut.load(Ordering::Acquire) { Gate::shut(epoch) } else { of(epoch) };
        self.say(signal::GATE, gate.0);
        gate
    }

    /// Threads may go in, unless it was shut. Whether they may.
    pub(crate) fn open(&self) -> bool {
        self.state(Gate::open).is_open()
    }

    /// Nobody goes in any more, for a while.
    pub(crate) fn close(&self) {
        self.state(Gate::closed);
        self.count_writes();
    }

    /// Nobody goes in any more, for good.
    pub(crate) fn shut(&self) {
        self.shut.store(true, Ordering::Release);
        self.close();
    }

    /// The controller has let go of all commands of the life before.
    pub(crate) fn next_life(&self) {
        // Zero is no life: threads say it of none.
        let next = (self.epoch.load(Ordering::Acquire) + 1) & (u32::MAX >> 2);
        self.epoch.store(next.max(1), Ordering::Release);
        self.state(Gate::closed);
    }

    /// Which life it is.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Whether a thread has given up a command of this life.
    pub(crate) fn has_lost(&self) -> Result<bool> {
        Ok(self.signals.word(signal::LOST as usize)? == self.epoch())
    }

    /// Whether threads are inside. Where the GPU does not answer any more, none of its threads is.
    pub(crate) fn is_busy(&self) -> bool {
        // The other half of the bargain: the gate was closed before this looks at the count.
        fence(Ordering::SeqCst);
        self.inside.word(0).is_ok_and(|count| count != 0)
    }

    fn count_writes(&self) {
        if let Some(durability) = &self.writes {
            durability.wrote();
        }
    }
}
