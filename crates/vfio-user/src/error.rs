//! Errors that end a server or a session, and refusals of a client's request.

use std::path::PathBuf;

use rustix::io::Errno;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another server listens on the socket.
    #[error("{0} is in use by another server; choose another path, or stop that one")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0} exists and is not a socket; choose another path")]
    NotASocket(PathBuf),
    /// A socket call failed.
    #[error("{call} of the socket {path} failed: {source}")]
    Socket {
        /// The call.
        call: &'static str,
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The doorbells cannot be offered for mapping.
    #[error("the doorbells cannot be mapped: {call} failed: {source}")]
    Doorbells {
        /// The call.
        call: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// This kind of simulated drive cannot be served.
    #[error("this simulated drive cannot be served: {0}")]
    Unfit(&'static str),
}

/// Why a served controller cannot be driven.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No server accepts connections there.
    #[error("cannot connect to the socket {path}: {source}{hint}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
        /// A hint how to fix it, or empty.
        hint: &'static str,
    },
    /// The server refused a request.
    #[error("the server on {path} refused {what}: {source}")]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The request.
        what: &'static str,
        /// The server's error number.
        source: std::io::Error,
    },
    /// The connection is unusable.
    #[error("the connection to {path} ended during {what}: {why}")]
    Broken {
        /// The socket.
        path: PathBuf,
        /// The request during which it ended.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// The served device is not supported.
    #[error("the device served on {path} cannot be driven: {why}")]
    Unfit {
        /// The socket.
        path: PathBuf,
        /// The reason.
        why: String,
    },
}

/// Why a session ended before the peer closed it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// The peer violated the protocol, and the next message cannot be located.
    #[error("the peer violated the protocol: {0}")]
    Protocol(String),
    /// The peer stopped in the middle of a message, or does not accept any.
    #[error("the peer did not {0} within {1} s")]
    Slow(&'static str, u64),
    /// The socket failed.
    #[error("{0} of the socket failed: {1}")]
    Socket(&'static str, Errno),
}

/// Why a request is refused: the error number of the reply, and a reason for people.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error number for the client.
    pub errno: Errno,
    /// The reason.
    pub why: String,
}

impl Refusal {
    /// An invalid request.
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self { errno: Errno::INVAL, why: why.into() }
    }

    /// A valid request that is not supported.
    pub(crate) fn unsupported(why: impl Into<String>) -> Self {
        Self { errno: Errno::OPNOTSUPP, why: why.into() }
    }
}
