//! libonehop.so: what `include/onehop/onehop.h` and `sdr.h` declare. Callers open a drive and a GPU, and export a queue
//! with data memory to kernels. Each is a handle, which every call looks up in a table. The functions only wrap what
//! Rust programs have in `onehop_drive`, `onehop_transfer` and `onehop_sdr`.
//!
//! Two things are global, as C programs expect: that table, and the message of the calling thread's last error.

mod array;
mod error;
mod export;
mod handles;
mod objects;
mod pages;
mod sdr;
mod transfer;

use std::ffi::{CStr, c_char, c_int, c_void};

use onehop_device::LIBRARY_PTX;
use onehop_proto::kernel::DeviceOp;

use error::{Error, Result, guard, guard_or};
use export::{ExportInfo, ExportOptions, ExportedQueueObject};
use handles::{Drive, Gpu};
use objects::{close, object, wait_until_unused};

/// The message of this thread's last error; empty if there was none. Valid until its next call of onehop.
// SAFETY: the name is unique to this project, as all below.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_last_error() -> *const c_char {
    error::last()
}

/// The PTX of the functions for kernels, zero-terminated, valid while the library is loaded.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_library_ptx() -> *const c_char {
    static TEXT: [u8; LIBRARY_PTX.len() + 1] = {
        let mut text = [0; LIBRARY_PTX.len() + 1];
        text.split_at_mut(LIBRARY_PTX.len()).0.copy_from_slice(LIBRARY_PTX.as_bytes());
        text
    };
    TEXT.as_ptr().cast()
}

/// A string from the caller.
///
/// # Safety
/// Null, or a string that ends in a zero byte and stays as long as the result is used.
unsafe fn text<'a>(at: *const c_char, what: &'static str) -> Result<&'a str> {
    if at.is_null() {
        return Err(Error::Null(what));
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(at) }.to_str().map_err(|_| Error::NotUtf8(what))
}

/// Creates an object and stores its handle.
///
/// # Safety
/// `out` is null, or a place for a pointer.
unsafe fn store_handle<T: Send + Sync + 'static>(
    out: *mut *mut T,
    what: &'static str,
    make: impl FnOnce() -> Result<T>,
) -> c_int {
    guard(|| {
        if out.is_null() {
            return Err(Error::Null(what));
        }
        // SAFETY: the caller's promise. Null until the object exists, so that nobody closes a handle that was never
        // made.
        unsafe { out.write(std::ptr::null_mut()) };
        let made = objects::handle(make()?)?;
        // SAFETY: as above.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Opens a drive.
///
/// # Safety
/// `name` is null or a string, `drive` null or a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_drive_open(
    name: *const c_char,
    writable: c_int,
    drive: *mut *mut Drive,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { store_handle(drive, "drive", || Drive::open(text(name, "name")?, writable != 0)) }
}

/// Makes all writes durable.
///
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_drive_flush(drive: *const Drive, nsid: u32) -> c_int {
    guard(|| object(drive, "drive")?.flush(nsid))
}

/// Closes a drive; exported queues keep it open.
///
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_drive_close(drive: *mut Drive) {
    guard(|| close(drive, "drive").map(drop));
}

/// Opens a GPU.
///
/// # Safety
/// `name` is null or a string, `gpu` null or a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_gpu_open(name: *const c_char, gpu: *mut *mut Gpu) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { store_handle(gpu, "gpu", || Gpu::open(text(name, "name")?)) }
}

/// Closes a GPU; exported queues keep it open.
///
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_gpu_close(gpu: *mut Gpu) {
    guard(|| close(gpu, "gpu").map(drop));
}

/// Exports a new queue of a drive, with data memory, to kernels of a GPU.
///
/// # Safety
/// `options` is null or a structure; `exported` is null or a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lend(
    drive: *const Drive,
    gpu: *const Gpu,
    options: *const ExportOptions,
    exported: *mut *mut ExportedQueueObject,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        store_handle(exported, "lent", || {
            let options = options.as_ref().copied().unwrap_or_default();
            ExportedQueueObject::new(&*object(drive, "drive")?, &*object(gpu, "gpu")?, &options)
        })
    }
}

/// The queue as kernels take it; null if `exported` is not an open handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_queue(exported: *const ExportedQueueObject) -> *const c_void {
    guard_or(std::ptr::null(), || Ok(object(exported, "lent")?.queue() as *const c_void))
}

/// The data memory's address for kernels; null if `exported` is not an open handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_data(exported: *const ExportedQueueObject) -> *mut c_void {
    guard_or(std::ptr::null_mut(), || Ok(object(exported, "lent")?.data() as *mut c_void))
}

/// Describes an exported queue.
///
/// # Safety
/// `info` is null, or a place for it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_describe(
    exported: *const ExportedQueueObject,
    info: *mut ExportInfo,
) -> c_int {
    guard(|| {
        if info.is_null() {
            return Err(Error::Null("info"));
        }
        // SAFETY: the caller's promise.
        unsafe { info.write(object(exported, "lent")?.info()) };
        Ok(())
    })
}

/// Checks that the host still monitors the queue.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_check(exported: *const ExportedQueueObject) -> c_int {
    guard(|| object(exported, "lent")?.check())
}

/// Copies bytes out of the data memory.
///
/// # Safety
/// `to` is null, or has room for them.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_data_read(
    exported: *const ExportedQueueObject,
    offset: u64,
    to: *mut c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        let exported = object(exported, "lent")?;
        if to.is_null() {
            return Err(Error::Null("to"));
        }
        let offset = exported.check_range(offset, bytes)?;
        // Zeroed first: the caller's memory may be uninitialised.
        // SAFETY: the caller's promise. `check_range` has found the bytes within a region, so their number is no more
        // than isize::MAX.
        let out = unsafe {
            to.cast::<u8>().write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes)
        };
        exported.read(offset, out)
    })
}

/// Copies bytes into the data memory.
///
/// # Safety
/// `from` is null, or has that many, initialised, outside of the data memory; nobody writes them during the call.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_data_write(
    exported: *const ExportedQueueObject,
    offset: u64,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        let exported = object(exported, "lent")?;
        if from.is_null() {
            return Err(Error::Null("from"));
        }
        let offset = exported.check_range(offset, bytes)?;
        // SAFETY: the caller's promise; a region holds as many bytes.
        let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        exported.write(offset, data)
    })
}

/// The result of `onehop_read` on one thread of the emulated GPU.
///
/// # Safety
/// `answer` is null, or a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_read(
    exported: *const ExportedQueueObject,
    lba: u64,
    blocks: u32,
    offset: u64,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { emulate(exported, DeviceOp::Read, (lba, blocks, offset), answer) }
}

/// The result of `onehop_write` on one thread of the emulated GPU.
///
/// # Safety
/// As for [`onehop_emulated_read`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_write(
    exported: *const ExportedQueueObject,
    lba: u64,
    blocks: u32,
    offset: u64,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { emulate(exported, DeviceOp::Write, (lba, blocks, offset), answer) }
}

/// # Safety
/// As for [`onehop_emulated_read`].
unsafe fn emulate(
    exported: *const ExportedQueueObject,
    op: DeviceOp,
    what: (u64, u32, u64),
    answer: *mut c_int,
) -> c_int {
    guard(|| {
        if answer.is_null() {
            return Err(Error::Null("answer"));
        }
        // SAFETY: the caller's promise.
        unsafe { answer.write(object(exported, "lent")?.emulate(op, what)?.code()) };
        Ok(())
    })
}

/// Ends all calls of kernels.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_stop(exported: *const ExportedQueueObject) -> c_int {
    guard(|| {
        object(exported, "lent")?.stop();
        Ok(())
    })
}

/// Closes an exported queue.
///
/// # Safety
/// No kernel uses the queue or its data memory any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_close(exported: *mut ExportedQueueObject) -> c_int {
    guard(|| {
        let Some(exported) = close(exported, "lent")? else { return Ok(()) };
        // Ends calls in progress.
        exported.stop();
        wait_until_unused(exported, "lent")?.close()
    })
}
