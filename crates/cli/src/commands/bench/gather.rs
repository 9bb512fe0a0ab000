//! `onehop bench gather`: GPU threads gather rows of a table on a drive through a cache, compared with plain reads.

mod ids;
mod measure;

use std::path::PathBuf;

use onehop_bench::results::{IoType, Machine};
use onehop_bench::sweep::{Cell, DrivePlan, DriveTarget, Effort, Sweep};
use onehop_transfer::{BetterRoute, RouteRequest};
use serde::Serialize;

use self::ids::RowSource;
use self::measure::{GatherRow, GatherTable, TablePlan};
use super::{report, sweep};
use crate::commands::CommandContext;
use crate::drives;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::progress::TransientBar;
use crate::report::{Report, ReportText};
use crate::units;

/// Measure how fast GPU threads gather rows of a table on a drive through a cache in GPU memory
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop bench gather\n  onehop bench gather -g 0 --size 64M --batch 1536,1M --pattern zipf --zipf 1.1\n  \
                  onehop bench gather -d 0000:0b:00.0 --size 4G --row 264 --cache 512M --ids tokens.u64 --json\n\nWithout -d, the \
                  drive is a simulated one in memory, which is filled first. No other drive is written: the table is its first --size \
                  bytes. The CPU reads them into host memory, too, and every gathered row is compared with that copy."
)]
pub(crate) struct Args {
    /// The drive: 0000:0b:00.0 (a PCI address), sim:mem:64M, sim:IMAGE, qtest:SOCKET,MEMORY-FILE, vfio-user:SOCKET
    #[arg(short = 'd', long = "drive", value_name = "DRIVE", default_value = "sim:mem:16M")]
    drive: String,
    /// The drive's namespace
    #[arg(long, value_name = "N", default_value_t = 1)]
    nsid: u32,
    /// Size of the table at the start of the drive [default: 256M; sim:mem: all]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    size: Option<u64>,
    #[command(flatten)]
    gpu: GpuArg,
    /// The route: auto (the best that works), or exactly gpu/tier3, gpu/posted, gpu/tier2, gpu/tier1
    #[arg(long, value_name = "ROUTE", default_value = "auto", value_parser = parse_route)]
    route: RouteRequest,
    /// Bytes of a row, a multiple of 4 up to 1M
    #[arg(long, value_name = "SIZE", default_value = "256", value_parser = units::parse_size)]
    row: u64,
    /// Bytes from one row to the next, a multiple of 4 [default: the size of a row]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    stride: Option<u64>,
    /// Size of a cache page, which one command reads, 512 to 64K
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = units::parse_size)]
    page: u64,
    /// Size of the cache, one row of results each [default: twice the table, and an eighth of it]
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = units::parse_size)]
    cache: Vec<u64>,
    /// Rows per gather, one row of results each
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "48,1536", value_parser = units::within::<u32>(1..=1 << 24))]
    batch: Vec<u32>,
    /// Measured gathers, after one with an empty cache [default: 100; on simulated GPUs 20]
    #[arg(long, value_name = "N", value_parser = units::within::<u32>(1..=10_000_000))]
    batches: Option<u32>,
    /// How rows are chosen
    #[arg(long, value_delimiter = ',', default_value = "uniform,zipf", conflicts_with = "ids")]
    pattern: Vec<RowPattern>,
    /// Zipf: the row of rank r is r^-S as frequent as the first; above 0, up to 4
    #[arg(long, value_name = "S", default_value = "1", value_parser = parse_exponent, conflicts_with = "ids")]
    zipf: f64,
    /// A recorded stream of row numbers: 64-bit little-endian integers, or text with one per line; repeated when it
    /// ends
    #[arg(long, value_name = "FILE")]
    ids: Option<PathBuf>,
    /// Commands in flight, 1 to 1023
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = units::within::<u32>(1..=1023))]
    depth: u32,
}

/// How rows are chosen.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RowPattern {
    /// All equally often
    Uniform,
    /// By Zipf's law
    Zipf,
}

fn parse_route(text: &str) -> std::result::Result<RouteRequest, String> {
    text.parse().map_err(|error: onehop_transfer::Error| error.to_string())
}

fn parse_exponent(text: &str) -> std::result::Result<f64, String> {
    let exponent = text.parse().ok().filter(|exponent: &f64| *exponent > 0.0 && *exponent <= 4.0);
    exponent.ok_or_else(|| "expected a number above 0, up to 4, such as 1 or 0.8".into())
}

/// Default table size on drives that are not filled.
const DEFAULT_TABLE: u64 = 256 << 20;
/// Numbers of queues for plain reads; the best result is used.
const PLAIN_QUEUES: [u32; 2] = [1, 4];

/// The JSON document.
#[derive(Serialize)]
struct GatherDocument {
    machine: Machine,
    drive: String,
    gpu: String,
    simulated: Vec<&'static str>,
    route: &'static str,
    why_not_better: Vec<BetterRoute>,
    table_bytes: u64,
    table_rows: u64,
    row_bytes: u32,
    stride: u32,
    page_bytes: u32,
    depth: u32,
    /// Number of ids in the recorded stream.
    recorded_ids: Option<usize>,
    /// Pages per second read by kernels that only read.
    plain_reads_per_s: f64,
    plain_gbps: f64,
    rows: Vec<GatherRow>,
    verified: bool,
    verified_rows: u64,
    verified_by: &'static str,
}

pub(super) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    // After Ctrl-C, any error is a consequence of it.
    measure_all(args, context).map_err(|error| context.stop.check().err().unwrap_or(error))
}

fn measure_all(args: &Args, context: &CommandContext) -> Result<Report> {
    let (row, stride) = (args.row, args.stride.unwrap_or(args.row));
    if row == 0 || row > 1 << 20 || !(row | stride).is_multiple_of(4) || !(row..1 << 32).contains(&stride) {
        let why = "--row and --stride must be multiples of 4; a row has up to 1M bytes, and a stride is no less than a row";
        return Err(CliError::Usage(why.into()));
    }
    let page = u32::try_from(args.page).map_err(|_| CliError::Usage("--page: up to 64K".into()))?;
    let gpu = gpus::choose(&args.gpu)?;
    let (target, is_memory_drive) = drive(args, &gpu, context)?;
    let plan = TablePlan {
        nsid: args.nsid,
        row_bytes: row as u32,
        stride: stride as u32,
        page_bytes: page,
        depth: args.depth,
    };
    let table = GatherTable::read(&target, &gpu, plan, &args.route, &context.stop)?;
    let plain = plain_reads(args, &target, table.route, &gpu, context)?;
    let (rows, recorded_ids) = rows(args, &table, plain, context)?;
    context.stop.check()?;
    let drive_simulated = target.drive().identity().simulated.then_some("drive");
    let verified_rows = rows.iter().map(|row| u64::from(row.batch) * (u64::from(row.batches) + 1)).sum();
    let document = GatherDocument {
        machine: report::machine(),
        drive: args.drive.clone(),
        gpu: gpu.gpu.name().to_owned(),
        simulated: drive_simulated.into_iter().chain(gpu.gpu.simulated().then_some("gpu")).collect(),
        route: table.route,
        why_not_better: table.why_not_better.clone(),
        table_bytes: table.bytes(),
        table_rows: table.rows(),
        row_bytes: row as u32,
        stride: stride as u32,
        page_bytes: page,
        depth: args.depth,
        recorded_ids,
        plain_reads_per_s: plain,
        plain_gbps: plain * f64::from(page) / 1e9,
        rows,
        verified: true,
        verified_rows,
        verified_by: if is_memory_drive {
            "a read by the CPU of the bytes that this command had written"
        } else {
            "a read of the drive by the CPU"
        },
    };
    let text = text(&document, &gpu);
    Report::new(document, text)
}

/// Initializes the drive. Only a simulated drive in memory, which starts empty, is filled.
fn drive(args: &Args, gpu: &Chosen, context: &CommandContext) -> Result<(DriveTarget, bool)> {
    let is_memory_drive = sweep::is_memory_drive(&args.drive);
    let plan = DrivePlan {
        writable: is_memory_drive,
        bytes: args.size.or((!is_memory_drive).then_some(DEFAULT_TABLE)),
        threads: PLAIN_QUEUES[1],
        depth: args.depth,
        stop: context.stop.signal(),
    };
    let found = drives::find(&args.drive, &context.stop)?;
    let target = DriveTarget::open(found.backend, args.nsid, gpu.gpu.clone(), &plan)?;
    if is_memory_drive {
        target.fill()?;
    }
    Ok((target, is_memory_drive))
}

/// Random page reads per second by kernels that only read, on the route of the table.
fn plain_reads(
    args: &Args,
    target: &DriveTarget,
    route: &str,
    gpu: &Chosen,
    context: &CommandContext,
) -> Result<f64> {
    let simulated = gpu.gpu.simulated() || target.drive().identity().simulated;
    let (ops, bytes, millis) = if simulated { (256, 2 << 20, 15) } else { (16 << 10, 256 << 20, 100) };
    let effort = Effort { bytes, ops, time: std::time::Duration::from_millis(millis), repeats: 3 };
    let no_limit = |_: &str, _: IoType| None;
    let sweep = Sweep::new(target, effort, &no_limit).stopped_by(context.stop.signal());
    let (mut best, mut why_not) = (0f64, String::new());
    for threads in PLAIN_QUEUES {
        let cell = Cell { io: IoType::RandRead, block: args.page, depth: args.depth, threads };
        for row in sweep.cell(&cell, &[route], &mut |_| context.stop.check().is_ok())? {
            match row.result {
                Some(measured) => best = best.max(measured.iops),
                None => why_not = row.note.unwrap_or_default(),
            }
        }
    }
    context.stop.check()?;
    if best > 0.0 {
        return Ok(best);
    }
    Err(CliError::not_possible(format!("plain reads by {route}"), why_not, "Try another --route or --page"))
}

/// Measures all streams, caches and batch sizes. Also returns the number of recorded ids.
fn rows(
    args: &Args,
    table: &GatherTable<'_>,
    plain: f64,
    context: &CommandContext,
) -> Result<(Vec<GatherRow>, Option<usize>)> {
    let sources = match &args.ids {
        Some(path) => vec![RowSource::recorded(path, table.rows())?],
        None => {
            let source = |pattern: &RowPattern| match pattern {
                RowPattern::Uniform => RowSource::Uniform,
                RowPattern::Zipf => RowSource::Zipf(args.zipf),
            };
            args.pattern.iter().map(source).collect()
        }
    };
    let recorded_ids = sources.iter().find_map(|source| match source {
        RowSource::Recorded(ids) => Some(ids.len()),
        _ => None,
    });
    let defaults = [table.bytes() * 2, (table.bytes() / 8).max(args.page)];
    let caches = if args.cache.is_empty() { &defaults[..] } else { &args.cache };
    let batches = args.batches.unwrap_or(if table.gpu.gpu.simulated() { 20 } else { 100 });
    let gathers = u64::from(batches) + 1;
    let bar = TransientBar::of_steps(
        "gathering",
        gathers * (sources.len() * caches.len() * args.batch.len()) as u64,
    );
    let mut rows = Vec::new();
    for source in &sources {
        for cache in caches {
            for batch in &args.batch {
                let gathered = || {
                    bar.add(1);
                    context.stop.check()
                };
                let sizes = (*cache, *batch, batches);
                rows.push(table.measure(source, sizes, plain, &gathered, &context.stop)?);
            }
        }
    }
    Ok((rows, recorded_ids))
}

fn text(document: &GatherDocument, gpu: &Chosen) -> ReportText {
    let mut text = ReportText::default();
    let d = document;
    text.row(
        "table",
        format!(
            "{} rows of {} bytes every {}, in the first {} of {}",
            d.table_rows,
            d.row_bytes,
            d.stride,
            units::bytes(d.table_bytes),
            d.drive
        ),
    );
    text.row("gpu", format!("{}: {}", d.gpu, gpu.why));
    text.row("route", d.route);
    for no in &d.why_not_better {
        text.row("", format!("not {}: {}", no.route, no.why(". ")));
    }
    if !d.simulated.is_empty() {
        let parts = d.simulated.join(", ");
        text.row("simulated", format!("{parts}: these numbers say nothing about hardware"));
    }
    if let Some(count) = d.recorded_ids {
        text.row("ids", units::count(count as u64, "recorded id"));
    }
    text.row(
        "reference",
        format!(
            "the drive alone, by plain reads of pages of {}: {:.0} reads/s, {:.3} GB/s",
            units::bytes(d.page_bytes.into()),
            d.plain_reads_per_s,
            d.plain_gbps
        ),
    );
    text.line("");
    measure::table(&d.rows, &mut text);
    text.row("empty cache", "the first gather; reads: pages read, one command each");
    text.row("of drive", "reads per second, relative to the drive alone");
    text.row("a page", "commands per needed page, over all gathers");
    text.row(
        "verified",
        format!("{}, every row of every gather, by {}", units::count(d.verified_rows, "row"), d.verified_by),
    );
    text
}
