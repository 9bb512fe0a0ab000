//! Errors of this crate.

use crate::memory::RefusedRoute;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an RDMA operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This machine has no usable RDMA.
    #[error("no RDMA: {why}")]
    NoRdma {
        /// What is missing, and how to fix it.
        why: String,
    },
    /// A call of the verbs library failed.
    #[error("{call} on {device}: {source}{hint}")]
    Call {
        /// The call.
        call: &'static str,
        /// The RDMA device.
        device: String,
        /// The system's error.
        source: std::io::Error,
        /// A hint, or empty.
        hint: &'static str,
    },
    /// Memory that cannot be registered by any route: other memory must be used in between.
    #[error("the memory cannot be registered with {device}: {}", each(.refusals))]
    NotRegistered {
        /// The RDMA device.
        device: String,
        /// Each route, and why it was refused.
        refusals: Vec<RefusedRoute>,
    },
    /// All permitted registrations are in use.
    #[error(
        "{bytes} bytes more cannot be registered: {held} registrations of {held_bytes} bytes are in use, and the limits are \
         {most} and {most_bytes}"
    )]
    Full {
        /// Requested bytes.
        bytes: u64,
        /// Registrations in use.
        held: usize,
        /// Their bytes.
        held_bytes: u64,
        /// The limit of registrations.
        most: usize,
        /// The limit of their bytes.
        most_bytes: u64,
    },
    /// A range is outside its memory.
    #[error("{bytes} bytes at {offset} do not lie within memory of {len}")]
    OutOfRange {
        /// Offset of the range.
        offset: u64,
        /// Length of the range.
        bytes: u64,
        /// Length of the memory.
        len: u64,
    },
    /// A thread that has acted as a user ([`onehop_os::identity`]) opens a device or makes a connection.
    #[error(
        "a thread that has acted as a user cannot {what}: the kernel would refuse the calls of the threads that it starts"
    )]
    ActedAsUser {
        /// What it attempted.
        what: &'static str,
    },
    /// The other side violated the protocol.
    #[error("the other side breaks the protocol: {0}")]
    Protocol(String),
    /// The connection has ended; its work in flight has failed.
    #[error("the connection is broken: {0}")]
    Broken(String),
    /// A time-out.
    #[error("{0} timed out")]
    TimedOut(&'static str),
    /// Shared memory could not be allocated or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// Another call of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

fn each(all: &[RefusedRoute]) -> String {
    all.iter().map(|one| format!("{}: {}", one.way.name(), one.why)).collect::<Vec<_>>().join("; ")
}

impl Error {
    pub(crate) fn none(why: impl Into<String>) -> Self {
        Self::NoRdma { why: why.into() }
    }

    pub(crate) fn system(what: &'static str, source: impl Into<std::io::Error>) -> Self {
        Self::System { what, source: source.into() }
    }
}
