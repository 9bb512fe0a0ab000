//! Why something cannot be done with an array.

use onehop_proto::array::ArrayError;

/// Why something cannot be done with an array.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The drive refused or failed.
    #[error(transparent)]
    Drive(#[from] onehop_drive::Error),
    /// The GPU refused or failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// What was asked for makes no sense, or the drive cannot do it.
    #[error("an array cannot be made: {0}")]
    Refused(String),
    /// Pages are not on the drive. They stay in the cache, so another flush may succeed.
    #[error("{failed} pages could not be written back; the first: {error}")]
    NotWritten {
        /// How many.
        failed: u32,
        /// Why, for one of them.
        error: ArrayError,
    },
}

/// What can fail.
pub type Result<T> = std::result::Result<T, Error>;
