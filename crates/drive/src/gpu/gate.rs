//! The gate of a lent queue, as its host keeps it: see `onehop_proto::kernel::DeviceQueue`.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};

use onehop_gpu::Region;
use onehop_proto::kernel::{Gate, signal};

use crate::Result;
use crate::durability::Account;

/// Says who may go in, and knows whether anybody is inside.
pub(crate) struct HostGate {
    signals: Region,
    /// The count of threads inside lies in the first word.
    inside: Region,
    state: Mutex<State>,
    /// Told before the controller may lose what threads have written.
    writes: Option<Arc<Account>>,
}

#[derive(Clone, Copy)]
struct State {
    /// The life of the queue.
    epoch: u32,
    open: bool,
    /// It is never opened again.
    shut: bool,
}

impl HostGate {
    /// A gate that is closed, before the queue's first life.
    pub(crate) fn new(signals: Region, inside: Region, writes: Option<Arc<Account>>) -> Self {
        let state = Mutex::new(State { epoch: 1, open: false, shut: false });
        let gate = Self { signals, inside, state, writes };
        gate.say(signal::LOST, 0);
        gate.change(|_| ());
        gate
    }

    fn say(&self, at: u32, value: u32) {
        // The region is a page of host memory: the word is always there.
        let _ = self.signals.signal(at as usize, value);
    }

    /// Changes the state, and tells the threads of it before anybody else changes it.
    fn change(&self, f: impl FnOnce(&mut State)) -> State {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        f(&mut state);
        let State { epoch, open, shut } = *state;
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
        self.count_writes();
    }

    /// Nobody goes in any more, for good.
    pub(crate) fn shut(&self) {
        self.change(|state| state.shut = true);
        self.count_writes();
    }

    /// The controller has let go of all commands of the life before.
    pub(crate) fn next_life(&self) {
        // Zero is no life: it says that no thread has lost anything.
        self.change(|state| state.epoch = (state.epoch % (u32::MAX >> 2)) + 1);
    }

    /// Which life it is.
    pub(crate) fn epoch(&self) -> u32 {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).epoch
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
        if let Some(account) = &self.writes {
            account.wrote();
        }
    }
}
