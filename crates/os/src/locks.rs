//! Locks on ranges of a file that belong to the open file description, not to the process (`F_OFD_SETLK`).

use std::os::fd::{AsFd, AsRawFd};

use crate::{Error, Result};

/// What a lock prevents others from doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockKind {
    /// Writing.
    Shared,
    /// Reading and writing.
    Exclusive,
}

/// Bytes of a file, the last one included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockRange {
    /// The first byte.
    pub start: u64,
    /// The last byte; `i64::MAX` means the end of the file.
    pub end: u64,
}

impl LockRange {
    /// The whole file, regardless of its length.
    pub const WHOLE: Self = Self { start: 0, end: i64::MAX as u64 };

    fn with(self, kind: i32) -> Result<libc::flock> {
        let invalid = || Error::system("locking a range", rustix::io::Errno::INVAL);
        let start = i64::try_from(self.start).map_err(|_| invalid())?;
        let end = i64::try_from(self.end).ok().filter(|end| *end >= start).ok_or_else(invalid)?;
        Ok(libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: start,
            // Zero means up to the end.
            l_len: if end == i64::MAX { 0 } else { end - start + 1 },
            l_pid: 0,
        })
    }
}

fn number(kind: LockKind) -> i32 {
    match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
    }
}

/// Locks a range for an open file, or unlocks it (`None`), without waiting; false if another holds a conflicting lock.
///
/// # Errors
/// When the range is invalid, the file is not open for this access, or the system is out of locks.
pub fn lock_range(file: impl AsFd, range: LockRange, kind: Option<LockKind>) -> Result<bool> {
    let lock = range.with(kind.map_or(libc::F_UNLCK, number))?;
    // SAFETY: the call reads the structure, which lives throughout.
    let done = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    match done {
        0 => Ok(true),
        _ => match std::io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            error => Err(Error::system("locking a range", error)),
        },
    }
}

/// A lock that conflicts with one on this range; `None` if there is none.
///
/// # Errors
/// When the range is invalid.
pub fn lock_in_the_way(
    file: impl AsFd,
    range: LockRange,
    kind: LockKind,
) -> Result<Option<(LockRange, LockKind)>> {
    let mut lock = range.with(number(kind))?;
    // SAFETY: the call reads and writes the structure, which lives throughout.
    let done = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if done != 0 {
        return Err(Error::system("asking for a lock", std::io::Error::last_os_error()));
    }
    let kind = match i32::from(lock.l_type) {
        libc::F_UNLCK => return Ok(None),
        libc::F_RDLCK => LockKind::Shared,
        _ => LockKind::Exclusive,
    };
    let start = lock.l_start.max(0);
    let end = if lock.l_len == 0 { i64::MAX } else { start.saturating_add(lock.l_len - 1) };
    Ok(Some((LockRange { start: start as u64, end: end as u64 }, kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_exclude_each_other_by_range() {
        let path = std::env::temp_dir().join(format!("onehop-locks-{}", std::process::id()));
        let open = || {
            std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap()
        };
        let (one, other) = (open(), open());
        let (low, high) = (LockRange { start: 0, end: 9 }, LockRange { start: 10, end: i64::MAX as u64 });
        let set = |file: &std::fs::File, range, kind| lock_range(file, range, kind).unwrap();
        assert!(set(&one, low, Some(LockKind::Exclusive)));
        assert!(set(&other, high, Some(LockKind::Shared)));
        assert!(!set(&other, LockRange::WHOLE, Some(LockKind::Shared)));
        assert!(!set(&one, high, Some(LockKind::Exclusive)) && set(&one, high, Some(LockKind::Shared)));
        let found = lock_in_the_way(&other, LockRange::WHOLE, LockKind::Exclusive).unwrap();
        assert_eq!(found, Some((low, LockKind::Exclusive)));
        assert!(set(&one, LockRange::WHOLE, None));
        assert!(set(&other, LockRange::WHOLE, Some(LockKind::Exclusive)));
        assert_eq!(lock_in_the_way(&other, LockRange::WHOLE, LockKind::Exclusive).unwrap(), None);
        drop(other);
        assert!(set(&one, LockRange::WHOLE, Some(LockKind::Exclusive)));
        assert!(lock_range(&one, LockRange { start: 5, end: 4 }, None).is_err());
        assert!(lock_range(&one, LockRange { start: 1 << 63, end: u64::MAX }, None).is_err());
        std::fs::remove_file(path).unwrap();
    }
}
