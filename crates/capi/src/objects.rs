//! What C programs hold: handles, each looked up for a call, and a process that forks.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onehop_os::handles::{Handles, HeldHandles};

use crate::error::{Error, Result};

/// C programs have no other place for it.
static HANDLES: Handles = Handles::new();

/// What a caller's handle stands for.
pub(crate) fn object<T: Send + Sync + 'static>(handle: *const T, what: &'static str) -> Result<Arc<T>> {
    if handle.is_null() {
        return Err(Error::Null(what));
    }
    HANDLES.get(handle.addr()).ok_or(Error::Unknown(what))
}

/// A handle for a new object.
pub(crate) fn handle<T: Send + Sync + 'static>(object: T) -> Result<*mut T> {
    watch_forks()?;
    Ok(std::ptr::without_provenance_mut(HANDLES.add(object)))
}

/// Closes a handle, which may be null; gives its object, which calls of other threads may still use.
pub(crate) fn close<T: Send + Sync + 'static>(
    handle: *const T,
    what: &'static str,
) -> Result<Option<Arc<T>>> {
    if handle.is_null() {
        return Ok(None);
    }
    HANDLES.remove(handle.addr()).map(Some).ok_or(Error::Unknown(what))
}

/// Waits until no call of another thread uses an object. Where that takes too long, the last of these calls drops it.
pub(crate) fn alone<T>(mut object: Arc<T>, what: &'static str) -> Result<T> {
    const LONGEST: Duration = Duration::from_secs(10);
    let start = Instant::now();
    loop {
        match Arc::try_unwrap(object) {
            Ok(alone) => return Ok(alone),
            Err(_) if start.elapsed() > LONGEST => {
                return Err(Error::NotPossible(format!(
                    "a call of another thread has used `{what}` for {LONGEST:?}; it is closed when that call returns"
                )));
            }
            Err(used) => object = used,
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

thread_local! {
    /// The lock of the handles while this thread forks.
    static HELD: Cell<Option<HeldHandles<'static>>> = const { Cell::new(None) };
}

/// A child has none of its parent's threads, and its parent goes on with the drives: there, handles of before name nothing.
fn watch_forks() -> Result<()> {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::AcqRel) {
        return Ok(());
    }
    onehop_os::at_fork(before_fork, after_fork, in_child).map_err(|error| {
        WATCHED.store(false, Ordering::Release);
        Error::NotPossible(error.to_string())
    })
}

extern "C" fn before_fork() {
    // A thread that forks while it ends has no place for the lock, and takes none.
    let _ = HELD.try_with(|held| held.set(Some(HANDLES.hold())));
}

extern "C" fn after_fork() {
    let _ = HELD.try_with(Cell::take);
}

extern "C" fn in_child() {
    if let Ok(Some(held)) = HELD.try_with(Cell::take) {
        held.disown();
    }
}
