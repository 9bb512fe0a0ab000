//! A transfer: bytes between a drive and GPU memory by one route, told as it went.

mod arena;
mod chunk;
mod copy;
mod engine;
mod outcome;

pub(crate) use arena::{Landed, fill};
pub(crate) use copy::{crc32c, load, save, verify};
pub(crate) use engine::{Engine, Memory, TransferSetup, block_bytes};
pub(crate) use outcome::{Tally, TransferOutcome};

use std::time::Duration;

use onehop_drive::{GpuMode, Options};

use crate::error::{CliError, Result};
use crate::route::{self, Route, RouteRequest};
use crate::units;

/// How GPU threads use queues, as people say it.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// Each queue is owned by one warp
    Owner,
    /// All threads use one queue
    Shared,
}

/// The way that bytes are to take.
#[derive(Clone, clap::Args)]
pub(crate) struct RouteArgs {
    /// The way: auto (the best that works), or exactly gpu/tier3, gpu/posted, gpu/tier2, gpu/tier1, cpu/direct,
    /// cpu/pinned
    #[arg(long, value_name = "ROUTE", default_value = "auto", value_parser = route::parse)]
    pub route: RouteRequest,
    /// How GPU threads use queues [default: owner]
    #[arg(long)]
    pub mode: Option<Mode>,
    /// GPU threads on the one queue of --mode shared [default: 32]; to load or read files of this machine, the CPU threads
    /// that read out of the page cache, and as many past it [default: one for each processor less an eighth and 16 at most, and 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Queues of --mode owner, each with a warp of its own [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub queues: Option<u16>,
    /// Commands in flight on each queue
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65535))]
    pub depth: u32,
    /// How long a command may take before it is recovered [default: 5s; demo: 500ms]
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    pub timeout: Option<Duration>,
}

impl RouteArgs {
    /// How long a command may take.
    pub(crate) fn patience(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(5))
    }

    /// How the drive is to be driven.
    pub(crate) fn options(&self, writable: bool) -> Options {
        let standard = Options::default();
        Options {
            writable,
            queues: standard.queues.max(self.queues.unwrap_or(0)),
            depth: self.depth,
            timeout: self.patience(),
            ..standard
        }
    }

    /// Whether something was asked for that only GPU threads have.
    fn wants_gpu(&self) -> bool {
        self.mode.is_some() || self.threads.is_some() || self.queues.is_some()
    }

    /// CPU threads that read files of this machine.
    pub(crate) fn reading_threads(&self) -> Result<Option<usize>> {
        match self.threads {
            Some(threads) if threads > 256 => {
                Err(CliError::Usage("--threads: no more than 256 read files of this machine".into()))
            }
            threads => Ok(threads.map(|threads| threads as usize)),
        }
    }

    /// The routes to try, in order.
    pub(crate) fn candidates(&self) -> Result<Vec<Route>> {
        let mut routes = self.route.candidates()?;
        // Who says how GPU threads are to do it does not want the CPU to do it instead.
        if self.wants_gpu() {
            routes.retain(|route| matches!(route, Route::Gpu(_)));
        }
        Ok(routes)
    }

    /// How the GPU's threads share queues; an error where the arguments contradict each other.
    pub(crate) fn gpu_mode(&self) -> Result<GpuMode> {
        let only = |name: &str| matches!(&self.route, RouteRequest::Only(only) if *only == name);
        let cpu = only("cpu/direct") || only("cpu/pinned");
        if cpu && self.wants_gpu() {
            let why = "--mode, --threads and --queues are for gpu/ routes; the CPU uses one queue";
            return Err(CliError::Usage(why.into()));
        }
        match self.mode.unwrap_or(Mode::Owner) {
            Mode::Owner if self.threads.is_some() => Err(CliError::Usage(
                "--threads is for --mode shared; in owner mode each queue has a warp".into(),
            )),
            Mode::Owner => Ok(GpuMode::Owner),
            Mode::Shared if self.queues.is_some() => {
                Err(CliError::Usage("--queues is for --mode owner; in shared mode there is one queue".into()))
            }
            Mode::Shared => Ok(GpuMode::Shared { threads: self.threads.unwrap_or(32) }),
        }
    }
}
