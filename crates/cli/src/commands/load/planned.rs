//! `onehop load --plan`: shows what a load would do.
//!
//! A model may have a million tensors, so the JSON document that lists them is serialized while it is written.

use onehop_load::{Model, Plan, plan};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};

use super::Share;
use super::account::{names, simulated};
use super::descriptors::Descriptors;
use crate::error::{CliError, Result};
use crate::report::{Report, ReportText};
use crate::units;

/// The report of a plan.
pub(super) fn show_plan(model: &Model, shares: Vec<Share>, route: &str) -> Result<Report> {
    let Some(Share { plan: first, .. }) = shares.first() else {
        return Err(CliError::Usage("no GPU was named".into()));
    };
    let text = report_text(model, &shares, first, route);
    let sum = |of: fn(&Plan) -> u64| shares.iter().map(|share| of(&share.plan)).sum::<u64>();
    let fit = shares.iter().map(|share| share.fit).collect::<Option<Vec<_>>>();
    let peak = shares.iter().map(|s| s.fit.map_or(s.plan.gpu_bytes, |fit| fit.peak_gpu_bytes)).sum::<u64>();
    let summary = json!({
        "files": first.files.len(), "format": model.format, "tensors": first.tensors.len(),
        "bytes": sum(|plan| plan.tensor_bytes), "gpu_bytes": sum(|plan| plan.gpu_bytes),
        "read_bytes": read_bytes(&shares),
        "peak_gpu_bytes": peak, "fits": fit.as_ref().map(|all| all.iter().all(|fit| fit.fits)),
        "free_gpu_bytes": fit.map(|all| all.iter().map(|fit| fit.free_gpu_bytes).sum::<u64>()),
        "gpu": names(shares.iter().map(|share| &share.gpu)), "simulated": simulated(shares.iter()),
        "route": route, "descriptors": Descriptors::of(model),
    });
    let gpus = shares.into_iter().map(PlannedGpu::new).collect();
    Ok(Report::streamed(Planned { summary, gpus }, text))
}

/// The JSON document. The lists of the first GPU are repeated at the top level.
struct Planned {
    summary: Value,
    gpus: Vec<PlannedGpu>,
}

impl Serialize for Planned {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        fields(&mut map, &self.summary)?;
        if let Some(first) = self.gpus.first() {
            lists(&mut map, &first.plan)?;
        }
        map.serialize_entry("gpus", &self.gpus)?;
        map.end()
    }
}

/// The plan of one GPU.
struct PlannedGpu {
    summary: Value,
    plan: Plan,
}

impl PlannedGpu {
    fn new(share: Share) -> Self {
        let Share { gpu, plan, fit, rank } = share;
        let summary = json!({
            "gpu": gpu.gpu.name(), "rank": rank.0, "ranks": rank.1, "bytes": plan.tensor_bytes,
            "gpu_bytes": plan.gpu_bytes, "read_bytes": plan.read_bytes,
            "peak_gpu_bytes": fit.map_or(plan.gpu_bytes, |f| f.peak_gpu_bytes), "fits": fit.map(|f| f.fits),
            "free_gpu_bytes": fit.map(|f| f.free_gpu_bytes),
        });
        Self { summary, plan }
    }
}

impl Serialize for PlannedGpu {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        fields(&mut map, &self.summary)?;
        lists(&mut map, &self.plan)?;
        map.end()
    }
}

fn fields<M: SerializeMap>(map: &mut M, summary: &Value) -> std::result::Result<(), M::Error> {
    summary.as_object().into_iter().flatten().try_for_each(|(name, value)| map.serialize_entry(name, value))
}

/// Serializes the ranges and tensors.
fn lists<M: SerializeMap>(map: &mut M, plan: &Plan) -> std::result::Result<(), M::Error> {
    map.serialize_entry("ranges", &plan.ranges)?;
    map.serialize_entry("arena", &plan.tensors)
}

fn report_text(model: &Model, shares: &[Share], first: &Plan, route: &str) -> ReportText {
    let sum = |of: fn(&Plan) -> u64| shares.iter().map(|share| of(&share.plan)).sum::<u64>();
    let (bytes, gpu_bytes) = (sum(|plan| plan.tensor_bytes), sum(|plan| plan.gpu_bytes));
    let read_bytes = read_bytes(shares);
    let mut text = ReportText::default();
    let parts =
        [units::count(first.tensors.len() as u64, "tensor"), units::count(first.files.len() as u64, "file")];
    text.row("model", format!("{} in {}, {}", parts[0], parts[1], model.format));
    let ranges = shares.iter().map(|share| share.plan.ranges.len() as u64).sum();
    text.row("reads", format!("{} in {}", units::bytes(read_bytes), units::count(ranges, "range")));
    text.row("arena", format!("{} for {} of tensors", units::bytes(gpu_bytes), units::bytes(bytes)));
    let why = shares.first().map_or("", |share| &share.gpu.why);
    text.row("gpu", format!("{}: {why}", names(shares.iter().map(|share| &share.gpu))));
    if let Some(descriptors) = Descriptors::of(model) {
        text.row("files", descriptors.text());
    }
    text.row("route", route);
    if first.options.direct {
        let direct = sum(Plan::direct_bytes);
        let staged = read_bytes - direct;
        text.row("", format!("{} direct, {} staged", units::bytes(direct), units::bytes(staged)));
    }
    for share in shares {
        text.row("fits", fits(share));
    }
    text
}

/// Total bytes read. Local files are read once for all GPUs, a drive once for each GPU.
fn read_bytes(shares: &[Share]) -> u64 {
    let plans: Vec<&Plan> = shares.iter().map(|share| &share.plan).collect();
    if plans.iter().any(|plan| plan.options.direct) {
        return plans.iter().map(|plan| plan.read_bytes).sum();
    }
    plan::read_bytes(&plans)
}

/// Whether the GPU has enough free memory, as text.
fn fits(share: &Share) -> String {
    match &share.fit {
        Some(fit) if fit.fits => format!("yes: {} are free", units::bytes(fit.free_gpu_bytes)),
        Some(fit) => format!(
            "NO: {} are free, {} are missing",
            units::bytes(fit.free_gpu_bytes),
            units::bytes(fit.missing_bytes)
        ),
        None => "unknown: the emulated GPU uses host memory".into(),
    }
}
