//! Ctrl-C: the first requests an orderly stop, the second exits at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_os::StopSignal;

use crate::error::{CliError, Result};

/// The exit code of a command that was stopped.
const STOPPED: i32 = 130;

/// Whether the user requested a stop. Clones share the flag.
#[derive(Clone, Default)]
pub(crate) struct StopFlag {
    requested: Arc<AtomicBool>,
    /// Whether a second request is ignored, so that the orderly stop is not cut short.
    ignores_second: Arc<AtomicBool>,
}

impl StopFlag {
    /// Creates a flag that SIGINT, SIGTERM and SIGHUP set.
    pub(crate) fn install() -> Result<Self> {
        let flag = Self::default();
        let seen = flag.clone();
        ctrlc::set_handler(move || {
            if seen.requested.swap(true, Ordering::SeqCst) && !seen.ignores_second.load(Ordering::SeqCst) {
                std::process::exit(STOPPED);
            }
        })
        .map_err(|e| CliError::Failed(format!("cannot install a handler for Ctrl-C: {e}")))?;
        Ok(flag)
    }

    /// Whether a stop was requested.
    pub(crate) fn is_set(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// The flag itself, for code outside this crate.
    #[cfg(feature = "remote")]
    pub(crate) fn shared(&self) -> Arc<AtomicBool> {
        self.requested.clone()
    }

    /// The flag as a signal for drives.
    pub(crate) fn signal(&self) -> StopSignal {
        self.requested.clone().into()
    }

    /// From now on, ignores a second signal: for commands that must clean up, and do so quickly. `timeout` and shells
    /// signal a process and its group, so the process gets two signals.
    pub(crate) fn ignore_second_signal(&self) {
        self.ignores_second.store(true, Ordering::SeqCst);
    }

    /// Returns an error if a stop was requested.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_set() { Err(CliError::Interrupted) } else { Ok(()) }
    }
}
