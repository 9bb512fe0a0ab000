//! GPU memory borrowed from Python: torch allocates it, counts it and can share it with other processes.
#![allow(unsafe_code, reason = "how long the memory lives only Python knows")]

use onehop_gpu::Region;
use onehop_gpu::cuda::CudaGpu;
use onehop_proto::GpuAddr;
use pyo3::prelude::*;

use crate::error::{Error, Result};

/// Memory from Python: its address, its length, and the tensor that keeps it allocated.
pub(crate) struct BorrowedMemory {
    at: u64,
    bytes: usize,
    owner: Py<PyAny>,
}

impl BorrowedMemory {
    /// `bytes` bytes at `at`, in a torch tensor.
    ///
    /// # Errors
    /// When the tensor begins elsewhere, or is shorter.
    pub(crate) fn of_tensor(at: u64, bytes: usize, owner: &Bound<'_, PyAny>) -> PyResult<Self> {
        let call = |name: &str| -> PyResult<u64> { owner.call_method0(name)?.extract() };
        let (start, len) = (call("data_ptr")?, call("numel")?.saturating_mul(call("element_size")?));
        if start != at || bytes as u64 > len {
            let why =
                format!("{bytes} bytes at {at:#x} are not those of a tensor of {len} bytes at {start:#x}");
            return Err(Error::Request(why).into());
        }
        Ok(Self { at, bytes, owner: owner.clone().unbind() })
    }

    /// The same as a region. The object is dropped when nothing, including the GPU, uses the region.
    pub(crate) fn into_region(self, gpu: &CudaGpu) -> Result<Region> {
        let Self { at, bytes, owner } = self;
        // SAFETY: the memory is in a tensor, as `of_tensor` has checked, which keeps it allocated until it is dropped;
        // `borrow` refuses memory that is not within one allocation of this GPU. This trusts what Python reports: the
        // package's `TorchMemory` and `Table` call it, with torch tensors. A program that frees the memory of a live
        // tensor (`resize_` of its storage), or passes an object that only imitates one, breaks this promise.
        Ok(unsafe { gpu.borrow(GpuAddr(at), bytes, owner) }?)
    }
}
