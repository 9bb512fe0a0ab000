//! The report of a transfer, the same for every caller.

use onehop_drive::{Drive, GpuMode, Moved};
use serde::Serialize;

use crate::engine::{Chosen, Engine};
use crate::route::{BetterRoute, Places, Route};

/// The queues of a transfer.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueueUse {
    /// `owner`, `shared`, or `cpu`.
    pub mode: &'static str,
    /// Number of queues.
    pub count: u16,
    /// Commands in flight per queue.
    pub depth: u32,
    /// GPU threads, if they share a queue.
    pub threads: Option<u32>,
}

/// A successful recovery of the drive.
#[derive(Clone, Debug, Serialize)]
pub struct Recovered {
    /// What went wrong.
    pub cause: String,
    /// How it was recovered.
    pub by: String,
    /// Duration of the recovery.
    pub seconds: f64,
}

/// The report of a transfer.
#[derive(Clone, Debug, Serialize)]
pub struct TransferOutcome {
    /// The drive's name.
    pub drive: String,
    /// Bytes moved.
    pub bytes: u64,
    /// Duration.
    pub seconds: f64,
    /// 10^9 bytes per second.
    pub gbps: f64,
    /// The route's name.
    pub route: &'static str,
    /// Why this route was chosen.
    pub route_why: &'static str,
    /// What submitted commands: `gpu` or `cpu`.
    pub initiator: &'static str,
    /// Whether the drive is reached through a network: a stage before those that `placement` names.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub over_network: bool,
    /// What was simulated: `drive`, `gpu`.
    pub simulated: Vec<&'static str>,
    /// The places of queues and data.
    pub placement: Places,
    /// The final place of the bytes (for writes: their source).
    pub memory: &'static str,
    /// The GPU's name.
    pub gpu: String,
    /// Why this GPU was chosen.
    pub gpu_why: String,
    /// Better routes, and why they were not used.
    pub why_not_better: Vec<BetterRoute>,
    /// The queues.
    pub queues: QueueUse,
    /// Eight hexadecimal digits, if requested.
    pub crc32c: Option<String>,
    /// Whether the bytes were correct; `None` if not verified.
    pub verified: Option<bool>,
    /// How they were verified.
    pub verified_by: Option<String>,
    /// Commands.
    pub commands: u64,
    /// Number of retried commands.
    pub retries: u64,
    /// How often a transfer was repeated as a whole, because a completion may have named the wrong command.
    pub repeats: u64,
    /// Kernel launches.
    pub launches: u64,
    /// Allocations of memory for their commands.
    pub allocations: u64,
    /// Commands that failed permanently; successful recoveries are in `incidents`.
    pub errors: u64,
    /// Recoveries of the drive.
    pub incidents: Vec<Recovered>,
}

impl TransferOutcome {
    /// Reports a transfer; `crc` is the checksum of the bytes in GPU memory, if known.
    #[must_use]
    pub fn new(drive: &Drive, gpu: &Chosen, engine: &Engine, moved: &Moved, crc: Option<u32>) -> Self {
        let seconds = moved.took.as_secs_f64();
        let mut simulated = Vec::new();
        if drive.identity().simulated {
            simulated.push("drive");
        }
        if gpu.gpu.simulated() {
            simulated.push("gpu");
        }
        Self {
            drive: drive.name().to_owned(),
            bytes: moved.bytes,
            seconds,
            gbps: moved.bytes as f64 / 1e9 / seconds.max(1e-9),
            route: engine.route.name(),
            route_why: engine.why,
            initiator: engine.route.initiator(),
            over_network: drive.is_remote(),
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
            commands: moved.commands,
            retries: moved.retries,
            repeats: moved.repeats,
            launches: moved.launches,
            allocations: moved.allocations,
            errors: 0,
            incidents: recovered(drive),
        }
    }

    /// Reports recoveries that came after the transfer, too: during a flush, or while the bytes were compared.
    pub fn look_again(&mut self, drive: &Drive) {
        self.incidents = recovered(drive);
    }

    /// Adds a transfer to another GPU that came after this one.
    pub fn add(&mut self, other: Self) {
        // The drive's incidents since its start.
        self.incidents = other.incidents;
        let more = other.simulated.into_iter().filter(|part| !self.simulated.contains(part));
        self.simulated.extend(more.collect::<Vec<_>>());
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        self.gbps = self.bytes as f64 / 1e9 / self.seconds.max(1e-9);
        self.commands += other.commands;
        self.retries += other.retries;
        self.repeats += other.repeats;
        self.launches += other.launches;
        self.allocations += other.allocations;
        self.gpu = format!("{}, {}", self.gpu, other.gpu);
        if other.route != self.route {
            self.route_why = "of the first GPU; those of the others are in gpus";
        }
    }

    /// Records the checksum of the bytes in GPU memory.
    pub fn note_crc32c(&mut self, crc: u32) {
        self.crc32c = Some(format!("{crc:08x}"));
    }

    /// Records whether the bytes were correct, and how they were verified.
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
