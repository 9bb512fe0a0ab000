//! What a transfer reports, the same for every caller.

use std::time::Duration;

use onehop_drive::{Drive, GpuMode, GpuReport};
use serde::Serialize;

use crate::engine::{Chosen, Engine};
use crate::route::{Places, Route, WhyNot};

/// What a transfer took.
#[derive(Clone, Copy, Default, Debug)]
pub struct Tally {
    /// Bytes that were moved.
    pub bytes: u64,
    /// Commands.
    pub commands: u64,
    /// How often one was tried again.
    pub retries: u64,
    /// Kernel launches; a CPU's queues need none.
    pub launches: u64,
    /// Allocations of memory for launches.
    pub allocations: u64,
    /// How long it took.
    pub took: Duration,
}

impl From<GpuReport> for Tally {
    fn from(report: GpuReport) -> Self {
        Self {
            bytes: report.bytes,
            commands: report.commands,
            retries: report.retries,
            launches: report.launches,
            allocations: report.allocations,
            took: report.took,
        }
    }
}

impl Tally {
    /// Adds another, one after the other.
    pub fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.commands += other.commands;
        self.retries += other.retries;
        self.launches += other.launches;
        self.allocations += other.allocations;
        self.took += other.took;
    }
}

/// The queues that were used.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueueUse {
    /// `owner`, `shared`, or `cpu`.
    pub mode: &'static str,
    /// How many.
    pub count: u16,
    /// Commands in flight on each.
    pub depth: u32,
    /// GPU threads, where they share a queue.
    pub threads: Option<u32>,
}

/// A recovery that the drive needed and got.
#[derive(Clone, Debug, Serialize)]
pub struct Recovered {
    /// What went wrong.
    pub cause: String,
    /// What recovered it.
    pub by: String,
    /// How long that took.
    pub seconds: f64,
}

/// How a transfer went.
#[derive(Clone, Debug, Serialize)]
pub struct TransferOutcome {
    /// The drive's name.
    pub drive: String,
    /// Bytes that were moved.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
    /// 10^9 bytes in a second.
    pub gbps: f64,
    /// The route's name.
    pub route: &'static str,
    /// Why it is this route.
    pub route_why: &'static str,
    /// Who commanded the drive: `gpu` or `cpu`.
    pub initiator: &'static str,
    /// What was simulated: `drive`, `gpu`.
    pub simulated: Vec<&'static str>,
    /// Where queues and data lay.
    pub placement: Places,
    /// Where the bytes lie in the end (for writes: where they came from).
    pub memory: &'static str,
    /// The GPU's name.
    pub gpu: String,
    /// Why it is this GPU.
    pub gpu_why: String,
    /// The better routes, and what was in their way.
    pub why_not_better: Vec<WhyNot>,
    /// The queues.
    pub queues: QueueUse,
    /// Eight hexadecimal digits, where it was asked for.
    pub crc32c: Option<String>,
    /// Whether the bytes were found to be right; none where nobody looked.
    pub verified: Option<bool>,
    /// How that is known.
    pub verified_by: Option<String>,
    /// Commands.
    pub commands: u64,
    /// How often one was tried again.
    pub retries: u64,
    /// Kernel launches.
    pub launches: u64,
    /// Allocations of memory for their commands.
    pub allocations: u64,
    /// Commands that failed for good; recoveries that helped are in `incidents`.
    pub errors: u64,
    /// Recoveries that the drive needed.
    pub incidents: Vec<Recovered>,
}

impl TransferOutcome {
    /// The account of a transfer; `crc` is that of the bytes in GPU memory, if it is known.
    #[must_use]
    pub fn new(drive: &Drive, gpu: &Chosen, engine: &Engine, tally: &Tally, crc: Option<u32>) -> Self {
        let seconds = tally.took.as_secs_f64();
        let mut simulated = Vec::new();
        if drive.identity().simulated {
            simulated.push("drive");
        }
        if gpu.gpu.simulated() {
            simulated.push("gpu");
        }
        Self {
            drive: drive.name().to_owned(),
            bytes: tally.bytes,
            seconds,
            gbps: tally.bytes as f64 / 1e9 / seconds.max(1e-9),
            route: engine.route.name(),
            route_why: engine.why,
            initiator: engine.route.initiator(),
            simulated,
            placement: engine.route.placement(),
            memory: if engine.route == Route::CpuPinned { "vram" } else { engine.route.placement().data },
            gpu: gpu.gpu.name().to_owned(),
            gpu_why: gpu.why.clone(),
            why_not_better: engine.why_not_better.clone(),
            queues: queue_use(engine),
            crc32c: crc.map(|crc| format!("{crc:08x}")),
            verified: None,
            verified_by: None,
            commands: tally.commands,
            retries: tally.retries,
            launches: tally.launches,
            allocations: tally.allocations,
            errors: 0,
            incidents: recovered(drive),
        }
    }

    /// Adds another transfer that came after this one, to another GPU.
    pub fn add(&mut self, other: Self) {
        // The drive's, from its beginning on.
        self.incidents = other.incidents;
        let more = other.simulated.into_iter().filter(|part| !self.simulated.contains(part));
        self.simulated.extend(more.collect::<Vec<_>>());
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        self.gbps = self.bytes as f64 / 1e9 / self.seconds.max(1e-9);
        self.commands += other.commands;
        self.retries += other.retries;
        self.launches += other.launches;
        self.allocations += other.allocations;
        self.gpu = format!("{}, {}", self.gpu, other.gpu);
        if other.route != self.route {
            self.route_why = "of the first GPU; those of the others are in gpus";
        }
    }

    /// Notes the checksum of the bytes in GPU memory.
    pub fn note_crc32c(&mut self, crc: u32) {
        self.crc32c = Some(format!("{crc:08x}"));
    }

    /// Notes whether the bytes were found to be right, and how.
    pub fn judge(&mut self, right: bool, by: &'static str) {
        self.verified = Some(right);
        self.verified_by = Some(by.into());
    }
}

fn queue_use(engine: &Engine) -> QueueUse {
    let (mode, threads) = match (engine.route, engine.mode) {
        (Route::CpuDirect | Route::CpuPinned, _) => ("cpu", None),
        (Route::Gpu(_), GpuMode::Owner) => ("owner", None),
        (Route::Gpu(_), GpuMode::Shared { threads }) => ("shared", Some(threads)),
    };
    QueueUse { mode, count: engine.count, depth: engine.depth, threads }
}

fn recovered(drive: &Drive) -> Vec<Recovered> {
    let one = |incident: onehop_drive::Incident| Recovered {
        cause: incident.cause,
        by: incident.recovery.to_string(),
        seconds: incident.took.as_secs_f64(),
    };
    drive.incidents().into_iter().map(one).collect()
}
