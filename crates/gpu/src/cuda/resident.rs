//! Kernels that stay, and what has to wait for their end.
//!
//! Giving memory back waits for every kernel of the GPU that runs: `cuMemFree` and `cuMemHostUnregister` would wait for
//! one that only ends when its host says so, and that host may be who gives the memory back. So while such a kernel
//! stays, it is put off until the last of them has ended.

use std::sync::{Arc, Mutex, PoisonError};

use onehop_os::HostMem;

use super::code::Started;
use super::driver::Driver;
use crate::Resident;

/// Gives something back; what is left of it is dropped when no lock is held, because its owner's code may run then.
type GiveBack = Box<dyn FnOnce() -> Vec<HostMem> + Send>;

#[derive(Default)]
struct State {
    staying: usize,
    put_off: Vec<GiveBack>,
}

/// How many kernels stay, and what is put off because of them.
#[derive(Default)]
pub(super) struct Residents(Mutex<State>);

impl Residents {
    /// Gives something back now, or when no kernel stays any more. None starts to stay meanwhile.
    pub(super) fn give_back(&self, work: impl FnOnce() -> Vec<HostMem> + Send + 'static) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.staying > 0 {
            state.put_off.push(Box::new(work));
            return;
        }
        let left = work();
        drop(state);
        drop(left);
    }

    /// One more that stays, for good: nothing is given back any more.
    pub(super) fn stay(&self) {
        self.begin();
    }

    fn begin(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).staying += 1;
    }

    fn end(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.staying -= 1;
        if state.staying > 0 {
            return;
        }
        let put_off = std::mem::take(&mut state.put_off);
        let left: Vec<_> = put_off.into_iter().flat_map(|work| work()).collect();
        drop(state);
        drop(left);
    }
}

/// A kernel that stays until its host ends it.
pub(super) struct Staying {
    kernel: Option<Started>,
    driver: Arc<Driver>,
}

impl Staying {
    /// Counts one that `start` starts.
    pub(super) fn start(
        driver: &Arc<Driver>,
        start: impl FnOnce() -> crate::Result<Started>,
    ) -> crate::Result<Self> {
        driver.residents.begin();
        // Dropped, it is no longer counted, also where nothing was started.
        let mut staying = Self { kernel: None, driver: driver.clone() };
        staying.kernel = Some(start()?);
        Ok(staying)
    }
}

impl Resident for Staying {
    fn is_over(&self) -> bool {
        self.kernel.as_ref().is_none_or(Started::is_over)
    }
}

impl Drop for Staying {
    fn drop(&mut self) {
        // Waits for its end.
        self.kernel = None;
        self.driver.residents.end();
    }
}
