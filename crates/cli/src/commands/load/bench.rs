//! `onehop bench load`: loads the same files repeatedly, checks each load, and compares the rate with a reference.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_bench::median;
use onehop_bench::page::{LoadRow, Loads, load_page};
use onehop_gpu::Region;
use onehop_load::engine::{Arena, Options, Prepared, RingCache};
use onehop_load::outcome::Limit;
use onehop_load::{Model, Selection};
use serde::Serialize;
use serde_json::json;

use super::account::{names, simulated};
use super::local::{LoadSettings, execute, open, ring_plan};
use super::{LoadedShare, RouteChoice, Share, crc32c, descriptors, ensure_fits, parse_route, verdict};
use crate::commands::CommandContext;
use crate::commands::bench::report;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::report::{Report, ReportText};
use crate::units;

/// Measure how fast model files get into GPU memory
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop bench load model/ --loads 5 --json\n  onehop bench load model/ -g 0,1\n  onehop bench load model/ \
                        --report here\n\nWith several GPUs \
                        each gets the whole model, which is read once. The first load's bytes are compared with the files, \
                        every later one's with the first's. Each load's memory is new, and freed before the next load, unless --keep \
                        is given; --pause 0 includes the time to free it. bench/peers/run.py measures other loaders with the same files."
)]
pub(crate) struct Args {
    /// Files, indexes (*.index.json) or directories, which form one model
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    gpu: GpuArg,
    /// The route: auto (the best that works), or exactly cpu/cached, cpu/pinned or cufile
    #[arg(long, value_name = "ROUTE", default_value = "auto", value_parser = parse_route)]
    route: RouteChoice,
    /// CPU threads that read from the page cache, and as many that read past it, 1 to 256 [default: 7/8 of the CPUs, at
    /// most 16; and 16]
    #[arg(long, value_name = "N", value_parser = units::within::<u32>(1..=256))]
    threads: Option<u32>,
    /// Number of loads, 1 to 1000
    #[arg(long, default_value_t = 5, value_parser = units::within::<u32>(1..=1000))]
    loads: u32,
    /// Pause between loads: a load is slower right after the previous one has freed its memory
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = units::parse_pause)]
    pause: Duration,
    /// Reuse the memory of the previous load, like a program that replaces weights; by default each load allocates new
    /// memory
    #[arg(long)]
    keep: bool,
    /// Also write load.html, a page with a picture, and load.json into this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// One load.
#[derive(Serialize)]
struct LoadRun {
    /// From the request, with headers read and GPU initialized, until the last tensor has arrived.
    seconds: f64,
    gbps: f64,
    /// The part of it until memory, ring and route were ready.
    prepare_seconds: f64,
    route: &'static str,
    limit: Limit,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    measure(args, context).map_err(CliError::for_local_files)
}

fn measure(args: &Args, context: &CommandContext) -> Result<Report> {
    let RouteChoice::Ring(route) = args.route else {
        let why = "only the kernel reads files of a mounted file system";
        return Err(CliError::not_possible("this route", why, "Use auto, cpu/pinned, cpu/cached or cufile"));
    };
    let _folders = report::folder(args.report.as_deref())?;
    let options = Options { route, threads: args.threads.map(|threads| threads as usize), slot: None };
    let model = open(&args.files, context)?;
    descriptors::ensure_enough(&model)?;
    let plan = ring_plan(&model, &Selection::default())?;
    let whole = |gpu: Chosen| {
        let fit = gpu.gpu.free_memory()?.map(|free| plan.fit(free));
        Ok(Share { gpu, plan: plan.clone(), fit, rank: (0, 1) })
    };
    let mut shares = gpus::require_all(&args.gpu)?.into_iter().map(whole).collect::<Result<Vec<_>>>()?;
    ensure_fits(&shares)?;
    // Reused by all loads, as in a program that loads several models. For several GPUs, a new ring is created each
    // time.
    let ring_cache = Arc::new(RingCache::default());
    let (mut rows, mut first) = (Vec::new(), None);
    let mut arenas = Vec::new();
    for turn in 0..args.loads {
        if turn > 0 {
            std::thread::sleep(args.pause);
        }
        context.stop.check()?;
        // Overwrite the bytes of the previous load, which could hide a failed one.
        arenas.iter().try_for_each(|arena: &Region| arena.fill(0, arena.len(), turn as u8))?;
        let (row, loaded) = load(&model, shares, arenas, &options, &ring_cache, context)?;
        let sum = crc32c(&loaded);
        match first {
            None => verdict::compare(&model, &loaded, context)??,
            Some(first) if first != sum => {
                let why = "the bytes of a load in GPU memory differ from the first load's; no result is reported for wrong bytes";
                return Err(CliError::Mismatch(why.into()));
            }
            Some(_) => {}
        }
        first = Some(sum);
        rows.push(row);
        (shares, arenas) = loaded.into_iter().map(|loaded| (loaded.share, loaded.arena)).unzip();
        if !args.keep {
            arenas.clear();
        }
    }
    finish(args, &model, &shares, &rows)
}

fn load(
    model: &Model,
    shares: Vec<Share>,
    kept: Vec<Region>,
    options: &Options,
    ring_cache: &Arc<RingCache>,
    context: &CommandContext,
) -> Result<(LoadRun, Vec<LoadedShare>)> {
    let started = Instant::now();
    let (prepared, arenas) = std::thread::scope(|scope| {
        let arenas = scope.spawn(|| allocate_arenas(&shares, kept));
        let prepared = match &shares[..] {
            [share] => Prepared::with_ring_cache(&share.plan, &model.files, options, ring_cache.clone())?,
            _ => {
                let plans: Vec<_> = shares.iter().map(|share| &share.plan).collect();
                Prepared::for_all(&plans, &model.files, options)?
            }
        };
        let arenas =
            arenas.join().map_err(|_| CliError::Failed("allocating GPU memory panicked".into()))??;
        Ok::<_, CliError>((prepared, arenas))
    })?;
    let prepare_seconds = started.elapsed().as_secs_f64();
    let settings = LoadSettings { sums: true, started, gpu_start: Duration::ZERO, begin: started };
    let (loaded, document) = execute(model, shares, prepared.into_arenas(arenas), &settings, context)?;
    let outcome = document.outcome;
    let (seconds, gbps, route) = (outcome.seconds, outcome.gbps, outcome.route);
    Ok((LoadRun { seconds, gbps, prepare_seconds, route, limit: outcome.limit }, loaded))
}

/// Arenas for all shares: the kept ones, or new ones.
fn allocate_arenas(shares: &[Share], kept: Vec<Region>) -> Result<Vec<Arena>> {
    let mut kept = kept.into_iter();
    let arena = |share: &Share| match kept.next() {
        Some(region) => Arena::again(region, &share.plan),
        None => Arena::new(&*share.gpu.gpu, &share.plan),
    };
    Ok(shares.iter().map(arena).collect::<std::result::Result<_, _>>()?)
}

fn finish(args: &Args, model: &Model, shares: &[Share], rows: &[LoadRun]) -> Result<Report> {
    let bytes: u64 = shares.iter().map(|share| share.plan.tensor_bytes).sum();
    let (model_bytes, tensors) =
        shares.first().map_or((0, 0), |s| (s.plan.tensor_bytes, s.plan.tensors.len()));
    let gpu = names(shares.iter().map(|share| &share.gpu));
    let mut rates: Vec<f64> = rows.iter().map(|row| row.gbps).collect();
    let median = median(&mut rates);
    let limit = rows.iter().filter_map(|row| row.limit.gbps).reduce(f64::max);
    let what = rows.last().map_or("nothing", |row| row.limit.what);
    let (lowest, highest) = (rates.first().copied(), rates.last().copied());
    let first = rows.first().map(|row| row.gbps);
    let simulated = simulated(shares.iter());
    let machine = report::machine();
    let document = json!({
        "machine": machine,
        "bytes": bytes,
        "files": model.files.len(),
        "tensors": tensors,
        "gpu": gpu,
        "gpus": shares.iter().map(|share| json!({ "gpu": share.gpu.gpu.name() })).collect::<Vec<_>>(),
        "pause_ms": args.pause.as_millis() as u64,
        "memory": if args.keep { "kept" } else { "new" },
        "simulated": simulated,
        "rows": rows,
        "first_gbps": first,
        "median_gbps": median,
        "lowest_gbps": lowest,
        "highest_gbps": highest,
        "limit": { "what": what, "gbps": limit, "reached": limit.map(|limit| median / limit) },
        "verified": true,
    });
    let mut text = ReportText::default();
    let files = units::count(model.files.len() as u64, "file");
    let each = units::count(shares.len() as u64, "GPU");
    text.row("model", format!("{} in {files}, all of it to {each}", units::bytes(model_bytes)));
    text.row("gpu", format!("{gpu}: {}", shares.first().map_or("", |share| &share.gpu.why)));
    for (i, row) in rows.iter().enumerate() {
        let name = if i == 0 { "loads" } else { "" };
        text.row(
            name,
            format!(
                "{:.2} GB/s by {} in {:.4} s, including {:.4} s to prepare",
                row.gbps, row.route, row.seconds, row.prepare_seconds
            ),
        );
    }
    if let (Some(lowest), Some(highest)) = (lowest, highest) {
        let pause = args.pause.as_millis();
        let into = if args.keep { "into the first load's memory" } else { "each into new memory" };
        text.row(
            "median",
            format!("{median:.2} GB/s, from {lowest:.2} to {highest:.2}, {pause} ms between loads, {into}"),
        );
    }
    let reached = |rate: f64| format!("{what}: {rate:.2} GB/s; {:.1} % of it reached", median / rate * 100.0);
    text.row("reference", limit.map_or(format!("{what}; its rate was not measured"), reached));
    text.row("verified", "yes: the first load against the files, the others against the first");
    if let Some(folder) = &args.report {
        let loads: Vec<LoadRow> = rows.iter().map(page_row).collect();
        let paths: Vec<_> = args.files.iter().map(|file| file.display().to_string()).collect();
        let facts = vec![
            ("Model".to_owned(), paths.join(", ")),
            (
                "Tensors".to_owned(),
                format!("{tensors}, {} in {files}, all of it to {each}", units::bytes(model_bytes)),
            ),
            ("GPU".to_owned(), gpu),
            ("Median".to_owned(), format!("{median:.2} GB/s")),
        ];
        let page = load_page(&Loads { machine: &machine, facts, simulated: &simulated, rows: &loads });
        report::write(folder, "load", &page, &document, &mut text)?;
    }
    Report::new(document, text)
}

fn page_row(row: &LoadRun) -> LoadRow {
    let LoadRun { seconds, gbps, prepare_seconds, route, limit } = row;
    LoadRow {
        gbps: *gbps,
        seconds: *seconds,
        prepare_seconds: *prepare_seconds,
        route: (*route).to_owned(),
        reference: (limit.what.to_owned(), limit.gbps),
    }
}
