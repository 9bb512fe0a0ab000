//! How a caller follows a transfer, and ends it early.

use crate::error::{Error, Result};

/// Receives what a running transfer has moved, and tells it when to stop. The calls come from the thread that transfers.
pub trait Progress {
    /// So many more bytes have been moved, compared or copied.
    fn moved(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Whether the transfer is to end. It is asked between chunks of about a tenth of a second.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Neither follows nor cancels.
impl Progress for () {}

/// [`Error::Cancelled`] once the caller wants the end.
pub(crate) fn check(progress: &dyn Progress) -> Result<()> {
    if progress.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
}
