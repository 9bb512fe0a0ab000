//! Errors of this crate.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why memory could not be allocated, reached or mapped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{call} failed: {source}{hint}")]
    System {
        /// The call and its object.
        call: String,
        /// The system's error.
        source: std::io::Error,
        /// A hint, or empty.
        hint: &'static str,
    },
    /// A range is outside the memory.
    #[error("bytes {offset}..{} do not lie within {len} bytes of memory", offset.saturating_add(*bytes))]
    OutOfRange {
        /// Where the range starts.
        offset: usize,
        /// How long it is.
        bytes: usize,
        /// How long the memory is.
        len: usize,
    },
    /// The memory is mapped read-only.
    #[error("these {bytes} bytes of memory are mapped read-only and cannot be written")]
    ReadOnly {
        /// How long the memory is.
        bytes: usize,
    },
    /// The CPU cannot access the memory.
    #[error("this memory cannot be reached from the CPU")]
    NotReachable,
    /// The mapper cannot make this memory reachable for its device.
    #[error("{mapper} cannot map this memory for the device: {why}")]
    CannotMap {
        /// The mapper.
        mapper: String,
        /// The reason, with a fix.
        why: String,
    },
    /// The device was lost while memory was mapped for it.
    #[error("{device} cannot be reached: {why}")]
    Lost {
        /// The device.
        device: String,
        /// What was being mapped, and how the device was lost.
        why: String,
    },
    /// The caller asked for an end while memory was mapped for the device.
    #[error("{device}: stopped on request")]
    Interrupted {
        /// The device.
        device: String,
    },
    /// The mapper is out of memory.
    #[error("{mapper} has no {bytes} contiguous bytes left")]
    NoMemory {
        /// The mapper.
        mapper: String,
        /// Requested bytes.
        bytes: usize,
    },
}

impl Error {
    /// The system's error number, if the system refused.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::System { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// The system's error, or this one as another.
    #[must_use]
    pub fn into_io(self) -> std::io::Error {
        match self.errno() {
            Some(errno) => std::io::Error::from_raw_os_error(errno),
            None => std::io::Error::other(self),
        }
    }

    /// Whether memory has run out, so that less of it might be had.
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        let is_full = |errno| errno == rustix::io::Errno::NOMEM.raw_os_error();
        matches!(self, Self::NoMemory { .. }) || self.errno().is_some_and(is_full)
    }

    pub(crate) fn system(call: impl Into<String>, errno: impl Into<std::io::Error>) -> Self {
        Self::System { call: call.into(), source: errno.into(), hint: "" }
    }
}
