//! The locks of one owner on one file, as the kernel has them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use onehop_os::locks::{LockKind, LockRange, lock_range};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;

use crate::opens::Open;

/// Ranges that an owner has locked at most; beyond it, it gets an error.
const MOST_RANGES: usize = 4096;

/// A range, and how it is locked.
pub(super) type LockedRange = (LockRange, LockKind);

/// The open file of an owner.
pub(super) struct Owned {
    pub file: File,
    /// The file is open to be written, which an exclusive lock of a range takes.
    writes: bool,
    /// What is locked of it by range, as the kernel has it: apart from each other, in no order.
    pub ranges: Arc<Vec<LockedRange>>,
    /// Some of it was locked, which only `fcntl` does.
    by_range: bool,
    /// What it has by `flock`.
    whole: Option<LockKind>,
}

impl Owned {
    /// Opens the file once more; to be written only if the program has it open so, because what is written cannot be run.
    pub fn open(open: &Open) -> Result<Self, Errno> {
        let (file, writes) = opened(open)?;
        Ok(Self::of(file, writes))
    }

    /// One that has no locks yet.
    pub fn of(file: File, writes: bool) -> Self {
        Self { file, writes, ranges: Arc::default(), by_range: false, whole: None }
    }

    /// Locks a range; false where another owner has it.
    pub fn lock(&mut self, open: &Open, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
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
        let before = std::mem::replace(&mut self.ranges, Arc::new(ranges));
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
        let mut next = Self::of(file, writes);
        next.by_range = self.by_range;
        for (range, _) in &*self.ranges {
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

    pub fn unlock(&mut self, range: LockRange) -> Result<(), Errno> {
        self.by_range = true;
        let rest = without(&self.ranges, range);
        if rest.len() > MOST_RANGES {
            return Err(Errno::NOLCK);
        }
        lock_range(&self.file, range, None).map_err(plain)?;
        self.ranges = Arc::new(rest);
        Ok(())
    }

    pub(super) fn flock(&mut self, kind: LockKind) -> Result<bool, Errno> {
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

/// Ranges and one more, which takes the place of others, and is joined with those beside it that are locked alike.
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
