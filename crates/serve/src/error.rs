//! What can go wrong with a mount.

use std::path::{Path, PathBuf};

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no mount, or not what was asked of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder to be served, or the one to mount at, is none.
    #[error("{path}: {why}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The system has no FUSE for us.
    #[error("mounting at {path}: {source}{hint}")]
    Mount {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
        /// What to do about it, or nothing.
        hint: &'static str,
    },
    /// A call on a file failed.
    #[error("{call} {path}: {source}")]
    File {
        /// The call.
        call: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system has no more threads.
    #[error("no thread can be started: {0}")]
    Thread(std::io::Error),
    /// Something of usrbio could not be had.
    #[error(transparent)]
    Usrbio(#[from] onehop_usrbio::Error),
    /// Shared memory could not be had or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
}

impl Error {
    pub(crate) fn file(call: &'static str, path: &Path, source: impl Into<std::io::Error>) -> Self {
        Self::File { call, path: path.to_owned(), source: source.into() }
    }

    /// The number that a program gets for it.
    pub(crate) fn errno(&self) -> i32 {
        use rustix::io::Errno;
        match self {
            Self::File { source, .. } | Self::Mount { source, .. } | Self::Thread(source) => {
                source.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
            }
            Self::Usrbio(error) => error.errno(),
            Self::Folder { .. } => Errno::INVAL.raw_os_error(),
            Self::Memory(error) => error.errno().unwrap_or(Errno::IO.raw_os_error()),
            Self::Gpu(_) => Errno::IO.raw_os_error(),
        }
    }
}
