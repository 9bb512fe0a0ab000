//! Errors of this crate.

use std::path::Path;

use onehop_drive::Error as Drive;

use crate::route::BetterRoute;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a transfer failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name is not that of a drive.
    #[error("{0}")]
    NoDrive(String),
    /// The name is not that of a route.
    #[error("{0}")]
    NoSuchRoute(String),
    /// Two options contradict each other.
    #[error("{0}")]
    Conflict(Conflict),
    /// A part of a file begins behind its end.
    #[error("offset {offset}: the file has {bytes} bytes")]
    Offset {
        /// Offset of the part.
        offset: u64,
        /// The file's length.
        bytes: u64,
    },
    /// The byte count exceeds 64 bits.
    #[error("{blocks} blocks are more bytes than 64 bits count")]
    TooManyBlocks {
        /// Number of blocks.
        blocks: u64,
    },
    /// An extent map holds several files, or not the requested one.
    #[error("the extent map holds {0}: name one of them")]
    WhichFile(String),
    /// Not possible with this machine or drive.
    #[error("{what} is not possible here: {reason}. {fix}")]
    NotPossible {
        /// What was requested.
        what: String,
        /// The reason.
        reason: String,
        /// How to fix it.
        fix: String,
    },
    /// The GPU's memory is full.
    #[error("holding {bytes} bytes in the memory of GPU {gpu} is not possible here: {}. Move less at a time", left_words(*.left))]
    NoRoom {
        /// Requested bytes.
        bytes: u64,
        /// The GPU.
        gpu: String,
        /// Available bytes; `None` if this machine cannot address the requested ones.
        left: Option<u64>,
    },
    /// No route works: those that were tried, with reasons.
    #[error("no route works here: {}", list(.0))]
    NoRoute(Vec<BetterRoute>),
    /// The caller cancelled the transfer.
    #[error("cancelled before it was done")]
    Cancelled,
    /// The bytes in GPU memory differ from those of the drive.
    #[error("{0}")]
    Mismatch(String),
    /// The drive failed.
    #[error(transparent)]
    Drive(#[from] onehop_drive::Error),
    /// A simulated drive could not be created.
    #[error(transparent)]
    Sim(#[from] onehop_sim::Error),
    /// A drive of a vfio-user server could not be opened.
    #[error(transparent)]
    VfioUser(#[from] onehop_vfio_user::ClientError),
    /// A drive across the network could not be reached.
    #[error(transparent)]
    Fabrics(#[from] onehop_fabrics::Error),
    /// QEMU's drive could not be opened.
    #[error(transparent)]
    Qtest(#[from] onehop_qtest::Error),
    /// A PCI device could not be opened.
    #[error(transparent)]
    Pci(#[from] onehop_pci::Error),
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// Host memory could not be allocated or accessed.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// A file system on the drive, or an extent map, is refused or does not hold the file.
    #[error(transparent)]
    Files(#[from] onehop_files::Error),
    /// A model's files are refused, or cannot be loaded as asked.
    #[error(transparent)]
    Load(#[from] onehop_load::Error),
    /// A file of this machine could not be used.
    #[error("{call} {path}: {source}")]
    File {
        /// The failed call: `create`, `read`, `write`.
        call: &'static str,
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A directory or a device was named in place of a file.
    #[error("{path} is a {kind}, not a file")]
    NoFile {
        /// Its path.
        path: String,
        /// What it is.
        kind: &'static str,
    },
    /// An extent map exceeds the size limit.
    #[error("{path}: {bytes} bytes are more than the {most} that are read of a map")]
    LongMap {
        /// The map.
        path: String,
        /// Its length.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// An array cannot be opened.
    #[error(transparent)]
    Array(onehop_array::Error),
    /// Rows that a drive does not have, or GPU threads cannot read.
    #[error("{0}")]
    NoSuchRows(String),
    /// A table has no such row.
    #[error("row {id}, which is number {at} in the list, is not one of {count} rows")]
    NoRow {
        /// Its place in the list, from 0 on.
        at: usize,
        /// The row.
        id: u64,
        /// How many there are.
        count: u64,
    },
    /// Rows of a table could not be read.
    #[error("{failed} of {of} rows could not be read from the drive; the first is row {row}: {why}")]
    Rows {
        /// How many.
        failed: usize,
        /// How many were requested.
        of: usize,
        /// The first of them.
        row: u64,
        /// Why.
        why: onehop_array::ArrayError,
    },
    /// A defect: memory or queues of another route.
    #[error("{0}")]
    Defect(&'static str),
}

/// Options that contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// A mode, threads or queues for a route on which the CPU submits commands.
    GpuOptionsOnCpuRoute,
    /// Threads in owner mode.
    ThreadsOfOwners,
    /// Queues in shared mode.
    QueuesShared,
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::GpuOptionsOnCpuRoute => {
                "mode, threads and queues are for gpu/ routes; the CPU uses one queue"
            }
            Self::ThreadsOfOwners => "threads are for shared mode; in owner mode each queue has a warp",
            Self::QueuesShared => "queues are for owner mode; in shared mode there is one queue",
        })
    }
}

/// What a caller can do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is invalid, or does not fit the drive: change it.
    Request,
    /// This machine, drive or build cannot do it; the error contains the reason and a fix.
    NotPossible,
    /// The GPU's memory is full.
    NoRoom,
    /// The drive cannot be opened, or failed.
    Drive,
    /// The GPU, or memory, failed.
    Gpu,
    /// A file, a file system or a model is missing or refused.
    Files,
    /// The bytes are wrong.
    Mismatch,
    /// The caller cancelled, or asked for an end ([`Options::stop`](onehop_drive::Options::stop)).
    Cancelled,
    /// A defect of onehop.
    Defect,
}

impl Error {
    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        use onehop_files::Error as Files;
        use onehop_load::Error as Load;
        use onehop_pci::Error as Pci;
        use onehop_sim::Error as Sim;
        if was_stopped(self) {
            return ErrorKind::Cancelled;
        }
        match self {
            Self::NoDrive(_)
            | Self::NoSuchRoute(_)
            | Self::Conflict(_)
            | Self::Offset { .. }
            | Self::TooManyBlocks { .. }
            | Self::WhichFile(_)
            | Self::NoSuchRows(_)
            | Self::NoRow { .. }
            | Self::Drive(Drive::NoNamespace { .. } | Drive::Range { .. })
            | Self::Sim(
                Sim::UnknownOption { .. }
                | Sim::BadValue { .. }
                | Sim::UnknownFault { .. }
                | Sim::BadFault { .. }
                | Sim::Contradiction(_),
            )
            | Self::Qtest(onehop_qtest::Error::Spec { .. })
            | Self::Fabrics(onehop_fabrics::Error::Name { .. })
            | Self::Files(Files::WhichPartition(_))
            | Self::Load(Load::Plan(_))
            | Self::Array(onehop_array::Error::Refused(_) | onehop_array::Error::Rows { .. }) => {
                ErrorKind::Request
            }
            Self::NotPossible { .. }
            | Self::NoRoute(_)
            | Self::Drive(
                Drive::Unsupported { .. }
                | Drive::Protected { .. }
                | Drive::Placement { .. }
                | Drive::NoQueue { .. },
            )
            | Self::Files(Files::WithinBlock { .. })
            | Self::Load(
                Load::OnDrive { why: Files::WithinBlock { .. }, .. }
                | Load::NotDirect { .. }
                | Load::NotByCuFile { .. },
            )
            | Self::Pci(Pci::Refused { .. } | Pci::Module { .. }) => ErrorKind::NotPossible,
            Self::NoRoom { .. } => ErrorKind::NoRoom,
            Self::Fabrics(
                onehop_fabrics::Error::Authentication { .. } | onehop_fabrics::Error::Unsupported(_),
            ) => ErrorKind::NotPossible,
            Self::Drive(_)
            | Self::Sim(_)
            | Self::VfioUser(_)
            | Self::Fabrics(_)
            | Self::Qtest(_)
            | Self::Pci(_)
            | Self::Array(_)
            | Self::Rows { .. } => ErrorKind::Drive,
            Self::Gpu(_) | Self::Memory(_) | Self::Load(Load::Gpu(_)) => ErrorKind::Gpu,
            Self::Cancelled | Self::Load(Load::Cancelled) => ErrorKind::Cancelled,
            Self::Mismatch(_) => ErrorKind::Mismatch,
            Self::Files(_)
            | Self::Load(_)
            | Self::File { .. }
            | Self::NoFile { .. }
            | Self::LongMap { .. } => ErrorKind::Files,
            Self::Defect(_) => ErrorKind::Defect,
        }
    }

    /// An error for something that this machine or drive cannot do.
    pub fn not_possible(what: impl Into<String>, reason: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::NotPossible { what: what.into(), reason: reason.into(), fix: fix.into() }
    }

    pub(crate) fn file(call: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File { call, path: path.display().to_string(), source }
    }
}

impl From<onehop_array::Error> for Error {
    fn from(error: onehop_array::Error) -> Self {
        match error {
            onehop_array::Error::Drive(error) => error.into(),
            onehop_array::Error::Gpu(error) => error.into(),
            other => Self::Array(other),
        }
    }
}

/// Whether it is the error of a wait that ended because the caller asked for an end, however deep it lies: file systems and
/// models report a drive's errors as those of reads.
#[must_use]
pub fn was_stopped(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let is_stop = matches!(error.downcast_ref(), Some(Error::Drive(Drive::Interrupted { .. })))
            || matches!(error.downcast_ref(), Some(Drive::Interrupted { .. }))
            || matches!(error.downcast_ref(), Some(Error::Fabrics(onehop_fabrics::Error::Interrupted)))
            || matches!(error.downcast_ref(), Some(onehop_fabrics::Error::Interrupted));
        if is_stop {
            return true;
        }
        // What a system's error wraps is not its source.
        let wrapped = error.downcast_ref().and_then(std::io::Error::get_ref);
        next = wrapped.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| error.source());
    }
    false
}

pub(crate) fn left_words(left: Option<u64>) -> String {
    left.map_or_else(
        || "that is more than this machine addresses".into(),
        |left| format!("there are {left} bytes left for it"),
    )
}

fn list(tried: &[BetterRoute]) -> String {
    let each = |no: &BetterRoute| format!("{} ({})", no.route, no.why("; "));
    tried.iter().map(each).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_to_stop_is_found_below_other_errors() {
        let stopped = || Drive::Interrupted { drive: "d".into() };
        let read = |why: Drive| onehop_files::Error::Read {
            offset: 0,
            len: 512,
            source: std::io::Error::other(why),
        };
        let on_drive = |why| onehop_load::Error::OnDrive { file: "f".into(), why };
        for error in [
            stopped().into(),
            onehop_fabrics::Error::Interrupted.into(),
            read(stopped()).into(),
            on_drive(read(stopped())).into(),
        ] {
            let error: Error = error;
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        }
        assert!(was_stopped(&read(stopped())) && was_stopped(&on_drive(read(stopped()))));
        let other: Error = on_drive(read(Drive::Full(1))).into();
        assert_eq!(other.kind(), ErrorKind::Files);
    }
}
