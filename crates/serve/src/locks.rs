//! Locks of programs, held on files of this machine as the daemon's own: they exclude the programs of other mounts, and those that
//! use the folder itself.
//!
//! Each owner that the kernel names (a process for `fcntl`, an open file for `flock`) has an open file of its own here, and locks
//! ranges of it. The kernel's messages do not say which of the two calls was made. A lock on a whole file may be either, so it is taken as
//! both; a program that takes both on one file gets in its own way, as it does over NFS.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Mutex;

use onehop_os::locks::{LockKind, LockRange, lock_in_the_way, lock_range};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;

use crate::lock;
use crate::opens::Open;

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
    uid: u32,
    pid: u32,
    /// By which of its handles it has asked. When one of them is closed nothing is left of it.
    handles: Vec<u64>,
    /// Some of it was locked, which only `fcntl` does.
    by_range: bool,
    /// What it has by `flock`.
    whole: Option<LockKind>,
}

impl Owned {
    /// Opens the file once more; to be written only if the program has it open so, because what is written cannot be run.
    fn open(open: &Open, by: Asker) -> Result<Self, Errno> {
        let (file, writes) = opened(open)?;
        let (uid, pid) = (by.uid, by.pid);
        let (ranges, handles, by_range, whole) = (Vec::new(), Vec::new(), false, None);
        Ok(Self { file, writes, ranges, uid, pid, handles, by_range, whole })
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
        let mut next = Self { file, writes, ranges: Vec::new(), handles: Vec::new(), whole: None, ..*self };
        for (range, _) in &self.ranges {
            if !lock_range(&next.file, *range, Some(LockKind::Shared)).map_err(plain)? {
                return Err(Errno::NOLCK);
            }
        }
        if self.whole.is_some() && !next.flock(LockKind::Shared)? {
            return Err(Errno::NOLCK);
        }
        next.ranges = std::mem::take(&mut self.ranges);
        next.handles = std::mem::take(&mut self.handles);
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

/// All owners of locks, by inode and by what the kernel calls them.
pub(crate) struct Locks {
    owners: Mutex<HashMap<(u64, u64), Owned>>,
    /// Owners at once. A user may have as many as are left to others.
    most: usize,
}

impl Locks {
    pub fn new(most: usize) -> Self {
        Self { owners: Mutex::default(), most }
    }

    /// Locks a range of a file; false where another has it locked.
    pub fn lock(&self, open: &Open, by: Asker, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
        let mut all = lock(&self.owners);
        let key = (open.inode, by.owner);
        if let Some(owned) = all.get_mut(&key) {
            if !owned.handles.contains(&by.handle) {
                owned.handles.push(by.handle);
            }
            return owned.lock(open, range, kind);
        }
        let theirs = all.values().filter(|owned| owned.uid == by.uid).count();
        if theirs >= self.most.saturating_sub(all.len()) {
            return Err(Errno::NOLCK);
        }
        let mut owned = Owned::open(open, by)?;
        owned.handles.push(by.handle);
        let is_locked = owned.lock(open, range, kind)?;
        if is_locked {
            all.insert(key, owned);
        }
        Ok(is_locked)
    }

    /// Whether somebody has a lock on a file.
    pub fn has_any(&self, inode: u64, by: Asker) -> bool {
        lock(&self.owners).contains_key(&(inode, by.owner))
    }

    /// Unlocks a range.
    pub fn unlock(&self, inode: u64, by: Asker, range: LockRange) -> Result<(), Errno> {
        let mut all = lock(&self.owners);
        let key = (inode, by.owner);
        if range == LockRange::WHOLE {
            all.remove(&key);
        } else if let Some(owned) = all.get_mut(&key) {
            owned.unlock(range)?;
        }
        Ok(())
    }

    /// The lock that is in somebody's way, and the program that has it; 0 where that is not of this mount.
    pub fn in_the_way(
        &self,
        open: &Open,
        by: Asker,
        range: LockRange,
        kind: LockKind,
    ) -> Result<Option<(LockRange, LockKind, u32)>, Errno> {
        let all = lock(&self.owners);
        let own = all.get(&(open.inode, by.owner)).map(|owned| &owned.file);
        let file = own.or_else(|| open.file().local()).ok_or(Errno::NOLCK)?;
        let Some((range, kind)) = lock_in_the_way(file, range, kind).map_err(plain)? else { return Ok(None) };
        let mut others = all.iter().filter(|((inode, owner), _)| *inode == open.inode && *owner != by.owner);
        let pid = match (others.next(), others.next()) {
            (Some((_, other)), None) => other.pid,
            _ => 0,
        };
        Ok(Some((range, kind, pid)))
    }

    /// A process has closed the file, by one of its descriptors: what it had locked goes. Whether there was anything.
    pub fn flushed(&self, inode: u64, owner: u64) -> bool {
        lock(&self.owners).remove(&(inode, owner)).is_some()
    }

    /// Nobody has the open file any more. Whether something was locked by it.
    pub fn closed(&self, inode: u64, handle: u64) -> bool {
        let mut all = lock(&self.owners);
        let before = all.len();
        all.retain(|(of, _), owned| *of != inode || !owned.handles.contains(&handle));
        all.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_forked_child_keeps_no_locks() {
        let path = std::env::temp_dir().join(format!("onehop-serve-locks-{}", std::process::id()));
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (file, other) = (open(), open());
        let owned = |file| Owned {
            file,
            writes: true,
            ranges: Vec::new(),
            uid: 0,
            pid: 0,
            handles: Vec::new(),
            by_range: false,
            whole: None,
        };
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
