//! What is behind a buffer's handle: it is a number that [`HANDLES`] knows, so that one that was destroyed is an error.

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
    /// Who has this may import it.
    pub secret: [u8; 16],
    /// Whether the memory is the program's own, which may free it.
    pub wrapped: bool,
    /// Whether this process registered it with the daemon, and has not withdrawn it yet.
    pub own: AtomicBool,
}

impl GpuBuffer {
    /// A program may free memory of its own that is in use as a buffer.
    ///
    /// # Errors
    /// When it has done so.
    pub fn check_current(&self) -> Result<()> {
        if self.wrapped && !self.memory.is_current()? { Err(Error::Stale) } else { Ok(()) }
    }

    /// Takes its name from the daemon. Another buffer may get the name then.
    ///
    /// # Errors
    /// When the daemon has none of this name, or fails.
    pub fn unlink(&self) -> Result<()> {
        self.mount.withdraw(&self.name)?;
        self.own.store(false, Ordering::Release);
        Ok(())
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        if self.own.load(Ordering::Acquire) {
            // A daemon that is gone has forgotten it.
            let _ = self.mount.withdraw(&self.name);
        }
    }
}

/// What there is to say of a buffer.
pub struct Described {
    /// Its first byte, or its address on the GPU.
    pub base: *mut u8,
    /// Its id.
    pub id: Id,
    /// Its length.
    pub size: usize,
    /// That of a block.
    pub block_size: usize,
    /// The NUMA node, or the mark of GPU memory.
    pub numa: c_int,
}

/// Fills in the caller's structure.
///
/// # Safety
/// `iov` is a place for one.
pub unsafe fn fill(iov: *mut Iov, handle: usize, mount_point: &[c_char; PATH_BYTES], described: &Described) {
    let Described { base, id, size, block_size, numa } = *described;
    let handle = std::ptr::without_provenance_mut(handle);
    let filled = Iov { base, handle, id: id.0, mount_point: *mount_point, size, block_size, numa };
    // SAFETY: the caller's promise.
    unsafe { iov.write(filled) };
}

/// The number of a caller's handle, as it stands in a structure.
pub fn number(handle: *mut c_void) -> usize {
    handle.addr()
}

/// The buffer in GPU memory behind a caller's structure; none where it is wrapped, destroyed, of host memory, or null.
///
/// # Safety
/// Null, or a structure.
pub unsafe fn gpu_of(iov: *const Iov) -> Option<Arc<GpuBuffer>> {
    // SAFETY: the caller's promise.
    let iov = unsafe { iov.as_ref() }?;
    watch_forks();
    if iov.numa == GPU_MARK { HANDLES.get(number(iov.handle)) } else { None }
}

/// A buffer of either memory.
pub enum AnyBuffer {
    /// In host memory.
    Host(Arc<Buffer>),
    /// In GPU memory.
    Gpu(Arc<GpuBuffer>),
}

impl AnyBuffer {
    /// The one that a handle names.
    pub fn get(handle: usize) -> Option<Self> {
        HANDLES.get(handle).map(Self::Host).or_else(|| HANDLES.get(handle).map(Self::Gpu))
    }

    /// The same, and its handle names nothing from now on.
    pub fn remove(handle: usize) -> Option<Self> {
        HANDLES.remove(handle).map(Self::Host).or_else(|| HANDLES.remove(handle).map(Self::Gpu))
    }
}
