//! GPU memory that Python has allocated: torch's, which it counts and shares with other processes as its own.
#![allow(unsafe_code, reason = "how long the memory lives only Python knows")]

use onehop_gpu::Region;
use onehop_gpu::cuda::CudaGpu;
use onehop_proto::GpuAddr;
use pyo3::prelude::*;

use crate::error::Result;

/// Memory as Python brings it: where it is, how long, and the object that keeps it allocated.
pub(crate) struct Brought {
    pub at: u64,
    pub bytes: usize,
    pub owner: Py<PyAny>,
}

impl Brought {
    /// The same as a region. The object is dropped when nothing uses the region any more, the GPU included.
    pub(crate) fn into_region(self, gpu: &CudaGpu) -> Result<Region> {
        let Self { at, bytes, owner } = self;
        // SAFETY: the owner keeps the memory allocated until it is dropped.
        Ok(unsafe { gpu.lend(GpuAddr(at), bytes, owner) }?)
    }
}
