//! Errors of this crate.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why such a drive could not be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its registers and admin commands could not be created.
    #[error(transparent)]
    Sim(#[from] onehop_sim::Error),
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// The simulator supports this, but not on a GPU.
    #[error("a controller on a GPU does not serve {what}: {instead}")]
    NotServed {
        /// What was requested.
        what: String,
        /// What is supported instead.
        instead: String,
    },
}

/// Refuses a request.
pub(crate) fn not_served<T>(what: impl Into<String>, instead: &str) -> Result<T> {
    Err(Error::NotServed { what: what.into(), instead: instead.into() })
}
