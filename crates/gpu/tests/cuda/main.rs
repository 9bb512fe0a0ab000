//! CUDA on a machine that has it. Without it, every test says so in one line and passes.
//!
//! The tests take turns: all of them use one context, and some measure times.

#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod capture;
mod contexts;
mod full;
mod kernels;
mod memory;
mod ptx;
mod ranges;
mod raw;
mod resident;
mod sharing;
mod sums;

use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_gpu::cuda::{Arg, Cuda, CudaGpu, Shape};
use onehop_gpu::{Error, Region};

static TURN: Mutex<()> = Mutex::new(());

/// GPU 0, and the lock for its use.
pub struct Bench {
    /// The driver.
    pub cuda: Cuda,
    /// The GPU.
    pub gpu: CudaGpu,
    _turn: MutexGuard<'static, ()>,
}

/// GPU 0; without one, says why and returns `None`.
pub fn bench(test: &str) -> Option<Bench> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match Cuda::load() {
        Ok(cuda) => {
            let gpu = cuda.open("0").expect("there is a CUDA driver, but GPU 0 cannot be opened");
            Some(Bench { cuda, gpu, _turn: turn })
        }
        Err(why @ Error::NoCuda { .. }) => {
            // Not eprintln: it would be hidden when the test passes.
            let line = format!("SKIPPED: cuda {test}: {why}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Writes a line past the test runner's capture: measurements belong in the log of every run.
pub fn report(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Runs a tool kernel on one block.
pub fn run(gpu: &CudaGpu, name: &str, threads: u32, args: &[Arg]) {
    let shape = Shape { blocks: 1, threads, shared: 0 };
    // SAFETY: the callers give the arguments that ptx.rs names, with regions that are long enough.
    unsafe { gpu.run_ptx(ptx::TOOLS, name, shape, args, Duration::from_secs(20)) }.unwrap();
}

/// Copies one region to another of the same length by the GPU.
pub fn gpu_copy(gpu: &CudaGpu, to: &Region, from: &Region) {
    assert!(to.len() >= from.len());
    let words = (from.len() / 4) as u32;
    run(gpu, "copy", 256, &[Arg::U64(to.addr().0), Arg::U64(from.addr().0), Arg::U32(words)]);
}

/// Pseudo-random bytes.
pub fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// All bytes of a region.
pub fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn gpus_are_described() {
    let Some(bench) = bench("gpus_are_described") else { return };
    let devices = bench.cuda.devices().unwrap();
    for device in &devices {
        report(&format!("{device:#?}"));
        assert!(device.memory > 1 << 28 && !device.name.is_empty() && device.can.warp == 32);
        let again = bench.cuda.open(&device.pci.to_uppercase()).unwrap();
        assert_eq!(again.device(), device);
    }
    for name in ["99", "ffff:ff:1f.7", "a GPU", "", "-1"] {
        let error = bench.cuda.open(name).err().unwrap();
        assert!(matches!(&error, Error::NoSuchGpu { .. }), "{error}");
        assert!(error.to_string().contains(&devices[0].pci), "{error}");
    }
    let (free, all) = bench.gpu.memory_info().unwrap();
    assert!(free <= all && all <= devices[0].memory);
}

#[test]
fn without_a_driver_there_is_an_error_and_no_panic() {
    if let Err(error) = Cuda::load() {
        assert!(matches!(error, Error::NoCuda { .. }) && error.to_string().contains("CUDA"), "{error}");
    }
}
