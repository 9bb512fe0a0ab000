//! A chase of pointers through a drive by kernels of one's own, the host's side in Rust:
//! `cargo run --release -p onehop-bench --example pointer_chase -- [emu|0] [SIM-OPTIONS]`. On a real GPU the kernels are those of
//! examples/rust/pointer_chase.rs, linked with onehop's library; on the emulated one the function below.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, GpuMode, GpuSetup, Options, Placement};
use onehop_gpu::cuda::{Arg, Cuda, Shape};
use onehop_gpu::{Emulated, EmulatedThread, Gpu, Place, Region};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Answer, DeviceOp, DeviceQueue};
use onehop_proto::queue::Memory;

/// Made from examples/rust/pointer_chase.rs.
const KERNELS: &str = include_str!("../../device/ptx/pointer_chase.ptx");

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Blocks of the chain: a power of two.
const LENGTH: u64 = 4096;
const HOPS: u32 = 50;
const BLOCKS: u32 = 8;
const THREADS: u32 = 64;
/// Bytes of a chase's end: the sum, the next block, how many were read, the last answer.
const END_BYTES: usize = 24;

fn after(lba: u64) -> u64 {
    (lba * 5 + 7) % LENGTH
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "emu".into());
    let options = args.next().unwrap_or_default();
    let sim = onehop_sim::open(&format!("mem:64M{options}"))?;
    let drive = Drive::open(sim.port(), Options { writable: true, ..Options::default() })?;
    let start = Instant::now();
    let threads = match name.as_str() {
        "emu" => emulated(&drive)?,
        name => on_cuda(&drive, name)?,
    };
    println!("{threads} chains of {HOPS} blocks, all of them right, after {:?}", start.elapsed());
    match sim.violations().as_slice() {
        [] => Ok(()),
        broken => Err(format!("rules of NVMe were broken: {broken:?}").into()),
    }
}

fn setup() -> GpuSetup {
    let stall = Duration::from_secs(2);
    GpuSetup { mode: GpuMode::Shared { threads: 1 }, depth: 255, stall, ..GpuSetup::new(Placement::TIER1) }
}

fn on_cuda(drive: &Drive, name: &str) -> Result<u32> {
    let gpu = Cuda::load()?.open(name)?;
    let code = gpu.link_code(KERNELS)?;
    let threads = BLOCKS * THREADS;
    let ns = drive.namespace(1)?;
    let block_bytes = ns.format.transfer_bytes(1).ok_or("blocks of no known size")?;
    let bytes = block_bytes as usize * threads as usize;
    let (data, buffer) = drive.gpu_buffer(&gpu, Place::PinnedHost, bytes)?;
    let ends = gpu.alloc(Place::PinnedHost, END_BYTES * threads as usize)?;
    let exported = drive.gpu_queues(Arc::new(gpu.clone()), setup())?.export(ns, &buffer, true)?;
    let run = |kernel: &str, number: Arg| {
        let shape = Shape { blocks: BLOCKS, threads: THREADS, shared: 0 };
        let args = [Arg::U64(exported.handle().0), Arg::U64(data.addr().0), number, Arg::U64(ends.addr().0)];
        // SAFETY: these are the kernel's arguments; it ends because every call of the queue does, and its memory stays until
        // it was waited for.
        unsafe { gpu.start_kernel(&code, kernel, shape, &args, Duration::from_secs(100)) }?.wait()
    };
    run("lay", Arg::U64(LENGTH))?;
    for thread in 0..threads {
        let answer = ends.word(thread as usize * 4)? as i32;
        refuse(Answer::from_code(answer).unwrap_or(Answer::Pending))?;
    }
    run("chase", Arg::U32(HOPS))?;
    for thread in 0..threads {
        let at = thread as usize * END_BYTES;
        let end = (long(&ends, at)?, long(&ends, at + 8)?);
        refuse(Answer::from_code(ends.word(at + 20)? as i32).ok_or("a wrong block")?)?;
        check(thread, end)?;
    }
    exported.check()?;
    exported.revoke()?;
    Ok(threads)
}

fn long(region: &Region, at: usize) -> Result<u64> {
    Ok(u64::from(region.word(at)?) | u64::from(region.word(at + 4)?) << 32)
}

fn refuse(answer: Answer) -> Result<()> {
    if answer == Answer::Done { Ok(()) } else { Err(answer.to_string().into()) }
}

/// Checks that a chase from this block on ended with the right sum and place.
fn check(first: u32, end: (u64, u64)) -> Result<()> {
    let one = |(sum, lba): (u64, u64), _| (lba.wrapping_mul(lba).wrapping_add(sum), after(lba));
    let want = (0..HOPS).fold((0, u64::from(first)), one);
    if end == want { Ok(()) } else { Err(format!("the chase from block {first} on came to {end:?}").into()) }
}

fn emulated(drive: &Drive) -> Result<u32> {
    let (gpu, threads) = (Emulated::new(), 32);
    let ns = drive.namespace(1)?;
    let (data, buffer) = drive.gpu_buffer(&gpu, Place::PinnedHost, 65536 * threads as usize)?;
    let exported = drive.gpu_queues(Arc::new(gpu.clone()), setup())?.export(ns, &buffer, true)?;
    let (handle, data) = (exported.handle(), data.addr());
    let (sender, ends) = std::sync::mpsc::channel();
    let running = gpu.start(threads, move |thread, index| {
        // The program may have failed already; then nobody receives this.
        let _ = sender.send((index, lay_and_chase(thread, handle, data, index, threads)));
    })?;
    running.join()?;
    for (index, end) in ends {
        check(index, end.map_err(|answer| answer.to_string())?)?;
    }
    exported.revoke()?;
    Ok(threads)
}

/// A thread of the emulated GPU writes its share of the chain, and follows the chain from a block that it wrote itself
/// through blocks that others write meanwhile: until those are there, it reads them again.
fn lay_and_chase(
    mem: &EmulatedThread,
    handle: GpuAddr,
    data: GpuAddr,
    index: u32,
    threads: u32,
) -> std::result::Result<(u64, u64), Answer> {
    let queue = DeviceQueue::open(mem, handle).ok_or(Answer::NoHandle)?;
    let offset = u64::from(index) * u64::from(queue.block_bytes(mem));
    let node = data.plus(offset);
    let run = |op, lba| match queue.run(mem, op, lba, 1, offset) {
        Answer::Done => Ok(()),
        other => Err(other),
    };
    let halves = |word: u64| [word as u32, (word >> 32) as u32];
    for lba in (u64::from(index)..LENGTH).step_by(threads as usize) {
        for (at, word) in [(0, lba + 1), (8, after(lba)), (16, lba.wrapping_mul(lba))] {
            mem.store_pair(node.plus(at), halves(word));
        }
        run(DeviceOp::Write, lba)?;
    }
    let long = |at| {
        let [low, high] = mem.load_pair(node.plus(at));
        u64::from(low) | u64::from(high) << 32
    };
    let (mut sum, mut lba) = (0u64, u64::from(index));
    for _ in 0..HOPS {
        run(DeviceOp::Read, lba)?;
        while long(0) != lba + 1 {
            run(DeviceOp::Read, lba)?;
        }
        sum = sum.wrapping_add(long(16));
        lba = long(8);
    }
    Ok((sum, lba))
}
