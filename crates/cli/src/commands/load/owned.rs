//! `onehop load -d DRIVE`: loads a model from a drive that onehop drives, found by its file system or by extent maps.

use std::time::Instant;

use onehop_load::check::Verdict;
use onehop_transfer::{
    Engine, Landed, Loaded, ModelOnDrive, ModelPlace, TransferOutcome, TransferSetup, block_bytes,
    plan_options,
};
use serde::Serialize;

use super::account::LoadedGpu;
use super::verdict;
use super::{Args, LoadedShare, Share, crc32c, ensure_fits, planned, read_manifest, selection, shares};
use crate::commands::CommandContext;
use crate::drives;
use crate::error::{CliError, Result};
use crate::gpus;
use crate::report::{Report, ReportText};
use crate::transfer::{self, TransferWatch};
use crate::units;

/// What limits the transfer.
#[derive(Serialize)]
struct Bottleneck {
    what: &'static str,
    gbps: Option<f64>,
    reached: Option<f64>,
}

/// The JSON document: that of every transfer, and what was loaded.
#[derive(Serialize)]
struct OwnedLoadDocument {
    #[serde(flatten)]
    outcome: TransferOutcome,
    /// What each GPU got.
    gpus: Vec<LoadedGpu>,
    files: usize,
    format: &'static str,
    tensors: usize,
    /// How the files were found.
    found_by: String,
    read_bytes: u64,
    gpu_bytes: u64,
    #[serde(flatten)]
    landed: Landed,
    limit: Bottleneck,
    /// Since the command started, including GPU start-up.
    total_seconds: f64,
    gpu_start_seconds: f64,
}

pub(super) fn run(args: &Args, spec: &str, context: &CommandContext) -> Result<Report> {
    let start = Instant::now();
    let options = args.route.options()?;
    let gpu_arg = args.gpu.clone();
    // The drive is initialized and its file system is read while CUDA starts.
    let gpus = std::thread::spawn(move || (gpus::choose_all(&gpu_arg), start.elapsed()));
    let drive =
        drives::bring_up(drives::find(spec, &context.stop)?, options.drive_options(false), &context.stop)?;
    let ns = drive.namespace(args.nsid)?;
    let opened = ModelOnDrive::open(&drive, ns, place(args))?;
    let (model, count) = (&*opened.model, args.gpu.names().len());
    let plan = |i| Ok(opened.plan(&selection(args, i, count)?, plan_options(ns))?);
    let plans = (0..count).map(plan).collect::<Result<_>>()?;
    let manifest = args.manifest.as_deref().map(read_manifest).transpose()?;
    let (gpus, gpu_start) =
        gpus.join().map_err(|_| CliError::Failed("the thread that opens GPUs panicked".into()))?;
    let shares = shares(args, gpus?, plans)?;
    if args.plan {
        // Each route is opened for one block, which shows that it works.
        let route = |share: &Share| {
            let setup = TransferSetup { drive: &drive, ns, gpu: &share.gpu, options: &options };
            Ok(Engine::open(&setup, block_bytes(ns))?.0.route.name())
        };
        let mut routes = shares.iter().map(route).collect::<Result<Vec<_>>>()?;
        routes.dedup();
        return planned::show_plan(model, shares, &routes.join(", "));
    }
    ensure_fits(&shares)?;
    let sums = context.json || args.verify || manifest.is_some();
    // GPUs are loaded one after the other: the drive, not the GPU's link, is the bottleneck.
    let (mut loaded_shares, mut all) = (Vec::new(), None::<Loaded>);
    for share in shares {
        let setup = TransferSetup { drive: &drive, ns, gpu: &share.gpu, options: &options };
        let loaded = {
            let watch = TransferWatch::new("loading", share.plan.read_bytes, &context.stop);
            opened.load(&setup, &share.plan, &watch)?
        };
        let (arena, route) = (loaded.arena.clone(), loaded.outcome.route);
        loaded_shares
            .push(LoadedShare { route: Some(route), ..LoadedShare::new(share, arena, sums, context)? });
        match &mut all {
            Some(all) => all.add(loaded),
            None => all = Some(loaded),
        }
    }
    let Some(Loaded { mut outcome, read_bytes, landed, .. }) = all else {
        return Err(CliError::Usage("no GPU was named".into()));
    };
    let verdict = Verdict {
        compared: if args.verify { Some(compare(&opened, &loaded_shares, context)?) } else { None },
        compared_by: opened.compared_by(),
        manifest: manifest.map(|manifest| verdict::compare_with_manifest(&manifest, model, &loaded_shares)),
    };
    outcome.crc32c = crc32c(&loaded_shares).map(|crc| format!("{crc:08x}"));
    (outcome.verified, outcome.verified_by) = (verdict.verified(), verdict.by());
    let document = OwnedLoadDocument {
        outcome,
        gpus: LoadedGpu::list(&loaded_shares),
        files: model.files.len(),
        format: model.format,
        tensors: loaded_shares.first().map_or(0, |loaded_shares| loaded_shares.share.plan.tensors.len()),
        found_by: opened.found_by,
        read_bytes,
        gpu_bytes: loaded_shares.iter().map(|loaded_shares| loaded_shares.share.plan.gpu_bytes).sum(),
        landed,
        limit: Bottleneck { what: "the drive", gbps: None, reached: None },
        total_seconds: start.elapsed().as_secs_f64(),
        gpu_start_seconds: gpu_start.as_secs_f64(),
    };
    let text = report_text(&document);
    Ok(Report::new(document, text)?.failed(verdict.failure()))
}

/// Where the model is, according to the arguments.
fn place(args: &Args) -> ModelPlace<'_> {
    match &args.map {
        Some(map) => ModelPlace::Map { map, paths: &[] },
        None => ModelPlace::FileSystem { paths: &args.path, partition: args.partition },
    }
}

/// Compares GPU memory with the drive, and the drive with the extent maps.
fn compare(
    opened: &ModelOnDrive,
    loaded_shares: &[LoadedShare],
    context: &CommandContext,
) -> Result<Result<()>> {
    if let Some(changed) = opened.check_maps(&context.stop)? {
        return Ok(Err(changed.into()));
    }
    verdict::compare(&opened.model, loaded_shares, context)
}

fn report_text(d: &OwnedLoadDocument) -> ReportText {
    let mut text = ReportText::default();
    let parts = [units::count(d.tensors as u64, "tensor"), units::count(d.files as u64, "file")];
    text.row("model", format!("{} in {}, {}, found by {}", parts[0], parts[1], d.format, d.found_by));
    LoadedGpu::rows(&d.gpus, &mut text);
    transfer::rows(&d.outcome, &mut text);
    let Landed { direct_bytes, staged_bytes, hole_bytes, .. } = d.landed;
    if direct_bytes > 0 {
        text.row("direct", format!("{}, no copy", units::bytes(direct_bytes)));
    }
    if staged_bytes > 0 {
        let why = if direct_bytes > 0 {
            "their addresses in GPU memory are not multiples of 4, which a drive needs"
        } else {
            "this route stages all data, or no tensor has an address that a drive can write"
        };
        text.row("staged", format!("{} through host memory and a copy: {why}", units::bytes(staged_bytes)));
    }
    if hole_bytes > 0 {
        text.row("holes", format!("{}, not read", units::bytes(hole_bytes)));
    }
    text.row(
        "memory",
        format!(
            "{} of GPU memory for {} of tensors",
            units::bytes(d.gpu_bytes),
            units::bytes(d.outcome.bytes)
        ),
    );
    text
}
