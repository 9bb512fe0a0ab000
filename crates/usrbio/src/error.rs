//! Errors, and their numbers for C programs.

use rustix::io::Errno;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation of usrbio failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid argument.
    #[error("{0}")]
    Argument(String),
    /// A link's name is not one of usrbio's.
    #[error("'{name}' is not the name of a buffer or ring: {why}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A system call on a file failed.
    #[error("{call} {path}: {source}")]
    File {
        /// The call.
        call: &'static str,
        /// Its path.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// Shared memory could not be allocated or accessed.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// A program's own shared memory could not be created.
    #[error("{len} bytes of shared memory are not available: {why}")]
    NoShared {
        /// Requested bytes.
        len: usize,
        /// The call that failed.
        why: Box<Error>,
    },
    /// Shared memory has too little room for a buffer.
    #[error(
        "{len} bytes of shared memory are not available: {at} has {free} free, of which other buffers may still take {reserved}"
    )]
    NoRoom {
        /// Requested bytes.
        len: u64,
        /// The path of shared memory.
        at: &'static str,
        /// Free bytes.
        free: u64,
        /// Bytes of other buffers that have not been touched yet.
        reserved: u64,
    },
    /// The daemon's limits for this user are reached.
    #[error(
        "this user has reached a limit of the daemon on rings, buffers or programs (`onehop mount {} --status` shows how \
         many are in use; it is not `ulimit -n`)",
        mount.display()
    )]
    TooMany {
        /// The mount point.
        mount: std::path::PathBuf,
    },
    /// The contents of a ring or of a message are inconsistent.
    #[error("{0}")]
    Broken(String),
    /// The ring is full until completions are taken.
    #[error("the ring is full: take completions first")]
    Full,
    /// The daemon that served the ring has ended.
    #[error(
        "the daemon has ended: the outcome of unanswered requests is unknown; create new rings and buffers"
    )]
    Gone,
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// There is no such GPU.
    #[error("there is no GPU {device}: {why}")]
    NoDevice {
        /// The requested number.
        device: i32,
        /// Which GPUs there are.
        why: String,
    },
    /// This is not possible here.
    #[error("{what} is not possible: {why}")]
    NotPossible {
        /// The operation.
        what: &'static str,
        /// The reason, and how to change it.
        why: String,
    },
    /// The memory's allocation has been freed.
    #[error("the GPU memory of this buffer was freed; its address now belongs to another allocation")]
    Stale,
    /// The daemon refused.
    #[error("the daemon refused: {why}")]
    Refused {
        /// The error number that it gave.
        errno: i32,
        /// Its message.
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
            Self::TooMany { .. } => Errno::MFILE,
            Self::NoRoom { .. } => Errno::NOMEM,
            Self::NoShared { why, .. } if why.errno() == Errno::NOSPC.raw_os_error() => Errno::NOMEM,
            // As in 3FS, for any other cause.
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

    /// A system call on a file that failed.
    pub fn file(
        call: &'static str,
        path: impl AsRef<std::path::Path>,
        source: impl Into<std::io::Error>,
    ) -> Self {
        Self::File { call, path: path.as_ref().display().to_string(), source: source.into() }
    }
}
