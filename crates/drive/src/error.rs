//! What can go wrong with a drive, and what to do about it.

use std::time::Duration;

use onehop_proto::Status;
use onehop_proto::format::{FormatError, RangeError};
use onehop_proto::prp::PrpError;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation on a drive failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The device is no longer on the bus.
    #[error(
        "{drive} is gone: register {register} reads all ones. Check its power and its slot, then remove and rescan it"
    )]
    Gone {
        /// The drive.
        drive: String,
        /// The register that was read.
        register: &'static str,
    },
    /// The caller requested a stop ([`Options::stop`](crate::Options::stop)) during a wait for the drive.
    #[error("{drive}: stopped on request")]
    Interrupted {
        /// The drive.
        drive: String,
    },
    /// A controller that another program or machine serves cannot be reached any more.
    #[error("{drive} cannot be reached: {why}")]
    Lost {
        /// The drive.
        drive: String,
        /// What failed last.
        why: String,
    },
    /// A write was in flight when its controller was lost, or was not answered.
    #[error(
        "{command}: the outcome is unknown. It was in flight when {recovery} became necessary; the target may have carried it out, or may still do so. It was not repeated: read the blocks back before writing them again"
    )]
    OutcomeUnknown {
        /// Which command, on what.
        command: String,
        /// What ended the connection that it was sent over.
        recovery: Recovery,
    },
    /// CSTS.RDY did not change in time.
    #[error("{drive} did not become {want} within {waited:?} (CC {cc:#x}, CSTS {csts:#x})")]
    NotReady {
        /// The drive.
        drive: String,
        /// `ready` or `disabled`.
        want: &'static str,
        /// How long it was waited for.
        waited: Duration,
        /// The configuration register.
        cc: u32,
        /// The status register.
        csts: u32,
    },
    /// The controller reported a fatal error while it was being enabled.
    #[error("{drive} reports a fatal error (CSTS.CFS) while starting; a power cycle may help")]
    Fatal {
        /// The drive.
        drive: String,
    },
    /// An option is out of bounds.
    #[error("{option} cannot be {value}: {limit}")]
    Option {
        /// Which option: a field of [`Options`](crate::Options) or [`GpuSetup`](crate::GpuSetup).
        option: &'static str,
        /// Its value.
        value: String,
        /// The allowed values.
        limit: String,
    },
    /// The controller cannot be driven by this driver.
    #[error("{drive} cannot be driven: {why}")]
    Unsupported {
        /// The drive.
        drive: String,
        /// What it lacks or requires.
        why: String,
    },
    /// A command failed.
    #[error("{command} failed: {status}")]
    Command {
        /// Which command, on what.
        command: String,
        /// The controller's status.
        status: Status,
    },
    /// A queue of a controller across a network has no connection.
    #[error("queue {qid} of {drive} could not be created: {why}")]
    NotConnected {
        /// The drive.
        drive: String,
        /// The queue.
        qid: u16,
        /// Why: nothing listens there, no answer came in time, or the target's error.
        why: String,
    },
    /// An admin command was not answered.
    #[error("{drive} did not answer {command} within {waited:?}")]
    NoAnswer {
        /// The drive.
        drive: String,
        /// Which command.
        command: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A command was not completed in time. The controller no longer works on it.
    #[error(
        "{command} was not completed within {waited:?}, and not after {retries} retries; the drive was recovered by {recovery}"
    )]
    TimedOut {
        /// Which command, on what.
        command: String,
        /// How long it was waited for.
        waited: Duration,
        /// How often it was tried again.
        retries: u32,
        /// The step of the time-out ladder that took it from the controller.
        recovery: Recovery,
    },
    /// A read was completed, but its data did not arrive.
    #[error("{command} was completed, but its data had not arrived {waited:?} later")]
    DataMissing {
        /// Which command, on what.
        command: String,
        /// How long the data was waited for.
        waited: Duration,
    },
    /// Each try of a transfer saw completions of commands that were not in flight.
    #[error(
        "{transfer}: the drive completed commands that were not in flight, in each of {times} attempts. Which of its commands it has carried out is unknown"
    )]
    WrongCompletions {
        /// The transfer.
        transfer: String,
        /// The number of tries.
        times: u32,
    },
    /// The drive could not be recovered; nothing more will be sent to it.
    #[error("{drive} could not be brought back: {why}. Memory that it was given stays allocated")]
    Dead {
        /// The drive.
        drive: String,
        /// What failed last.
        why: String,
    },
    /// Another drive answered after a reset.
    #[error("after a reset {drive} calls itself {now}, before it was {before}")]
    Changed {
        /// The drive.
        drive: String,
        /// The serial number before.
        before: String,
        /// The serial number now.
        now: String,
    },
    /// The drive was opened for reading only.
    #[error("{drive} is open for reading only")]
    ReadOnly {
        /// The drive.
        drive: String,
    },
    /// An exported queue would write blocks without the protection information that the namespace requires.
    #[error(
        "{drive}: namespace {nsid} has protection information (type {kind}), which commands of an exported queue do not carry: export the queue for reading only, or format the namespace without (`nvme format --pi=0`, which erases it)"
    )]
    Protected {
        /// The drive.
        drive: String,
        /// The namespace.
        nsid: u32,
        /// Type 1 to 3.
        kind: u8,
    },
    /// There is no such namespace.
    #[error("{drive} has no active namespace {nsid}; `onehop drive identify` shows those that it has")]
    NoNamespace {
        /// The drive.
        drive: String,
        /// The namespace asked for.
        nsid: u32,
    },
    /// A namespace has changed since the drive was opened, or the drive can no longer identify it.
    #[error(
        "{drive}: namespace {nsid} was formatted, resized, removed or replaced meanwhile, or cannot be identified any more; open the drive again"
    )]
    NamespaceChanged {
        /// The drive.
        drive: String,
        /// The namespace.
        nsid: u32,
    },
    /// A buffer or a namespace that belongs to another drive.
    #[error("this {what} belongs to another drive than {drive}")]
    Foreign {
        /// `buffer` or `namespace`.
        what: &'static str,
        /// The drive that was to use it.
        drive: String,
    },
    /// The drive may have lost writes that it had acknowledged.
    #[error(
        "{drive} was without power, failed or was reset since the last flush: what was written meanwhile may be lost, and has to be written again"
    )]
    WritesLost {
        /// The drive.
        drive: String,
    },
    /// A namespace has an unknown format.
    #[error("namespace {nsid} cannot be used: {source}")]
    Format {
        /// The namespace.
        nsid: u32,
        /// What is unknown.
        source: FormatError,
    },
    /// Blocks that the namespace does not have.
    #[error("namespace {nsid}: {source}")]
    Range {
        /// The namespace.
        nsid: u32,
        /// What is out of range.
        source: RangeError,
    },
    /// A buffer does not fit the transfer.
    #[error("a buffer of {have} bytes does not hold {need} bytes from offset {offset} on")]
    Buffer {
        /// Bytes of the buffer.
        have: u64,
        /// Where the transfer starts in it.
        offset: u64,
        /// Bytes of the transfer.
        need: u64,
    },
    /// A buffer cannot be described to the controller.
    #[error("this buffer cannot be described to the controller: {0}")]
    Prp(#[from] PrpError),
    /// A transfer of one command is longer than the controller allows.
    #[error("{bytes} bytes are more than the {limit} that this controller moves by one command")]
    TooLong {
        /// Bytes of the transfer.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// No more commands can be in flight; take completions first.
    #[error("the queue is full: {0} commands are in flight")]
    Full(u32),
    /// A token of another queue, or one whose command has already ended.
    #[error("this token stands for no command of this queue")]
    Token,
    /// No I/O queue is left.
    #[error("{drive} granted {granted} I/O queues and all are in use")]
    NoQueue {
        /// The drive.
        drive: String,
        /// Queues that the controller granted.
        granted: u32,
    },
    /// The controller completed a command that was not in flight.
    #[error("{drive} completed command {cid:#06x}, which was not in flight; it was recovered by {recovery}")]
    UnexpectedCompletion {
        /// The drive.
        drive: String,
        /// The identifier in the completion.
        cid: u16,
        /// The recovery.
        recovery: Recovery,
    },
    /// A GPU launch reached its own limits.
    #[error("{done} of {count} commands were done when the GPU stopped: {why}")]
    Launch {
        /// Commands with an outcome.
        done: u64,
        /// Commands in all.
        count: u64,
        /// Why it stopped.
        why: String,
    },
    /// The caller cancelled a job.
    #[error("cancelled after {done} of {count} commands")]
    Cancelled {
        /// Commands that have ended.
        done: u64,
        /// Commands in all.
        count: u64,
    },
    /// The controller lacks what a placement needs.
    #[error("{part} cannot lie in {place}: {why}")]
    Placement {
        /// `sq`, `cq` or `data`.
        part: &'static str,
        /// The requested place.
        place: &'static str,
        /// Why it cannot.
        why: String,
    },
    /// The controller returned invalid data.
    #[error("{drive} returned {what} that cannot be: {why}")]
    Nonsense {
        /// The drive.
        drive: String,
        /// What it returned.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// Memory has run out.
    #[error("{0}")]
    NoMemory(String),
    /// Memory could not be allocated for another reason, reached or mapped.
    #[error("{0}")]
    Memory(String),
    /// The GPU failed.
    #[error("{0}")]
    Gpu(String),
}

impl From<onehop_os::Error> for Error {
    fn from(error: onehop_os::Error) -> Self {
        match error {
            onehop_os::Error::Lost { device, why } => Self::Lost { drive: device, why },
            onehop_os::Error::Interrupted { device } => Self::Interrupted { drive: device },
            full if full.is_no_room() => Self::NoMemory(full.to_string()),
            other => Self::Memory(other.to_string()),
        }
    }
}

impl From<onehop_gpu::Error> for Error {
    fn from(error: onehop_gpu::Error) -> Self {
        Self::Gpu(error.to_string())
    }
}

/// The steps of the time-out ladder, from the mildest to the hardest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Recovery {
    /// Its completion had arrived after all.
    Drain,
    /// The controller aborted the command.
    Abort,
    /// The queue was deleted and created again.
    QueueDelete,
    /// The controller was disabled and enabled again.
    ControllerReset,
    /// The subsystem or the function was reset.
    FunctionReset,
}

impl std::fmt::Display for Recovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Drain => "draining its completion queue",
            Self::Abort => "aborting the command",
            Self::QueueDelete => "deleting the queue",
            Self::ControllerReset => "a controller reset",
            Self::FunctionReset => "a function reset",
        })
    }
}
