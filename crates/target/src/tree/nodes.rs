//! Files of a folder that somebody knows by their numbers.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat, openat2, statx};
use rustix::io::Errno;

use super::{Answer, FOREIGN};
use crate::lock;
use crate::wire::{Attr, FileKind, Key, Name, ROOT};

/// A file that somebody knows.
pub(super) struct Node {
    pub number: u64,
    /// Held without being opened: it survives renames, and no link leads elsewhere.
    pub path: OwnedFd,
    key: (u64, u64),
}

impl Node {
    /// Opens it: files and folders, nothing that could wait for somebody.
    pub fn open(&self, flags: OFlags) -> Answer<File> {
        match file_type(&self.path)? {
            rustix::fs::FileType::RegularFile | rustix::fs::FileType::Directory => {}
            rustix::fs::FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        openat(CWD, self.proc(), flags, Mode::empty()).map(File::from)
    }

    /// A path to it for calls that take nothing else.
    pub fn proc(&self) -> String {
        proc(&self.path)
    }

    pub fn attr(&self) -> Answer<Attr> {
        Ok(attr(self.number, &look(&self.path)?))
    }
}

#[derive(Default)]
struct Known {
    /// A file, and how often it was told.
    by_number: HashMap<u64, (Arc<Node>, u64)>,
    by_key: HashMap<(u64, u64), u64>,
    next: u64,
}

/// All of them.
pub(super) struct Nodes {
    root: Arc<Node>,
    device: u64,
    most: usize,
    known: Mutex<Known>,
}

impl Nodes {
    pub fn new(root: OwnedFd, most: usize) -> Answer<Self> {
        let key = key(&look(&root)?);
        let root = Arc::new(Node { number: ROOT, path: root, key });
        Ok(Self { root, device: key.0, most, known: Mutex::default() })
    }

    pub fn root(&self) -> &Node {
        &self.root
    }

    pub fn get(&self, number: u64) -> Answer<Arc<Node>> {
        if number == ROOT {
            return Ok(self.root.clone());
        }
        lock(&self.known).by_number.get(&number).map(|(node, _)| node.clone()).ok_or(Errno::STALE)
    }

    /// Looks a name up for somebody who has to forget what they were told.
    pub fn lookup(&self, parent: &Node, name: &Name) -> Answer<Attr> {
        self.remember(self.path(parent, name)?)
    }

    /// What has a name, without opening it.
    pub fn path(&self, parent: &Node, name: &Name) -> Answer<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&parent.path, name.bytes(), flags, Mode::empty(), within)
    }

    /// [`Self::lookup`] for a file that is open.
    pub fn remember_open(&self, file: &OwnedFd) -> Answer<Attr> {
        self.remember(openat(CWD, proc(file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
    }

    fn remember(&self, path: OwnedFd) -> Answer<Attr> {
        let stat = look(&path)?;
        Ok(attr(self.number(path, key(&stat))?, &stat))
    }

    fn number(&self, path: OwnedFd, key: (u64, u64)) -> Answer<u64> {
        if key == self.root.key {
            return Ok(ROOT);
        }
        let mut known = lock(&self.known);
        if let Some(number) = known.by_key.get(&key).copied()
            && let Some((_, count)) = known.by_number.get_mut(&number)
        {
            *count += 1;
            return Ok(number);
        }
        if known.by_number.len() >= self.most {
            return Err(Errno::NFILE);
        }
        let own = key.0 == self.device && (ROOT + 1..FOREIGN).contains(&key.1);
        let number = if own {
            key.1
        } else {
            known.next += 1;
            FOREIGN + known.next
        };
        known.by_key.insert(key, number);
        known.by_number.insert(number, (Arc::new(Node { number, path, key }), 1));
        Ok(number)
    }

    pub fn forget(&self, number: u64, times: u64) {
        let mut known = lock(&self.known);
        let Some((node, count)) = known.by_number.get_mut(&number) else { return };
        *count = count.saturating_sub(times);
        if *count == 0 {
            let key = node.key;
            known.by_number.remove(&number);
            known.by_key.remove(&key);
        }
    }
}

/// A path to what is open.
fn proc(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// What kind of file is open, as a path at least.
pub(super) fn file_type(file: &OwnedFd) -> Answer<rustix::fs::FileType> {
    Ok(rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode))
}

fn look(path: &OwnedFd) -> Answer<Statx> {
    statx(path, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

fn key(stat: &Statx) -> (u64, u64) {
    (rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino)
}

/// A kind of file as it is told.
pub(super) fn kind(kind: rustix::fs::FileType) -> FileKind {
    use rustix::fs::FileType as Type;
    match kind {
        Type::Directory => FileKind::Folder,
        Type::Symlink => FileKind::Link,
        Type::Fifo => FileKind::Pipe,
        Type::Socket => FileKind::Socket,
        Type::CharacterDevice => FileKind::Char,
        Type::BlockDevice => FileKind::Block,
        _ => FileKind::Regular,
    }
}

fn attr(node: u64, stat: &Statx) -> Attr {
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
    let born = (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(stat.stx_btime));
    let (device, inode) = key(stat);
    Attr {
        node,
        key: Key { device, inode, born },
        kind: kind(rustix::fs::FileType::from_raw_mode(stat.stx_mode.into())),
        perm: stat.stx_mode & 0o7777,
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        block_size: stat.stx_blksize,
        times: [time(stat.stx_atime), time(stat.stx_mtime), time(stat.stx_ctime)],
    }
}

/// Flags for a call that follows no link and needs no name.
pub(super) const ITSELF: AtFlags = AtFlags::EMPTY_PATH;
