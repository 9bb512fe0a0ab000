//! Other people's kernels on a real GPU. They drive a simulated drive on this machine's CPUs: queues and data are in
//! host memory, and a thread forwards doorbells.
//!
//! Without a CUDA driver each test says so and passes. Kernels in Rust are part of the build. Those in CUDA C++ are PTX
//! files that `examples/cuda/nvrtc.py` made, in the folder that `ONEHOP_TEST_KERNELS` names.
#![allow(clippy::unwrap_used)]

mod arrays;
mod calls;
mod chase;

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_drive::{Buffer, Drive, ExportedQueue, GpuMode, GpuSetup, Options, Placement};
use onehop_gpu::cuda::{Arg, Code, Cuda, CudaGpu, Shape, Started};
use onehop_gpu::{Gpu, Place, Region};
use onehop_sim::{Fault, Sim};

static TURN: Mutex<()> = Mutex::new(());

/// A GPU, and the lock for its use.
struct Machine {
    gpu: CudaGpu,
    _turn: MutexGuard<'static, ()>,
}

/// Writes a line past the test runner's capture.
fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

impl Machine {
    /// GPU 0; without one, says why and returns `None`.
    fn open(test: &str) -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        match Cuda::load().and_then(|cuda| cuda.open("0")) {
            Ok(gpu) => Some(Self { gpu, _turn: turn }),
            Err(error) => {
                report(&format!("SKIPPED: cuda {test}: {error}"));
                None
            }
        }
    }

    /// Kernels in CUDA C++, linked with the library; without them, says why and returns `None`.
    fn cpp(&self, test: &str, name: &str) -> Option<Code> {
        let Some(folder) = std::env::var_os("ONEHOP_TEST_KERNELS") else {
            report(&format!("SKIPPED: cuda {test}: ONEHOP_TEST_KERNELS names no folder with {name}"));
            return None;
        };
        let ptx = std::fs::read_to_string(PathBuf::from(folder).join(name)).unwrap();
        Some(self.gpu.link_code(&ptx).unwrap())
    }

    fn bed(&self, options: &str, depth: u32) -> Bed {
        Bed::new(&self.gpu, options, depth)
    }
}

/// A simulated drive and its data memory.
struct Bed {
    sim: Sim,
    drive: Drive,
    gpu: CudaGpu,
    data: Region,
    buffer: Buffer,
    setup: GpuSetup,
}

const BLOCK: u64 = 512;
const DATA: usize = 64 << 20;
const LIMIT: Duration = Duration::from_secs(100);

/// Whether a tool such as racecheck runs the kernels, under which threads of a warp that wait for each other may
/// starve.
fn unfair() -> bool {
    std::env::var_os("ONEHOP_GPU_UNFAIR").is_some()
}

fn media() -> Vec<u8> {
    (0..DATA as u32 / 4).flat_map(|i| (i.wrapping_mul(0x9e37_79b9) ^ (i >> 7)).to_le_bytes()).collect()
}

impl Bed {
    fn new(gpu: &CudaGpu, options: &str, depth: u32) -> Self {
        let sim = onehop_sim::open(&format!("mem:64M{options}")).unwrap();
        sim.write_media(1, 0, &media()).unwrap();
        let times = Options {
            writable: true,
            abort_wait: Duration::from_millis(200),
            ready_limit: Duration::from_secs(2),
            retries: 2,
            ..Options::default()
        };
        let drive = Drive::open(sim.port(), times).unwrap();
        let (data, buffer) = drive.gpu_buffer(gpu, Place::PinnedHost, DATA).unwrap();
        let setup = GpuSetup {
            mode: GpuMode::Shared { threads: 1 },
            depth,
            stall: Duration::from_millis(500),
            limit: Duration::from_secs(30),
            ..GpuSetup::new(Placement::TIER1)
        };
        Self { sim, drive, gpu: gpu.clone(), data, buffer, setup }
    }

    fn export(&self) -> ExportedQueue {
        let queues = self.drive.gpu_queues(Arc::new(self.gpu.clone()), self.setup).unwrap();
        queues.export(self.drive.namespace(1).unwrap(), &self.buffer, true).unwrap()
    }

    fn inject(&self, fault: &str) {
        self.sim.inject(Fault::parse(fault).unwrap());
    }

    /// Memory for the threads' results.
    fn answers(&self, threads: u32) -> Region {
        self.gpu.alloc(Place::PinnedHost, threads as usize * 4).unwrap()
    }

    fn start(&self, code: &Code, name: &str, shape: (u32, u32), args: &[Arg]) -> Started {
        let shape = Shape { blocks: shape.0, threads: shape.1, shared: 0 };
        // SAFETY: the tests give each kernel the arguments of its source; every call of the queue ends by the times in
        // `setup`, and so do the kernels; their memory stays until they were waited for.
        unsafe { self.gpu.start_kernel(code, name, shape, args, LIMIT) }.unwrap()
    }
}

fn answers_of(answers: &Region, threads: u32) -> Vec<i32> {
    (0..threads).map(|i| answers.word(i as usize * 4).unwrap() as i32).collect()
}

/// Each thread must have answered `want`; prints how many did not.
fn all_said(answers: &Region, threads: u32, want: i32, what: &str) {
    let mut others = std::collections::BTreeMap::new();
    for (thread, said) in answers_of(answers, threads).into_iter().enumerate() {
        if said != want {
            others.entry(said).or_insert_with(Vec::new).push(thread);
        }
    }
    assert!(others.is_empty(), "{what}: not {want}, but (answer: threads) {others:?}");
}
