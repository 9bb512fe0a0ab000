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

/// The same as a region. Who clones the region keeps this for as long as the clone is used.
pub(crate) struct Lent {
    region: Region,
    _owner: Py<PyAny>,
}

impl Lent {
    pub(crate) fn new(gpu: &CudaGpu, brought: Brought) -> Result<Self> {
        let Brought { at, bytes, owner } = brought;
        // SAFETY: the owner keeps the memory allocated. It goes with the result, which is kept as long as the region is used.
        let region = unsafe { gpu.lend(GpuAddr(at), bytes) }?;
        Ok(Self { region, _owner: owner })
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }
}
