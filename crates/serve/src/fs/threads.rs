//! Which thread does a call of the kernel.
//!
//! The threads of the session take calls in the order in which these come, and do those at once that wait for nothing. Lookups and
//! attributes are over quickly, mostly, and a target's may not be: all threads but one may do them. Half of the threads may do others.
//! What is more than that goes to threads of its class, at which users have turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fuser::ReplyWrite;
use onehop_target::shares::TakenShare;
use onehop_target::wire::Caller;
use rustix::io::Errno;

use super::answer::errno;
use super::callers::Asks;
use super::ops::Write;
use super::{FuseHandler, Mounted};
use crate::io::pool::SlowCall;
use crate::opens::Open;

/// Threads of the session that do calls which may take longer: a call that is handed to another thread costs a switch, and a write a
/// copy. One thread is always left to what waits for nothing.
pub(super) struct SpareThreads {
    busy: AtomicUsize,
    threads: usize,
}

/// One of them.
struct Busy<'a>(&'a SpareThreads);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::AcqRel);
    }
}

impl SpareThreads {
    /// Those of so many.
    pub fn new(threads: usize) -> Self {
        Self { busy: AtomicUsize::new(0), threads }
    }

    /// Makes this thread one of them for a call that looks for something, if all but one are not busy yet.
    fn enter_to_look(&self) -> Option<Busy<'_>> {
        self.enter_below(self.threads.saturating_sub(1))
    }

    /// The same for another call, which leaves half of the threads to those that look.
    fn enter(&self) -> Option<Busy<'_>> {
        self.enter_below(self.threads / 2)
    }

    fn enter_below(&self, most: usize) -> Option<Busy<'_>> {
        // Before the comparison, so that two at once do not both have the last place.
        let busy = Busy(self);
        let before = self.busy.fetch_add(1, Ordering::AcqRel);
        (before < most).then_some(busy)
    }
}

/// Which threads do a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallClass {
    /// It looks for something.
    Look,
    /// It moves bytes, changes names, or may wait a little.
    Other,
    /// It waits for a disk.
    Disk,
}

impl FuseHandler {
    /// Does a call with the rights of who asks, or has it answer why these are unknown. Calls of a person whose threads have many groups
    /// are done one at a time: to read them, and to take them on, takes a processor longer than what is done then.
    pub(super) fn act(
        &self,
        class: CallClass,
        asks: Asks,
        call: impl FnOnce(&Mounted, Result<Caller, Errno>) + Send + 'static,
    ) {
        let person = self.person(asks.uid);
        let call = move |this: &Mounted| call(this, this.callers.caller(asks, person));
        match class {
            _ if self.callers.has_many(person) => self.shared.crowds.add(person, self.bound(call)),
            CallClass::Look => self.look(asks.uid, call),
            CallClass::Other => self.aside(asks.uid, call),
            CallClass::Disk => self.by_disk(asks.uid, call),
        }
    }

    /// Does a call that looks for something: here, or by threads at which users have turns.
    pub(super) fn look(&self, uid: u32, call: impl FnOnce(&Mounted) + Send + 'static) {
        match self.spare.enter_to_look() {
            Some(_busy) => call(self),
            None => self.shared.looks.add(self.person(uid), self.bound(call)),
        }
    }

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

    /// Does a call that locks an open file, or waits until the kernel has written back what it keeps of it.
    pub(super) fn by_cache(
        &self,
        uid: u32,
        of: Option<Arc<Open>>,
        call: impl FnOnce(&Mounted) + Send + 'static,
    ) {
        let turn = of.map_or(0, |open| open.lock_turn());
        self.shared.caches.add((self.person(uid), turn), self.bound(call));
    }

    /// Closes a file. One that is in a mount below the folder has threads for that mount: it may hang, and the user's calls that move
    /// bytes elsewhere do not wait for it.
    pub(super) fn let_go(&self, gone: Arc<Open>) {
        let uid = gone.uid();
        let elsewhere = gone.is_elsewhere().then(|| gone.clone());
        let close = move |this: &Mounted| this.shared.opens.let_go(gone);
        match elsewhere {
            // The call has the last one.
            Some(of) => {
                let turn = of.lock_turn();
                drop(of);
                self.shared.caches.add((self.person(uid), turn), self.bound(close));
            }
            None => self.aside(uid, close),
        }
    }

    fn bound(&self, call: impl FnOnce(&Mounted) + Send + 'static) -> SlowCall {
        let this: Arc<Mounted> = self.0.clone();
        SlowCall(Box::new(move || call(&this)))
    }

    /// Has what a call brings count for its user until it is done; none where they have too much waiting. Names do not count: a program
    /// needs a thread for each call, which takes more.
    pub(super) fn hold(&self, uid: u32, bytes: &[u8]) -> Option<TakenShare> {
        self.shared.held.lend(uid, bytes.len() as u64)
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
        // One is left when these are slow, too.
        held.push(spare.enter_to_look());
        assert!(held[2].is_some() && spare.enter_to_look().is_none() && spare.enter().is_none());
        drop(held);
        assert!(spare.enter().is_some());
        let alone = SpareThreads::new(1);
        assert!(alone.enter().is_none() && alone.enter_to_look().is_none());
    }

    #[test]
    fn lookups_that_wait_leave_threads_to_other_users_lookups() {
        let options = MountOptions::new(Path::new("/"), Path::new("/"));
        let shared = DaemonShared::new(options).unwrap();
        let rules = FolderRules { for_others: false, most_open: 64 };
        let folder = Folder::new(std::fs::File::open("/").unwrap().into(), rules).unwrap();
        let handler = FuseHandler(Arc::new(Mounted::new(shared.clone(), Arc::new(folder))));
        // As many threads of a session as there are, each with one of a user's many lookups; a target does not answer.
        let gate = Arc::new(std::sync::RwLock::new(()));
        let closed = gate.write().unwrap();
        let (say, said) = channel();
        std::thread::scope(|scope| {
            let ask = |handler: &FuseHandler, uid: u32| {
                let (gate, say) = (gate.clone(), say.clone());
                handler.look(uid, move |_| {
                    drop(gate.read());
                    say.send(uid).unwrap();
                });
            };
            let session: Vec<_> = (0..shared.session_threads())
                .map(|_| {
                    let handler = FuseHandler(handler.0.clone());
                    scope.spawn(move || (0..50).for_each(|_| ask(&handler, 1000)))
                })
                .collect();
            // One of the threads hands its lookups over and is back for the next call.
            let start = std::time::Instant::now();
            while !session.iter().any(std::thread::ScopedJoinHandle::is_finished) {
                assert!(start.elapsed() < LONG, "all threads of the session wait");
                std::thread::sleep(Duration::from_millis(1));
            }
            let (seen, found) = channel();
            handler.look(1001, move |_| seen.send(()).unwrap());
            assert!(found.recv_timeout(LONG).is_ok(), "another user's lookup waits");
            assert!(said.try_recv().is_err());
            drop(closed);
        });
        assert!((0..200).all(|_| said.recv_timeout(LONG) == Ok(1000)));
        shared.end();
    }
}
