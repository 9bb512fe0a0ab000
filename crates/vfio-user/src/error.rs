//! What ends a server, what ends a session, and what a client's request is refused with.

use std::path::PathBuf;

use rustix::io::Errno;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why nothing can be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody listens on the socket already.
    #[error("{0} is in use by another server; choose another path, or stop that one")]
    InUse(PathBuf),
    /// Something that is no socket has the path.
    #[error("{0} exists and is not a socket; choose another path")]
    NotASocket(PathBuf),
    /// The socket could not be made or used.
    #[error("{call} of the socket {path} failed: {source}")]
    Socket {
        /// What was tried.
        call: &'static str,
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Clients cannot be given doorbells to map.
    #[error("the doorbells cannot be mapped: {call} failed: {source}")]
    Doorbells {
        /// What was tried.
        call: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The simulated drive is of a kind that cannot be served.
    #[error("this simulated drive cannot be served: {0}")]
    Unfit(&'static str),
}

/// Why a served controller cannot be driven.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing takes connections there.
    #[error("nothing could be reached on the socket {path}: {source}{hint}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
        /// What to do about it, or nothing.
        hint: &'static str,
    },
    /// The server refused a request.
    #[error("the server on {path} refused {what}: {source}")]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The request.
        what: &'static str,
        /// The error number that it gave.
        source: std::io::Error,
    },
    /// The connection is of no more use.
    #[error("the connection to {path} ended during {what}: {why}")]
    Broken {
        /// The socket.
        path: PathBuf,
        /// The request at that time.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// What is served there is not something that onehop drives.
    #[error("what is served on {path} cannot be driven: {why}")]
    Unfit {
        /// The socket.
        path: PathBuf,
        /// The reason.
        why: String,
    },
}

/// Why a session ended before the other side closed it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// The other side broke the protocol in a way after which the next message cannot be found.
    #[error("the other side broke the protocol: {0}")]
    Protocol(String),
    /// The other side stopped in the middle of a message, or takes none.
    #[error("the other side did not {0} within {1} s")]
    Slow(&'static str, u64),
    /// The socket failed.
    #[error("{0} of the socket failed: {1}")]
    Socket(&'static str, Errno),
}

/// Why one request is refused: the error number of the reply, and the reason for people.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error number that the client is told.
    pub errno: Errno,
    /// The reason.
    pub why: String,
}

impl Refusal {
    /// A request that makes no sense.
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self { errno: Errno::INVAL, why: why.into() }
    }

    /// A request that makes sense, but not here.
    pub(crate) fn unsupported(why: impl Into<String>) -> Self {
        Self { errno: Errno::OPNOTSUPP, why: why.into() }
    }
}
