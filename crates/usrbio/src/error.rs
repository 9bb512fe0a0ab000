//! What can go wrong, and the number by which C programs know it.

use rustix::io::Errno;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something of usrbio could not be had or done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument makes no sense.
    #[error("{0}")]
    Argument(String),
    /// A link's name is none of usrbio's.
    #[error("'{name}' names no buffer and no ring: {why}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A call on a file failed.
    #[error("{call} {path}: {source}")]
    File {
        /// The call.
        call: &'static str,
        /// What it was made on.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Shared memory could not be had or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// A program's own shared memory could not be made.
    #[error("{len} bytes of shared memory are not available: {why}")]
    NoShared {
        /// How many were wanted.
        len: usize,
        /// The call that failed.
        why: Box<Error>,
    },
    /// What a ring or the other side of a socket says contradicts itself.
    #[error("{0}")]
    Broken(String),
    /// The ring is full until completions are taken.
    #[error("as many are under way as the ring holds: take completions first")]
    Full,
    /// The daemon that served the ring is no more.
    #[error(
        "the daemon has ended: what it did not answer may have been done or not; make rings and buffers anew"
    )]
    Gone,
    /// The GPU cannot do it.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// There is no such GPU.
    #[error("there is no GPU {device}: {why}")]
    NoDevice {
        /// The number that was asked for.
        device: i32,
        /// What there is.
        why: String,
    },
    /// This is not possible here.
    #[error("{what} is not possible: {why}")]
    NotPossible {
        /// What was to be done.
        what: &'static str,
        /// The reason, with what would change it.
        why: String,
    },
    /// The memory is not what it was: its allocation is gone.
    #[error("the GPU memory of this buffer was freed; what lies at its address now is another allocation")]
    Stale,
    /// The daemon refused.
    #[error("the daemon refused: {why}")]
    Refused {
        /// The number it gave.
        errno: i32,
        /// Its words.
        why: String,
    },
}

impl Error {
    /// The error number, as C programs get it with a minus sign.
    #[must_use]
    pub fn errno(&self) -> i32 {
        let known = match self {
            Self::Argument(_) | Self::Name { .. } | Self::Broken(_) => Errno::INVAL,
            Self::File { source, .. } => return source.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
            // As 3FS has it, whatever the cause.
            Self::Memory(_) | Self::NoShared { .. } => Errno::IO,
            Self::Full => Errno::AGAIN,
            Self::Gone => Errno::NOTCONN,
            Self::Gpu(onehop_gpu::Error::NoCuda { .. } | onehop_gpu::Error::NoSuchGpu { .. })
            | Self::NoDevice { .. } => Errno::NODEV,
            Self::Gpu(onehop_gpu::Error::NotSupported { .. }) | Self::NotPossible { .. } => Errno::NOTSUP,
            Self::Gpu(onehop_gpu::Error::Driver { code: 2, .. } | onehop_gpu::Error::Memory(_)) => {
                Errno::NOMEM
            }
            Self::Gpu(_) => Errno::IO,
            Self::Stale => Errno::STALE,
            Self::Refused { errno, .. } => return *errno,
        };
        known.raw_os_error()
    }

    /// A call on a file that failed.
    pub fn file(
        call: &'static str,
        path: impl AsRef<std::path::Path>,
        source: impl Into<std::io::Error>,
    ) -> Self {
        Self::File { call, path: path.as_ref().display().to_string(), source: source.into() }
    }
}
