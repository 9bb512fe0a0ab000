//! Kernels of arrays.

use std::sync::Arc;
use std::time::Duration;

use onehop_device::params::ARRAY_SHARED_BYTES;
use onehop_proto::GpuAddr;

use super::code::Code;
use super::gpu::CudaGpu;
use super::kernels::KernelCall;
use super::launch::Used;
use super::module::{Arg, Shape};
use crate::arrays::{ArrayJob, ArrayKernels, ArrayWork};
use crate::{Error, Result};

/// Threads of a block: the local memory of its warps fits in what every GPU gives a block without being asked.
const THREADS: u32 = 256;

const KERNELS: [&str; 4] =
    ["onehop_array_gather", "onehop_array_read", "onehop_array_write", "onehop_array_flush"];

/// Half a megabyte that programs without arrays do without.
#[cfg(feature = "arrays")]
const PTX: Option<&str> = Some(onehop_device::ARRAY_PTX);
#[cfg(not(feature = "arrays"))]
const PTX: Option<&str> = None;

/// See [`ArrayKernels`].
pub(super) struct CudaArrays {
    gpu: CudaGpu,
    code: Code,
}

impl CudaArrays {
    pub(super) fn load(gpu: &CudaGpu) -> Result<Self> {
        let Some(ptx) = PTX else {
            let why = "this program was built without the feature `arrays` of onehop-gpu".into();
            return Err(Error::NotSupported { what: "arrays".into(), why });
        };
        let code = gpu.load_code(ptx)?;
        // All of them now: the driver loads none while a kernel runs that stays.
        for name in KERNELS {
            code.registers(name)?;
        }
        Ok(Self { gpu: gpu.clone(), code })
    }
}

impl ArrayKernels for CudaArrays {
    fn run(&mut self, array: GpuAddr, job: &ArrayJob, threads: u32, limit: Duration) -> Result<Duration> {
        let words = |words: &[u64]| Arg::Words(words.into());
        let (name, mut args, shared) = match &job.work {
            ArrayWork::Gather(job) => ("onehop_array_gather", vec![words(&job.words())], ARRAY_SHARED_BYTES),
            ArrayWork::Read(job) => ("onehop_array_read", vec![words(&job.words())], 0),
            ArrayWork::Write(job) => ("onehop_array_write", vec![words(&job.words())], 0),
            ArrayWork::Flush(report, limit) => {
                ("onehop_array_flush", vec![Arg::U64(report.0), Arg::U64(*limit)], 0)
            }
        };
        args.insert(0, Arg::U64(array.0));
        args.push(Arg::U32(threads));
        let all = if shared == 0 { threads } else { threads.saturating_mul(32) };
        let shape =
            Shape { blocks: all.div_ceil(THREADS), threads: THREADS, shared: shared * (THREADS / 32) };
        let function = self.code.function(name)?;
        let call = KernelCall { function: &function, shape, args };
        let used = Used { memory: None, _held: vec![Arc::new(job.memory.clone())] };
        // SAFETY: the job's regions were checked to hold all that it names, and are held until the kernel has ended; what
        // the array's handle names stays as long as the handle, which the caller keeps.
        let mut running = unsafe { self.gpu.start(name, &call, limit, used) }?;
        running.wait()?;
        running.took()
    }
}
