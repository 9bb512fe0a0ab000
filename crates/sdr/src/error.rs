//! Errors of this crate.

use std::time::Duration;

use onehop_radio::Broken;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a board could not be driven.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A ring violates a rule of the board.
    #[error("the board cannot use this ring ({}): {broken}. {}", .broken.name(), .broken.fix())]
    Ring {
        /// The rule.
        broken: Broken,
    },
    /// The board has left the bus.
    #[error(
        "{board} has left the bus: its registers read as all ones. Check its power and its seat, then remove it and rescan the bus"
    )]
    Gone {
        /// The board.
        board: String,
    },
    /// The kernel module disabled its DMA.
    #[error("{board} had its DMA disabled: {why}. Open it again")]
    Stopped {
        /// The board.
        board: String,
        /// The reason.
        why: String,
    },
    /// The board does not stop.
    #[error(
        "{board} still transfers samples {} ms after the request to stop; its memory stays allocated until this process ends",
        .waited.as_millis()
    )]
    DoesNotStop {
        /// The board.
        board: String,
        /// How long the caller waited.
        waited: Duration,
    },
    /// The board reports something impossible.
    #[error("{board} reports something impossible: {what}")]
    ImpossibleReport {
        /// The board.
        board: String,
        /// What it reports.
        what: String,
    },
    /// Samples did not arrive, although the setup succeeded.
    #[error("{what}. {fix}")]
    Lost {
        /// What was missing.
        what: String,
        /// How to fix it.
        fix: String,
    },
    /// The `watch` callback cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// The direction is already in use.
    #[error("{board} already has a {what}; drop it first")]
    Busy {
        /// The board.
        board: String,
        /// Receiver or transmitter.
        what: &'static str,
    },
    /// Not possible with these settings.
    #[error("{what} is not possible: {why}")]
    NotPossible {
        /// What is not possible.
        what: &'static str,
        /// Why, and how to fix it.
        why: String,
    },
    /// No route works.
    #[error("no route works: {}", list(.0))]
    NoRoute(Vec<crate::UnavailableRoute>),
    /// Host memory could not be allocated, accessed or mapped.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// The board could not be claimed, or the kernel module refused a request.
    #[error(transparent)]
    Pci(#[from] onehop_pci::Error),
    /// GPU memory could not be allocated or accessed, or a kernel failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
}

impl From<Broken> for Error {
    fn from(broken: Broken) -> Self {
        Self::Ring { broken }
    }
}

impl Error {
    /// How to fix it; empty if unknown.
    #[must_use]
    pub fn fix(&self) -> String {
        match self {
            Self::Ring { broken } => broken.fix().into(),
            Self::Lost { fix, .. } => fix.clone(),
            Self::Memory(onehop_os::Error::CannotMap { .. }) => {
                "Use a GPU and a board between which the platform forwards transfers, or cpu/pinned".into()
            }
            _ => "Use cpu/pinned".into(),
        }
    }

    /// The reason, without the fix.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Ring { broken } => format!("{} ({})", broken, broken.name()),
            Self::Lost { what, .. } => what.clone(),
            other => other.to_string(),
        }
    }
}

fn list(all: &[crate::UnavailableRoute]) -> String {
    let one = |no: &crate::UnavailableRoute| format!("{} ({}; {})", no.route.name(), no.reason, no.fix);
    all.iter().map(one).collect::<Vec<_>>().join(", ")
}
