//! The attributes of the root, and its access control list: the kernel asks for them on the path to every name in the
//! mount, such as that of the mount's own status. If a target does not answer, the last known values are used.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::POLL_INTERVAL;
use crate::lock;
use crate::tree::TreeResult;

/// How long to wait for a target's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

struct RootState<T> {
    /// The last successful answer.
    last: T,
    /// The number of questions, and of those that were answered.
    asked: u64,
    answered: u64,
    /// The last answer.
    answer: TreeResult<T>,
    /// Since when a question is pending.
    since: Option<Instant>,
}

/// A cached property of the root. One thread asks the target, so that callers can time out.
pub(super) struct RootCache<T> {
    state: Mutex<RootState<T>>,
    changed: Condvar,
}

impl<T: Clone> RootCache<T> {
    pub fn new(last: T) -> Self {
        let answer = Ok(last.clone());
        let state = RootState { last, asked: 0, answered: 0, answer, since: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The last known value.
    pub fn last(&self) -> T {
        lock(&self.state).last.clone()
    }

    /// The current value, or the last known one after a timeout.
    pub fn now(&self) -> TreeResult<T> {
        let mut state = lock(&self.state);
        state.asked += 1;
        let (mine, begun) = (state.asked, Instant::now());
        self.changed.notify_all();
        loop {
            if state.answered >= mine {
                return match &state.answer {
                    Err(Errno::TIMEDOUT) => Ok(state.last.clone()),
                    answer => answer.clone(),
                };
            }
            // A caller that joins a pending question waits only for the rest of its time.
            let left =
                ANSWER_TIMEOUT.saturating_sub(state.since.map_or(begun, |since| since.min(begun)).elapsed());
            if left.is_zero() {
                return Ok(state.last.clone());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Answers questions by asking the target, until the client ends.
    pub fn serve(&self, is_over: impl Fn() -> bool, ask: impl Fn() -> TreeResult<T>) {
        let mut state = lock(&self.state);
        while !is_over() {
            if state.asked == state.answered {
                state =
                    self.changed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let asked = state.asked;
            state.since = Some(Instant::now());
            drop(state);
            let answer = ask();
            state = lock(&self.state);
            if let Ok(fact) = &answer {
                state.last = fact.clone();
            }
            (state.answer, state.answered, state.since) = (answer, asked, None);
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;
    use crate::wire::{Attr, FileKey, FileKind, ROOT};

    fn attr(size: u64) -> Attr {
        let key = FileKey { device: 0, inode: 1, born: None };
        let (kind, times) = (FileKind::Folder, [(0, 0); 3]);
        Attr {
            node: ROOT,
            key,
            kind,
            perm: 0o755,
            links: 2,
            uid: 0,
            gid: 0,
            rdev: 0,
            size,
            blocks: 0,
            block_size: 4096,
            times,
        }
    }

    #[test]
    fn callers_share_the_wait_for_a_silent_target() {
        let root = RootCache::new(attr(0));
        let (over, silent, answers) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
        let ask = || {
            while silent.load(Ordering::Acquire) && !over.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(attr(answers.fetch_add(1, Ordering::AcqRel) + 1))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| root.serve(|| over.load(Ordering::Acquire), ask));
            // Each call gets an answer to a question that was asked after it began.
            for _ in 0..20 {
                let (start, before) = (Instant::now(), answers.load(Ordering::Acquire));
                let size = root.now().unwrap().size;
                assert!(size > before || start.elapsed() >= ANSWER_TIMEOUT, "{size} {before}");
            }
            silent.store(true, Ordering::Release);
            let last = root.now().unwrap().size;
            let start = Instant::now();
            (0..1000).for_each(|_| assert_eq!(root.now().unwrap().size, last));
            assert!(start.elapsed() < 100 * ANSWER_TIMEOUT);
            silent.store(false, Ordering::Release);
            while root.now().unwrap().size == last {}
            over.store(true, Ordering::Release);
        });
    }
}
