//! Measures gathers from a table on a drive.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onehop_array::{Array, ArrayOptions, ArrayRows, ArrayStats, MovedRows};
use onehop_bench::Quantiles;
use onehop_bench::sweep::{DriveTarget, SweepTarget};
use onehop_drive::Placement;
use onehop_gpu::{Place, Region};
use onehop_transfer::{BetterRoute, RouteRequest, RoutedArray, open_array};
use serde::Serialize;

use super::ids::RowSource;
use crate::error::{CliError, Result};
use crate::gpus::Chosen;
use crate::progress::TransientBar;
use crate::report::ReportText;
use crate::stop::StopFlag;
use crate::units;

/// Bytes of the table read at a time.
const READ_BYTES: usize = 1 << 20;
/// Interval between checks for Ctrl-C.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Layout of a table, and how it is read.
#[derive(Clone, Copy)]
pub(super) struct TablePlan {
    pub nsid: u32,
    pub row_bytes: u32,
    pub stride: u32,
    pub page_bytes: u32,
    pub depth: u32,
}

/// A table on a drive.
pub(super) struct GatherTable<'a> {
    target: &'a DriveTarget,
    pub gpu: &'a Chosen,
    plan: TablePlan,
    placement: Placement,
    pub route: &'static str,
    pub why_not_better: Vec<BetterRoute>,
    /// Its contents, as read by the CPU.
    bytes: Vec<u8>,
}

/// A row of results: one stream, cache and batch size.
#[derive(Serialize)]
pub(super) struct GatherRow {
    /// `uniform`, `zipf` or `recorded`.
    ids: &'static str,
    cache_bytes: u64,
    pub batch: u32,
    /// Gathers after the first.
    pub batches: u32,
    /// Of the first gather, with an empty cache.
    cold_rows_per_s: f64,
    cold_reads_per_s: f64,
    /// Relative to plain reads.
    cold_of_drive: f64,
    cold_commands_per_page: f64,
    /// Of the other gathers, by the caller's clock.
    rows_per_s: f64,
    /// By the GPU's clock.
    kernel_rows_per_s: f64,
    /// Fraction of page lookups that hit.
    hit_rate: f64,
    reads_per_s: f64,
    of_drive: f64,
    /// Over all gathers; more than 1 if pages were evicted and read again.
    commands_per_page: f64,
    /// Time of a gather, by the caller's clock.
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    p999_us: Option<f64>,
    latency_samples: u64,
    /// By the GPU's clock.
    kernel_p50_us: Option<f64>,
}

/// Sums over several gathers.
#[derive(Default)]
struct Sums {
    rows: u64,
    took: Duration,
    kernel: Duration,
    reads: u64,
    wanted: u64,
    hits: u64,
}

impl Sums {
    fn add(&mut self, rows: usize, took: Duration, kernel: Duration, stats: [ArrayStats; 2]) {
        let [before, after] = stats;
        self.rows += rows as u64;
        self.took += took;
        self.kernel += kernel;
        self.reads += u64::from(after.reads.wrapping_sub(before.reads));
        self.wanted += u64::from(after.wanted.wrapping_sub(before.wanted));
        self.hits += u64::from(after.hits.wrapping_sub(before.hits));
    }
}

fn per_second(count: u64, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64().max(1e-9)
}

impl<'a> GatherTable<'a> {
    /// Chooses the route, and reads the whole table by the CPU.
    pub(super) fn read(
        target: &'a DriveTarget,
        gpu: &'a Chosen,
        plan: TablePlan,
        route: &RouteRequest,
        stop: &StopFlag,
    ) -> Result<Self> {
        let drive = target.drive();
        let whole = (drive, drive.namespace(plan.nsid)?, blocks(target));
        let one_page = options(plan, Placement::TIER1, plan.page_bytes.into());
        let RoutedArray { placement, route: name, why_not_better, .. } =
            open_array(whole, &gpu.gpu, route, &one_page)?;
        let unit = target.unit();
        let size = usize::try_from(target.bytes() / unit * unit).unwrap_or(usize::MAX);
        if size < plan.row_bytes as usize {
            return Err(CliError::Usage(format!("--row: the table has {size} bytes")));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).map_err(|_| {
            CliError::not_possible(
                format!("holding a table of {} in host memory", units::bytes(size as u64)),
                "not enough memory is free",
                "Use less of the drive: --size",
            )
        })?;
        bytes.resize(size, 0);
        let bar = TransientBar::of_bytes("reading the table", size as u64);
        let step = READ_BYTES.next_multiple_of(unit as usize);
        for (chunk, at) in bytes.chunks_mut(step).zip((0..).step_by(step)) {
            stop.check()?;
            target.read(at, chunk)?;
            bar.add(chunk.len() as u64);
        }
        Ok(Self { target, gpu, plan, placement, route: name, why_not_better, bytes })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(super) fn rows(&self) -> u64 {
        self.array_rows().count
    }

    fn array_rows(&self) -> ArrayRows {
        let (bytes, stride) = (self.plan.row_bytes, self.plan.stride);
        ArrayRows { count: (self.bytes() - u64::from(bytes)) / u64::from(stride) + 1, bytes, stride }
    }

    /// Measures one gather with an empty cache, and `batches` more. `gathered` is called after each.
    pub(super) fn measure(
        &self,
        source: &RowSource,
        (cache, batch, batches): (u64, u32, u32),
        plain: f64,
        gathered: &dyn Fn() -> Result<()>,
        stop: &StopFlag,
    ) -> Result<GatherRow> {
        let array = open(self.target, self.gpu, self.plan, self.placement, cache)?;
        let out = self.gpu.gpu.alloc(Place::Vram, batch as usize * self.plan.row_bytes as usize)?;
        let mut stream = source.stream(self.rows());
        let (mut cold, mut warm) = (Sums::default(), Sums::default());
        let (mut calls, mut kernels) = (Quantiles::default(), Quantiles::default());
        let mut pages = vec![false; self.bytes.len().div_ceil(self.plan.page_bytes as usize)];
        let mut cold_pages = 0;
        for number in 0..=batches {
            let ids = stream.take(batch as usize, self.rows());
            self.mark(&ids, &mut pages);
            self.poison(&out, &ids)?;
            let before = array.stats()?;
            let start = Instant::now();
            let moved = stopped_by(&array, stop, || array.gather(self.array_rows(), &ids, &out))?;
            let took = start.elapsed();
            refuse_failed(&array, &moved, &ids)?;
            let stats = [before, array.stats()?];
            self.compare(&out, &ids)?;
            if number == 0 {
                cold.add(ids.len(), took, moved.took, stats);
                cold_pages = count(&pages);
            } else {
                warm.add(ids.len(), took, moved.took, stats);
                calls.add(took.as_nanos() as u64);
                kernels.add(moved.took.as_nanos() as u64);
            }
            gathered()?;
        }
        array.close()?;
        let us = |nanos: f64| nanos / 1e3;
        let (cold_reads, reads) = (per_second(cold.reads, cold.kernel), per_second(warm.reads, warm.kernel));
        Ok(GatherRow {
            ids: source.name(),
            cache_bytes: cache,
            batch,
            batches,
            cold_rows_per_s: per_second(cold.rows, cold.took),
            cold_reads_per_s: cold_reads,
            cold_of_drive: cold_reads / plain,
            cold_commands_per_page: cold.reads as f64 / cold_pages as f64,
            rows_per_s: per_second(warm.rows, warm.took),
            kernel_rows_per_s: per_second(warm.rows, warm.kernel),
            hit_rate: warm.hits as f64 / warm.wanted.max(1) as f64,
            reads_per_s: reads,
            of_drive: reads / plain,
            commands_per_page: (cold.reads + warm.reads) as f64 / count(&pages) as f64,
            p50_us: calls.median().map(us),
            p99_us: calls.per_mille(990).map(us),
            p999_us: calls.per_mille(999).map(us),
            latency_samples: calls.count(),
            kernel_p50_us: kernels.median().map(us),
        })
    }

    /// Marks the pages of these rows.
    fn mark(&self, ids: &[u64], pages: &mut [bool]) {
        let page = u64::from(self.plan.page_bytes);
        for id in ids {
            let first = id * u64::from(self.plan.stride);
            let all = first / page..(first + u64::from(self.plan.row_bytes) - 1) / page + 1;
            all.for_each(|page| pages[page as usize] = true);
        }
    }

    /// The contents of a row.
    fn row(&self, id: u64) -> Option<&[u8]> {
        let at = (id * u64::from(self.plan.stride)) as usize;
        self.bytes.get(at..at + self.plan.row_bytes as usize)
    }

    /// Fills the output with wrong bytes, so that a row that is not copied is detected.
    fn poison(&self, out: &Region, ids: &[u64]) -> Result<()> {
        let wrong: Vec<u8> = ids.iter().filter_map(|id| self.row(*id)).flatten().map(|byte| !byte).collect();
        Ok(out.write(0, &wrong)?)
    }

    fn compare(&self, out: &Region, ids: &[u64]) -> Result<()> {
        let row = self.plan.row_bytes as usize;
        let mut got = vec![0; ids.len() * row];
        out.read(0, &mut got)?;
        for (id, got) in ids.iter().zip(got.chunks(row)) {
            if self.row(*id) != Some(got) {
                let why = format!("row {id} differs from the drive; no result is reported for wrong bytes");
                return Err(CliError::Mismatch(why));
            }
        }
        Ok(())
    }
}

fn count(pages: &[bool]) -> usize {
    pages.iter().filter(|is_needed| **is_needed).count()
}

fn refuse_failed(array: &Array, moved: &MovedRows, ids: &[u64]) -> Result<()> {
    let Some((place, error)) = moved.failed.first() else { return Ok(()) };
    // If the array has stopped, this returns the reason.
    array.check()?;
    let row = ids.get(*place).copied().unwrap_or_default();
    let failed = moved.failed.len();
    Err(CliError::Failed(format!("{failed} of {} rows failed; the first is row {row}: {error}", ids.len())))
}

/// Calls `f`, and stops the array after Ctrl-C.
fn stopped_by<R>(array: &Array, stop: &StopFlag, f: impl FnOnce() -> R) -> R {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                if stop.is_set() {
                    return array.stop();
                }
                std::thread::park_timeout(STOP_POLL_INTERVAL);
            }
        });
        let result = f();
        is_over.store(true, Ordering::Release);
        watch.thread().unpark();
        result
    })
}

fn open(
    target: &DriveTarget,
    gpu: &Chosen,
    plan: TablePlan,
    placement: Placement,
    cache: u64,
) -> std::result::Result<Array, onehop_array::Error> {
    let drive = target.drive();
    let ns = drive.namespace(plan.nsid)?;
    Array::open(drive, gpu.gpu.clone(), ns, blocks(target), options(plan, placement, cache))
}

fn options(plan: TablePlan, placement: Placement, cache: u64) -> ArrayOptions {
    ArrayOptions { page_bytes: plan.page_bytes, depth: plan.depth, ..ArrayOptions::new(placement, cache) }
}

fn blocks(target: &DriveTarget) -> Range<u64> {
    0..target.bytes() / target.unit()
}

/// A line for each row.
pub(super) fn table(rows: &[GatherRow], text: &mut ReportText) {
    text.line(format!(
        "{:<8} {:>10} {:>8} {:>7} {:>11} {:>11} {:>6} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7}   {:>11} {:>9} {:>8} {:>7}",
        "", "", "", "", "", "", "", "", "", "", "", "", "", "empty cache", "", "", ""
    ));
    text.line(format!(
        "{:<8} {:>10} {:>8} {:>7} {:>11} {:>11} {:>6} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7}   {:>11} {:>9} {:>8} {:>7}",
        "ids",
        "cache",
        "batch",
        "gathers",
        "rows/s",
        "GPU rows/s",
        "hits",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "reads/s",
        "of drive",
        "a page",
        "rows/s",
        "reads/s",
        "of drive",
        "a page"
    ));
    let or_none = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"));
    for row in rows {
        text.line(format!(
            "{:<8} {:>10} {:>8} {:>7} {:>11.0} {:>11.0} {:>5.1}% {:>9} {:>9} {:>9} {:>9.0} {:>7.0}% {:>7.3}   {:>11.0} {:>9.0} {:>7.0}% \
             {:>7.3}",
            row.ids,
            units::bytes(row.cache_bytes),
            row.batch,
            row.batches,
            row.rows_per_s,
            row.kernel_rows_per_s,
            row.hit_rate * 100.0,
            or_none(row.p50_us),
            or_none(row.p99_us),
            or_none(row.p999_us),
            row.reads_per_s,
            row.of_drive * 100.0,
            row.commands_per_page,
            row.cold_rows_per_s,
            row.cold_reads_per_s,
            row.cold_of_drive * 100.0,
            row.cold_commands_per_page,
        ));
    }
}

impl From<onehop_array::Error> for CliError {
    fn from(error: onehop_array::Error) -> Self {
        match error {
            onehop_array::Error::Drive(error) => error.into(),
            onehop_array::Error::Gpu(error) => error.into(),
            refused @ onehop_array::Error::Refused(_) => Self::Usage(refused.to_string()),
            other => Self::Failed(other.to_string()),
        }
    }
}
