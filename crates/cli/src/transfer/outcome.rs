//! What a transfer reports, always in the same words.

use std::time::Duration;

use onehop_drive::{Drive, GpuMode, GpuReport};
use serde::Serialize;

use crate::gpus::Chosen;
use crate::report::Text;
use crate::route::{Places, Route, WhyNot};
use crate::transfer::Engine;
use crate::units;

/// What a transfer took.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tally {
    pub bytes: u64,
    pub commands: u64,
    pub retries: u64,
    /// Kernel launches, and allocations of memory for them; a CPU's queues need neither.
    pub launches: u64,
    pub allocations: u64,
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
    pub(crate) fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.commands += other.commands;
        self.retries += other.retries;
        self.launches += other.launches;
        self.allocations += other.allocations;
        self.took += other.took;
    }
}

/// The queues that were used.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct QueueUse {
    /// `owner`, `shared`, or `cpu`.
    pub mode: &'static str,
    pub count: u16,
    pub depth: u32,
    /// GPU threads, where they share a queue.
    pub threads: Option<u32>,
}

/// A recovery that the drive needed.
#[derive(Serialize)]
pub(crate) struct Recovered {
    pub cause: String,
    pub by: String,
    pub seconds: f64,
}

/// How a transfer went.
#[derive(Serialize)]
pub(crate) struct TransferOutcome {
    pub drive: String,
    pub bytes: u64,
    pub seconds: f64,
    /// 10^9 bytes in a second.
    pub gbps: f64,
    pub route: &'static str,
    pub route_why: &'static str,
    pub initiator: &'static str,
    pub simulated: Vec<&'static str>,
    pub placement: Places,
    /// Where the bytes lie in the end (for writes: where they came from).
    pub memory: &'static str,
    pub gpu: String,
    pub gpu_why: String,
    pub why_not_better: Vec<WhyNot>,
    pub queues: QueueUse,
    /// Eight hexadecimal digits, where it was asked for.
    pub crc32c: Option<String>,
    pub verified: Option<bool>,
    /// How that is known.
    pub verified_by: Option<String>,
    pub commands: u64,
    pub retries: u64,
    /// Kernel launches, and allocations of memory for their commands.
    pub launches: u64,
    pub allocations: u64,
    /// Commands that failed for good; recoveries that helped are in `incidents`.
    pub errors: u64,
    pub incidents: Vec<Recovered>,
}

impl TransferOutcome {
    /// The account of a transfer; `crc` is that of the bytes in GPU memory, if it is known.
    pub(crate) fn new(drive: &Drive, gpu: &Chosen, engine: &Engine, tally: &Tally, crc: Option<u32>) -> Self {
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
    pub(crate) fn add(&mut self, other: Self) {
        // The drive's, from its beginning on.
        self.incidents = other.incidents;
        let more = other.simulated.into_iter().filter(|part| !self.simulated.contains(part));
        self.simulated.extend(more.collect::<Vec<_>>());
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        self.gbps = self.bytes as f64 / 1e9 / self.seconds.max(1e-9);
        self.commands += other.commands;
        self.retries += other.retries;
        self.gpu = format!("{}, {}", self.gpu, other.gpu);
        if other.route != self.route {
            self.route_why = "of the first GPU; those of the others are in gpus";
        }
    }

    /// The rows that every transfer shows.
    pub(crate) fn rows(&self, text: &mut Text) {
        let mark = |part| if self.simulated.contains(&part) { " (simulated)" } else { "" };
        text.row("drive", format!("{}{}", self.drive, mark("drive")));
        text.row("gpu", format!("{}: {}", self.gpu, self.gpu_why));
        let Places { sq, cq, data } = self.placement;
        let who = if self.initiator == "gpu" { "GPU threads" } else { "the CPU" };
        text.row(
            "route",
            format!("{}: {who} gave the commands; sq in {sq}, cq in {cq}, data in {data}", self.route),
        );
        if self.route == "cpu/pinned" {
            text.row("", "the bytes took a second hop: a copy between host memory and vram");
        }
        text.row("", self.route_why);
        for no in &self.why_not_better {
            text.row("", format!("not {}: {}. {}", no.route, no.reason, no.fix));
        }
        text.row("queues", self.queues.words());
        text.row(
            "moved",
            format!(
                "{} bytes by {} in {}: {:.2} GB/s{}",
                self.bytes,
                units::count(self.commands, "command"),
                units::time(Duration::from_secs_f64(self.seconds)),
                self.gbps,
                if self.simulated.is_empty() { "" } else { " (simulated: says nothing about hardware)" },
            ),
        );
        text.row("trouble", self.trouble());
        if let Some(crc) = &self.crc32c {
            text.row("crc32c", format!("{crc} of the bytes in GPU memory"));
        }
        text.row(
            "verified",
            match (self.verified, &self.verified_by) {
                (Some(true), Some(by)) => format!("yes: {by}"),
                (Some(false), Some(by)) => {
                    format!("NO, the bytes in GPU memory are not what they should be: {by}")
                }
                (None, Some(by)) => format!("not all of it: {by}"),
                (_, None) => "not asked for (--verify)".into(),
            },
        );
    }

    /// Notes whether the bytes were found to be right, and how.
    pub(crate) fn judge(&mut self, right: bool, by: &'static str) {
        self.verified = Some(right);
        self.verified_by = Some(by.into());
    }

    fn trouble(&self) -> String {
        let mut words = units::count(self.retries, "retry").replace("retrys", "retries");
        for incident in &self.incidents {
            words.push_str(&format!("; {} was mended by {}", incident.cause, incident.by));
        }
        words
    }
}

impl QueueUse {
    fn words(&self) -> String {
        let depth = units::count(self.depth.into(), "command");
        match (self.mode, self.threads) {
            ("cpu", _) => format!("1 queue of the CPU, up to {depth} in flight"),
            (_, Some(threads)) => {
                format!("1 queue shared by {threads} GPU threads, up to {depth} in flight")
            }
            _ => {
                let queues = units::count(self.count.into(), "queue");
                format!("{queues}, each owned by a warp, up to {depth} in flight on each")
            }
        }
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
