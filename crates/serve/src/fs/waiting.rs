//! Calls of the kernel that may have to wait for another program: locks, and opens of files with leases.

use std::sync::Arc;
use std::time::Duration;

use fuser::{FileHandle, INodeNo, LockOwner, ReplyEmpty};
use onehop_os::locks::{LockKind, LockRange};
use onehop_target::wire::Caller;
use rustix::io::Errno;

use super::answer::empty;
use super::callers::Asks;
use super::ops::LeaseAttempt;
use super::{FuseHandler, Mounted};
use crate::locks::Asker;
use crate::opens::Open;
use crate::waits::{WaitAction, Waiter, wait_threads};

/// The kernel's numbers for what a lock is.
const SHARED: i32 = 0;
const EXCLUSIVE: i32 = 1;
const UNLOCKED: i32 = 2;

/// Range, kind and process of a lock.
type LockAnswer = ((u64, u64), i32, u32);

/// What is wanted of a lock; none to have none.
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

/// Leases are broken after 45 seconds unless the machine's administrator wants another time.
const LEASE: Duration = Duration::from_secs(120);

impl Mounted {
    pub(super) fn attempt<'a>(&'a self, by: &'a Caller) -> LeaseAttempt<'a> {
        LeaseAttempt { shared: &self.shared, tree: &*self.tree, by }
    }

    /// Does what may find a lease of another program in its way, and answers; in a while, if there is one. `EAGAIN` says so: the kernel
    /// has told the program by then to let go of it.
    pub(super) fn past_leases(
        &self,
        (asks, by): (Asks, Caller),
        inode: INodeNo,
        may_wait: bool,
        mut work: impl FnMut(LeaseAttempt<'_>) -> Result<u64, Errno> + Send + 'static,
        answer: impl FnOnce(Result<u64, Errno>) + Send + 'static,
    ) {
        let done = work(self.attempt(&by));
        if !may_wait || done != Err(Errno::AGAIN) {
            return answer(done);
        }
        let uid = self.shared.persons.of(asks.uid);
        let (shared, tree, callers) = (self.shared.clone(), self.tree.clone(), self.callers.clone());
        // A thread may have 65 536 groups, which it cannot change while it waits. They are read again for each attempt: to keep them for
        // each wait takes 256 KiB.
        drop(by);
        let pool = if callers.has_many(uid) { &self.shared.crowds } else { &self.shared.slow };
        let threads = wait_threads(pool, uid);
        let waiter = Waiter { inode: inode.0, uid, thread: asks.thread, limit: Some(LEASE), threads };
        let mut answer = Some(answer);
        let attempt = move |turn| {
            let done = match turn {
                WaitAction::Try => callers
                    .caller(asks, uid)
                    .and_then(|by| work(LeaseAttempt { shared: &shared, tree: &*tree, by: &by })),
                // Too many wait, or nobody knows who waits.
                WaitAction::Fail(Errno::NOLCK) => Err(Errno::AGAIN),
                WaitAction::Fail(error) => Err(error),
            };
            if turn == WaitAction::Try && done == Err(Errno::AGAIN) {
                return false;
            }
            if let Some(answer) = answer.take() {
                answer(done);
            }
            true
        };
        self.shared.waits.add(waiter, Box::new(attempt));
    }

    /// Tells the lock that is in the way of one.
    pub(super) fn get_lock(&self, by: Asker, range: (u64, u64), kind: i32) -> Result<LockAnswer, Errno> {
        let open = self.lockable(by)?;
        let kind = kind_of(kind)?.ok_or(Errno::INVAL)?;
        let found = self.shared.locks.in_the_way(&open, by, range_of(range), kind)?;
        Ok(found
            .map_or((range, UNLOCKED, 0), |(found, kind, pid)| ((found.start, found.end), number(kind), pid)))
    }

    /// The open file of a lock. A target's have none: other mounts may have the same files, and would not know of a lock here.
    fn lockable(&self, by: Asker) -> Result<Arc<Open>, Errno> {
        let open = self.opened(FileHandle(by.handle)).map_err(|_| Errno::NOLCK)?;
        if open.file().local().is_some() { Ok(open) } else { Err(Errno::NOLCK) }
    }

    /// Locks a range of a file or unlocks it, and answers; perhaps later, where another owner has it locked.
    ///
    /// Sets a lock, so that its next holder sees what was written under it, on any mount. When a lock is released or changed, the
    /// kernel first writes the file's pages back; when one is granted, the kernel drops them.
    pub(super) fn set_lock(
        &self,
        thread: u32,
        by: Asker,
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
            // There is nothing to unlock.
            (None, Err(_)) => return empty(reply, Ok(())),
            (None, Ok(open)) => {
                shared.forget_pages(open.inode);
                let done = shared.locks.unlock(open.inode, by, range_of(range));
                shared.waits.hurry(open.inode);
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
            move |turn| {
                let done = match turn {
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
        let threads = wait_threads(&shared.caches, (by.uid, turn));
        shared.waits.add(Waiter { inode, uid: by.uid, thread, limit: None, threads }, Box::new(attempt));
    }
}

impl FuseHandler {
    /// A process has closed an open file, by one of its descriptors: the locks of that owner go before `then`. Most files have none.
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
        self.by_cache(uid, self.opened(handle).ok(), move |this| {
            if this.shared.locks.flushed(inode, owner.0) {
                this.shared.waits.hurry(inode);
            }
            then();
        });
    }

    /// The last process has closed it: the locks of that handle go. Its owners are forgotten at once, because the next open file
    /// may have the number of one of them.
    pub(super) fn end_locks(&self, uid: u32, inode: INodeNo, handle: FileHandle, open: Option<Arc<Open>>) {
        let gone = self.shared.locks.closed(inode.0, handle.0);
        if gone.is_empty() {
            return;
        }
        self.by_cache(uid, open, move |this| {
            if this.shared.locks.let_go(&gone) {
                this.shared.waits.hurry(inode.0);
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
    fn an_open_that_waits_for_a_lease_keeps_no_groups() {
        let Some(own) = OwnCredentials::of_root().unwrap() else {
            return println!("SKIPPED: only root can have other groups");
        };
        let shared = DaemonShared::new(MountOptions::new(Path::new("/"), Path::new("/"))).unwrap();
        let rules = FolderRules { for_others: false, most_open: 64 };
        let folder = Folder::new(std::fs::File::open("/").unwrap().into(), rules).unwrap();
        let handler = FuseHandler(Arc::new(Mounted::new(shared.clone(), Arc::new(folder))));
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let asks = Asks { uid: 7, gid: 7, thread, umask: 0 };
        let credentials = |groups| Credentials { uid: 7, gid: 7, groups, privileged: true };
        let (say, said) = channel();
        let acting = own.act_as(&credentials(&[8, 9])).unwrap();
        let by = handler.callers.caller(asks, 7).unwrap();
        let work = move |of: LeaseAttempt<'_>| {
            let is_over = of.by.groups == [10];
            say.send(of.by.groups.clone()).unwrap();
            if is_over { Ok(0) } else { Err(Errno::AGAIN) }
        };
        handler.past_leases((asks, by), INodeNo(1), true, work, |done| assert_eq!(done, Ok(0)));
        assert_eq!(said.recv(), Ok(vec![8, 9]));
        drop(acting);
        // A program that waits cannot do this; what shows is that its groups are read again.
        let _acting = own.act_as(&credentials(&[10])).unwrap();
        let start = Instant::now();
        while said.recv_timeout(LONG).unwrap() != [10] {
            assert!(start.elapsed() < LONG, "the groups of the first attempt are kept");
        }
        shared.end();
    }
}
