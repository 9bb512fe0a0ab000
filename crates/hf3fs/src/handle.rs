//! What is behind a buffer's handle.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use onehop_usrbio::buffer::Buffer;
use onehop_usrbio::gpu::Memory;
use onehop_usrbio::mount::Mount;
use onehop_usrbio::{Id, Name};

use crate::types::{GPU_MARK, Iov, PATH_BYTES};

/// A buffer of this process.
pub enum Handle {
    /// In host memory.
    Host(Buffer),
    /// In GPU memory.
    Gpu(GpuBuffer),
}

/// One in GPU memory.
pub struct GpuBuffer {
    /// The memory.
    pub memory: Memory,
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
    /// Whether the daemon was told by this process, and is told when it goes.
    pub own: bool,
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        if self.own {
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
pub unsafe fn fill(
    iov: *mut Iov,
    handle: Option<Handle>,
    mount_point: &[c_char; PATH_BYTES],
    described: &Described,
) {
    let handle =
        handle.map_or(std::ptr::null_mut(), |handle| Box::into_raw(Box::new(handle)).cast::<c_void>());
    let Described { base, id, size, block_size, numa } = *described;
    let filled = Iov { base, handle, id: id.0, mount_point: *mount_point, size, block_size, numa };
    // SAFETY: the caller's promise.
    unsafe { iov.write(filled) };
}

/// What is behind a caller's structure; none where it was wrapped, or is null.
///
/// # Safety
/// Null, or a structure that a call here filled in and whose buffer was not destroyed.
pub unsafe fn of<'a>(iov: *const Iov) -> Option<&'a Handle> {
    // SAFETY: the caller's promise.
    let iov = unsafe { iov.as_ref() }?;
    // SAFETY: handles are made by `fill` alone.
    unsafe { iov.handle.cast::<Handle>().as_ref() }
}

/// The same, of GPU memory alone. A structure without its mark is not looked into.
///
/// # Safety
/// As for [`of`].
pub unsafe fn gpu_of<'a>(iov: *const Iov) -> Option<&'a GpuBuffer> {
    // SAFETY: the caller's promise.
    let marked = unsafe { iov.as_ref() }.is_some_and(|iov| iov.numa == GPU_MARK);
    // SAFETY: as above.
    match if marked { unsafe { of(iov) } } else { None } {
        Some(Handle::Gpu(gpu)) => Some(gpu),
        _ => None,
    }
}

/// Takes what is behind a caller's structure out of it.
///
/// # Safety
/// As for [`of`]; nobody uses the buffer any more.
pub unsafe fn take(iov: *mut Iov) -> Option<Box<Handle>> {
    // SAFETY: the caller's promise.
    let iov = unsafe { iov.as_mut() }?;
    let handle = std::mem::replace(&mut iov.handle, std::ptr::null_mut());
    // SAFETY: handles are made by `fill` alone, and this one was taken out just now.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle.cast::<Handle>()) })
}
