//! FUSE requests that wait for other programs: locks, and opens of files with leases.
//!
//! A waiting request holds no thread. One thread schedules new attempts now and then, and at once when a lock of that
//! file is released here. The attempts run on other threads, because a file system may hang.
//!
//! The kernel reports a signal of a waiting thread by `FUSE_INTERRUPT`, which `fuser` refuses. So the signals of
//! waiting threads are read from `/proc`: once a second for each thread, and less often where that costs much CPU time.
//! SIGKILL is read separately, at a cost that does not depend on the thread, so it is seen within a second. Neither is
//! read during an attempt, which may hang in a file system.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::ThreadStarter;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::io::pool::{PoolUser, SlowCall, ThreadPool};
use crate::lock;

/// Waiting requests. A user may have as many as remain for others.
const MAX: usize = 1024;
/// The first and the longest pause between attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(200));

/// How often a waiting thread is checked for SIGKILL, and for other signals where that is cheap.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The longest interval between checks for other signals. Reading the status of a thread with 65 536 groups takes 10
/// ms.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Checking one person's threads takes at most this fraction of a CPU, unless the longest interval is reached.
const MAX_CPU_FRACTION: u32 = 20;

/// What an attempt should do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitAction {
    /// Try again.
    Try,
    /// Reply with an error.
    Fail(Errno),
}

/// Tries the request. Returns whether it has replied.
type Attempt = Box<dyn FnMut(WaitAction) -> bool + Send>;

/// A waiting thread and its request.
pub(crate) struct Waiter {
    pub inode: u64,
    pub uid: u32,
    /// The thread, which signals interrupt.
    pub thread: u32,
    /// When the wait ends with `EAGAIN`.
    pub limit: Option<Duration>,
    /// Runs attempts on threads that may block.
    pub threads: WaitThreads,
}

/// Runs an attempt on a thread that may block.
pub(crate) type WaitThreads = Arc<dyn Fn(SlowCall) + Send + Sync>;

/// Threads of a pool, at a user's turn.
pub(crate) fn wait_threads<K: PoolUser>(pool: &ThreadPool<SlowCall, K>, user: K) -> WaitThreads {
    let pool = pool.clone();
    Arc::new(move |call| pool.add(user, call))
}

struct Wait {
    by: Waiter,
    began: Instant,
    next: Instant,
    pause: Duration,
    /// When the thread is checked next for SIGKILL, and for any signal.
    next_checks: [Instant; 2],
    attempt: Attempt,
}

impl Wait {
    fn new(by: Waiter, attempt: Attempt) -> Self {
        let now = Instant::now();
        Self {
            by,
            began: now,
            next: now + PAUSES.0,
            pause: PAUSES.0,
            next_checks: [now + SIGNAL_CHECK_INTERVAL; 2],
            attempt,
        }
    }

    /// Makes an attempt. Returns whether the request is answered. Its user has `theirs` waits.
    fn run_attempt(&mut self, theirs: usize, signals: &ThreadSignals) -> bool {
        if (self.attempt)(WaitAction::Try) {
            return true;
        }
        let why = if self.has_signal(theirs, signals) {
            Errno::INTR
        } else if self.by.limit.is_some_and(|limit| self.began.elapsed() > limit) {
            Errno::AGAIN
        } else {
            self.next = Instant::now() + self.pause;
            self.pause = (2 * self.pause).min(PAUSES.1);
            return false;
        };
        (self.attempt)(WaitAction::Fail(why))
    }

    /// Whether the thread has ended or has a signal, if a check is due.
    fn has_signal(&mut self, theirs: usize, signals: &ThreadSignals) -> bool {
        let (now, [kill, any]) = (Instant::now(), &mut self.next_checks);
        if now >= *kill {
            *kill = now + SIGNAL_CHECK_INTERVAL;
            if (signals.is_killed)(self.by.thread) {
                return true;
            }
        }
        if now < *any {
            return false;
        }
        let before = cpu_time();
        let is_interrupted = (signals.is_interrupted)(self.by.thread);
        let took = cpu_time().saturating_sub(before);
        *any = now + check_interval(took, theirs);
        is_interrupted
    }
}

/// The interval between checks for other signals, where a check takes `took` and a person has this many threads.
fn check_interval(took: Duration, threads: usize) -> Duration {
    let threads = u32::try_from(threads).unwrap_or(u32::MAX);
    took.saturating_mul(threads)
        .saturating_mul(MAX_CPU_FRACTION)
        .clamp(SIGNAL_CHECK_INTERVAL, MAX_CHECK_INTERVAL)
}

/// The CPU time of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// How signals of threads are read.
struct ThreadSignals {
    is_killed: Box<dyn Fn(u32) -> bool + Send + Sync>,
    is_interrupted: Box<dyn Fn(u32) -> bool + Send + Sync>,
}

#[derive(Default)]
struct WaitsState {
    waits: Vec<Wait>,
    /// Waits of each user, including those that are being tried.
    counts: HashMap<u32, usize>,
    thread: Option<JoinHandle<()>>,
    over: bool,
}

struct WaitsInner {
    starter: Arc<ThreadStarter>,
    state: Mutex<WaitsState>,
    changed: Condvar,
    signals: ThreadSignals,
}

/// All waiting requests.
pub(crate) struct Waits(Arc<WaitsInner>);

impl Waits {
    /// No waits yet.
    pub fn new(starter: &Arc<ThreadStarter>) -> Self {
        let (is_killed, is_interrupted) = (Box::new(is_killed), Box::new(is_interrupted));
        Self::with(starter, ThreadSignals { is_killed, is_interrupted })
    }

    fn with(starter: &Arc<ThreadStarter>, signals: ThreadSignals) -> Self {
        let (starter, state, changed) = (starter.clone(), Mutex::default(), Condvar::new());
        Self(Arc::new(WaitsInner { starter, state, changed, signals }))
    }

    /// Retries a request until it is answered. Answers at once with an error if it cannot wait.
    pub fn add(&self, by: Waiter, mut attempt: Attempt) {
        let mut state = lock(&self.0.state);
        let all: usize = state.counts.values().sum();
        let theirs = state.counts.get(&by.uid).copied().unwrap_or(0);
        // A thread that is not visible from here cannot be interrupted either.
        if by.thread == 0 || state.over || theirs >= MAX.saturating_sub(all) || !self.start(&mut state) {
            drop(state);
            attempt(WaitAction::Fail(Errno::NOLCK));
            return;
        }
        *state.counts.entry(by.uid).or_default() += 1;
        state.waits.push(Wait::new(by, attempt));
        self.0.changed.notify_all();
    }

    /// Starts the thread if there is none. Returns whether it runs.
    fn start(&self, state: &mut WaitsState) -> bool {
        if state.thread.is_none() {
            let inner = self.0.clone();
            state.thread = self.0.starter.spawn("usrbio waits", move || inner.run()).ok();
        }
        state.thread.is_some()
    }

    /// Retries the waits for a file now, because a lock or lease was released.
    pub fn retry_now(&self, inode: u64) {
        let mut state = lock(&self.0.state);
        let now = Instant::now();
        let theirs = state.waits.iter_mut().filter(|wait| wait.by.inode == inode);
        if theirs.map(|wait| wait.next = now).count() > 0 {
            self.0.changed.notify_all();
        }
    }

    pub fn end(&self) {
        let mut state = lock(&self.0.state);
        state.over = true;
        let thread = state.thread.take();
        drop(state);
        self.0.changed.notify_all();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl WaitsInner {
    fn run(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        while !state.over {
            let now = Instant::now();
            let (due, rest) = std::mem::take(&mut state.waits).into_iter().partition(|wait| wait.next <= now);
            state.waits = rest;
            if due.is_empty() {
                let next = state.waits.iter().map(|wait| wait.next).min();
                let pause = next.map_or(Duration::from_secs(10), |next| next.saturating_duration_since(now));
                state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(state);
            for wait in due {
                let (threads, this) = (wait.by.threads.clone(), self.clone());
                threads(SlowCall(Box::new(move || this.run_attempt(wait))));
            }
            state = lock(&self.state);
        }
        for mut wait in std::mem::take(&mut state.waits) {
            (wait.attempt)(WaitAction::Fail(Errno::IO));
        }
    }

    /// Makes an attempt, and queues the wait again unless it is answered.
    fn run_attempt(&self, mut wait: Wait) {
        let theirs = lock(&self.state).counts.get(&wait.by.uid).copied().unwrap_or(1);
        let is_over = wait.run_attempt(theirs, &self.signals);
        let mut state = lock(&self.state);
        if is_over {
            let uid = wait.by.uid;
            if let Some(count) = state.counts.get_mut(&uid) {
                *count -= 1;
            }
            state.counts.retain(|_, count| *count > 0);
        } else if state.over {
            // The thread that would retry it may have ended.
            drop(state);
            (wait.attempt)(WaitAction::Fail(Errno::IO));
        } else {
            state.waits.push(wait);
            self.changed.notify_all();
        }
    }
}

/// Whether a thread has ended, or is to be killed. Reading this does not depend on the number of its groups.
fn is_killed(thread: u32) -> bool {
    ended_or(std::fs::read_to_string(format!("/proc/{thread}/task/{thread}/stat")), is_killed_by)
}

/// Whether a thread has ended, or `test` is true of its file in `/proc`. If the file cannot be read otherwise, perhaps
/// for lack of descriptors, the thread goes on waiting.
fn ended_or(file: std::io::Result<String>, test: fn(&str) -> bool) -> bool {
    match file {
        Ok(text) => test(&text),
        Err(error) => matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH)),
    }
}

/// Whether SIGKILL is pending, from `/proc/.../stat`. Field 31 has the thread's pending signals as a bit mask. A signal
/// that kills a process becomes SIGKILL for each of its threads.
fn is_killed_by(stat: &str) -> bool {
    const SIGKILL: u64 = 1 << (9 - 1);
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    fields.split_whitespace().nth(28).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) & SIGKILL != 0
}

/// Whether a thread has ended, or has a pending signal that no other thread can take. While it waits for FUSE it
/// handles none.
fn is_interrupted(thread: u32) -> bool {
    ended_or(std::fs::read_to_string(format!("/proc/{thread}/status")), is_interrupted_by)
}

/// Whether a signal is pending, from `/proc/.../status`.
fn is_interrupted_by(status: &str) -> bool {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let signals = |name| field(name).and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0);
    let (own, shared, blocked) = (signals("SigPnd:"), signals("ShdPnd:"), signals("SigBlk:"));
    // With several threads, another one may take a signal that was sent to the process.
    let is_alone = field("Threads:") == Some("1");
    (own | if is_alone { shared } else { 0 }) & !blocked != 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    fn me() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get() as u32
    }

    fn waits() -> (Waits, ThreadPool<SlowCall>) {
        let starter = Arc::new(ThreadStarter::new().unwrap());
        (Waits::new(&starter), ThreadPool::new(&starter))
    }

    fn by(threads: &ThreadPool<SlowCall>, uid: u32, limit: Option<Duration>) -> Waiter {
        Waiter { inode: u64::from(uid), uid, thread: me(), limit, threads: wait_threads(threads, uid) }
    }

    /// An attempt that reports its action when it ends, and succeeds once `may` is set.
    fn attempt(may: &Arc<Mutex<bool>>) -> (Attempt, Receiver<WaitAction>) {
        let (tx, rx): (Sender<WaitAction>, _) = channel();
        let may = may.clone();
        let attempt = move |action| {
            let over = action != WaitAction::Try || *lock(&may);
            if over {
                let _ = tx.send(action);
            }
            over
        };
        (Box::new(attempt), rx)
    }

    #[test]
    fn waits_end_by_success_timeout_and_shutdown() {
        let ((waits, threads), may) = (waits(), Arc::new(Mutex::new(false)));
        let long = Duration::from_secs(60);
        let add = |uid, limit| {
            let (attempt, rx) = attempt(&may);
            waits.add(by(&threads, uid, limit), attempt);
            rx
        };
        let late = add(1, Some(Duration::from_millis(20)));
        assert_eq!(late.recv_timeout(long), Ok(WaitAction::Fail(Errno::AGAIN)));
        let first = add(1, None);
        std::thread::sleep(Duration::from_millis(50));
        assert!(first.try_recv().is_err());
        *lock(&may) = true;
        waits.retry_now(1);
        assert_eq!(first.recv_timeout(long), Ok(WaitAction::Try));
        *lock(&may) = false;
        let last = add(1, None);
        waits.end();
        assert_eq!(last.recv_timeout(long), Ok(WaitAction::Fail(Errno::IO)));
        assert_eq!(add(1, None).recv_timeout(long), Ok(WaitAction::Fail(Errno::NOLCK)));
    }

    #[test]
    fn a_slow_attempt_does_not_delay_other_waits() {
        let ((waits, threads), may) = (waits(), Arc::new(Mutex::new(true)));
        let long = Duration::from_secs(60);
        let ((tx, rx), (open, gate)) = (channel(), channel::<()>());
        let slow = move |action| {
            let _ = tx.send(action);
            gate.recv_timeout(long).is_ok()
        };
        waits.add(by(&threads, 1, None), Box::new(slow));
        assert_eq!(rx.recv_timeout(long), Ok(WaitAction::Try));
        let (quick, other) = attempt(&may);
        waits.add(by(&threads, 2, None), quick);
        assert_eq!(other.recv_timeout(long), Ok(WaitAction::Try));
        // The daemon ends before the slow attempt, which is answered all the same.
        waits.end();
        drop(open);
        threads.end();
        assert_eq!(rx.recv_timeout(long), Ok(WaitAction::Fail(Errno::IO)));
    }

    #[test]
    fn waits_are_limited_per_user() {
        let ((waits, threads), may) = (waits(), Arc::new(Mutex::new(false)));
        let add = |uid| {
            let (attempt, rx) = attempt(&may);
            waits.add(by(&threads, uid, None), attempt);
            rx.try_recv().is_err()
        };
        assert_eq!((0..MAX).take_while(|_| add(1)).count(), MAX / 2);
        assert_eq!((0..MAX).take_while(|_| add(2)).count(), MAX / 4);
        waits.end();
    }

    #[test]
    fn checking_the_signals_of_many_threads_takes_little_cpu_time() {
        const MANY: usize = 64;
        // Takes as long as reading the status of a thread with many groups.
        fn read() {
            let before = cpu_time();
            while cpu_time() - before < Duration::from_millis(10) {
                std::hint::spin_loop();
            }
        }
        let [killed, interrupted] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let next_checks = Arc::new(AtomicUsize::new(0));
        let signals = ThreadSignals {
            is_killed: Box::new({
                let killed = killed.clone();
                move |_| killed.load(Ordering::Acquire)
            }),
            is_interrupted: Box::new({
                let (interrupted, next_checks) = (interrupted.clone(), next_checks.clone());
                move |_| {
                    read();
                    next_checks.fetch_add(1, Ordering::AcqRel);
                    interrupted.load(Ordering::Acquire)
                }
            }),
        };
        let starter = Arc::new(ThreadStarter::new().unwrap());
        let (waits, threads) = (Waits::with(&starter, signals), ThreadPool::new(&starter));
        let (may, long) = (Arc::new(Mutex::new(false)), Duration::from_secs(60));
        let add = || {
            let (attempt, rx) = attempt(&may);
            waits.add(by(&threads, 1, None), attempt);
            rx
        };
        let start = Instant::now();
        let all: Vec<_> = (0..MANY).map(|_| add()).collect();
        std::thread::sleep(4 * SIGNAL_CHECK_INTERVAL);
        let (next_checks, time) = (next_checks.load(Ordering::Acquire), start.elapsed());
        // A first check, and one per 12.8 s.
        let most = (2 + time.as_secs() as usize / 12) * MANY;
        assert!(next_checks <= most, "{next_checks} checks of {MANY} threads in {time:?}");
        // SIGKILL is seen soon, however long a check takes.
        killed.store(true, Ordering::Release);
        let start = Instant::now();
        for rx in all {
            assert_eq!(rx.recv_timeout(long), Ok(WaitAction::Fail(Errno::INTR)));
        }
        assert!(start.elapsed() < MAX_CHECK_INTERVAL, "{:?}", start.elapsed());
        killed.store(false, Ordering::Release);
        let one = add();
        interrupted.store(true, Ordering::Release);
        assert_eq!(one.recv_timeout(long), Ok(WaitAction::Fail(Errno::INTR)));
        waits.end();
    }

    #[test]
    fn a_killed_thread_is_seen_in_its_stat() {
        let stat = |name: &str, pending: u64| format!("7 ({name}) S{} {pending} 0", " 1".repeat(27));
        assert!(is_killed_by(&stat("x", 0x100)) && is_killed_by(&stat("a ) b", 0x102)));
        assert!(!is_killed_by(&stat("x", 0)) && !is_killed_by(&stat("x", 2)) && !is_killed_by("7"));
        assert!(!is_killed(me()) && is_killed(u32::MAX));
        let next_checks = [(30, 1), (30, 512), (10_000, 1), (10_000, 50), (10_000, 512)];
        let pauses = next_checks.map(|(took, threads)| check_interval(Duration::from_micros(took), threads));
        assert_eq!(
            pauses,
            [
                SIGNAL_CHECK_INTERVAL,
                SIGNAL_CHECK_INTERVAL,
                SIGNAL_CHECK_INTERVAL,
                10 * SIGNAL_CHECK_INTERVAL,
                MAX_CHECK_INTERVAL
            ]
        );
    }

    #[test]
    fn an_unreadable_thread_goes_on_waiting() {
        let ends = |error: Errno| ended_or(Err(error.into()), |_| unreachable!());
        assert!(ends(Errno::NOENT) && ends(Errno::SRCH));
        assert!(!ends(Errno::MFILE) && !ends(Errno::NFILE) && !ends(Errno::NOMEM));
    }

    #[test]
    fn pending_signals_interrupt() {
        let status = |threads: u32, own: u64, shared: u64, blocked: u64| {
            format!(
                "Name:\tx\nThreads:\t{threads}\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\n"
            )
        };
        assert!(is_interrupted_by(&status(9, 0x100, 0, 0)));
        assert!(is_interrupted_by(&status(1, 0, 2, 0)));
        assert!(!is_interrupted_by(&status(2, 0, 2, 0)));
        assert!(!is_interrupted_by(&status(1, 2, 2, 2)));
        assert!(!is_interrupted_by(&status(1, 0, 0, 0)));
        assert!(!is_interrupted(me()) && is_interrupted(u32::MAX));
    }
}
