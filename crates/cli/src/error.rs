//! Errors of commands, and their exit codes.

use std::path::Path;

use onehop_transfer::{BetterRoute, Conflict, was_stopped};
use serde::Serialize;

use crate::report;
use crate::stop::StopFlag;
use crate::units;

/// The result type of this crate.
pub(crate) type Result<T> = std::result::Result<T, CliError>;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The arguments are wrong, or do not fit the drive.
    #[error("{0}")]
    Usage(String),
    /// Not possible on this machine, or with this drive.
    #[error("{what} is not possible here: {reason}. {fix}")]
    NotPossible { what: String, reason: String, fix: String },
    /// No route works.
    #[error("no route works here: {}", list(.0))]
    NoRoute(Vec<BetterRoute>),
    /// A drive could not be used, or a command failed.
    #[error(transparent)]
    Drive(onehop_drive::Error),
    /// A simulated drive could not be created.
    #[error(transparent)]
    Sim(#[from] onehop_sim::Error),
    /// A simulated drive could not be served.
    #[error(transparent)]
    Serve(#[from] onehop_vfio_user::Error),
    /// The drive of a vfio-user server could not be used.
    #[error(transparent)]
    Served(#[from] onehop_vfio_user::ClientError),
    /// A drive on the network could not be used.
    #[error(transparent)]
    Fabrics(onehop_fabrics::Error),
    /// QEMU's drive could not be used.
    #[error(transparent)]
    Qtest(#[from] onehop_qtest::Error),
    /// GPU memory could not be allocated or accessed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// Host memory could not be allocated or accessed.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// An SDR board could not be used.
    #[error(transparent)]
    Sdr(#[from] onehop_sdr::Error),
    /// Model files were refused, or cannot be loaded as requested.
    #[error(transparent)]
    Load(onehop_load::Error),
    /// A file system on a drive was refused, or lacks the requested file.
    #[error(transparent)]
    Files(onehop_files::Error),
    /// System files or a recorded system cannot be read, or a PCI device cannot be used.
    #[error(transparent)]
    System(#[from] onehop_pci::Error),
    /// A file could not be used.
    #[error("{call} {path}: {source}")]
    File { call: &'static str, path: String, source: std::io::Error },
    /// Bytes in GPU memory are wrong.
    #[error("{0}")]
    Mismatch(String),
    /// Something else failed.
    #[error("{0}")]
    Failed(String),
    /// Stopped by Ctrl-C or a signal.
    #[error("stopped; queues are deleted, and drives released")]
    Interrupted,
    /// Stopped, while a target on the network may still execute a write.
    #[error("stopped; queues are deleted, and drives released. {0}")]
    StoppedWrite(onehop_drive::Error),
    /// Stopped without a drive in use; says what was cleaned up.
    #[error("stopped; {0}")]
    Stopped(&'static str),
}

/// An error as JSON.
#[derive(Serialize)]
pub(crate) struct ErrorDoc {
    kind: &'static str,
    exit_code: u8,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tried: Vec<BetterRoute>,
}

impl CliError {
    /// Adapts the message of a stop to a command that read local files.
    pub(crate) fn for_local_files(self) -> Self {
        self.or_stopped("the memory that was filled is freed")
    }

    /// Adapts the message of a stop to a command that used no drive: `now` says what was cleaned up.
    pub(crate) fn or_stopped(self, now: &'static str) -> Self {
        if matches!(self, Self::Interrupted) { Self::Stopped(now) } else { self }
    }

    /// Turns a write with unknown outcome into a stop, if a stop was requested.
    pub(crate) fn for_write(self, stop: &StopFlag) -> Self {
        match self {
            Self::Drive(why @ onehop_drive::Error::OutcomeUnknown { .. }) if stop.is_set() => {
                Self::StoppedWrite(why)
            }
            other => other,
        }
    }

    /// A file that could not be used.
    pub(crate) fn file(call: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File { call, path: path.display().to_string(), source }
    }

    /// Something that is not possible on this machine, with this drive or in this build.
    pub(crate) fn not_possible(
        what: impl Into<String>,
        reason: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::NotPossible { what: what.into(), reason: reason.into(), fix: fix.into() }
    }

    /// Whether the command line is wrong for any drive.
    pub(crate) fn is_argument_error(&self) -> bool {
        self.kind() == "usage" && !matches!(self, Self::Drive(_))
    }

    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self.kind() {
            "usage" => 2,
            "not_possible" => 3,
            "interrupted" => 130,
            _ => 1,
        }
    }

    fn kind(&self) -> &'static str {
        use onehop_drive::Error as Drive;
        use onehop_load::model::Error as Model;
        use onehop_load::plan::Error as Plan;
        use onehop_sim::Error as Sim;
        match self {
            Self::Usage(_)
            | Self::Drive(Drive::NoNamespace { .. } | Drive::Range { .. })
            | Self::Sim(
                Sim::UnknownOption { .. }
                | Sim::BadValue { .. }
                | Sim::UnknownFault { .. }
                | Sim::BadFault { .. }
                | Sim::Contradiction(_),
            )
            | Self::Files(onehop_files::Error::WhichPartition(_))
            | Self::Load(
                onehop_load::Error::Plan(
                    Plan::NoMatch { .. }
                    | Plan::NothingLeft
                    | Plan::Rank { .. }
                    | Plan::Dimension { .. }
                    | Plan::Uneven { .. }
                    | Plan::WithinBlock { .. },
                )
                // Other file names might work.
                | onehop_load::Error::Model(
                    Model::Several { .. } | Model::Apart { .. } | Model::TwoFiles { .. } | Model::Mixed { .. },
                ),
            )
            | Self::Serve(onehop_vfio_user::Error::Unfit(_))
            | Self::Fabrics(onehop_fabrics::Error::Name { .. } | onehop_fabrics::Error::Secret { .. })
            | Self::Qtest(onehop_qtest::Error::Spec { .. }) => "usage",
            Self::NotPossible { .. }
            | Self::NoRoute(_)
            | Self::Files(onehop_files::Error::WithinBlock { .. })
            | Self::Fabrics(
                onehop_fabrics::Error::Authentication { .. } | onehop_fabrics::Error::Unsupported(_),
            )
            | Self::Load(
                onehop_load::Error::OnDrive { why: onehop_files::Error::WithinBlock { .. }, .. }
                | onehop_load::Error::NotDirect { .. }
                | onehop_load::Error::NotByCuFile { .. },
            )
            | Self::System(onehop_pci::Error::Refused { .. } | onehop_pci::Error::Module { .. })
            | Self::Sdr(
                onehop_sdr::Error::NoRoute(_)
                | onehop_sdr::Error::NotPossible { .. }
                | onehop_sdr::Error::Pci(onehop_pci::Error::Refused { .. } | onehop_pci::Error::Module { .. }),
            )
            | Self::Drive(
                Drive::Unsupported { .. }
                | Drive::Protected { .. }
                | Drive::Placement { .. }
                | Drive::NoQueue { .. },
            ) => "not_possible",
            Self::Interrupted | Self::StoppedWrite(_) | Self::Stopped(_) => "interrupted",
            Self::Mismatch(_) => "mismatch",
            _ => "failed",
        }
    }

    /// The error as JSON.
    pub(crate) fn document(&self) -> ErrorDoc {
        let (reason, fix, tried) = match self {
            Self::NotPossible { reason, fix, .. }
            | Self::System(onehop_pci::Error::Refused { why: reason, fix, .. })
            | Self::Sdr(onehop_sdr::Error::Pci(onehop_pci::Error::Refused { why: reason, fix, .. })) => {
                (Some(reason.clone()), Some(fix.clone()), Vec::new())
            }
            Self::System(onehop_pci::Error::Module { refusal, .. })
            | Self::Sdr(onehop_sdr::Error::Pci(onehop_pci::Error::Module { refusal, .. })) => {
                (Some(refusal.why()), Some(refusal.fix()), Vec::new())
            }
            Self::NoRoute(tried) => (None, None, tried.clone()),
            _ => (None, None, Vec::new()),
        };
        let (kind, exit_code, message) = (self.kind(), self.code(), report::sanitized(&self.to_string()));
        ErrorDoc { kind, exit_code, message, reason, fix, tried }
    }
}

impl From<onehop_drive::Error> for CliError {
    fn from(error: onehop_drive::Error) -> Self {
        if matches!(error, onehop_drive::Error::Interrupted { .. }) {
            Self::Interrupted
        } else {
            Self::Drive(error)
        }
    }
}

impl From<onehop_files::Error> for CliError {
    fn from(error: onehop_files::Error) -> Self {
        if was_stopped(&error) { Self::Interrupted } else { Self::Files(error) }
    }
}

impl From<onehop_load::Error> for CliError {
    fn from(error: onehop_load::Error) -> Self {
        match error {
            onehop_load::Error::Cancelled => Self::Interrupted,
            error if was_stopped(&error) => Self::Interrupted,
            error => Self::Load(error),
        }
    }
}

impl From<onehop_fabrics::Error> for CliError {
    fn from(error: onehop_fabrics::Error) -> Self {
        if matches!(error, onehop_fabrics::Error::Interrupted) {
            Self::Interrupted
        } else {
            Self::Fabrics(error)
        }
    }
}

/// Errors of transfers, in terms of command-line options.
impl From<onehop_transfer::Error> for CliError {
    fn from(error: onehop_transfer::Error) -> Self {
        use onehop_transfer::Error as Transfer;
        match error {
            Transfer::Conflict(conflict) => Self::Usage(
                match conflict {
                    Conflict::GpuOptionsOnCpuRoute => {
                        "--mode, --threads and --queues are for gpu/ routes; the CPU uses one queue"
                    }
                    Conflict::ThreadsOfOwners => {
                        "--threads is for --mode shared; in owner mode each queue has a warp"
                    }
                    Conflict::QueuesShared => {
                        "--queues is for --mode owner; in shared mode there is one queue"
                    }
                }
                .into(),
            ),
            Transfer::Offset { offset, bytes } => {
                Self::Usage(format!("--offset {offset}: the file has {bytes} bytes"))
            }
            Transfer::WhichFile(names) => Self::Usage(format!("--path: the map has {names}")),
            Transfer::NoDrive(_)
            | Transfer::NoSuchRoute(_)
            | Transfer::TooManyBlocks { .. }
            | Transfer::NoSuchRows(_)
            | Transfer::NoRow { .. } => Self::Usage(error.to_string()),
            Transfer::NotPossible { what, reason, fix } => Self::NotPossible { what, reason, fix },
            Transfer::NoRoom { bytes, gpu, left } => Self::not_possible(
                format!("holding {} in the memory of GPU {gpu}", units::bytes(bytes)),
                left.map_or_else(
                    || "this machine cannot address that much".into(),
                    |left| format!("only {} is free", units::bytes(left)),
                ),
                "Move fewer blocks at a time",
            ),
            Transfer::NoRoute(tried) => Self::NoRoute(tried),
            Transfer::Cancelled => Self::Interrupted,
            Transfer::Mismatch(why) => Self::Mismatch(why),
            Transfer::Drive(error) => error.into(),
            Transfer::Array(error) => error.into(),
            Transfer::Sim(error) => Self::Sim(error),
            Transfer::VfioUser(error) => Self::Served(error),
            Transfer::Fabrics(error) => error.into(),
            Transfer::Qtest(error) => Self::Qtest(error),
            Transfer::Pci(error) => Self::System(error),
            Transfer::Gpu(error) => Self::Gpu(error),
            Transfer::Memory(error) => Self::Memory(error),
            Transfer::Files(error) => error.into(),
            Transfer::Load(error) => error.into(),
            Transfer::File { call, path, source } => Self::File { call, path, source },
            other => Self::Failed(other.to_string()),
        }
    }
}

fn list(tried: &[BetterRoute]) -> String {
    let each = |no: &BetterRoute| format!("{} ({})", no.route, no.why("; "));
    tried.iter().map(each).collect::<Vec<_>>().join(", ")
}
