//! Which thread does a call of the kernel.
//!
//! The threads of the session take calls in the order in which these come, and do those at once that are over quickly: lookups,
//! attributes. No other call may keep them from that.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fuser::ReplyWrite;
use rustix::io::Errno;

use super::answer::errno;
use super::ops::Write;
use super::{FuseHandler, Mounted};
use crate::io::pool::SlowCall;

/// Threads of the session that may do calls which take longer, as long as the other half is free: a call that is handed to another
/// thread costs a switch, and a write a copy.
pub(super) struct SpareThreads {
    busy: AtomicUsize,
    most: usize,
}

/// One of them.
struct Busy<'a>(&'a SpareThreads);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::AcqRel);
    }
}

impl SpareThreads {
    /// Half of so many.
    pub fn new(threads: usize) -> Self {
        Self { busy: AtomicUsize::new(0), most: threads / 2 }
    }

    /// Makes this thread one of them, if it may be.
    fn enter(&self) -> Option<Busy<'_>> {
        // Before the comparison, so that two at once do not both have the last place.
        let busy = Busy(self);
        let before = self.busy.fetch_add(1, Ordering::AcqRel);
        (before < self.most).then_some(busy)
    }
}

impl FuseHandler {
    /// Does a call that moves bytes, changes names, or may wait a little: here, or by threads at which users have turns.
    pub(super) fn aside(&self, uid: u32, call: impl FnOnce(&Mounted) + Send + 'static) {
        match self.spare.enter() {
            Some(_busy) => call(self),
            None => self.shared.calls.add(self.person(uid), self.bound(call)),
        }
    }

    /// Does a call that waits for a disk.
    pub(super) fn by_disk(&self, uid: u32, call: impl FnOnce(&Mounted) + Send + 'static) {
        self.shared.slow.add(self.person(uid), self.bound(call));
    }

    /// Does a call that waits until the kernel has written back what it keeps of a file.
    pub(super) fn by_cache(&self, uid: u32, call: impl FnOnce(&Mounted) + Send + 'static) {
        self.shared.caches.add(self.person(uid), self.bound(call));
    }

    fn bound(&self, call: impl FnOnce(&Mounted) + Send + 'static) -> SlowCall {
        let this: Arc<Mounted> = self.0.clone();
        SlowCall(Box::new(move || call(&this)))
    }

    /// For whom a call counts.
    pub(super) fn person(&self, uid: u32) -> u32 {
        self.shared.persons.of(uid)
    }

    /// Writes. The bytes are the session's: another thread gets a copy of them. A user who has too many waiting gets an error: no
    /// thread of the session may wait, and the bytes have no other place.
    pub(super) fn write(&self, write: Write, data: &[u8], reply: ReplyWrite) {
        let answer = |reply: ReplyWrite, done: Result<usize, _>| match done {
            Ok(count) => reply.written(count as u32),
            Err(error) => reply.error(errno(error)),
        };
        let (uid, bytes, syncs) = (write.open.uid(), data.len() as u64, write.open.syncs());
        let busy = if syncs { None } else { self.spare.enter() };
        if busy.is_some() {
            return answer(reply, write.run(data));
        }
        let held = &self.shared.held;
        if write.is_mapped {
            // Nobody would learn of the error before the next sync. The kernel has few of these under way.
            held.count(uid, bytes);
        } else if !held.take(uid, bytes) {
            return answer(reply, Err(Errno::NOMEM));
        }
        let Some(data) = copied(data) else {
            held.put_back(uid, bytes);
            return answer(reply, Err(Errno::NOMEM));
        };
        let pool = if syncs { &self.shared.slow } else { &self.shared.calls };
        let call = move |this: &Mounted| {
            answer(reply, write.run(&data));
            this.shared.held.put_back(uid, bytes);
        };
        pool.add(self.person(uid), self.bound(call));
    }
}

/// A copy; none where there is no memory for it.
fn copied(data: &[u8]) -> Option<Vec<u8>> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(data.len()).ok()?;
    copy.extend_from_slice(data);
    Some(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_threads_are_left_to_quick_calls() {
        let spare = SpareThreads::new(4);
        let held = [spare.enter(), spare.enter()];
        assert!(held.iter().all(Option::is_some) && spare.enter().is_none() && spare.enter().is_none());
        drop(held);
        assert!(spare.enter().is_some());
        assert!(SpareThreads::new(1).enter().is_none());
    }
}
