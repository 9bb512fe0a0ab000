//! The gate of a lent queue, as its host keeps it: see `onehop_proto::kernel::DeviceQueue`.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use onehop_gpu::Region;
use onehop_proto::kernel::{Gate, signal};

use crate::Result;
use crate::durability::{Account, Writes};

/// Says who may go in, and knows whether anybody is inside.
pub(crate) struct HostGate {
    signals: Region,
    /// The count of threads inside lies in the first word.
    inside: Region,
    state: Mutex<State>,
    /// Where threads may write: what counts their writes, and the count of completions that they have taken.
    writes: Option<(Arc<Account>, Region)>,
}

#[derive(Clone, Copy)]
struct State {
    /// The life of the queue.
    epoch: u32,
    open: bool,
    /// It is never opened again.
    shut: bool,
    /// Completions of this life that the account covers.
    counted: u32,
}

impl HostGate {
    /// A gate that is closed, before the queue's first life. With `writes` the account asks the gate, before each flush and
    /// each loss, whether threads have written; the region is the queue's count of completions.
    pub(crate) fn new(signals: Region, inside: Region, writes: Option<(Arc<Account>, Region)>) -> Arc<Self> {
        // What the queue completed before it was exported is accounted for.
        let counted = writes.as_ref().and_then(|(_, taken)| taken.word(0).ok()).unwrap_or(0);
        let state = Mutex::new(State { epoch: 1, open: false, shut: false, counted });
        let gate = Arc::new(Self { signals, inside, state, writes });
        gate.say(signal::LOST, 0);
        gate.change(|_| ());
        if let Some((account, _)) = &gate.writes {
            let weak: Weak<Self> = Arc::downgrade(&gate);
            account.ask(weak);
        }
        gate
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn say(&self, at: u32, value: u32) {
        // The region is a page of host memory: the word is always there.
        let _ = self.signals.signal(at as usize, value);
    }

    /// Changes the state, and tells the threads of it before anybody else changes it.
    fn change(&self, f: impl FnOnce(&mut State)) -> State {
        let mut state = self.lock();
        f(&mut state);
        let State { epoch, open, shut, .. } = *state;
        let gate = match (shut, open) {
            (true, _) => Gate::shut(epoch),
            (false, true) => Gate::open(epoch),
            (false, false) => Gate::closed(epoch),
        };
        self.say(signal::GATE, gate.0);
        *state
    }

    /// Threads may go in, unless it was shut. Whether they may.
    pub(crate) fn open(&self) -> bool {
        !self.change(|state| state.open = true).shut
    }

    /// Nobody goes in any more, for a while.
    pub(crate) fn close(&self) {
        self.change(|state| state.open = false);
    }

    /// Nobody goes in any more, for good.
    pub(crate) fn shut(&self) {
        self.change(|state| state.shut = true);
    }

    /// The controller has let go of all commands of the life before.
    pub(crate) fn next_life(&self) {
        // Zero is no life: it says that no thread has lost anything.
        self.change(|state| state.epoch = (state.epoch % (u32::MAX >> 2)) + 1);
    }

    /// Which life it is.
    pub(crate) fn epoch(&self) -> u32 {
        self.lock().epoch
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

    /// The queue begins a new life, in which it has taken no completion. Its threads are outside.
    pub(crate) fn restart_count(&self) {
        self.lock().counted = 0;
    }
}

impl Writes for HostGate {
    /// Counts the completions that threads have taken since the last call as one write. Threads learn of a completion after
    /// it was taken, so all writes that they know to be acknowledged are covered. Reads count too: the host does not see
    /// what a completion stood for. So does a count that cannot be read.
    fn count(&self) {
        let Some((account, completions)) = &self.writes else { return };
        let mut state = self.lock();
        let taken = completions.word(0);
        if taken.as_ref().is_ok_and(|taken| *taken == state.counted) {
            return;
        }
        state.counted = taken.unwrap_or(state.counted);
        account.wrote();
    }
}
