//! Errors of this crate.

use std::io::ErrorKind;
use std::time::Duration;

use onehop_proto::GpuAddr;

use crate::cuda::is_lost;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a GPU operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its memory could not be allocated or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// A GPU thread accessed an address that is not memory of this GPU.
    #[error("a GPU thread made a {access} of {bytes} bytes at {addr}, where there is {what}")]
    Fault {
        /// The kind of access.
        access: &'static str,
        /// The address.
        addr: GpuAddr,
        /// Its size.
        bytes: u32,
        /// What is at the address.
        what: &'static str,
    },
    /// A GPU thread ended in an unexpected way.
    #[error("a GPU thread panicked: {0}; this is a defect of onehop")]
    Panicked(String),
    /// A launch is invalid.
    #[error("this launch cannot run: {0}")]
    Launch(String),
    /// There is no CUDA, or none that works.
    #[error("CUDA cannot be used: {why}")]
    NoCuda {
        /// The reason, with a fix.
        why: String,
    },
    /// There is no such GPU.
    #[error("there is no GPU {name}: {have}")]
    NoSuchGpu {
        /// The requested name.
        name: String,
        /// The existing GPUs.
        have: String,
    },
    /// A call of the CUDA driver failed.
    #[error("{what}: {call} failed with {name} ({code}): {text}{hint}")]
    Driver {
        /// What was being done.
        what: String,
        /// The call.
        call: &'static str,
        /// The error's name.
        name: String,
        /// Its number.
        code: i32,
        /// The driver's description.
        text: String,
        /// A hint, or empty.
        hint: String,
    },
    /// The program has destroyed the CUDA context: its work has ended, and its memory is gone.
    #[error("{what}: the program has destroyed the CUDA context of this memory or stream")]
    ContextDestroyed {
        /// What was being done.
        what: String,
    },
    /// The GPU accepted work that neither ended nor failed.
    #[error("{what}: it neither ended nor failed within {seconds} s; nvidia-smi and dmesg say more")]
    Silent {
        /// What was being done.
        what: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// A launch exceeded its limits. What it uses is left to it until it ends, and no GPU memory is freed before.
    #[error("{what} did not end within {seconds} s; its memory is left to it until it ends")]
    Unended {
        /// What was started.
        what: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The driver does not report whether work that was started has ended. What it uses is left to it until it has.
    #[error("{cause}; the work may still be running, and its memory is left alone until it has ended")]
    OutcomeUnknown {
        /// The driver's error.
        cause: Box<Error>,
    },
    /// A kernel did not end in time, and was cancelled: it writes nothing more, even if it starts later.
    #[error("{what} did not end within {limit:?} and was cancelled")]
    Cancelled {
        /// What was started.
        what: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// A kernel did not end in time, and could not be cancelled because it was writing.
    #[error(
        "{what} did not end within {limit:?} and is still writing: do not use this memory before the GPU is idle"
    )]
    StillWriting {
        /// What was started.
        what: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The GPU, its driver or the platform does not support it.
    #[error("{what} is not possible here: {why}")]
    NotSupported {
        /// What was to be done.
        what: String,
        /// The reason, with a fix.
        why: String,
    },
    /// Device registers could not be made accessible to the GPU.
    #[error("the GPU cannot write this device's doorbells: {why}")]
    Registers {
        /// The reasons that apply here, with a fix for each.
        why: String,
    },
    /// Memory of another process does not match its description.
    #[error("this is not the shared GPU memory that the ticket describes: {why}")]
    Foreign {
        /// What differs.
        why: String,
    },
}

impl Error {
    /// Whether the failed work may still be running. Until it has ended, its source must not be written, nor its
    /// destination used. Work lost with its context has ended.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        matches!(
            self,
            Self::OutcomeUnknown { .. }
                | Self::Silent { .. }
                | Self::Unended { .. }
                | Self::StillWriting { .. }
        )
    }

    /// The error of a call that waits for work: the work may still be running, unless its context is lost.
    pub(crate) fn of_begun_work(self) -> Self {
        match self {
            Self::Driver { code, .. } if is_lost(code) => self,
            Self::ContextDestroyed { .. } => self,
            _ if self.is_under_way() => self,
            _ => Self::OutcomeUnknown { cause: Box::new(self) },
        }
    }

    /// Whether the GPU or this machine is out of memory.
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        /// CUDA_ERROR_OUT_OF_MEMORY.
        const NO_ROOM: i32 = 2;
        match self {
            Self::Driver { code, .. } => *code == NO_ROOM,
            Self::Memory(onehop_os::Error::System { source, .. }) => source.kind() == ErrorKind::OutOfMemory,
            Self::OutcomeUnknown { cause } => cause.is_no_room(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ends_with_a_lost_context_and_with_no_other_failure() {
        let driver = |code| {
            let (what, call, name) = ("a copy".into(), "cuEventQuery", String::new());
            Error::Driver { what, call, name, code, text: String::new(), hint: String::new() }
        };
        for code in [700, 709, 719] {
            assert!(!driver(code).of_begun_work().is_under_way(), "{code}");
        }
        for code in [1, 2, 4, 201, 900, 999] {
            assert!(!driver(code).is_under_way(), "a call that was refused began nothing: {code}");
            let unknown = driver(code).of_begun_work();
            assert!(matches!(unknown, Error::OutcomeUnknown { .. }) && unknown.is_under_way(), "{code}");
        }
        let unended = Error::Unended { what: "a launch".into(), seconds: 1 }.of_begun_work();
        assert!(matches!(unended, Error::Unended { .. }) && unended.is_under_way());
    }
}
