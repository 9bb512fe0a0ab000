//! Arrays on a drive, for kernels of C programs.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use onehop_array::{Array, ArrayOptions};
use onehop_gpu::{Gpu as _, Place, Region};

use crate::error::{Error, Result, guard, guard_or};
use crate::export::{or, placement};
use crate::handles::{Drive, Gpu};
use crate::objects::{close, object, wait_until_unused};
use crate::pages::CallerMemory;
use crate::store_handle;

/// `struct onehop_array_options`: zero selects a default.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct CallerOptions {
    size: u32,
    nsid: u32,
    first_block: u64,
    blocks: u64,
    cache_bytes: u64,
    page_bytes: u32,
    writable: u32,
    placement: u32,
    depth: u32,
    stall_ms: u32,
    limit_ms: u32,
    patience_ms: u32,
    reserved: [u32; 5],
}

const _: () = assert!(size_of::<CallerOptions>() == 80 && align_of::<CallerOptions>() == 8);

/// `struct onehop_array_info`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ArrayInfo {
    bytes: u64,
    cached_pages: u32,
    page_bytes: u32,
    reads: u32,
    writes: u32,
    failed_reads: u32,
    failed_writes: u32,
}

const _: () = assert!(size_of::<ArrayInfo>() == 32 && align_of::<ArrayInfo>() == 8);

/// An open array.
pub struct ArrayObject {
    array: Array,
    gpu: Arc<Gpu>,
    page_bytes: u32,
}

impl ArrayObject {
    fn new(drive: &Drive, gpu: Arc<Gpu>, given: &CallerOptions) -> Result<Self> {
        if given.size as usize != size_of::<CallerOptions>() || given.reserved != [0; 5] {
            return Err(Error::Argument(
                "the options have another size, or were not cleared: set `size` to sizeof(struct onehop_array_options)"
                    .into(),
            ));
        }
        let millis = |value: u32, usual: u32| Duration::from_millis(or(value, usual).into());
        let page_bytes = or(given.page_bytes, 4096);
        let options = ArrayOptions {
            page_bytes,
            writable: given.writable != 0,
            depth: or(given.depth, 1023),
            stall: millis(given.stall_ms, 5000),
            limit: millis(given.limit_ms, 60_000),
            patience: millis(given.patience_ms, 10_000),
            ..ArrayOptions::new(placement(given.placement)?, given.cache_bytes)
        };
        let ns = drive.drive.namespace(or(given.nsid, 1))?;
        let end = match given.blocks {
            0 => ns.blocks,
            blocks => given.first_block.saturating_add(blocks),
        };
        let array = Array::open(&drive.drive, gpu.gpu.clone(), ns, given.first_block..end, options)?;
        Ok(Self { array, gpu, page_bytes })
    }

    fn info(&self) -> Result<ArrayInfo> {
        let stats = self.array.stats()?;
        Ok(ArrayInfo {
            bytes: self.array.bytes(),
            cached_pages: self.array.pages(),
            page_bytes: self.page_bytes,
            reads: stats.reads,
            writes: stats.writes,
            failed_reads: stats.failed_reads,
            failed_writes: stats.failed_writes,
        })
    }

    /// Copies between the caller's memory and the emulated GPU's. A real GPU uses the caller's.
    fn copy_emulated(&self, from: &Region, to: &Region) -> Result<()> {
        if self.gpu.emulated.is_some() {
            let mut bytes = vec![0; from.len().min(to.len())];
            from.read(0, &mut bytes)?;
            to.write(0, &bytes)?;
        }
        Ok(())
    }

    /// Moves rows between the array and memory of the caller.
    ///
    /// # Safety
    /// `ids` are `count` numbers, or null if there are none; the memory is the GPU's (the process's, for the emulated one)
    /// and nobody else's during the call.
    unsafe fn move_rows(
        &self,
        writes: bool,
        (row_bytes, stride): (u32, u32),
        (ids, count): (*const u64, usize),
        memory: *mut c_void,
        failed: *mut usize,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        if ids.is_null() {
            return Err(Error::Null("ids"));
        }
        let stride = or(stride, row_bytes);
        if row_bytes == 0 || !row_bytes.is_multiple_of(4) || !stride.is_multiple_of(4) {
            return Err(Error::Argument(format!(
                "rows of {row_bytes} bytes every {stride}: both are multiples of 4, and not 0"
            )));
        }
        if count > u32::MAX as usize {
            return Err(Error::Argument(format!("{count} rows in one call: at most {}", u32::MAX)));
        }
        // SAFETY: the caller's promise.
        let ids = unsafe { std::slice::from_raw_parts(ids, count) };
        let bytes = count as u64 * u64::from(row_bytes);
        let memory = CallerMemory { start: memory, bytes };
        // SAFETY: the caller's promise.
        let callers = unsafe { memory.region(self.gpu.cuda.as_ref(), if writes { "from" } else { "to" })? };
        // Kernels of the emulated GPU reach its own memory only.
        let region = match &self.gpu.emulated {
            Some(gpu) => gpu.alloc(Place::Vram, callers.len())?,
            None => callers.clone(),
        };
        let rows = self.array.rows(row_bytes, stride);
        let moved = if writes {
            self.copy_emulated(&callers, &region)?;
            self.array.scatter(rows, ids, &region)?
        } else {
            let moved = self.array.gather(rows, ids, &region)?;
            self.copy_emulated(&region, &callers)?;
            moved
        };
        let Some((place, error)) = moved.failed.first() else { return Ok(()) };
        // SAFETY: the caller's promise.
        if let Some(failed) = unsafe { failed.as_mut() } {
            *failed = *place;
        }
        Err(Error::Rows {
            count: moved.failed.len(),
            place: *place,
            row: ids.get(*place).copied().unwrap_or_default(),
            error: *error,
        })
    }
}

/// Opens blocks of a namespace as an array.
///
/// # Safety
/// `options` is null or options, `array` null or a place for a pointer.
// SAFETY: the name is unique to this project, as all below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_open(
    drive: *const Drive,
    gpu: *const Gpu,
    options: *const CallerOptions,
    array: *mut *mut ArrayObject,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        store_handle(array, "array", || {
            let options = options.as_ref().ok_or(Error::Null("options"))?;
            ArrayObject::new(&*object(drive, "drive")?, object(gpu, "gpu")?, options)
        })
    }
}

/// The array as kernels take it; null if this is not an open handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_array_handle(array: *const ArrayObject) -> *const c_void {
    guard_or(std::ptr::null(), || Ok(object(array, "array")?.array.handle().0 as *const c_void))
}

/// Describes an array and what its cache has done.
///
/// # Safety
/// `info` is null, or a place for it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_describe(array: *const ArrayObject, info: *mut ArrayInfo) -> c_int {
    guard(|| {
        if info.is_null() {
            return Err(Error::Null("info"));
        }
        let described = object(array, "array")?.info()?;
        // SAFETY: the caller's promise.
        unsafe { info.write(described) };
        Ok(())
    })
}

/// An error if the drive no longer serves the array.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_array_check(array: *const ArrayObject) -> c_int {
    guard(|| Ok(object(array, "array")?.array.check()?))
}

/// Ends all waits of kernels for the drive.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_array_stop(array: *const ArrayObject) -> c_int {
    guard(|| {
        object(array, "array")?.array.stop();
        Ok(())
    })
}

/// Reads rows into memory of the GPU.
///
/// # Safety
/// As for [`ArrayObject::move_rows`]; `failed` is null, or a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_gather(
    array: *const ArrayObject,
    row_bytes: u32,
    stride: u32,
    ids: *const u64,
    count: usize,
    to: *mut c_void,
    failed: *mut usize,
) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe {
        object(array, "array")?.move_rows(false, (row_bytes, stride), (ids, count), to, failed)
    })
}

/// Writes rows from memory of the GPU.
///
/// # Safety
/// As for [`onehop_array_gather`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_scatter(
    array: *const ArrayObject,
    row_bytes: u32,
    stride: u32,
    ids: *const u64,
    count: usize,
    from: *const c_void,
    failed: *mut usize,
) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe {
        object(array, "array")?.move_rows(true, (row_bytes, stride), (ids, count), from.cast_mut(), failed)
    })
}

/// Writes back what kernels have written, and makes it durable.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_array_flush(array: *const ArrayObject) -> c_int {
    guard(|| Ok(object(array, "array")?.array.flush().map(drop)?))
}

/// Flushes an array and closes it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_array_close(array: *mut ArrayObject) -> c_int {
    guard(|| {
        let Some(array) = close(array, "array")? else { return Ok(()) };
        Ok(wait_until_unused(array, "array")?.array.close()?)
    })
}
