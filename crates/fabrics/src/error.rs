//! Errors of this crate.

use std::sync::Arc;
use std::time::Duration;

use onehop_proto::Status;
use onehop_proto::fabrics::connect_status;

use crate::queue::Violation;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a target could not be reached or used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name is not that of a target.
    #[error("'{name}' names no target: {why}")]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The host's name or identifier cannot be determined.
    #[error("{what}: {source}")]
    Host {
        /// What was read.
        what: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// No connection can be made.
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
        /// The queue that it is of.
        queue: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// The target closed the connection.
    #[error("the target closed the connection of {queue}{}", if *.is_early { ": it may not speak NVMe/TCP, or refuse what was asked for (digests)" } else { "" })]
    Closed {
        /// The queue that it is of.
        queue: String,
        /// Whether it did so before the connection was open.
        is_early: bool,
    },
    /// The target broke the protocol.
    #[error("the connection of {queue} was given up: {source}")]
    Protocol {
        /// The queue that it is of.
        queue: String,
        /// What is wrong.
        source: Violation,
    },
    /// The target did not answer.
    #[error("{queue}: the target did not answer {what} within {waited:?}")]
    Silent {
        /// The queue.
        queue: String,
        /// What was asked.
        what: &'static str,
        /// How long the answer was waited for.
        waited: Duration,
    },
    /// The target refused to connect a queue.
    #[error("the target refuses to connect {queue} ({status}): {}{}", connect_status(*.status), parameter(*.status, *.result))]
    Refused {
        /// The queue.
        queue: String,
        /// The target's answer.
        status: Status,
        /// Where the refused parameter lies.
        result: u32,
    },
    /// The target refused a command that is needed to use it.
    #[error("{what} failed: {status}")]
    Command {
        /// The command.
        what: &'static str,
        /// The target's answer.
        status: Status,
    },
    /// The target wants to be convinced of who the host is, and no secret was given.
    #[error(
        "the target asks for authentication (DH-HMAC-CHAP): give the secret of the host {host} by ?dhchap=FILE"
    )]
    Authentication {
        /// The host's NQN.
        host: String,
    },
    /// One side does not believe the other.
    #[error("authentication of {queue} failed: {why}")]
    AuthenticationFailed {
        /// The queue.
        queue: String,
        /// What is wrong.
        why: String,
    },
    /// A file holds no secret that can be used.
    #[error("the secret in {path} cannot be used: {why}")]
    Secret {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The controller did not become ready, or come to rest.
    #[error("the controller did not become {want} within {waited:?} (CSTS {csts:#x})")]
    NotReady {
        /// `ready` or `shut down`.
        want: &'static str,
        /// How long it was waited for.
        waited: Duration,
        /// The status register.
        csts: u32,
    },
    /// The target cannot be used with this host.
    #[error("the target cannot be used: {0}")]
    Unsupported(String),
    /// The caller asked for an end.
    #[error("stopped on request")]
    Interrupted,
    /// The connection was closed by this host.
    #[error("the connection of {queue} was closed")]
    Over {
        /// The queue.
        queue: String,
    },
    /// Memory could not be had or reached.
    #[error("{0}")]
    Memory(String),
}

impl From<onehop_os::Error> for Error {
    fn from(error: onehop_os::Error) -> Self {
        Self::Memory(error.to_string())
    }
}

/// Where a Connect command has the parameter that was refused.
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
