//! The locks of one owner on one file, as the kernel has them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use onehop_os::locks::{LockKind, LockRange, lock_range};
use onehop_target::shares::Shares;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;

use crate::opens::Open;

/// Locked ranges of one owner. More are an error.
pub(super) const MAX_RANGES: usize = 4096;

/// Locked ranges of one person, and of all persons, on all files. Each is a lock in the kernel, which searches all
/// locks of a file for each new one: 0.1 ms of CPU time with this many, and 1 ms with three times as many.
pub(super) const MAX_PER_PERSON: u64 = 1 << 13;
pub(super) const MAX_OF_ALL: u64 = 1 << 17;

/// Counts an owner's ranges for its person.
pub(super) struct RangeCount {
    all: Arc<Shares>,
    uid: u32,
    count: u64,
}

impl RangeCount {
    pub fn new(all: &Arc<Shares>, uid: u32) -> Self {
        Self { all: all.clone(), uid, count: 0 }
    }

    fn grow_to(&mut self, ranges: usize) -> Result<(), Errno> {
        let more = (ranges as u64).saturating_sub(self.count);
        if more > 0 && !self.all.take(self.uid, more) {
            return Err(Errno::NOLCK);
        }
        self.count += more;
        Ok(())
    }

    fn shrink_to(&mut self, ranges: usize) {
        let fewer = self.count.saturating_sub(ranges as u64);
        self.all.put_back(self.uid, fewer);
        self.count -= fewer;
    }
}

impl Drop for RangeCount {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// A range and its lock type.
pub(super) type LockedRange = (LockRange, LockKind);

/// The open file through which the locks of one owner are held.
pub(super) struct Owned {
    pub file: File,
    /// Whether the file is open for writing, which an exclusive lock of a range requires.
    writes: bool,
    /// The locked ranges, as the kernel has them: disjoint, in no order.
    pub ranges: Arc<Vec<LockedRange>>,
    /// Counts the ranges; more of them while a lock is tried.
    count: RangeCount,
    /// Whether a part of the file was ever locked, which only `fcntl` can do.
    by_range: bool,
    /// The lock held by `flock`.
    whole: Option<LockKind>,
}

impl Owned {
    /// Opens the file again; for writing only if the program has it open for writing, because a file that is open for
    /// writing cannot be executed.
    pub fn open(open: &Open, count: RangeCount) -> Result<Self, Errno> {
        let (file, writes) = opened(open)?;
        Ok(Self::of(file, writes, count))
    }

    /// An owner without locks.
    pub fn of(file: File, writes: bool, count: RangeCount) -> Self {
        Self { file, writes, ranges: Arc::default(), count, by_range: false, whole: None }
    }

    /// Locks a range. Returns false if another owner has it locked.
    pub fn lock(&mut self, open: &Open, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
        let done = self.try_lock(open, range, kind);
        self.count.shrink_to(self.ranges.len());
        done
    }

    fn try_lock(&mut self, open: &Open, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
        self.by_range |= range != LockRange::WHOLE;
        if kind == LockKind::Exclusive && !self.writes {
            if !open.writes() {
                // `fcntl` would have refused such a file, so this was `flock`.
                return if self.by_range { Err(Errno::NOLCK) } else { self.flock(kind) };
            }
            self.reopen(open)?;
        }
        let ranges = self.next(with(&self.ranges, (range, kind)))?;
        if !lock_range(&self.file, range, Some(kind)).map_err(plain)? {
            return Ok(false);
        }
        let before = std::mem::replace(&mut self.ranges, ranges);
        if self.by_range {
            self.weaken_flock();
            return Ok(true);
        }
        if self.flock(kind)? {
            return Ok(true);
        }
        // Restore the lock from before.
        lock_range(&self.file, range, self.whole).map_err(plain)?;
        // The lock by `flock` may have been lost, and then no range is locked either.
        self.ranges = if self.whole.is_some() { before } else { Arc::default() };
        Ok(false)
    }

    /// Counts the ranges that are about to be locked, unless they are too many.
    fn next(&mut self, ranges: Vec<LockedRange>) -> Result<Arc<Vec<LockedRange>>, Errno> {
        if ranges.len() > MAX_RANGES {
            return Err(Errno::NOLCK);
        }
        self.count.grow_to(ranges.len())?;
        Ok(Arc::new(ranges))
    }

    /// Replaces the open file by one that is open for writing. All current locks are shared, so both files can hold
    /// them for a moment.
    fn reopen(&mut self, open: &Open) -> Result<(), Errno> {
        let (file, writes) = opened(open)?;
        if !writes {
            return Err(Errno::NOLCK);
        }
        let mut next = Self::of(file, writes, RangeCount::new(&self.count.all, self.count.uid));
        next.by_range = self.by_range;
        for (range, _) in &*self.ranges {
            if !lock_range(&next.file, *range, Some(LockKind::Shared)).map_err(plain)? {
                return Err(Errno::NOLCK);
            }
        }
        if self.whole.is_some() && !next.flock(LockKind::Shared)? {
            return Err(Errno::NOLCK);
        }
        std::mem::swap(&mut next.ranges, &mut self.ranges);
        std::mem::swap(&mut next.count, &mut self.count);
        *self = next;
        Ok(())
    }

    pub fn unlock(&mut self, range: LockRange) -> Result<(), Errno> {
        self.by_range = true;
        let rest = self.next(without(&self.ranges, range))?;
        let done = lock_range(&self.file, range, None).map_err(plain);
        if done.is_ok() {
            self.ranges = rest;
            self.weaken_flock();
        }
        self.count.shrink_to(self.ranges.len());
        done.map(drop)
    }

    /// Weakens the lock by `flock` to what the ranges hold: a program that locks ranges has locked the whole file by
    /// `fcntl` before.
    fn weaken_flock(&mut self) {
        let has = |kind| self.ranges.iter().any(|(_, of)| *of == kind);
        match self.whole {
            None => {}
            Some(_) if self.ranges.is_empty() => {
                flock(&self.file, FlockOperation::Unlock).ok();
                self.whole = None;
            }
            Some(LockKind::Exclusive) if !has(LockKind::Exclusive) => {
                // `flock` converts non-atomically; the ranges exclude others meanwhile.
                self.flock(LockKind::Shared).ok();
            }
            Some(_) => {}
        }
    }

    pub(super) fn flock(&mut self, kind: LockKind) -> Result<bool, Errno> {
        let operation = |kind| match kind {
            LockKind::Shared => FlockOperation::NonBlockingLockShared,
            LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&self.file, operation(kind)) {
            Ok(()) => self.whole = Some(kind),
            Err(Errno::AGAIN) => {
                // A failed conversion may have lost the lock from before.
                self.whole = self.whole.filter(|before| flock(&self.file, operation(*before)).is_ok());
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}

impl Drop for Owned {
    /// Closing alone would leave the locks to a forked child of this process that has not yet called `exec`.
    fn drop(&mut self) {
        lock_range(&self.file, LockRange::WHOLE, None).ok();
        flock(&self.file, FlockOperation::Unlock).ok();
    }
}

/// Opens a program's file again. Returns whether it is open for writing.
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

/// The ranges without `cut`.
pub(super) fn without(ranges: &[LockedRange], cut: LockRange) -> Vec<LockedRange> {
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

/// The ranges with one more, which replaces others where they overlap and is merged with adjacent ranges of the same
/// type.
pub(super) fn with(ranges: &[LockedRange], (mut add, kind): LockedRange) -> Vec<LockedRange> {
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

pub(super) fn plain(error: onehop_os::Error) -> Errno {
    error.errno().map_or(Errno::NOLCK, Errno::from_raw_os_error)
}
