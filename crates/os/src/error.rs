//! What can go wrong with memory and mappings.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why memory could not be had, reached or mapped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{call} failed: {source}{hint}")]
    System {
        /// The call and what it was made on.
        call: String,
        /// What the system said.
        source: std::io::Error,
        /// What to do about it, or nothing.
        hint: &'static str,
    },
    /// A range does not lie within the memory that it was asked of.
    #[error("bytes {offset}..{} do not lie within {len} bytes of memory", offset.saturating_add(*bytes))]
    OutOfRange {
        /// Where the range starts.
        offset: usize,
        /// How long it is.
        bytes: usize,
        /// How long the memory is.
        len: usize,
    },
    /// The memory was mapped to be read.
    #[error("these {bytes} bytes of memory are mapped read-only and cannot be written")]
    ReadOnly {
        /// How long the memory is.
        bytes: usize,
    },
    /// No CPU instruction reaches the memory.
    #[error("this memory cannot be reached from the CPU")]
    NotReachable,
    /// The mapper cannot make this memory reachable for its device.
    #[error("{mapper} cannot map this memory for the device: {why}")]
    CannotMap {
        /// Which mapper.
        mapper: String,
        /// The reason, with what would mend it.
        why: String,
    },
    /// The mapper has no memory left to give.
    #[error("{mapper} has no {bytes} contiguous bytes left")]
    NoMemory {
        /// Which mapper.
        mapper: String,
        /// How much was asked for.
        bytes: usize,
    },
}

impl Error {
    /// The number that the system gave, where it was the system that refused.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::System { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    pub(crate) fn system(call: impl Into<String>, errno: impl Into<std::io::Error>) -> Self {
        Self::System { call: call.into(), source: errno.into(), hint: "" }
    }
}
