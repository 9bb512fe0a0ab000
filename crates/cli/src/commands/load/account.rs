//! The report of a load, as JSON and as text.

use std::time::Duration;

use onehop_load::Model;
use onehop_load::engine::Account;
use onehop_load::outcome::Outcome;
use serde::Serialize;
use serde_json::json;

use super::{LoadedShare, Share, crc32c};
use crate::gpus::Chosen;
use crate::report::ReportText;
use crate::units;

/// The result of a load.
#[derive(Serialize)]
pub(super) struct LoadDocument {
    files: usize,
    format: &'static str,
    tensors: usize,
    #[serde(flatten)]
    pub(super) outcome: Outcome,
    /// Since the command started, including GPU start-up.
    pub(super) total_seconds: f64,
    pub(super) gpu_start_seconds: f64,
    initiator: &'static str,
    simulated: Vec<&'static str>,
    placement: serde_json::Value,
    gpu: String,
    gpu_why: String,
    /// What each GPU got.
    gpus: Vec<LoadedGpu>,
    io: Account,
    /// Checksum of all tensors. Computed only if requested, because that takes longer than the load.
    crc32c: Option<String>,
    pub(super) verified: Option<bool>,
    pub(super) verified_by: Option<String>,
    commands: u64,
    retries: u64,
    errors: u64,
}

/// What one GPU got.
#[derive(Serialize)]
pub(super) struct LoadedGpu {
    gpu: String,
    /// Its rank, and the number of ranks.
    rank: u64,
    ranks: u64,
    bytes: u64,
    gpu_bytes: u64,
    /// Only if each GPU has its own route.
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<&'static str>,
    crc32c: Option<String>,
}

impl LoadedGpu {
    /// The entries of all GPUs.
    pub(super) fn list(loaded: &[LoadedShare]) -> Vec<Self> {
        let one = |loaded: &LoadedShare| Self {
            gpu: loaded.share.gpu.gpu.name().to_owned(),
            rank: loaded.share.rank.0,
            ranks: loaded.share.rank.1,
            bytes: loaded.share.plan.tensor_bytes,
            gpu_bytes: loaded.share.plan.gpu_bytes,
            route: loaded.route,
            crc32c: loaded.crc32c().map(|crc| format!("{crc:08x}")),
        };
        loaded.iter().map(one).collect()
    }

    /// Adds a row for each GPU, if there are several.
    pub(super) fn rows(list: &[Self], text: &mut ReportText) {
        for one in list.iter().filter(|_| list.len() > 1) {
            let (rank, ranks) = (one.rank, one.ranks);
            let row = format!("{}: rank {rank} of {ranks}, {} of tensors", one.gpu, units::bytes(one.bytes));
            text.row("", row);
        }
    }
}

/// The names of several GPUs.
pub(super) fn names<'a>(gpus: impl IntoIterator<Item = &'a Chosen>) -> String {
    gpus.into_iter().map(|gpu| gpu.gpu.name()).collect::<Vec<_>>().join(", ")
}

/// The JSON document of a load. Total times and verdicts are added later.
pub(super) fn document(
    model: &Model,
    loaded: &[LoadedShare],
    account: &Account,
    took: Duration,
    rate: Option<f64>,
) -> LoadDocument {
    let plans: Vec<_> = loaded.iter().map(|loaded| &loaded.share.plan).collect();
    LoadDocument {
        files: model.files.len(),
        format: model.format,
        tensors: plans.first().map_or(0, |plan| plan.tensors.len()),
        outcome: Outcome::new(&plans, account, took, rate),
        total_seconds: 0.0,
        gpu_start_seconds: 0.0,
        initiator: "cpu",
        simulated: simulated(loaded.iter().map(|loaded| &loaded.share)),
        // cuFile does not report whether the bytes touched host memory.
        placement: json!({
            "sq": "kernel", "cq": "kernel",
            "data": if account.cufile_way.is_some() { "cufile" } else { "host" },
        }),
        gpu: names(loaded.iter().map(|loaded| &loaded.share.gpu)),
        gpu_why: loaded.first().map_or_else(String::new, |loaded| loaded.share.gpu.why.clone()),
        gpus: LoadedGpu::list(loaded),
        io: account.clone(),
        crc32c: crc32c(loaded).map(|crc| format!("{crc:08x}")),
        verified: None,
        verified_by: None,
        commands: 0,
        retries: account.retries,
        errors: 0,
    }
}

pub(super) fn simulated<'a>(mut shares: impl Iterator<Item = &'a Share>) -> Vec<&'static str> {
    if shares.any(|share| share.gpu.gpu.simulated()) { vec!["gpu"] } else { Vec::new() }
}

/// The text of a load.
pub(super) fn report_text(d: &LoadDocument) -> ReportText {
    let outcome = &d.outcome;
    let mut text = ReportText::default();
    let parts = [units::count(d.tensors as u64, "tensor"), units::count(d.files as u64, "file")];
    text.row("model", format!("{} in {}, {}", parts[0], parts[1], d.format));
    text.row("gpu", format!("{}: {}", d.gpu, d.gpu_why));
    LoadedGpu::rows(&d.gpus, &mut text);
    text.row("route", format!("{}: {}", outcome.route, outcome.route_why));
    let io = &d.io;
    let threads = units::count(io.threads as u64, "thread");
    let moved = if io.cufile_way.is_some() {
        format!("{} by cuFile, for {threads}", units::bytes(io.cufile_bytes))
    } else {
        format!(
            "{} out of the page cache, {} from the disk through it, {} past it, {} from servers, by {threads} through {} of pinned memory",
            units::bytes(io.cached_bytes),
            units::bytes(io.cache_miss_bytes),
            units::bytes(io.direct_bytes),
            units::bytes(io.remote_bytes),
            units::bytes(io.ring_bytes),
        )
    };
    text.row("", moved);
    if let Some(why) = &io.why_unknown {
        text.row("", format!("the contents of the page cache are unknown: {why}"));
    }
    if let Some(why) = &io.why_calls {
        text.row("", format!("past the page cache without io_uring: {why}"));
    }
    if let (Some(why), None) = (&io.why_unregistered, io.cufile_way) {
        text.row("", format!("the kernel pins memory for each read past the page cache: {why}"));
    }
    for no in &outcome.why_not_better {
        text.row("", format!("not {}: {}. {}", no.route, no.reason, no.fix));
    }
    let simulated = if d.simulated.is_empty() { "" } else { " (simulated: says nothing about hardware)" };
    text.row(
        "moved",
        format!(
            "{} in {}: {:.2} GB/s{simulated}",
            units::bytes(outcome.bytes),
            units::time(Duration::from_secs_f64(outcome.seconds)),
            outcome.gbps,
        ),
    );
    text.row(
        "limit",
        match (outcome.limit.gbps, outcome.limit.reached) {
            (Some(gbps), Some(reached)) => {
                format!("{}: {gbps:.1} GB/s, {:.0} % of it reached", outcome.limit.what, reached * 100.0)
            }
            _ => format!("{} (not measured)", outcome.limit.what),
        },
    );
    text.row(
        "memory",
        format!(
            "{} of GPU memory for {} of tensors",
            units::bytes(outcome.gpu_bytes),
            units::bytes(outcome.bytes)
        ),
    );
    if let Some(crc) = &d.crc32c {
        text.row("crc32c", format!("{crc} of the tensors in GPU memory"));
    }
    text.row(
        "verified",
        match (d.verified, &d.verified_by) {
            (Some(true), Some(by)) => format!("yes: {by}"),
            (Some(false), Some(by)) => format!("NO: {by}"),
            (None, Some(by)) => format!("partly: {by}"),
            (_, None) => "not requested (--verify, --manifest)".into(),
        },
    );
    text
}
