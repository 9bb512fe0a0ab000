//! The error numbers of cuFile.

use std::io;

use onehop_load::engine::calls::CallError;

use crate::types::CuFileError;

/// The cuFile error numbers that are used here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
#[allow(missing_docs, reason = "the names are the API's")]
pub enum Code {
    DriverNotInitialized = 5001,
    PlatformNotSupported = 5007,
    IoNotSupported = 5008,
    CudaDriver = 5011,
    InvalidPointer = 5012,
    InvalidPointerRange = 5014,
    InvalidMappingRange = 5017,
    InvalidFileType = 5018,
    InvalidFileOpenFlags = 5019,
    InvalidValue = 5022,
    MemoryAlreadyRegistered = 5023,
    MemoryNotRegistered = 5024,
    DriverAlreadyOpen = 5026,
    HandleNotRegistered = 5027,
    HandleAlreadyRegistered = 5028,
    Internal = 5030,
    BatchSubmit = 5040,
    NoMemory = 5043,
    Io = 5044,
    InvalidContext = 5047,
}

/// Why a call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// A cuFile error.
    Code(Code),
    /// A CUDA error number, or 0 if unknown.
    Cuda(i32),
    /// A system error: the value of `errno`.
    System(i32),
}

impl From<Code> for Failure {
    fn from(code: Code) -> Self {
        Self::Code(code)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::System(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        Self::System(error.raw_os_error())
    }
}

/// CUDA_ERROR_CONTEXT_IS_DESTROYED
const DESTROYED: i32 = 709;

impl From<onehop_gpu::Error> for Failure {
    fn from(error: onehop_gpu::Error) -> Self {
        match error {
            onehop_gpu::Error::Driver { code, .. } => Self::Cuda(code),
            onehop_gpu::Error::ContextDestroyed { .. } => Self::Cuda(DESTROYED),
            onehop_gpu::Error::OutcomeUnknown { cause } => (*cause).into(),
            onehop_gpu::Error::Memory(onehop_os::Error::System { source, .. }) => source.into(),
            _ => Self::Cuda(0),
        }
    }
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        match error {
            CallError::File(error) => error.into(),
            CallError::Gpu(error) => error.into(),
            CallError::Gone => Self::Code(Code::InvalidPointer),
            CallError::HeldSlots { .. } => Self::System(libc::EBUSY),
            CallError::Stalled(_) => Self::System(libc::ETIMEDOUT),
        }
    }
}

impl Failure {
    /// The value for `errno`, which asynchronous calls report negated.
    #[must_use]
    pub fn number(self) -> i32 {
        match self {
            Self::Code(code) => code as i32,
            Self::Cuda(_) => Code::CudaDriver as i32,
            Self::System(errno) => errno,
        }
    }

    /// The structure that API functions return.
    pub(crate) fn answer(self) -> CuFileError {
        match self {
            Self::Code(code) => CuFileError { err: code as i32, cuda: 0 },
            Self::Cuda(code) => CuFileError { err: Code::CudaDriver as i32, cuda: code },
            Self::System(libc::ENOMEM) => CuFileError { err: Code::NoMemory as i32, cuda: 0 },
            Self::System(_) => CuFileError { err: Code::Io as i32, cuda: 0 },
        }
    }
}
