//! The emulated GPU's resident controllers: a thread for each warp, which sleeps when idle.

use std::sync::Arc;
use std::thread::JoinHandle;

use onehop_controller::{SERVE_LOCAL_WORDS, serve};
use onehop_proto::GpuAddr;
use onehop_proto::queue::Memory;

use super::Serving;
use crate::space::{EmulatedThread, Space};
use crate::{Error, Resident, Result};

impl onehop_controller::Wide for EmulatedThread {
    fn load4(&self, at: GpuAddr) -> [u32; 4] {
        [0, 4, 8, 12].map(|offset| self.load(at.plus(offset)))
    }

    fn store4(&self, at: GpuAddr, [a, b, c, last]: [u32; 4]) {
        for (offset, word) in [(0, a), (4, b), (8, c)] {
            self.store(at.plus(offset), word);
        }
        self.store_release(at.plus(12), last);
    }
}

/// Threads that serve until their hosts stop them. Dropping waits for that.
pub(crate) struct Controllers(Vec<JoinHandle<()>>);

impl Controllers {
    pub(crate) fn start(space: &Arc<Space>, lanes: u32, serving: &Serving) -> Result<Self> {
        let Serving { pairs, count, .. } = *serving;
        let mut controllers = Self(Vec::new());
        for index in 0..count {
            let (space, bytes) = (space.clone(), u64::from(onehop_controller::Pair::BYTES));
            let at = pairs.plus(u64::from(index) * bytes);
            // A fault unwinds: the thread ends and its queue stops, as a GPU's would.
            let body = move || {
                serve(&EmulatedThread::patient(&space, lanes, SERVE_LOCAL_WORDS), at);
            };
            let thread = std::thread::Builder::new().name("emulated controller".into()).spawn(body);
            let refuse = |e| Error::Launch(format!("no thread could be started for it: {e}"));
            controllers.0.push(thread.map_err(refuse)?);
        }
        Ok(controllers)
    }
}

impl Resident for Controllers {
    fn is_over(&self) -> bool {
        self.0.iter().any(JoinHandle::is_finished)
    }

    fn join(self: Box<Self>) -> Result<()> {
        // Dropping waits for the threads; one that had a fault has ended as well.
        Ok(())
    }
}

impl Drop for Controllers {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            let _ = thread.join();
        }
    }
}
