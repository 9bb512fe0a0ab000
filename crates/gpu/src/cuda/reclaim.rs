//! Frees memory, unregisters pages, unloads modules, destroys streams and events, and releases contexts, on a thread of ours and
//! only when nothing uses them.
//!
//! `cuMemFree`, `cuMemHostUnregister` and `cuModuleUnload` wait for every kernel of the GPU that runs, other people's
//! too, and such a kernel may wait for the thread that frees: for a lock that it holds (Python's GIL), or for its word
//! to end. So a thread that drops something never calls the driver. It queues a task here, and one thread runs the
//! tasks:
//!
//! - never while a persistent kernel runs, or one that has outlasted its limit;
//! - again later, if the driver refuses because a graph is being captured;
//! - never in a forked process: CUDA does not work there, and the thread does not exist there either;
//! - never once the process ends ([`process_end`](super::process_end)).
//!
//! Streams and events are destroyed while kernels run, too: that does not wait for them, only for the context's lock,
//! which a call that frees may hold.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_os::this_thread;

use super::driver::FORKED;
use super::process_end::{self, DriverEntry};
use crate::{Error, Result};

/// How long a thread that drops something waits for it to be freed. On an idle GPU that is long enough.
const GRACE: Duration = Duration::from_millis(20);
/// Delay before a refused task is retried, and before running kernels are polled again.
const RETRY: Duration = Duration::from_millis(2);
/// Its maximum.
const LONGEST_RETRY: Duration = Duration::from_millis(200);
/// Idle time after which the thread ends.
const REST: Duration = Duration::from_secs(1);
/// How long the start of a persistent kernel waits for a running task.
const START: Duration = Duration::from_secs(10);

/// Result of a task.
pub(super) enum Freed {
    /// It is done.
    Done,
    /// The driver refuses for now: try again.
    NotNow,
    /// The driver refuses for good. The resource is leaked until the process ends.
    Refused(String),
}

type ReclaimTask = Box<dyn FnMut() -> Freed + Send>;

/// A queued task.
struct QueuedTask {
    number: u64,
    /// Whether the driver waits for kernels in it.
    waits: bool,
    task: ReclaimTask,
}

/// Returns whether a kernel that outlasted its limit has ended. It holds everything that the kernel uses.
type Running = Box<dyn FnMut() -> bool + Send>;

#[derive(Default)]
struct ReclaimState {
    /// Persistent kernels.
    persistent: usize,
    overdue: Vec<Running>,
    tasks: VecDeque<QueuedTask>,
    /// Number of tasks ever queued.
    left: u64,
    /// The running task, and its thread.
    busy: Option<(u64, usize)>,
    has_thread: bool,
    /// Other calls that may wait for kernels, started while no persistent kernel ran.
    calls: usize,
    /// The kernels that outlasted their limits are being polled.
    asking: bool,
    refused: Refusals,
}

/// Resources that the driver refused to free.
#[derive(Clone, Default, Debug)]
pub(super) struct Refusals {
    /// How many.
    pub(super) count: u64,
    /// The last reason.
    pub(super) last: Option<String>,
}

impl ReclaimState {
    /// Whether tasks have to wait for a kernel.
    fn is_held_up(&self) -> bool {
        self.persistent > 0 || !self.overdue.is_empty() || self.asking
    }

    fn is_due(&self, number: u64) -> bool {
        self.busy.is_some_and(|(busy, _)| busy == number)
            || self.tasks.iter().any(|left| left.number == number)
    }

    /// The next task that may run now.
    fn take(&mut self) -> Option<QueuedTask> {
        let held_up = self.is_held_up();
        let at = self.tasks.iter().position(|left| !held_up || !left.waits)?;
        self.tasks.remove(at)
    }
}

struct ReclaimShared {
    state: Mutex<ReclaimState>,
    changed: Condvar,
    process: u32,
}

/// See the module.
#[derive(Clone)]
pub(super) struct Reclaimer(Arc<ReclaimShared>);

impl Default for Reclaimer {
    fn default() -> Self {
        let process = std::process::id();
        Self(Arc::new(ReclaimShared { state: Mutex::default(), changed: Condvar::new(), process }))
    }
}

impl Reclaimer {
    /// Whether this process was forked from the one that started the driver.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.0.process
    }

    /// Whether a kernel or a copy that outlasted its limit may still be running.
    pub(super) fn has_unfinished_work(&self) -> bool {
        // In a child another thread may have held the lock at the fork, and the parent's state is unknown.
        self.is_forked() || {
            let state = self.lock();
            state.asking || !state.overdue.is_empty()
        }
    }

    /// Queues a task for the thread, and waits a moment for it.
    pub(super) fn enqueue(&self, task: impl FnMut() -> Freed + Send + 'static) {
        let task: ReclaimTask = Box::new(task);
        if self.is_forked() || process_end::has_begun() {
            // A child's memory belongs to the parent, and another thread may have held the lock at the fork.
            std::mem::forget(task);
            return;
        }
        let mut state = self.lock();
        let healthy = state.tasks.iter().all(|left| !left.waits) && !state.is_held_up();
        let number = self.push(&mut state, true, task);
        let of_thread = state.busy.is_some_and(|(_, thread)| thread == this_thread());
        // While a long kernel runs only the first of many drops waits.
        if healthy && !of_thread {
            drop(self.wait(state, GRACE, |state| !state.is_due(number) || state.is_held_up()));
        }
    }

    /// Queues a task in which the driver waits for no kernel. It soon runs, even while persistent kernels run.
    pub(super) fn dispose(&self, task: impl FnMut() -> Freed + Send + 'static) {
        let task: ReclaimTask = Box::new(task);
        if self.is_forked() || process_end::has_begun() {
            std::mem::forget(task);
            return;
        }
        self.push(&mut self.lock(), false, task);
    }

    fn push(&self, state: &mut ReclaimState, waits: bool, task: ReclaimTask) -> u64 {
        let number = state.left;
        state.left += 1;
        state.tasks.push_back(QueuedTask { number, waits, task });
        self.wake(state);
        number
    }

    /// Waits at most `limit` until everything queued is freed, unless kernels block it; returns whether it is.
    pub(super) fn settle(&self, limit: Duration) -> bool {
        if self.is_forked() || process_end::has_begun() {
            return false;
        }
        let state = self.lock();
        if state.busy.is_some_and(|(_, thread)| thread == this_thread()) {
            return false;
        }
        let last = state.left;
        let is_free = |state: &ReclaimState| {
            state.tasks.iter().all(|left| left.number >= last)
                && state.busy.is_none_or(|(task, _)| task >= last)
        };
        let state = self.wait(state, limit, |state| is_free(state) || state.is_held_up());
        is_free(&state)
    }

    /// What the driver has refused to free so far.
    pub(super) fn refusals(&self) -> Refusals {
        if self.is_forked() {
            // They are the parent's.
            return Refusals::default();
        }
        self.lock().refused.clone()
    }

    /// Announces a persistent kernel: nothing is freed until [`Self::end`].
    ///
    /// # Errors
    /// When a running task keeps waiting for other kernels; in a forked process.
    pub(super) fn begin(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::NotSupported { what: "starting a kernel".into(), why: FORKED.into() });
        }
        let mut state = self.lock();
        state.persistent += 1;
        let is_quiet = |state: &ReclaimState| state.busy.is_none() && state.calls == 0;
        let mut state = self.wait(state, START, is_quiet);
        if is_quiet(&state) {
            return Ok(());
        }
        state.persistent -= 1;
        // What was put off for the kernel, which does not run now, is done.
        self.wake(&mut state);
        // Nothing was started: no work is under way.
        Err(Error::Launch(format!(
            "freeing GPU memory or loading code did not end within {} s, and a persistent kernel must not start before",
            START.as_secs()
        )))
    }

    /// Makes a call that may wait for kernels, because it loads code. While a persistent kernel runs, a separate thread
    /// makes it, with a time limit of `limit`; a later result is dropped there.
    ///
    /// # Errors
    /// Those of the call; on a time-out, or if there is no thread for it.
    pub(super) fn load_with_time_limit<R: Send + 'static>(
        &self,
        what: &str,
        limit: Duration,
        call: impl FnOnce() -> Result<R> + Send + 'static,
    ) -> Result<R> {
        /// Counts a call made on this thread.
        struct CallGuard<'a>(&'a Reclaimer);
        impl Drop for CallGuard<'_> {
            fn drop(&mut self) {
                self.0.lock().calls -= 1;
                self.0.0.changed.notify_all();
            }
        }
        if self.is_forked() {
            // The call refuses there; another thread may have held the lock at the fork.
            return call();
        }
        {
            let mut state = self.lock();
            if !state.is_held_up() {
                state.calls += 1;
                drop(state);
                let _counted = CallGuard(self);
                return call();
            }
        }
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("onehop loader".into());
        let spawned = thread.spawn(move || {
            let _ = sender.try_send(call());
        });
        spawned.map_err(|error| Error::Launch(format!("no thread could be started for {what}: {error}")))?;
        receiver
            .recv_timeout(limit)
            .unwrap_or_else(|_| Err(Error::Silent { what: what.into(), seconds: limit.as_secs() }))
    }

    /// The persistent kernel has ended.
    pub(super) fn end(&self) {
        if self.is_forked() {
            return;
        }
        let mut state = self.lock();
        state.persistent -= 1;
        self.wake(&mut state);
    }

    /// A kernel outlasted its limit: nothing is freed until `is_over`, which holds everything that the kernel uses,
    /// returns true.
    pub(super) fn outlasted(&self, is_over: impl FnMut() -> bool + Send + 'static) {
        if self.is_forked() {
            std::mem::forget(is_over);
            return;
        }
        let mut state = self.lock();
        state.overdue.push(Box::new(is_over));
        self.wake(&mut state);
    }

    fn lock(&self) -> MutexGuard<'_, ReclaimState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, ReclaimState>,
        limit: Duration,
        enough: impl Fn(&ReclaimState) -> bool,
    ) -> MutexGuard<'a, ReclaimState> {
        let waited = self.0.changed.wait_timeout_while(state, limit, |state| !enough(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Ensures that a thread runs if there is work.
    fn wake(&self, state: &mut ReclaimState) {
        self.0.changed.notify_all();
        if state.has_thread || !has_work(state) {
            return;
        }
        let shared = self.clone();
        let thread = std::thread::Builder::new().name("onehop reclaimer".into());
        // Without a thread the tasks wait for the next one that is queued.
        state.has_thread = thread.spawn(move || shared.run()).is_ok();
    }

    /// The thread's loop. It ends when idle for a while.
    fn run(&self) {
        let mut pause = RETRY;
        let mut state = self.lock();
        loop {
            if !state.overdue.is_empty() {
                state = self.ask(state);
            }
            if !has_work(&state) {
                state = self.wait(state, REST, has_work);
                if has_work(&state) {
                    continue;
                }
                state.has_thread = false;
                return;
            }
            let mut turns = state.tasks.len();
            let mut progress = false;
            while turns > 0 {
                let Some(left) = state.take() else { break };
                turns -= 1;
                let done;
                (state, done) = self.run_task(state, left);
                progress |= done;
            }
            if progress {
                pause = RETRY;
            } else if has_work(&state) {
                let left = state.left;
                state = self.wait(state, pause, |state| state.left != left);
                pause = (pause * 2).min(LONGEST_RETRY);
            }
        }
    }

    /// Runs a task with no lock held; returns whether it is finished.
    fn run_task<'a>(
        &'a self,
        mut state: MutexGuard<'a, ReclaimState>,
        mut left: QueuedTask,
    ) -> (MutexGuard<'a, ReclaimState>, bool) {
        state.busy = Some((left.number, this_thread()));
        drop(state);
        let panicked = || String::from("the code that frees it panicked");
        let Some(_inside) = DriverEntry::new() else {
            std::mem::forget(left);
            let mut state = self.lock();
            state.busy = None;
            return (state, true);
        };
        let freed = catch_unwind(AssertUnwindSafe(&mut left.task));
        let freed = freed.unwrap_or_else(|_| Freed::Refused(panicked()));
        let (mut again, mut refused) = (None, None);
        match freed {
            // This may run code of a memory's owner.
            Freed::Done => {
                refused = catch_unwind(AssertUnwindSafe(|| drop(left))).err().map(|_| panicked());
            }
            Freed::NotNow => again = Some(left),
            Freed::Refused(why) => {
                // Its memory must stay as well.
                std::mem::forget(left);
                refused = Some(why);
            }
        }
        let mut state = self.lock();
        state.busy = None;
        let done = again.is_none();
        state.tasks.extend(again);
        if refused.is_some() {
            state.refused.count += 1;
            state.refused.last = refused;
        }
        self.0.changed.notify_all();
        (state, done)
    }

    /// Polls the kernels that outlasted their limits, with no lock held.
    fn ask<'a>(&'a self, mut state: MutexGuard<'a, ReclaimState>) -> MutexGuard<'a, ReclaimState> {
        let overdue = std::mem::take(&mut state.overdue);
        state.asking = true;
        drop(state);
        let mut running = Vec::with_capacity(overdue.len());
        for mut is_over in overdue {
            let Some(_inside) = DriverEntry::new() else {
                std::mem::forget(is_over);
                continue;
            };
            // One that does not answer is not known to have ended.
            if catch_unwind(AssertUnwindSafe(&mut is_over)).unwrap_or(false) {
                // As for tasks.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(is_over)));
            } else {
                running.push(is_over);
            }
        }
        let mut state = self.lock();
        state.asking = false;
        state.overdue.append(&mut running);
        self.0.changed.notify_all();
        state
    }
}

/// Whether the thread has work, or something to wait for.
fn has_work(state: &ReclaimState) -> bool {
    !state.overdue.is_empty() || state.tasks.iter().any(|left| state.persistent == 0 || !left.waits)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "reclaim_tests.rs"]
mod tests;
