//! Opens of files that have no name any more.
//!
//! The kernel may use a name that it has cached and that another mount has removed. It repeats an open that fails with
//! `ESTALE`, after it has looked all names of the path up again. If one is gone, the open ends there. If the thread
//! comes back, it opens the file through `/proc`, or the file has lost its name since the open began.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fuser::FileAttr;
use rustix::io::Errno;

use crate::lock;

/// Attempts that are remembered: few enough to be searched at each lookup.
const MOST: usize = 4096;

/// How long a thread may take to come back. Cached names are valid for a shorter time.
const ATTEMPT_TIME: Duration = Duration::from_secs(10);

/// A file that a thread may open at its next attempt.
struct Admitted {
    thread: u32,
    inode: u64,
    since: Instant,
}

/// What threads that were refused a file may open.
#[derive(Default)]
pub(crate) struct NamelessOpens {
    admitted: Mutex<VecDeque<Admitted>>,
    /// How many these are, so that other lookups and opens need no lock.
    count: AtomicUsize,
}

impl NamelessOpens {
    /// Whether a thread may open a file without a name. It may at its second attempt.
    pub fn admit(&self, inode: u64, thread: u32) -> bool {
        // All threads that are not visible from here have this number.
        if thread == 0 {
            return true;
        }
        self.change(|admitted| {
            let is_known = admitted.iter().any(|one| one.thread == thread && one.inode == inode);
            if !is_known {
                admit(admitted, inode, thread);
            }
            is_known
        })
    }

    /// Records that a thread looked a name up, and what it found.
    pub fn looked_up(&self, thread: u32, found: &Result<FileAttr, Errno>) {
        self.found(thread, found.as_ref().ok().map(|attr| attr.ino.0));
    }

    fn found(&self, thread: u32, found: Option<u64>) {
        let Some(inode) = found else { return self.over(thread) };
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        self.change(|admitted| {
            let mut own = admitted.iter().filter(|one| one.thread == thread).peekable();
            // It had this name when the open had begun.
            if own.peek().is_some() && own.all(|one| one.inode != inode) {
                admit(admitted, inode, thread);
            }
        });
    }

    /// Records that a thread's open has ended.
    pub fn over(&self, thread: u32) {
        if self.count.load(Ordering::Acquire) > 0 {
            self.change(|admitted| admitted.retain(|one| one.thread != thread));
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut VecDeque<Admitted>) -> T) -> T {
        let mut admitted = lock(&self.admitted);
        while admitted.front().is_some_and(|oldest| oldest.since.elapsed() > ATTEMPT_TIME) {
            admitted.pop_front();
        }
        let result = change(&mut admitted);
        self.count.store(admitted.len(), Ordering::Release);
        result
    }
}

fn admit(admitted: &mut VecDeque<Admitted>, inode: u64, thread: u32) {
    if admitted.len() == MOST {
        admitted.pop_front();
    }
    admitted.push_back(Admitted { thread, inode, since: Instant::now() });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_attempt_is_admitted() {
        let opens = NamelessOpens::default();
        assert_eq!([1, 2, 2, 1].map(|thread| opens.admit(7, thread)), [false, false, true, true]);
        assert!(opens.admit(7, 0));
        opens.over(1);
        assert!(!opens.admit(7, 1) && opens.admit(7, 2));
        // Folders of the path do not matter, nor do other threads' lookups.
        opens.found(1, Some(8));
        opens.found(2, None);
        assert!(opens.admit(7, 1) && !opens.admit(7, 2));
    }

    #[test]
    fn a_name_that_is_gone_ends_the_attempt() {
        let opens = NamelessOpens::default();
        assert!(!opens.admit(7, 1));
        opens.found(1, None);
        assert!(!opens.admit(7, 1));
    }

    #[test]
    fn a_file_that_was_replaced_during_the_open_is_opened() {
        let opens = NamelessOpens::default();
        assert!(!opens.admit(7, 1));
        opens.found(1, Some(8));
        assert!(opens.admit(8, 1));
        // Without an attempt, a lookup admits nothing.
        opens.found(2, Some(8));
        assert!(!opens.admit(8, 2));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let opens = NamelessOpens::default();
        assert!((1..=MOST as u32 + 1).all(|thread| !opens.admit(7, thread)));
        assert!(!opens.admit(7, 1) && opens.admit(7, MOST as u32));
    }
}
