//! libonehop.so: what `include/onehop/onehop.h` and `sdr.h` declare. A drive is opened, a GPU, a queue with data memory is lent to
//! kernels; each is a handle, looked up in a table for every call. Nothing here does more than pass on what Rust programs
//! have in `onehop_drive`.
//!
//! Two things are global, as C programs expect: that table, and the words of the calling thread's last error.

mod error;
mod export;
mod handles;
mod objects;
mod sdr;
mod transfer;

use std::ffi::{CStr, c_char, c_int, c_void};

use onehop_device::LIBRARY_PTX;
use onehop_proto::kernel::DeviceOp;

use error::{Error, Result, guard, guard_or};
use export::{ExportInfo, ExportOptions, ExportedQueueObject};
use handles::{Drive, Gpu};
use objects::{alone, close, object};

/// The words of this thread's last error; empty if there was none. They stay until its next call of onehop.
// SAFETY: the name is this project's alone, as all below.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_last_error() -> *const c_char {
    error::last()
}

/// The PTX of the functions for kernels, with a zero byte behind it, for as long as the library is loaded.
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

/// A text that a caller gave.
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

/// Makes something, and gives the caller a handle of it.
///
/// # Safety
/// `out` is null, or a place for a pointer.
unsafe fn give<T: Send + Sync + 'static>(
    out: *mut *mut T,
    what: &'static str,
    make: impl FnOnce() -> Result<T>,
) -> c_int {
    guard(|| {
        if out.is_null() {
            return Err(Error::Null(what));
        }
        // SAFETY: the caller's promise. Null before there is something, so that nobody closes what was never made.
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
    unsafe { give(drive, "drive", || Drive::open(text(name, "name")?, writable != 0)) }
}

/// Makes durable what was written.
///
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_drive_flush(drive: *const Drive, nsid: u32) -> c_int {
    guard(|| object(drive, "drive")?.flush(nsid))
}

/// Closes a drive; queues that are lent keep it open.
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
    unsafe { give(gpu, "gpu", || Gpu::open(text(name, "name")?)) }
}

/// Closes a GPU; queues that are lent keep it open.
///
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_gpu_close(gpu: *mut Gpu) {
    guard(|| close(gpu, "gpu").map(drop));
}

/// Lends a new queue of a drive, with data memory, to kernels of a GPU.
///
/// # Safety
/// `options` is null or a structure; `lent` is null or a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lend(
    drive: *const Drive,
    gpu: *const Gpu,
    options: *const ExportOptions,
    lent: *mut *mut ExportedQueueObject,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        give(lent, "lent", || {
            let options = options.as_ref().copied().unwrap_or_default();
            ExportedQueueObject::new(&*object(drive, "drive")?, &*object(gpu, "gpu")?, &options)
        })
    }
}

/// What kernels take for the queue; null if `lent` is no open handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_queue(lent: *const ExportedQueueObject) -> *const c_void {
    guard_or(std::ptr::null(), || Ok(object(lent, "lent")?.queue() as *const c_void))
}

/// Where the data memory lies for kernels; null if `lent` is no open handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_data(lent: *const ExportedQueueObject) -> *mut c_void {
    guard_or(std::ptr::null_mut(), || Ok(object(lent, "lent")?.data() as *mut c_void))
}

/// What a lent queue is.
///
/// # Safety
/// `info` is null, or a place for it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_describe(
    lent: *const ExportedQueueObject,
    info: *mut ExportInfo,
) -> c_int {
    guard(|| {
        if info.is_null() {
            return Err(Error::Null("info"));
        }
        // SAFETY: the caller's promise.
        unsafe { info.write(object(lent, "lent")?.info()) };
        Ok(())
    })
}

/// Whether the queue is still looked after.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_check(lent: *const ExportedQueueObject) -> c_int {
    guard(|| object(lent, "lent")?.check())
}

/// Copies bytes out of the data memory.
///
/// # Safety
/// `to` is null, or has room for them.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_data_read(
    lent: *const ExportedQueueObject,
    offset: u64,
    to: *mut c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        let lent = object(lent, "lent")?;
        if to.is_null() {
            return Err(Error::Null("to"));
        }
        let offset = lent.check_range(offset, bytes)?;
        // Zeroed first: what C lends may never have been written.
        // SAFETY: the caller's promise. `check_range` has found the bytes within a region, so their number is no more than isize::MAX.
        let out = unsafe {
            to.cast::<u8>().write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes)
        };
        lent.read(offset, out)
    })
}

/// Copies bytes into the data memory.
///
/// # Safety
/// `from` is null, or has that many.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_data_write(
    lent: *const ExportedQueueObject,
    offset: u64,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        let lent = object(lent, "lent")?;
        if from.is_null() {
            return Err(Error::Null("from"));
        }
        let offset = lent.check_range(offset, bytes)?;
        // SAFETY: the caller's promise; a region holds as many bytes.
        let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        lent.write(offset, data)
    })
}

/// What `onehop_read` answers to one thread of the emulated GPU.
///
/// # Safety
/// `answer` is null, or a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_read(
    lent: *const ExportedQueueObject,
    lba: u64,
    blocks: u32,
    offset: u64,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { emulate(lent, DeviceOp::Read, (lba, blocks, offset), answer) }
}

/// What `onehop_write` answers to one thread of the emulated GPU.
///
/// # Safety
/// As for [`onehop_emulated_read`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_write(
    lent: *const ExportedQueueObject,
    lba: u64,
    blocks: u32,
    offset: u64,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { emulate(lent, DeviceOp::Write, (lba, blocks, offset), answer) }
}

/// # Safety
/// As for [`onehop_emulated_read`].
unsafe fn emulate(
    lent: *const ExportedQueueObject,
    op: DeviceOp,
    what: (u64, u32, u64),
    answer: *mut c_int,
) -> c_int {
    guard(|| {
        if answer.is_null() {
            return Err(Error::Null("answer"));
        }
        // SAFETY: the caller's promise.
        unsafe { answer.write(object(lent, "lent")?.emulate(op, what)?.code()) };
        Ok(())
    })
}

/// Ends every call of a kernel.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_lent_stop(lent: *const ExportedQueueObject) -> c_int {
    guard(|| {
        object(lent, "lent")?.stop();
        Ok(())
    })
}

/// Takes a queue back.
///
/// # Safety
/// No kernel uses the queue or its data memory any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_close(lent: *mut ExportedQueueObject) -> c_int {
    guard(|| {
        let Some(lent) = close(lent, "lent")? else { return Ok(()) };
        // Calls that are under way end by this.
        lent.stop();
        alone(lent, "lent")?.close()
    })
}
