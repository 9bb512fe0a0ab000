//! Frees memory, unregisters pages, unloads modules, destroys streams and events, and releases contexts, on a thread of ours and
//! only when nothing uses them.
//!
//! `cuMemFree`, `cuMemHostUnregister` and `cuModuleUnload` wait for every kernel of the GPU that runs, other people's too,
//! and such a kernel may wait for the very thread that frees: for a lock that it holds (Python's GIL), or for its word to
//! end. So no thread that drops something calls the driver. It leaves a task here, and one thread carries the tasks out:
//!
//! - none while a kernel runs that only its host ends, or one that has outlasted its limit;
//! - again later, if the driver refuses because a graph is being captured;
//! - never in a process that was forked: CUDA does not work there, and the thread is not there either.
//!
//! Streams and events are destroyed beside kernels too: that waits for none of them, only for the context's lock, which a call
//! that frees may hold.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use crate::{Error, Result};

/// How long a thread that drops something waits for it to be freed. On an idle GPU it is, before the drop returns.
const GRACE: Duration = Duration::from_millis(20);
/// How long to wait before a refused task is tried again, and before running kernels are asked about again.
const RETRY: Duration = Duration::from_millis(2);
/// How long at most.
const LONGEST_RETRY: Duration = Duration::from_millis(200);
/// How long the thread waits for more to do before it ends.
const REST: Duration = Duration::from_secs(1);
/// How long the start of a persistent kernel waits for a task that is being carried out.
const START: Duration = Duration::from_secs(10);

/// What came of a task.
pub(super) enum Freed {
    /// It is done.
    Done,
    /// The driver refuses for now: it is to be tried again.
    NotNow,
    /// The driver refuses for good. What was to be freed stays as it is until the process ends.
    Refused(String),
}

type Task = Box<dyn FnMut() -> Freed + Send>;

/// A task that was left.
struct Left {
    number: u64,
    /// Whether the driver waits for kernels in it.
    waits: bool,
    task: Task,
}

/// Whether a kernel that outlasted its limit has ended. It holds all that the kernel uses.
type Running = Box<dyn FnMut() -> bool + Send>;

#[derive(Default)]
struct State {
    /// Kernels that only their hosts end.
    persistent: usize,
    overdue: Vec<Running>,
    tasks: VecDeque<Left>,
    /// Tasks that were ever left here.
    left: u64,
    /// The task that is being carried out, and its thread.
    busy: Option<(u64, ThreadId)>,
    has_thread: bool,
    /// Calls of others that may wait for kernels, and were begun when none stayed.
    calls: usize,
    /// The kernels that outlasted their limits are being asked whether they have ended.
    asking: bool,
    refused: Refusals,
}

/// What the driver did not take back.
#[derive(Clone, Default, Debug)]
pub(super) struct Refusals {
    /// How many times.
    pub(super) count: u64,
    /// Why, the last time.
    pub(super) last: Option<String>,
}

impl State {
    /// Whether tasks have to wait for a kernel.
    fn is_held_up(&self) -> bool {
        self.persistent > 0 || !self.overdue.is_empty() || self.asking
    }

    fn is_due(&self, number: u64) -> bool {
        self.busy.is_some_and(|(busy, _)| busy == number)
            || self.tasks.iter().any(|left| left.number == number)
    }

    /// The next task that may be carried out now.
    fn take(&mut self) -> Option<Left> {
        let held_up = self.is_held_up();
        let at = self.tasks.iter().position(|left| !held_up || !left.waits)?;
        self.tasks.remove(at)
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    process: u32,
}

/// See the module.
#[derive(Clone)]
pub(super) struct Reclaimer(Arc<Shared>);

impl Default for Reclaimer {
    fn default() -> Self {
        let process = std::process::id();
        Self(Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), process }))
    }
}

impl Reclaimer {
    /// Whether this process is another than the one that started the driver.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.0.process
    }

    /// Leaves a task for the thread, and waits a moment for it.
    pub(super) fn give_back(&self, task: impl FnMut() -> Freed + Send + 'static) {
        let task: Task = Box::new(task);
        if self.is_forked() {
            // Its memory is the parent's, and another thread may have held the lock at the fork.
            std::mem::forget(task);
            return;
        }
        let mut state = self.lock();
        let healthy = state.tasks.iter().all(|left| !left.waits) && !state.is_held_up();
        let number = self.push(&mut state, true, task);
        let of_thread = state.busy.is_some_and(|(_, thread)| thread == std::thread::current().id());
        // Of many drops beside a long kernel only the first waits.
        if healthy && !of_thread {
            drop(self.wait(state, GRACE, |state| !state.is_due(number) || state.is_held_up()));
        }
    }

    /// Leaves a task in which the driver waits for no kernel. It is carried out soon, also beside kernels that stay.
    pub(super) fn dispose(&self, task: impl FnMut() -> Freed + Send + 'static) {
        let task: Task = Box::new(task);
        if self.is_forked() {
            std::mem::forget(task);
            return;
        }
        self.push(&mut self.lock(), false, task);
    }

    fn push(&self, state: &mut State, waits: bool, task: Task) -> u64 {
        let number = state.left;
        state.left += 1;
        state.tasks.push_back(Left { number, waits, task });
        self.wake(state);
        number
    }

    /// Waits until all that was left here is freed; no longer than this, and not for kernels that hold it up. Whether it is.
    pub(super) fn settle(&self, limit: Duration) -> bool {
        if self.is_forked() {
            return false;
        }
        let state = self.lock();
        let own = std::thread::current().id();
        if state.busy.is_some_and(|(_, thread)| thread == own) {
            return false;
        }
        let last = state.left;
        let is_free = |state: &State| {
            state.tasks.iter().all(|left| left.number >= last)
                && state.busy.is_none_or(|(task, _)| task >= last)
        };
        let state = self.wait(state, limit, |state| is_free(state) || state.is_held_up());
        is_free(&state)
    }

    /// What the driver did not take back so far.
    pub(super) fn refusals(&self) -> Refusals {
        self.lock().refused.clone()
    }

    /// A kernel starts that only its host ends: nothing is freed until [`Self::end`].
    ///
    /// # Errors
    /// When a task is being carried out that waits for other kernels, and goes on doing so.
    pub(super) fn begin(&self) -> Result<()> {
        let mut state = self.lock();
        state.persistent += 1;
        let is_quiet = |state: &State| state.busy.is_none() && state.calls == 0;
        let mut state = self.wait(state, START, is_quiet);
        if is_quiet(&state) {
            return Ok(());
        }
        state.persistent -= 1;
        Err(Error::Silent {
            what: "freeing GPU memory or loading code before a kernel starts to stay".into(),
            seconds: START.as_secs(),
        })
    }

    /// Makes a call that may wait for kernels: it loads code. Beside one that stays it is made by a thread of its own, and waited for
    /// no longer than `limit`; what it gives later is dropped there.
    ///
    /// # Errors
    /// Those of the call; when it takes too long, or there is no thread for it.
    pub(super) fn beside_kernels<R: Send + 'static>(
        &self,
        what: &str,
        limit: Duration,
        call: impl FnOnce() -> Result<R> + Send + 'static,
    ) -> Result<R> {
        /// Counts a call that is made on this thread.
        struct Counted<'a>(&'a Reclaimer);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.lock().calls -= 1;
                self.0.0.changed.notify_all();
            }
        }
        if self.is_forked() {
            // It is refused there; another thread may have held the lock at the fork.
            return call();
        }
        {
            let mut state = self.lock();
            if !state.is_held_up() {
                state.calls += 1;
                drop(state);
                let _counted = Counted(self);
                return call();
            }
        }
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("onehop loader".into());
        let spawned = thread.spawn(move || {
            let _ = sender.try_send(call());
        });
        spawned.map_err(|error| Error::Launch(format!("this machine gave no thread for {what}: {error}")))?;
        receiver
            .recv_timeout(limit)
            .unwrap_or_else(|_| Err(Error::Silent { what: what.into(), seconds: limit.as_secs() }))
    }

    /// It has ended.
    pub(super) fn end(&self) {
        if self.is_forked() {
            return;
        }
        let mut state = self.lock();
        state.persistent -= 1;
        self.wake(&mut state);
    }

    /// A kernel outlasted its limit: nothing is freed until `is_over`, which holds all that the kernel uses, says that it has ended.
    pub(super) fn outlasted(&self, is_over: impl FnMut() -> bool + Send + 'static) {
        if self.is_forked() {
            std::mem::forget(is_over);
            return;
        }
        let mut state = self.lock();
        state.overdue.push(Box::new(is_over));
        self.wake(&mut state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        limit: Duration,
        enough: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let waited = self.0.changed.wait_timeout_while(state, limit, |state| !enough(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sees to it that there is a thread where there is something to do.
    fn wake(&self, state: &mut State) {
        self.0.changed.notify_all();
        if state.has_thread || !has_work(state) {
            return;
        }
        let shared = self.clone();
        let thread = std::thread::Builder::new().name("onehop reclaimer".into());
        // Without a thread the tasks wait for the next one that is left.
        state.has_thread = thread.spawn(move || shared.run()).is_ok();
    }

    /// What the thread does. It ends when there was nothing to do for a while.
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
                (state, done) = self.carry_out(state, left);
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

    /// Carries a task out with no lock held; whether it need not be tried again.
    fn carry_out<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        mut left: Left,
    ) -> (MutexGuard<'a, State>, bool) {
        state.busy = Some((left.number, std::thread::current().id()));
        drop(state);
        // It may run the code of a memory's owner.
        let freed = catch_unwind(AssertUnwindSafe(&mut left.task));
        let freed = freed.unwrap_or_else(|_| Freed::Refused("the code that frees it panicked".into()));
        let (mut again, mut refused) = (None, None);
        match freed {
            Freed::Done => drop(left),
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

    /// Asks the kernels that outlasted their limits whether they have ended, with no lock held.
    fn ask<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let mut overdue = std::mem::take(&mut state.overdue);
        state.asking = true;
        drop(state);
        overdue.retain_mut(|is_over| !is_over());
        let mut state = self.lock();
        state.asking = false;
        state.overdue.append(&mut overdue);
        self.0.changed.notify_all();
        state
    }
}

/// Whether there is something that the thread has to do, or wait for.
fn has_work(state: &State) -> bool {
    !state.overdue.is_empty() || state.tasks.iter().any(|left| state.persistent == 0 || !left.waits)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn tasks_are_over_when_a_drop_returns_and_none_runs_on_its_thread() {
        let reclaimer = Reclaimer::default();
        let own = std::thread::current().id();
        for _ in 0..200 {
            let (sender, receiver) = channel();
            reclaimer.give_back(move || {
                sender.send(std::thread::current().id()).unwrap();
                Freed::Done
            });
            assert_ne!(receiver.recv_timeout(TEST_TIMEOUT).unwrap(), own);
        }
        assert!(reclaimer.settle(TEST_TIMEOUT));
    }

    /// As Python's GIL: the task ends only when the thread that dropped something has let a lock go.
    #[test]
    fn a_task_that_waits_for_the_dropping_thread_does_not_keep_it() {
        let reclaimer = Reclaimer::default();
        let lock = Arc::new(Mutex::new(()));
        let held = lock.lock().unwrap();
        let start = Instant::now();
        for _ in 0..100 {
            let wanted = lock.clone();
            reclaimer.give_back(move || {
                drop(wanted.lock());
                Freed::Done
            });
        }
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!(!reclaimer.settle(Duration::from_millis(1)));
        drop(held);
        assert!(reclaimer.settle(TEST_TIMEOUT));
    }

    #[test]
    fn what_is_refused_for_now_is_tried_again_and_holds_nothing_up() {
        let reclaimer = Reclaimer::default();
        let (capturing, tries) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU32::new(0)));
        let (is_capturing, tried) = (capturing.clone(), tries.clone());
        reclaimer.give_back(move || {
            tried.fetch_add(1, Ordering::AcqRel);
            if is_capturing.load(Ordering::Acquire) { Freed::NotNow } else { Freed::Done }
        });
        let (sender, receiver) = channel();
        reclaimer.give_back(move || {
            sender.send(()).unwrap();
            Freed::Done
        });
        receiver.recv_timeout(TEST_TIMEOUT).unwrap();
        assert!(!reclaimer.settle(Duration::from_millis(20)) && tries.load(Ordering::Acquire) > 1);
        capturing.store(false, Ordering::Release);
        assert!(reclaimer.settle(TEST_TIMEOUT));
        assert_eq!(reclaimer.refusals().count, 0);
    }

    #[test]
    fn what_is_refused_for_good_is_left_and_counted() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("it was dropped under the GPU");
            }
        }
        let reclaimer = Reclaimer::default();
        let bomb = Bomb;
        reclaimer.give_back(move || {
            let _ = &bomb;
            Freed::Refused("no such address".into())
        });
        assert!(reclaimer.settle(TEST_TIMEOUT));
        let refusals = reclaimer.refusals();
        assert_eq!((refusals.count, refusals.last.as_deref()), (1, Some("no such address")));
    }

    fn counted(reclaimer: &Reclaimer, done: &Arc<AtomicU32>) {
        let done = done.clone();
        reclaimer.give_back(move || {
            done.fetch_add(1, Ordering::AcqRel);
            Freed::Done
        });
    }

    #[test]
    fn nothing_is_freed_beside_a_kernel_that_stays() {
        let (reclaimer, done) = (Reclaimer::default(), Arc::<AtomicU32>::default());
        reclaimer.begin().unwrap();
        reclaimer.begin().unwrap();
        let start = Instant::now();
        (0..100).for_each(|_| counted(&reclaimer, &done));
        assert!(!reclaimer.settle(TEST_TIMEOUT) && start.elapsed() < Duration::from_secs(2));
        reclaimer.end();
        // What waits for no kernel is not held up.
        let (sender, receiver) = channel();
        reclaimer.dispose(move || {
            sender.send(()).unwrap();
            Freed::Done
        });
        receiver.recv_timeout(TEST_TIMEOUT).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(done.load(Ordering::Acquire), 0);
        reclaimer.end();
        assert!(reclaimer.settle(TEST_TIMEOUT));
        assert_eq!(done.load(Ordering::Acquire), 100);
    }

    #[test]
    fn nothing_is_freed_beside_a_kernel_that_outlasted_its_limit_until_it_ends() {
        let (reclaimer, done) = (Reclaimer::default(), Arc::<AtomicU32>::default());
        let running = Arc::new(AtomicBool::new(true));
        let (is_running, used) = (running.clone(), Arc::new(()));
        let use_of_it = used.clone();
        reclaimer.outlasted(move || {
            let _ = &use_of_it;
            !is_running.load(Ordering::Acquire)
        });
        counted(&reclaimer, &done);
        assert!(!reclaimer.settle(Duration::from_millis(50)));
        assert_eq!((done.load(Ordering::Acquire), Arc::strong_count(&used)), (0, 2));
        running.store(false, Ordering::Release);
        let start = Instant::now();
        while !reclaimer.settle(TEST_TIMEOUT) {
            assert!(start.elapsed() < TEST_TIMEOUT);
        }
        assert_eq!((done.load(Ordering::Acquire), Arc::strong_count(&used)), (1, 1));
    }

    #[test]
    fn no_kernel_starts_to_stay_while_something_is_being_freed() {
        let reclaimer = Reclaimer::default();
        let (sender, receiver) = channel::<()>();
        let free = Arc::new(AtomicBool::new(false));
        let is_free = free.clone();
        let mut receiver = Some(receiver);
        reclaimer.give_back(move || {
            let _ = receiver.take().map(|receiver| receiver.recv());
            is_free.store(true, Ordering::Release);
            Freed::Done
        });
        let ender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(sender);
        });
        reclaimer.begin().unwrap();
        assert!(free.load(Ordering::Acquire));
        reclaimer.end();
        ender.join().unwrap();
    }

    #[test]
    fn a_call_beside_a_kernel_that_stays_is_not_waited_for_for_ever() {
        let (reclaimer, own) = (Reclaimer::default(), std::thread::current().id());
        let of_call = |limit| reclaimer.beside_kernels("a call", limit, || Ok(std::thread::current().id()));
        assert_eq!(of_call(Duration::ZERO).unwrap(), own);
        reclaimer.begin().unwrap();
        assert_ne!(of_call(TEST_TIMEOUT).unwrap(), own);
        let (sender, receiver) = channel::<()>();
        let late = reclaimer.beside_kernels("a call", Duration::from_millis(20), move || {
            let _ = receiver.recv();
            Ok(())
        });
        assert!(matches!(late, Err(Error::Silent { .. })));
        drop(sender);
        reclaimer.end();
        let failed =
            reclaimer.beside_kernels("a call", Duration::ZERO, || Err::<(), _>(Error::Launch(String::new())));
        assert!(matches!(failed, Err(Error::Launch(_))));
        // Neither do those that come after a call wait for one that has ended.
        reclaimer.begin().unwrap();
        reclaimer.end();
    }

    /// A task's memory may run its owner's code when it goes, and that may drop GPU memory.
    #[test]
    fn a_task_may_leave_tasks() {
        let (reclaimer, done) = (Reclaimer::default(), Arc::<AtomicU32>::default());
        let (inner, inner_done) = (reclaimer.clone(), done.clone());
        reclaimer.give_back(move || {
            counted(&inner, &inner_done);
            assert!(!inner.settle(TEST_TIMEOUT), "the thread waited for itself");
            Freed::Done
        });
        assert!(reclaimer.settle(TEST_TIMEOUT) && reclaimer.settle(TEST_TIMEOUT));
        assert_eq!(done.load(Ordering::Acquire), 1);
    }
}
