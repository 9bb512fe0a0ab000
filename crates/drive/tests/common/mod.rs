//! The GPU of the tests: the emulated one, or with `ONEHOP_TEST_GPU=0` the real one of that name. With
//! `ONEHOP_TEST_CONTROLLER_GPU=1` controllers that run on a GPU run on that one, and reach the first one's memory.
#![allow(dead_code)]

use std::sync::{Arc, OnceLock};

use onehop_drive::Placement;
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu, Place};
use onehop_os::ControllerBackend;
use onehop_sim::Sim;

pub fn gpu() -> Arc<dyn Gpu> {
    // One for all tests: host memory is registered once with a process's driver.
    static REAL: OnceLock<Option<Arc<dyn Gpu>>> = OnceLock::new();
    let real = REAL.get_or_init(|| {
        let name = std::env::var("ONEHOP_TEST_GPU").ok()?;
        let cuda = Cuda::load().unwrap();
        let gpu = cuda.open(&name).unwrap();
        let Ok(other) = std::env::var("ONEHOP_TEST_CONTROLLER_GPU") else { return Some(Arc::new(gpu)) };
        Some(Arc::new(gpu.served_by(&cuda.open(&other).unwrap()).unwrap()))
    });
    real.clone().unwrap_or_else(|| Arc::new(Emulated::new()))
}

/// Whether the GPU of the tests is a real one.
pub fn is_real() -> bool {
    !gpu().simulated()
}

/// What executes the I/O commands of a simulated drive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bed {
    /// CPU threads, which reach host memory only.
    Sim,
    /// Resident warps of the GPU, which reach its memory too.
    Resident,
}

impl Bed {
    /// A drive like this, and its port.
    pub fn open(self, spec: &str) -> (Sim, ControllerBackend) {
        match self {
            Self::Sim => {
                let sim = onehop_sim::open(spec).unwrap_or_else(|e| panic!("{spec}: {e}"));
                let port = sim.port();
                (sim, port)
            }
            Self::Resident => {
                let drive = onehop_resident::open(spec, gpu()).unwrap_or_else(|e| panic!("{spec}: {e}"));
                (drive.sim().clone(), drive.port())
            }
        }
    }
}

/// A placement that works on this GPU, with or without a controller that reaches its memory.
pub fn placed(gpu: &dyn Gpu, placement: Placement, reaches_vram: bool) -> Placement {
    if gpu.simulated() || reaches_vram { placement } else { Placement::TIER1 }
}

pub fn data_at(gpu: &dyn Gpu, reaches_vram: bool) -> Place {
    if gpu.simulated() || reaches_vram { Place::Vram } else { Place::PinnedHost }
}
