//! Errors of array operations.

use std::time::Duration;

use onehop_gpu::ArrayRows;
use onehop_proto::array::ArrayError;

/// Why an array operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The drive refused or failed.
    #[error(transparent)]
    Drive(#[from] onehop_drive::Error),
    /// The GPU refused or failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// The request is invalid, or the drive does not support it.
    #[error("an array cannot be made: {0}")]
    Refused(String),
    /// The array is shorter than these rows: they were made for a larger one.
    #[error(
        "{} rows of {} bytes every {}, and the array has {most}: use `Array::rows` of this array",
        rows.count, rows.bytes, rows.stride
    )]
    Rows {
        /// The rows.
        rows: ArrayRows,
        /// How many such rows the array has.
        most: u64,
    },
    /// Threads of a kernel still used pages when the array was closed. Its memory stays allocated.
    #[error(
        "threads of a kernel did not release the pages of an array within {patience:?}; its memory stays theirs"
    )]
    InUse {
        /// [`crate::ArrayOptions::patience`].
        patience: Duration,
    },
    /// Pages could not be written back. They stay in the cache, so another flush may succeed.
    #[error("{failed} pages could not be written back; the first: {error}")]
    NotWritten {
        /// Number of pages.
        failed: u32,
        /// The error of one of them.
        error: ArrayError,
    },
}

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;
