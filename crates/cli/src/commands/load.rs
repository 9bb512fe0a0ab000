//! `onehop load`: the tensors of model files into GPU memory.

mod account;
pub(crate) mod owned;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onehop_gpu::Region;
use onehop_load::engine::{Options, Prepared, RingEngine};
use onehop_load::stream::Stream;
use onehop_load::{
    Dtype, Local, LocalFile, Manifest, Model, Plan, Selection, Source, TensorInfo, check, plan,
};

use account::{Document, document, show_plan, tell};

use crate::commands::Context;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::progress::Bar;
use crate::report::Report;
use crate::transfer::{self, RouteArgs};
use crate::units;

/// Load model files (safetensors, GGUF) into GPU memory
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop load model.safetensors\n  onehop load llama-70b/ --rank 0/4 --cut \
                        '*q_proj.weight=0' --cut '*o_proj.weight=1'\n  onehop load model/ --plan --json\n  onehop load -d \
                        sim:ext4.img --path /models/llama --route gpu/posted --verify\n\nA directory is loaded by its \
                        *.index.json, or all of its *.safetensors, or its GGUF file."
)]
pub(crate) struct Args {
    /// Files, indexes (*.index.json) or directories; together they are one model
    #[arg(value_name = "FILE", required_unless_present = "drive", conflicts_with = "drive")]
    files: Vec<PathBuf>,
    /// A drive that onehop drives and that holds the model: sim:IMAGE?lba=4096, qtest:SOCKET,MEMORY-FILE
    #[arg(short = 'd', long, value_name = "DRIVE", requires = "where_on_drive")]
    drive: Option<String>,
    /// A file, index or directory in the drive's file system (ext2/3/4, FAT, exFAT), which onehop reads by itself; may be
    /// given more than once
    #[arg(long, value_name = "/IN/FS", requires = "drive", group = "where_on_drive")]
    path: Vec<PathBuf>,
    /// The model's files are where this extent map says (see onehop map); whatever file system the drive has, it is not read
    #[arg(long, value_name = "MAP", requires = "drive", group = "where_on_drive", conflicts_with = "path")]
    map: Option<PathBuf>,
    /// The partition that holds the model [default: the only one with a file system that is known]
    #[arg(long, value_name = "N", requires = "path")]
    partition: Option<u32>,
    /// The drive's namespace
    #[arg(long, value_name = "N", default_value_t = 1, requires = "drive")]
    nsid: u32,
    #[command(flatten)]
    gpu: GpuArg,
    #[command(flatten)]
    route: RouteArgs,
    /// Print what would be read and how much memory it takes, and move nothing
    #[arg(long)]
    plan: bool,
    /// Read the files once more and compare every byte in GPU memory
    #[arg(long)]
    verify: bool,
    /// Compare the tensors in GPU memory with this manifest
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Only tensors of this name (`*` and `?` stand for any text and any character); may be given more than once
    #[arg(long, value_name = "PATTERN")]
    only: Vec<String>,
    /// No tensors of this name
    #[arg(long, value_name = "PATTERN")]
    except: Vec<String>,
    /// Only tensors of this type (BF16, F32, Q4_K …)
    #[arg(long, value_name = "TYPE", value_parser = parse_dtype)]
    dtype: Vec<Dtype>,
    /// This rank's part of the tensors that are cut: rank/ranks
    #[arg(long, value_name = "R/N", value_parser = parse_rank)]
    rank: Option<(u64, u64)>,
    /// Tensors of this name are cut along this dimension: pattern=dimension
    #[arg(long, value_name = "PATTERN=DIM", value_parser = parse_cut, requires = "rank")]
    cut: Vec<(String, usize)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    Ring(onehop_load::engine::Route),
    NotHere(&'static str),
}

fn parse_route(text: &str) -> std::result::Result<Route, String> {
    use onehop_load::engine::Route as Ring;
    Ok(match text {
        "auto" => Route::Ring(Ring::Auto),
        "cpu/cached" => Route::Ring(Ring::Cached),
        "cpu/pinned" => Route::Ring(Ring::Pinned),
        "gpu/tier3" | "gpu/posted" | "gpu/tier2" | "gpu/tier1" | "cpu/direct" => Route::NotHere(
            "files of a mounted file system are the kernel's to read; this route needs a drive that onehop drives itself",
        ),
        "cufile" => Route::NotHere("this build does not call libcufile yet"),
        _ => return Err("routes are auto, cpu/pinned, cpu/cached, and those of drives".into()),
    })
}

fn parse_dtype(text: &str) -> std::result::Result<Dtype, String> {
    text.to_uppercase().parse().map_err(|e: onehop_load::UnknownDtype| e.to_string())
}

fn parse_rank(text: &str) -> std::result::Result<(u64, u64), String> {
    let numbers = text.split_once('/').and_then(|(r, n)| Some((r.parse().ok()?, n.parse().ok()?)));
    match numbers {
        Some((rank, ranks)) if rank < ranks => Ok((rank, ranks)),
        _ => Err("a rank is written as 0/4: the first of four".into()),
    }
}

fn parse_cut(text: &str) -> std::result::Result<(String, usize), String> {
    let cut = text.rsplit_once('=').and_then(|(pattern, dim)| Some((pattern.to_owned(), dim.parse().ok()?)));
    cut.ok_or_else(|| "a cut is written as PATTERN=DIMENSION: '*.q_proj.weight=0'".into())
}

/// Runs it.
pub(crate) fn run(args: &Args, context: &Context) -> Result<Report> {
    if let Some(drive) = &args.drive {
        return owned::run(args, drive, context);
    }
    let start = Instant::now();
    let ring = match parse_route(args.route.route.name()).map_err(CliError::Usage)? {
        Route::Ring(route) => route,
        Route::NotHere(why) => {
            return Err(CliError::not_possible("this route", why, "Use auto, cpu/pinned or cpu/cached"));
        }
    };
    let wanted = args.gpu.clone();
    // CUDA takes a fifth of a second to start: everything that needs no GPU is done meanwhile.
    let gpu = std::thread::spawn(move || (gpus::choose(&wanted), start.elapsed()));
    let model = Model::open(&Local, &args.files)?;
    let plan =
        Plan::new(&model, &selection(args)?, plan::Options::ring()).map_err(onehop_load::Error::from)?;
    let options = Options { route: ring, threads: args.route.reading_threads()?, slot: None };
    let prepared = if args.plan { None } else { Some(Prepared::new(&plan, &model.files, &options)?) };
    let manifest = args.manifest.as_deref().map(read_manifest).transpose()?;
    let (gpu, gpu_start) = gpu.join().map_err(|_| CliError::Failed("looking for a GPU panicked".into()))?;
    let gpu = gpu?;
    let fit = gpu.gpu.free_memory()?.map(|free| plan.fit(free));
    let Some(prepared) = prepared else {
        return show_plan(&model, &plan, fit, &gpu, &["cpu/cached", "cpu/pinned"]);
    };
    must_fit(fit)?;
    let wanted =
        Wanted { sums: context.json || args.verify || manifest.is_some(), started: start, gpu_start };
    let (plan, arena, sums, mut document) = carry_out(&model, plan, prepared, &gpu, &wanted, context)?;
    let verdict = Verdict {
        compared: if args.verify { Some(judge(&plan, &model, &arena, context)?) } else { None },
        manifest: manifest.zip(sums).map(|(manifest, sums)| against(&manifest, &model, &plan, &sums)),
    };
    (document.verified, document.verified_by) = (verdict.verified(), verdict.by());
    let text = tell(&document);
    Ok(Report::new(document, text)?.failed(verdict.failure()))
}

/// Refuses what the GPU has no room for.
fn must_fit(fit: Option<plan::Fit>) -> Result<()> {
    match fit.filter(|fit| !fit.fits) {
        None => Ok(()),
        Some(fit) => Err(CliError::Failed(format!(
            "the model needs {} of GPU memory, and {} are free: {} are missing. Load a part of it (--only, --dtype, \
             --rank), or end other programs that use the GPU",
            units::bytes(fit.peak_gpu_bytes),
            units::bytes(fit.free_gpu_bytes),
            units::bytes(fit.missing_bytes),
        ))),
    }
}

/// What was found where it was looked whether the bytes are right; none where nobody asked.
struct Verdict {
    compared: Option<Result<()>>,
    manifest: Option<Result<()>>,
}

impl Verdict {
    fn verified(&self) -> Option<bool> {
        let asked = self.compared.is_some() || self.manifest.is_some();
        let good = |result: &Option<Result<()>>| result.as_ref().is_none_or(|r| r.is_ok());
        asked.then(|| good(&self.compared) && good(&self.manifest))
    }

    fn by(&self) -> Option<&'static str> {
        match (&self.compared, &self.manifest) {
            (Some(_), _) => Some("every byte compared with the files, read once more"),
            (None, Some(_)) => Some("the manifest's check sums, of the tensors as they lie in GPU memory"),
            (None, None) => None,
        }
    }

    fn failure(self) -> Option<CliError> {
        let compared = self.compared.and_then(std::result::Result::err);
        compared.or_else(|| self.manifest.and_then(std::result::Result::err))
    }
}

fn selection(args: &Args) -> Result<Selection> {
    let mut selection = Selection::default();
    for pattern in &args.only {
        selection = selection.only(pattern);
    }
    for pattern in &args.except {
        selection = selection.except(pattern);
    }
    for dtype in &args.dtype {
        selection = selection.dtype(*dtype);
    }
    for (pattern, dim) in &args.cut {
        selection = selection.cut(pattern, *dim);
    }
    match args.rank {
        Some((rank, ranks)) => Ok(selection.rank(rank, ranks).map_err(onehop_load::Error::from)?),
        None => Ok(selection),
    }
}

fn read_manifest(path: &Path) -> Result<Manifest> {
    Ok(Manifest::read(&onehop_load::LocalFile::open(path)?)?)
}

/// What a load is to tell beside its bytes.
struct Wanted {
    sums: bool,
    started: Instant,
    gpu_start: Duration,
}

/// What was loaded: the plan, the memory, the check sums of the tensors if they were wanted, and the account.
type Loaded = (Plan, Region, Option<Vec<u32>>, Document);

fn carry_out(
    model: &Model,
    plan: Plan,
    prepared: Prepared,
    gpu: &Chosen,
    wanted: &Wanted,
    context: &Context,
) -> Result<Loaded> {
    context.stop.check()?;
    let begin = Instant::now();
    let engine = RingEngine::start(&*gpu.gpu, &plan, prepared)?;
    let bar = Bar::new("loading", plan.tensor_bytes);
    let (took, stream) = arrive(Stream::new(plan, engine), &bar, begin, context)?;
    drop(bar);
    model.still_same()?;
    let account = stream.engine().account();
    let rate = stream.engine().copy_rate(&*gpu.gpu)?;
    let (plan, arena) = stream.finish()?;
    let go_on = || context.stop.check().is_ok();
    let sums = if wanted.sums {
        Some(check::check_sums(&plan, &arena, &go_on).map_err(|e| given_up(e, context))?)
    } else {
        None
    };
    let crc = sums.as_ref().map(|sums| check::combined(&plan, sums));
    let mut document = document(model, &plan, gpu, &account, took, rate, crc);
    document.total_seconds = wanted.started.elapsed().as_secs_f64();
    document.gpu_start_seconds = wanted.gpu_start.as_secs_f64();
    Ok((plan, arena, sums, document))
}

/// A part of a file, whatever it holds, as `onehop read FILE` wants it.
pub(crate) struct Part<'a> {
    pub path: &'a Path,
    pub offset: u64,
    pub len: Option<u64>,
    pub gpu: &'a GpuArg,
    pub route: &'a str,
    pub verify: bool,
    pub out: Option<&'a Path>,
}

/// Reads a part of a file into GPU memory, as a tensor of bytes.
pub(crate) fn read(part: &Part<'_>, context: &Context) -> Result<Report> {
    let start = Instant::now();
    let Route::Ring(route) = parse_route(part.route).map_err(CliError::Usage)? else {
        let why = "the file is on a file system that Linux has mounted, so its driver has the drive";
        let fix = "Give the drive to onehop, and name the file by -d DRIVE --path";
        return Err(CliError::not_possible(format!("route {}", part.route), why, fix));
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
    let plan = Plan::new(&model, &Selection::default(), plan::Options::ring());
    let plan = plan.map_err(onehop_load::Error::from)?;
    let prepared = Prepared::new(&plan, &model.files, &Options { route, ..Options::default() })?;
    let gpu = gpus::choose(part.gpu)?;
    let wanted = Wanted { sums: true, started: start, gpu_start: start.elapsed() };
    let (plan, arena, _, mut document) = carry_out(&model, plan, prepared, &gpu, &wanted, context)?;
    let verdict = Verdict {
        compared: if part.verify { Some(judge(&plan, &model, &arena, context)?) } else { None },
        manifest: None,
    };
    (document.verified, document.verified_by) = (verdict.verified(), verdict.by());
    let mut text = tell(&document);
    if let Some(out) = part.out {
        transfer::save(&arena, bytes as usize, out, &context.stop)?;
        text.row("out", format!("{} holds the bytes from GPU memory", out.display()));
    }
    Ok(Report::new(document, text)?.failed(verdict.failure()))
}

/// Compares with the files once more. The outer error is that it could not be done, the inner that bytes differ.
fn judge(plan: &Plan, model: &Model, arena: &Region, context: &Context) -> Result<Result<()>> {
    let go_on = || context.stop.check().is_ok();
    let differs = check::compare(plan, &model.files, arena, &go_on).map_err(|e| given_up(e, context))?;
    Ok(differs.map_or(Ok(()), |d| {
        let place = format!("byte {} of the arena on, in {}", d.at, d.tensor);
        Err(CliError::Mismatch(format!("GPU memory and file differ from {place}")))
    }))
}

/// Takes tensors as they arrive, until all are there.
fn arrive(
    mut stream: Stream<RingEngine>,
    bar: &Bar,
    begin: Instant,
    context: &Context,
) -> Result<(Duration, Stream<RingEngine>)> {
    let mut shown = 0;
    while stream.next()?.is_some() {
        context.stop.check()?;
        bar.add(stream.bytes() - shown);
        shown = stream.bytes();
    }
    Ok((begin.elapsed(), stream))
}

fn given_up(error: onehop_load::Error, context: &Context) -> CliError {
    match error {
        onehop_load::Error::GivenUp => context.stop.check().err().unwrap_or_else(|| error.into()),
        _ => error.into(),
    }
}

/// Holds what lies in GPU memory against the manifest. It knows whole tensors only.
fn against(manifest: &Manifest, model: &Model, plan: &Plan, sums: &[u32]) -> Result<()> {
    for (placed, sum) in plan.tensors.iter().zip(sums) {
        let tensor = model.tensors.iter().find(|t| t.info.name == placed.name);
        if let Some(tensor) = tensor.filter(|_| placed.whole) {
            manifest.check(&tensor.info, *sum).map_err(|why| CliError::Mismatch(why.to_string()))?;
        }
    }
    Ok(())
}
