//! What `onehop load -d` makes of a drive that a GPU serves, beside what its kernels alone make:
//! `cargo run --release -p onehop-transfer --example long_load -- [emu|0] [GIB] [COMMAND-KIB] [QUEUES]`.
//!
//! Puts a model of one tensor on the drive, finds it by an extent map, and loads it as the command does, several times.

use std::sync::Arc;

use onehop_drive::{Drive, GpuJob, GpuSetup, Options as DriveOptions, Placement};
use onehop_files::{Extent, ExtentMap, FileId, MappedFile, Place as On};
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu, Place, Region};
use onehop_load::Selection;
use onehop_transfer::{
    Chosen, Engine, ModelOnDrive, ModelPlace, RouteOptions, TransferSetup, arena, plan_options, volume,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ROUNDS: usize = 5;
/// The least share of its kernels' rate that a load must reach. An emulated GPU has no clock of its own.
const LEAST: f64 = 0.95;
const BLOCK: usize = 4096;
/// Bytes that the host writes and compares at once.
const CHUNK: usize = 64 << 20;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "emu".into());
    let mut number = |otherwise: usize| args.next().map_or(Ok(otherwise), |text| text.parse());
    let (bytes, command, queues) = (number(8)? << 30, (number(128)? as u64) << 10, number(4)? as u16);
    let gpu: Arc<dyn Gpu> = match name.as_str() {
        "emu" => Arc::new(Emulated::new()),
        name => Arc::new(Cuda::load()?.open(name)?),
    };
    // First: the driver loads no kernel beside one that stays, as the drive's does.
    gpu.load_kernels()?;
    let spec = format!("mem:{}?lba=4096&mdts=10&queues={}", bytes + BLOCK, queues + 4);
    let resident = onehop_resident::open(&spec, gpu.clone())?;
    let options = DriveOptions { writable: true, max_transfer: command, ..DriveOptions::default() };
    let drive = Drive::open(resident.port(), options)?;
    let ns = drive.namespace(1)?;
    let chosen = Chosen { gpu: gpu.clone(), why: "the command line".into() };
    let route = if gpu.simulated() { "gpu/tier1" } else { "gpu/tier3" };
    let options = RouteOptions { route: route.parse()?, queues: Some(queues), ..RouteOptions::default() };
    let setup = TransferSetup { drive: &drive, ns, gpu: &chosen, options: &options };

    let alone = put_model(&drive, &gpu, queues, bytes)?;
    let map = std::env::temp_dir().join(format!("onehop-long-load-{}", std::process::id()));
    std::fs::write(&map, map_of(&drive, bytes)?.to_bytes())?;
    let model = ModelOnDrive::open(&drive, ns, ModelPlace::Map { map: &map, paths: &[] });
    std::fs::remove_file(&map)?;
    let model = model?;
    let plan = model.plan(&Selection::default(), plan_options(ns))?;
    let (engine, memory) = Engine::open(&setup, plan.gpu_bytes)?;
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        memory.region.fill(0, memory.region.len(), 0)?;
        let (moved, landed) = arena::fill(&engine, ns, (&model.model, &plan), &memory, &())?;
        let rate = moved.bytes as f64 / 1e9 / moved.took.as_secs_f64();
        println!(
            "{round}: {} MiB at {rate:.2} GB/s, {:.3} of {alone:.2}; {} launches, {} allocations, {} commands, {} bytes staged, {} retries",
            moved.bytes >> 20,
            rate / alone,
            moved.launches,
            moved.allocations,
            moved.commands,
            landed.staged_bytes,
            moved.retries,
        );
        ratios.push(rate / alone);
    }
    let tensor = plan.tensors.first().ok_or("the plan has no tensor")?;
    check(&memory.region, tensor.at as usize, bytes)?;
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ROUNDS / 2];
    println!("every byte is right; median: {median:.3} of what the kernels alone make");
    if !gpu.simulated() && median < LEAST {
        return Err(format!("that is less than {LEAST}").into());
    }
    Ok(())
}

/// Puts the model on the drive, and reads it back once: GB/s by the time that the kernels ran on the GPU's own clock, or by
/// the host's where the GPU has none.
fn put_model(drive: &Drive, gpu: &Arc<dyn Gpu>, queues: u16, bytes: usize) -> Result<f64> {
    let ns = drive.namespace(1)?;
    let (place, placement) = match gpu.simulated() {
        true => (Place::PinnedHost, Placement::TIER1),
        false => (Place::Vram, Placement::TIER3),
    };
    let head = drive.buffer(BLOCK)?;
    head.host()?.write(0, &header(bytes))?;
    drive.queue()?.write(ns, 0, 1, &head, 0)?;
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup { queues, ..GpuSetup::new(placement) })?;
    let (region, buffer) = drive.gpu_buffer(&**gpu, place, bytes)?;
    for at in (0..bytes).step_by(CHUNK) {
        region.write(at, &chunk(at, CHUNK.min(bytes - at)))?;
    }
    let job = [GpuJob { lba: 1, blocks: (bytes / BLOCK) as u64, offset: 0 }];
    queues.write(ns, &job, &buffer)?;
    let report = queues.read(ns, &job, &buffer)?;
    let took = if report.kernel_time.is_zero() { report.took } else { report.kernel_time };
    Ok(report.bytes as f64 / 1e9 / took.as_secs_f64())
}

/// The first block of the file: all before the tensor's bytes.
fn header(bytes: usize) -> Vec<u8> {
    let text = format!(r#"{{"weights":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut block = ((BLOCK - 8) as u64).to_le_bytes().to_vec();
    block.extend(text.bytes());
    block.resize(BLOCK, b' ');
    block
}

/// Where the file is: at the start of the drive, in one extent.
fn map_of(drive: &Drive, bytes: usize) -> Result<ExtentMap> {
    let len = (BLOCK + bytes) as u64;
    let id = FileId { ino: 1, generation: 0, len, mtime: (0, 0), ctime: (0, 0) };
    let file = MappedFile { path: "model.safetensors".into(), fs: "none".into(), fs_uuid: String::new(), id };
    let extent = Extent { offset: 0, len, place: On::Drive(0) };
    let head = header(bytes);
    let read = |offset: u64, out: &mut [u8]| {
        let start = offset as usize;
        let from_head = BLOCK.saturating_sub(start).min(out.len());
        out[..from_head].copy_from_slice(&head[start.min(BLOCK)..][..from_head]);
        let rest = &mut out[from_head..];
        rest.copy_from_slice(&chunk(start + from_head - BLOCK, rest.len()));
        Ok(())
    };
    Ok(ExtentMap::make(file, volume::drive_id(drive, drive.namespace(1)?)?, &[extent], read)?)
}

/// Bytes that differ from place to place.
fn chunk(at: usize, len: usize) -> Vec<u8> {
    let word = |i: usize| ((at + i * 8) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let mut bytes = vec![0; len];
    bytes
        .chunks_mut(8)
        .enumerate()
        .for_each(|(i, to)| to.copy_from_slice(&word(i).to_le_bytes()[..to.len()]));
    bytes
}

fn check(region: &Region, at: usize, bytes: usize) -> Result<()> {
    let mut got = vec![0; CHUNK];
    for from in (0..bytes).step_by(CHUNK) {
        let got = &mut got[..CHUNK.min(bytes - from)];
        region.read(at + from, got)?;
        if *got != chunk(from, got.len()) {
            return Err(format!("wrong bytes within 64 MiB of {from:#x}").into());
        }
    }
    Ok(())
}
