//! `onehop load FILE` and `onehop read FILE`: files of this machine, through the ring.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onehop_load::check::{BY_FILES, Verdict};
use onehop_load::engine::{Account, Options, Prepared, RingEngine, Route as Ring};
use onehop_load::outcome::WhyNot;
use onehop_load::stream::Stream;
use onehop_load::{Dtype, LocalFile, Model, Plan, Selection, Source, TensorInfo, plan};
use onehop_transfer::copy;

use super::account::{LoadDocument, document, tell};
use super::planned::show_plan;
use super::verdict;
use super::{
    Args, LoadedShare, RouteChoice, Share, descriptors, must_fit, parse_route, read_manifest, selection,
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

/// Runs the command.
pub(super) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let start = Instant::now();
    let route = match parse_route(args.route.route.name()).map_err(CliError::Usage)? {
        RouteChoice::Ring(route) => route,
        RouteChoice::NotHere(why) => {
            return Err(CliError::not_possible(
                "this route",
                why,
                "Use auto, cpu/pinned, cpu/cached or cufile",
            ));
        }
    };
    let (wanted, count) = (args.gpu.clone(), args.gpu.names().len());
    // CUDA takes a fifth of a second to start: everything that needs no GPU is done meanwhile.
    let gpus = std::thread::spawn(move || (gpus::require_all(&wanted), start.elapsed()));
    let model = open(&args.files, context)?;
    if let Some(manifest) = &args.write_manifest {
        let mut files = model.files.iter().filter_map(|file| file.local());
        files.try_for_each(|file| sources::refuse_same(manifest, file.path()))?;
    }
    let plans =
        (0..count).map(|i| ring_plan(&model, &selection(args, i, count)?)).collect::<Result<Vec<_>>>()?;
    let options = Options { route, threads: args.route.reading_threads()?, slot: None };
    let prepared = if args.plan {
        None
    } else {
        descriptors::must_suffice(&model)?;
        Some(prepare(&plans, &model, &options)?)
    };
    let manifest = args.manifest.as_deref().map(read_manifest).transpose()?;
    let (gpus, gpu_start) = gpus.join().map_err(|_| CliError::Failed("looking for a GPU panicked".into()))?;
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
    must_fit(&shares)?;
    let verify = args.verify || args.write_manifest.is_some();
    let sums = context.json || verify || manifest.is_some();
    let wanted = LoadReporting { sums, started: start, gpu_start, begin: Instant::now() };
    let (held, mut document) = execute(&model, shares, prepared, &wanted, context)?;
    let verdict = Verdict {
        compared: if verify { Some(verdict::compare(&model, &held, context)?) } else { None },
        compared_by: BY_FILES,
        manifest: manifest.map(|manifest| verdict::against(&manifest, &model, &held)),
    };
    (document.verified, document.verified_by) = (verdict.verified(), verdict.by());
    let mut text = tell(&document);
    if let (Some(path), Some(true)) = (&args.write_manifest, document.verified) {
        verdict::write_manifest(path, &model, &held)?;
        text.row(
            "manifest",
            format!("{}: {}", path.display(), units::count(model.tensors.len() as u64, "checksum")),
        );
    }
    Ok(Report::new(document, text)?.failed(verdict.failure()))
}

/// Opens the named files, which may be more than a process may have open at first.
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

/// What a load reports beside its bytes.
pub(super) struct LoadReporting {
    pub(super) sums: bool,
    pub(super) started: Instant,
    pub(super) gpu_start: Duration,
    /// From when the load's time counts.
    pub(super) begin: Instant,
}

pub(super) fn execute(
    model: &Model,
    shares: Vec<Share>,
    prepared: Prepared,
    wanted: &LoadReporting,
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
    // One after the other: arrivals for the others are recorded meanwhile, and reported when their turn comes.
    for stream in &mut streams {
        while stream.next()?.is_some() {}
    }
    let took = wanted.begin.elapsed();
    drop(bar);
    let warnings = model.still_same()?;
    warnings.iter().for_each(|warning| report::warn(warning));
    let account = streams.first().map_or_else(Account::default, |stream| stream.engine().account());
    let rate = match (&streams[..], &gpus[..]) {
        ([stream], [gpu]) => stream.engine().copy_rate(*gpu)?,
        // Nothing checks whether several copy engines share a link.
        _ => None,
    };
    let arenas = streams.into_iter().map(|stream| Ok(stream.finish()?.1)).collect::<Result<Vec<_>>>()?;
    let held = shares.into_iter().zip(arenas);
    let held = held.map(|(share, arena)| LoadedShare::new(share, arena, wanted.sums, context));
    let held = held.collect::<Result<Vec<_>>>()?;
    let mut document = document(model, &held, &account, took, rate);
    document.outcome.warnings = warnings;
    document.total_seconds = wanted.started.elapsed().as_secs_f64();
    document.gpu_start_seconds = wanted.gpu_start.as_secs_f64();
    Ok((held, document))
}

/// A part of a file of any content, for `onehop read FILE`.
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

/// Reads a part of a file into GPU memory, as a tensor of bytes.
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
    must_fit(&shares)?;
    let wanted = LoadReporting { sums: true, started: start, gpu_start, begin: Instant::now() };
    let (held, mut document) = execute(&model, shares, prepared, &wanted, context)?;
    let compared = if part.verify { Some(verdict::compare(&model, &held, context)?) } else { None };
    let verdict = Verdict { compared, compared_by: BY_FILES, manifest: None };
    (document.verified, document.verified_by) = (verdict.verified(), verdict.by());
    let mut text = tell(&document);
    if let (Some(out), [LoadedShare { arena, .. }]) = (part.out, &held[..]) {
        let watch = TransferWatch::new("copying out", bytes, &context.stop);
        copy::save(arena, bytes as usize, out, &watch)?;
        text.row("out", format!("{} holds the bytes from GPU memory", out.display()));
    }
    Ok(Report::new(document, text)?.failed(verdict.failure()))
}
