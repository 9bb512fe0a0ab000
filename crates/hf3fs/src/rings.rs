//! Rings.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use onehop_usrbio::buffer::Ring;
use onehop_usrbio::ring::{Request, entries};
use onehop_usrbio::{Error, Id, Priority, Result, RingName};

use crate::arguments::{invalid, mount_point, non_null};
use crate::handle::{self, IovFields, fill, gpu_of};
use crate::state::{self, FILES, HANDLES, env_var, guard};
use crate::types::{Cqe, Ior, Iov};

/// The length of a ring. Never fails.
// SAFETY: the symbol is 3FS's, whose library this one replaces. The same holds for the functions below.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_ior_size(count: c_int) -> usize {
    usize::try_from(4144 + 96 * (i64::from(count) + 1)).unwrap_or(0)
}

/// The arguments of the four calls.
struct RingParams {
    entries: c_int,
    read: bool,
    depth: c_int,
    priority: c_int,
    timeout: c_int,
    numa: c_int,
    flags: u64,
}

/// # Safety
/// `ior` is null or writable, and the mount point is a string.
unsafe fn create(ior: *mut Ior, mount_at: *const c_char, params: &RingParams) -> c_int {
    guard("hf3fs_iorcreate", || {
        let ior = non_null(ior)?;
        // SAFETY: the caller's promise.
        let (point, copy) = unsafe { mount_point(mount_at) }?;
        let timeout = u64::try_from(params.timeout).map_err(|_| invalid("the timeout is negative"))?;
        if params.depth == c_int::MIN {
            return Err(invalid("the depth is invalid"));
        }
        let name = RingName {
            read: params.read,
            depth: params.depth,
            priority: Priority::from_number(params.priority),
            timeout: Duration::from_millis(timeout),
            flags: params.flags,
        };
        let mount = state::mount(point)?;
        let ring = Ring::create(&mount, params.entries, name, u32::try_from(params.numa).ok())?;
        let fields = IovFields {
            base: ring.memory().host_ptr(),
            id: ring.id(),
            size: ring.memory().len(),
            block_size: 0,
            numa: params.numa,
        };
        // SAFETY: as above; the fields are only written.
        unsafe {
            fill(&raw mut (*ior).iov, 0, &copy, &fields);
            (&raw mut (*ior).handle).write(std::ptr::without_provenance_mut(HANDLES.add(ring)));
            (&raw mut (*ior).mount_point).write(copy);
            (&raw mut (*ior).for_read).write(params.read.into());
            (&raw mut (*ior).io_depth).write(params.depth);
            (&raw mut (*ior).priority).write(params.priority);
            (&raw mut (*ior).timeout).write(params.timeout);
            (&raw mut (*ior).flags).write(params.flags);
        }
        Ok(0)
    })
}

/// Creates a ring.
///
/// # Safety
/// `ior` is null or writable, and the mount point is a string. The same holds for the three functions below.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate(
    ior: *mut Ior,
    mount_at: *const c_char,
    entries: c_int,
    read: bool,
    depth: c_int,
    numa: c_int,
) -> c_int {
    let params = RingParams { entries, read, depth, priority: 0, timeout: 0, numa, flags: 0 };
    // SAFETY: the caller's promise.
    unsafe { create(ior, mount_at, &params) }
}

/// Like [`hf3fs_iorcreate`], with a priority.
///
/// # Safety
/// As for [`hf3fs_iorcreate`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate2(
    ior: *mut Ior,
    mount_at: *const c_char,
    entries: c_int,
    read: bool,
    depth: c_int,
    priority: c_int,
    numa: c_int,
) -> c_int {
    let params = RingParams { entries, read, depth, priority, timeout: 0, numa, flags: 0 };
    // SAFETY: the caller's promise.
    unsafe { create(ior, mount_at, &params) }
}

/// Like [`hf3fs_iorcreate`], with a priority and a timeout.
///
/// # Safety
/// As for [`hf3fs_iorcreate`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate3(
    ior: *mut Ior,
    mount_at: *const c_char,
    entries: c_int,
    read: bool,
    depth: c_int,
    priority: c_int,
    timeout: c_int,
    numa: c_int,
) -> c_int {
    let params = RingParams { entries, read, depth, priority, timeout, numa, flags: 0 };
    // SAFETY: the caller's promise.
    unsafe { create(ior, mount_at, &params) }
}

/// Like [`hf3fs_iorcreate`], with a timeout and flags.
///
/// # Safety
/// As for [`hf3fs_iorcreate`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate4(
    ior: *mut Ior,
    mount_at: *const c_char,
    entries: c_int,
    read: bool,
    depth: c_int,
    timeout: c_int,
    numa: c_int,
    flags: u64,
) -> c_int {
    let params = RingParams { entries, read, depth, priority: 0, timeout, numa, flags };
    // SAFETY: the caller's promise.
    unsafe { create(ior, mount_at, &params) }
}

/// The ring of a structure.
///
/// # Safety
/// Null, or a structure that lives as long as the result.
unsafe fn ring_of<'a>(ior: *const Ior) -> Result<(&'a Ior, Arc<Ring>)> {
    // SAFETY: the caller's promise.
    let ior = unsafe { ior.as_ref() }.ok_or_else(|| invalid("a ring is a null pointer"))?;
    let ring = HANDLES.get(handle::number(ior.handle));
    Ok((ior, ring.ok_or_else(|| invalid("the ring was destroyed, or never created"))?))
}

/// Destroys a ring.
///
/// # Safety
/// `ior` is null or a structure; its memory is no longer in use, and no other call uses the structure meanwhile.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iordestroy(ior: *mut Ior) {
    guard("hf3fs_iordestroy", || {
        if ior.is_null() {
            return Ok(0);
        }
        // SAFETY: the caller's promise.
        let handle = unsafe { (&raw mut (*ior).handle).replace(std::ptr::null_mut()) };
        if !handle.is_null() {
            let gone = HANDLES.remove::<Ring>(handle::number(handle));
            gone.map(drop).ok_or_else(|| invalid("the ring was already destroyed, or never created"))?;
        }
        Ok(0)
    });
}

/// The number of entries of a ring.
///
/// # Safety
/// `ior` is null or a structure.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_io_entries(ior: *const Ior) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ior.as_ref() }.map_or(-libc::EINVAL, |ior| entries(ior.iov.size))
}

/// Enqueues a request.
///
/// # Safety
/// Ring and buffer are null or structures.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_prep_io(
    ior: *const Ior,
    iov: *const Iov,
    read: bool,
    at: *mut c_void,
    fd: c_int,
    offset: usize,
    len: u64,
    userdata: *const c_void,
) -> c_int {
    guard("hf3fs_prep_io", || {
        // SAFETY: the caller's promise.
        let ((ior, ring), iov_ref) = unsafe { (ring_of(ior)?, iov.as_ref()) };
        let buffer = iov_ref.ok_or_else(|| invalid("a buffer is a null pointer"))?;
        if read != (ior.for_read != 0) {
            return Err(invalid("the request's direction is not the ring's"));
        }
        let request = Request {
            buffer: Id(buffer.id),
            offset: offset_in(buffer, at, len)?,
            inode: file_of(fd, read)?,
            at: offset as u64,
            len,
            userdata: userdata as u64,
        };
        // SAFETY: as above.
        if let Some(gpu) = unsafe { gpu_of(iov) } {
            gpu.check_current()?;
        }
        ring.prepare(&request)
    })
}

/// The offset of a pointer in a buffer that has `len` bytes from there.
pub(crate) fn offset_in(buffer: &Iov, at: *const c_void, len: u64) -> Result<u64> {
    if buffer.base.is_null() || at.is_null() || len == 0 {
        return Err(invalid("the address is null, or the length is 0"));
    }
    let offset = (at as u64).checked_sub(buffer.base as u64);
    let fits = |offset: &u64| *offset <= buffer.size as u64 && len <= buffer.size as u64 - offset;
    offset.filter(fits).ok_or_else(|| invalid(format!("{len} bytes at {at:p} are not within the buffer")))
}

/// The inode number of a registered file that may be read, or written.
fn file_of(fd: c_int, read: bool) -> Result<u64> {
    let number = fd.checked_abs().ok_or_else(|| invalid("the file descriptor is invalid"))?;
    let refused = |errno| Error::file("use", format!("file descriptor {fd}"), errno);
    let file = FILES.get(number).ok_or_else(|| refused(rustix::io::Errno::BADF))?;
    if !file.allows(read) {
        return Err(refused(rustix::io::Errno::ACCESS));
    }
    Ok(file.inode())
}

/// Signals the daemon that there are requests.
///
/// # Safety
/// `ior` is null or a structure.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_submit_ios(ior: *const Ior) -> c_int {
    guard("hf3fs_submit_ios", || {
        // SAFETY: the caller's promise.
        unsafe { ring_of(ior) }?.1.submit();
        Ok(0)
    })
}

/// Waits for completions.
///
/// # Safety
/// `ior` as for [`hf3fs_submit_ios`]; `cqes` has room for `most`; `until` is null or a time.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_wait_for_ios(
    ior: *const Ior,
    cqes: *mut Cqe,
    most: c_int,
    least: c_int,
    until: *const libc::timespec,
) -> c_int {
    guard("hf3fs_wait_for_ios", || {
        // SAFETY: the caller's promise.
        let ((_, ring), until) = unsafe { (ring_of(ior)?, until.as_ref()) };
        let cqes = non_null(cqes)?;
        let most = usize::try_from(most).ok().filter(|most| *most > 0);
        let most = most.ok_or_else(|| invalid("there is no room for a completion"))?;
        let least = usize::try_from(least).unwrap_or(0);
        let mut out = Vec::with_capacity(most.min(ring.entries() as usize));
        ring.wait(&mut out, (least, most), until.map(system_time), poll_interval())?;
        for (i, done) in out.iter().enumerate() {
            // SAFETY: as above; there are at most `most` completions. The reserved field stays unchanged.
            unsafe {
                let cqe = cqes.add(i);
                (&raw mut (*cqe).index).write(done.index);
                (&raw mut (*cqe).result).write(done.result);
                (&raw mut (*cqe).userdata).write(done.userdata as *const c_void);
            }
        }
        Ok(out.len() as c_int)
    })
}

fn system_time(time: &libc::timespec) -> SystemTime {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0).min(999_999_999);
    UNIX_EPOCH.checked_add(Duration::new(seconds, nanos)).unwrap_or(UNIX_EPOCH)
}

/// How often a waiting program checks the ring without being woken.
fn poll_interval() -> Duration {
    let given = env_var("HF3FS_USRBIO_WAIT_JITTER_MS").and_then(|text| text.trim().parse::<u64>().ok());
    Duration::from_millis(given.filter(|millis| *millis > 0).unwrap_or(1))
}
