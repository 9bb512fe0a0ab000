//! What can go wrong between here and QEMU's model.

use std::path::PathBuf;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why QEMU's model could not be had or reached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The drive's name cannot be understood.
    #[error(
        "qtest:{spec}: {why}; wanted is qtest:SOCKET,MEMORY-FILE[,bdf=DD.F], as `bed/qtest.sh start DIR` prints it"
    )]
    Spec {
        /// What followed `qtest:`.
        spec: String,
        /// What is wrong with it.
        why: String,
    },
    /// Nobody listens at the socket.
    #[error("cannot connect to QEMU at {}: {source}; start QEMU with `bed/qtest.sh start DIR`", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// QEMU was there and is no more, or does not speak as it should.
    #[error("QEMU at {} is gone: {why}", socket.display())]
    Gone {
        /// The socket.
        socket: PathBuf,
        /// What was seen last.
        why: String,
    },
    /// The file cannot be this QEMU's guest memory.
    #[error("the memory file {}: {why}", file.display())]
    Memory {
        /// The file.
        file: PathBuf,
        /// What is wrong, with what would mend it.
        why: String,
    },
    /// No controller, or no way to choose one.
    #[error("QEMU at {}: {why}", socket.display())]
    Controller {
        /// The socket.
        socket: PathBuf,
        /// What was found instead, with what would mend it.
        why: String,
    },
    /// A file or program of the test bed could not be made or started.
    #[error("{what}: {source}")]
    Bed {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// QEMU refused its command line, or ended before it was ready.
    #[error("QEMU did not get ready: {why}")]
    NotReady {
        /// What it said.
        why: String,
    },
    /// Memory could not be mapped.
    #[error(transparent)]
    Os(#[from] onehop_os::Error),
}

impl Error {
    pub(crate) fn bed(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Bed { what: what.into(), source: source.into() }
    }
}
