//! `onehop bench load`: load after load of the same files, each checked, beside a reference.

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
use super::local::{LoadReporting, execute, open, ring_plan};
use super::{LoadedShare, RouteChoice, Share, crc32c, descriptors, must_fit, parse_route, verdict};
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
                        each gets all of the model, which is read once. The first load's bytes are compared with the files, \
                        every later one's with the first's. Each load's memory is new, and freed before the next load, unless --keep \
                        is given; --pause 0 measures the freeing, too. bench/peers/run.py measures other loaders with the same files."
)]
pub(crate) struct Args {
    /// Files, indexes (*.index.json) or directories; together they are one model
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    gpu: GpuArg,
    /// The route: auto (the best that works), or exactly cpu/cached, cpu/pinned or cufile
    #[arg(long, value_name = "ROUTE", default_value = "auto", value_parser = parse_route)]
    route: RouteChoice,
    /// The CPU threads that read out of the page cache, and as many past it, 1 to 256 [default: one for each CPU less an
    /// eighth, 16 at most, and 16]
    #[arg(long, value_name = "N", value_parser = units::within::<u32>(1..=256))]
    threads: Option<u32>,
    /// How often they are loaded, 1 to 1000
    #[arg(long, default_value_t = 5, value_parser = units::within::<u32>(1..=1000))]
    loads: u32,
    /// The time between loads: one that begins as soon as the load before has freed its memory is slower
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = units::parse_pause)]
    pause: Duration,
    /// Load into the memory of the load before, as a program does that loads new weights in place of old ones; without it
    /// each load's memory is new
    #[arg(long)]
    keep: bool,
    /// Also write load.html, a page with a picture, and load.json into this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// One load.
#[derive(Serialize)]
struct LoadRun {
    /// From the request, with the headers read and the GPU up, until the last tensor has arrived.
    seconds: f64,
    gbps: f64,
    /// The part of them until memory, ring and route were ready.
    prepare_seconds: f64,
    route: &'static str,
    limit: Limit,
}

/// Runs the command.
pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    measure(args, context).map_err(CliError::of_files)
}

fn measure(args: &Args, context: &CommandContext) -> Result<Report> {
    let RouteChoice::Ring(route) = args.route else {
        let why = "only the kernel reads files of a mounted file system";
        return Err(CliError::not_possible("this route", why, "Use auto, cpu/pinned, cpu/cached or cufile"));
    };
    let _folders = report::folder(args.report.as_deref())?;
    let options = Options { route, threads: args.threads.map(|threads| threads as usize), slot: None };
    let model = open(&args.files, context)?;
    descriptors::must_suffice(&model)?;
    let plan = ring_plan(&model, &Selection::default())?;
    let whole = |gpu: Chosen| {
        let fit = gpu.gpu.free_memory()?.map(|free| plan.fit(free));
        Ok(Share { gpu, plan: plan.clone(), fit, rank: (0, 1) })
    };
    let mut shares = gpus::require_all(&args.gpu)?.into_iter().map(whole).collect::<Result<Vec<_>>>()?;
    must_fit(&shares)?;
    // As in a program that loads one model after another. Several GPUs share a ring that is created anew for them.
    let ring_cache = Arc::new(RingCache::default());
    let (mut rows, mut first) = (Vec::new(), None);
    let mut arenas = Vec::new();
    for turn in 0..args.loads {
        if turn > 0 {
            std::thread::sleep(args.pause);
        }
        context.stop.check()?;
        // Bytes of the load before must not pass for this one's.
        arenas.iter().try_for_each(|arena: &Region| arena.fill(0, arena.len(), turn as u8))?;
        let (row, held) = load(&model, shares, arenas, &options, &ring_cache, context)?;
        let sum = crc32c(&held);
        match first {
            None => verdict::compare(&model, &held, context)??,
            Some(first) if first != sum => {
                let why = "a load's bytes in GPU memory are not those of the first; no result is given for wrong bytes";
                return Err(CliError::Mismatch(why.into()));
            }
            Some(_) => {}
        }
        first = Some(sum);
        rows.push(row);
        (shares, arenas) = held.into_iter().map(|held| (held.share, held.arena)).unzip();
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
    let wanted = LoadReporting { sums: true, started, gpu_start: Duration::ZERO, begin: started };
    let (held, document) = execute(model, shares, prepared.into_arenas(arenas), &wanted, context)?;
    let outcome = document.outcome;
    let (seconds, gbps, route) = (outcome.seconds, outcome.gbps, outcome.route);
    Ok((LoadRun { seconds, gbps, prepare_seconds, route, limit: outcome.limit }, held))
}

/// Memory for each share: what was kept, or else new.
fn allocate_arenas(shares: &[Share], kept: Vec<Region>) -> Result<Vec<Arena>> {
    let mut kept = kept.into_iter();
    let arena = |share: &Share| match kept.next() {
        Some(there) => Arena::again(there, &share.plan),
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
    let middle = median(&mut rates);
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
        "median_gbps": middle,
        "lowest_gbps": lowest,
        "highest_gbps": highest,
        "limit": { "what": what, "gbps": limit, "reached": limit.map(|limit| middle / limit) },
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
                "{:.2} GB/s by {} in {:.4} s, of which {:.4} s to prepare",
                row.gbps, row.route, row.seconds, row.prepare_seconds
            ),
        );
    }
    if let (Some(lowest), Some(highest)) = (lowest, highest) {
        let pause = args.pause.as_millis();
        let into = if args.keep { "into the first load's memory" } else { "each into new memory" };
        text.row(
            "median",
            format!("{middle:.2} GB/s, from {lowest:.2} to {highest:.2}, {pause} ms between loads, {into}"),
        );
    }
    let reached =
        |rate: f64| format!("{what}: {rate:.2} GB/s; {:.1} % of it were reached", middle / rate * 100.0);
    text.row("reference", limit.map_or(format!("{what}; its rate was not measured"), reached));
    text.row("verified", "yes: the first load's bytes with the files, the others' with the first's");
    if let Some(folder) = &args.report {
        let loads: Vec<LoadRow> = rows.iter().map(row_of_page).collect();
        let paths: Vec<_> = args.files.iter().map(|file| file.display().to_string()).collect();
        let facts = vec![
            ("Model".to_owned(), paths.join(", ")),
            (
                "Tensors".to_owned(),
                format!("{tensors}, {} in {files}, all of it to {each}", units::bytes(model_bytes)),
            ),
            ("GPU".to_owned(), gpu),
            ("Median".to_owned(), format!("{middle:.2} GB/s")),
        ];
        let page = load_page(&Loads { machine: &machine, facts, simulated: &simulated, rows: &loads });
        report::write(folder, "load", &page, &document, &mut text)?;
    }
    Report::new(document, text)
}

fn row_of_page(row: &LoadRun) -> LoadRow {
    let LoadRun { seconds, gbps, prepare_seconds, route, limit } = row;
    LoadRow {
        gbps: *gbps,
        seconds: *seconds,
        prepare_seconds: *prepare_seconds,
        route: (*route).to_owned(),
        reference: (limit.what.to_owned(), limit.gbps),
    }
}
