//! Operations in CUDA's streams.
//!
//! The stream calls a function when it comes to the operation, which hands the operation to the executor; then it waits on a
//! word of pinned memory. The transfer itself goes on in streams of the engine. When it has ended the result is written, and
//! the word lets the stream go on. So what comes later in the stream sees the bytes and the result, and the function that CUDA
//! calls never waits.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use onehop_gpu::cuda::{Queued, StreamState};

use crate::driver::open_for_a_call;
use crate::error::{Code, Failure};
use crate::files::{RegisteredFile, file};
use crate::io::{Request, carry_out};
use crate::log::{Level, say};
use crate::machine::{Word, machine};
use crate::state::{answer, run};
use crate::types::CuFileError;

/// What of an operation is known when it is put into the stream.
const FIXED_BUFFER_OFFSET: u32 = 1;
const FIXED_FILE_OFFSET: u32 = 2;
const FIXED_SIZE: u32 = 4;
const ALL_FLAGS: u32 = 15;
/// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
const CAPTURING: i32 = 900;

/// Registered streams and their flags.
static STREAMS: Mutex<Vec<(usize, u32)>> = Mutex::new(Vec::new());

fn streams() -> std::sync::MutexGuard<'static, Vec<(usize, u32)>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See [`crate::driver::cuFileStreamRegister`].
pub fn register(stream: *mut c_void, flags: u32) -> CuFileError {
    answer("cuFileStreamRegister", || {
        if flags > ALL_FLAGS {
            return Err(Code::InvalidValue.into());
        }
        open_for_a_call();
        let mut streams = streams();
        streams.retain(|(known, _)| *known != stream as usize);
        streams.push((stream as usize, flags));
        Ok(())
    })
}

/// See [`crate::driver::cuFileStreamDeregister`].
pub fn deregister(stream: *mut c_void) -> CuFileError {
    answer("cuFileStreamDeregister", || {
        let mut streams = streams();
        let before = streams.len();
        streams.retain(|(known, _)| *known != stream as usize);
        if streams.len() == before { Err(Code::InvalidValue.into()) } else { Ok(()) }
    })
}

/// The program's words for an operation, which it keeps until the stream has passed it.
#[derive(Clone, Copy)]
struct Words {
    bytes: *const usize,
    file_offset: *const i64,
    buffer_offset: *const i64,
    done: *mut isize,
}

// SAFETY: the program keeps them for this library, whatever the thread, until the operation has ended.
unsafe impl Send for Words {}

impl Words {
    /// # Safety
    /// The words are there.
    unsafe fn read(self) -> (usize, i64, i64) {
        // SAFETY: the caller's promise.
        unsafe { (self.bytes.read(), self.file_offset.read(), self.buffer_offset.read()) }
    }

    /// # Safety
    /// The words are there.
    unsafe fn finish(self, moved: Result<usize, Failure>) {
        let result = match moved {
            Ok(bytes) => bytes as isize,
            Err(failure) => -(failure.number() as isize),
        };
        // SAFETY: the caller's promise.
        unsafe { self.done.write(result) };
    }
}

/// An operation in a stream.
struct Operation {
    file: Arc<RegisteredFile>,
    base: usize,
    writes: bool,
    words: Words,
    /// What was read of the words when the operation came; by the flags, those are used.
    early: (usize, i64, i64),
    flags: u32,
    word: Word,
    /// The one who comes second begins it: the stream that has reached it, or the thread that has put all of it there.
    met: Arc<AtomicU32>,
}

impl Operation {
    fn carry_out(self) {
        let moved = run("an operation in a stream", || {
            let Words { bytes, file_offset, buffer_offset, .. } = self.words;
            let fixed = |flag| self.flags & flag != 0;
            let (base, writes, early) = (self.base, self.writes, self.early);
            // SAFETY: the program keeps the words that are not fixed until the stream has passed the operation.
            let request = unsafe {
                Request {
                    base,
                    bytes: if fixed(FIXED_SIZE) { early.0 } else { bytes.read() },
                    file_offset: if fixed(FIXED_FILE_OFFSET) { early.1 } else { file_offset.read() },
                    buffer_offset: if fixed(FIXED_BUFFER_OFFSET) { early.2 } else { buffer_offset.read() },
                    writes,
                }
            };
            // SAFETY: as above for the memory.
            unsafe { carry_out(&self.file, request) }
        });
        if let Err(failure) = moved {
            // Programs are known not to look at the result.
            say(Level::Error, &format!("an operation in a stream failed: {failure:?}"));
        }
        // SAFETY: as above.
        unsafe { self.words.finish(moved) };
        machine().release(self.word);
    }
}

/// The stream has come to an operation.
extern "C" fn reached(operation: *mut c_void) {
    let operation = operation.cast::<Operation>();
    // SAFETY: `enqueue` has made the pointer of a box, which nobody takes before both have met.
    let met = unsafe { &(*operation).met }.clone();
    if met.fetch_add(1, Ordering::AcqRel) == 1 {
        begin(operation);
    }
}

/// Begins an operation that both have come to.
fn begin(operation: *mut Operation) {
    // SAFETY: the one who comes second has the box to itself.
    let operation = unsafe { Box::from_raw(operation) };
    machine().executor.submit(move || operation.carry_out());
}

/// Reads bytes of a file into memory when a stream comes to this point.
///
/// # Safety
/// The words and the memory stay until the stream has passed the operation; the stream is one.
// SAFETY: the name is cuFile's, for which this library stands in; as below.
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
    let words = Words { bytes, file_offset, buffer_offset, done };
    // SAFETY: the caller's promise.
    answer("cuFileReadAsync", || unsafe { enqueue(handle, base as usize, false, words, stream) })
}

/// Writes bytes of memory to a file when a stream comes to this point.
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
    let words = Words { bytes, file_offset, buffer_offset, done };
    // SAFETY: the caller's promise.
    answer("cuFileWriteAsync", || unsafe { enqueue(handle, base as usize, true, words, stream) })
}

/// # Safety
/// As for [`cuFileReadAsync`].
unsafe fn enqueue(
    handle: *mut c_void,
    base: usize,
    writes: bool,
    words: Words,
    stream: *mut c_void,
) -> Result<(), Failure> {
    let Words { bytes, file_offset, buffer_offset, done } = words;
    let missing = bytes.is_null() || file_offset.is_null() || buffer_offset.is_null() || done.is_null();
    if missing || base == 0 || handle.is_null() {
        return Err(Code::InvalidValue.into());
    }
    let (file, machine) = (file(handle)?, machine());
    // SAFETY: the caller's promise.
    let early = unsafe { words.read() };
    let known = streams().iter().find(|(known, _)| *known == stream as usize).map(|(_, flags)| *flags);
    let flags = known.unwrap_or(0);
    if !machine.has_cuda() {
        // Without CUDA there are no streams, and the operation's turn has come.
        let request = Request { base, bytes: early.0, file_offset: early.1, buffer_offset: early.2, writes };
        // SAFETY: the caller's promise.
        unsafe { words.finish(carry_out(&file, request)) };
        return Ok(());
    }
    // SAFETY: the caller's promise.
    let ordinal = match unsafe { machine.stream_state(stream) }? {
        StreamState::Running(ordinal) => ordinal,
        StreamState::Capturing => return Err(Failure::Cuda(CAPTURING)),
    };
    // All that the transfer needs is made before the stream waits for it.
    machine.engine()?;
    machine.executor.start()?;
    if let Some(pointer) = machine.pointer(base)? {
        machine.destination(pointer, base)?;
    }
    let word = machine.word(ordinal)?;
    let met = Arc::new(AtomicU32::new(0));
    let operation = Box::new(Operation { file, base, writes, words, early, flags, word, met: met.clone() });
    let operation = Box::into_raw(operation);
    // SAFETY: the pointer is that of a box, which the second of its two users frees; until then both only read it.
    let word = unsafe { &(*operation).word };
    // SAFETY: the caller's promise for the stream. The function calls nothing of CUDA.
    let queued = unsafe { machine.call_and_wait(stream, reached, operation.cast(), word) };
    match queued {
        Ok(Queued::Both) => {
            if met.fetch_add(1, Ordering::AcqRel) == 1 {
                begin(operation);
            }
            Ok(())
        }
        // The stream will come to it, and finds nobody. It is left to itself: the word is not used again.
        Ok(Queued::CallAlone(error)) => Err(error.into()),
        Err(failure) => {
            // SAFETY: nobody else has the box: the stream does not know of it.
            let operation = unsafe { Box::from_raw(operation) };
            machine.release(operation.word);
            Err(failure)
        }
    }
}
