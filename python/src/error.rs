//! Errors, and their Python exceptions in `onehop/errors.py`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyType;

use onehop_load::Error as Load;
use onehop_load::engine::calls::{CallError, GatherError};
use onehop_pages::PagesError;
use onehop_transfer::{Error as Transfer, ErrorKind};

use crate::outcome::WhyNot;

/// The result type of this module.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The errors of this module.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The request is invalid.
    #[error("{0}")]
    Request(String),
    /// No such tensor.
    #[error("the model has no tensor {0:?}")]
    NoTensor(String),
    /// A route that files cannot take.
    #[error("the route {route} is not possible: {why}")]
    Route { route: String, why: &'static str },
    /// Not enough memory.
    #[error(
        "the tensors need {needed} bytes of GPU memory, and {free} are free: {missing} are missing. Load fewer of them \
         (names, dtypes, rank), or end other programs on the GPU"
    )]
    Fit { needed: u64, free: u64, missing: u64 },
    /// Memory and file differ.
    #[error("GPU memory and file differ from byte {at} of the arena on, in {tensor}")]
    Differs { at: u64, tensor: String },
    /// Model files, plans, and loads to the GPU.
    #[error(transparent)]
    Load(#[from] Load),
    /// A drive cannot be opened.
    #[error(transparent)]
    OpenDrive(Box<Transfer>),
    /// A load from a drive.
    #[error(transparent)]
    Transfer(Box<Transfer>),
    /// The GPU.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// Rows of a table.
    #[error(transparent)]
    Rows(#[from] GatherError),
    /// Pages of a file.
    #[error("{}{why}", if file.is_empty() { String::new() } else { format!("{file}: ") })]
    Pages { file: String, why: Box<PagesError> },
    /// The loading thread ended without a result.
    #[error("the loading thread ended early; this is a defect of onehop")]
    Lost,
    /// A thread could not be started.
    #[error("the loading thread could not be started: {0}")]
    Thread(std::io::Error),
}

/// The exception's class, and if there are any, the system error and the file behind it.
struct ExceptionKind<'a> {
    class: &'static str,
    system: Option<(&'a std::io::Error, &'a str)>,
}

impl ExceptionKind<'_> {
    const fn of(class: &'static str) -> Self {
        Self { class, system: None }
    }
}

impl Error {
    /// Of pages of an open file.
    pub(crate) fn pages(why: PagesError) -> Self {
        Self::Pages { file: String::new(), why: Box::new(why) }
    }

    fn kind(&self) -> ExceptionKind<'_> {
        match self {
            Self::Request(_) => ExceptionKind::of("RequestError"),
            Self::NoTensor(_) => ExceptionKind::of("UnknownTensorError"),
            Self::Route { .. } => ExceptionKind::of("RouteError"),
            Self::Fit { .. } => ExceptionKind::of("OutOfGpuMemoryError"),
            Self::Differs { .. } => ExceptionKind::of("VerificationError"),
            Self::Load(error) => load_kind(error),
            Self::OpenDrive(error) => match error.kind() {
                ErrorKind::Request => ExceptionKind::of("RequestError"),
                _ => ExceptionKind::of("DriveError"),
            },
            Self::Transfer(error) => transfer_kind(error),
            Self::Gpu(error) => gpu_kind(error),
            Self::Rows(GatherError::NoRow { .. }) => ExceptionKind::of("RowError"),
            Self::Rows(GatherError::Call(error)) => call_kind(error),
            Self::Pages { file, why } => pages_kind(file, why),
            Self::Lost | Self::Thread(_) => ExceptionKind::of("OnehopError"),
        }
    }
}

fn call_kind(error: &CallError) -> ExceptionKind<'_> {
    use std::io::ErrorKind;
    ExceptionKind::of(match error {
        CallError::Gpu(error) => return gpu_kind(error),
        CallError::File(error) => match error.kind() {
            ErrorKind::UnexpectedEof => "ChangedFileError",
            ErrorKind::InvalidInput => "RequestError",
            _ => "FileError",
        },
        CallError::Stalled(_) => "StalledError",
        _ => "DeviceError",
    })
}

fn pages_kind<'a>(file: &'a str, error: &'a PagesError) -> ExceptionKind<'a> {
    use std::io::ErrorKind;
    match error {
        PagesError::File(source) => {
            let class = match source.kind() {
                ErrorKind::NotFound => "MissingFileError",
                ErrorKind::PermissionDenied => "ForbiddenFileError",
                _ => "FileError",
            };
            ExceptionKind { class, system: Some((source, file)) }
        }
        PagesError::ReadOnly => ExceptionKind::of("RequestError"),
        PagesError::BadPage { .. } | PagesError::Page { .. } => ExceptionKind::of("PageError"),
        // Bytes may still arrive.
        PagesError::Gpu(error) if error.is_under_way() => ExceptionKind::of("StalledError"),
        PagesError::Gpu(error) => gpu_kind(error),
        PagesError::Stalled(_) => ExceptionKind::of("StalledError"),
    }
}

fn load_kind(error: &Load) -> ExceptionKind<'_> {
    use onehop_load::formats::index;
    use onehop_load::{manifest, model, plan};
    match error {
        Load::Open { file, source } => {
            let class = match source.kind() {
                std::io::ErrorKind::NotFound => "MissingFileError",
                std::io::ErrorKind::PermissionDenied => "ForbiddenFileError",
                _ => "FileError",
            };
            ExceptionKind { class, system: Some((source, file)) }
        }
        Load::Read { file, source, .. } => ExceptionKind { class: "FileError", system: Some((source, file)) },
        Load::Index { why: index::Error::MissingShard { why, .. }, .. }
        | Load::Model(model::Error::MissingPart { why, .. }) => load_kind(why),
        Load::Loop { .. } | Load::NotRegular { .. } => ExceptionKind::of("FileError"),
        Load::Ended { .. } | Load::Changed { .. } => ExceptionKind::of("ChangedFileError"),
        Load::Manifest {
            why:
                manifest::Error::Differs { .. }
                | manifest::Error::Other { .. }
                | manifest::Error::NotListed(_)
                | manifest::Error::NotInModel(_),
            ..
        } => ExceptionKind::of("VerificationError"),
        Load::Crowded { .. }
        | Load::TooLong { .. }
        | Load::Safetensors { .. }
        | Load::Gguf { .. }
        | Load::Index { .. }
        | Load::Manifest { .. }
        | Load::Model(_) => ExceptionKind::of("FormatError"),
        Load::Plan(plan::Error::NoMatch { .. }) => ExceptionKind::of("UnknownTensorError"),
        Load::Plan(_) => ExceptionKind::of("RequestError"),
        Load::OnDrive { why, .. } => files_kind(why),
        Load::NotMapped { .. } => ExceptionKind::of("MissingFileError"),
        Load::MappedTwice { .. } => ExceptionKind::of("FormatError"),
        Load::NoFile { .. } | Load::NotDirect { .. } | Load::NotByCuFile { .. } => {
            ExceptionKind::of("RouteError")
        }
        Load::Gpu(error) => gpu_kind(error),
        Load::Stalled { .. } | Load::Slow { .. } => ExceptionKind::of("StalledError"),
        Load::Cancelled => ExceptionKind::of("CancelledError"),
        Load::Group { .. } | Load::Rank { .. } => ExceptionKind::of("GroupError"),
        _ => ExceptionKind::of("OnehopError"),
    }
}

/// Running out of host memory is not a device failure.
fn gpu_kind(error: &onehop_gpu::Error) -> ExceptionKind<'_> {
    ExceptionKind::of(match error {
        onehop_gpu::Error::Memory(_) if error.is_no_room() => "OutOfMemoryError",
        _ if error.is_no_room() => "OutOfGpuMemoryError",
        _ => "DeviceError",
    })
}

fn transfer_kind(error: &Transfer) -> ExceptionKind<'_> {
    match error {
        Transfer::Load(error) => return load_kind(error),
        Transfer::Files(why) => return files_kind(why),
        Transfer::NoRow { .. } => return ExceptionKind::of("RowError"),
        Transfer::File { path, source, .. } => {
            return ExceptionKind { class: "FileError", system: Some((source, path)) };
        }
        _ => {}
    }
    ExceptionKind::of(match error.kind() {
        ErrorKind::Request => "RequestError",
        ErrorKind::NotPossible => "RouteError",
        ErrorKind::NoRoom => "OutOfGpuMemoryError",
        ErrorKind::Drive => "DriveError",
        ErrorKind::Gpu => "DeviceError",
        ErrorKind::Files => "FileError",
        ErrorKind::Mismatch => "VerificationError",
        ErrorKind::Cancelled => "CancelledError",
        ErrorKind::Defect => "OnehopError",
    })
}

fn files_kind(error: &onehop_files::Error) -> ExceptionKind<'_> {
    use onehop_files::Error as Files;
    ExceptionKind::of(match error {
        Files::Read { .. } => "DriveError",
        Files::Damaged { .. } | Files::Unsupported { .. } | Files::Dirty { .. } | Files::NoFileSystem(_) => {
            "FormatError"
        }
        Files::WhichPartition(_) => "RequestError",
        Files::NotFound { .. } => "MissingFileError",
        Files::Changed { .. } => "ChangedFileError",
        Files::WithinBlock { .. } => "RouteError",
        _ => "FileError",
    })
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        Self::Rows(error.into())
    }
}

impl From<Transfer> for Error {
    fn from(error: Transfer) -> Self {
        Self::Transfer(Box::new(error))
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        Python::attach(|py| raise(py, &error, text).unwrap_or_else(|other| other))
    }
}

fn raise(py: Python<'_>, error: &Error, text: String) -> PyResult<PyErr> {
    let kind = error.kind();
    let class = py.import("onehop.errors")?.getattr(kind.class)?;
    let class = class.cast::<PyType>().map_err(|_| PyRuntimeError::new_err(text.clone()))?.clone();
    // System errors have their number and file as attributes, as users of OSError expect.
    let number = kind.system.and_then(|(error, file)| Some((error.raw_os_error()?, file.to_owned())));
    let raised = match number {
        Some((number, file)) => {
            let text: String = py.import("os")?.call_method1("strerror", (number,))?.extract()?;
            PyErr::from_type(class, (number, text, file))
        }
        None => PyErr::from_type(class, text),
    };
    if let Error::Pages { why, .. } = error
        && let Some(page) = why.page()
    {
        raised.value(py).setattr("page", page)?;
    }
    // The routes that were tried, for programs.
    if let Error::Transfer(error) = error
        && let Transfer::NoRoute(tried) = &**error
    {
        let tried: Vec<_> = tried.iter().cloned().map(WhyNot::from).collect();
        raised.value(py).setattr("tried", tried)?;
    }
    Ok(raised)
}
