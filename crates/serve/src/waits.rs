//! Calls of the kernel that wait for other programs, for as long as those like: locks, and opens of files with leases.
//!
//! None of them holds a thread while it waits. One thread has them tried again now and then, and at once when a lock of that file was
//! released here. It tries none itself: a file system that hangs would keep all others waiting.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::ThreadStarter;
use rustix::io::Errno;

use crate::io::pool::{PoolUser, SlowCall, ThreadPool};
use crate::lock;

/// Waits at once. A user may have as many as are left to others.
const MOST: usize = 1024;
/// How long until something is tried again, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(200));

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
    attempt: Attempt,
}

impl Wait {
    /// Whether it is over.
    fn turn(&mut self) -> bool {
        if (self.attempt)(WaitAction::Try) {
            return true;
        }
        let why = if is_interrupted(self.by.thread) {
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
}

/// All that wait.
pub(crate) struct Waits(Arc<WaitsInner>);

impl Waits {
    /// None so far.
    pub fn new(starter: &Arc<ThreadStarter>) -> Self {
        let (starter, state, changed) = (starter.clone(), Mutex::default(), Condvar::new());
        Self(Arc::new(WaitsInner { starter, state, changed }))
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
        let now = Instant::now();
        state.waits.push(Wait { by, began: now, next: now + PAUSES.0, pause: PAUSES.0, attempt });
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
        let is_over = wait.turn();
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

/// Whether a thread has ended, or has a signal that nobody else can take from it. While it waits for an answer it takes none.
fn is_interrupted(thread: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{thread}/status"))
        .map_or(true, |status| is_interrupted_by(&status))
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
