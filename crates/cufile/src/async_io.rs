//! The API of operations in CUDA streams. See [`crate::operation`] for what they do.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use onehop_gpu::cuda::{Pointer, StreamState};
use onehop_proto::GpuAddr;

use crate::buffers::registered;
use crate::driver::{open_for_a_call, place};
use crate::error::{Code, Failure};
use crate::files::usable_file;
use crate::io::{GONE, IoRequest, execute};
use crate::log::{Level, say};
use crate::machine::{Machine, StreamGpu, machine};
use crate::operation::{EnqueuedOperation, Operation, StreamParameters};
use crate::state::{answer, with_state};
use crate::types::CuFileError;

const ALL_FLAGS: u32 = 15;
/// Maximum number of adjacent allocations that are looked up for one operation.
const MOST_NEIGHBOURS: usize = 4096;
/// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
const CAPTURING: i32 = 900;

/// See [`crate::driver::cuFileStreamRegister`]. The stream's resources are created now if possible: the driver may have
/// to wait for streams when it loads a kernel.
///
/// # Safety
/// The stream is valid.
pub unsafe fn register(stream: *mut c_void, flags: u32) -> CuFileError {
    answer("cuFileStreamRegister", || {
        if flags > ALL_FLAGS {
            return Err(Code::InvalidValue.into());
        }
        open_for_a_call();
        with_state(|state| state.streams.insert(stream as usize, flags));
        let machine = machine();
        if machine.has_cuda()
            // SAFETY: the caller's promise.
            && let Ok(StreamState::Running { ordinal, context }) = unsafe { machine.stream_state(stream) }
            && let Err(failure) = ready(machine, ordinal, context)
        {
            say(Level::Warning, &format!("a registered stream cannot be used: {failure:?}"));
        }
        Ok(())
    })
}

/// See [`crate::driver::cuFileStreamDeregister`].
pub fn deregister(stream: *mut c_void) -> CuFileError {
    answer("cuFileStreamDeregister", || {
        let removed = with_state(|state| state.streams.remove(&(stream as usize)));
        removed.map(|_| ()).ok_or_else(|| Code::InvalidValue.into())
    })
}

/// Reads bytes of a file into memory when a stream reaches this point.
///
/// # Safety
/// The words and the memory stay valid until the stream has passed the operation; the stream is valid.
// SAFETY: the name is cuFile's, which this library replaces; as below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileReadAsync(
    handle: *mut c_void,
    base: *mut c_void,
    bytes: *mut usize,
    file_offset: *mut i64,
    buffer_offset: *mut i64,
    done: *mut isize,
    stream: *mut c_void,
) -> CuFileError {
    let words = StreamParameters { bytes, file_offset, buffer_offset, done };
    // SAFETY: the caller's promise.
    answer("cuFileReadAsync", || unsafe { enqueue(handle, base as usize, false, words, stream) })
}

/// Writes bytes of memory to a file when a stream reaches this point.
///
/// # Safety
/// As for [`cuFileReadAsync`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWriteAsync(
    handle: *mut c_void,
    base: *mut c_void,
    bytes: *mut usize,
    file_offset: *mut i64,
    buffer_offset: *mut i64,
    done: *mut isize,
    stream: *mut c_void,
) -> CuFileError {
    let words = StreamParameters { bytes, file_offset, buffer_offset, done };
    // SAFETY: the caller's promise.
    answer("cuFileWriteAsync", || unsafe { enqueue(handle, base as usize, true, words, stream) })
}

/// # Safety
/// As for [`cuFileReadAsync`].
unsafe fn enqueue(
    handle: *mut c_void,
    base: usize,
    writes: bool,
    words: StreamParameters,
    stream: *mut c_void,
) -> Result<(), Failure> {
    let StreamParameters { bytes, file_offset, buffer_offset, done } = words;
    place(bytes.cast_mut())?;
    place(file_offset.cast_mut())?;
    place(buffer_offset.cast_mut())?;
    place(done)?;
    if base == 0 || handle.is_null() {
        return Err(Code::InvalidValue.into());
    }
    let (file, machine) = (usable_file(handle)?, machine());
    // SAFETY: the caller's promise.
    let early = unsafe { words.read() };
    let flags = with_state(|state| state.streams.get(&(stream as usize)).copied()).unwrap_or(0);
    if !machine.has_cuda() {
        // Without CUDA there are no streams, so the operation runs now.
        let request =
            IoRequest { base, bytes: early.0, file_offset: early.1, buffer_offset: early.2, writes };
        // SAFETY: the caller's promise.
        let moved = unsafe { execute(&file, request) };
        // SAFETY: as above.
        unsafe { words.finish(moved) };
        let end = (early.1 as u64).saturating_add(moved.unwrap_or(0) as u64);
        file.report_outcome(moved, early.0, !writes && file.ends_before(end));
        return Ok(());
    }
    // SAFETY: the caller's promise.
    let (ordinal, context) = match unsafe { machine.stream_state(stream) }? {
        StreamState::Running { ordinal, context } => (ordinal, context),
        StreamState::Capturing => return Err(Failure::Cuda(CAPTURING)),
    };
    let put = || {
        let gpu = ready(machine, ordinal, context)?;
        let pointer = gpu.gpu.pointer(GpuAddr(base as u64))?;
        let allowed =
            pointer.map(|pointer| allowed(&gpu, &pointer, (ordinal, context), base, early)).transpose()?;
        let wanted = EnqueuedOperation { file, base, writes, words, early, flags, allowed };
        let (count, bytes) = wanted.slots();
        let reserved = gpu.slots.reserve(bytes, count)?;
        // SAFETY: the caller's promise.
        unsafe { Operation::new(wanted, gpu, reserved)?.put(stream) }
    };
    let answer = put();
    if matches!(answer, Err(Failure::Cuda(code)) if GONE.contains(&code)) {
        machine.forget(ordinal, context);
    }
    answer
}

/// Creates everything that operations need, before a stream waits for it.
fn ready(machine: &'static Machine, ordinal: u32, context: usize) -> Result<Arc<StreamGpu>, Failure> {
    machine.engine()?;
    machine.stream_executor.start()?;
    machine.stream_gpu(ordinal, context)
}

/// The GPU memory around a pointer that an operation may access, if kernels of the stream's context reach it. It is
/// checked again when the stream reaches the operation, without calling CUDA: a kernel that accesses anything else
/// would destroy the context.
fn allowed(
    gpu: &StreamGpu,
    pointer: &Pointer,
    (ordinal, context): (u32, usize),
    base: usize,
    (bytes, _, offset): (usize, i64, i64),
) -> Result<Range<usize>, Failure> {
    let is_reached = |at: usize, pointer: &Pointer| {
        let is_own = pointer.ordinal == ordinal && (pointer.context == 0 || pointer.context == context);
        is_own || pointer.is_managed || gpu.gpu.reaches(GpuAddr(at as u64))
    };
    if !is_reached(base, pointer) {
        return Err(Code::InvalidContext.into());
    }
    let last = |bytes: usize| base.saturating_add_signed(offset.max(0) as isize).saturating_add(bytes);
    let wanted = last(bytes).max(base.saturating_add(registered(base).unwrap_or(0)));
    let allocation = |at: usize| gpu.gpu.allocation(GpuAddr(at as u64));
    let may_access = |at: usize| {
        let found = gpu.gpu.pointer(GpuAddr(at as u64));
        found.is_ok_and(|found| found.is_some_and(|pointer| is_reached(at, &pointer)))
    };
    let Ok(first) = allocation(base) else {
        return Ok(base..if wanted > base && may_access(wanted - 1) { wanted } else { base });
    };
    // A program may map several adjacent allocations, as PyTorch's expandable segments do. The next one may also
    // be another GPU's.
    let (start, mut end) = (first.start as usize, first.end as usize);
    for _ in 0..MOST_NEIGHBOURS {
        if end >= wanted {
            break;
        }
        match allocation(end) {
            Ok(next) if next.end as usize > end && may_access(end) => end = next.end as usize,
            _ => break,
        }
    }
    Ok(start..end)
}
