//! A folder of this machine.
//!
//! What is below it is reached one name at a time from descriptors that are held: no path, no link and no `..` leads out of it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat, chownat,
    linkat, mkdirat, mknodat, openat, renameat_with, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

use super::local::Local;
use super::nodes::{ITSELF, Node, Nodes, kind};
use super::{Answer, Names, OpenFile, Tree};
use crate::wire::{Access, Attr, Change, FsSpace, MOST_BODY, Make, Name, Owner, TimeChange};

/// Bytes of names that are told at once, so that they fit a body whatever else stands there.
const NAMES: usize = MOST_BODY - 8192;
/// The bits by which a program runs as somebody else.
const PRIVILEGES: u32 = 0o6000;

/// What may be done with a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Whether it is served to other machines: then nothing is made that gives rights on this one, which are devices and files that
    /// run as their owner; and what is made belongs to the server's user where the server is not root.
    pub for_others: bool,
    /// Files that are known at once.
    pub most_nodes: usize,
}

/// A folder that is served.
pub struct Folder {
    nodes: Nodes,
    rules: Rules,
    is_root: bool,
}

/// Flags with which a file is opened.
fn flags_of(access: Access) -> OFlags {
    let mut flags = match (access.read, access.write) {
        (true, true) => OFlags::RDWR,
        (false, true) => OFlags::WRONLY,
        _ => OFlags::RDONLY,
    };
    flags.set(OFlags::TRUNC, access.truncate);
    flags.set(OFlags::SYNC, access.sync);
    flags.set(OFlags::DSYNC, access.data_sync);
    flags.set(OFlags::NOATIME, access.no_atime);
    flags
}

fn timestamp(time: Option<TimeChange>) -> rustix::fs::Timespec {
    let (tv_sec, tv_nsec) = match time {
        None => (0, UTIME_OMIT),
        Some(TimeChange::Now) => (0, UTIME_NOW),
        Some(TimeChange::To((seconds, nanos))) => (seconds, i64::from(nanos.min(999_999_999))),
    };
    rustix::fs::Timespec { tv_sec, tv_nsec }
}

impl Folder {
    /// Serves a folder that is open, as a path at least.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn new(root: OwnedFd, rules: Rules) -> Answer<Self> {
        let is_root = rustix::process::geteuid().is_root();
        Ok(Self { nodes: Nodes::new(root, rules.most_nodes)?, rules, is_root })
    }

    fn mode(&self, mode: u32, folder: bool) -> u32 {
        // On a folder, one of the two says only to which group new files belong.
        let kept = if folder { 0o3777 } else { 0o7777 & !PRIVILEGES };
        mode & if self.rules.for_others { kept } else { 0o7777 }
    }

    /// Looks up what was just made, as its maker's. What follows from the folder's own bits has been done.
    fn given_to(&self, owner: Owner, parent: &Node, name: &Name, mode: Option<u32>) -> Answer<Attr> {
        if self.is_root || !self.rules.for_others {
            let inherits = rustix::fs::fstat(&parent.path)?.st_mode & 0o2000 != 0;
            let group = (!inherits).then(|| Gid::from_raw(owner.gid));
            let user = Some(Uid::from_raw(owner.uid));
            chownat(&parent.path, name.bytes(), user, group, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        let attr = self.nodes.lookup(parent, name)?;
        let Some(mode) = mode else { return Ok(attr) };
        let node = self.nodes.get(attr.node)?;
        let kept = u32::from(attr.perm) & 0o2000;
        let mode = self.mode(mode, attr.kind == crate::wire::FileKind::Folder);
        let set = chmodat(CWD, node.proc(), Mode::from_raw_mode(mode | kept), AtFlags::empty());
        set.and_then(|()| node.attr()).inspect_err(|_| self.nodes.forget(attr.node, 1))
    }

    /// [`Tree::open`], for who wants to know which file of this machine it is.
    ///
    /// # Errors
    /// When it is neither file nor folder, or the system refuses.
    pub fn open_local(&self, node: u64, access: Access) -> Answer<Local> {
        Ok(Local::new(self.nodes.get(node)?.open(flags_of(access))?))
    }

    /// [`Tree::create`], likewise.
    ///
    /// # Errors
    /// As for that.
    pub fn create_local(
        &self,
        parent: u64,
        name: &Name,
        mode: u32,
        access: Access,
        exclusive: bool,
        owner: Owner,
    ) -> Answer<(Attr, Local)> {
        let parent = self.nodes.get(parent)?;
        let wish = flags_of(access) | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // Nobody else opens it before it has its maker's mode.
        match openat(&parent.path, name.bytes(), wish, Mode::from_raw_mode(mode & 0o777)) {
            Ok(file) => Ok((self.given_to(owner, &parent, name, Some(mode))?, Local::new(file.into()))),
            Err(Errno::EXIST) if !exclusive => {
                let attr = self.nodes.lookup(&parent, name)?;
                let opened = self.open_local(attr.node, access);
                opened.map(|file| (attr.clone(), file)).inspect_err(|_| self.nodes.forget(attr.node, 1))
            }
            Err(error) => Err(error),
        }
    }

    fn set(&self, node: u64, change: &Change) -> Answer<Attr> {
        let node = self.nodes.get(node)?;
        // A change of owner takes privileges away, so the mode comes after it.
        if change.uid.is_some() || change.gid.is_some() {
            chownat(&node.path, "", change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw), ITSELF)?;
        }
        if let Some(mode) = change.mode {
            let folder = node.attr()?.kind == crate::wire::FileKind::Folder;
            let mode = Mode::from_raw_mode(self.mode(mode, folder));
            chmodat(CWD, node.proc(), mode, AtFlags::empty())?;
        }
        if let Some(size) = change.size {
            rustix::fs::ftruncate(node.open(OFlags::WRONLY)?, size)?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let times = Timestamps {
                last_access: timestamp(change.atime),
                last_modification: timestamp(change.mtime),
            };
            utimensat(CWD, node.proc(), &times, AtFlags::empty())?;
        }
        node.attr()
    }
}

impl Tree for Folder {
    fn lookup(&self, parent: u64, name: &Name) -> Answer<Attr> {
        self.nodes.lookup(&*self.nodes.get(parent)?, name)
    }

    fn forget(&self, node: u64, times: u64) {
        self.nodes.forget(node, times);
    }

    fn attr(&self, node: u64) -> Answer<Attr> {
        self.nodes.get(node)?.attr()
    }

    fn change(&self, node: u64, change: &Change) -> Answer<Attr> {
        self.set(node, change)
    }

    fn read_link(&self, node: u64) -> Answer<Vec<u8>> {
        let node = self.nodes.get(node)?;
        Ok(rustix::fs::readlinkat(&node.path, "", Vec::new())?.into_bytes())
    }

    fn make(&self, parent: u64, name: &Name, make: &Make, owner: Owner) -> Answer<Attr> {
        let parent = self.nodes.get(parent)?;
        let (at, bytes) = (&parent.path, name.bytes());
        let made = match make {
            Make::Folder { mode } => {
                mkdirat(at, bytes, Mode::from_raw_mode(mode & 0o777))?;
                Some(*mode)
            }
            Make::Node { mode, rdev } => {
                let kind = FileType::from_raw_mode(*mode);
                let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
                if self.rules.for_others && is_device {
                    return Err(Errno::PERM);
                }
                mknodat(at, bytes, kind, Mode::from_raw_mode(mode & 0o777), (*rdev).into())?;
                Some(*mode)
            }
            Make::Link { text } => {
                symlinkat(text.as_slice(), at, bytes)?;
                None
            }
        };
        self.given_to(owner, &parent, name, made)
    }

    fn create(
        &self,
        parent: u64,
        name: &Name,
        mode: u32,
        access: Access,
        exclusive: bool,
        owner: Owner,
    ) -> Answer<(Attr, Arc<dyn OpenFile>)> {
        let (attr, file) = self.create_local(parent, name, mode, access, exclusive, owner)?;
        Ok((attr, Arc::new(file)))
    }

    fn remove(&self, parent: u64, name: &Name, folder: bool) -> Answer<()> {
        let flags = if folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        unlinkat(&self.nodes.get(parent)?.path, name.bytes(), flags)
    }

    fn rename(&self, from: (u64, &Name), to: (u64, &Name), flags: u32) -> Answer<()> {
        let flags = rustix::fs::RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (source, folder) = (self.nodes.get(from.0)?, self.nodes.get(to.0)?);
        renameat_with(&source.path, from.1.bytes(), &folder.path, to.1.bytes(), flags)
    }

    fn link(&self, node: u64, parent: u64, name: &Name) -> Answer<Attr> {
        let (node, parent) = (self.nodes.get(node)?, self.nodes.get(parent)?);
        linkat(CWD, node.proc(), &parent.path, name.bytes(), AtFlags::SYMLINK_FOLLOW)?;
        self.nodes.lookup(&parent, name)
    }

    fn list(&self, node: u64, from: u64) -> Answer<Names> {
        let mut folder = Dir::new(self.nodes.get(node)?.open(OFlags::DIRECTORY)?)?;
        if from != 0 {
            folder.seek(i64::try_from(from).map_err(|_| Errno::INVAL)?)?;
        }
        let (mut names, mut room, mut last) = (Vec::new(), NAMES, from);
        while let Some(entry) = folder.read() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            // What stands beside a name takes 16 bytes at most.
            let takes = name.len() + 16;
            if takes > room {
                return Ok(Names { names, next: Some(last) });
            }
            room -= takes;
            last = entry.offset() as u64;
            names.push((entry.ino().max(1), kind(entry.file_type()), name.to_vec()));
        }
        Ok(Names { names, next: None })
    }

    fn sync_folder(&self, node: u64) -> Answer<()> {
        rustix::fs::fsync(self.nodes.get(node)?.open(OFlags::DIRECTORY)?)
    }

    fn space(&self) -> Answer<FsSpace> {
        let fs = rustix::fs::fstatvfs(&self.nodes.root().path)?;
        Ok(FsSpace {
            blocks: [fs.f_blocks, fs.f_bfree, fs.f_bavail],
            files: [fs.f_files, fs.f_ffree],
            block_size: [fs.f_bsize as u32, fs.f_frsize as u32],
            name_max: fs.f_namemax as u32,
        })
    }

    fn open(&self, node: u64, access: Access) -> Answer<Arc<dyn OpenFile>> {
        Ok(Arc::new(self.open_local(node, access)?))
    }
}
