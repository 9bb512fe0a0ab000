//! GPU memory that Python has allocated: torch's, which it counts and shares with other processes as its own.
#![allow(unsafe_code, reason = "how long the memory lives only Python knows")]

use onehop_gpu::Region;
use onehop_gpu::cuda::CudaGpu;
use onehop_proto::GpuAddr;
use pyo3::prelude::*;

use crate::error::{Error, Result};

/// Memory as Python brings it: where it is, how long, and the tensor that keeps it allocated.
pub(crate) struct Brought {
    at: u64,
    bytes: usize,
    owner: Py<PyAny>,
}

impl Brought {
    /// `bytes` bytes at `at`, which are those of a tensor of torch's.
    ///
    /// # Errors
    /// When the tensor begins elsewhere, or is shorter.
    pub(crate) fn of_tensor(at: u64, bytes: usize, owner: &Bound<'_, PyAny>) -> PyResult<Self> {
        let ask = |name: &str| -> PyResult<u64> { owner.call_method0(name)?.extract() };
        let (start, len) = (ask("data_ptr")?, ask("numel")?.saturating_mul(ask("element_size")?));
        if start != at || bytes as u64 > len {
            let why =
                format!("{bytes} bytes at {at:#x} are not those of a tensor of {len} bytes at {start:#x}");
            return Err(Error::Asked(why).into());
        }
        Ok(Self { at, bytes, owner: owner.clone().unbind() })
    }

    /// The same as a region. The object is dropped when nothing uses the region any more, the GPU included.
    pub(crate) fn into_region(self, gpu: &CudaGpu) -> Result<Region> {
        let Self { at, bytes, owner } = self;
        // SAFETY: the memory is that of a tensor, as `of_tensor` has asked it, which keeps it allocated until it is dropped; `borrow`
        // refuses what is not within one allocation of this GPU. Nobody can check what Python says of itself: the package's own
        // `TorchMemory` alone calls this, with a tensor that it has just made. A program that has torch free the memory of a tensor
        // that lives (`resize_` of its storage), or brings an object that only acts as one, breaks this promise.
        Ok(unsafe { gpu.borrow(GpuAddr(at), bytes, owner) }?)
    }
}
