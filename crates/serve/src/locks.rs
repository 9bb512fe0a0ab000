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

/// The open file of an owner.
struct Owned {
    file: File,
    writes: bool,
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
    /// Opens the file once more. To be written, which an exclusive lock of a range takes, where that makes sense: a program cannot be
    /// run while somebody writes it.
    fn open(open: &Open, writes: bool, by: Asker) -> Result<Self, Errno> {
        let of = open.file().local().ok_or(Errno::NOLCK)?;
        let path = format!("/proc/self/fd/{}", of.as_raw_fd());
        let with = |mode| openat(CWD, &path, mode | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty());
        let opened = if writes { with(OFlags::RDWR).ok() } else { None };
        let writes = opened.is_some();
        let (file, writes) = match opened.map_or_else(|| with(OFlags::RDONLY), Ok) {
            Ok(file) => (file, writes),
            Err(_) => (with(OFlags::WRONLY).map_err(|_| Errno::NOLCK)?, true),
        };
        let (uid, pid) = (by.uid, by.pid);
        let (handles, by_range, whole) = (Vec::new(), false, None);
        Ok(Self { file: file.into(), writes, uid, pid, handles, by_range, whole })
    }

    /// Locks a range; false where another owner has it.
    fn lock(&mut self, open: &Open, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
        self.by_range |= range != LockRange::WHOLE;
        if kind == LockKind::Exclusive && !self.writes {
            // By `fcntl` that takes a file that is open to be written.
            let is_flock = !self.by_range && !open.writes();
            return if is_flock { self.flock(kind) } else { Err(Errno::NOLCK) };
        }
        if !lock_range(&self.file, range, Some(kind)).map_err(plain)? {
            return Ok(false);
        }
        if self.by_range || self.flock(kind)? {
            return Ok(true);
        }
        // As it was before.
        lock_range(&self.file, range, self.whole).map_err(plain)?;
        Ok(false)
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
        let mut owned = Owned::open(open, range != LockRange::WHOLE || open.writes(), by)?;
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
            owned.by_range = true;
            lock_range(&owned.file, range, None).map_err(plain)?;
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

    #[test]
    fn a_forked_child_keeps_no_locks() {
        let path = std::env::temp_dir().join(format!("onehop-serve-locks-{}", std::process::id()));
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (file, other) = (open(), open());
        let owned = |file| Owned {
            file,
            writes: true,
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
