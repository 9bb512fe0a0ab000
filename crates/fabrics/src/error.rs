//! Errors of this crate.

use std::sync::Arc;
use std::time::Duration;

use onehop_proto::Status;
use onehop_proto::fabrics::connect_status;

use crate::queue::ProtocolViolation;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a target could not be reached or used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not a target's name.
    #[error("'{name}' names no target: {why}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The host's name or identifier cannot be determined.
    #[error("{what}: {source}")]
    Host {
        /// What was being read.
        what: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// No connection is possible.
    #[error("no connection to {address}: {source}")]
    Unreachable {
        /// The address.
        address: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// The connection failed.
    #[error("the connection of {queue} failed: {source}")]
    Io {
        /// The queue.
        queue: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// The target closed the connection.
    #[error("the target closed the connection of {queue}{}", if *.is_early { ": it may not speak NVMe/TCP, or refuse what was asked for (digests)" } else { "" })]
    Closed {
        /// The queue.
        queue: String,
        /// Whether it did so before the connection was open.
        is_early: bool,
    },
    /// The target violated the protocol.
    #[error("the connection of {queue} was closed: {source}")]
    Protocol {
        /// The queue.
        queue: String,
        /// What is wrong.
        source: ProtocolViolation,
    },
    /// The target did not answer.
    #[error("{queue}: the target did not answer {what} within {waited:?}")]
    Silent {
        /// The queue.
        queue: String,
        /// What was requested.
        what: &'static str,
        /// How long the wait was.
        waited: Duration,
    },
    /// The target refused to connect a queue.
    #[error("the target refuses to connect {queue} ({status}): {}{}", connect_status(*.status), parameter(*.status, *.result))]
    Refused {
        /// The queue.
        queue: String,
        /// The target's answer.
        status: Status,
        /// Location of the refused parameter.
        result: u32,
    },
    /// The target refused a command that is required to use it.
    #[error("{what} failed: {status}")]
    Command {
        /// The command.
        what: &'static str,
        /// The target's answer.
        status: Status,
    },
    /// The target requires authentication, and no secret was given.
    #[error(
        "the target asks for authentication (DH-HMAC-CHAP): give the secret of the host {host} by ?dhchap=FILE"
    )]
    Authentication {
        /// The host's NQN.
        host: String,
    },
    /// One side rejects the other's proof.
    #[error("authentication of {queue} failed: {why}")]
    AuthenticationFailed {
        /// The queue.
        queue: String,
        /// What is wrong.
        why: String,
    },
    /// A file contains no usable secret.
    #[error("the secret in {path} cannot be used: {why}")]
    Secret {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The controller did not become ready, or did not shut down.
    #[error("the controller did not become {want} within {waited:?} (CSTS {csts:#x})")]
    NotReady {
        /// `ready` or `shut down`.
        want: &'static str,
        /// How long the wait was.
        waited: Duration,
        /// The status register.
        csts: u32,
    },
    /// The target cannot be used with this host.
    #[error("the target cannot be used: {0}")]
    Unsupported(String),
    /// A request to stop.
    #[error("stopped on request")]
    Interrupted,
    /// This host closed the connection.
    #[error("the connection of {queue} was closed")]
    Over {
        /// The queue.
        queue: String,
    },
    /// Memory could not be allocated or reached.
    #[error("{0}")]
    Memory(String),
}

impl From<onehop_os::Error> for Error {
    fn from(error: onehop_os::Error) -> Self {
        Self::Memory(error.to_string())
    }
}

/// The location of a refused parameter of a Connect command.
fn parameter(status: Status, result: u32) -> String {
    if status.0 & 0x7ff != 0x182 {
        return String::new();
    }
    let part = if result >> 16 & 1 == 0 { "command" } else { "data" };
    let name = match (part, result as u16) {
        ("data", 256) => ": it has no subsystem of this name",
        ("data", 512) => ": the host's name",
        ("data", 16) => ": the controller",
        ("command", 44) => ": the queue's size",
        _ => "",
    };
    format!(" (byte {} of its {part}{name})", result as u16)
}
