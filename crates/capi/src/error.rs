//! Errors as C sees them: a number, and a message that the thread can ask for.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("`{0}` is a null pointer")]
    Null(&'static str),
    #[error(
        "`{0}` is not an open handle of this process: it was closed, is of another kind, or was open before a fork"
    )]
    Unknown(&'static str),
    #[error("`{0}` is not UTF-8")]
    NotUtf8(&'static str),
    #[error("{0}")]
    Argument(String),
    #[error("{0}")]
    NotPossible(String),
    #[error("{0}")]
    File(String),
    #[error(transparent)]
    Transfer(Box<onehop_transfer::Error>),
    #[error(transparent)]
    Drive(#[from] onehop_drive::Error),
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    #[error(transparent)]
    Sdr(#[from] onehop_sdr::Error),
    #[error(transparent)]
    Array(onehop_array::Error),
    #[error("{count} rows failed; the first is row {row}, number {place} of the list: {error}")]
    Rows { count: usize, place: usize, row: u64, error: onehop_array::ArrayError },
    #[error("onehop panicked: {0}; this is a defect of onehop")]
    Panicked(String),
}

impl Error {
    /// The number in `enum onehop_error`.
    fn code(&self) -> c_int {
        match self {
            Self::Null(_) | Self::Unknown(_) | Self::NotUtf8(_) | Self::Argument(_) => 1,
            Self::NotPossible(_)
            | Self::Drive(onehop_drive::Error::Placement { .. } | onehop_drive::Error::Protected { .. })
            | Self::Sdr(
                onehop_sdr::Error::NoRoute(_)
                | onehop_sdr::Error::Ring { .. }
                | onehop_sdr::Error::NotPossible { .. }
                | onehop_sdr::Error::Pci(onehop_pci::Error::Refused { .. } | onehop_pci::Error::Module { .. }),
            ) => 2,
            Self::Gpu(_) | Self::Sdr(onehop_sdr::Error::Gpu(_)) => 4,
            Self::Array(onehop_array::Error::Refused(_) | onehop_array::Error::Rows { .. })
            | Self::Rows {
                error: onehop_array::ArrayError::Range | onehop_array::ArrayError::ReadOnly,
                ..
            } => 1,
            Self::Drive(_) | Self::Sdr(_) | Self::Array(_) | Self::Rows { .. } => 3,
            Self::Transfer(error) => transfer_code(error),
            Self::Panicked(_) => 5,
            Self::File(_) => 6,
        }
    }
}

/// Maps drive and GPU errors to the numbers that all calls use.
impl From<onehop_array::Error> for Error {
    fn from(error: onehop_array::Error) -> Self {
        match error {
            onehop_array::Error::Drive(error) => Self::Drive(error),
            onehop_array::Error::Gpu(error) => Self::Gpu(error),
            other => Self::Array(other),
        }
    }
}

/// The same for transfers.
impl From<onehop_transfer::Error> for Error {
    fn from(error: onehop_transfer::Error) -> Self {
        match error {
            onehop_transfer::Error::Drive(error) => Self::Drive(error),
            onehop_transfer::Error::Gpu(error) => Self::Gpu(error),
            other => Self::Transfer(Box::new(other)),
        }
    }
}

fn transfer_code(error: &onehop_transfer::Error) -> c_int {
    use onehop_transfer::{Error as Transfer, ErrorKind};
    match error {
        // The name is valid, but the drive could not be created.
        Transfer::Sim(_) | Transfer::Qtest(_) => 3,
        _ => match error.kind() {
            ErrorKind::Request => 1,
            ErrorKind::NotPossible => 2,
            ErrorKind::Drive => 3,
            ErrorKind::NoRoom | ErrorKind::Gpu => 4,
            ErrorKind::Defect => 5,
            ErrorKind::Files => 6,
            ErrorKind::Mismatch => 7,
            ErrorKind::Cancelled => 8,
        },
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The message of this thread's last error; none while the thread ends, when `atexit` handlers and destructors still
/// call.
pub(crate) fn last() -> *const c_char {
    let words = |last: &RefCell<CString>| last.try_borrow().map_or(c"".as_ptr(), |words| words.as_ptr());
    LAST.try_with(words).unwrap_or(c"".as_ptr())
}

/// Runs a function's body, keeps its message and returns its number. Panics are caught.
pub(crate) fn guard(f: impl FnOnce() -> Result<()>) -> c_int {
    answer(f).map_or_else(|code| code, |()| 0)
}

/// As [`guard`], for a function with another return type: returns `failed` on error.
pub(crate) fn guard_or<R>(failed: R, f: impl FnOnce() -> Result<R>) -> R {
    answer(f).unwrap_or(failed)
}

fn answer<R>(f: impl FnOnce() -> Result<R>) -> std::result::Result<R, c_int> {
    // After a panic the caller still closes its handles.
    let result = catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
        Err(Error::Panicked(text.unwrap_or_default()))
    });
    let (answer, words) = match result {
        Ok(answer) => (Ok(answer), String::new()),
        Err(error) => (Err(error.code()), error.to_string()),
    };
    let words = CString::new(words.replace('\0', " ")).unwrap_or_default();
    // While the thread ends, only the number is returned.
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| *last = words));
    answer
}
