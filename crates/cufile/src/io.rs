//! Reads and writes.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use onehop_load::engine::calls::CallError;

use crate::buffers::address;
use crate::error::{Code, Failure};
use crate::files::{RegisteredFile, usable_file};
use crate::log::{Level, say};
use crate::machine::machine;
use crate::state::run;
use crate::stats::{self, MemorySide, Moved};

/// The most that one system call moves.
const MOST: usize = 1 << 30;

/// CUDA_ERROR_INVALID_CONTEXT, _INVALID_HANDLE and _CONTEXT_IS_DESTROYED: the program has destroyed its context.
pub const GONE: [i32; 3] = [201, 400, 709];

/// A call's request.
#[derive(Clone, Copy, Debug)]
pub struct IoRequest {
    pub base: usize,
    pub bytes: usize,
    pub file_offset: i64,
    pub buffer_offset: i64,
    pub writes: bool,
}

/// Reads bytes of a file into memory. Returns their number, or -1 with the reason in `errno`.
///
/// # Safety
/// The memory is the caller's: GPU memory, which is not freed before the call returns, or host memory.
// SAFETY: the name is cuFile's, which this library replaces; as below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileRead(
    handle: *mut c_void,
    base: *mut c_void,
    bytes: usize,
    file_offset: i64,
    buffer_offset: i64,
) -> isize {
    let request = IoRequest { base: base as usize, bytes, file_offset, buffer_offset, writes: false };
    // SAFETY: the caller's promise.
    unsafe { by_call("cuFileRead", handle, request) }
}

/// Writes bytes of memory to a file. As [`cuFileRead`].
///
/// # Safety
/// The same.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWrite(
    handle: *mut c_void,
    base: *const c_void,
    bytes: usize,
    file_offset: i64,
    buffer_offset: i64,
) -> isize {
    let request = IoRequest { base: base as usize, bytes, file_offset, buffer_offset, writes: true };
    // SAFETY: the caller's promise.
    unsafe { by_call("cuFileWrite", handle, request) }
}

/// # Safety
/// As for [`cuFileRead`].
unsafe fn by_call(call: &str, handle: *mut c_void, request: IoRequest) -> isize {
    let moved = run(call, || {
        let file = usable_file(handle)?;
        // SAFETY: the caller's promise.
        unsafe { execute(&file, request) }
    });
    match moved {
        Ok(moved) => moved as isize,
        Err(failure) => {
            set_errno(failure.number());
            -1
        }
    }
}

fn set_errno(number: c_int) {
    // SAFETY: the C library's place for this thread's errno.
    unsafe { *libc::__errno_location() = number };
}

/// A checked request: bytes of this memory, at this offset of the file.
#[derive(Clone, Copy, Debug)]
pub struct Checked {
    pub memory: usize,
    pub at: u64,
    pub bytes: usize,
}

/// Checks a request, as far as possible without calling CUDA.
pub fn check(file: &RegisteredFile, request: &IoRequest) -> Result<Checked, Failure> {
    let IoRequest { base, bytes, file_offset, buffer_offset, writes } = *request;
    let at = u64::try_from(file_offset).map_err(|_| Code::InvalidValue)?;
    let allowed = if writes { file.writes } else { file.reads };
    if !allowed {
        return Err(Code::InvalidFileOpenFlags.into());
    }
    let memory = address(base, buffer_offset, bytes)?;
    if isize::try_from(bytes).is_err() || file_offset.checked_add_unsigned(bytes as u64).is_none() {
        return Err(Code::InvalidValue.into());
    }
    Ok(Checked { memory, at, bytes })
}

/// Moves the bytes, and counts them.
///
/// # Safety
/// As for [`cuFileRead`].
pub unsafe fn execute(file: &Arc<RegisteredFile>, request: IoRequest) -> Result<usize, Failure> {
    let begun = Instant::now();
    let busy = stats::busy();
    // SAFETY: the caller's promise.
    let moved = unsafe { transfer(file, request) };
    drop(busy);
    let way = moved.as_ref().map_or(MemorySide::Host, |(_, way)| *way);
    let moved = moved.map(|(bytes, _)| bytes);
    stats::moved(&Moved {
        bytes: moved.unwrap_or(0),
        is_ok: moved.is_ok(),
        writes: request.writes,
        took: begun.elapsed(),
        way,
    });
    if let Err(failure) = moved {
        say(Level::Info, &format!("{request:?}: {failure:?}"));
    }
    moved
}

/// # Safety
/// As for [`cuFileRead`].
unsafe fn transfer(file: &Arc<RegisteredFile>, request: IoRequest) -> Result<(usize, MemorySide), Failure> {
    let Checked { memory, at, bytes } = check(file, &request)?;
    let writes = request.writes;
    if bytes == 0 {
        return Ok((0, MemorySide::Host));
    }
    let machine = machine();
    let Some(pointer) = machine.pointer(memory)? else {
        // SAFETY: the caller's promise.
        return unsafe { by_host(file, memory, at, bytes, writes) }.map(|moved| (moved, MemorySide::Host));
    };
    let (engine, to) = (machine.engine()?, machine.destination(pointer, memory)?);
    let moved =
        if writes { engine.write(&file.file, at, bytes, to) } else { engine.read(&file.file, at, bytes, to) };
    if let Err(error @ (CallError::Stalled(_) | CallError::HeldSlots { .. })) = &moved {
        say(Level::Error, &error.to_string());
    }
    if let Err(CallError::Gpu(error)) = &moved {
        say(Level::Warning, &error.to_string());
    }
    let moved = moved.map_err(Failure::from);
    if matches!(moved, Err(Failure::Cuda(code)) if GONE.contains(&code)) {
        machine.forget(pointer.ordinal, pointer.context);
    }
    Ok((moved?, MemorySide::Gpu(pointer.ordinal)))
}

/// Moves bytes of host memory. The kernel checks the address.
///
/// # Safety
/// The memory is the caller's.
pub unsafe fn by_host(
    file: &RegisteredFile,
    memory: usize,
    at: u64,
    bytes: usize,
    writes: bool,
) -> Result<usize, Failure> {
    let fd = file.file.for_host(memory, at, bytes, writes).as_raw_fd();
    // Past the file's end, O_DIRECT would be asked for less than a block.
    let wanted = if writes { bytes } else { file.file.within(at, bytes)? };
    let mut done = 0;
    while done < wanted {
        let (pointer, count) = ((memory + done) as *mut c_void, (bytes - done).min(MOST));
        let offset = (at + done as u64) as i64;
        // SAFETY: the caller's promise; the kernel refuses addresses that are not mapped.
        let moved = unsafe {
            if writes {
                libc::pwrite(fd, pointer, count, offset)
            } else {
                libc::pread(fd, pointer, count, offset)
            }
        };
        match moved {
            0 => break,
            moved if moved > 0 => done += moved as usize,
            _ => {
                let error = std::io::Error::last_os_error();
                match error.kind() {
                    std::io::ErrorKind::Interrupted => {}
                    // Bytes written before the disk was full are reported.
                    _ if writes && done > 0 => break,
                    _ => return Err(error.into()),
                }
            }
        }
    }
    Ok(done)
}
