//! `onehop.Tensor`: memory with a type and a shape, for export to other libraries.

use std::sync::Arc;

use onehop_gpu::{Emulated, Gpu, Place, Region};
use onehop_load::Dtype;
use onehop_os::DmaMemory;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyTuple};

use crate::dlpack::{self, DataType, Export};
use crate::dtype::{data_type, is_packed};
use crate::error::{Error, Result};
use crate::pool::Lease;

/// Bytes that one copy moves.
const CHUNK: usize = 4 << 20;

/// A tensor in the memory of a GPU, or of the CPU. The memory lives as long as this or any tensor made of it.
#[pyclass(frozen, module = "onehop")]
#[derive(Clone)]
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    /// Its type for export: that of `dtype`, or another of the same width.
    pub carrier: DataType,
    pub shape: Vec<i64>,
    /// In elements.
    pub strides: Vec<i64>,
    /// Its dimensions in elements; for a part of a packed tensor, in bytes.
    pub logical: Vec<u64>,
    /// From its first byte to its last.
    pub memory: Region,
    /// In a bounded stream, the segment that holds it.
    pub lease: Option<Arc<Lease>>,
    pub device: dlpack::DlDevice,
}

/// An empty list with a capacity for these bytes.
fn list_for(bytes: usize) -> onehop_gpu::Result<Vec<u8>> {
    let mut list = Vec::new();
    list.try_reserve_exact(bytes).map_err(|error| onehop_os::Error::System {
        call: format!("allocating {bytes} bytes"),
        source: error.into(),
        hint: "",
    })?;
    Ok(list)
}

/// The strides of a tensor with contiguous elements.
pub(crate) fn packed_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

impl Tensor {
    /// A nameless tensor of bytes.
    pub(crate) fn of_bytes(memory: Region, device: dlpack::DlDevice) -> Self {
        let bytes = memory.len();
        Self {
            name: String::new(),
            dtype: Dtype::U8,
            carrier: data_type(Dtype::U8),
            shape: vec![bytes as i64],
            strides: vec![1],
            logical: vec![bytes as u64],
            memory,
            lease: None,
            device,
        }
    }

    fn width(&self) -> usize {
        usize::from(self.carrier.bits / 8)
    }

    fn elements(&self) -> usize {
        self.shape.iter().map(|n| *n as usize).product()
    }

    /// The first byte's address, as the device's users see it.
    fn address(&self) -> u64 {
        self.memory.host().map_or(self.memory.addr().0, |host| host.host_ptr() as u64)
    }

    /// A copy in the CPU's memory, with the same strides.
    fn on_cpu(&self) -> onehop_gpu::Result<Region> {
        let copy = Emulated::private().alloc(Place::Vram, self.memory.len().max(1))?;
        let mut chunk = vec![0; CHUNK.min(self.memory.len())];
        for at in (0..self.memory.len()).step_by(CHUNK) {
            let chunk = &mut chunk[..CHUNK.min(self.memory.len() - at)];
            self.memory.read(at, chunk)?;
            copy.write(at, chunk)?;
        }
        Ok(copy)
    }

    fn bytes(&self) -> onehop_gpu::Result<Vec<u8>> {
        let mut all = list_for(self.memory.len())?;
        all.resize(self.memory.len(), 0);
        self.memory.read(0, &mut all)?;
        if self.is_contiguous() {
            return Ok(all);
        }
        let mut packed = list_for(self.nbytes())?;
        self.gather(0, 0, &all, &mut packed);
        Ok(packed)
    }

    /// Appends the elements of dimension `dim` and those within it, from element `at` of `all` on.
    fn gather(&self, dim: usize, at: usize, all: &[u8], packed: &mut Vec<u8>) {
        let width = self.width();
        let (Some(size), Some(stride)) = (self.shape.get(dim), self.strides.get(dim)) else {
            packed.extend_from_slice(all.get(at * width..(at + 1) * width).unwrap_or_default());
            return;
        };
        let (size, stride) = (*size as usize, *stride as usize);
        if dim + 1 == self.shape.len() && stride == 1 {
            packed.extend_from_slice(all.get(at * width..(at + size) * width).unwrap_or_default());
            return;
        }
        (0..size).for_each(|i| self.gather(dim + 1, at + i * stride, all, packed));
    }

    fn export(&self, copied: Option<Region>) -> Export {
        let (device, data) = match &copied {
            Some(copy) => (dlpack::DlDevice::CPU, copy.host().map_or(0, |host| host.host_ptr() as u64)),
            None => (self.device, self.address()),
        };
        Export {
            device,
            data,
            copied: copied.is_some(),
            lease: if copied.is_some() { None } else { self.lease.clone() },
            memory: copied.unwrap_or_else(|| self.memory.clone()),
            dtype: self.carrier,
            shape: self.shape.clone(),
            strides: self.strides.clone(),
        }
    }

    /// Checks the consumer's stream. All bytes arrive before a tensor is handed out, because the load waits for the
    /// copies, so no stream has to wait.
    fn check_stream(&self, stream: Option<i64>) -> PyResult<()> {
        match stream {
            None | Some(-1) => Ok(()),
            Some(1..) if self.device != dlpack::DlDevice::CPU => Ok(()),
            Some(0) if self.device != dlpack::DlDevice::CPU => Err(PyValueError::new_err(
                "stream 0 could be either of CUDA's two default streams: 1 is the legacy one, 2 that of the thread",
            )),
            Some(stream) => Err(PyValueError::new_err(format!("{} has no stream {stream}", self.device()))),
        }
    }
}

#[pymethods]
impl Tensor {
    /// Its name in the model.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements, as in model files: F32, BF16, F8_E4M3, Q4_K.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Its dimensions, slowest first; for packed types, in bytes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Its dimensions in elements, packed or not; for a part of a packed tensor, in bytes.
    #[getter]
    fn logical_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.logical)
    }

    /// From element to element in each dimension, in elements.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    /// The bytes of its elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.elements() * self.width()
    }

    /// Its device: cuda:0, or cpu.
    #[getter]
    fn device(&self) -> String {
        self.device.name()
    }

    /// Whether its elements share bytes, so that it is exported as bytes.
    #[getter]
    fn is_packed(&self) -> bool {
        is_packed(self.dtype)
    }

    /// Whether its elements are contiguous.
    #[getter]
    fn is_contiguous(&self) -> bool {
        let packed = packed_strides(&self.shape);
        let same = |(dim, size): (usize, &i64)| *size == 1 || self.strides[dim] == packed[dim];
        self.elements() == 0 || self.shape.iter().enumerate().all(same)
    }

    /// The same memory, exported as another type of the same width: for libraries that do not know this one.
    #[pyo3(signature = (dtype, /))]
    fn view_as(&self, dtype: &str) -> Result<Self> {
        let other: Dtype =
            dtype.parse().map_err(|e: onehop_load::UnknownDtype| Error::Request(e.to_string()))?;
        let carrier = data_type(other);
        if is_packed(other) || carrier.bits != self.carrier.bits {
            return Err(Error::Request(format!(
                "{other} does not have the width of {}, the type of {:?}",
                self.dtype, self.name
            )));
        }
        Ok(Self { carrier, ..self.clone() })
    }

    /// A copy of its bytes, in the order of its elements.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.bytes()).map_err(Error::from)?;
        PyBytes::new_with(py, bytes.len(), |to| {
            to.copy_from_slice(&bytes);
            Ok(())
        })
    }

    /// A DLPack capsule of its memory. It is copied if dl_device requests the CPU, or copy a copy there.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        self.check_stream(stream)?;
        let here = (self.device.kind, self.device.id);
        let cpu = (dlpack::DlDevice::CPU.kind, dlpack::DlDevice::CPU.id);
        let wanted = dl_device.unwrap_or(here);
        let copied = match (wanted == here, copy) {
            (true, None | Some(false)) => None,
            (false, Some(false)) => {
                return Err(PyBufferError::new_err("another device needs a copy, and copy=False forbids it"));
            }
            _ if wanted == cpu => Some(py.detach(|| self.on_cpu()).map_err(Error::from)?),
            _ => {
                return Err(PyBufferError::new_err(format!(
                    "onehop copies from {} only to the CPU: import the tensor without a copy, and copy that",
                    self.device()
                )));
            }
        };
        dlpack::capsule(py, self.export(copied), max_version)
    }

    /// A DLPack capsule of its memory as it is, without stream checks: all bytes have arrived.
    fn capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        dlpack::capsule(py, self.export(None), None)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "an onehop.Tensor is memory of this process and cannot be pickled: convert it to a framework's tensor",
        ))
    }

    /// Its device's numbers in DLPack.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device.kind, self.device.id)
    }

    fn __repr__(&self) -> String {
        let Self { name, dtype, shape, .. } = self;
        format!("<onehop.Tensor {name:?} {dtype} {shape:?} on {}>", self.device())
    }
}
