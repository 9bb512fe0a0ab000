//! Chooses the thread that executes a FUSE request.
//!
//! Session threads take requests in order, and execute at once those that cannot block. Lookups and attributes are
//! usually quick, but a target may delay them: all session threads but one may execute these. Half of the threads may
//! execute other calls. Calls beyond that go to the thread pools, where users take turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fuser::ReplyWrite;
use onehop_target::shares::TakenShare;
use onehop_target::wire::Caller;
use rustix::io::Errno;

use super::answer::errno;
use super::callers::Requester;
use super::ops::Write;
use super::{FuseHandler, Mounted};
use crate::io::pool::SlowCall;
use crate::opens::Open;

/// Counts session threads that execute calls which may block. Handing a call to another thread costs a context switch,
/// and for a write a copy. One thread always remains for requests that cannot block.
pub(super) struct SpareThreads {
    busy: AtomicUsize,
    threads: usize,
}

/// A session thread that executes such a call.
struct Busy<'a>(&'a SpareThreads);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::AcqRel);
    }
}

impl SpareThreads {
    /// For a session of this many threads.
    pub fn new(threads: usize) -> Self {
        Self { busy: AtomicUsize::new(0), threads }
    }

    /// Uses this thread for a lookup, unless only one thread is free.
    fn enter_for_lookup(&self) -> Option<Busy<'_>> {
        self.enter_below(self.threads.saturating_sub(1))
    }

    /// Uses this thread for another call, unless half of the threads are busy.
    fn enter(&self) -> Option<Busy<'_>> {
        self.enter_below(self.threads / 2)
    }

    fn enter_below(&self, most: usize) -> Option<Busy<'_>> {
        // Counted before the comparison, so that two threads cannot both get the last place.
        let busy = Busy(self);
        let before = self.busy.fetch_add(1, Ordering::AcqRel);
        (before < most).then_some(busy)
    }
}

/// Which threads execute a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallClass {
    /// A lookup.
    Lookup,
    /// Moves bytes, changes names, or may block for a short time.
    Other,
    /// Waits for a disk.
    Disk,
}

impl FuseHandler {
    /// Executes a call with its caller's credentials, or with the error that explains why they are unknown. Persons
    /// whose threads have many groups get one call at a time: reading and setting these groups takes longer than the
    /// call itself.
    pub(super) fn run_as_caller(
        &self,
        class: CallClass,
        requester: Requester,
        call: impl FnOnce(&Mounted, Result<Caller, Errno>) + Send + 'static,
    ) {
        let person = self.person(requester.uid);
        let call = move |this: &Mounted| call(this, this.callers.caller(requester, person));
        match class {
            _ if self.callers.has_many(person) => self.shared.many_group_calls.add(person, self.bound(call)),
            CallClass::Lookup => self.run_lookup(requester.uid, call),
            CallClass::Other => self.run_call(requester.uid, call),
            CallClass::Disk => self.run_disk_call(requester.uid, call),
        }
    }

    /// Executes a lookup, on this thread or in the pool.
    pub(super) fn run_lookup(&self, uid: u32, call: impl FnOnce(&Mounted) + Send + 'static) {
        match self.spare.enter_for_lookup() {
            Some(_busy) => call(self),
            None => self.shared.lookups.add(self.person(uid), self.bound(call)),
        }
    }

    /// Executes a call that moves bytes, changes names, or may block for a short time, on this thread or in the pool.
    pub(super) fn run_call(&self, uid: u32, call: impl FnOnce(&Mounted) + Send + 'static) {
        match self.spare.enter() {
            Some(_busy) => call(self),
            None => self.shared.calls.add(self.person(uid), self.bound(call)),
        }
    }

    /// Executes a call that waits for a disk, in the pool.
    pub(super) fn run_disk_call(&self, uid: u32, call: impl FnOnce(&Mounted) + Send + 'static) {
        self.shared.disk_calls.add(self.person(uid), self.bound(call));
    }

    /// Executes a call that locks an open file or waits for the kernel to write its pages back, in the pool.
    pub(super) fn run_cache_call(
        &self,
        uid: u32,
        of: Option<Arc<Open>>,
        call: impl FnOnce(&Mounted) + Send + 'static,
    ) {
        let turn = of.map_or(0, |open| open.lock_turn());
        self.shared.cache_calls.add((self.person(uid), turn), self.bound(call));
    }

    /// Closes a file. A file in a mount below the folder is closed by that mount's threads: the mount may hang, and the
    /// user's other calls must not wait for it.
    pub(super) fn close_file(&self, gone: Arc<Open>) {
        let uid = gone.uid();
        let elsewhere = gone.is_elsewhere().then(|| gone.clone());
        let close = move |this: &Mounted| this.shared.opens.close_file(gone);
        match elsewhere {
            // The call must hold the last reference.
            Some(of) => {
                let turn = of.lock_turn();
                drop(of);
                self.shared.cache_calls.add((self.person(uid), turn), self.bound(close));
            }
            None => self.run_call(uid, close),
        }
    }

    fn bound(&self, call: impl FnOnce(&Mounted) + Send + 'static) -> SlowCall {
        let this: Arc<Mounted> = self.0.clone();
        SlowCall(Box::new(move || call(&this)))
    }

    /// Reserves memory for the bytes of a call until it is done; `None` if the user has too much waiting. Names are not
    /// counted: a program needs a thread for each call, which takes more memory.
    pub(super) fn reserve(&self, uid: u32, bytes: &[u8]) -> Option<TakenShare> {
        self.shared.call_memory.acquire(uid, bytes.len() as u64)
    }

    /// The person for whom a call counts.
    pub(super) fn person(&self, uid: u32) -> u32 {
        self.shared.persons.of(uid)
    }

    /// Writes. Another thread needs a copy of the bytes, which belong to the session. A user with too much waiting gets
    /// `ENOMEM`: session threads must not wait, and the bytes have no other place.
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
        let held = &self.shared.call_memory;
        if write.is_mapped {
            // An error would not be seen before the next sync. The kernel sends few of these at a time.
            held.count(uid, bytes);
        } else if !held.take(uid, bytes) {
            return answer(reply, Err(Errno::NOMEM));
        }
        let Some(data) = copied(data) else {
            held.put_back(uid, bytes);
            return answer(reply, Err(Errno::NOMEM));
        };
        let pool = if syncs { &self.shared.disk_calls } else { &self.shared.calls };
        let call = move |this: &Mounted| {
            answer(reply, write.run(&data));
            this.shared.call_memory.put_back(uid, bytes);
        };
        pool.add(self.person(uid), self.bound(call));
    }
}

/// A copy, or `None` without memory for it.
fn copied(data: &[u8]) -> Option<Vec<u8>> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(data.len()).ok()?;
    copy.extend_from_slice(data);
    Some(copy)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use onehop_target::tree::{Folder, FolderRules};

    use super::*;
    use crate::daemon::{DaemonShared, MountOptions};

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn half_of_the_threads_are_left_to_quick_calls() {
        let spare = SpareThreads::new(4);
        let mut held = vec![spare.enter(), spare.enter()];
        assert!(held.iter().all(Option::is_some) && spare.enter().is_none());
        // One thread is left when lookups block, too.
        held.push(spare.enter_for_lookup());
        assert!(held[2].is_some() && spare.enter_for_lookup().is_none() && spare.enter().is_none());
        drop(held);
        assert!(spare.enter().is_some());
        let alone = SpareThreads::new(1);
        assert!(alone.enter().is_none() && alone.enter_for_lookup().is_none());
    }

    #[test]
    fn lookups_that_wait_leave_threads_to_other_users_lookups() {
        let options = MountOptions::new(Path::new("/"), Path::new("/"));
        let shared = DaemonShared::new(options).unwrap();
        let rules = FolderRules { for_others: false, most_open: 64 };
        let folder = Folder::new(std::fs::File::open("/").unwrap().into(), rules).unwrap();
        let handler = FuseHandler(Arc::new(Mounted::new(shared.clone(), Arc::new(folder))));
        // All session threads execute lookups of one user, and a target does not answer.
        let gate = Arc::new(std::sync::RwLock::new(()));
        let closed = gate.write().unwrap();
        let (tx, rx) = channel();
        std::thread::scope(|scope| {
            let ask = |handler: &FuseHandler, uid: u32| {
                let (gate, tx) = (gate.clone(), tx.clone());
                handler.run_lookup(uid, move |_| {
                    drop(gate.read());
                    tx.send(uid).unwrap();
                });
            };
            let session: Vec<_> = (0..shared.session_threads())
                .map(|_| {
                    let handler = FuseHandler(handler.0.clone());
                    scope.spawn(move || (0..50).for_each(|_| ask(&handler, 1000)))
                })
                .collect();
            // One of the threads queues its lookups and is free for the next request.
            let start = std::time::Instant::now();
            while !session.iter().any(std::thread::ScopedJoinHandle::is_finished) {
                assert!(start.elapsed() < LONG, "all threads of the session wait");
                std::thread::sleep(Duration::from_millis(1));
            }
            let (seen, found) = channel();
            handler.run_lookup(1001, move |_| seen.send(()).unwrap());
            assert!(found.recv_timeout(LONG).is_ok(), "another user's lookup waits");
            assert!(rx.try_recv().is_err());
            drop(closed);
        });
        assert!((0..200).all(|_| rx.recv_timeout(LONG) == Ok(1000)));
        shared.end();
    }
}
