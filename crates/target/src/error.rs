//! What can go wrong between a mount and its target.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something between a mount and its target failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call on a connection or on what it takes to have one failed.
    #[error("{call} {peer}: {source}")]
    Io {
        /// The call.
        call: &'static str,
        /// The other side.
        peer: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The other side does not keep to the protocol.
    #[error("{peer} breaks the protocol: {what}")]
    Protocol {
        /// The other side.
        peer: String,
        /// What it did.
        what: String,
    },
    /// Bytes changed on their way.
    #[error("{what} from {peer} has the checksum {is:08x}, not {said:08x}: bytes changed on their way")]
    Checksum {
        /// The other side.
        peer: String,
        /// Which bytes.
        what: &'static str,
        /// What they have.
        is: u32,
        /// What was announced.
        said: u32,
    },
    /// A frame is not what the other side sent in its place: it was changed, repeated, left out, moved or made up.
    #[error("what came from {peer} was changed in transit")]
    Forged {
        /// The other side.
        peer: String,
    },
    /// The other side let a wait run out.
    #[error("{peer} did not {what} within {limit:?}")]
    TimedOut {
        /// The other side.
        peer: String,
        /// What it was to do.
        what: &'static str,
        /// How long it had.
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
    /// The other side does not want to talk to us, and says why.
    #[error("{peer} refuses: {why}")]
    Refused {
        /// The other side.
        peer: String,
        /// Its reason.
        why: String,
    },
    /// The other side does not have the key, or not the same.
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
        /// What is wrong with it, and what helps.
        why: String,
    },
    /// It is no address.
    #[error("{0} is no address: it has to be HOST:PORT")]
    Address(String),
    /// Only this machine's own addresses were allowed.
    #[error("{address} is not a loopback address, and without a key a target is used at no other")]
    NotLoopback {
        /// Where it would have been connected to.
        address: String,
    },
    /// A transport cannot do what was asked of it.
    #[error("{transport} cannot {what}: {why}")]
    CannotReach {
        /// The transport.
        transport: &'static str,
        /// What was asked.
        what: &'static str,
        /// Why it cannot be.
        why: String,
    },
    /// RDMA cannot be used, or failed.
    #[error(transparent)]
    Rdma(#[from] onehop_rdma::Error),
    /// Memory could not be had or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
}

impl Error {
    /// A call that failed on a connection.
    pub fn io(call: &'static str, peer: &str, source: impl Into<std::io::Error>) -> Self {
        Self::Io { call, peer: peer.to_owned(), source: source.into() }
    }

    /// Something that the protocol does not allow.
    pub fn protocol(peer: &str, what: impl Into<String>) -> Self {
        Self::Protocol { peer: peer.to_owned(), what: what.into() }
    }

    pub(crate) fn key(path: &Path, why: impl Into<String>) -> Self {
        Self::Key { path: path.to_owned(), why: why.into() }
    }
}
