//! Ctrl-C: the first asks for an orderly end, the second ends at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{CliError, Result};

/// The exit code of a command that was stopped.
const STOPPED: i32 = 130;

/// Whether somebody asked for an end. Clones are the same flag.
#[derive(Clone, Default)]
pub(crate) struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// One that SIGINT, SIGTERM and SIGHUP set.
    pub(crate) fn install() -> Result<Self> {
        let flag = Self::default();
        let seen = flag.0.clone();
        ctrlc::set_handler(move || {
            if seen.swap(true, Ordering::SeqCst) {
                std::process::exit(STOPPED);
            }
        })
        .map_err(|e| CliError::Failed(format!("no handler for Ctrl-C can be installed: {e}")))?;
        Ok(flag)
    }

    /// Whether somebody asked for an end.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// An error once somebody asked for an end.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_set() { Err(CliError::Interrupted) } else { Ok(()) }
    }
}
