//! The account of a load: what machines read, and what people are told.

use std::time::Duration;

use onehop_load::engine::Account;
use onehop_load::{Model, Plan, plan};
use serde::Serialize;
use serde_json::json;

use crate::error::Result;
use crate::gpus::Chosen;
use crate::report::{Report, Text};
use crate::route::WhyNot;
use crate::units;

/// The slowest thing on the way.
#[derive(Serialize)]
struct Limit {
    what: &'static str,
    /// 10^9 bytes in a second, where it is known.
    gbps: Option<f64>,
    /// How much of it was reached.
    reached: Option<f64>,
}

/// How a load went.
#[derive(Serialize)]
pub(crate) struct Document {
    files: usize,
    format: &'static str,
    tensors: usize,
    bytes: u64,
    read_bytes: u64,
    gpu_bytes: u64,
    seconds: f64,
    gbps: f64,
    /// From the command's start, GPU start-up included.
    pub total_seconds: f64,
    pub gpu_start_seconds: f64,
    route: &'static str,
    route_why: String,
    initiator: &'static str,
    simulated: Vec<&'static str>,
    placement: serde_json::Value,
    gpu: String,
    gpu_why: String,
    ways: Account,
    limit: Limit,
    why_not_better: Vec<WhyNot>,
    /// Of the tensors, one after the other; only where it was asked for: it takes longer than the load.
    crc32c: Option<String>,
    pub verified: Option<bool>,
    pub verified_by: Option<&'static str>,
    commands: u64,
    retries: u64,
    errors: u64,
}

/// The account of what was loaded; times of the whole and verdicts are added later.
pub(crate) fn document(
    model: &Model,
    plan: &Plan,
    gpu: &Chosen,
    account: &Account,
    took: Duration,
    rate: Option<f64>,
    crc: Option<u32>,
) -> Document {
    let seconds = took.as_secs_f64();
    let gbps = plan.tensor_bytes as f64 / 1e9 / seconds.max(1e-9);
    let cached = account.cached_bytes >= account.direct_bytes;
    let (route, route_why) = match (cached, account.direct_bytes, &account.why_cached) {
        (true, 0, Some(why)) => ("cpu/cached", format!("by the page cache: {why}")),
        (true, 0, None) => ("cpu/cached", "the page cache had the bytes".into()),
        (true, ..) => ("cpu/cached", "the page cache had most of the bytes; the others came past it".into()),
        (false, ..) => ("cpu/pinned", "the disk had the bytes: read past the page cache".into()),
    };
    let limit_gbps = if cached { rate.map(|rate| rate / 1e9) } else { None };
    Document {
        files: plan.files.len(),
        format: model.format,
        tensors: plan.tensors.len(),
        bytes: plan.tensor_bytes,
        read_bytes: account.cached_bytes + account.direct_bytes,
        gpu_bytes: plan.gpu_bytes,
        seconds,
        gbps,
        total_seconds: 0.0,
        gpu_start_seconds: 0.0,
        route,
        route_why,
        initiator: "cpu",
        simulated: if gpu.gpu.simulated() { vec!["gpu"] } else { Vec::new() },
        placement: json!({ "sq": "kernel", "cq": "kernel", "data": "host" }),
        gpu: gpu.gpu.name().to_owned(),
        gpu_why: gpu.why.clone(),
        ways: account.clone(),
        limit: Limit {
            what: if cached { "the copy engine" } else { "the disk" },
            gbps: limit_gbps,
            reached: limit_gbps.map(|limit| gbps / limit),
        },
        why_not_better: vec![WhyNot {
            route: "cpu/direct".into(),
            reason: "the files are on a file system that Linux has mounted, so its driver has the drive"
                .into(),
            fix: "Give the drive to onehop, and name the file by -d DRIVE --path".into(),
        }],
        crc32c: crc.map(|crc| format!("{crc:08x}")),
        verified: None,
        verified_by: None,
        commands: 0,
        retries: 0,
        errors: 0,
    }
}

/// What a load would do.
pub(crate) fn show_plan(
    model: &Model,
    plan: &Plan,
    fit: Option<plan::Fit>,
    gpu: &Chosen,
    routes: &[&str],
) -> Result<Report> {
    let mut text = Text::default();
    text.row(
        "model",
        format!(
            "{} in {}, {}",
            units::count(plan.tensors.len() as u64, "tensor"),
            units::count(plan.files.len() as u64, "file"),
            model.format
        ),
    );
    text.row(
        "reads",
        format!("{} in {}", units::bytes(plan.read_bytes), units::count(plan.ranges.len() as u64, "range")),
    );
    text.row(
        "arena",
        format!("{} for {} of tensors", units::bytes(plan.gpu_bytes), units::bytes(plan.tensor_bytes)),
    );
    text.row("gpu", format!("{}: {}", gpu.gpu.name(), gpu.why));
    let route = match routes {
        [one] => (*one).to_owned(),
        several => format!("{}, by what the page cache has", several.join(" or ")),
    };
    text.row("route", &route);
    if plan.options.direct {
        let direct = plan.direct_bytes();
        let rest = plan.read_bytes - direct;
        text.row(
            "",
            format!("{} land where they belong, {} by a slot", units::bytes(direct), units::bytes(rest)),
        );
    }
    text.row(
        "fits",
        match &fit {
            Some(fit) if fit.fits => format!("yes: {} are free", units::bytes(fit.free_gpu_bytes)),
            Some(fit) => format!(
                "NO: {} are free, {} are missing",
                units::bytes(fit.free_gpu_bytes),
                units::bytes(fit.missing_bytes)
            ),
            None => "the emulated GPU takes what host memory there is".into(),
        },
    );
    let document = json!({
        "files": plan.files.len(), "format": model.format, "tensors": plan.tensors.len(), "bytes": plan.tensor_bytes,
        "gpu_bytes": plan.gpu_bytes, "read_bytes": plan.read_bytes, "ranges": plan.ranges, "arena": plan.tensors,
        "peak_gpu_bytes": fit.map_or(plan.gpu_bytes, |f| f.peak_gpu_bytes), "fits": fit.map(|f| f.fits),
        "free_gpu_bytes": fit.map(|f| f.free_gpu_bytes), "gpu": gpu.gpu.name(),
        "simulated": if gpu.gpu.simulated() { vec!["gpu"] } else { Vec::new() },
        "route": route,
    });
    Report::new(document, text)
}

/// The account in words.
pub(crate) fn tell(d: &Document) -> Text {
    let mut text = Text::default();
    let parts = [units::count(d.tensors as u64, "tensor"), units::count(d.files as u64, "file")];
    text.row("model", format!("{} in {}, {}", parts[0], parts[1], d.format));
    text.row("gpu", format!("{}: {}", d.gpu, d.gpu_why));
    text.row("route", format!("{}: {}", d.route, d.route_why));
    let ways = &d.ways;
    text.row(
        "",
        format!(
            "{} out of the page cache, {} past it, by {} through {} of pinned memory",
            units::bytes(ways.cached_bytes),
            units::bytes(ways.direct_bytes),
            units::count(ways.threads as u64, "thread"),
            units::bytes(ways.ring_bytes),
        ),
    );
    for no in &d.why_not_better {
        text.row("", format!("not {}: {}. {}", no.route, no.reason, no.fix));
    }
    let simulated = if d.simulated.is_empty() { "" } else { " (simulated: says nothing about hardware)" };
    text.row(
        "moved",
        format!(
            "{} in {}: {:.2} GB/s{simulated}",
            units::bytes(d.bytes),
            units::time(Duration::from_secs_f64(d.seconds)),
            d.gbps,
        ),
    );
    text.row(
        "limit",
        match (d.limit.gbps, d.limit.reached) {
            (Some(gbps), Some(reached)) => {
                format!("{}: {gbps:.1} GB/s, of which {:.0} % were reached", d.limit.what, reached * 100.0)
            }
            _ => format!("{} (not measured)", d.limit.what),
        },
    );
    text.row(
        "memory",
        format!("{} of GPU memory for {} of tensors", units::bytes(d.gpu_bytes), units::bytes(d.bytes)),
    );
    if let Some(crc) = &d.crc32c {
        text.row("crc32c", format!("{crc} of the tensors as they lie in GPU memory"));
    }
    let by = d.verified_by.unwrap_or_default();
    text.row(
        "verified",
        match d.verified {
            Some(true) => format!("yes: {by}"),
            Some(false) => format!("NO: {by}"),
            None => "not asked for (--verify, --manifest)".into(),
        },
    );
    text
}
