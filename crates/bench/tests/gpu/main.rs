//! On a real GPU: the orders on which queues rest, and many commands, each executed once and with the right bytes.
//!
//! Without a CUDA driver each test prints that and passes.
#![allow(clippy::unwrap_used)]

mod litmus;
mod serve;
mod times;

use onehop_gpu::cuda::{Cuda, CudaGpu, RigCode};
use onehop_gpu::{Gpu, Place, Region};

/// A GPU with the rig loaded.
struct Rig {
    gpu: CudaGpu,
    code: RigCode,
}

impl Rig {
    fn open(test: &str) -> Option<Self> {
        match Cuda::load().and_then(|cuda| cuda.open("0")) {
            Ok(gpu) => {
                let code = gpu.load_rig().unwrap();
                Some(Self { gpu, code })
            }
            Err(error) => {
                use std::io::Write;
                let _ = writeln!(std::io::stderr(), "SKIPPED: gpu {test}: {error}");
                None
            }
        }
    }

    fn vram(&self, bytes: usize) -> Region {
        self.gpu.alloc(Place::Vram, bytes).unwrap()
    }
}

fn put(region: &Region, at: usize, words: &[u32]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    region.write(at, &bytes).unwrap();
}

fn get<const N: usize>(region: &Region, at: usize) -> [u32; N] {
    let mut bytes = vec![0; N * 4];
    region.read(at, &mut bytes).unwrap();
    std::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|k| bytes[i * 4 + k])))
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}
