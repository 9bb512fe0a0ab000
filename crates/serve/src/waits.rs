//! Calls of the kernel that wait for other programs, for as long as those like: locks, and opens of files with leases.
//!
//! None of them holds a thread while it waits. One thread has them tried again now and then, and at once when a lock of that file was
//! released here. It tries none itself: a file system that hangs would keep all others waiting.
//!
//! The kernel says by a request of its own (`FUSE_INTERRUPT`) when a thread that waits has a signal. `fuser` refuses these, so the
//! signals of such threads are read from `/proc`: of each once a second, and more seldom where that costs a person's threads much CPU
//! time. That a thread was killed is read apart, at a cost that does not depend on the thread, so it is known within a second. Neither is
//! read while an attempt is under way, and one may hang in a file system.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::ThreadStarter;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::io::pool::{PoolUser, SlowCall, ThreadPool};
use crate::lock;

/// Waits at once. A user may have as many as are left to others.
const MOST: usize = 1024;
/// How long until something is tried again, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(200));

/// How often it is looked whether the thread that waits has been killed, and whether it has another signal, where that is cheap.
const LOOK: Duration = Duration::from_secs(1);
/// How often at least. To read the status of a thread with 65 536 groups takes 10 ms.
const SELDOM: Duration = Duration::from_secs(30);
/// The looks at one person's threads take this part of a CPU at most, as long as they are no rarer than that.
const PART_OF_CPU: u32 = 20;

/// What is to be done with a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitAction {
    /// Try it.
    Try,
    /// Answer that it failed.
    Fail(Errno),
}

/// Tries, and answers where it can; whether it has answered.
type Attempt = Box<dyn FnMut(WaitAction) -> bool + Send>;

/// Who waits for what.
pub(crate) struct Waiter {
    pub inode: u64,
    pub uid: u32,
    /// The thread, which signals interrupt.
    pub thread: u32,
    /// How long it may take.
    pub limit: Option<Duration>,
    /// Has threads try it. An attempt may wait for a file system.
    pub threads: WaitThreads,
}

/// Hands an attempt to threads that may wait.
pub(crate) type WaitThreads = Arc<dyn Fn(SlowCall) + Send + Sync>;

/// Those of a pool, at a user's turn.
pub(crate) fn wait_threads<K: PoolUser>(pool: &ThreadPool<SlowCall, K>, user: K) -> WaitThreads {
    let pool = pool.clone();
    Arc::new(move |call| pool.add(user, call))
}

struct Wait {
    by: Waiter,
    began: Instant,
    next: Instant,
    pause: Duration,
    /// When it is looked whether its thread has been killed, and whether it has any signal.
    looks: [Instant; 2],
    attempt: Attempt,
}

impl Wait {
    fn new(by: Waiter, attempt: Attempt) -> Self {
        let now = Instant::now();
        Self { by, began: now, next: now + PAUSES.0, pause: PAUSES.0, looks: [now + LOOK; 2], attempt }
    }

    /// Whether it is over; its user has so many.
    fn turn(&mut self, theirs: usize, signals: &ThreadSignals) -> bool {
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

    /// Whether its thread has been killed, has ended, or has another signal, if it is time to look.
    fn has_signal(&mut self, theirs: usize, signals: &ThreadSignals) -> bool {
        let (now, [kill, any]) = (Instant::now(), &mut self.looks);
        if now >= *kill {
            *kill = now + LOOK;
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
        *any = now + pause_of_looks(took, theirs);
        is_interrupted
    }
}

/// How long until it is looked again for all signals of one of so many threads of a person, where a look takes so long.
fn pause_of_looks(took: Duration, threads: usize) -> Duration {
    let threads = u32::try_from(threads).unwrap_or(u32::MAX);
    took.saturating_mul(threads).saturating_mul(PART_OF_CPU).clamp(LOOK, SELDOM)
}

/// What this thread has had of a CPU.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// How signals of threads are seen.
struct ThreadSignals {
    is_killed: Box<dyn Fn(u32) -> bool + Send + Sync>,
    is_interrupted: Box<dyn Fn(u32) -> bool + Send + Sync>,
}

#[derive(Default)]
struct WaitsState {
    waits: Vec<Wait>,
    /// How many each user has, those that are tried at this moment included.
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

/// All that wait.
pub(crate) struct Waits(Arc<WaitsInner>);

impl Waits {
    /// None so far.
    pub fn new(starter: &Arc<ThreadStarter>) -> Self {
        let (is_killed, is_interrupted) = (Box::new(is_killed), Box::new(is_interrupted));
        Self::with(starter, ThreadSignals { is_killed, is_interrupted })
    }

    fn with(starter: &Arc<ThreadStarter>, signals: ThreadSignals) -> Self {
        let (starter, state, changed) = (starter.clone(), Mutex::default(), Condvar::new());
        Self(Arc::new(WaitsInner { starter, state, changed, signals }))
    }

    /// Has something tried until it answers; it answers at once where that cannot be.
    pub fn add(&self, by: Waiter, mut attempt: Attempt) {
        let mut state = lock(&self.0.state);
        let all: usize = state.counts.values().sum();
        let theirs = state.counts.get(&by.uid).copied().unwrap_or(0);
        // Who cannot be seen cannot be interrupted either.
        if by.thread == 0 || state.over || theirs >= MOST.saturating_sub(all) || !self.start(&mut state) {
            drop(state);
            attempt(WaitAction::Fail(Errno::NOLCK));
            return;
        }
        *state.counts.entry(by.uid).or_default() += 1;
        state.waits.push(Wait::new(by, attempt));
        self.0.changed.notify_all();
    }

    /// Whether there is a thread.
    fn start(&self, state: &mut WaitsState) -> bool {
        if state.thread.is_none() {
            let inner = self.0.clone();
            state.thread = self.0.starter.spawn("usrbio waits", move || inner.run()).ok();
        }
        state.thread.is_some()
    }

    /// Something of that file was given up.
    pub fn hurry(&self, inode: u64) {
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
                threads(SlowCall(Box::new(move || this.turn(wait))));
            }
            state = lock(&self.state);
        }
        for mut wait in std::mem::take(&mut state.waits) {
            (wait.attempt)(WaitAction::Fail(Errno::IO));
        }
    }

    /// Tries a wait, which goes back to the others unless it is over.
    fn turn(&self, mut wait: Wait) {
        let theirs = lock(&self.state).counts.get(&wait.by.uid).copied().unwrap_or(1);
        let is_over = wait.turn(theirs, &self.signals);
        let mut state = lock(&self.state);
        if is_over {
            let uid = wait.by.uid;
            if let Some(count) = state.counts.get_mut(&uid) {
                *count -= 1;
            }
            state.counts.retain(|_, count| *count > 0);
        } else if state.over {
            // The thread that would try it again may have ended.
            drop(state);
            (wait.attempt)(WaitAction::Fail(Errno::IO));
        } else {
            state.waits.push(wait);
            self.changed.notify_all();
        }
    }
}

/// Whether a thread has ended, or will when it is answered. That is read soon, however many groups it has.
fn is_killed(thread: u32) -> bool {
    says(std::fs::read_to_string(format!("/proc/{thread}/task/{thread}/stat")), is_killed_by)
}

/// Whether a thread has ended, or a file of it in `/proc` says something. Where that cannot be read, for lack of descriptors perhaps,
/// nobody knows: the thread goes on waiting.
fn says(file: std::io::Result<String>, something: fn(&str) -> bool) -> bool {
    match file {
        Ok(text) => something(&text),
        Err(error) => matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH)),
    }
}

/// The same by what the kernel says of it: the number after its 28th since its name has the signals of the thread, by bits. A signal
/// that kills a process is SIGKILL for each of its threads.
fn is_killed_by(stat: &str) -> bool {
    const SIGKILL: u64 = 1 << (9 - 1);
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    fields.split_whitespace().nth(28).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) & SIGKILL != 0
}

/// Whether a thread has ended, or has a signal that nobody else can take from it. While it waits for an answer it takes none.
fn is_interrupted(thread: u32) -> bool {
    says(std::fs::read_to_string(format!("/proc/{thread}/status")), is_interrupted_by)
}

/// The same by what the kernel says of it.
fn is_interrupted_by(status: &str) -> bool {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let signals = |name| field(name).and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0);
    let (own, shared, blocked) = (signals("SigPnd:"), signals("ShdPnd:"), signals("SigBlk:"));
    // Of several threads another one may take what was sent to the process.
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

    /// An attempt that says what it was told, and succeeds when it may.
    fn attempt(may: &Arc<Mutex<bool>>) -> (Attempt, Receiver<WaitAction>) {
        let (say, said): (Sender<WaitAction>, _) = channel();
        let may = may.clone();
        let attempt = move |turn| {
            let over = turn != WaitAction::Try || *lock(&may);
            if over {
                let _ = say.send(turn);
            }
            over
        };
        (Box::new(attempt), said)
    }

    #[test]
    fn waits_end_in_success_in_time_and_with_the_daemon() {
        let ((waits, threads), may) = (waits(), Arc::new(Mutex::new(false)));
        let long = Duration::from_secs(60);
        let add = |uid, limit| {
            let (attempt, said) = attempt(&may);
            waits.add(by(&threads, uid, limit), attempt);
            said
        };
        let late = add(1, Some(Duration::from_millis(20)));
        assert_eq!(late.recv_timeout(long), Ok(WaitAction::Fail(Errno::AGAIN)));
        let first = add(1, None);
        std::thread::sleep(Duration::from_millis(50));
        assert!(first.try_recv().is_err());
        *lock(&may) = true;
        waits.hurry(1);
        assert_eq!(first.recv_timeout(long), Ok(WaitAction::Try));
        *lock(&may) = false;
        let last = add(1, None);
        waits.end();
        assert_eq!(last.recv_timeout(long), Ok(WaitAction::Fail(Errno::IO)));
        assert_eq!(add(1, None).recv_timeout(long), Ok(WaitAction::Fail(Errno::NOLCK)));
    }

    #[test]
    fn a_slow_attempt_keeps_no_other_wait_from_its_end() {
        let ((waits, threads), may) = (waits(), Arc::new(Mutex::new(true)));
        let long = Duration::from_secs(60);
        let ((say, said), (open, gate)) = (channel(), channel::<()>());
        let slow = move |turn| {
            let _ = say.send(turn);
            gate.recv_timeout(long).is_ok()
        };
        waits.add(by(&threads, 1, None), Box::new(slow));
        assert_eq!(said.recv_timeout(long), Ok(WaitAction::Try));
        let (quick, other) = attempt(&may);
        waits.add(by(&threads, 2, None), quick);
        assert_eq!(other.recv_timeout(long), Ok(WaitAction::Try));
        // The daemon ends before the slow attempt does, which then fails: it is answered even so.
        waits.end();
        drop(open);
        threads.end();
        assert_eq!(said.recv_timeout(long), Ok(WaitAction::Fail(Errno::IO)));
    }

    #[test]
    fn who_waits_much_leaves_as_many_to_others() {
        let ((waits, threads), may) = (waits(), Arc::new(Mutex::new(false)));
        let add = |uid| {
            let (attempt, said) = attempt(&may);
            waits.add(by(&threads, uid, None), attempt);
            said.try_recv().is_err()
        };
        assert_eq!((0..MOST).take_while(|_| add(1)).count(), MOST / 2);
        assert_eq!((0..MOST).take_while(|_| add(2)).count(), MOST / 4);
        waits.end();
    }

    #[test]
    fn looks_at_the_signals_of_many_threads_cost_little() {
        const MANY: usize = 64;
        // As long as the status of a thread with many groups takes.
        fn read() {
            let before = cpu_time();
            while cpu_time() - before < Duration::from_millis(10) {
                std::hint::spin_loop();
            }
        }
        let [killed, interrupted] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let looks = Arc::new(AtomicUsize::new(0));
        let signals = ThreadSignals {
            is_killed: Box::new({
                let killed = killed.clone();
                move |_| killed.load(Ordering::Acquire)
            }),
            is_interrupted: Box::new({
                let (interrupted, looks) = (interrupted.clone(), looks.clone());
                move |_| {
                    read();
                    looks.fetch_add(1, Ordering::AcqRel);
                    interrupted.load(Ordering::Acquire)
                }
            }),
        };
        let starter = Arc::new(ThreadStarter::new().unwrap());
        let (waits, threads) = (Waits::with(&starter, signals), ThreadPool::new(&starter));
        let (may, long) = (Arc::new(Mutex::new(false)), Duration::from_secs(60));
        let add = || {
            let (attempt, said) = attempt(&may);
            waits.add(by(&threads, 1, None), attempt);
            said
        };
        let start = Instant::now();
        let all: Vec<_> = (0..MANY).map(|_| add()).collect();
        std::thread::sleep(4 * LOOK);
        let (looks, time) = (looks.load(Ordering::Acquire), start.elapsed());
        // A first one, and one for each 12.8 s.
        let most = (2 + time.as_secs() as usize / 12) * MANY;
        assert!(looks <= most, "{looks} looks at {MANY} threads in {time:?}");
        // Whatever a look takes, those who were killed end soon.
        killed.store(true, Ordering::Release);
        let start = Instant::now();
        for said in all {
            assert_eq!(said.recv_timeout(long), Ok(WaitAction::Fail(Errno::INTR)));
        }
        assert!(start.elapsed() < SELDOM, "{:?}", start.elapsed());
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
        let looks = [(30, 1), (30, 512), (10_000, 1), (10_000, 50), (10_000, 512)];
        let pauses = looks.map(|(took, threads)| pause_of_looks(Duration::from_micros(took), threads));
        assert_eq!(pauses, [LOOK, LOOK, LOOK, 10 * LOOK, SELDOM]);
    }

    #[test]
    fn a_thread_that_cannot_be_seen_goes_on_waiting() {
        let ends = |error: Errno| says(Err(error.into()), |_| unreachable!());
        assert!(ends(Errno::NOENT) && ends(Errno::SRCH));
        assert!(!ends(Errno::MFILE) && !ends(Errno::NFILE) && !ends(Errno::NOMEM));
    }

    #[test]
    fn signals_that_interrupt() {
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
