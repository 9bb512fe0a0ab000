//! Errors between a mount and its target.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call for a connection failed.
    #[error("{call} {peer}: {source}")]
    Io {
        /// The call.
        call: &'static str,
        /// The other side.
        peer: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The other side violates the protocol.
    #[error("{peer} violates the protocol: {what}")]
    Protocol {
        /// The other side.
        peer: String,
        /// What it did.
        what: String,
    },
    /// Data was corrupted in transit.
    #[error(
        "{what} from {peer} has the checksum {is:08x}, not {announced:08x}: bytes were changed in transit"
    )]
    Checksum {
        /// The other side.
        peer: String,
        /// Which bytes.
        what: &'static str,
        /// The actual checksum.
        is: u32,
        /// The announced checksum.
        announced: u32,
    },
    /// A frame is not authentic: it was changed, repeated, dropped, moved or forged.
    #[error("data from {peer} was changed in transit")]
    Forged {
        /// The other side.
        peer: String,
    },
    /// The other side did not act in time.
    #[error("{peer} did not {what} within {limit:?}")]
    TimedOut {
        /// The other side.
        peer: String,
        /// What it should have done.
        what: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// A request to stop ended the wait for a connection.
    #[error("the wait for a connection with {peer} was stopped")]
    Stopped {
        /// The other side.
        peer: String,
    },
    /// The connection has ended.
    #[error("the connection with {peer} has ended")]
    Closed {
        /// The other side.
        peer: String,
    },
    /// The other side refuses the connection.
    #[error("{peer} refuses: {why}")]
    Refused {
        /// The other side.
        peer: String,
        /// Its reason.
        why: String,
    },
    /// The other side has no key, or another one.
    #[error("{peer} does not have our key")]
    WrongKey {
        /// The other side.
        peer: String,
    },
    /// A file cannot be used as a key.
    #[error("the key in {path} cannot be used: {why}")]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// Not an address.
    #[error("{0} is not an address: expected HOST:PORT")]
    Address(String),
    /// Only loopback addresses are allowed.
    #[error("{address} is not a loopback address, which a target without a key requires")]
    NotLoopback {
        /// The address.
        address: String,
    },
    /// A transport cannot do what was requested.
    #[error("{transport} cannot {what}: {why}")]
    CannotReach {
        /// The transport.
        transport: &'static str,
        /// What was requested.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// RDMA is not available, or failed.
    #[error(transparent)]
    Rdma(#[from] onehop_rdma::Error),
    /// Memory could not be allocated or accessed.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
}

impl Error {
    /// A system call that failed.
    pub fn io(call: &'static str, peer: &str, source: impl Into<std::io::Error>) -> Self {
        Self::Io { call, peer: peer.to_owned(), source: source.into() }
    }

    /// A violation of the protocol.
    pub fn protocol(peer: &str, what: impl Into<String>) -> Self {
        Self::Protocol { peer: peer.to_owned(), what: what.into() }
    }

    pub(crate) fn key(path: &Path, why: impl Into<String>) -> Self {
        Self::Key { path: path.to_owned(), why: why.into() }
    }
}
