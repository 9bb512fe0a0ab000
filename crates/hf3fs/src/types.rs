//! The structures of the headers.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// What `numa` of a buffer in GPU memory says.
pub const GPU_MARK: c_int = -0x6472;
/// Bytes of a mount point, the zero behind it included.
pub const PATH_BYTES: usize = 256;

/// `struct hf3fs_iov`.
#[repr(C)]
pub struct Iov {
    /// Its first byte.
    pub base: *mut u8,
    /// What is behind it.
    pub handle: *mut c_void,
    /// Its id.
    pub id: [u8; 16],
    /// The mount.
    pub mount_point: [c_char; PATH_BYTES],
    /// Its length.
    pub size: usize,
    /// That of a block.
    pub block_size: usize,
    /// The NUMA node, or [`GPU_MARK`].
    pub numa: c_int,
}

/// `struct hf3fs_ior`.
#[repr(C)]
pub struct Ior {
    /// Its memory.
    pub iov: Iov,
    /// What is behind it.
    pub handle: *mut c_void,
    /// The mount.
    pub mount_point: [c_char; PATH_BYTES],
    /// Whether it reads. A byte, as a program's structure may hold any.
    pub for_read: u8,
    /// How many are taken at once.
    pub io_depth: c_int,
    /// Who is served first.
    pub priority: c_int,
    /// How long fewer wait.
    pub timeout: c_int,
    /// See the header.
    pub flags: u64,
}

/// `struct hf3fs_cqe`.
#[repr(C)]
pub struct Cqe {
    /// Which request.
    pub index: i32,
    /// Nobody's.
    pub reserved: i32,
    /// How it ended.
    pub result: i64,
    /// The program's.
    pub userdata: *const c_void,
}

/// `hf3fs_gpu_ipc_handle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GpuHandle {
    /// All of it.
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
