//! Errors of this crate.

use std::io;

use serde::{Serialize, Serializer};

use crate::Address;
use crate::kmod::Refusal;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something of the system could not be read or done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The file does not exist: neither the device nor the kernel has it.
    #[error("there is no {path}")]
    Missing {
        /// The file.
        path: String,
    },
    /// The file is not readable by this user.
    #[error("this user may not read {path}; root may")]
    Denied {
        /// The file.
        path: String,
    },
    /// The file could not be read.
    #[error("reading {path}: {why}")]
    Unreadable {
        /// The file.
        path: String,
        /// The system's error.
        why: String,
    },
    /// The file's contents are malformed.
    #[error("{path} holds {found:?}, not a valid {wanted}")]
    Garbage {
        /// The file.
        path: String,
        /// Its contents, shortened.
        found: String,
        /// What was expected.
        wanted: &'static str,
    },
    /// Not allowed, or not possible on this machine.
    #[error("{what}: {why}. {fix}")]
    Refused {
        /// What was attempted.
        what: String,
        /// Why not.
        why: String,
        /// How to fix it.
        fix: String,
    },
    /// A device could not be bound to a driver, nor rebound to its former one.
    #[error("{first}. And it could not be rebound to its driver: {then}")]
    NotReleased {
        /// Why it was not bound.
        first: Box<Self>,
        /// Why it was not rebound.
        then: Box<Self>,
    },
    /// The kernel module refused a request.
    #[error("{call} {address} by the kernel module: {refusal}")]
    Module {
        /// The request.
        call: &'static str,
        /// The device.
        address: Address,
        /// Why it refused, and how to fix that.
        refusal: Refusal,
    },
    /// A system call failed.
    #[error("{call}: {why}")]
    Call {
        /// The call and its object.
        call: String,
        /// The system's error.
        why: String,
    },
    /// Not a valid system record.
    #[error("{name} is not a recorded system: {why}")]
    NoRecord {
        /// The record.
        name: String,
        /// What is wrong with it.
        why: String,
    },
}

impl Error {
    pub(crate) fn io(path: &str, error: &io::Error) -> Self {
        let path = path.to_owned();
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Missing { path },
            io::ErrorKind::PermissionDenied => Self::Denied { path },
            _ => Self::Unreadable { path, why: error.to_string() },
        }
    }

    pub(crate) fn call(call: impl Into<String>, error: io::Error) -> Self {
        Self::Call { call: call.into(), why: error.to_string() }
    }

    /// An error for malformed contents of a file.
    #[must_use]
    pub fn garbage(path: &str, found: &str, wanted: &'static str) -> Self {
        let mut short: String = found.chars().take(60).collect();
        if short.len() < found.len() {
            short.push('…');
        }
        Self::Garbage { path: path.to_owned(), found: short, wanted }
    }

    /// Whether the file simply does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// Whether root could read it.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Denied { .. })
    }
}

impl Serialize for Error {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
