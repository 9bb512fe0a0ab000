//! Lets a caller follow and cancel a transfer.

use crate::error::{Error, Result};

/// Receives the progress of a transfer, and can cancel it. Called by the transferring thread.
pub trait Progress {
    /// `bytes` more bytes were moved, compared or copied.
    fn moved(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Whether to cancel the transfer. Called between chunks of about a tenth of a second.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Ignores progress and never cancels.
impl Progress for () {}

/// Fails with [`Error::Cancelled`] if the caller has cancelled.
pub(crate) fn check(progress: &dyn Progress) -> Result<()> {
    if progress.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
}
