//! What can go wrong when a simulated drive is made or looked into.

use std::path::PathBuf;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a simulated drive could not be made, or its media not be reached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option that nobody knows.
    #[error("unknown option '{key}' in the simulated drive '{spec}'; known are: {known}")]
    UnknownOption {
        /// The option.
        key: String,
        /// Where it was found.
        spec: String,
        /// Every option that there is.
        known: String,
    },
    /// An option's value that cannot be used.
    #[error("option {key}={value}: {wanted}")]
    BadValue {
        /// The option.
        key: String,
        /// What was given.
        value: String,
        /// What would be right.
        wanted: String,
    },
    /// A fault that nobody knows.
    #[error("unknown fault '{name}'; known are: {known}")]
    UnknownFault {
        /// The name that was given.
        name: String,
        /// Every fault that there is.
        known: String,
    },
    /// A fault's moment or parameter that cannot be understood.
    #[error("fault '{fault}': {why}")]
    BadFault {
        /// The fault as it was written.
        fault: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// Options that contradict each other.
    #[error("the simulated drive cannot be built: {0}")]
    Contradiction(String),
    /// The image file could not be used.
    #[error("{call} of the drive image {path} failed: {source}{hint}")]
    Image {
        /// The image file.
        path: PathBuf,
        /// What was tried.
        call: &'static str,
        /// What the system said.
        source: std::io::Error,
        /// What to do about it, or nothing.
        hint: &'static str,
    },
    /// The image file is not fit for a drive.
    #[error("{path} cannot be a drive image: {why}")]
    NotAnImage {
        /// The file.
        path: PathBuf,
        /// The reason, and what would mend it.
        why: String,
    },
    /// A namespace that the drive does not have.
    #[error("the simulated drive has no namespace {nsid}, only 1 to {last}")]
    NoNamespace {
        /// The namespace that was asked for.
        nsid: u32,
        /// The last one that there is.
        last: u32,
    },
    /// Bytes that do not lie within a namespace.
    #[error("bytes {offset}+{bytes} do not lie within namespace {nsid}, which has {size} bytes")]
    OutOfRange {
        /// The namespace.
        nsid: u32,
        /// Where the bytes start.
        offset: u64,
        /// How many there are.
        bytes: u64,
        /// The size of the namespace.
        size: u64,
    },
    /// The medium itself could not be read or written.
    #[error("the medium of the simulated drive failed: {0}")]
    Medium(#[from] std::io::Error),
    /// Memory could not be had.
    #[error("memory of the simulated drive: {0}")]
    Memory(#[from] onehop_os::Error),
    /// The worker thread could not be started.
    #[error("cannot start the worker thread of the simulated drive: {0}; workers=0 runs without one")]
    Worker(std::io::Error),
}
