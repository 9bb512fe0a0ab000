//! The route options, the text about a transfer, and its progress and cancellation.

use std::time::Duration;

use onehop_transfer::{Places, Progress, QueueUse, RouteOptions, RouteRequest, TransferOutcome};

use crate::error::{CliError, Result};
use crate::progress::TransientBar;
use crate::report::ReportText;
use crate::stop::StopFlag;
use crate::units;

/// How GPU threads use queues.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ModeArg {
    /// Each queue is owned by one warp
    Owner,
    /// All threads use one queue
    Shared,
}

/// The options of [`RouteArgs`] that apply to drives only.
pub(crate) const DRIVE_OPTIONS: [&str; 4] = ["mode", "queues", "depth", "timeout"];

/// The route options.
#[derive(Clone, clap::Args)]
pub(crate) struct RouteArgs {
    /// The route: auto (the best that works), or exactly gpu/tier3, gpu/posted, gpu/tier2, gpu/tier1, cpu/direct,
    /// cpu/pinned
    #[arg(long, value_name = "ROUTE", default_value = "auto", value_parser = parse_route)]
    pub route: RouteRequest,
    /// How GPU threads use queues [default: owner]
    #[arg(long)]
    pub mode: Option<ModeArg>,
    /// With --mode shared: GPU threads on the queue [default: 32]. For local files: CPU threads that read from the page
    /// cache, and as many that read past it [default: 7/8 of the CPUs, at most 16; and 16]
    #[arg(long, value_name = "N", value_parser = units::within::<u32>(1..=1024))]
    pub threads: Option<u32>,
    /// With --mode owner: queues, 1 to 1024, each owned by a warp [default: 2]
    #[arg(long, value_name = "N", value_parser = units::within::<u16>(1..=1024))]
    pub queues: Option<u16>,
    /// Commands in flight on each queue, 1 to 65535
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = units::within::<u32>(1..=65535))]
    pub depth: u32,
    /// How long a command may take before onehop recovers it [default: 5s; demo: 500ms]
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    pub timeout: Option<Duration>,
}

fn parse_route(text: &str) -> std::result::Result<RouteRequest, String> {
    text.parse().map_err(|error: onehop_transfer::Error| error.to_string())
}

impl RouteArgs {
    /// The options of a transfer with a drive.
    ///
    /// # Errors
    /// When options contradict each other.
    pub(crate) fn options(&self) -> Result<RouteOptions> {
        let mode = self.mode.map(|mode| match mode {
            ModeArg::Owner => onehop_transfer::Mode::Owner,
            ModeArg::Shared => onehop_transfer::Mode::Shared,
        });
        let Self { ref route, threads, queues, depth, timeout, .. } = *self;
        let route = route.clone();
        let options =
            RouteOptions { route, mode, threads, queues, depth, timeout, ..RouteOptions::default() };
        options.gpu_mode()?;
        options.candidates()?;
        Ok(options)
    }

    /// The number of CPU threads that read local files.
    pub(crate) fn reading_threads(&self) -> Result<Option<usize>> {
        match self.threads {
            Some(threads) if threads > 256 => {
                Err(CliError::Usage("--threads: at most 256 for local files".into()))
            }
            threads => Ok(threads.map(|threads| threads as usize)),
        }
    }
}

/// Shows the progress of a transfer, and cancels it after Ctrl-C.
pub(crate) struct TransferWatch<'a> {
    bar: TransientBar,
    stop: &'a StopFlag,
}

impl<'a> TransferWatch<'a> {
    pub(crate) fn new(what: &'static str, bytes: u64, stop: &'a StopFlag) -> Self {
        Self { bar: TransientBar::of_bytes(what, bytes), stop }
    }
}

impl Progress for TransferWatch<'_> {
    fn moved(&self, bytes: u64) {
        self.bar.add(bytes);
    }

    fn is_cancelled(&self) -> bool {
        self.stop.is_set()
    }
}

/// Cancels without showing progress.
impl Progress for StopFlag {
    fn is_cancelled(&self) -> bool {
        self.is_set()
    }
}

/// Adds the rows common to all transfers.
pub(crate) fn rows(outcome: &TransferOutcome, text: &mut ReportText) {
    let mark = |part| if outcome.simulated.contains(&part) { " (simulated)" } else { "" };
    text.row("drive", format!("{}{}", outcome.drive, mark("drive")));
    text.row("gpu", format!("{}: {}", outcome.gpu, outcome.gpu_why));
    let Places { sq, cq, data } = outcome.placement;
    let who = if outcome.initiator == "gpu" { "GPU threads" } else { "the CPU" };
    text.row(
        "route",
        format!("{}: {who} issued the commands; sq in {sq}, cq in {cq}, data in {data}", outcome.route),
    );
    if outcome.route == "cpu/pinned" {
        text.row("", "a second hop: the bytes were copied between host memory and vram");
    }
    if outcome.over_network {
        text.row("", "the drive is on the network: the bytes went through host memory");
    }
    text.row("", outcome.route_why);
    for no in &outcome.why_not_better {
        text.row("", format!("not {}: {}", no.route, no.why(". ")));
    }
    text.row("queues", queue_text(&outcome.queues));
    text.row(
        "moved",
        format!(
            "{} bytes by {} in {}: {:.2} GB/s{}",
            outcome.bytes,
            units::count(outcome.commands, "command"),
            units::time(Duration::from_secs_f64(outcome.seconds)),
            outcome.gbps,
            if outcome.simulated.is_empty() { "" } else { " (simulated: says nothing about hardware)" },
        ),
    );
    if outcome.launches > 0 {
        let (launches, allocations) = (
            units::count(outcome.launches, "kernel launch"),
            units::count(outcome.allocations, "allocation"),
        );
        text.row("", format!("{launches} and {allocations} of memory for the commands"));
    }
    text.row("trouble", recoveries(outcome));
    if let Some(crc) = &outcome.crc32c {
        text.row("crc32c", format!("{crc} of the bytes in GPU memory"));
    }
    text.row(
        "verified",
        match (outcome.verified, &outcome.verified_by) {
            (Some(true), Some(by)) => format!("yes: {by}"),
            (Some(false), Some(by)) => {
                format!("NO, the bytes in GPU memory are not what they should be: {by}")
            }
            (None, Some(by)) => format!("partly: {by}"),
            (_, None) => "not requested (--verify)".into(),
        },
    );
}

fn recoveries(outcome: &TransferOutcome) -> String {
    let mut words = units::count(outcome.retries, "retry");
    if outcome.repeats > 0 {
        let times = units::count(outcome.repeats, "time");
        words.push_str(&format!(
            "; a transfer repeated {times}, as a completion may have named the wrong command"
        ));
    }
    let mut incidents: Vec<(String, u64)> = Vec::new();
    for incident in &outcome.incidents {
        let text = format!("{} was recovered by {}", incident.cause, incident.by);
        match incidents.iter_mut().find(|(known, _)| *known == text) {
            Some((_, times)) => *times += 1,
            None => incidents.push((text, 1)),
        }
    }
    for (text, times) in incidents {
        words.push_str(&format!("; {text}"));
        if times > 1 {
            words.push_str(&format!(", {times} times"));
        }
    }
    words
}

fn queue_text(queues: &QueueUse) -> String {
    let depth = units::count(queues.depth.into(), "command");
    match (queues.mode, queues.threads) {
        ("cpu", _) if queues.count > 1 => {
            format!("{} queues of the CPU, up to {depth} in flight on each", queues.count)
        }
        ("cpu", _) => format!("1 queue of the CPU, up to {depth} in flight"),
        (_, Some(threads)) => {
            format!("1 queue shared by {threads} GPU threads, up to {depth} in flight")
        }
        _ => {
            let queues = units::count(queues.count.into(), "queue");
            format!("{queues}, each owned by a warp, up to {depth} in flight on each")
        }
    }
}
