//! The end of the process: the driver's library may be gone before the thread that frees memory is.
//!
//! `exit` runs the destructors of libraries while other threads go on. A thread that calls the driver then may crash in it. So a
//! handler that runs before them waits for the call that is being made, and has no other made: the system frees what is left.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use onehop_os::Deadline;

/// How long the end of the process waits for a call. The driver may wait for a kernel in it.
const LONGEST: Duration = Duration::from_secs(1);

/// The process that is watched; 0 for none.
static WATCHED: AtomicU32 = AtomicU32::new(0);
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// Threads that are in the driver to free something.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// Watches for the end of this process.
pub(super) fn watch() -> onehop_os::Result<()> {
    let process = std::process::id();
    let before = WATCHED.swap(process, Ordering::SeqCst);
    if before == process {
        return Ok(());
    }
    if before == 0 {
        return onehop_os::at_exit(wait_for_calls).inspect_err(|_| WATCHED.store(0, Ordering::SeqCst));
    }
    // This one was forked. It has the handler of its parent, and none of the threads.
    INSIDE.store(0, Ordering::SeqCst);
    Ok(())
}

extern "C" fn wait_for_calls() {
    if WATCHED.load(Ordering::SeqCst) != std::process::id() {
        return;
    }
    IS_ENDING.store(true, Ordering::SeqCst);
    let deadline = Deadline::after(LONGEST);
    while INSIDE.load(Ordering::SeqCst) > 0 && !deadline.passed() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether the process ends, so that nothing may be freed any more.
pub(super) fn has_begun() -> bool {
    IS_ENDING.load(Ordering::SeqCst)
}

/// Keeps the process from ending while this thread is in the driver.
pub(super) struct DriverEntry(());

impl DriverEntry {
    /// None once the process ends.
    pub(super) fn new() -> Option<Self> {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let entry = Self(());
        (!has_begun()).then_some(entry)
    }
}

impl Drop for DriverEntry {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}
