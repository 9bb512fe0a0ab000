//! Pages of a file, moved to and from memory of C programs.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use onehop_gpu::Region;
use onehop_gpu::cuda::CudaGpu;
use onehop_os::HostMem;
use onehop_pages::{FilePage, MovedBytes, Pages, PagesError, PagesOptions};
use onehop_proto::GpuAddr;

use crate::error::{Error, Result, guard};
use crate::handles::Gpu;
use crate::objects::{close, object};
use crate::{store_handle, text};

/// A file, and the GPU whose memory its pages are moved to and from.
pub struct PagesObject {
    pages: Pages,
    cuda: Option<CudaGpu>,
}

/// `struct onehop_memory`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CallerMemory {
    pub(crate) start: *mut c_void,
    pub(crate) bytes: u64,
}

/// `struct onehop_page`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CallerPage {
    offset: u64,
    at: u64,
    bytes: u64,
    memory: u64,
}

impl CallerPage {
    fn page(self) -> FilePage {
        let whole = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let memory = (whole(self.memory), whole(self.at));
        FilePage { offset: self.offset, memory, bytes: whole(self.bytes) }
    }
}

impl CallerMemory {
    /// Memory of this GPU; of this process, for the emulated one.
    ///
    /// # Safety
    /// The memory stays allocated for as long as the result or the GPU uses it.
    pub(crate) unsafe fn region(&self, cuda: Option<&CudaGpu>, what: &'static str) -> Result<Region> {
        let bytes = usize::try_from(self.bytes).ok().filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::Argument(format!("{} bytes of memory", self.bytes)))?;
        if self.start.is_null() || bytes == 0 {
            return Err(Error::Null(what));
        }
        match cuda {
            // SAFETY: the caller's promise.
            Some(gpu) => Ok(unsafe { gpu.borrow(GpuAddr(self.start as u64), bytes, ()) }?),
            None => {
                // SAFETY: the caller's promise.
                let mem = unsafe { HostMem::borrow(self.start.cast(), bytes, true, ()) };
                Ok(Region::of_host(mem.map_err(onehop_gpu::Error::from)?))
            }
        }
    }
}

/// Opens a file that exists.
///
/// # Safety
/// `path` is null or a string, `pages` null or a place for a pointer.
// SAFETY: the name is unique to this project, as all below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_pages_open(
    path: *const c_char,
    gpu: *const Gpu,
    writable: c_int,
    registered: u64,
    pages: *mut *mut PagesObject,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        store_handle(pages, "pages", || {
            let (path, gpu) = (text(path, "path")?, object(gpu, "gpu")?);
            let options = PagesOptions::new(writable != 0);
            let options = PagesOptions { registered: options.registered.min(registered), ..options };
            let pages = Pages::open(path.as_ref(), gpu.gpu.clone(), options);
            let pages = pages.map_err(|error| Error::File(format!("{path}: {error}")))?;
            Ok(PagesObject { pages, cuda: gpu.cuda.clone() })
        })
    }
}

/// Registers all of the file that may be.
///
/// # Safety
/// `bytes` is null, or a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_pages_register(pages: *const PagesObject, bytes: *mut u64) -> c_int {
    guard(|| {
        let registered = object(pages, "pages")?.pages.register();
        // SAFETY: the caller's promise.
        if let Some(bytes) = unsafe { bytes.as_mut() } {
            *bytes = registered;
        }
        Ok(())
    })
}

/// Reads pages.
///
/// # Safety
/// The lists have as many entries as stated, or are null; the memories stay allocated during the call, and after an error of the
/// GPU or a stall as long as the process lives. `failed` is null, or a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_pages_read(
    pages: *const PagesObject,
    memories: *const CallerMemory,
    memory_count: usize,
    list: *const CallerPage,
    count: usize,
    failed: *mut usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { transfer(pages, (memories, memory_count), (list, count), failed, Pages::read) }
}

/// Writes pages.
///
/// # Safety
/// As for [`onehop_pages_read`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_pages_write(
    pages: *const PagesObject,
    memories: *const CallerMemory,
    memory_count: usize,
    list: *const CallerPage,
    count: usize,
    failed: *mut usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { transfer(pages, (memories, memory_count), (list, count), failed, Pages::write) }
}

/// # Safety
/// As for [`onehop_pages_read`].
unsafe fn transfer(
    pages: *const PagesObject,
    memories: (*const CallerMemory, usize),
    list: (*const CallerPage, usize),
    failed: *mut usize,
    run: impl FnOnce(&Pages, &[Region], &[FilePage]) -> onehop_pages::Result<()>,
) -> c_int {
    guard(|| {
        let pages = object(pages, "pages")?;
        // SAFETY: the caller's promise.
        let (memories, list) = unsafe { (entries(memories, "memories")?, entries(list, "list")?) };
        // SAFETY: the caller's promise.
        let regions = memories
            .iter()
            .map(|memory| unsafe { memory.region(pages.cuda.as_ref(), "memories") })
            .collect::<Result<Vec<_>>>()?;
        let list: Vec<FilePage> = list.iter().map(|page| page.page()).collect();
        run(&pages.pages, &regions, &list).map_err(|error| {
            // SAFETY: the caller's promise.
            if let (Some(failed), Some(page)) = (unsafe { failed.as_mut() }, error.page()) {
                *failed = page;
            }
            error.into()
        })
    })
}

/// # Safety
/// There are so many entries, or the pointer is null.
unsafe fn entries<'a, T>((start, count): (*const T, usize), what: &'static str) -> Result<&'a [T]> {
    match (start.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Error::Null(what)),
        (false, _) if count > isize::MAX as usize / size_of::<T>() || !start.is_aligned() => {
            Err(Error::Argument(format!("`{what}` is not a list of {count} entries")))
        }
        // SAFETY: the caller's promise; the list is aligned and no longer than memory.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(start, count) }),
    }
}

impl From<PagesError> for Error {
    fn from(error: PagesError) -> Self {
        match error {
            PagesError::Gpu(error) => Self::Gpu(error),
            PagesError::BadPage { .. } | PagesError::ReadOnly => Self::Argument(error.to_string()),
            PagesError::File(_) | PagesError::Page { .. } | PagesError::Stalled(_) => {
                Self::File(error.to_string())
            }
        }
    }
}

/// Returns when everything that was written is on the disk.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_pages_sync(pages: *const PagesObject) -> c_int {
    guard(|| Ok(object(pages, "pages")?.pages.sync()?))
}

/// Bytes that were moved so far.
///
/// # Safety
/// Both are null, or places for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_pages_moved(
    pages: *const PagesObject,
    registered: *mut u64,
    staged: *mut u64,
) -> c_int {
    guard(|| {
        let moved: MovedBytes = object(pages, "pages")?.pages.moved();
        // SAFETY: the caller's promise.
        let (to_registered, to_staged) = unsafe { (registered.as_mut(), staged.as_mut()) };
        for (to, bytes) in [(to_registered, moved.registered), (to_staged, moved.staged)] {
            if let Some(to) = to {
                *to = bytes;
            }
        }
        Ok(())
    })
}

/// Closes the file when no other thread's call uses it any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_pages_close(pages: *mut PagesObject) {
    guard(|| close(pages, "pages").map(|pages: Option<Arc<PagesObject>>| drop(pages)));
}
