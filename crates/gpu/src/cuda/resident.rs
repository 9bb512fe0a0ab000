//! Persistent kernels, which run until their host stops them.

use std::sync::Arc;

use super::code::Started;
use super::driver::Driver;
use crate::Resident;

/// A kernel that runs until its host stops it. Nothing is freed meanwhile: freeing would wait for its end, and might
/// keep the host from stopping it.
pub(super) struct PersistentKernel {
    kernel: Option<Started>,
    driver: Arc<Driver>,
}

impl PersistentKernel {
    /// Counts the kernel that `start` starts.
    pub(super) fn start(
        driver: &Arc<Driver>,
        start: impl FnOnce() -> crate::Result<Started>,
    ) -> crate::Result<Self> {
        driver.reclaimer.begin()?;
        // Dropping it uncounts the kernel, even if none was started.
        let mut persistent = Self { kernel: None, driver: driver.clone() };
        persistent.kernel = Some(start()?);
        Ok(persistent)
    }
}

impl Resident for PersistentKernel {
    fn is_over(&self) -> bool {
        self.kernel.as_ref().is_none_or(Started::is_over)
    }

    fn join(mut self: Box<Self>) -> crate::Result<()> {
        match self.kernel.take() {
            Some(mut kernel) => kernel.0.wait().map(drop),
            None => Ok(()),
        }
    }
}

impl Drop for PersistentKernel {
    fn drop(&mut self) {
        // Waits for its end.
        self.kernel = None;
        self.driver.reclaimer.end();
    }
}
