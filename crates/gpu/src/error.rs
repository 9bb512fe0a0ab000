//! What can go wrong with a GPU.

use std::io::ErrorKind;
use std::time::Duration;

use onehop_proto::GpuAddr;

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
    /// Whether there was no memory, of the GPU or of this machine.
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        /// CUDA_ERROR_OUT_OF_MEMORY.
        const NO_ROOM: i32 = 2;
        match self {
            Self::Driver { code, .. } => *code == NO_ROOM,
            Self::Memory(onehop_os::Error::System { source, .. }) => source.kind() == ErrorKind::OutOfMemory,
            _ => false,
        }
    }
}
