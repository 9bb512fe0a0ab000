//! The structures of the API, as C lays them out.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

/// `CUfileError_t`, returned by value.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CuFileError {
    /// 0, or one of cuFile's numbers.
    pub err: c_int,
    /// CUDA's number, if `err` says that CUDA failed.
    pub cuda: c_int,
}

impl CuFileError {
    pub(crate) const SUCCESS: Self = Self { err: 0, cuda: 0 };
}

/// `CUfileDescr_t`.
#[repr(C)]
pub struct Description {
    /// 1 for a file descriptor.
    pub kind: c_int,
    /// The descriptor, in the low half of a field that may be a pointer.
    pub handle: FdOrPointer,
    /// For file systems in user space.
    pub operations: *const c_void,
}

/// The descriptor, or a pointer.
#[repr(C)]
#[derive(Clone, Copy)]
pub union FdOrPointer {
    /// For kind 1.
    pub fd: c_int,
    /// For other kinds.
    pub pointer: *mut c_void,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct DriverProperties {
    pub nvfs_major: u32,
    pub nvfs_minor: u32,
    pub poll_threshold_kb: usize,
    pub max_direct_io_kb: usize,
    pub status_flags: u32,
    pub control_flags: u32,
    pub feature_flags: u32,
    pub max_cache_kb: u32,
    pub per_buffer_cache_kb: u32,
    pub max_pinned_kb: u32,
    pub max_batch: u32,
    pub batch_timeout_ms: u32,
}

/// `CUfileIOParams_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct IoParameters {
    pub mode: c_int,
    pub base: *mut c_void,
    pub file_offset: i64,
    pub buffer_offset: i64,
    pub size: usize,
    pub handle: *mut c_void,
    pub opcode: c_int,
    pub cookie: *mut c_void,
}

/// `CUfileIOEvents_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct IoEvent {
    pub cookie: *mut c_void,
    pub status: c_int,
    pub result: usize,
}

const _: () = {
    assert!(size_of::<CuFileError>() == 8 && offset_of!(CuFileError, cuda) == 4);
    assert!(size_of::<Description>() == 24 && offset_of!(Description, handle) == 8);
    assert!(offset_of!(Description, operations) == 16);
    assert!(size_of::<DriverProperties>() == 56 && offset_of!(DriverProperties, poll_threshold_kb) == 8);
    assert!(offset_of!(DriverProperties, status_flags) == 24);
    assert!(offset_of!(DriverProperties, feature_flags) == 32);
    assert!(offset_of!(DriverProperties, batch_timeout_ms) == 52);
    assert!(size_of::<IoParameters>() == 64 && offset_of!(IoParameters, base) == 8);
    assert!(offset_of!(IoParameters, size) == 32 && offset_of!(IoParameters, handle) == 40);
    assert!(offset_of!(IoParameters, opcode) == 48 && offset_of!(IoParameters, cookie) == 56);
    assert!(size_of::<IoEvent>() == 24 && offset_of!(IoEvent, status) == 8);
    assert!(offset_of!(IoEvent, result) == 16);
};
