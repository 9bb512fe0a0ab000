//! libonehop.so: what `include/onehop/onehop.h` and `sdr.h` declare. A drive is opened, a GPU, a queue with data memory is lent to
//! kernels; each is an opaque pointer. Nothing here does more than pass on what Rust programs have in `onehop_drive`.
//!
//! The one thing that is global is what C programs expect to be: the words of the calling thread's last error.

mod error;
mod handles;
mod lend;
mod sdr;

use std::ffi::{CStr, c_char, c_int, c_void};

use onehop_device::LIBRARY_PTX;
use onehop_proto::kernel::LentOp;

use error::{Error, Result, guard};
use handles::{Drive, Gpu};
use lend::{Lent, LentInfo, Options};

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

/// What a caller's pointer stands for.
///
/// # Safety
/// Null, or a pointer that one of these functions gave and that was not closed.
unsafe fn object<'a, T>(at: *const T, what: &'static str) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { at.as_ref() }.ok_or(Error::Null(what))
}

/// Makes something, and gives the caller a pointer to it.
///
/// # Safety
/// `out` is null, or a place for a pointer.
unsafe fn give<T>(out: *mut *mut T, what: &'static str, make: impl FnOnce() -> Result<T>) -> c_int {
    guard(|| {
        if out.is_null() {
            return Err(Error::Null(what));
        }
        // SAFETY: the caller's promise. Null before there is something, so that nobody closes what was never made.
        unsafe { out.write(std::ptr::null_mut()) };
        let made = Box::into_raw(Box::new(make()?));
        // SAFETY: as above.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Takes something back from a caller.
///
/// # Safety
/// Null, or a pointer that [`give`] gave and that was not closed.
unsafe fn take<T>(at: *mut T) -> Option<Box<T>> {
    // SAFETY: the caller's promise.
    (!at.is_null()).then(|| unsafe { Box::from_raw(at) })
}

/// Opens a drive.
///
/// # Safety
/// `name` is a string, `drive` a place for a pointer.
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
/// # Safety
/// `drive` was given by [`onehop_drive_open`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_drive_flush(drive: *const Drive, nsid: u32) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe { object(drive, "drive") }?.flush(nsid))
}

/// Closes a drive; queues that are lent keep it open.
///
/// # Safety
/// `drive` is null, or was given by [`onehop_drive_open`] and not closed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_drive_close(drive: *mut Drive) {
    guard(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { take(drive) });
        Ok(())
    });
}

/// Opens a GPU.
///
/// # Safety
/// `name` is a string, `gpu` a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_gpu_open(name: *const c_char, gpu: *mut *mut Gpu) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { give(gpu, "gpu", || Gpu::open(text(name, "name")?)) }
}

/// Closes a GPU; queues that are lent keep it open.
///
/// # Safety
/// `gpu` is null, or was given by [`onehop_gpu_open`] and not closed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_gpu_close(gpu: *mut Gpu) {
    guard(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { take(gpu) });
        Ok(())
    });
}

/// Lends a new queue of a drive, with data memory, to kernels of a GPU.
///
/// # Safety
/// Drive and GPU were given by these functions; `options` is null or a structure; `lent` is a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lend(
    drive: *const Drive,
    gpu: *const Gpu,
    options: *const Options,
    lent: *mut *mut Lent,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        give(lent, "lent", || {
            let options = options.as_ref().copied().unwrap_or_default();
            Lent::new(object(drive, "drive")?, object(gpu, "gpu")?, &options)
        })
    }
}

/// What kernels take for the queue; null if `lent` is.
///
/// # Safety
/// `lent` is null, or was given by [`onehop_lend`] and not closed; as for all that follow.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_queue(lent: *const Lent) -> *const c_void {
    // SAFETY: the caller's promise.
    unsafe { lent.as_ref() }.map_or(std::ptr::null(), |lent| lent.queue() as *const c_void)
}

/// Where the data memory lies for kernels; null if `lent` is.
///
/// # Safety
/// As for [`onehop_lent_queue`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_data(lent: *const Lent) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { lent.as_ref() }.map_or(std::ptr::null_mut(), |lent| lent.data() as *mut c_void)
}

/// What a lent queue is.
///
/// # Safety
/// As for [`onehop_lent_queue`]; `info` is a place for it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_describe(lent: *const Lent, info: *mut LentInfo) -> c_int {
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
///
/// # Safety
/// As for [`onehop_lent_queue`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_check(lent: *const Lent) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe { object(lent, "lent") }?.check())
}

/// Copies bytes out of the data memory.
///
/// # Safety
/// As for [`onehop_lent_queue`]; `to` has room for them.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_data_read(
    lent: *const Lent,
    offset: u64,
    to: *mut c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        if to.is_null() {
            return Err(Error::Null("to"));
        }
        // Zeroed first: what C lends may never have been written.
        // SAFETY: the caller's promise.
        let out = unsafe {
            to.cast::<u8>().write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes)
        };
        // SAFETY: as above.
        unsafe { object(lent, "lent") }?.read(offset, out)
    })
}

/// Copies bytes into the data memory.
///
/// # Safety
/// As for [`onehop_lent_queue`]; `from` has that many.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_data_write(
    lent: *const Lent,
    offset: u64,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        if from.is_null() {
            return Err(Error::Null("from"));
        }
        // SAFETY: the caller's promise.
        let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        // SAFETY: as above.
        unsafe { object(lent, "lent") }?.write(offset, data)
    })
}

/// What `onehop_read` answers to one thread of the emulated GPU.
///
/// # Safety
/// As for [`onehop_lent_queue`]; `answer` is a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_read(
    lent: *const Lent,
    lba: u64,
    blocks: u32,
    offset: u64,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { emulate(lent, LentOp::Read, (lba, blocks, offset), answer) }
}

/// What `onehop_write` answers to one thread of the emulated GPU.
///
/// # Safety
/// As for [`onehop_emulated_read`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_write(
    lent: *const Lent,
    lba: u64,
    blocks: u32,
    offset: u64,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { emulate(lent, LentOp::Write, (lba, blocks, offset), answer) }
}

/// # Safety
/// As for [`onehop_emulated_read`].
unsafe fn emulate(lent: *const Lent, op: LentOp, what: (u64, u32, u64), answer: *mut c_int) -> c_int {
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
///
/// # Safety
/// As for [`onehop_lent_queue`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_stop(lent: *const Lent) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { object(lent, "lent") }?.stop();
        Ok(())
    })
}

/// Takes a queue back.
///
/// # Safety
/// As for [`onehop_lent_queue`]; no kernel uses the queue or its data memory any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_lent_close(lent: *mut Lent) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe { take(lent) }.map_or(Ok(()), |lent| lent.close()))
}
