//! Measures the cost of queues and routes.
//!
//! 1. [`CpuQueue::open`] opens a drive for commands of one CPU thread, and [`CpuQueue::row`] measures them.
//! 2. [`ceiling`] measures the null controller alone, which answers at once and moves nothing. The rest of a row is the
//!    driver's own cost.
//! 3. [`GpuBench::new`] and [`GpuBench::row`] do the same for queues that GPU kernels drive.
//! 4. [`sweep`] moves blocks between drives or files and GPU memory by every route, and checks their bytes.
//! 5. [`pages`] moves pages between a file and memory by rings of a mount and by plain threads.
//! 6. [`compare::compare`] finds what changed between two results, and [`page`] writes them as a page.
#![forbid(unsafe_code)]

mod bed;
pub mod compare;
mod cpu;
mod gpu;
mod host;
pub mod page;
pub mod pages;
mod peer;
pub mod results;
mod stats;
pub mod sweep;
mod times;

pub use bed::{Controller, RingsAt};
pub use cpu::{CpuQueue, NULL_DRIVE, ceiling};
pub use gpu::{GpuBench, QueueMode, QueueRun};
pub use peer::{PeerKernel, PeerPlan, PeerRun};
pub use stats::{BEYOND, Clock, Quantiles, median};

use serde::Serialize;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// A measurement failed its checks.
    #[error("{0}; no result is given for a run with errors")]
    Wrong(String),
    /// The drive failed.
    #[error(transparent)]
    Drive(#[from] onehop_drive::Error),
    /// The simulated drive could not be made.
    #[error(transparent)]
    Sim(#[from] onehop_sim::Error),
    /// The data that came back was not the data that was written.
    #[error(
        "block {lba} was not read back as it was written; no result is given for a drive that returns wrong data"
    )]
    WrongData {
        /// The first block that differs.
        lba: u64,
    },
    /// Bytes of a sweep are wrong.
    #[error("the byte at {at} is not what it should be; no result is given for wrong bytes")]
    WrongBytes {
        /// Where on the drive or in the file.
        at: u64,
    },
    /// A row of a sweep failed.
    #[error("{what}: {why}")]
    Row {
        /// Which row.
        what: String,
        /// The error.
        #[source]
        why: Box<Error>,
    },
    /// Memory could not be allocated or accessed, or a file not be read.
    #[error(transparent)]
    System(#[from] onehop_os::Error),
    /// A file could not be used.
    #[error("{call} {path}: {source}")]
    File {
        /// The operation on it.
        call: &'static str,
        /// The file.
        path: String,
        /// How it failed.
        source: std::io::Error,
    },
    /// A file is not a file of results.
    #[error("{path}: {why}")]
    Results {
        /// The file.
        path: String,
        /// What is wrong with it.
        #[source]
        why: results::ResultsError,
    },
    /// A measurement that is not possible as described.
    #[error("{0}")]
    Setup(String),
    /// The caller asked for an end.
    #[error("stopped on request")]
    Stopped,
}

impl Error {
    /// Whether it ended because the caller asked for that.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        match self {
            Self::Stopped | Self::Drive(onehop_drive::Error::Interrupted { .. }) => true,
            Self::Row { why, .. } => why.is_stopped(),
            _ => false,
        }
    }
}

/// One row of a table of queue costs.
#[derive(Clone, Debug, Serialize)]
pub struct QueueCost {
    /// Who drives the queue: `cpu` or `gpu`.
    pub side: &'static str,
    /// How: `owner` or `shared`.
    pub mode: &'static str,
    /// Queues.
    pub queues: u32,
    /// Commands in flight on each.
    pub depth: u32,
    /// Threads.
    pub threads: u32,
    /// Bytes of a command.
    pub block: u64,
    /// Commands per second.
    pub iops: f64,
    /// Nanoseconds of a command: wall time over commands.
    pub ns_per_command: f64,
    /// Median latency. CPU: of a whole batch, from before its first submission until its last completion was taken. GPU: of a
    /// command, from when its warp began to write its entry (one in flight: rang its doorbell) until its outcome was written.
    pub p50_ns: Option<f64>,
    /// The 99th percentile of the same; none where fewer than [`BEYOND`] samples lie beyond it.
    pub p99_ns: Option<f64>,
    /// What latencies are of: a `batch` as deep as the queue (CPU) or a `command` (GPU).
    pub latency_of: &'static str,
    /// How many latencies the percentiles are of.
    pub latency_samples: u64,
    /// Cycles to submit a command, including the doorbell's share. CPU: including the controller's work in it. GPU: of
    /// a warp, whose lanes work in parallel; of all warps together on a shared queue.
    pub cycles_submit: Option<f64>,
    /// Cycles to take a completion.
    pub cycles_complete: Option<f64>,
    /// GPU: commands per second of the metering kernels.
    pub timed_iops: Option<f64>,
    /// Nanoseconds that the controller by itself takes for a command, if measured: a reference, not a limit.
    pub controller_ns: Option<f64>,
    /// Registers of a GPU thread.
    pub regs: Option<u32>,
}
