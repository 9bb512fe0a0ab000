//! What can go wrong with a board.

use std::time::Duration;

use onehop_radio::Broken;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a board could not be driven.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A ring breaks a rule of the board.
    #[error("the board cannot use this ring ({}): {broken}. {}", .broken.name(), .broken.fix())]
    Ring {
        /// The rule.
        broken: Broken,
    },
    /// The board has left the bus.
    #[error(
        "{board} has left the bus: its registers read as all ones. Check its power and its seat, then remove and rescan it"
    )]
    Gone {
        /// Which board.
        board: String,
    },
    /// The kernel module took its DMA away.
    #[error("{board} may no longer reach memory: {why}. Open it again")]
    Stopped {
        /// Which board.
        board: String,
        /// Why.
        why: String,
    },
    /// It does not stop.
    #[error(
        "{board} still moves samples {} ms after it was told to stop; its memory is left to it until this process ends",
        .waited.as_millis()
    )]
    DoesNotStop {
        /// Which board.
        board: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// What it told makes no sense.
    #[error("{board} tells what cannot be: {what}")]
    Confused {
        /// Which board.
        board: String,
        /// What it told.
        what: String,
    },
    /// Samples did not arrive, though everything was set up without an error.
    #[error("{what}. {fix}")]
    Lost {
        /// What was missing.
        what: String,
        /// What would mend it.
        fix: String,
    },
    /// Whoever watched it ended it.
    #[error("stopped as asked")]
    Cancelled,
    /// It is already in use.
    #[error("{board} has a {what} already; drop that first")]
    Busy {
        /// Which board.
        board: String,
        /// What it has.
        what: &'static str,
    },
    /// It cannot be had with these settings.
    #[error("{what} is not possible: {why}")]
    NotPossible {
        /// What.
        what: &'static str,
        /// Why, with what would mend it.
        why: String,
    },
    /// No route can be had.
    #[error("no route works: {}", list(.0))]
    NoRoute(Vec<crate::WhyNot>),
    /// Host memory could not be had, reached or mapped.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// The board could not be taken, or the kernel module refused something.
    #[error(transparent)]
    Pci(#[from] onehop_pci::Error),
    /// GPU memory could not be had or reached, or a kernel failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
}

impl From<Broken> for Error {
    fn from(broken: Broken) -> Self {
        Self::Ring { broken }
    }
}

impl Error {
    /// What would mend it, where that is known.
    #[must_use]
    pub fn fix(&self) -> String {
        match self {
            Self::Ring { broken } => broken.fix().into(),
            Self::Lost { fix, .. } => fix.clone(),
            Self::Memory(onehop_os::Error::CannotMap { .. }) => {
                "Use a GPU and a board between which the platform forwards, or cpu/pinned".into()
            }
            _ => "Use cpu/pinned".into(),
        }
    }

    /// Why it is, without what would mend it.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Ring { broken } => format!("{} ({})", broken, broken.name()),
            Self::Lost { what, .. } => what.clone(),
            other => other.to_string(),
        }
    }
}

fn list(all: &[crate::WhyNot]) -> String {
    let one = |no: &crate::WhyNot| format!("{} ({}; {})", no.route.name(), no.reason, no.fix);
    all.iter().map(one).collect::<Vec<_>>().join(", ")
}
