//! The GPU of the tests: the emulated one, or with `ONEHOP_TEST_GPU=0` the real one of that name.
#![allow(dead_code)]

use std::sync::{Arc, OnceLock};

use onehop_drive::Placement;
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu, Place};

pub fn gpu() -> Arc<dyn Gpu> {
    // One for all tests: host memory is registered once with a process's driver.
    static REAL: OnceLock<Option<Arc<dyn Gpu>>> = OnceLock::new();
    let real = REAL.get_or_init(|| {
        let name = std::env::var("ONEHOP_TEST_GPU").ok()?;
        Some(Arc::new(Cuda::load().unwrap().open(&name).unwrap()))
    });
    real.clone().unwrap_or_else(|| Arc::new(Emulated::new()))
}

/// A placement that this GPU and a controller that reaches host memory only can have.
pub fn placed(gpu: &dyn Gpu, placement: Placement) -> Placement {
    if gpu.simulated() { placement } else { Placement::TIER1 }
}

pub fn data_at(gpu: &dyn Gpu) -> Place {
    if gpu.simulated() { Place::Vram } else { Place::PinnedHost }
}
