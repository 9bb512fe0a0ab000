//! Measures gathers: rows per second, hits, commands per page, and the time of a batch by the GPU's clock, for uniform
//! and Zipf-distributed ids, beside plain reads of the drive. Every byte of the first batches is checked. `cargo run
//! --release -p onehop-array --example gather -- [emu|0] [sim|resident] [--json]`.
//!
//! `sim` is a simulated drive on CPU threads, with queue and pages in host memory; `resident` is one that the GPU
//! serves, with all of it in the GPU's memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use onehop_array::{Array, ArrayOptions, ArrayRows};
use onehop_drive::{Drive, GpuJob, GpuMode, GpuSetup, Placement};
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu, Place};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BYTES: u64 = 64 << 20;
const ROW: u32 = 256;
const PAGE: u32 = 4096;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| args.iter().any(|arg| arg == name);
    let gpu: Arc<dyn Gpu> = match args.iter().find(|arg| arg.parse::<u32>().is_ok()) {
        Some(name) => Arc::new(Cuda::load()?.open(name)?),
        None => Arc::new(Emulated::new()),
    };
    // Before the resident controller occupies the GPU.
    gpu.array_kernels()?;
    let resident = has("resident");
    let spec = format!("mem:{BYTES}");
    let (sim, port, placement) = if resident {
        let drive = onehop_resident::open(&spec, gpu.clone())?;
        (drive.sim().clone(), drive.port(), Placement::TIER3)
    } else {
        let sim = onehop_sim::open(&spec)?;
        let port = sim.port();
        (sim, port, Placement::TIER1)
    };
    let media: Vec<u8> =
        (0..BYTES as u32 / 4).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    sim.write_media(1, 0, &media)?;
    let options = onehop_drive::Options { max_transfer: PAGE.into(), ..onehop_drive::Options::default() };
    let drive = Drive::open(port, options)?;
    let [owner, shared] = plain_reads(&drive, &gpu, placement)?;
    if !has("--json") {
        println!(
            "the drive alone: {:.3} M reads of {PAGE} bytes a second in owner mode, {:.3} M in shared mode",
            owner / 1e6,
            shared / 1e6
        );
    }
    let batches: &[u32] = if gpu.simulated() { &[48, 1536] } else { &[48, 1536, 16_384, 131_072, 1 << 20] };
    let mut lines = Vec::new();
    for zipf in [false, true] {
        // Room for twice the array, so that every set has room, or for an eighth of it.
        for cache in [2 * BYTES, BYTES / 8] {
            for batch in batches {
                let line = measure(&drive, &gpu, placement, &media, &Plan { zipf, cache, batch: *batch })?;
                if !has("--json") {
                    println!("{line}");
                }
                lines.push(line);
            }
        }
    }
    if has("--json") {
        let rows: Vec<String> = lines.iter().map(Line::json).collect();
        println!(
            "{{\"schema\":1,\"gpu\":\"{}\",\"resident\":{resident},\"owner_reads_per_s\":{owner:.1},\"shared_reads_per_s\":{shared:.1},\"rows\":[{}]}}",
            gpu.name(),
            rows.join(",")
        );
    }
    match sim.violations().as_slice() {
        [] => Ok(()),
        broken => Err(format!("rules of NVMe were broken: {broken:?}").into()),
    }
}

/// Page reads per second by kernels that do nothing else, in owner mode and in shared mode.
fn plain_reads(drive: &Drive, gpu: &Arc<dyn Gpu>, placement: Placement) -> Result<[f64; 2]> {
    let ns = drive.namespace(1)?;
    let (_region, buffer) = drive.gpu_buffer(&**gpu, placement.data, BYTES as usize)?;
    let job = [GpuJob { lba: 0, blocks: ns.blocks, offset: 0 }];
    let mut best = [0f64; 2];
    let modes = [GpuMode::Owner, GpuMode::Shared { threads: if gpu.simulated() { 16 } else { 1024 } }];
    for (best, mode) in best.iter_mut().zip(modes) {
        let queues = drive.gpu_queues(gpu.clone(), GpuSetup { mode, ..GpuSetup::new(placement) })?;
        for _ in 0..2 {
            let moved = queues.read(ns, &job, &buffer)?;
            let took = if moved.kernel_time.is_zero() { moved.took } else { moved.kernel_time };
            *best = best.max(moved.commands as f64 / took.as_secs_f64());
        }
    }
    Ok(best)
}

struct Plan {
    zipf: bool,
    cache: u64,
    batch: u32,
}

/// One measurement.
struct Line {
    zipf: bool,
    cache_mib: u64,
    batch: u32,
    /// For the first batch, which finds the cache empty.
    cold_rows_per_s: f64,
    cold_commands_per_page: f64,
    cold_commands_per_s: f64,
    /// For the later batches.
    rows_per_s: f64,
    hit_rate: f64,
    p50_us: f64,
    p99_us: f64,
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<8} cache {:>3} MiB, batch {:>7}: {:>9.3} M rows/s, hits {:>5.1} %, p50 {:>9.1} us, p99 {:>9.1} us; empty cache: \
             {:>8.3} M rows/s, {:>8.3} M commands/s, {:.3} a page",
            if self.zipf { "zipf" } else { "uniform" },
            self.cache_mib,
            self.batch,
            self.rows_per_s / 1e6,
            self.hit_rate * 100.0,
            self.p50_us,
            self.p99_us,
            self.cold_rows_per_s / 1e6,
            self.cold_commands_per_s / 1e6,
            self.cold_commands_per_page,
        )
    }
}

impl Line {
    fn json(&self) -> String {
        format!(
            "{{\"ids\":\"{}\",\"cache_mib\":{},\"batch\":{},\"rows_per_s\":{:.1},\"hit_rate\":{:.5},\"p50_us\":{:.2},\
             \"p99_us\":{:.2},\"cold_rows_per_s\":{:.1},\"cold_commands_per_s\":{:.1},\"cold_commands_per_page\":{:.4}}}",
            if self.zipf { "zipf" } else { "uniform" },
            self.cache_mib,
            self.batch,
            self.rows_per_s,
            self.hit_rate,
            self.p50_us,
            self.p99_us,
            self.cold_rows_per_s,
            self.cold_commands_per_s,
            self.cold_commands_per_page,
        )
    }
}

fn measure(
    drive: &Drive,
    gpu: &Arc<dyn Gpu>,
    placement: Placement,
    media: &[u8],
    plan: &Plan,
) -> Result<Line> {
    let options = ArrayOptions { page_bytes: PAGE, ..ArrayOptions::new(placement, plan.cache) };
    let ns = drive.namespace(1)?;
    let array = Array::open(drive, gpu.clone(), ns, 0..ns.blocks, options)?;
    let rows = array.rows(ROW, ROW);
    let out = gpu.alloc(Place::Vram, plan.batch as usize * ROW as usize)?;
    let mut random = Random(7);
    let mut batch = |check: bool| -> Result<(Duration, Vec<u64>)> {
        let ids: Vec<u64> = (0..plan.batch).map(|_| random.id(rows.count, plan.zipf)).collect();
        let moved = array.gather(rows, &ids, &out)?;
        if let Some((place, error)) = moved.failed.first() {
            return Err(format!("row {}: {error}", ids[*place]).into());
        }
        if check {
            compare(&out, rows, &ids, media)?;
        }
        Ok((moved.took, ids))
    };
    let (cold, ids) = batch(true)?;
    let pages: BTreeSet<u64> = ids.iter().map(|id| id * u64::from(ROW) / u64::from(PAGE)).collect();
    let reads = array.stats()?.reads;
    if plan.cache > BYTES {
        // The cache then holds every page.
        let all: Vec<u64> = (0..rows.count).step_by((PAGE / ROW) as usize).collect();
        let places = gpu.alloc(Place::Vram, all.len() * ROW as usize)?;
        if !array.gather(rows, &all, &places)?.failed.is_empty() {
            return Err("not all of the array could be read".into());
        }
    }
    let first = array.stats()?;
    let count = if gpu.simulated() || plan.batch > 1 << 16 { 20 } else { 100 };
    let mut times = Vec::new();
    for number in 0..count {
        times.push(batch(number < 2)?.0.as_secs_f64());
    }
    let last = array.stats()?;
    array.close()?;
    let total: f64 = times.iter().sum();
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] * 1e6;
    Ok(Line {
        zipf: plan.zipf,
        cache_mib: plan.cache >> 20,
        batch: plan.batch,
        cold_rows_per_s: f64::from(plan.batch) / cold.as_secs_f64(),
        cold_commands_per_page: f64::from(reads) / pages.len() as f64,
        cold_commands_per_s: f64::from(reads) / cold.as_secs_f64(),
        rows_per_s: f64::from(plan.batch) * f64::from(count) / total,
        hit_rate: f64::from(last.hits.wrapping_sub(first.hits))
            / f64::from(last.wanted.wrapping_sub(first.wanted)),
        p50_us: at(0.5),
        p99_us: at(0.99),
    })
}

fn compare(out: &onehop_gpu::Region, rows: ArrayRows, ids: &[u64], media: &[u8]) -> Result<()> {
    let mut got = vec![0; out.len()];
    out.read(0, &mut got)?;
    for (id, row) in ids.iter().zip(got.chunks(rows.bytes as usize)) {
        if row != &media[*id as usize * rows.stride as usize..][..row.len()] {
            return Err(
                format!("row {id} is not what is on the drive; no result is given for wrong bytes").into()
            );
        }
    }
    Ok(())
}

struct Random(u64);

impl Random {
    /// From 0 to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A row: uniform, or with a frequency of about one over its rank. Adjacent ranks are not adjacent rows.
    fn id(&mut self, rows: u64, zipf: bool) -> u64 {
        if zipf {
            let rank = (rows as f64).powf(self.unit()) as u64;
            rank.wrapping_mul(0x9e37_79b9_7f4a_7c15) % rows
        } else {
            (self.unit() * rows as f64) as u64 % rows
        }
    }
}
