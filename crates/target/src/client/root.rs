//! The attributes of the root, and its access control list: the kernel asks for them on the way to every name below the mount point, such
//! as that of the mount's own status. Where a target does not say what they are, they are those of before.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::TICK;
use crate::lock;
use crate::tree::TreeResult;

/// How long a target has for its answer.
const SOON: Duration = Duration::from_secs(2);

struct RootState<T> {
    /// What the target said last.
    last: T,
    /// Questions so far, and those that were answered.
    asked: u64,
    answered: u64,
    /// The last answer.
    answer: TreeResult<T>,
    /// Since when the target has been asked.
    since: Option<Instant>,
}

/// One thing that is known of the root. One thread asks the target, so that nobody else waits for longer than they like.
pub(super) struct RootFact<T> {
    state: Mutex<RootState<T>>,
    changed: Condvar,
}

impl<T: Clone> RootFact<T> {
    pub fn new(last: T) -> Self {
        let answer = Ok(last.clone());
        let state = RootState { last, asked: 0, answered: 0, answer, since: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// What the target said last.
    pub fn last(&self) -> T {
        lock(&self.state).last.clone()
    }

    /// What the target says now, or said before if it takes too long.
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
            // Who comes when others have waited already does not wait as long again.
            let left = SOON.saturating_sub(state.since.map_or(begun, |since| since.min(begun)).elapsed());
            if left.is_zero() {
                return Ok(state.last.clone());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Asks the target whenever somebody wants to know, until it is over.
    pub fn serve(&self, is_over: impl Fn() -> bool, ask: impl Fn() -> TreeResult<T>) {
        let mut state = lock(&self.state);
        while !is_over() {
            if state.asked == state.answered {
                state = self.changed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
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
    fn a_target_that_says_nothing_is_not_waited_for_by_everybody() {
        let root = RootFact::new(attr(0));
        let (over, silent, said) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
        let ask = || {
            while silent.load(Ordering::Acquire) && !over.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(attr(said.fetch_add(1, Ordering::AcqRel) + 1))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| root.serve(|| over.load(Ordering::Acquire), ask));
            // Each gets an answer to a question that was asked after it came.
            for _ in 0..20 {
                let (start, before) = (Instant::now(), said.load(Ordering::Acquire));
                let size = root.now().unwrap().size;
                assert!(size > before || start.elapsed() >= SOON, "{size} {before}");
            }
            silent.store(true, Ordering::Release);
            let last = root.now().unwrap().size;
            let start = Instant::now();
            (0..1000).for_each(|_| assert_eq!(root.now().unwrap().size, last));
            assert!(start.elapsed() < 100 * SOON);
            silent.store(false, Ordering::Release);
            while root.now().unwrap().size == last {}
            over.store(true, Ordering::Release);
        });
    }
}
