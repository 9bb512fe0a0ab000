//! `onehop load FILE` and `onehop read FILE`: loads local files through the ring of pinned memory.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onehop_load::check::{BY_FILES, Verdict};
use onehop_load::engine::{Account, Options, Prepared, RingEngine, Route as Ring};
use onehop_load::outcome::WhyNot;
use onehop_load::stream::Stream;
use onehop_load::{Dtype, LocalFile, Model, Plan, Selection, Source, TensorInfo, plan};
use onehop_transfer::copy;

use super::account::{LoadDocument, document, report_text};
use super::planned::show_plan;
use super::verdict;
use super::{
    Args, LoadedShare, RouteChoice, Share, descriptors, ensure_fits, parse_route, read_manifest, selection,
    shares,
};
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::progress::TransientBar;
use crate::report::{self, Report};
use crate::sources;
use crate::transfer::TransferWatch;
use crate::units;

pub(super) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let start = Instant::now();
    let route = match parse_route(args.route.route.name()).map_err(CliError::Usage)? {
        RouteChoice::Ring(route) => route,
        RouteChoice::NeedsDrive(why) => {
            return Err(CliError::not_possible(
                "this route",
                why,
                "Use auto, cpu/pinned, cpu/cached or cufile",
            ));
        }
    };
    let (gpu_arg, count) = (args.gpu.clone(), args.gpu.names().len());
    // CUDA takes a fifth of a second to start. Work that needs no GPU is done meanwhile.
    let gpus = std::thread::spawn(move || (gpus::require_all(&gpu_arg), start.elapsed()));
    let model = open(&args.files, context)?;
    if let Some(manifest) = &args.write_manifest {
        let mut files = model.files.iter().filter_map(|file| file.local());
        files.try_for_each(|file| sources::refuse_overwrite(manifest, file.path()))?;
    }
    let plans =
        (0..count).map(|i| ring_plan(&model, &selection(args, i, count)?)).collect::<Result<Vec<_>>>()?;
    let options = Options { route, threads: args.route.reading_threads()?, slot: None };
    let prepared = if args.plan {
        None
    } else {
        descriptors::ensure_enough(&model)?;
        Some(prepare(&plans, &model, &options)?)
    };
    let manifest = args.manifest.as_deref().map(read_manifest).transpose()?;
    let (gpus, gpu_start) =
        gpus.join().map_err(|_| CliError::Failed("the thread that opens GPUs panicked".into()))?;
    let shares = shares(args, gpus?, plans)?;
    let Some(prepared) = prepared else {
        let remote = model.files.iter().any(|file| file.fetch().is_some());
        let local = match route {
            Ring::Auto => "cpu/cached or cpu/pinned, by what the page cache has",
            Ring::Cached => "cpu/cached",
            Ring::Pinned => "cpu/pinned",
            Ring::CuFile => "cufile",
        };
        return show_plan(&model, shares, if remote { "cpu/remote" } else { local });
    };
    ensure_fits(&shares)?;
    let verify = args.verify || args.write_manifest.is_some();
    let sums = context.json || verify || manifest.is_some();
    let settings = LoadSettings { sums, started: start, gpu_start, begin: Instant::now() };
    let (loaded, mut document) = execute(&model, shares, prepared, &settings, context)?;
    let verdict = Verdict {
        compared: if verify { Some(verdict::compare(&model, &loaded, context)?) } else { None },
        compared_by: BY_FILES,
        manifest: manifest.map(|manifest| verdict::compare_with_manifest(&manifest, &model, &loaded)),
    };
    (document.verified, document.verified_by) = (verdict.verified(), verdict.by());
    let mut text = report_text(&document);
    if let (Some(path), Some(true)) = (&args.write_manifest, document.verified) {
        verdict::write_manifest(path, &model, &loaded)?;
        text.row(
            "manifest",
            format!("{}: {}", path.display(), units::count(model.tensors.len() as u64, "checksum")),
        );
    }
    Ok(Report::new(document, text)?.failed(verdict.failure()))
}

/// Opens the named files. There may be more of them than the soft limit of open files.
pub(super) fn open(files: &[PathBuf], context: &CommandContext) -> Result<Model> {
    onehop_os::raise_descriptor_limit(u64::MAX);
    let opened = Model::open(&*sources::store(files, &context.stop)?, files);
    opened.map_err(|error| match error.is_out_of_descriptors() {
        true => descriptors::too_few("the model's files", &error.to_string()),
        false => error.into(),
    })
}

pub(super) fn ring_plan(model: &Model, selection: &Selection) -> Result<Plan> {
    Ok(Plan::new(model, selection, plan::PlanOptions::ring()).map_err(onehop_load::Error::from)?)
}

pub(super) fn prepare(plans: &[Plan], model: &Model, options: &Options) -> Result<Prepared> {
    let plans: Vec<_> = plans.iter().collect();
    Ok(Prepared::for_all(&plans, &model.files, options)?)
}

/// What a load computes and reports.
pub(super) struct LoadSettings {
    /// Whether to compute checksums.
    pub(super) sums: bool,
    /// When the command started.
    pub(super) started: Instant,
    pub(super) gpu_start: Duration,
    /// When the timed part starts.
    pub(super) begin: Instant,
}

pub(super) fn execute(
    model: &Model,
    shares: Vec<Share>,
    prepared: Prepared,
    settings: &LoadSettings,
    context: &CommandContext,
) -> Result<(Vec<LoadedShare>, LoadDocument)> {
    context.stop.check()?;
    let gpus: Vec<_> = shares.iter().map(|share| &*share.gpu.gpu).collect();
    let plans: Vec<_> = shares.iter().map(|share| &share.plan).collect();
    let to_read = prepared.read_bytes();
    let engines = RingEngine::start_all(&gpus, &plans, prepared)?;
    let bar = TransientBar::of_bytes("loading", to_read);
    let watched = |mut engine: RingEngine| {
        let (show, stop) = (bar.setter(), context.stop.clone());
        engine.watch(move |read| {
            show(read);
            !stop.is_set()
        });
        engine
    };
    let engines = engines.into_iter().map(watched).zip(&plans);
    let mut streams: Vec<_> = engines.map(|(engine, plan)| Stream::new((*plan).clone(), engine)).collect();
    // The streams are drained one after the other. Arrivals of the others are queued meanwhile.
    for stream in &mut streams {
        while stream.next()?.is_some() {}
    }
    let took = settings.begin.elapsed();
    drop(bar);
    let warnings = model.still_same()?;
    warnings.iter().for_each(|warning| report::warn(warning));
    let account = streams.first().map_or_else(Account::default, |stream| stream.engine().account());
    let rate = match (&streams[..], &gpus[..]) {
        ([stream], [gpu]) => stream.engine().copy_rate(*gpu)?,
        // It is unknown whether several copy engines share a link.
        _ => None,
    };
    let arenas = streams.into_iter().map(|stream| Ok(stream.finish()?.1)).collect::<Result<Vec<_>>>()?;
    let loaded = shares.into_iter().zip(arenas);
    let loaded = loaded.map(|(share, arena)| LoadedShare::new(share, arena, settings.sums, context));
    let loaded = loaded.collect::<Result<Vec<_>>>()?;
    let mut document = document(model, &loaded, &account, took, rate);
    document.outcome.warnings = warnings;
    document.total_seconds = settings.started.elapsed().as_secs_f64();
    document.gpu_start_seconds = settings.gpu_start.as_secs_f64();
    Ok((loaded, document))
}

/// A byte range of a local file, for `onehop read FILE`.
pub(crate) struct FilePart<'a> {
    pub path: &'a Path,
    pub offset: u64,
    pub len: Option<u64>,
    pub gpu: &'a GpuArg,
    pub route: &'a str,
    pub threads: Option<usize>,
    pub verify: bool,
    pub out: Option<&'a Path>,
}

/// Reads a range of a local file into GPU memory, as a tensor of bytes.
pub(crate) fn read(part: &FilePart<'_>, context: &CommandContext) -> Result<Report> {
    let start = Instant::now();
    let RouteChoice::Ring(route) = parse_route(part.route).map_err(CliError::Usage)? else {
        let WhyNot { reason, fix, .. } = WhyNot::MOUNTED;
        return Err(CliError::not_possible(format!("route {}", part.route), reason, fix));
    };
    let file = LocalFile::open(part.path)?;
    let size = file.bytes();
    if part.offset > size {
        return Err(CliError::Usage(format!("--offset {}: the file has {size} bytes", part.offset)));
    }
    let bytes = (size - part.offset).min(part.len.unwrap_or(u64::MAX));
    let info = TensorInfo {
        name: part.path.display().to_string(),
        dtype: Dtype::U8,
        shape: vec![bytes],
        offset: part.offset,
        bytes,
    };
    let tensors = vec![onehop_load::model::Tensor { info, file: 0 }];
    let model = Model { files: vec![Box::new(file)], metadata: Vec::new(), tensors, format: "bytes" };
    let plan = ring_plan(&model, &Selection::default())?;
    let options = Options { route, threads: part.threads, slot: None };
    let prepared = Prepared::new(&plan, &model.files, &options)?;
    let gpu = gpus::require(part.gpu)?;
    let gpu_start = start.elapsed();
    let fit = plan.fit_on(&*gpu.gpu)?;
    let shares = vec![Share { gpu, plan, fit, rank: (0, 1) }];
    ensure_fits(&shares)?;
    let settings = LoadSettings { sums: true, started: start, gpu_start, begin: Instant::now() };
    let (loaded, mut document) = execute(&model, shares, prepared, &settings, context)?;
    let compared = if part.verify { Some(verdict::compare(&model, &loaded, context)?) } else { None };
    let verdict = Verdict { compared, compared_by: BY_FILES, manifest: None };
    (document.verified, document.verified_by) = (verdict.verified(), verdict.by());
    let mut text = report_text(&document);
    if let (Some(out), [LoadedShare { arena, .. }]) = (part.out, &loaded[..]) {
        let watch = TransferWatch::new("copying out", bytes, &context.stop);
        copy::save(arena, bytes as usize, out, &watch)?;
        text.row("out", format!("{} contains the bytes from GPU memory", out.display()));
    }
    Ok(Report::new(document, text)?.failed(verdict.failure()))
}
