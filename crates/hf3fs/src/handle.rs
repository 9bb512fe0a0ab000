//! Buffers behind handles. A handle is a key of [`HANDLES`], so a destroyed handle is an error.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_usrbio::buffer::Buffer;
use onehop_usrbio::gpu::SharedGpuMemory;
use onehop_usrbio::mount::Mount;
use onehop_usrbio::{Error, Id, Name, Result};

use crate::state::{HANDLES, watch_forks};
use crate::types::{GPU_MARK, Iov, PATH_BYTES};

/// A buffer in GPU memory.
pub struct GpuBuffer {
    /// The memory.
    pub memory: SharedGpuMemory,
    /// Its name in the mount.
    pub name: Name,
    /// The mount.
    pub mount: Arc<Mount>,
    /// The number of the GPU.
    pub device: c_int,
    /// The secret that allows to import it.
    pub secret: [u8; 16],
    /// Whether the program allocated the memory, and may free it.
    pub wrapped: bool,
    /// Whether this process registered it with the daemon, and has not withdrawn it.
    pub own: AtomicBool,
}

impl GpuBuffer {
    /// Checks that the program has not freed memory that it wrapped.
    ///
    /// # Errors
    /// When it has.
    pub fn check_current(&self) -> Result<()> {
        if self.wrapped && !self.memory.is_current()? { Err(Error::Stale) } else { Ok(()) }
    }

    /// Unregisters its name. Another buffer may use the name then.
    ///
    /// # Errors
    /// When the daemon does not know the name, or fails.
    pub fn unlink(&self) -> Result<()> {
        self.mount.withdraw(&self.name)?;
        self.own.store(false, Ordering::Release);
        Ok(())
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        if self.own.load(Ordering::Acquire) {
            // Fails if the daemon is gone; it has forgotten the buffer then.
            let _ = self.mount.withdraw(&self.name);
        }
    }
}

/// The fields of an [`Iov`].
pub struct IovFields {
    /// Its first byte, or its address on the GPU.
    pub base: *mut u8,
    /// Its ID.
    pub id: Id,
    /// Its length.
    pub size: usize,
    /// The length of a block.
    pub block_size: usize,
    /// The NUMA node, or [`GPU_MARK`].
    pub numa: c_int,
}

/// Fills in the caller's structure.
///
/// # Safety
/// `iov` is writable.
pub unsafe fn fill(iov: *mut Iov, handle: usize, mount_point: &[c_char; PATH_BYTES], fields: &IovFields) {
    let IovFields { base, id, size, block_size, numa } = *fields;
    let handle = std::ptr::without_provenance_mut(handle);
    let filled = Iov { base, handle, id: id.0, mount_point: *mount_point, size, block_size, numa };
    // SAFETY: the caller's promise.
    unsafe { iov.write(filled) };
}

/// The number of a handle in a caller's structure.
pub fn number(handle: *mut c_void) -> usize {
    handle.addr()
}

/// The GPU buffer of a caller's structure; `None` if it is wrapped, destroyed, in host memory, or null.
///
/// # Safety
/// Null, or a structure.
pub unsafe fn gpu_of(iov: *const Iov) -> Option<Arc<GpuBuffer>> {
    // SAFETY: the caller's promise.
    let iov = unsafe { iov.as_ref() }?;
    watch_forks();
    if iov.numa == GPU_MARK { HANDLES.get(number(iov.handle)) } else { None }
}

/// A buffer in either memory.
pub enum AnyBuffer {
    /// In host memory.
    Host(Arc<Buffer>),
    /// In GPU memory.
    Gpu(Arc<GpuBuffer>),
}

impl AnyBuffer {
    /// The buffer of a handle.
    pub fn get(handle: usize) -> Option<Self> {
        HANDLES.get(handle).map(Self::Host).or_else(|| HANDLES.get(handle).map(Self::Gpu))
    }

    /// The buffer of a handle, which becomes invalid.
    pub fn remove(handle: usize) -> Option<Self> {
        HANDLES.remove(handle).map(Self::Host).or_else(|| HANDLES.remove(handle).map(Self::Gpu))
    }
}
