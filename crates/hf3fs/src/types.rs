//! The structures of the headers.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// The value of `numa` that marks a buffer in GPU memory.
pub const GPU_MARK: c_int = -0x6472;
/// The length of a mount point, with the terminating zero.
pub const PATH_BYTES: usize = 256;

/// `struct hf3fs_iov`.
#[repr(C)]
pub struct Iov {
    /// Its first byte.
    pub base: *mut u8,
    /// Its handle.
    pub handle: *mut c_void,
    /// Its ID.
    pub id: [u8; 16],
    /// The mount point.
    pub mount_point: [c_char; PATH_BYTES],
    /// Its length.
    pub size: usize,
    /// The length of a block.
    pub block_size: usize,
    /// The NUMA node, or [`GPU_MARK`].
    pub numa: c_int,
}

/// `struct hf3fs_ior`.
#[repr(C)]
pub struct Ior {
    /// Its memory.
    pub iov: Iov,
    /// Its handle.
    pub handle: *mut c_void,
    /// The mount point.
    pub mount_point: [c_char; PATH_BYTES],
    /// Whether it reads. A `u8`, because a program's structure may hold any byte.
    pub for_read: u8,
    /// How many entries are taken at once.
    pub io_depth: c_int,
    /// The priority.
    pub priority: c_int,
    /// How long an incomplete batch waits.
    pub timeout: c_int,
    /// See the header.
    pub flags: u64,
}

/// `struct hf3fs_cqe`.
#[repr(C)]
pub struct Cqe {
    /// The request's index.
    pub index: i32,
    /// Reserved.
    pub reserved: i32,
    /// The number of bytes, or a negative error number.
    pub result: i64,
    /// The request's user data.
    pub userdata: *const c_void,
}

/// `hf3fs_gpu_ipc_handle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GpuHandle {
    /// The bytes.
    pub data: [u8; 80],
}

const _: () = {
    assert!(size_of::<Iov>() == 312 && size_of::<Ior>() == 600 && size_of::<Cqe>() == 24);
    assert!(offset_of!(Iov, handle) == 8 && offset_of!(Iov, id) == 16 && offset_of!(Iov, mount_point) == 32);
    assert!(
        offset_of!(Iov, size) == 288 && offset_of!(Iov, block_size) == 296 && offset_of!(Iov, numa) == 304
    );
    assert!(offset_of!(Ior, handle) == 312 && offset_of!(Ior, mount_point) == 320);
    assert!(
        offset_of!(Ior, for_read) == 576
            && offset_of!(Ior, io_depth) == 580
            && offset_of!(Ior, priority) == 584
    );
    assert!(offset_of!(Ior, timeout) == 588 && offset_of!(Ior, flags) == 592);
    assert!(offset_of!(Cqe, result) == 8 && offset_of!(Cqe, userdata) == 16 && size_of::<GpuHandle>() == 80);
};
