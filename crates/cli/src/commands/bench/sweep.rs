//! `onehop bench sweep`: measures every route between a drive or file and GPU memory, and compares it with a limit or
//! reference.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onehop_bench::page::{size, sweep_page};
use onehop_bench::results::{IoType, Measured, Results, SweepRow};
use onehop_bench::sweep::{
    Cell, DrivePlan, DriveTarget, Effort, FileTarget, Sweep, SweepTarget, impossible, unmeasured,
};

use super::limits::BenchLimits;
use super::{compare, report};
use crate::commands::CommandContext;
use crate::drives;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::noise::Noise;
use crate::progress::TransientBar;
use crate::report::{Report, ReportText};
use crate::units;

/// Measure every route between a drive or a file and GPU memory, over sizes, depths and threads, with a limit or
/// reference
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop bench sweep\n  onehop bench sweep --report here --full\n  onehop bench sweep --file \
                  model.safetensors --block 4K,1M --depth 1,32\n  onehop bench sweep -d 0000:0b:00.0 --report here\n  onehop bench \
                  sweep --create scratch.bin --size 4G --io read,write\n  onehop bench sweep --compare before/sweep.json \
                  after/sweep.json\n\nWithout -d or --file, the drive is a simulated one in memory. An existing drive or file is \
                  written to only with --io and --yes; a drive also needs --serial. Every row's bytes are compared; a row that is \
                  faster than its link fails the command."
)]
pub(crate) struct Args {
    /// The drive: 0000:0b:00.0 (a PCI address), sim:mem:64M, sim:IMAGE, qtest:SOCKET,MEMORY-FILE,
    /// vfio-user:SOCKET [default: sim:mem:16M; --full: sim:mem:256M]
    #[arg(short = 'd', long = "drive", value_name = "DRIVE", conflicts_with_all = ["file", "create"])]
    drive: Option<String>,
    /// The drive's namespace
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["file", "create"])]
    nsid: u32,
    /// A local file, on a file system that Linux has mounted
    #[arg(long, value_name = "FILE", conflicts_with = "create")]
    file: Option<PathBuf>,
    /// Create this file of --size bytes, and remove it afterwards
    #[arg(long, value_name = "FILE")]
    create: Option<PathBuf>,
    /// Bytes used at the start of the drive or file [default: all; with --create: 256M]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    size: Option<u64>,
    #[command(flatten)]
    gpu: GpuArg,
    /// Operations: read, randread, write, randwrite [default: read,randread; on sim:mem: and with --create
    /// also write; with --full randwrite too]
    #[arg(long, value_name = "IO", value_delimiter = ',', value_parser = parse_io)]
    io: Vec<IoType>,
    /// Block sizes, one row each [default: 4K,64K,512K; --full: 512 to 16M]
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = units::parse_size)]
    block: Vec<u64>,
    /// Blocks in flight for each thread, 1 to 4096 [default: 1,8; --full: 1,8,32,128]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = units::within::<u32>(1..=4096))]
    depth: Vec<u32>,
    /// Threads, or queues each owned by a warp, 1 to 64 [default: 1; --full: 1,4]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = units::within::<u32>(1..=64))]
    threads: Vec<u32>,
    /// Only these routes: gpu/tier3, gpu/posted, gpu/tier2, gpu/tier1, cpu/direct, cpu/pinned, cpu/memcpy, cpu/cached,
    /// cufile
    #[arg(long, value_name = "ROUTE", value_delimiter = ',')]
    route: Vec<String>,
    /// More sizes, depths and threads: takes minutes
    #[arg(long)]
    full: bool,
    /// Repeats per row, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = units::within::<u32>(1..=1000))]
    repeats: u32,
    /// Approximate duration of a repeat [default: 15ms; --full: 100ms]
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    time: Option<Duration>,
    /// Approximate time limit of the sweep; rows not reached are marked [default: 60s; --full: 1800s]
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    budget: Option<Duration>,
    /// Maximum bytes of a pass, all in GPU memory [default: 256M; for simulated parts 2M, with --full 64M]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    memory: Option<u64>,
    /// Rate of the link between drive and GPU, in 10^9 bytes per second, if the system does not report it; rows above
    /// it fail
    #[arg(long, value_name = "GB/S", value_parser = parse_rate)]
    link: Option<f64>,
    /// The drive's serial number, required to write to a drive
    #[arg(long, value_name = "S", requires = "drive")]
    serial: Option<String>,
    /// Yes, overwrite the first bytes of the drive or file
    #[arg(long)]
    yes: bool,
    /// Also write sweep.html, a page with pictures, and sweep.json into this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Measure nothing; compare two earlier sweep.json files
    #[arg(long, value_names = ["BEFORE", "AFTER"], num_args = 2, conflicts_with_all = ["drive", "file", "create", "full", "yes"])]
    compare: Vec<PathBuf>,
}

pub(super) fn parse_io(text: &str) -> std::result::Result<IoType, String> {
    IoType::parse(text).ok_or_else(|| "expected read, randread, write or randwrite".into())
}

fn parse_rate(text: &str) -> std::result::Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0 && *rate < 1e6);
    rate.ok_or_else(|| "expected a rate above 0, such as 63.0".into())
}

/// Routes that may be requested.
const ROUTES: [&str; 9] = [
    "gpu/tier3",
    "gpu/posted",
    "gpu/tier2",
    "gpu/tier1",
    "cpu/direct",
    "cpu/pinned",
    "cpu/memcpy",
    "cpu/cached",
    "cufile",
];
/// The default drives without and with `--full`.
const DEFAULT_DRIVES: [&str; 2] = ["sim:mem:16M", "sim:mem:256M"];
const DEFAULT_FILE_BYTES: u64 = 256 << 20;
/// Why a row was not reached.
const NOT_REACHED: &str = "not reached within the time limit (--budget)";

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    if let [before, after] = &args.compare[..] {
        return compare::side_by_side(before, after, args.report.as_deref());
    }
    for route in &args.route {
        if !ROUTES.contains(&route.as_str()) {
            return Err(CliError::Usage(format!("--route: routes are {}", ROUTES.join(", "))));
        }
    }
    if args.block.contains(&0) || args.size == Some(0) {
        return Err(CliError::Usage("--block and --size are sizes above 0, such as 4K and 1G".into()));
    }
    let gpu = gpus::choose(&args.gpu)?;
    let _folders = report::folder(args.report.as_deref())?;
    if let Some(path) = &args.create {
        let scratch = ScratchFile::create(path, args.size.unwrap_or(DEFAULT_FILE_BYTES), context)?;
        let target = FileTarget::open(&scratch.0, true, None, gpu.gpu.clone())?;
        return measure(
            args,
            &target,
            &SweepSubject { target: path.display().to_string(), drive: None },
            &gpu,
            context,
        );
    }
    if let Some(path) = &args.file {
        let writes = operations(args).iter().any(|io| io.writes());
        if writes && !args.yes {
            let what =
                format!("this would overwrite {}; add --yes to confirm, or use --create", path.display());
            return Err(CliError::Usage(what));
        }
        let target = FileTarget::open(path, writes, args.size, gpu.gpu.clone())?;
        return measure(
            args,
            &target,
            &SweepSubject { target: path.display().to_string(), drive: None },
            &gpu,
            context,
        );
    }
    let (target, name) = drive(args, &gpu, context)?;
    let subject =
        SweepSubject { target: name.to_owned(), drive: Some((name, target.drive().identity().simulated)) };
    measure(args, &target, &subject, &gpu, context)
}

/// What is measured.
struct SweepSubject<'a> {
    target: String,
    /// The drive's name, and whether it is simulated; `None` for files.
    drive: Option<(&'a str, bool)>,
}

/// A file that is removed on drop.
struct ScratchFile(PathBuf);

impl ScratchFile {
    fn create(path: &Path, bytes: u64, context: &CommandContext) -> Result<Self> {
        let failed = |e| CliError::file("creating", path, e);
        let mut file = std::fs::File::options().write(true).create_new(true).open(path).map_err(failed)?;
        let scratch = Self(path.to_owned());
        let bar = TransientBar::of_bytes("filling the file", bytes);
        let (mut done, mut noise, mut chunk) = (0, Noise(0), vec![0_u8; 1 << 20]);
        while done < bytes {
            context.stop.check()?;
            noise.fill(&mut chunk);
            let count = (bytes - done).min(chunk.len() as u64);
            std::io::Write::write_all(&mut file, &chunk[..count as usize]).map_err(failed)?;
            done += count;
            bar.add(count);
        }
        file.sync_all().map_err(failed)?;
        Ok(scratch)
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Whether this is a simulated drive in memory, whose contents may be overwritten.
pub(super) fn is_memory_drive(drive: &str) -> bool {
    drive.starts_with("sim:mem:")
}

/// The requested operations, or the default ones, which destroy no data.
fn operations(args: &Args) -> Vec<IoType> {
    if !args.io.is_empty() {
        return args.io.clone();
    }
    let may_overwrite = match (&args.file, &args.drive) {
        (Some(_), _) => false,
        (None, Some(drive)) => is_memory_drive(drive),
        (None, None) => true,
    };
    let mut operations = vec![IoType::Read, IoType::RandRead];
    if may_overwrite {
        operations.push(IoType::Write);
        operations.extend(args.full.then_some(IoType::RandWrite));
    }
    operations
}

/// Initializes the drive. One that keeps its data is written only with its serial number and --yes.
fn drive<'a>(args: &'a Args, gpu: &Chosen, context: &CommandContext) -> Result<(DriveTarget, &'a str)> {
    let name = args.drive.as_deref().unwrap_or(DEFAULT_DRIVES[usize::from(args.full)]);
    let writes = operations(args).iter().any(|io| io.writes());
    let needs_consent = writes && !is_memory_drive(name);
    if needs_consent && (!args.yes || args.serial.is_none()) {
        let what = format!(
            "writing overwrites the first bytes of {name}: to confirm, add --yes and --serial with the serial number that `onehop \
             drive identify` shows"
        );
        return Err(CliError::Usage(what));
    }
    let max = |list: Vec<u32>| list.into_iter().max().unwrap_or(1);
    let plan = DrivePlan {
        writable: writes || is_memory_drive(name),
        bytes: args.size,
        threads: max(threads(args)),
        depth: max(depths(args)),
        stop: context.stop.signal(),
    };
    let target =
        DriveTarget::open(drives::find(name, &context.stop)?.backend, args.nsid, gpu.gpu.clone(), &plan)?;
    if needs_consent {
        drives::allow_writes(target.drive(), name, args.serial.as_deref().unwrap_or_default())?;
    }
    if is_memory_drive(name) {
        target.fill()?;
    }
    Ok((target, name))
}

fn or_default<T: Copy>(given: &[T], full: bool, short: &[T], long: &[T]) -> Vec<T> {
    let default = if full { long } else { short };
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

fn depths(args: &Args) -> Vec<u32> {
    or_default(&args.depth, args.full, &[1, 8], &[1, 8, 32, 128])
}

fn threads(args: &Args) -> Vec<u32> {
    or_default(&args.threads, args.full, &[1], &[1, 4])
}

/// All requested combinations of operation, block size, threads and depth.
fn cells(args: &Args, unit: u64) -> Vec<Cell> {
    let long = [512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
    let mut blocks = or_default(&args.block, args.full, &[4 << 10, 64 << 10, 512 << 10], &long);
    if args.block.is_empty() {
        blocks.retain(|block| block.is_multiple_of(unit));
    }
    let mut cells = Vec::new();
    for io in operations(args) {
        for block in &blocks {
            for threads in threads(args) {
                cells.extend(depths(args).into_iter().map(|depth| Cell {
                    io,
                    block: *block,
                    depth,
                    threads,
                }));
            }
        }
    }
    cells
}

fn measure(
    args: &Args,
    target: &dyn SweepTarget,
    subject: &SweepSubject<'_>,
    gpu: &Chosen,
    context: &CommandContext,
) -> Result<Report> {
    let wanted = |route: &&str| args.route.is_empty() || args.route.iter().any(|name| name == route);
    let routes: Vec<&str> = target.routes().iter().copied().filter(wanted).collect();
    let unit = target.unit();
    if let Some(block) = args.block.iter().find(|block| !block.is_multiple_of(unit)) {
        return Err(CliError::Usage(format!(
            "--block {block}: blocks of {} are multiples of {unit} bytes",
            subject.target
        )));
    }
    let limits = BenchLimits::find(subject.drive, gpu, args.link)?;
    let limit = |route: &str, io: IoType| limits.of(route, io);
    let (real, start) = (!gpu.gpu.simulated(), Instant::now());
    let budget = args.budget.unwrap_or(Duration::from_secs(if args.full { 1800 } else { 60 }));
    let time = args.time.unwrap_or(Duration::from_millis(if args.full { 100 } else { 15 }));
    let simulated = !real || subject.drive.is_some_and(|(_, simulated)| simulated);
    let (ops, bytes) = match (simulated, args.full) {
        (false, _) => (16 << 10, 256 << 20),
        (true, true) => (1 << 10, 64 << 20),
        (true, false) => (256, 2 << 20),
    };
    let effort = Effort { bytes: args.memory.unwrap_or(bytes), ops, time, repeats: args.repeats };
    let sweep = Sweep::new(target, effort, &limit).stopped_by(context.stop.signal());
    let cells = cells(args, unit);
    let bar = TransientBar::of_steps("measuring", (cells.len() * routes.len()) as u64);
    let mut results = results(subject, gpu);
    for cell in &cells {
        context.stop.check()?;
        let mut each = |_: &SweepRow| {
            bar.add(1);
            context.stop.check().is_ok() && start.elapsed() < budget
        };
        let before = results.rows.len();
        if start.elapsed() < budget {
            results.rows.extend(sweep.cell(cell, &routes, &mut each)?);
        }
        // Rows that were not reached get the reason.
        let done = results.rows.len() - before;
        results.rows.extend(routes.iter().skip(done).map(|route| unmeasured(route, cell, NOT_REACHED)));
    }
    context.stop.check()?;
    results.rows = without_duplicates(results.rows);
    results.limits = limits.all();
    drop(bar);
    let mut text = text(&results, gpu);
    if let Some(folder) = &args.report {
        report::write(folder, "sweep", &sweep_page(&results), &results, &mut text)?;
    }
    let failure = too_fast(&results.rows).or_else(|| no_results(&results.rows));
    Ok(Report::new(&results, text)?.failed(failure))
}

/// Removes duplicate rows: some routes turn depth into threads, so two cells may be the same.
fn without_duplicates(rows: Vec<SweepRow>) -> Vec<SweepRow> {
    let mut seen = std::collections::HashSet::new();
    let key =
        |row: &SweepRow| (row.route.clone(), row.io, row.block, row.depth, row.threads, row.result.is_some());
    rows.into_iter().filter(|row| seen.insert(key(row))).collect()
}

fn results(subject: &SweepSubject<'_>, gpu: &Chosen) -> Results {
    let drive = subject.drive.is_some_and(|(_, simulated)| simulated).then(|| "drive".to_owned());
    let simulated = drive.into_iter().chain(gpu.gpu.simulated().then(|| "gpu".to_owned())).collect();
    Results::new(report::machine(), subject.target.clone(), gpu.gpu.name().to_owned(), simulated)
}

/// An error if no row has a result.
pub(super) fn no_results(rows: &[SweepRow]) -> Option<CliError> {
    if rows.iter().any(|row| row.result.is_some()) {
        return None;
    }
    let why = rows.iter().find_map(|row| row.note.clone()).unwrap_or_else(|| "there are no rows".into());
    Some(CliError::not_possible(
        "measuring any row of this sweep",
        why,
        "Choose other routes, sizes or depths",
    ))
}

pub(super) fn too_fast(rows: &[SweepRow]) -> Option<CliError> {
    let wrong = impossible(rows);
    let first = wrong.first()?;
    let (measured, limit) = (first.result.as_ref()?, first.result.as_ref()?.limit.as_ref()?);
    Some(CliError::Mismatch(format!(
        "{} faster than possible; the first is {} {} of {}: {:.2} GB/s, but {} is limited to {:.2} GB/s. Either bytes \
        were counted that were not moved, or the limit is wrong",
        units::count(wrong.len() as u64, "row"),
        first.route,
        first.io.name(),
        size(first.block),
        measured.range().1,
        limit.what,
        limit.gbps
    )))
}

fn text(results: &Results, gpu: &Chosen) -> ReportText {
    let mut text = ReportText::default();
    text.row("measured", &results.target);
    text.row("gpu", format!("{}: {}", results.gpu, gpu.why));
    if !results.simulated.is_empty() {
        text.row(
            "simulated",
            format!("{}: these numbers say nothing about hardware", results.simulated.join(", ")),
        );
    }
    rows(results, &mut text);
    text
}

/// Adds the limits, and a line for each row.
pub(super) fn rows(results: &Results, text: &mut ReportText) {
    for limit in &results.limits {
        text.row(limit.kind(), format!("{:.2} GB/s: {}", limit.gbps, limit.what));
    }
    text.line("");
    text.line(format!(
        "{:<10} {:<9} {:>6} {:>5} {:>7} {:>8} {:>7} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}  {:>7}",
        "route",
        "IoType",
        "IOSize",
        "depth",
        "Threads",
        "GB/s",
        "±",
        "IOPS",
        "mean us",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "samples",
        "ns/KiB",
        "reached"
    ));
    for row in &results.rows {
        if let Some(measured) = &row.result {
            text.line(line(row, measured));
        }
    }
    if results.rows.iter().any(|row| row.result.as_ref().is_some_and(|m| m.latency_apart)) {
        text.row("*", "percentiles of an additional repeat, by kernels that read the clock");
    }
    let mut seen_reasons = std::collections::HashSet::new();
    for row in results.rows.iter().filter(|row| row.result.is_none()) {
        let why = row.note.as_deref().unwrap_or_default();
        if seen_reasons.insert((&row.route, why)) {
            text.row("not", format!("{}: {why}", row.route));
        }
    }
    let measured = results.rows.iter().filter(|row| row.result.is_some()).count();
    text.row(
        "verified",
        format!("{}: every byte of the last pass of every repeat", units::count(measured as u64, "row")),
    );
}

fn line(row: &SweepRow, m: &Measured) -> String {
    let or_none = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"));
    let share = m.of_limit.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", share * 100.0));
    format!(
        "{:<10} {:<9} {:>6} {:>5} {:>7} {:>8.3} {:>7.3} {:>10.0} {:>9.1} {:>9} {:>9} {:>9} {:>9} {:>8.0}  {:>7}",
        row.route,
        row.io.name(),
        size(row.block),
        row.depth,
        row.threads,
        m.gbps,
        m.spread(),
        m.iops,
        m.avg_latency_us,
        or_none(m.p50_us),
        or_none(m.p99_us),
        or_none(m.p999_us),
        format!("{}{}", m.latency_samples, if m.latency_apart { "*" } else { "" }),
        m.cpu_ns_per_byte * 1024.0,
        share
    )
}
