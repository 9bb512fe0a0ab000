//! A mount, as a program sees it: where it is, and the links in its `3fs-virt/iovs`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use onehop_os::{HostMem, Semaphore};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat, readlinkat, symlinkat, unlinkat};
use rustix::io::Errno;

use crate::{Error, IOVS, Name, OURS, Priority, Result, SHM};

/// The type of a mount's file system, as the kernel names it.
pub const FS_TYPE: &str = "fuse.hf3fs";

/// The mount point above a path, of those listed in `mounts` (`/proc/self/mountinfo`); with `any_type`, of any file system
/// that has a folder `3fs-virt`.
///
/// # Errors
/// When the path leads nowhere.
pub fn find(path: &Path, mounts: &str, any_type: bool) -> Result<Option<PathBuf>> {
    let path = path.canonicalize().map_err(|e| Error::file("realpath of", path, e))?;
    let points = mounts.lines().filter_map(|line| point(line, any_type));
    Ok(points.filter(|point| path.starts_with(point)).max_by_key(|point| point.components().count()))
}

/// A line of the kernel's table of mounts, as far as it says what is mounted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mounted<'a> {
    /// The type of its file system.
    pub fs_type: &'a str,
    /// The source, as named in the mount call.
    pub source: &'a str,
    /// The file system's own options, with commas between them.
    pub options: &'a str,
}

/// What is mounted at a place, the one on top, according to `mounts` (`/proc/self/mountinfo`).
#[must_use]
pub fn at<'a>(place: &Path, mounts: &'a str) -> Option<Mounted<'a>> {
    mounts.lines().rev().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut words = after.split(' ');
        let mut next = || words.next();
        let mount = Mounted { fs_type: next()?, source: next()?, options: next()? };
        (unescape(before.split(' ').nth(4)?) == place).then_some(mount)
    })
}

/// The mount point in a line, where it is one of ours.
fn point(line: &str, any_type: bool) -> Option<PathBuf> {
    let (before, after) = line.split_once(" - ")?;
    let place = unescape(before.split(' ').nth(4)?);
    if !any_type && after.split(' ').next()? != FS_TYPE {
        return None;
    }
    if place.file_name().is_some_and(|name| name == "3fs-virt") {
        return place.parent().map(Path::to_owned);
    }
    place.join("3fs-virt").exists().then_some(place)
}

/// The kernel writes blanks and the like as a backslash and three octal digits.
fn unescape(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let (bytes, mut out, mut at) = (text.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.filter(|_| bytes[at] == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(out).into()
}

/// See [`Mount::hold`].
pub struct HeldMount<'a> {
    _folder: RwLockWriteGuard<'a, Arc<OwnedFd>>,
}

/// A mount that a program uses. It holds the folder of links open, so the daemon sees that its program lives.
pub struct Mount {
    path: PathBuf,
    /// Never locked during a request to the daemon: a child that was forked then would find it locked for ever.
    folder: RwLock<Arc<OwnedFd>>,
}

impl Mount {
    /// The one at a mount point.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), folder: RwLock::new(Arc::new(folder(path)?)) })
    }

    /// Its mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps other threads from the folder's descriptor as long as the result lives: see `Files::hold`.
    #[must_use]
    pub fn hold(&self) -> HeldMount<'_> {
        HeldMount { _folder: self.folder.write().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Runs `f` in the folder of links; once more in a newly opened one if the old one's daemon is gone.
    fn within<R>(&self, f: impl Fn(&OwnedFd) -> rustix::io::Result<R>) -> Result<rustix::io::Result<R>> {
        let open = self.folder.read().unwrap_or_else(PoisonError::into_inner).clone();
        let done = f(&open);
        if !matches!(done, Err(Errno::NOTCONN | Errno::STALE | Errno::CONNABORTED | Errno::IO)) {
            return Ok(done);
        }
        let new = Arc::new(folder(&self.path)?);
        *self.folder.write().unwrap_or_else(PoisonError::into_inner) = new.clone();
        Ok(f(&new))
    }

    /// Registers shared memory with the daemon.
    ///
    /// # Errors
    /// When the daemon refuses it.
    pub fn publish(&self, name: &Name, target: &Path) -> Result<()> {
        let link = name.to_string();
        self.within(|folder| symlinkat(target, folder, &link))?
            .map_err(|e| Error::file("symlink", self.path.join(IOVS).join(&link), e))
    }

    /// Deregisters it.
    ///
    /// # Errors
    /// When the daemon has none of that name.
    pub fn withdraw(&self, name: &Name) -> Result<()> {
        let link = name.to_string();
        self.within(|folder| unlinkat(folder, &link, rustix::fs::AtFlags::empty()))?
            .map_err(|e| Error::file("unlink", self.path.join(IOVS).join(&link), e))
    }

    /// The target of a link.
    ///
    /// # Errors
    /// When there is none.
    pub fn target(&self, name: &str) -> Result<PathBuf> {
        self.within(|folder| readlinkat(folder, name, Vec::new()))?
            .map(|target| path_of(target.into_bytes()))
            .map_err(|e| Error::file("readlink", self.path.join(IOVS).join(name), e))
    }

    /// The semaphore for submissions of a priority.
    ///
    /// # Errors
    /// When the daemon has no semaphore for them, or its link leads out of shared memory.
    pub fn submissions(&self, priority: Priority) -> Result<Submissions> {
        let target = self.target(priority.link())?;
        let (file, mem) = shared(&target)?;
        let name = target.file_name().unwrap_or_default();
        let is_ours = name.as_encoded_bytes().starts_with(OUR_SEMAPHORES.as_bytes());
        Ok(Submissions { semaphore: Semaphore::at(&mem, 0)?, held: is_ours.then_some(file) })
    }

    /// Where our daemon listens for GPU memory; none where the mount is another's.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        let link = self.path.join(OURS).join("socket");
        readlinkat(CWD, &link, Vec::new()).ok().map(|target| path_of(target.into_bytes()))
    }
}

/// How the names of our daemon's semaphores in `/dev/shm` begin.
pub const OUR_SEMAPHORES: &str = "sem.onehop-submit-ios.";

/// The semaphore that announces submissions.
pub struct Submissions {
    semaphore: Semaphore,
    /// Its file, which our daemon holds a lock on while it lives. 3FS's does not.
    held: Option<File>,
}

impl Submissions {
    /// Announces a submission.
    pub fn post(&self) {
        self.semaphore.post();
    }

    /// Whether a daemon serves it, as far as is known without waiting for an answer.
    #[must_use]
    pub fn are_served(&self) -> bool {
        let Some(file) = &self.held else { return true };
        let is_free = flock(file, FlockOperation::NonBlockingLockShared).is_ok();
        if is_free {
            let _ = flock(file, FlockOperation::Unlock);
        }
        !is_free
    }
}

fn path_of(bytes: Vec<u8>) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    std::ffi::OsString::from_vec(bytes).into()
}

fn folder(path: &Path) -> Result<OwnedFd> {
    let folder = path.join(IOVS);
    openat(CWD, &folder, OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY, Mode::empty())
        .map_err(|e| Error::file("open", &folder, e))
}

/// Maps a file of shared memory that a link led to.
pub(crate) fn map(path: &Path) -> Result<HostMem> {
    shared(path).map(|(_, mem)| mem)
}

fn shared(path: &Path) -> Result<(File, HostMem)> {
    if path.parent() != Some(Path::new(SHM)) {
        return Err(Error::Argument(format!("{} is not in {SHM}", path.display())));
    }
    let file = open(path)?;
    let mem = HostMem::of_shared(&file)?;
    Ok((file, mem))
}

/// Opens a file of shared memory: never a link, nor anything but a file.
pub(crate) fn open(path: &Path) -> Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = openat(CWD, path, flags, Mode::empty()).map_err(|e| Error::file("open", path, e))?;
    let file = File::from(file);
    if !file.metadata().is_ok_and(|data| data.is_file()) {
        let odd = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(Error::file("open", path, odd));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_of_the_type_is_found() {
        let top = std::env::temp_dir().join(format!("onehop mount {}", std::process::id()));
        let inner = top.join("inner");
        std::fs::create_dir_all(inner.join("3fs-virt/iovs")).unwrap();
        std::fs::create_dir_all(top.join("3fs-virt")).unwrap();
        let escaped = |path: &Path| path.display().to_string().replace(' ', "\\040");
        let line = |path: &Path, kind: &str| {
            format!("36 35 98:0 / {} rw,noatime shared:1 - {kind} src rw\n", escaped(path))
        };
        let mounts = line(&top, FS_TYPE) + &line(&inner, "ext4") + "nonsense\n";
        let file = inner.join("f");
        std::fs::write(&file, "").unwrap();
        assert_eq!(find(&file, &mounts, false).unwrap(), Some(top.clone()));
        assert_eq!(find(&file, &mounts, true).unwrap(), Some(inner.clone()));
        assert_eq!(find(Path::new("/dev/null"), &mounts, true).unwrap(), None);
        assert!(find(&top.join("nowhere"), &mounts, true).is_err());
        // Only the folder may be mounted.
        let alone = line(&inner.join("3fs-virt"), FS_TYPE);
        assert_eq!(find(&file, &alone, false).unwrap(), Some(inner));
        std::fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn only_plain_files_of_shared_memory_are_mapped() {
        for path in ["/etc/passwd", "/dev/null", "/dev/shm/../../etc/passwd", "/dev/shm/", "/dev/shm"] {
            assert!(map(Path::new(path)).is_err(), "{path}");
        }
    }
}
