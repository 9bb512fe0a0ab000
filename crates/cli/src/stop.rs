//! Ctrl-C: the first asks for an orderly end, the second ends at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_os::StopSignal;

use crate::error::{CliError, Result};

/// The exit code of a command that was stopped.
const STOPPED: i32 = 130;

/// Whether the user asked for an end. Clones share the flag.
#[derive(Clone, Default)]
pub(crate) struct StopFlag {
    asked: Arc<AtomicBool>,
    /// Whether a second request is ignored: the orderly end is under way, and must not be cut short.
    orderly: Arc<AtomicBool>,
}

impl StopFlag {
    /// One that SIGINT, SIGTERM and SIGHUP set.
    pub(crate) fn install() -> Result<Self> {
        let flag = Self::default();
        let seen = flag.clone();
        ctrlc::set_handler(move || {
            if seen.asked.swap(true, Ordering::SeqCst) && !seen.orderly.load(Ordering::SeqCst) {
                std::process::exit(STOPPED);
            }
        })
        .map_err(|e| CliError::Failed(format!("no handler for Ctrl-C can be installed: {e}")))?;
        Ok(flag)
    }

    /// Whether the user asked for an end.
    pub(crate) fn is_set(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// The flag itself, for code that waits elsewhere.
    #[cfg(feature = "remote")]
    pub(crate) fn shared(&self) -> Arc<AtomicBool> {
        self.asked.clone()
    }

    /// The flag in the form in which drives take it.
    pub(crate) fn signal(&self) -> StopSignal {
        self.asked.clone().into()
    }

    /// From now on only an orderly end, for commands that would leave something behind and need no time to end. `timeout`
    /// and shells signal a process and its group, so the process gets two signals.
    pub(crate) fn end_in_order(&self) {
        self.orderly.store(true, Ordering::SeqCst);
    }

    /// An error once the user asked for an end.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_set() { Err(CliError::Interrupted) } else { Ok(()) }
    }
}
