//! What can go wrong with the system's files.

use std::io;

use serde::{Serialize, Serializer};

use crate::Address;
use crate::kmod::Refusal;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something of the system could not be read or done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such file: the device or the kernel does not have it.
    #[error("there is no {path}")]
    Missing {
        /// The file.
        path: String,
    },
    /// The file is there, and not for this user.
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
        /// What the system said.
        why: String,
    },
    /// The file says something that makes no sense.
    #[error("{path} holds {found:?}, which is no {wanted}")]
    Garbage {
        /// The file.
        path: String,
        /// What it says, shortened.
        found: String,
        /// What was expected.
        wanted: &'static str,
    },
    /// It is not allowed, or not possible here.
    #[error("{what}: {why}. {fix}")]
    Refused {
        /// What was to be done.
        what: String,
        /// Why not.
        why: String,
        /// What would change that.
        fix: String,
    },
    /// A device could not be given to a driver, nor back to the one that it had.
    #[error("{first}. And it could not be rebound to its driver: {then}")]
    NotGivenBack {
        /// Why it was not given.
        first: Box<Self>,
        /// Why not back.
        then: Box<Self>,
    },
    /// The kernel module refused something.
    #[error("{call} {address} by the kernel module: {refusal}")]
    Module {
        /// What it was asked for.
        call: &'static str,
        /// Of which device.
        address: Address,
        /// Why it refused, and how to fix that.
        refusal: Refusal,
    },
    /// A system call failed.
    #[error("{call}: {why}")]
    Call {
        /// The call, and what it was made on.
        call: String,
        /// What the system said.
        why: String,
    },
    /// A record of a system is not one.
    #[error("{name} is no recorded system: {why}")]
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

    /// A file whose contents make no sense.
    #[must_use]
    pub fn garbage(path: &str, found: &str, wanted: &'static str) -> Self {
        let mut short: String = found.chars().take(60).collect();
        if short.len() < found.len() {
            short.push('…');
        }
        Self::Garbage { path: path.to_owned(), found: short, wanted }
    }

    /// Whether there is simply nothing.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// Whether root would be told.
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
