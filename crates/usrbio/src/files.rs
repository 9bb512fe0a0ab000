//! Files of a mount, as a program registers them for its rings.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use onehop_os::hf3fs::{MAGIC, magic};
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, statx};
use rustix::io::Errno;

/// A registered file. It stays open until it is deregistered.
pub struct FileRegistration {
    copy: OwnedFd,
    inode: u64,
    device: (u32, u32),
    access: OFlags,
}

impl FileRegistration {
    /// Its inode number.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// Whether it may be read (or written).
    #[must_use]
    pub fn allows(&self, read: bool) -> bool {
        let mode = self.access & OFlags::RWMODE;
        mode == OFlags::RDWR || mode == if read { OFlags::RDONLY } else { OFlags::WRONLY }
    }
}

/// Whether a file is on 3FS, or on a mount that implements its protocol.
#[must_use]
pub fn is_3fs(file: impl AsFd) -> bool {
    magic(file).is_ok_and(|number| number == MAGIC)
}

/// The registered files of a process, under two descriptor numbers: the program's and that of our copy.
#[derive(Default)]
pub struct Files(RwLock<HashMap<RawFd, Arc<FileRegistration>>>);

impl Files {
    /// Registers a file. Returns the number of the copy. If a number was registered, closed and reused for another
    /// file, it names the new file from now on, so that requests do not go to the old one.
    ///
    /// # Errors
    /// `EBADF` if it is not a file of 3FS, `EINVAL` if it is registered already, and the system's errors.
    pub fn register(&self, number: RawFd, file: BorrowedFd<'_>) -> Result<RawFd, Errno> {
        use std::os::fd::AsRawFd;
        if !is_3fs(file) {
            return Err(Errno::BADF);
        }
        let stat = statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
        let (inode, device) = (stat.stx_ino, (stat.stx_dev_major, stat.stx_dev_minor));
        let access = fcntl_getfl(file)?;
        // Closed without the lock: closing may wait for a daemon that does not answer.
        let mut closed = None;
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(&number) {
            let mode = |flags: OFlags| flags & OFlags::RWMODE;
            if (known.inode, known.device, mode(known.access)) == (inode, device, mode(access)) {
                return Err(Errno::INVAL);
            }
            closed = forget(&mut all, number);
        }
        let copy = rustix::io::fcntl_dupfd_cloexec(file, 0)?;
        let copied = copy.as_raw_fd();
        if all.contains_key(&copied) {
            return Err(Errno::INVAL);
        }
        let registered = Arc::new(FileRegistration { copy, inode, device, access });
        all.insert(number, registered.clone());
        all.insert(copied, registered);
        drop(all);
        drop(closed);
        Ok(copied)
    }

    /// The file with this number.
    #[must_use]
    pub fn get(&self, number: RawFd) -> Option<Arc<FileRegistration>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    /// Locks out registration and deregistration by other threads while the result lives. A thread that forks needs
    /// this: a lock that another thread held would stay locked in the child.
    #[must_use]
    pub fn hold(&self) -> HeldFiles<'_> {
        HeldFiles { _all: self.0.write().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Deregisters a file, by either number.
    pub fn deregister(&self, number: RawFd) {
        let closed = forget(&mut self.0.write().unwrap_or_else(PoisonError::into_inner), number);
        // Without the lock, as above.
        drop(closed);
    }
}

/// See [`Files::hold`].
pub struct HeldFiles<'a> {
    _all: RwLockWriteGuard<'a, HashMap<RawFd, Arc<FileRegistration>>>,
}

/// Removes a file, under both of its numbers.
fn forget(all: &mut HashMap<RawFd, Arc<FileRegistration>>, number: RawFd) -> Option<Arc<FileRegistration>> {
    let gone = all.remove(&number)?;
    all.retain(|_, other| !Arc::ptr_eq(other, &gone));
    Some(gone)
}

impl AsFd for FileRegistration {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.copy.as_fd()
    }
}
