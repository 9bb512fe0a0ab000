//! Why a drive of this kind cannot be made.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a drive of this kind cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its registers and admin commands could not be had.
    #[error(transparent)]
    Sim(#[from] onehop_sim::Error),
    /// The GPU did not do what it has to.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// The simulated drive can be like this, but not where a GPU carries out its commands.
    #[error("a controller on a GPU does not serve {what}: {instead}")]
    NotServed {
        /// What was asked for.
        what: String,
        /// What would be right.
        instead: String,
    },
}

/// Refuses what was asked for.
pub(crate) fn not_served<T>(what: impl Into<String>, instead: &str) -> Result<T> {
    Err(Error::NotServed { what: what.into(), instead: instead.into() })
}
