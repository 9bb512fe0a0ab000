//! Errors of this crate.

use std::path::PathBuf;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why QEMU's model could not be opened or accessed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The drive's name is malformed.
    #[error(
        "qtest:{spec}: {why}; the form is qtest:SOCKET,MEMORY-FILE[,bdf=DD.F], as `bed/qtest.sh start DIR` prints it"
    )]
    Spec {
        /// What followed `qtest:`.
        spec: String,
        /// What is wrong with it.
        why: String,
    },
    /// QEMU does not listen on the socket.
    #[error("cannot connect to QEMU at {}: {source}; start QEMU with `bed/qtest.sh start DIR`", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// QEMU has ended, or does not speak the protocol.
    #[error("QEMU at {} is gone: {why}", socket.display())]
    Gone {
        /// The socket.
        socket: PathBuf,
        /// What was observed last.
        why: String,
    },
    /// The file is not this QEMU's guest memory.
    #[error("the memory file {}: {why}", file.display())]
    Memory {
        /// The file.
        file: PathBuf,
        /// What is wrong, and how to fix it.
        why: String,
    },
    /// No controller, or no unambiguous one.
    #[error("QEMU at {}: {why}", socket.display())]
    Controller {
        /// The socket.
        socket: PathBuf,
        /// What was found instead, and how to fix it.
        why: String,
    },
    /// A file or program of the test bed could not be created or started.
    #[error("{what}: {source}")]
    Bed {
        /// What was attempted.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// QEMU refused its command line, or ended before it was ready.
    #[error("QEMU did not get ready: {why}")]
    NotReady {
        /// Its message.
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
