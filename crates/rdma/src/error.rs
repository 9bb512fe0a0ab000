//! What can go wrong with RDMA.

use crate::memory::RefusedRoute;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no RDMA, or not what was asked of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This machine has none, or none that can be used.
    #[error("no RDMA: {why}")]
    NoRdma {
        /// What is missing, and what would change that.
        why: String,
    },
    /// A call of the verbs library failed.
    #[error("{call} on {device}: {source}{hint}")]
    Call {
        /// The call.
        call: &'static str,
        /// The RDMA device.
        device: String,
        /// What the system said.
        source: std::io::Error,
        /// What to do about it, or nothing.
        hint: &'static str,
    },
    /// Memory that no way of registering takes: it has to be reached through other memory.
    #[error("the memory cannot be registered with {device}: {}", each(.refusals))]
    NotRegistered {
        /// The RDMA device.
        device: String,
        /// Each way, and why it was refused.
        refusals: Vec<RefusedRoute>,
    },
    /// All registrations that are allowed are in use.
    #[error(
        "{bytes} bytes more cannot be registered: {held} registrations of {held_bytes} bytes are in use, and the limits are \
         {most} and {most_bytes}"
    )]
    Full {
        /// What was asked for.
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
    /// A range that is not within its memory.
    #[error("{bytes} bytes at {offset} do not lie within memory of {len}")]
    OutOfRange {
        /// Where the range begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// How long the memory is.
        len: u64,
    },
    /// A device is opened or a connection is made by a thread that has acted as a user ([`onehop_os::identity`]).
    #[error(
        "a thread that has acted as a user cannot {what}: the kernel would refuse the calls of the threads that it starts"
    )]
    ActedAsUser {
        /// What it wanted to do.
        what: &'static str,
    },
    /// The other side said what it must not say.
    #[error("the other side breaks the protocol: {0}")]
    Protocol(String),
    /// The connection has ended; what was under way has failed.
    #[error("the connection is broken: {0}")]
    Broken(String),
    /// Something took longer than it may.
    #[error("{0} took longer than it may")]
    TimedOut(&'static str),
    /// Shared memory could not be had or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// The system refused something else.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
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
