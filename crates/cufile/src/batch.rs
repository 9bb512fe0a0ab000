//! Batches: operations that are submitted together and polled later.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::{open_for_a_call, place};
use crate::error::{Code, Failure};
use crate::files::{RegisteredFile, usable_file};
use crate::io::{IoRequest, execute};
use crate::log::{Level, say};
use crate::machine::machine;
use crate::parameters::SizeParameter;
use crate::state::{HANDLES, answer, get, run, with_state};
use crate::stats::{self, CountedCall};
use crate::types::{CuFileError, IoEvent, IoParameters};

/// CUFILE_BATCH
const BATCH_MODE: c_int = 1;
const READ: c_int = 0;
const WRITE: c_int = 1;
/// An operation's status.
const CANCELED: c_int = 8;
const COMPLETE: c_int = 16;
const FAILED: c_int = 64;
/// How long a batch is polled for if the caller gives no time limit. Destroying one waits longer, and logs this
/// often.
const LONGEST: Duration = Duration::from_secs(600);

/// A batch.
struct Batch {
    most: usize,
    state: Mutex<BatchState>,
    changed: Condvar,
}

#[derive(Default)]
struct BatchState {
    /// Operations that no thread has started.
    waiting: VecDeque<Operation>,
    /// Operations that a thread is executing.
    running: usize,
    done: VecDeque<Done>,
    /// Whether the program has destroyed it: no operation may be added.
    is_destroyed: bool,
}

struct Operation {
    file: Arc<RegisteredFile>,
    request: IoRequest,
    cookie: usize,
}

struct Done {
    cookie: usize,
    status: c_int,
    result: isize,
}

impl BatchState {
    /// Operations that were not yet reported to the program.
    fn left(&self) -> usize {
        self.waiting.len() + self.running + self.done.len()
    }
}

impl Batch {
    fn state(&self) -> MutexGuard<'_, BatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues operations: all of them, or none.
    fn accept(&self, wanted: Vec<Operation>) -> Result<(), Failure> {
        let mut state = self.state();
        if state.is_destroyed {
            // Another thread has destroyed it since the handle was looked up.
            return Err(Code::InvalidValue.into());
        }
        if state.left() + wanted.len() > self.most {
            return Err(Code::BatchSubmit.into());
        }
        state.waiting.extend(wanted);
        Ok(())
    }

    /// Executes one operation, if one is left.
    fn work(&self) {
        let mut state = self.state();
        let Some(Operation { file, request, cookie }) = state.waiting.pop_front() else { return };
        state.running += 1;
        drop(state);
        // SAFETY: the program keeps the memory until the operation is reported, or until the call that destroys
        // the batch has returned, which waits for `running`.
        let moved = run("an operation of a batch", || unsafe { execute(&file, request) });
        let (status, result) = match moved {
            Ok(bytes) => (COMPLETE, bytes as isize),
            Err(failure) => (FAILED, -(failure.number() as isize)),
        };
        stats::count(CountedCall::BatchComplete, status == COMPLETE);
        let mut state = self.state();
        state.running -= 1;
        state.done.push_back(Done { cookie, status, result });
        self.changed.notify_all();
    }

    fn cancel(&self) {
        self.cancel_in(&mut self.state());
    }

    fn cancel_in(&self, state: &mut BatchState) {
        while let Some(Operation { cookie, .. }) = state.waiting.pop_front() {
            state.done.push_back(Done { cookie, status: CANCELED, result: 0 });
        }
        self.changed.notify_all();
    }

    /// Cancels what has not started, and waits for the rest without a limit: a thread that still moves bytes
    /// would write to the memory's next owner. Logs each time that `interval` is over.
    fn destroy(&self, interval: Duration) {
        let mut state = self.state();
        state.is_destroyed = true;
        self.cancel_in(&mut state);
        drop(state);
        loop {
            let running = self.wait(interval, |state| state.running == 0).running;
            if running == 0 {
                break;
            }
            say(Level::Error, &format!("{running} operations of a destroyed batch have not ended yet"));
        }
    }

    /// Waits at most `limit` for an answer.
    fn wait(&self, limit: Duration, is_enough: impl Fn(&BatchState) -> bool) -> MutexGuard<'_, BatchState> {
        let end = Instant::now() + limit;
        let mut state = self.state();
        while !is_enough(&state)
            && let Some(left) = end.checked_duration_since(Instant::now())
            && !left.is_zero()
        {
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }
}

fn batch(handle: *mut c_void) -> Result<Arc<Batch>, Failure> {
    get(handle).ok_or_else(|| Code::InvalidValue.into())
}

/// Makes a batch for this many operations.
///
/// # Safety
/// `out` is null or valid for a handle.
// SAFETY: the name is cuFile's, which this library replaces; as all below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSetUp(out: *mut *mut c_void, most: u32) -> CuFileError {
    let answer = answer("cuFileBatchIOSetUp", || {
        let (out, most) = (place(out)?, most as usize);
        open_for_a_call();
        let limit = with_state(|state| state.parameters.size(SizeParameter::Batch));
        if most == 0 || most > limit {
            return Err(Code::InvalidValue.into());
        }
        let batch = Batch { most, state: Mutex::default(), changed: Condvar::new() };
        // SAFETY: the caller's promise.
        unsafe { out.write(HANDLES.add(batch) as *mut c_void) };
        Ok(())
    });
    stats::count(CountedCall::BatchSetup, answer.err == 0);
    answer
}

/// Submits operations. On error none is submitted.
///
/// # Safety
/// `operations` is null or an array of this length. The memory of each stays valid until its operation is
/// reported, or [`cuFileBatchIODestroy`] has returned.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSubmit(
    handle: *mut c_void,
    count: u32,
    operations: *const IoParameters,
    _flags: u32,
) -> CuFileError {
    let answer = answer("cuFileBatchIOSubmit", || {
        let (batch, count) = (batch(handle)?, count as usize);
        let first = place(operations.cast_mut())?;
        if count == 0 {
            return Err(Code::InvalidValue.into());
        }
        if count > batch.most {
            return Err(Code::BatchSubmit.into());
        }
        // SAFETY: the caller's promise.
        let wanted = (0..count).map(|index| operation(&unsafe { first.add(index).read() }));
        let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
        machine().executor.start()?;
        batch.accept(wanted)?;
        for _ in 0..count {
            let batch = batch.clone();
            machine().executor.submit(move || batch.work());
        }
        Ok(())
    });
    stats::count(CountedCall::BatchSubmit, answer.err == 0);
    answer
}

fn operation(parameters: &IoParameters) -> Result<Operation, Failure> {
    let IoParameters { mode, base, file_offset, buffer_offset, size, handle, opcode, cookie } = *parameters;
    if mode != BATCH_MODE || !matches!(opcode, READ | WRITE) {
        return Err(Code::InvalidValue.into());
    }
    if handle.is_null() {
        return Err(Code::HandleNotRegistered.into());
    }
    let file = usable_file(handle)?;
    let writes = opcode == WRITE;
    let request = IoRequest { base: base as usize, bytes: size, file_offset, buffer_offset, writes };
    Ok(Operation { file, request, cookie: cookie as usize })
}

/// Waits until this many operations have ended, the time is over, or none is left. Reports each ended operation once.
///
/// # Safety
/// `count` is null or a number; `events` is null or has room for that many; `limit` is null or a time.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOGetStatus(
    handle: *mut c_void,
    least: u32,
    count: *mut u32,
    events: *mut IoEvent,
    limit: *const libc::timespec,
) -> CuFileError {
    answer("cuFileBatchIOGetStatus", || {
        let batch = batch(handle)?;
        let (count, events) = (place(count)?, place(events)?);
        // SAFETY: the caller's promise.
        let room = unsafe { count.read() } as usize;
        let least = least as usize;
        if least > room {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: the caller's promise.
        let limit = (!limit.is_null()).then(|| unsafe { limit.read_unaligned() });
        let limit = limit.and_then(duration).unwrap_or(LONGEST).min(LONGEST);
        let mut state =
            batch.wait(limit, |state| state.done.len() >= least || state.done.len() == state.left());
        let reported = state.done.len().min(room);
        for (index, Done { cookie, status, result }) in state.done.drain(..reported).enumerate() {
            let event = IoEvent { cookie: cookie as *mut c_void, status, result: result as usize };
            // SAFETY: the caller's promise: there is room for them.
            unsafe { events.add(index).write(event) };
        }
        // SAFETY: the caller's promise.
        unsafe { count.write(reported as u32) };
        Ok(())
    })
}

/// A valid time; programs are known to pass invalid ones.
fn duration(time: libc::timespec) -> Option<Duration> {
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let nanos = u32::try_from(time.tv_nsec).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(seconds, nanos))
}

/// Cancels the operations that have not started. Each is reported as cancelled.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBatchIOCancel(handle: *mut c_void) -> CuFileError {
    let answer = answer("cuFileBatchIOCancel", || {
        batch(handle)?.cancel();
        Ok(())
    });
    stats::count(CountedCall::BatchCancel, answer.err == 0);
    answer
}

/// Destroys a batch: cancels what has not started, and waits for the rest, however long that takes.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBatchIODestroy(handle: *mut c_void) {
    let destroyed = run("cuFileBatchIODestroy", || {
        let batch = HANDLES.remove::<Batch>(handle as usize).ok_or(Code::InvalidValue)?;
        batch.destroy(LONGEST);
        Ok(())
    });
    stats::count(CountedCall::BatchDestroy, destroyed.is_ok());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destroyed_batch_waits_for_what_runs_and_accepts_nothing_more() {
        let batch = Batch { most: 2, state: Mutex::default(), changed: Condvar::new() };
        batch.state().running = 1;
        std::thread::scope(|scope| {
            let destroyed = scope.spawn(|| batch.destroy(Duration::from_millis(10)));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!destroyed.is_finished());
            batch.state().running = 0;
            batch.changed.notify_all();
        });
        assert_eq!(batch.accept(Vec::new()), Err(Code::InvalidValue.into()));
    }

    #[test]
    fn invalid_times_are_none() {
        let time = |tv_sec, tv_nsec| duration(libc::timespec { tv_sec, tv_nsec });
        assert_eq!(time(1, 5), Some(Duration::new(1, 5)));
        assert_eq!(time(0, 0), Some(Duration::ZERO));
        for (seconds, nanos) in [(-1, 0), (0, -1), (0, 1_000_000_000), (i64::MIN, i64::MAX)] {
            assert_eq!(time(seconds, nanos), None);
        }
    }
}
