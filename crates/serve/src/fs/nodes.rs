//! Files of the folder that the kernel knows, by the inode numbers that it was given for them.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, fstat, openat};
use rustix::io::Errno;

use crate::lock;

/// Numbers of ours begin here; those of file systems that have such numbers themselves get others.
pub(super) const VIRTUAL: u64 = 1 << 63;
const FOREIGN: u64 = 1 << 48;
/// The kernel's number for what is mounted.
pub(super) const ROOT: u64 = 1;

/// A file that the kernel knows.
pub(super) struct Node {
    pub inode: u64,
    /// Held without being opened: it survives renames, and no link leads elsewhere.
    pub path: OwnedFd,
    key: (u64, u64),
}

impl Node {
    /// Opens it.
    pub fn open(&self, flags: OFlags) -> Result<File, Errno> {
        openat(CWD, self.proc(), flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty()).map(File::from)
    }

    /// A path to it for calls that take nothing else.
    pub fn proc(&self) -> String {
        format!("/proc/self/fd/{}", self.path.as_raw_fd())
    }

    pub fn attr(&self) -> Result<FileAttr, Errno> {
        Ok(attr(self.inode, &fstat(&self.path)?))
    }
}

#[derive(Default)]
struct Known {
    /// A file, and how often the kernel was given it.
    by_inode: HashMap<u64, (Arc<Node>, u64)>,
    by_key: HashMap<(u64, u64), u64>,
    next: u64,
}

/// All of them.
pub(super) struct Nodes {
    root: Arc<Node>,
    device: u64,
    known: Mutex<Known>,
}

impl Nodes {
    pub fn new(root: OwnedFd) -> Result<Self, Errno> {
        let stat = fstat(&root)?;
        let key = (stat.st_dev, stat.st_ino);
        let root = Arc::new(Node { inode: ROOT, path: root, key });
        Ok(Self { root, device: stat.st_dev, known: Mutex::default() })
    }

    pub fn root(&self) -> &Node {
        &self.root
    }

    pub fn get(&self, inode: INodeNo) -> Result<Arc<Node>, Errno> {
        if inode.0 == ROOT {
            return Ok(self.root.clone());
        }
        lock(&self.known).by_inode.get(&inode.0).map(|(node, _)| node.clone()).ok_or(Errno::STALE)
    }

    /// Looks a name up, for the kernel, which has to forget what it was given.
    pub fn lookup(&self, parent: &Node, name: &OsStr) -> Result<FileAttr, Errno> {
        if name == ".." || name == "." {
            return Err(Errno::NOENT);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = openat(&parent.path, name, flags, Mode::empty())?;
        let stat = fstat(&path)?;
        Ok(attr(self.remember(path, &stat), &stat))
    }

    fn remember(&self, path: OwnedFd, stat: &Stat) -> u64 {
        let key = (stat.st_dev, stat.st_ino);
        if key == self.root.key {
            return ROOT;
        }
        let mut known = lock(&self.known);
        if let Some(inode) = known.by_key.get(&key).copied()
            && let Some((_, count)) = known.by_inode.get_mut(&inode)
        {
            *count += 1;
            return inode;
        }
        let own = key.0 == self.device && (ROOT + 1..FOREIGN).contains(&key.1);
        let inode = if own {
            key.1
        } else {
            known.next += 1;
            FOREIGN + known.next
        };
        known.by_key.insert(key, inode);
        known.by_inode.insert(inode, (Arc::new(Node { inode, path, key }), 1));
        inode
    }

    pub fn forget(&self, inode: INodeNo, times: u64) {
        let mut known = lock(&self.known);
        let Some((node, count)) = known.by_inode.get_mut(&inode.0) else { return };
        *count = count.saturating_sub(times);
        if *count == 0 {
            let key = node.key;
            known.by_inode.remove(&inode.0);
            known.by_key.remove(&key);
        }
    }
}

fn time(seconds: i64, nanos: i64) -> SystemTime {
    let nanos = Duration::from_nanos(nanos as u64);
    match u64::try_from(seconds) {
        Ok(seconds) => UNIX_EPOCH + Duration::from_secs(seconds) + nanos,
        Err(_) => UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()) + nanos,
    }
}

/// A kind of file as FUSE names it.
pub(super) fn kind(kind: rustix::fs::FileType) -> FileType {
    use rustix::fs::FileType as Kind;
    match kind {
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharacterDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn attr(inode: u64, stat: &Stat) -> FileAttr {
    let changed = time(stat.st_ctime, stat.st_ctime_nsec as i64);
    FileAttr {
        ino: INodeNo(inode),
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: time(stat.st_atime, stat.st_atime_nsec as i64),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec as i64),
        ctime: changed,
        crtime: changed,
        kind: kind(rustix::fs::FileType::from_raw_mode(stat.st_mode)),
        perm: (stat.st_mode & 0o7777) as u16,
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        blksize: stat.st_blksize as u32,
        flags: 0,
    }
}

/// What `statat` would have said of something that is nobody's file.
pub(super) fn made_up(inode: u64, kind: FileType, perm: u16, (uid, gid): (u32, u32), size: u64) -> FileAttr {
    let when = SystemTime::now();
    FileAttr {
        ino: INodeNo(inode),
        size,
        blocks: 0,
        atime: when,
        mtime: when,
        ctime: when,
        crtime: when,
        kind,
        perm,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// Flags for a call that follows no link and needs no name.
pub(super) const ITSELF: AtFlags = AtFlags::EMPTY_PATH;
