//! Errors of this crate.

use std::path::PathBuf;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a simulated drive could not be created, or its media not be accessed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An unknown option.
    #[error("unknown option '{key}' in the simulated drive '{spec}'; known are: {known}")]
    UnknownOption {
        /// The option.
        key: String,
        /// The specification that contains it.
        spec: String,
        /// All known options.
        known: String,
    },
    /// An invalid value of an option.
    #[error("option {key}={value}: {wanted}")]
    BadValue {
        /// The option.
        key: String,
        /// The value.
        value: String,
        /// Valid values.
        wanted: String,
    },
    /// An unknown fault.
    #[error("unknown fault '{name}'; known are: {known}")]
    UnknownFault {
        /// Its name.
        name: String,
        /// All known faults.
        known: String,
    },
    /// An invalid trigger or parameter of a fault.
    #[error("fault '{fault}': {why}")]
    BadFault {
        /// The fault as it was written.
        fault: String,
        /// What is wrong, and what is valid.
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
        /// What was attempted.
        call: &'static str,
        /// The system's error.
        source: std::io::Error,
        /// A hint, or empty.
        hint: &'static str,
    },
    /// The image file is not suitable for a drive.
    #[error("{path} cannot be a drive image: {why}")]
    NotAnImage {
        /// The file.
        path: PathBuf,
        /// The reason, and a fix.
        why: String,
    },
    /// A namespace that the drive does not have.
    #[error("the simulated drive has no namespace {nsid}, only 1 to {last}")]
    NoNamespace {
        /// The requested namespace.
        nsid: u32,
        /// The last namespace.
        last: u32,
    },
    /// Bytes outside a namespace.
    #[error("bytes {offset}+{bytes} do not lie within namespace {nsid}, which has {size} bytes")]
    OutOfRange {
        /// The namespace.
        nsid: u32,
        /// Offset of the bytes.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
        /// The size of the namespace.
        size: u64,
    },
    /// The medium itself could not be read or written.
    #[error("the medium of the simulated drive failed: {0}")]
    Medium(#[from] std::io::Error),
    /// Memory could not be allocated.
    #[error("memory of the simulated drive: {0}")]
    Memory(#[from] onehop_os::Error),
    /// The worker thread could not be started.
    #[error("cannot start the worker thread of the simulated drive: {0}; workers=0 runs without one")]
    Worker(std::io::Error),
}
