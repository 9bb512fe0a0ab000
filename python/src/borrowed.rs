//! Memory borrowed from Python: of torch, NumPy, CuPy and others that describe their arrays in the same way.
#![allow(unsafe_code, reason = "how long the memory lives only Python knows")]

use onehop_gpu::Region;
use onehop_gpu::cuda::CudaGpu;
use onehop_os::HostMem;
use onehop_proto::GpuAddr;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Error, Result};

/// Memory from Python: its address, its length, and the tensor that keeps it allocated.
pub(crate) struct BorrowedMemory {
    at: u64,
    bytes: usize,
    owner: Py<PyAny>,
    place: BorrowedPlace,
}

/// Where it lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BorrowedPlace {
    Host {
        writable: bool,
    },
    /// On a CUDA GPU, with its ordinal if that is known.
    Gpu(Option<i32>),
}

/// An array's address and bytes, as described by `__array_interface__` or the like of CUDA, and whether it may be written.
fn described(interface: &Bound<'_, PyDict>) -> PyResult<(u64, usize, bool)> {
    let refused = |why: &str| PyErr::from(Error::Request(format!("an array cannot be used: {why}")));
    let entry =
        |name: &str| interface.get_item(name)?.ok_or_else(|| refused("its description lacks an entry"));
    let shape: Vec<u64> = entry("shape")?.extract()?;
    let kind: String = entry("typestr")?.extract()?;
    let (at, read_only): (u64, bool) = entry("data")?.extract()?;
    // A letter, and bytes; of text, characters of four bytes. Objects are pointers that Python counts.
    let size: Option<u64> = kind.get(2..).and_then(|digits| digits.parse().ok());
    let item = match kind.get(1..2) {
        Some("O") | None => None,
        Some("U") => size.and_then(|size| size.checked_mul(4)),
        Some(_) => size,
    };
    let item = item.ok_or_else(|| refused("its type is that of objects, or unknown"))?;
    if let Some(strides) = interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
        let strides: Vec<i64> = strides.extract()?;
        let mut packed = item as i64;
        for (dim, stride) in shape.iter().zip(&strides).rev() {
            if *dim > 1 && *stride != packed {
                return Err(refused("it is not contiguous"));
            }
            packed = packed.saturating_mul(*dim as i64);
        }
    }
    let bytes = shape.iter().try_fold(item, |all, dim| all.checked_mul(*dim));
    let bytes =
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(|| refused("it is too long"))?;
    Ok((at, bytes, !read_only))
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
        Ok(Self { at, bytes, owner: owner.clone().unbind(), place: BorrowedPlace::Gpu(None) })
    }

    /// The memory of a torch tensor, a NumPy or CuPy array, or another one that has their description.
    ///
    /// # Errors
    /// When it is none, is not contiguous, or is to be written and must not be.
    pub(crate) fn of_array(array: &Bound<'_, PyAny>, is_to_be_written: bool) -> PyResult<Self> {
        let owner = array.clone().unbind();
        if array.hasattr("data_ptr")? && array.hasattr("is_cuda")? {
            if !array.call_method0("is_contiguous")?.extract::<bool>()? {
                return Err(Error::Request("a tensor is not contiguous".into()).into());
            }
            let number = |name: &str| -> PyResult<u64> { array.call_method0(name)?.extract() };
            let (at, bytes) = (number("data_ptr")?, number("numel")?.saturating_mul(number("element_size")?));
            let place = if array.getattr("is_cuda")?.extract()? {
                BorrowedPlace::Gpu(array.getattr("device")?.getattr("index")?.extract()?)
            } else if array.getattr("device")?.getattr("type")?.extract::<String>()? == "cpu" {
                BorrowedPlace::Host { writable: true }
            } else {
                return Err(Error::Request("a tensor is neither on the CPU nor on a CUDA GPU".into()).into());
            };
            return Ok(Self { at, bytes: bytes as usize, owner, place });
        }
        if array
            .getattr("dtype")
            .and_then(|dtype| dtype.getattr("hasobject"))
            .is_ok_and(|has| has.is_truthy().unwrap_or(true))
        {
            return Err(Error::Request("an array has objects, which cannot be moved as bytes".into()).into());
        }
        for (name, is_gpu) in [("__cuda_array_interface__", true), ("__array_interface__", false)] {
            let Ok(interface) = array.getattr(name) else { continue };
            let (at, bytes, writable) = described(interface.cast::<PyDict>()?)?;
            if is_to_be_written && !writable {
                return Err(Error::Request("an array is read-only".into()).into());
            }
            let place = if is_gpu { BorrowedPlace::Gpu(None) } else { BorrowedPlace::Host { writable } };
            return Ok(Self { at, bytes, owner, place });
        }
        let kind = array.get_type().name()?;
        Err(Error::Request(format!("{kind} is neither a torch tensor nor an array of NumPy or CuPy")).into())
    }

    /// The same as a region for copies of this GPU, or of the CPU if it is none.
    pub(crate) fn into_region_of(self, gpu: Option<&CudaGpu>, ordinal: i32) -> Result<Region> {
        let refused = |why: String| Err(Error::Request(why));
        match (self.place, gpu) {
            _ if self.bytes == 0 => {
                let page = HostMem::anonymous(1).map_err(onehop_gpu::Error::from)?;
                Ok(Region::of_host(page).slice(0..0)?)
            }
            (BorrowedPlace::Gpu(Some(other)), Some(_)) if other != ordinal => {
                refused(format!("a tensor is on cuda:{other}, and the file was opened for cuda:{ordinal}"))
            }
            (BorrowedPlace::Gpu(_), Some(gpu)) => self.into_region(gpu),
            (BorrowedPlace::Host { writable }, None) => {
                let Self { at, bytes, owner, .. } = self;
                // SAFETY: as for GPU memory in `into_region`: the array keeps its memory allocated as long as it lives.
                let mem = unsafe { HostMem::borrow(at as *mut u8, bytes, writable, owner) };
                Ok(Region::of_host(mem.map_err(onehop_gpu::Error::from)?))
            }
            (BorrowedPlace::Gpu(_), None) => {
                refused("an array is on a GPU, and the file was opened for the memory of the CPU".into())
            }
            (BorrowedPlace::Host { .. }, Some(_)) => refused(format!(
                "an array is in the memory of the CPU, and the file was opened for cuda:{ordinal}"
            )),
        }
    }

    /// The same as a region. The object is dropped when nothing, including the GPU, uses the region.
    pub(crate) fn into_region(self, gpu: &CudaGpu) -> Result<Region> {
        let Self { at, bytes, owner, .. } = self;
        // SAFETY: the memory is in a tensor, as `of_tensor` has checked, which keeps it allocated until it is dropped;
        // `borrow` refuses memory that is not within one allocation of this GPU. This trusts what Python reports: the
        // package's `TorchMemory`, `Table` and `Pages` call it, with tensors and arrays. A program that frees the memory of a live
        // tensor (`resize_` of its storage), or passes an object that only imitates one, breaks this promise.
        Ok(unsafe { gpu.borrow(GpuAddr(at), bytes, owner) }?)
    }
}
