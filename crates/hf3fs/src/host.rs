//! Buffers in host memory, files, and mount points.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;

use onehop_os::hf3fs::{MOST_HOLES, hardlink, punch_holes};
use onehop_usrbio::buffer::Buffer;
use onehop_usrbio::files::is_3fs;
use onehop_usrbio::{Error, Id, Result, mount};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::arguments::{id, invalid, mount_point, non_null, path};
use crate::handle::{self, AnyBuffer, IovFields};
use crate::state::{self, FILES, HANDLES, Level, env_var, guard, log, watch_forks};
use crate::types::Iov;

/// The caller's descriptor, if it is open.
fn borrow<'a>(fd: c_int) -> std::result::Result<BorrowedFd<'a>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: fcntl accepts any number; nothing is borrowed yet.
    if unsafe { libc::fcntl(fd, libc::F_GETFL) } < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: it is open, and used during the call only. If another thread closes it meanwhile, calls on it fail or
    // affect that thread's next file, as in any such program. Memory safety does not depend on it.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Whether a file is on 3FS.
// SAFETY: the symbol is 3FS's, whose library this one replaces. The same holds for the functions below.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_is_hf3fs(fd: c_int) -> bool {
    borrow(fd).is_ok_and(is_3fs)
}

/// Finds the mount point of a path.
///
/// # Safety
/// `path` is a string, and `out` has room for `size` bytes.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_extract_mount_point(
    out: *mut c_char,
    size: c_int,
    from: *const c_char,
) -> c_int {
    let found = guard("hf3fs_extract_mount_point", || {
        // SAFETY: the caller's promise.
        let path = unsafe { path(from) }?;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")
            .map_err(|e| Error::file("read", "/proc/self/mountinfo", e))?;
        let any_type = env_var("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP").as_deref() == Some("yes");
        let Some(point) = mount::find(path, &mounts, any_type)? else { return Ok(-1) };
        let bytes = point.as_os_str().as_bytes();
        let with_zero = bytes.len() + 1;
        if !out.is_null() && usize::try_from(size).is_ok_and(|size| with_zero <= size) {
            // SAFETY: the caller's promise; the path and the zero fit.
            unsafe {
                out.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                out.add(bytes.len()).write(0);
            }
        }
        c_int::try_from(with_zero).map_err(|_| invalid("the mount point is too long"))
    });
    found.max(-1)
}

/// Creates a buffer.
///
/// # Safety
/// `iov` is null or writable, and the mount point is a string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovcreate(
    iov: *mut Iov,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    guard("hf3fs_iovcreate", || unsafe { create(iov, mount_at, size, block_size, numa) })
}

/// See [`hf3fs_iovcreate`].
///
/// # Errors
/// When there is no memory, or the daemon refuses it.
///
/// # Safety
/// The same.
pub unsafe fn create(
    iov: *mut Iov,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> Result<c_int> {
    let iov = non_null(iov)?;
    // SAFETY: the caller's promise.
    let (point, copy) = unsafe { mount_point(mount_at) }?;
    let mount = state::mount(point)?;
    let buffer = Buffer::create(&mount, size, block_size as u64, u32::try_from(numa).ok())?;
    let fields = IovFields { base: buffer.memory().host_ptr(), id: buffer.id(), size, block_size, numa };
    // SAFETY: as above.
    unsafe { handle::fill(iov, HANDLES.add(buffer), &copy, &fields) };
    Ok(0)
}

/// Opens a buffer that another program created.
///
/// # Safety
/// As for [`hf3fs_iovcreate`]; the ID has sixteen bytes.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovopen(
    iov: *mut Iov,
    id_bytes: *const u8,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    guard("hf3fs_iovopen", || {
        let iov = non_null(iov)?;
        // SAFETY: the caller's promise.
        let ((point, copy), id) = unsafe { (mount_point(mount_at)?, id(id_bytes)?) };
        let mount = state::mount(point)?;
        let buffer = Buffer::open(&mount, id, size, block_size as u64)?;
        let fields = IovFields { base: buffer.memory().host_ptr(), id, size, block_size, numa };
        // SAFETY: as above.
        unsafe { handle::fill(iov, HANDLES.add(buffer), &copy, &fields) };
        Ok(0)
    })
}

/// Unregisters a buffer.
///
/// # Safety
/// `iov` is null or a structure. The same holds for the functions below.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovunlink(iov: *mut Iov) {
    guard("hf3fs_iovunlink", || {
        // SAFETY: the caller's promise.
        let Some(iov) = (unsafe { iov.as_ref() }) else { return Ok(0) };
        match AnyBuffer::get(handle::number(iov.handle)) {
            Some(AnyBuffer::Host(buffer)) => buffer.unlink(),
            Some(AnyBuffer::Gpu(gpu)) => gpu.unlink()?,
            None if iov.handle.is_null() => {}
            None => return Err(invalid("the buffer was destroyed, or never created")),
        }
        Ok(0)
    });
}

/// Destroys a buffer.
///
/// # Safety
/// As for [`hf3fs_iovunlink`]; its memory is no longer in use, and no other call uses the structure meanwhile.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovdestroy(iov: *mut Iov) {
    guard("hf3fs_iovdestroy", || {
        let handle = (!iov.is_null()).then(|| {
            // SAFETY: the caller's promise.
            unsafe { (&raw mut (*iov).handle).replace(std::ptr::null_mut()) }
        });
        match handle {
            Some(handle) if !handle.is_null() => {
                let gone = AnyBuffer::remove(handle::number(handle));
                gone.map(drop)
                    .ok_or_else(|| invalid("the buffer was already destroyed, or never created"))?;
            }
            _ => log(Level::Error, "hf3fs_iovdestroy: a wrapped buffer must be destroyed by its creator"),
        }
        Ok(0)
    });
}

/// Fills in the structure for memory that is registered with the daemon elsewhere.
///
/// # Safety
/// As for [`hf3fs_iovopen`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovwrap(
    iov: *mut Iov,
    base: *mut c_void,
    id_bytes: *const u8,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    guard("hf3fs_iovwrap", || {
        let iov = non_null(iov)?;
        // SAFETY: the caller's promise.
        let ((_, copy), id): (_, Id) = unsafe { (mount_point(mount_at)?, id(id_bytes)?) };
        let fields = IovFields { base: base.cast(), id, size, block_size, numa };
        // SAFETY: as above.
        unsafe { handle::fill(iov, 0, &copy, &fields) };
        Ok(0)
    })
}

/// Registers an open file. An error is a positive number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_reg_fd(fd: c_int, flags: u64) -> c_int {
    let _ = flags;
    watch_forks();
    match borrow(fd).and_then(|file| FILES.register(fd, file)) {
        Ok(copy) => -copy,
        Err(errno) => errno.raw_os_error(),
    }
}

/// Deregisters a file.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_dereg_fd(fd: c_int) {
    watch_forks();
    // Both numbers work; that of the copy is negative.
    FILES.deregister(fd.checked_abs().unwrap_or(0));
}

/// Creates a hard link. An error is a positive number.
///
/// # Safety
/// Both are strings.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_hardlink(target: *const c_char, link_name: *const c_char) -> c_int {
    -guard("hf3fs_hardlink", || {
        // SAFETY: the caller's promise.
        let (target, link) = unsafe { (path(target)?, path(link_name)?) };
        let file = openat(CWD, target, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let file = file.map_err(|e| Error::file("open", target, e))?;
        let name = link.file_name().ok_or_else(|| invalid("the link has no name"))?;
        let parent = link.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(std::path::Path::new("."));
        // It stays open: the daemon creates links only in folders that the user has open.
        let folder = openat(CWD, parent, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| Error::file("open", parent, e))?;
        let stat = rustix::fs::fstat(&folder).map_err(|e| Error::file("stat", parent, e))?;
        hardlink(&file, stat.st_ino, name.as_bytes()).map_err(|e| file_error("link", link, &e))?;
        Ok(0)
    })
}

/// Punches holes into a file. An error is a positive number.
///
/// # Safety
/// Both arrays have `count` elements.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_punchhole(
    fd: c_int,
    count: c_int,
    starts: *const usize,
    ends: *const usize,
    flags: usize,
) -> c_int {
    -guard("hf3fs_punchhole", || {
        let name = std::path::Path::new("a file");
        let file = borrow(fd).map_err(|e| Error::file("punch holes in", name, e))?;
        let count = usize::try_from(count).ok().filter(|count| *count <= MOST_HOLES);
        let count = count.ok_or_else(|| invalid(format!("a call punches at most {MOST_HOLES} holes")))?;
        if count > 0 && (starts.is_null() || ends.is_null()) {
            return Err(invalid("an array is a null pointer"));
        }
        // SAFETY: the caller's promise.
        let ranges: Vec<_> = (0..count).map(|i| unsafe { (*starts.add(i), *ends.add(i)) }).collect();
        punch_holes(file, &ranges, flags).map_err(|e| file_error("punch holes in", name, &e))?;
        Ok(0)
    })
}

/// A file error with an error number.
fn file_error(call: &'static str, path: &std::path::Path, error: &onehop_os::Error) -> Error {
    let number = error.errno().unwrap_or(libc::EIO);
    Error::file(call, path, std::io::Error::from_raw_os_error(number))
}
