//! Locks of programs, held on files of this machine as the daemon's own: they exclude the programs of other mounts, and those that
//! use the folder itself.
//!
//! Each owner that the kernel names (a process for `fcntl`, an open file for `flock`) has an open file of its own here, and locks
//! ranges of it. The kernel's messages do not say which of the two calls was made. A lock on a whole file may be either, so it is taken as
//! both; a program that takes both on one file gets in its own way, as it does over NFS.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use onehop_os::locks::{LockKind, LockRange, lock_in_the_way, lock_range};
use onehop_target::shares::Shares;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;

use crate::lock;
use crate::opens::Open;
use crate::persons::Persons;

/// Who asks, by which open file.
#[derive(Clone, Copy)]
pub(crate) struct Asker {
    /// What the kernel calls the owner.
    pub owner: u64,
    pub handle: u64,
    /// The person for whom it counts.
    pub uid: u32,
    pub pid: u32,
}

/// Ranges that an owner has locked at most; beyond it, it gets an error.
const MOST_RANGES: usize = 4096;

/// A range, and how it is locked.
type LockedRange = (LockRange, LockKind);

/// The open file of an owner.
struct Owned {
    file: File,
    /// The file is open to be written, which an exclusive lock of a range takes.
    writes: bool,
    /// What is locked of it by range, as the kernel has it: apart from each other, in no order.
    ranges: Vec<LockedRange>,
    /// Some of it was locked, which only `fcntl` does.
    by_range: bool,
    /// What it has by `flock`.
    whole: Option<LockKind>,
}

impl Owned {
    /// Opens the file once more; to be written only if the program has it open so, because what is written cannot be run.
    fn open(open: &Open) -> Result<Self, Errno> {
        let (file, writes) = opened(open)?;
        Ok(Self { file, writes, ranges: Vec::new(), by_range: false, whole: None })
    }

    /// Locks a range; false where another owner has it.
    fn lock(&mut self, open: &Open, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
        self.by_range |= range != LockRange::WHOLE;
        if kind == LockKind::Exclusive && !self.writes {
            if !open.writes() {
                // With such a file, `fcntl` has refused it.
                return if self.by_range { Err(Errno::NOLCK) } else { self.flock(kind) };
            }
            self.reopen(open)?;
        }
        let ranges = with(&self.ranges, (range, kind));
        if ranges.len() > MOST_RANGES {
            return Err(Errno::NOLCK);
        }
        if !lock_range(&self.file, range, Some(kind)).map_err(plain)? {
            return Ok(false);
        }
        let before = std::mem::replace(&mut self.ranges, ranges);
        if self.by_range || self.flock(kind)? {
            return Ok(true);
        }
        // As it was before.
        lock_range(&self.file, range, self.whole).map_err(plain)?;
        self.ranges = before;
        Ok(false)
    }

    /// Takes a file that is open to be written in place of one that is not. All that is locked is shared, so that both have it
    /// for a moment.
    fn reopen(&mut self, open: &Open) -> Result<(), Errno> {
        let (file, writes) = opened(open)?;
        if !writes {
            return Err(Errno::NOLCK);
        }
        let mut next = Self { file, writes, ranges: Vec::new(), whole: None, ..*self };
        for (range, _) in &self.ranges {
            if !lock_range(&next.file, *range, Some(LockKind::Shared)).map_err(plain)? {
                return Err(Errno::NOLCK);
            }
        }
        if self.whole.is_some() && !next.flock(LockKind::Shared)? {
            return Err(Errno::NOLCK);
        }
        next.ranges = std::mem::take(&mut self.ranges);
        *self = next;
        Ok(())
    }

    fn unlock(&mut self, range: LockRange) -> Result<(), Errno> {
        self.by_range = true;
        let rest = without(&self.ranges, range);
        if rest.len() > MOST_RANGES {
            return Err(Errno::NOLCK);
        }
        lock_range(&self.file, range, None).map_err(plain)?;
        self.ranges = rest;
        Ok(())
    }

    fn flock(&mut self, kind: LockKind) -> Result<bool, Errno> {
        let operation = |kind| match kind {
            LockKind::Shared => FlockOperation::NonBlockingLockShared,
            LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&self.file, operation(kind)) {
            Ok(()) => self.whole = Some(kind),
            Err(Errno::AGAIN) => {
                // The one before went when another was tried for.
                self.whole = self.whole.filter(|before| flock(&self.file, operation(*before)).is_ok());
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}

impl Drop for Owned {
    /// Closing alone would leave the locks to a child of this process that has been forked and has not yet begun its program.
    fn drop(&mut self) {
        lock_range(&self.file, LockRange::WHOLE, None).ok();
        flock(&self.file, FlockOperation::Unlock).ok();
    }
}

/// The file of a program, opened once more, and whether to be written.
fn opened(open: &Open) -> Result<(File, bool), Errno> {
    let of = open.file().local().ok_or(Errno::NOLCK)?;
    let path = format!("/proc/self/fd/{}", of.as_raw_fd());
    let with = |mode| openat(CWD, &path, mode | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty());
    let to_write = if open.writes() { with(OFlags::RDWR).ok() } else { None };
    if let Some(file) = to_write {
        return Ok((file.into(), true));
    }
    match with(OFlags::RDONLY) {
        Ok(file) => Ok((file.into(), false)),
        Err(_) if open.writes() => Ok((with(OFlags::WRONLY).map_err(|_| Errno::NOLCK)?.into(), true)),
        Err(_) => Err(Errno::NOLCK),
    }
}

/// What is left of ranges without one.
fn without(ranges: &[LockedRange], cut: LockRange) -> Vec<LockedRange> {
    let mut rest = Vec::with_capacity(ranges.len() + 1);
    for &(range, kind) in ranges {
        if range.end < cut.start || cut.end < range.start {
            rest.push((range, kind));
            continue;
        }
        if range.start < cut.start {
            rest.push((LockRange { end: cut.start - 1, ..range }, kind));
        }
        if cut.end < range.end {
            rest.push((LockRange { start: cut.end + 1, ..range }, kind));
        }
    }
    rest
}

/// Ranges and one more, which takes the place of others, and is joined with those beside it that are locked alike.
fn with(ranges: &[LockedRange], (mut add, kind): LockedRange) -> Vec<LockedRange> {
    let mut rest = without(ranges, add);
    rest.retain(|&(range, of)| {
        let is_beside =
            range.end.checked_add(1) == Some(add.start) || add.end.checked_add(1) == Some(range.start);
        if of != kind || !is_beside {
            return true;
        }
        add = LockRange { start: add.start.min(range.start), end: add.end.max(range.end) };
        false
    });
    rest.push((add, kind));
    rest
}

fn plain(error: onehop_os::Error) -> Errno {
    error.errno().map_or(Errno::NOLCK, Errno::from_raw_os_error)
}

/// What an owner has of a file.
enum OwnerState {
    /// Nothing yet: its first lock is being tried.
    New,
    Has(Owned),
    /// Nothing any more, and nobody finds it: another one has its place.
    Gone,
}

/// An owner of locks on a file, until its handle or its process is gone: the kernel may give its number to another one then. What the file system may take long over is done under its own lock, so only calls of this owner wait.
pub(crate) struct Holder {
    uid: u32,
    pid: u32,
    state: Mutex<OwnerState>,
}

/// An owner in the index, and by which handles it has asked. When one of them is closed nothing is left of it.
struct KnownHolder {
    holder: Arc<Holder>,
    handles: HashSet<u64>,
}

/// Who has locks on a file.
#[derive(Default)]
struct FileLocks {
    /// By what the kernel calls them.
    owners: HashMap<u64, KnownHolder>,
    /// The owners that have asked by a handle.
    by_handle: HashMap<u64, HashSet<u64>>,
}

impl FileLocks {
    fn remove(&mut self, owner: u64) -> Option<Arc<Holder>> {
        let gone = self.owners.remove(&owner)?;
        for handle in &gone.handles {
            if let Some(owners) = self.by_handle.get_mut(handle) {
                owners.remove(&owner);
                if owners.is_empty() {
                    self.by_handle.remove(handle);
                }
            }
        }
        Some(gone.holder)
    }
}

/// All locks, by inode.
pub(crate) struct Locks {
    /// Held for a moment only, and never while a file system is asked: session threads look here. Who has both locks took an owner's
    /// first.
    files: Mutex<HashMap<u64, FileLocks>>,
    /// Owners at once.
    shares: Shares,
}

impl Locks {
    /// For so many owners.
    pub fn new(most: usize, persons: &Persons) -> Self {
        Self { files: Mutex::default(), shares: persons.shares(most as u64) }
    }

    /// Locks a range of a file; false where another has it locked.
    pub fn lock(&self, open: &Open, by: Asker, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
        loop {
            let holder = self.holder(open.inode, by)?;
            let mut state = lock(&holder.state);
            let first = match &mut *state {
                OwnerState::Gone => continue,
                OwnerState::Has(owned) => return owned.lock(open, range, kind),
                OwnerState::New => Owned::open(open).and_then(|mut owned| {
                    let is_locked = owned.lock(open, range, kind)?;
                    Ok(is_locked.then_some(owned))
                }),
            };
            return match first {
                Ok(Some(owned)) => {
                    *state = OwnerState::Has(owned);
                    Ok(true)
                }
                other => {
                    self.end(open.inode, by.owner, &holder, &mut state);
                    other.map(|_| false)
                }
            };
        }
    }

    /// Who asks, known from now on.
    fn holder(&self, inode: u64, by: Asker) -> Result<Arc<Holder>, Errno> {
        let mut files = lock(&self.files);
        let is_known = files.get(&inode).is_some_and(|file| file.owners.contains_key(&by.owner));
        if !is_known && !self.shares.take(by.uid, 1) {
            return Err(Errno::NOLCK);
        }
        let file = files.entry(inode).or_default();
        file.by_handle.entry(by.handle).or_default().insert(by.owner);
        let known = file.owners.entry(by.owner).or_insert_with(|| {
            let holder = Holder { uid: by.uid, pid: by.pid, state: OwnerState::New.into() };
            KnownHolder { holder: holder.into(), handles: HashSet::new() }
        });
        known.handles.insert(by.handle);
        Ok(known.holder.clone())
    }

    /// Gives up all that an owner has; then nobody finds it any more.
    fn end(&self, inode: u64, owner: u64, holder: &Arc<Holder>, state: &mut OwnerState) {
        *state = OwnerState::Gone;
        let mut files = lock(&self.files);
        if let Some(file) = files.get_mut(&inode)
            && file.owners.get(&owner).is_some_and(|known| Arc::ptr_eq(&known.holder, holder))
        {
            file.remove(owner);
            if file.owners.is_empty() {
                files.remove(&inode);
            }
        }
        drop(files);
        self.shares.put_back(holder.uid, 1);
    }

    /// Whether an owner has locks on a file, or is about to.
    pub fn has_any(&self, inode: u64, owner: u64) -> bool {
        lock(&self.files).get(&inode).is_some_and(|file| file.owners.contains_key(&owner))
    }

    /// Unlocks a range.
    pub fn unlock(&self, inode: u64, by: Asker, range: LockRange) -> Result<(), Errno> {
        if range == LockRange::WHOLE {
            self.flushed(inode, by.owner);
            return Ok(());
        }
        let holder = self.known(inode, by.owner);
        let mut state = holder.as_ref().map(|holder| lock(&holder.state));
        match state.as_deref_mut() {
            Some(OwnerState::Has(owned)) => owned.unlock(range),
            _ => Ok(()),
        }
    }

    fn known(&self, inode: u64, owner: u64) -> Option<Arc<Holder>> {
        let files = lock(&self.files);
        files.get(&inode)?.owners.get(&owner).map(|known| known.holder.clone())
    }

    /// The lock that is in somebody's way, and the program that has it; 0 where that is not of this mount.
    pub fn in_the_way(
        &self,
        open: &Open,
        by: Asker,
        range: LockRange,
        kind: LockKind,
    ) -> Result<Option<(LockRange, LockKind, u32)>, Errno> {
        let holder = self.known(open.inode, by.owner);
        let state = holder.as_ref().map(|holder| lock(&holder.state));
        let file = match state.as_deref() {
            Some(OwnerState::Has(owned)) => &owned.file,
            _ => open.file().local().ok_or(Errno::NOLCK)?,
        };
        let Some((range, kind)) = lock_in_the_way(file, range, kind).map_err(plain)? else { return Ok(None) };
        let files = lock(&self.files);
        let all = files.get(&open.inode).into_iter().flat_map(|file| &file.owners);
        let mut others = all.filter(|(owner, _)| **owner != by.owner);
        let pid = match (others.next(), others.next()) {
            (Some((_, other)), None) => other.holder.pid,
            _ => 0,
        };
        Ok(Some((range, kind, pid)))
    }

    /// A process has closed the file, by one of its descriptors: what it had locked goes. Whether there was anything.
    pub fn flushed(&self, inode: u64, owner: u64) -> bool {
        let Some(holder) = self.known(inode, owner) else { return false };
        let mut state = lock(&holder.state);
        let had_locks = matches!(*state, OwnerState::Has(_));
        // By who has ended it, where that is over.
        if !matches!(*state, OwnerState::Gone) {
            self.end(inode, owner, &holder, &mut state);
        }
        had_locks
    }

    /// Nobody has the open file any more: who asked by it is not found from now on, and what they had locked is to be let go.
    pub fn closed(&self, inode: u64, owner: Option<u64>, handle: u64) -> Vec<Arc<Holder>> {
        let mut files = lock(&self.files);
        let Some(file) = files.get_mut(&inode) else { return Vec::new() };
        let askers = file.by_handle.get(&handle).into_iter().flatten().copied();
        let owners: Vec<_> = owner.into_iter().chain(askers).collect();
        let gone = owners.into_iter().filter_map(|owner| file.remove(owner)).collect();
        if file.owners.is_empty() {
            files.remove(&inode);
        }
        gone
    }

    /// Unlocks what they had. Whether there was anything.
    pub fn let_go(&self, gone: &[Arc<Holder>]) -> bool {
        gone.iter().fold(false, |had_locks, holder| {
            let mut state = lock(&holder.state);
            let before = std::mem::replace(&mut *state, OwnerState::Gone);
            if !matches!(before, OwnerState::Gone) {
                self.shares.put_back(holder.uid, 1);
            }
            had_locks | matches!(before, OwnerState::Has(_))
        })
    }
}

#[cfg(test)]
mod tests {
    use onehop_target::tree::Local;
    use onehop_target::wire::OpenMode;

    use super::*;
    use crate::opens::Opens;

    fn range(start: u64, end: u64) -> LockRange {
        LockRange { start, end }
    }

    #[test]
    fn ranges_are_cut_and_joined() {
        use LockKind::{Exclusive, Shared};
        let mut ranges = Vec::new();
        for add in [range(10, 19), range(40, 49), range(30, 35)] {
            ranges = with(&ranges, (add, Shared));
        }
        assert_eq!(ranges, [range(10, 19), range(40, 49), range(30, 35)].map(|range| (range, Shared)));
        let joined = with(&ranges, (range(20, 29), Shared));
        assert_eq!(joined, [(range(40, 49), Shared), (range(10, 35), Shared)]);
        let other = with(&ranges, (range(20, 29), Exclusive));
        assert_eq!(other.len(), 4, "{other:?}");
        let within = with(&ranges, (range(12, 13), Exclusive));
        assert_eq!(within.len(), 5, "{within:?}");
        assert_eq!(with(&within, (range(12, 13), Shared)).len(), 3);
        assert_eq!(with(&ranges, (LockRange::WHOLE, Exclusive)), [(LockRange::WHOLE, Exclusive)]);
        let rest = without(&ranges, range(15, 44));
        assert_eq!(rest, [(range(10, 14), Shared), (range(45, 49), Shared)]);
        let behind = without(&[(LockRange::WHOLE, Shared)], range(0, 0));
        assert_eq!(behind, [(range(1, LockRange::WHOLE.end), Shared)]);
        assert_eq!(without(&rest, LockRange::WHOLE), []);
        // Bytes that are locked alternately are as many locks of the kernel.
        let kinds = [Shared, Exclusive].into_iter().cycle();
        let many = (0..100).zip(kinds).fold(Vec::new(), |all, (at, kind)| with(&all, (range(at, at), kind)));
        assert_eq!(many.len(), 100);
    }

    #[test]
    fn locks_end_with_their_owner_or_its_handle_and_count_till_then() {
        let path = std::env::temp_dir().join(format!("onehop-serve-owners-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        let access = OpenMode {
            read: true,
            write: true,
            truncate: false,
            sync: false,
            data_sync: false,
            no_atime: false,
            execute: false,
        };
        let opens = Opens::new(64, &Persons::default());
        let open = |inode| {
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let handle = opens.add(inode, 1000, access, std::sync::Arc::new(Local::new(file)));
            (handle, opens.get(handle).unwrap())
        };
        let locks = Locks::new(8, &Persons::default());
        let user = rustix::process::geteuid().as_raw() + 1;
        let [(first, one), (second, _), (third, other)] = [open(1), open(1), open(2)];
        let by = |owner, handle| Asker { owner, handle, uid: user, pid: owner as u32 };
        let take = |open: &Open, owner, handle| {
            locks.lock(open, by(owner, handle), range(owner, owner), LockKind::Shared)
        };
        assert_eq!([take(&one, 10, first), take(&one, 11, first), take(&one, 10, second)], [Ok(true); 3]);
        assert_eq!([take(&one, 12, second), take(&other, 10, third)], [Ok(true); 2]);
        // A user may have as many as are left to others, who have theirs.
        assert_eq!((take(&other, 13, third), locks.shares.taken()), (Err(Errno::NOLCK), 4));
        let theirs = Asker { uid: user + 1, ..by(14, third) };
        assert_eq!(locks.lock(&other, theirs, range(14, 14), LockKind::Exclusive), Ok(true));
        let way = locks.in_the_way(&other, by(10, third), range(14, 14), LockKind::Shared).unwrap();
        assert_eq!(way, Some((range(14, 14), LockKind::Exclusive, 14)));
        // What cannot be locked takes nothing.
        let blocked = Asker { uid: user + 1, ..by(15, third) };
        assert_eq!(locks.lock(&other, blocked, range(14, 14), LockKind::Shared), Ok(false));
        assert_eq!(locks.shares.taken(), 5);

        let close = |inode, handle| locks.let_go(&locks.closed(inode, None, handle));
        assert!(close(1, second) && !close(1, second), "10 and 12 asked by it");
        assert!(!locks.has_any(1, 10) && locks.has_any(1, 11));
        assert!(locks.has_any(2, 10) && !locks.flushed(1, 12) && locks.flushed(1, 11));
        assert!(!close(1, first) && !lock(&locks.files).contains_key(&1));
        locks.unlock(2, by(10, third), range(0, 5)).unwrap();
        assert!(locks.has_any(2, 10));
        locks.unlock(2, by(10, third), LockRange::WHOLE).unwrap();
        assert!(!locks.has_any(2, 10) && close(2, third));
        // The kernel may give the number of an owner that is gone to the next one, before what it had is unlocked.
        assert_eq!(take(&one, 20, first), Ok(true));
        let gone = locks.closed(1, None, first);
        assert_eq!(take(&one, 20, second), Ok(true));
        assert!(locks.let_go(&gone) && locks.has_any(1, 20));
        assert_eq!(locks.lock(&one, by(21, second), range(20, 20), LockKind::Exclusive), Ok(false));
        assert!(close(1, second));
        assert_eq!((locks.shares.taken(), lock(&locks.files).len()), (0, 0));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_forked_child_keeps_no_locks() {
        let path = std::env::temp_dir().join(format!("onehop-serve-locks-{}", std::process::id()));
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (file, other) = (open(), open());
        let owned = |file| Owned { file, writes: true, ranges: Vec::new(), by_range: false, whole: None };
        let mut first = owned(file);
        // What a fork does: the open file is there twice.
        let inherited = first.file.try_clone().unwrap();
        assert!(lock_range(&first.file, LockRange::WHOLE, Some(LockKind::Exclusive)).unwrap());
        assert!(first.flock(LockKind::Exclusive).unwrap());
        let mut second = owned(other);
        assert!(!lock_range(&second.file, LockRange::WHOLE, Some(LockKind::Shared)).unwrap());
        assert!(!second.flock(LockKind::Shared).unwrap());
        drop(first);
        assert!(lock_range(&second.file, LockRange::WHOLE, Some(LockKind::Exclusive)).unwrap());
        assert!(second.flock(LockKind::Exclusive).unwrap());
        drop(inherited);
        std::fs::remove_file(path).unwrap();
    }
}
