//! The host's side of an exported queue's gate: see `onehop_proto::kernel::DeviceQueue`.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use onehop_gpu::Region;
use onehop_proto::kernel::{Gate, signal, tally};

use crate::Result;
use crate::durability::{AcknowledgedWrites, Writes};

/// Controls whether threads may go in, and counts those inside.
pub(crate) struct HostGate {
    signals: Region,
    /// The words in which threads count.
    tally: Region,
    state: Mutex<GateState>,
    /// Where threads may write: the account of their writes.
    account: Option<Arc<AcknowledgedWrites>>,
}

#[derive(Clone, Copy)]
struct GateState {
    /// The life of the queue.
    epoch: u32,
    open: bool,
    /// It is never opened again.
    shut: bool,
    /// Acknowledged writes that the account covers.
    counted: u32,
}

impl HostGate {
    /// A closed gate, before the queue's first life; `tally` is zeroed. Before each flush and each loss, an account
    /// asks the gate whether threads have written.
    pub(crate) fn new(signals: Region, tally: Region, account: Option<Arc<AcknowledgedWrites>>) -> Arc<Self> {
        let state = Mutex::new(GateState { epoch: 1, open: false, shut: false, counted: 0 });
        let gate = Arc::new(Self { signals, tally, state, account });
        gate.say(signal::LOST, 0);
        gate.change(|_| ());
        if let Some(account) = &gate.account {
            let weak: Weak<Self> = Arc::downgrade(&gate);
            account.ask(weak);
        }
        gate
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn say(&self, at: u32, value: u32) {
        // The region is a page of host memory: the word is always there.
        let _ = self.signals.signal(at as usize, value);
    }

    /// Changes the state, and shows it to the threads before the next change.
    fn change(&self, f: impl FnOnce(&mut GateState)) -> GateState {
        let mut state = self.lock();
        f(&mut state);
        let GateState { epoch, open, shut, .. } = *state;
        let gate = match (shut, open) {
            (true, _) => Gate::shut(epoch),
            (false, true) => Gate::open(epoch),
            (false, false) => Gate::closed(epoch),
        };
        self.say(signal::GATE, gate.0);
        *state
    }

    /// Lets threads go in, unless it was shut. Returns whether they may.
    pub(crate) fn open(&self) -> bool {
        !self.change(|state| state.open = true).shut
    }

    /// No thread goes in until it is opened again.
    pub(crate) fn close(&self) {
        self.change(|state| state.open = false);
    }

    /// No thread goes in ever again.
    pub(crate) fn shut(&self) {
        self.change(|state| state.shut = true);
    }

    /// Threads stay inside for good: they may have written anything that is lost from now on.
    pub(crate) fn leave_threads_inside(&self) {
        self.account.iter().for_each(|account| std::mem::forget(account.writing()));
    }

    /// The controller no longer has any command of the last life.
    pub(crate) fn next_life(&self) {
        // Zero is no life: it says that no thread has lost anything.
        self.change(|state| state.epoch = (state.epoch % (u32::MAX >> 2)) + 1);
    }

    /// The current life.
    pub(crate) fn epoch(&self) -> u32 {
        self.lock().epoch
    }

    /// Whether a thread has given up a command of this life.
    pub(crate) fn has_lost(&self) -> Result<bool> {
        Ok(self.signals.word(signal::LOST as usize)? == self.epoch())
    }

    /// Whether threads are inside. If the GPU no longer answers, none is.
    pub(crate) fn is_busy(&self) -> bool {
        // Pairs with the threads' fence: the gate was closed before this reads the count.
        fence(Ordering::SeqCst);
        self.tally.word(tally::INSIDE as usize).is_ok_and(|count| count != 0)
    }
}

impl Writes for HostGate {
    /// Counts all writes acknowledged to threads since the last call as one write. A count that cannot be read counts
    /// as a write, too.
    fn count(&self) {
        let Some(account) = &self.account else { return };
        let mut state = self.lock();
        let writes = self.tally.word(tally::WRITES as usize);
        if writes.as_ref().is_ok_and(|writes| *writes == state.counted) {
            return;
        }
        state.counted = writes.unwrap_or(state.counted);
        account.wrote();
    }
}
