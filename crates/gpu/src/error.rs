//! What can go wrong with a GPU.

use std::io::ErrorKind;
use std::time::Duration;

use onehop_proto::GpuAddr;

use crate::cuda::is_lost;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a GPU did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its memory could not be had or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// A GPU thread touched an address that is no memory of this GPU.
    #[error("a GPU thread made a {access} of {bytes} bytes at {addr}, where there is {what}")]
    Fault {
        /// What it did.
        access: &'static str,
        /// Where.
        addr: GpuAddr,
        /// How much.
        bytes: u32,
        /// What is there.
        what: &'static str,
    },
    /// A GPU thread ended in an unexpected way.
    #[error("a GPU thread panicked: {0}; this is a defect of onehop")]
    Panicked(String),
    /// A launch does not make sense.
    #[error("this launch cannot run: {0}")]
    Launch(String),
    /// There is no CUDA here, or none that works.
    #[error("CUDA cannot be used: {why}")]
    NoCuda {
        /// The reason, with what would mend it.
        why: String,
    },
    /// There is no such GPU.
    #[error("there is no GPU {name}: {have}")]
    NoSuchGpu {
        /// What was asked for.
        name: String,
        /// What there is.
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
        /// The driver's words for it.
        text: String,
        /// What to do about it, or nothing.
        hint: String,
    },
    /// The program has destroyed the CUDA context that this was in: the work in it has ended, and its memory is gone.
    #[error("{what}: the program has destroyed the CUDA context of this memory or stream")]
    ContextDestroyed {
        /// What was being done.
        what: String,
    },
    /// The GPU took something on, and it neither ended nor failed.
    #[error("{what}: nothing came of it within {seconds} s; nvidia-smi and dmesg say more")]
    Silent {
        /// What was being done.
        what: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// A launch did not end within its bounds. What it uses is left to it until it ends, and no GPU memory is freed before.
    #[error("{what} did not end within {seconds} s; its memory is left to it until it ends")]
    Unended {
        /// What was started.
        what: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The driver does not tell whether work that was begun has ended. What it uses is left to it until it has.
    #[error("{cause}; the work may still be running, and its memory is left alone until it has ended")]
    OutcomeUnknown {
        /// What the driver answered.
        cause: Box<Error>,
    },
    /// A kernel did not end in time, and was cancelled: it writes nothing any more, even if it starts later.
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
    /// The GPU, its driver or the platform cannot do it.
    #[error("{what} is not possible here: {why}")]
    NotSupported {
        /// What was to be done.
        what: String,
        /// The reason, with what would mend it.
        why: String,
    },
    /// A device's registers could not be given to the GPU.
    #[error("the GPU cannot write this device's doorbells: {why}")]
    Registers {
        /// The reasons that apply here, with what would mend each.
        why: String,
    },
    /// Memory of another process is not what its description says.
    #[error("this is not the shared GPU memory that was meant: {why}")]
    Foreign {
        /// What differs.
        why: String,
    },
}

impl Error {
    /// Whether the work that failed may still be running. What it reads must not be written then, and what it writes not be
    /// used, before it has ended. Work that went with a lost context has ended.
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

    /// The error of a call that was to tell the end of work: the work may still be running, unless its context is lost.
    pub(crate) fn of_begun_work(self) -> Self {
        match self {
            Self::Driver { code, .. } if is_lost(code) => self,
            Self::ContextDestroyed { .. } => self,
            _ if self.is_under_way() => self,
            _ => Self::OutcomeUnknown { cause: Box::new(self) },
        }
    }

    /// Whether there was no memory, of the GPU or of this machine.
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
    fn work_ends_with_a_lost_context_and_with_no_other_failure_to_tell() {
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
