//! A mount as its programs see it: its mount point, and the links in its `3fs-virt/iovs`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use onehop_os::hf3fs::{make_link, remove_link};
use onehop_os::{HostMem, Semaphore};
use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, flock, openat, readlinkat, symlinkat, unlinkat,
};
use rustix::io::Errno;

use crate::{Error, IOVS, Name, ONEHOP_FOLDER, Priority, Result, SHM};

/// The type of a mount's file system, as the kernel names it.
pub const FS_TYPE: &str = "fuse.hf3fs";

/// The mount point above a path, from the mount table `mounts` (`/proc/self/mountinfo`). With `any_type`, mounts of any
/// file system count that have a folder `3fs-virt`.
///
/// # Errors
/// When the path does not exist.
pub fn find(path: &Path, mounts: &str, any_type: bool) -> Result<Option<PathBuf>> {
    let path = path.canonicalize().map_err(|e| Error::file("realpath of", path, e))?;
    let points = mounts.lines().filter_map(|line| point(line, any_type));
    Ok(points.filter(|point| path.starts_with(point)).max_by_key(|point| point.components().count()))
}

/// A mount, from the mount table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mounted<'a> {
    /// The type of its file system.
    pub fs_type: &'a str,
    /// The source, as named in the mount call.
    pub source: &'a str,
    /// The file system's own options, with commas between them.
    pub options: &'a str,
}

/// The topmost mount at a path, from the mount table `mounts` (`/proc/self/mountinfo`).
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

/// The mount point in a line, if it is one of ours.
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

/// Decodes a path in the mount table, which has special characters as a backslash and three octal digits.
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
    _daemon: RwLockWriteGuard<'a, Daemon>,
}

/// The daemon that serves a mount, as far as it is known.
struct Daemon {
    folder: Arc<OwnedFd>,
    /// Semaphores of our daemon, by user and priority. Finding one takes two requests.
    submissions: Vec<(u32, Priority, Arc<Submissions>)>,
}

impl Daemon {
    fn of(folder: OwnedFd) -> Self {
        Self { folder: Arc::new(folder), submissions: Vec::new() }
    }
}

/// A mount that a program uses. It holds the folder of links open, which shows the daemon that the program is running.
pub struct Mount {
    path: PathBuf,
    /// Never locked during a request to the daemon: a child forked meanwhile would find it locked for ever.
    daemon: RwLock<Daemon>,
}

impl Mount {
    /// Opens the mount at a mount point.
    ///
    /// # Errors
    /// When there is no mount.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), daemon: RwLock::new(Daemon::of(folder(path)?)) })
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks out other threads from the folder's descriptor while the result lives: see `Files::hold`.
    #[must_use]
    pub fn hold(&self) -> HeldMount<'_> {
        HeldMount { _daemon: self.write() }
    }

    fn read(&self) -> RwLockReadGuard<'_, Daemon> {
        self.daemon.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Daemon> {
        self.daemon.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` in the folder of links. If its daemon is gone, runs it again in the newly opened folder.
    fn within<R>(&self, f: impl Fn(&OwnedFd) -> rustix::io::Result<R>) -> Result<rustix::io::Result<R>> {
        let open = self.read().folder.clone();
        let done = f(&open);
        if !matches!(done, Err(Errno::NOTCONN | Errno::STALE | Errno::CONNABORTED | Errno::IO)) {
            return Ok(done);
        }
        let new = Daemon::of(folder(&self.path)?);
        let folder = new.folder.clone();
        *self.write() = new;
        Ok(f(&folder))
    }

    /// Registers shared memory with the daemon.
    ///
    /// # Errors
    /// When the daemon refuses it.
    pub fn publish(&self, name: &Name, target: &Path) -> Result<()> {
        let link = name.to_string();
        let make = |folder: &OwnedFd| {
            ioctl_result(make_link(folder, link.as_bytes(), target.as_os_str().as_encoded_bytes()))
                .unwrap_or_else(|| symlinkat(target, folder, &link))
        };
        self.within(make)?.map_err(|error| match error {
            Errno::MFILE => Error::TooMany { mount: self.path.clone() },
            error => Error::file("symlink", self.path.join(IOVS).join(&link), error),
        })
    }

    /// Deregisters shared memory.
    ///
    /// # Errors
    /// When the daemon has no link of that name.
    pub fn withdraw(&self, name: &Name) -> Result<()> {
        let link = name.to_string();
        let remove = |folder: &OwnedFd| {
            ioctl_result(remove_link(folder, link.as_bytes()))
                .unwrap_or_else(|| unlinkat(folder, &link, AtFlags::empty()))
        };
        self.within(remove)?.map_err(|e| Error::file("unlink", self.path.join(IOVS).join(&link), e))
    }

    /// The target of a link.
    ///
    /// # Errors
    /// When there is no such link.
    pub fn target(&self, name: &str) -> Result<PathBuf> {
        self.within(|folder| readlinkat(folder, name, Vec::new()))?
            .map(|target| path_of(target.into_bytes()))
            .map_err(|e| Error::file("readlink", self.path.join(IOVS).join(name), e))
    }

    /// The semaphore that announces submissions to rings of a priority, for the calling user `uid`. To be called after
    /// a ring was published, so that it is the semaphore of that ring.
    ///
    /// # Errors
    /// When the daemon has no such semaphore, or the link leads out of shared memory.
    pub fn submissions(&self, uid: u32, priority: Priority) -> Result<Arc<Submissions>> {
        let is_it = |(of, at, known): &&(u32, Priority, Arc<Submissions>)| {
            (*of, *at) == (uid, priority) && known.are_current()
        };
        let known = self.read().submissions.iter().find(is_it).map(|(.., known)| known.clone());
        if let Some(known) = known {
            return Ok(known);
        }
        let found = Arc::new(self.find_submissions(priority)?);
        let known = &mut self.write().submissions;
        known.retain(|(.., known)| known.are_current());
        if found.held.is_some() && known.len() < MAX_SUBMISSIONS {
            known.push((uid, priority, found.clone()));
        }
        Ok(found)
    }

    fn find_submissions(&self, priority: Priority) -> Result<Submissions> {
        let target = self.target(priority.link())?;
        let (file, mem) = shared(&target)?;
        let name = target.file_name().unwrap_or_default();
        let is_ours = name.as_encoded_bytes().starts_with(SEMAPHORE_PREFIX.as_bytes());
        Ok(Submissions { semaphore: Semaphore::at(&mem, 0)?, held: is_ours.then_some(file) })
    }

    /// Where our daemon accepts GPU memory; `None` for mounts of other programs.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        let link = self.path.join(ONEHOP_FOLDER).join("socket");
        readlinkat(CWD, &link, Vec::new()).ok().map(|target| path_of(target.into_bytes()))
    }
}

/// The result of an ioctl that only our daemon has; `None` if the daemon does not support it, or the strings are too
/// long for it.
fn ioctl_result(result: rustix::io::Result<()>) -> Option<rustix::io::Result<()>> {
    match result {
        Err(Errno::NOTTY | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::NAMETOOLONG) => None,
        // A sandbox may forbid ioctls.
        Err(Errno::PERM | Errno::ACCESS) => None,
        answer => Some(answer),
    }
}

/// The prefix of our daemon's semaphores in `/dev/shm`.
pub const SEMAPHORE_PREFIX: &str = "sem.onehop-submit-ios.";

/// Semaphores that a mount caches: a program has few users.
const MAX_SUBMISSIONS: usize = 16;

/// The semaphore that announces submissions.
pub struct Submissions {
    semaphore: Semaphore,
    /// Its file, which our daemon keeps locked while it runs. `None` for 3FS, which does not lock it.
    held: Option<File>,
}

impl Submissions {
    /// Announces a submission.
    pub fn post(&self) {
        self.semaphore.post();
    }

    /// Whether it is the current semaphore of its user and priority. Our daemon unlinks those that it no longer serves.
    fn are_current(&self) -> bool {
        self.held.as_ref().is_some_and(|file| file.metadata().is_ok_and(|data| data.nlink() > 0))
    }

    /// Whether a daemon serves it, as far as is known without asking it.
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

/// Maps a file of shared memory that a link names.
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

/// Opens a regular file of shared memory, without following links.
pub(crate) fn open(path: &Path) -> Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = openat(CWD, path, flags, Mode::empty()).map_err(|e| Error::file("open", path, e))?;
    let file = File::from(file);
    if !file.metadata().is_ok_and(|data| data.is_file()) {
        let invalid = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(Error::file("open", path, invalid));
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
        // Only the folder `3fs-virt` may be mounted.
        let alone = line(&inner.join("3fs-virt"), FS_TYPE);
        assert_eq!(find(&file, &alone, false).unwrap(), Some(inner));
        std::fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn only_regular_files_of_shared_memory_are_mapped() {
        for path in ["/etc/passwd", "/dev/null", "/dev/shm/../../etc/passwd", "/dev/shm/", "/dev/shm"] {
            assert!(map(Path::new(path)).is_err(), "{path}");
        }
    }
}
