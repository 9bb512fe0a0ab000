//! Errors of a mount.

use std::path::{Path, PathBuf};

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why mounting or serving failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder to serve or the mount point is not usable.
    #[error("{path}: {why}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Mounting failed.
    #[error("mounting at {path}: {source}{hint}")]
    Mount {
        /// Where.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
        /// What to do about it, or empty.
        hint: &'static str,
    },
    /// A system call on a file failed.
    #[error("{call} {path}: {source}")]
    File {
        /// The call.
        call: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("no thread can be started: {0}")]
    Thread(std::io::Error),
    /// The error of `onehop_usrbio`.
    #[error(transparent)]
    Usrbio(#[from] onehop_usrbio::Error),
    /// Shared memory could not be allocated or accessed.
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

    /// The error number that a program gets.
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
