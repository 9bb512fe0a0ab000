//! Handles of C programs: looked up in each call, and invalid in a forked child.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::handles::{Handles, HeldHandles};
use onehop_os::{ForkLocks, HeldInFork};

use crate::error::{Error, Result};

/// C programs have no other place for it.
static HANDLES: Handles = Handles::new();
static HELD: HeldInFork<ForkedHandles> = HeldInFork::new();

/// A forked child has none of its parent's threads, and the parent keeps using the drives. So the parent's handles are
/// invalid in the child.
struct ForkedHandles(HeldHandles<'static>);

impl ForkLocks for ForkedHandles {
    fn place() -> &'static HeldInFork<Self> {
        &HELD
    }

    fn take() -> Self {
        Self(HANDLES.hold())
    }

    fn disown(&mut self) {
        self.0.disown();
    }
}

/// The handles. In a child, no other thread can hold the lock.
fn handles() -> Result<&'static Handles> {
    onehop_os::watch_forks::<ForkedHandles>().map_err(|error| Error::NotPossible(error.to_string()))?;
    Ok(&HANDLES)
}

/// The object of a caller's handle.
pub(crate) fn object<T: Send + Sync + 'static>(handle: *const T, what: &'static str) -> Result<Arc<T>> {
    if handle.is_null() {
        return Err(Error::Null(what));
    }
    handles()?.get(handle.addr()).ok_or(Error::Unknown(what))
}

/// Makes a handle for a new object.
pub(crate) fn handle<T: Send + Sync + 'static>(object: T) -> Result<*mut T> {
    Ok(std::ptr::without_provenance_mut(handles()?.add(object)))
}

/// Closes a handle, which may be null; returns its object, which other threads' calls may still use.
pub(crate) fn close<T: Send + Sync + 'static>(
    handle: *const T,
    what: &'static str,
) -> Result<Option<Arc<T>>> {
    if handle.is_null() {
        return Ok(None);
    }
    handles()?.remove(handle.addr()).map(Some).ok_or(Error::Unknown(what))
}

/// Waits until no other thread's call uses an object. After a time-out, the last of these calls drops it.
pub(crate) fn wait_until_unused<T>(mut object: Arc<T>, what: &'static str) -> Result<T> {
    const LONGEST: Duration = Duration::from_secs(10);
    let start = Instant::now();
    loop {
        match Arc::try_unwrap(object) {
            Ok(wait_until_unused) => return Ok(wait_until_unused),
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
