//! Registered files.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_load::engine::calls::CallFile;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};

use crate::driver::{open_for_a_call, place};
use crate::error::{Code, Failure};
use crate::log::{Level, say};
use crate::state::{HANDLES, answer, get, run, with_state};
use crate::stats::{self, CountedCall};
use crate::types::{CuFileError, Description};

/// CU_FILE_HANDLE_TYPE_OPAQUE_FD
const OPAQUE_FD: c_int = 1;

/// A registered file.
pub struct RegisteredFile {
    pub file: Arc<CallFile>,
    pub reads: bool,
    pub writes: bool,
    /// The descriptor at registration, which the program may close before it deregisters the file.
    fd: c_int,
    /// Whether an operation in a stream moved fewer bytes than requested, and no call has reported it yet.
    has_failed: AtomicBool,
}

impl RegisteredFile {
    /// Whether the file ends at or before this offset.
    pub fn ends_before(&self, at: u64) -> bool {
        matches!(self.file.within(at, 1), Ok(0))
    }

    /// Logs an operation in a stream that moved fewer bytes than requested, and makes the next call fail: programs are
    /// known to ignore the result. A read cut short by the file's end is not an error: programs round sizes up.
    pub fn report_outcome(&self, moved: Result<usize, Failure>, wanted: usize, is_at_end: bool) {
        let what = match moved {
            Ok(bytes) if bytes == wanted => return,
            Ok(bytes) if is_at_end => {
                let what = "an operation in a stream read";
                return say(
                    Level::Warning,
                    &format!("{what} {bytes} of {wanted} bytes: there the file ends"),
                );
            }
            Ok(bytes) => format!("moved {bytes} of {wanted} bytes"),
            Err(failure) => format!("failed: {failure:?}"),
        };
        say(Level::Error, &format!("an operation in a stream {what}; the next call with its file fails"));
        self.has_failed.store(true, Ordering::Release);
    }
}

/// Registers a file by a descriptor.
///
/// # Safety
/// `out` is null or valid for a handle, `description` null or a description, whose descriptor stays open during
/// the call.
// SAFETY: the name is cuFile's, which this library replaces; as all below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(
    out: *mut *mut c_void,
    description: *const Description,
) -> CuFileError {
    let answer = answer("cuFileHandleRegister", || {
        let out = place(out)?;
        if description.is_null() || !description.is_aligned() {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: the caller's promise. Only what is used is read: programs may leave `fs_ops` unset.
        let kind = unsafe { (&raw const (*description).kind).read() };
        if kind != OPAQUE_FD {
            return Err(Code::IoNotSupported.into());
        }
        // SAFETY: as above; this kind has a descriptor, for which any bits are a valid number.
        let fd = unsafe { (&raw const (*description).handle.fd).read() };
        let handle = register(fd)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(handle as *mut c_void) };
        Ok(())
    });
    stats::count(CountedCall::HandleRegister, answer.err == 0);
    answer
}

fn register(fd: c_int) -> Result<usize, Failure> {
    if fd < 0 {
        return Err(Code::InvalidValue.into());
    }
    // SAFETY: the descriptor is borrowed for this call alone, during which the program keeps it open; if it is
    // invalid, the calls below fail.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let stat = fstat(borrowed).map_err(|_| Code::InvalidValue)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Socket => return Err(Code::InvalidValue.into()),
        _ => return Err(Code::InvalidFileType.into()),
    }
    let flags = fcntl_getfl(borrowed).map_err(|_| Code::InvalidValue)?;
    if flags.contains(OFlags::PATH) {
        return Err(Code::InvalidValue.into());
    }
    if flags.intersects(OFlags::NONBLOCK | OFlags::APPEND) {
        return Err(Code::InvalidFileOpenFlags.into());
    }
    let access = flags & OFlags::RWMODE;
    let own = File::from(borrowed.try_clone_to_owned()?);
    let file = Arc::new(CallFile::new(own, with_state(|state| state.writes.clone()))?);
    let (reads, writes) = (access != OFlags::WRONLY, access != OFlags::RDONLY);
    open_for_a_call();
    with_state(|state| {
        let (device, inode) = (stat.st_dev, stat.st_ino);
        // A descriptor whose file was closed, and that now names another, is free.
        if state.files.get(&fd).is_some_and(|known| (known.0, known.1) == (device, inode)) {
            return Err(Code::HandleAlreadyRegistered.into());
        }
        let handle =
            HANDLES.add(RegisteredFile { file, reads, writes, fd, has_failed: AtomicBool::new(false) });
        state.files.insert(fd, (device, inode, handle));
        Ok(handle)
    })
}

/// Deregisters a file. Calls in progress continue.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: *mut c_void) {
    let removed = run("cuFileHandleDeregister", || {
        let removed = HANDLES.remove::<RegisteredFile>(handle as usize);
        let file = removed.ok_or(Code::HandleNotRegistered)?;
        with_state(|state| {
            if state.files.get(&file.fd).is_some_and(|known| known.2 == handle as usize) {
                state.files.remove(&file.fd);
            }
        });
        Ok(())
    });
    stats::count(CountedCall::HandleDeregister, removed.is_ok());
}

/// The file of a handle.
pub fn file(handle: *mut c_void) -> Result<Arc<RegisteredFile>, Failure> {
    if handle.is_null() {
        return Err(Failure::System(libc::EINVAL));
    }
    get(handle).ok_or_else(|| Code::HandleNotRegistered.into())
}

/// The file of a handle, for a call that moves bytes. Once after an operation in a stream that moved fewer bytes than
/// requested, returns an error instead.
pub fn usable_file(handle: *mut c_void) -> Result<Arc<RegisteredFile>, Failure> {
    let file = file(handle)?;
    if file.has_failed.swap(false, Ordering::AcqRel) {
        return Err(Failure::System(libc::EIO));
    }
    Ok(file)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use onehop_os::file_writes::WriteRoutes;

    use super::*;

    #[test]
    fn only_short_reads_at_the_end_are_accepted() {
        let own = File::open("/proc/self/exe").unwrap();
        let bytes = own.metadata().unwrap().len();
        let file = RegisteredFile {
            file: Arc::new(CallFile::new(own, Arc::new(WriteRoutes::unshared())).unwrap()),
            reads: true,
            writes: false,
            fd: 0,
            has_failed: AtomicBool::new(false),
        };
        assert!(file.ends_before(bytes) && file.ends_before(u64::MAX) && !file.ends_before(bytes - 1));
        let fails = |moved, is_at_end| {
            file.report_outcome(moved, 5, is_at_end);
            file.has_failed.swap(false, Ordering::AcqRel)
        };
        assert!(!fails(Ok(5), false) && !fails(Ok(3), true));
        assert!(fails(Ok(3), false) && fails(Err(Failure::System(libc::EIO)), true));
    }
}
