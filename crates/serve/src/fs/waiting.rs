//! FUSE requests that may have to wait for another program: locks, and opens of files with leases.

use std::sync::Arc;
use std::time::Duration;

use fuser::{FileHandle, INodeNo, LockOwner, ReplyEmpty};
use onehop_os::locks::{LockKind, LockRange};
use onehop_target::wire::Caller;
use rustix::io::Errno;

use super::answer::empty;
use super::callers::Requester;
use super::ops::LeaseAttempt;
use super::{FuseHandler, Mounted};
use crate::locks::LockRequester;
use crate::opens::Open;
use crate::waits::{WaitAction, Waiter, wait_threads};

/// The kernel's numbers of lock types.
const SHARED: i32 = 0;
const EXCLUSIVE: i32 = 1;
const UNLOCKED: i32 = 2;

/// Range, type and process of a lock.
type LockAnswer = ((u64, u64), i32, u32);

/// The lock to set; `None` to unlock.
fn kind_of(number: i32) -> Result<Option<LockKind>, Errno> {
    match number {
        SHARED => Ok(Some(LockKind::Shared)),
        EXCLUSIVE => Ok(Some(LockKind::Exclusive)),
        UNLOCKED => Ok(None),
        _ => Err(Errno::INVAL),
    }
}

fn number(kind: LockKind) -> i32 {
    match kind {
        LockKind::Shared => SHARED,
        LockKind::Exclusive => EXCLUSIVE,
    }
}

fn range_of((start, end): (u64, u64)) -> LockRange {
    LockRange { start, end }
}

/// The kernel breaks leases after 45 seconds, unless the administrator has set another time.
const LEASE: Duration = Duration::from_secs(120);

impl Mounted {
    pub(super) fn attempt<'a>(&'a self, by: &'a Caller) -> LeaseAttempt<'a> {
        LeaseAttempt { shared: &self.shared, tree: &*self.tree, by }
    }

    /// Executes a call that a lease of another program may block, and answers it. On `EAGAIN` the kernel has notified
    /// the holder of the lease, and the call is tried again later.
    pub(super) fn retry_on_lease(
        &self,
        (requester, by): (Requester, Caller),
        inode: INodeNo,
        may_wait: bool,
        mut work: impl FnMut(LeaseAttempt<'_>) -> Result<u64, Errno> + Send + 'static,
        answer: impl FnOnce(Result<u64, Errno>) + Send + 'static,
    ) {
        let done = work(self.attempt(&by));
        if !may_wait || done != Err(Errno::AGAIN) {
            return answer(done);
        }
        let uid = self.shared.persons.of(requester.uid);
        let (shared, tree, callers) = (self.shared.clone(), self.tree.clone(), self.callers.clone());
        // A thread may have 65 536 groups, which would take 256 KiB for each wait, so they are read again for each
        // attempt. The thread cannot change them while it waits.
        drop(by);
        let pool =
            if callers.has_many(uid) { &self.shared.many_group_calls } else { &self.shared.disk_calls };
        let threads = wait_threads(pool, uid);
        let waiter = Waiter { inode: inode.0, uid, thread: requester.thread, limit: Some(LEASE), threads };
        let mut answer = Some(answer);
        let attempt = move |action| {
            let done = match action {
                WaitAction::Try => callers
                    .caller(requester, uid)
                    .and_then(|by| work(LeaseAttempt { shared: &shared, tree: &*tree, by: &by })),
                // Too many wait, or the waiting thread is unknown.
                WaitAction::Fail(Errno::NOLCK) => Err(Errno::AGAIN),
                WaitAction::Fail(error) => Err(error),
            };
            if action == WaitAction::Try && done == Err(Errno::AGAIN) {
                return false;
            }
            if let Some(answer) = answer.take() {
                answer(done);
            }
            true
        };
        self.shared.waits.add(waiter, Box::new(attempt));
    }

    /// Returns the lock that conflicts with this one, or the request itself as unlocked.
    pub(super) fn get_lock(
        &self,
        by: LockRequester,
        range: (u64, u64),
        kind: i32,
    ) -> Result<LockAnswer, Errno> {
        let open = self.lockable(by)?;
        let kind = kind_of(kind)?.ok_or(Errno::INVAL)?;
        let found = self.shared.locks.in_the_way(&open, by, range_of(range), kind)?;
        Ok(found
            .map_or((range, UNLOCKED, 0), |(found, kind, pid)| ((found.start, found.end), number(kind), pid)))
    }

    /// The open file of a lock. Files of a target cannot be locked: other mounts may have the same files, and would not
    /// see the lock.
    fn lockable(&self, by: LockRequester) -> Result<Arc<Open>, Errno> {
        let open = self.opened(FileHandle(by.handle)).map_err(|_| Errno::NOLCK)?;
        if open.file().local().is_some() { Ok(open) } else { Err(Errno::NOLCK) }
    }

    /// Locks or unlocks a range of a file, and answers; later, if another owner holds a conflicting lock.
    ///
    /// The next holder of a lock must see what was written under it, on any mount. So the kernel writes the file's
    /// pages back before a lock is released or changed, and drops them when one is granted.
    pub(super) fn set_lock(
        &self,
        thread: u32,
        by: LockRequester,
        range: (u64, u64),
        (kind, waits): (i32, bool),
        reply: ReplyEmpty,
    ) {
        let kind = match kind_of(kind) {
            Ok(kind) => kind,
            Err(error) => return empty(reply, Err(error)),
        };
        let (shared, open) = (self.shared.clone(), self.lockable(by));
        let (kind, open) = match (kind, open) {
            // Nothing to unlock.
            (None, Err(_)) => return empty(reply, Ok(())),
            (None, Ok(open)) => {
                shared.forget_pages(open.inode);
                let done = shared.locks.unlock(open.inode, by, range_of(range));
                shared.waits.retry_now(open.inode);
                return empty(reply, done);
            }
            (_, Err(error)) => return empty(reply, Err(error)),
            (Some(kind), Ok(open)) => (kind, open),
        };
        let (inode, turn) = (open.inode, open.lock_turn());
        if shared.locks.has_any(inode, by.owner) {
            shared.forget_pages(inode);
        }
        match shared.locks.lock(&open, by, range_of(range), kind) {
            Ok(true) => {
                shared.forget_pages(inode);
                return empty(reply, Ok(()));
            }
            Ok(false) if waits => {}
            Ok(false) => return empty(reply, Err(Errno::AGAIN)),
            Err(error) => return empty(reply, Err(error)),
        }
        let mut reply = Some(reply);
        let attempt = {
            let shared = shared.clone();
            move |action| {
                let done = match action {
                    WaitAction::Try => shared.locks.lock(&open, by, range_of(range), kind),
                    WaitAction::Fail(error) => Err(error),
                };
                let reply = if done == Ok(false) { None } else { reply.take() };
                let Some(reply) = reply else { return false };
                if done.is_ok() {
                    shared.forget_pages(inode);
                }
                empty(reply, done.map(drop));
                true
            }
        };
        let threads = wait_threads(&shared.cache_calls, (by.uid, turn));
        shared.waits.add(Waiter { inode, uid: by.uid, thread, limit: None, threads }, Box::new(attempt));
    }
}

impl FuseHandler {
    /// Releases the locks of an owner before `then`, after a process has closed one of its descriptors. Most files have
    /// none.
    pub(super) fn after_locks(
        &self,
        uid: u32,
        (inode, handle): (INodeNo, FileHandle),
        owner: LockOwner,
        then: impl FnOnce() + Send + 'static,
    ) {
        let inode = inode.0;
        if !self.shared.locks.has_any(inode, owner.0) {
            return then();
        }
        self.run_cache_call(uid, self.opened(handle).ok(), move |this| {
            if this.shared.locks.flushed(inode, owner.0) {
                this.shared.waits.retry_now(inode);
            }
            then();
        });
    }

    /// Releases the locks of a handle that was closed for the last time. Its owners are forgotten at once, because the
    /// next open file may get one of their numbers.
    pub(super) fn end_locks(&self, uid: u32, inode: INodeNo, handle: FileHandle, open: Option<Arc<Open>>) {
        let gone = self.shared.locks.closed(inode.0, handle.0);
        if gone.is_empty() {
            return;
        }
        self.run_cache_call(uid, open, move |this| {
            if this.shared.locks.release(&gone) {
                this.shared.waits.retry_now(inode.0);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use onehop_os::identity::{Credentials, OwnCredentials};
    use onehop_target::tree::{Folder, FolderRules};

    use super::*;
    use crate::daemon::{DaemonShared, MountOptions};

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_open_that_waits_for_a_lease_rereads_groups() {
        let Some(own) = OwnCredentials::of_root().unwrap() else {
            return println!("SKIPPED: only root can have other groups");
        };
        let shared = DaemonShared::new(MountOptions::new(Path::new("/"), Path::new("/"))).unwrap();
        let rules = FolderRules { for_others: false, most_open: 64 };
        let folder = Folder::new(std::fs::File::open("/").unwrap().into(), rules).unwrap();
        let handler = FuseHandler(Arc::new(Mounted::new(shared.clone(), Arc::new(folder))));
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let requester = Requester { uid: 7, gid: 7, thread, umask: 0 };
        let credentials = |groups| Credentials { uid: 7, gid: 7, groups, privileged: true };
        let (tx, rx) = channel();
        let acting = own.act_as(&credentials(&[8, 9])).unwrap();
        let by = handler.callers.caller(requester, 7).unwrap();
        let work = move |of: LeaseAttempt<'_>| {
            let is_over = of.by.groups == [10];
            tx.send(of.by.groups.clone()).unwrap();
            if is_over { Ok(0) } else { Err(Errno::AGAIN) }
        };
        handler.retry_on_lease((requester, by), INodeNo(1), true, work, |done| assert_eq!(done, Ok(0)));
        assert_eq!(rx.recv(), Ok(vec![8, 9]));
        drop(acting);
        // A waiting program could not change its groups; this shows that they are read again.
        let _acting = own.act_as(&credentials(&[10])).unwrap();
        let start = Instant::now();
        while rx.recv_timeout(LONG).unwrap() != [10] {
            assert!(start.elapsed() < LONG, "the groups of the first attempt are kept");
        }
        shared.end();
    }
}
