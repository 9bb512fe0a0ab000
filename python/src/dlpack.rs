//! Tensors for other libraries, without a copy: DLPack capsules, with and without a version.
//!
//! A capsule holds a managed tensor: a description of the memory, and a function that the consumer calls after its last
//! use, on any thread, with the GIL or without. Ours drops a [`Region`], and with the last one the arena.
#![allow(unsafe_code, reason = "DLPack is a C ABI")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use onehop_gpu::Region;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::pool::Lease;

/// The version of these structures.
pub(crate) const VERSION: (u32, u32) = (1, 1);

/// The producer made a copy for this consumer alone.
const IS_COPIED: u64 = 1 << 1;

/// DLDevice: a kind of memory, and its number.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DlDevice {
    pub kind: i32,
    pub id: i32,
}

impl DlDevice {
    /// Its name in Python.
    pub(crate) fn name(self) -> String {
        if self == Self::CPU { "cpu".into() } else { format!("cuda:{}", self.id) }
    }

    pub(crate) const CPU: Self = Self { kind: 1, id: 0 };

    pub(crate) const fn cuda(ordinal: i32) -> Self {
        Self { kind: 2, id: ordinal }
    }
}

/// DLDataType.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// DLTensor.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    dims: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

// SAFETY: a type and no call. Consumers call it once, with the pointer from the capsule.
type Deleter<M> = unsafe extern "C" fn(*mut M);

/// DLManagedTensor.
#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<Deleter<Self>>,
}

/// DLManagedTensorVersioned.
#[repr(C)]
struct Versioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<Deleter<Self>>,
    flags: u64,
    tensor: DlTensor,
}

/// The contents of a capsule.
pub(crate) struct Export {
    /// Kept until the consumer is done.
    pub memory: Region,
    pub lease: Option<Arc<Lease>>,
    /// Where the first element is: an address of the device.
    pub data: u64,
    pub device: DlDevice,
    pub dtype: DataType,
    pub shape: Vec<i64>,
    /// From element to element in each dimension, in elements.
    pub strides: Vec<i64>,
    pub copied: bool,
}

/// A managed tensor and what it points to. Consumers point to the managed tensor, so it comes first.
#[repr(C)]
struct ManagedTensor<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _memory: Region,
    _lease: Option<Arc<Lease>>,
}

trait CapsuleLayout: Sized {
    /// The capsule's name until a consumer has taken the tensor.
    const NAME: &CStr;
    fn new(tensor: DlTensor, flags: u64, minor: u32) -> Self;
    fn tensor(&mut self) -> &mut DlTensor;
    fn deleter(&self) -> Option<Deleter<Self>>;
}

impl CapsuleLayout for Managed {
    const NAME: &CStr = c"dltensor";

    fn new(tensor: DlTensor, _flags: u64, _minor: u32) -> Self {
        Self { tensor, context: std::ptr::null_mut(), deleter: Some(delete::<Self>) }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.tensor
    }

    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }
}

impl CapsuleLayout for Versioned {
    const NAME: &CStr = c"dltensor_versioned";

    fn new(tensor: DlTensor, flags: u64, minor: u32) -> Self {
        let version = [VERSION.0, minor];
        Self { version, context: std::ptr::null_mut(), deleter: Some(delete::<Self>), flags, tensor }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.tensor
    }

    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }
}

/// A capsule for a consumer that supports this version of DLPack, or only unversioned capsules.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    export: Export,
    version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyCapsule>> {
    match version {
        Some((major, minor)) if major >= VERSION.0 => {
            let minor = if major > VERSION.0 { VERSION.1 } else { minor.min(VERSION.1) };
            wrap::<Versioned>(py, export, minor)
        }
        _ => wrap::<Managed>(py, export, 0),
    }
}

fn wrap<M: CapsuleLayout>(py: Python<'_>, export: Export, minor: u32) -> PyResult<Bound<'_, PyCapsule>> {
    let Export { memory, lease, data, device, dtype, shape, strides, copied } = export;
    let tensor = DlTensor {
        data: data as *mut c_void,
        device,
        dims: shape.len() as i32,
        dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = M::new(tensor, if copied { IS_COPIED } else { 0 }, minor);
    let boxed =
        Box::into_raw(Box::new(ManagedTensor { managed, shape, strides, _memory: memory, _lease: lease }));
    // SAFETY: only this function has the box until the capsule does.
    let tensor = unsafe { (*boxed).managed.tensor() };
    // SAFETY: as above; the vectors are not touched again, so their elements stay in place.
    (tensor.shape, tensor.strides) = unsafe { ((*boxed).shape.as_mut_ptr(), (*boxed).strides.as_mut_ptr()) };
    // SAFETY: a box is never null.
    let pointer = unsafe { NonNull::new_unchecked(boxed.cast::<c_void>()) };
    // SAFETY: the pointer is valid until the deleter is called, which the destructor does if no consumer took it.
    let capsule =
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, M::NAME, Some(destroy::<M>)) };
    if capsule.is_err() {
        // SAFETY: there is no capsule, so only this has the pointer.
        unsafe { delete::<M>(boxed.cast()) };
    }
    capsule
}

/// Called by consumers, once.
///
/// # Safety
/// `managed` came from [`wrap`], and is no longer used.
// SAFETY: a Deleter, which only wrap exports.
unsafe extern "C" fn delete<M: CapsuleLayout>(managed: *mut M) {
    // SAFETY: the managed tensor is the first field of the ManagedTensor that wrap boxed.
    drop(unsafe { Box::from_raw(managed.cast::<ManagedTensor<M>>()) });
}

/// Called by Python when the capsule is freed. A consumer that took the tensor has renamed it.
///
/// # Safety
/// `capsule` is one of [`wrap`]'s, and this thread has the GIL.
// SAFETY: a destructor, which only wrap exports.
unsafe extern "C" fn destroy<M: CapsuleLayout>(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule lives for as long as its destructor runs.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: it has this name, so it still owns the managed tensor.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) }.cast::<M>();
    // SAFETY: as above.
    if let Some(deleter) = unsafe { (*managed).deleter() } {
        // SAFETY: no consumer took it, so this is the one call.
        unsafe { deleter(managed) };
    }
}
