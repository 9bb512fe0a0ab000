//! Opens of files that have no name any more.
//!
//! The kernel may use a name that it has cached and that another mount has removed. It repeats an open that fails with
//! `ESTALE`, after it has looked the name up again. A thread that comes back without having looked up another file used
//! no name: it opens the file through `/proc`, and may have it.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use fuser::FileAttr;
use rustix::io::Errno;

use crate::lock;

/// Refused opens that are remembered: few enough to be searched at each lookup.
const MOST: usize = 4096;

/// Threads that were refused a file, and the file.
#[derive(Default)]
pub(crate) struct NamelessOpens {
    refused: Mutex<VecDeque<(u32, u64)>>,
    /// How many these are, so that lookups need no lock.
    count: AtomicUsize,
}

impl NamelessOpens {
    /// Whether a thread may open a file without a name. It may at its second attempt.
    pub fn admit(&self, inode: u64, thread: u32) -> bool {
        // All threads that are not visible from here have this number.
        if thread == 0 {
            return true;
        }
        let mut refused = lock(&self.refused);
        let known = refused.iter().position(|other| *other == (thread, inode));
        match known {
            Some(place) => drop(refused.remove(place)),
            None => {
                if refused.len() == MOST {
                    refused.pop_front();
                }
                refused.push_back((thread, inode));
            }
        }
        self.count.store(refused.len(), Ordering::Release);
        known.is_some()
    }

    /// Records that a thread looked a name up, and what it found.
    pub fn looked_up(&self, thread: u32, found: &Result<FileAttr, Errno>) {
        if self.count.load(Ordering::Acquire) > 0 {
            self.found(thread, found.as_ref().ok().map(|attr| attr.ino.0));
        }
    }

    fn found(&self, thread: u32, found: Option<u64>) {
        let mut refused = lock(&self.refused);
        refused.retain(|(other, inode)| *other != thread || Some(*inode) == found);
        self.count.store(refused.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_attempt_without_a_lookup_is_admitted() {
        let opens = NamelessOpens::default();
        let both = [1, 2, 2, 1, 1].map(|thread| opens.admit(7, thread));
        assert_eq!(both, [false, false, true, true, false]);
        assert!(opens.admit(7, 0));
        // Another thread's lookup does not count.
        opens.found(2, None);
        assert!(opens.admit(7, 1));
    }

    #[test]
    fn a_lookup_ends_the_attempt() {
        let opens = NamelessOpens::default();
        for found in [None, Some(8)] {
            assert!(!opens.admit(7, 1));
            opens.found(1, found);
        }
        // The file has the name after all, on a file system that counts no names.
        assert!(!opens.admit(7, 1));
        opens.found(1, Some(7));
        assert!(opens.admit(7, 1));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let opens = NamelessOpens::default();
        assert!((1..=MOST as u32 + 1).all(|thread| !opens.admit(7, thread)));
        assert!(!opens.admit(7, 1) && opens.admit(7, MOST as u32));
    }
}
