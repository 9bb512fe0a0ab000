//! A GPU-driven job of many launches beside one launch, on a drive that a GPU serves:
//! `cargo run --release -p onehop-bench --example long_job -- [emu|0] [GIB] [COMMAND-KIB]`.
//!
//! Reads the same bytes by one batch of commands at a time, as `onehop load -d` does, and compares the rate with that of the
//! longest single launch. Both overwrite memory that was cleared; every byte is compared after each, outside the measured
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use onehop_bench::median;
use onehop_drive::{Drive, GpuJob, GpuReport, GpuSetup, Op, Options, Placement};
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu, Place, Region};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ROUNDS: usize = 7;
/// What the host writes and compares at once.
const PIECE: usize = 64 << 20;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "emu".into());
    let mut number = |otherwise: usize| args.next().map_or(Ok(otherwise), |text| text.parse());
    let (bytes, command) = (number(8)? << 30, (number(128)? as u64) << 10);
    let gpu: Arc<dyn Gpu> = match name.as_str() {
        "emu" => Arc::new(Emulated::new()),
        name => Arc::new(Cuda::load()?.open(name)?),
    };
    let place = if gpu.simulated() { Place::PinnedHost } else { Place::Vram };
    let drive = onehop_resident::open(&format!("mem:{bytes}?lba=4096&mdts=10&queues=8"), gpu.clone())?;
    let options = Options { writable: true, max_transfer: command, ..Options::default() };
    let drive = Drive::open(drive.port(), options)?;
    let ns = drive.namespace(1)?;
    let placement = if gpu.simulated() { Placement::TIER1 } else { Placement::TIER3 };
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup { queues: 8, ..GpuSetup::new(placement) })?;
    let (region, buffer) = drive.gpu_buffer(&*gpu, place, bytes)?;
    fill(&region)?;
    let job = |bytes: usize| [GpuJob { lba: 0, blocks: bytes as u64 / 4096, offset: 0 }];
    queues.write(ns, &job(bytes), &buffer)?;

    let one = bytes.min(8192 * command as usize).min(bytes);
    let (mut ratios, mut rates) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        region.fill(0, bytes, 0)?;
        let single = queues.read(ns, &job(one), &buffer)?;
        check(&region, one)?;
        region.fill(0, bytes, 0)?;
        let long = queues.transfer(Op::Read, ns, &job(bytes), &buffer, &mut |_| true)?;
        check(&region, bytes)?;
        let (alone, whole) = (rate(single.bytes, kernel_time(&single)), rate(long.bytes, long.took));
        println!(
            "{round}: one launch over {} MiB {alone:.2} GB/s; {} MiB {whole:.2} GB/s ({:.3}), {} launches, {} allocations, kernels ran {:.3} of the time, {} retries",
            one >> 20,
            bytes >> 20,
            whole / alone,
            long.launches,
            long.allocations,
            long.kernel_time.as_secs_f64() / long.took.as_secs_f64(),
            long.retries,
        );
        ratios.push(whole / alone);
        rates.push(whole);
    }
    println!(
        "every byte of every round is right; medians of {ROUNDS}: {:.2} GB/s, {:.3} of one launch",
        median(&mut rates),
        median(&mut ratios)
    );
    Ok(())
}

/// How long the launch ran; all of the job's time where the GPU has no clock.
fn kernel_time(report: &GpuReport) -> Duration {
    if report.kernel_time.is_zero() { report.took } else { report.kernel_time }
}

fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / 1e9 / took.as_secs_f64()
}

/// Bytes that differ from place to place.
fn piece(at: usize, len: usize) -> Vec<u8> {
    let word = |i: usize| ((at + i * 8) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    (0..len / 8).flat_map(|i| word(i).to_le_bytes()).collect()
}

fn fill(region: &Region) -> Result<()> {
    for at in (0..region.len()).step_by(PIECE) {
        region.write(at, &piece(at, PIECE.min(region.len() - at)))?;
    }
    Ok(())
}

/// Compares the first bytes of memory, by as many threads as there are CPUs.
fn check(region: &Region, bytes: usize) -> Result<()> {
    let next = AtomicUsize::new(0);
    let compare = || -> std::result::Result<(), String> {
        let mut got = vec![0; PIECE];
        loop {
            let at = next.fetch_add(PIECE, Ordering::Relaxed);
            if at >= bytes {
                return Ok(());
            }
            let got = &mut got[..PIECE.min(bytes - at)];
            region.read(at, got).map_err(|error| error.to_string())?;
            if *got != piece(at, got.len()) {
                return Err(format!("wrong bytes within 64 MiB of {at:#x}"));
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let compared: std::result::Result<(), String> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(compare)).collect();
        all.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    });
    Ok(compared?)
}
