//! What is done with files of the folder, for the user who asks.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use fuser::{FileAttr, FileHandle, FileType, INodeNo, OpenFlags, TimeOrNow};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, SeekFrom, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat, chownat,
    fstat, linkat, mkdirat, mknodat, openat, symlinkat, utimensat,
};
use rustix::io::Errno;

use super::nodes::{ITSELF, Node};
use super::{Mounted, io, is_virtual, virt};
use crate::opens::Open;
use crate::table::Owner;

/// What is to become of a file's attributes.
pub(super) struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<TimeOrNow>,
    pub mtime: Option<TimeOrNow>,
}

/// Flags with which the daemon opens what a program opens. What the kernel does by itself is left out: it has the place
/// of an append, and takes care of its own cache.
fn flags_of(flags: OpenFlags) -> OFlags {
    let given = OFlags::from_bits_retain(flags.0 as u32);
    given & (OFlags::RWMODE | OFlags::TRUNC | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME)
}

fn access_of(flags: OpenFlags) -> (bool, bool) {
    let mode = OFlags::from_bits_retain(flags.0 as u32) & OFlags::RWMODE;
    (mode != OFlags::WRONLY, mode != OFlags::RDONLY)
}

impl Mounted {
    /// A file of the folder; nothing is made or moved in 3fs-virt.
    pub(super) fn real(&self, inode: INodeNo) -> Result<Arc<Node>, Errno> {
        if is_virtual(inode) { Err(Errno::PERM) } else { self.nodes.get(inode) }
    }

    pub(super) fn opened(&self, handle: FileHandle) -> Result<Arc<Open>, Errno> {
        self.shared.opens.get(handle.0).ok_or(Errno::BADF)
    }

    pub(super) fn list(&self, inode: INodeNo) -> Result<Vec<(u64, FileType, std::ffi::OsString)>, Errno> {
        if is_virtual(inode) {
            let names = virt::list(&self.shared, inode.0)?;
            return Ok(names.into_iter().map(|(inode, kind, name)| (inode, kind, name.into())).collect());
        }
        let folder = self.nodes.get(inode)?.open(OFlags::DIRECTORY)?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(folder)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
            names.push((entry.ino().max(1), super::nodes::kind(entry.file_type()), name));
        }
        Ok(names)
    }

    pub(super) fn change(
        &self,
        inode: INodeNo,
        handle: Option<FileHandle>,
        change: &Change,
    ) -> Result<FileAttr, Errno> {
        let node = self.real(inode)?;
        if let Some(mode) = change.mode {
            chmodat(CWD, node.proc(), Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())?;
        }
        if change.uid.is_some() || change.gid.is_some() {
            chownat(&node.path, "", change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw), ITSELF)?;
        }
        if let Some(size) = change.size {
            match handle.and_then(|handle| self.opened(handle).ok()) {
                Some(open) => rustix::fs::ftruncate(open.local().file(), size)?,
                None => rustix::fs::ftruncate(node.open(OFlags::WRONLY)?, size)?,
            }
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

    /// Looks up what was just made, as its maker's. What follows from the folder's own bits has been done.
    fn given_to(
        &self,
        owner: Owner,
        parent: &Node,
        name: &OsStr,
        mode: Option<u32>,
    ) -> Result<FileAttr, Errno> {
        let inherits = fstat(&parent.path)?.st_mode & 0o2000 != 0;
        let group = (!inherits).then(|| Gid::from_raw(owner.gid));
        chownat(&parent.path, name, Some(Uid::from_raw(owner.uid)), group, AtFlags::SYMLINK_NOFOLLOW)?;
        let attr = self.nodes.lookup(parent, name)?;
        if let Some(mode) = mode {
            let node = self.nodes.get(attr.ino)?;
            let kept = u32::from(attr.perm) & 0o2000;
            let set = chmodat(CWD, node.proc(), Mode::from_raw_mode(mode & 0o7777 | kept), AtFlags::empty());
            return set.and_then(|()| node.attr()).inspect_err(|_| self.nodes.forget(attr.ino, 1));
        }
        Ok(attr)
    }

    pub(super) fn make_node(
        &self,
        owner: Owner,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        rdev: u32,
    ) -> Result<FileAttr, Errno> {
        let parent = self.real(parent)?;
        let kind = rustix::fs::FileType::from_raw_mode(mode);
        mknodat(&parent.path, name, kind, Mode::from_raw_mode(mode & 0o7777), rdev.into())?;
        self.given_to(owner, &parent, name, Some(mode))
    }

    pub(super) fn make_folder(
        &self,
        owner: Owner,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
    ) -> Result<FileAttr, Errno> {
        let parent = self.real(parent)?;
        mkdirat(&parent.path, name, Mode::from_raw_mode(mode & 0o7777))?;
        self.given_to(owner, &parent, name, Some(mode))
    }

    pub(super) fn make_link(
        &self,
        owner: Owner,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
    ) -> Result<FileAttr, Errno> {
        let parent = self.real(parent)?;
        symlinkat(target, &parent.path, name)?;
        self.given_to(owner, &parent, name, None)
    }

    pub(super) fn make_file(
        &self,
        owner: Owner,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(FileAttr, u64), Errno> {
        let parent = self.real(parent)?;
        let wish = flags_of(flags) | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::from_raw_mode(mode & 0o7777);
        // The kernel asks for this when it knows of no such file; somebody else may have made it meanwhile.
        match openat(&parent.path, name, wish | OFlags::EXCL, mode) {
            Ok(file) => {
                let attr = self.given_to(owner, &parent, name, Some(mode.as_raw_mode()))?;
                Ok((attr, self.shared.opens.add(attr.ino.0, owner.uid, access_of(flags), file.into())))
            }
            Err(Errno::EXIST) if !OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::EXCL) => {
                let attr = self.nodes.lookup(&parent, name)?;
                let opened = self.open_file(owner.uid, attr.ino, flags);
                opened.map(|handle| (attr, handle)).inspect_err(|_| self.nodes.forget(attr.ino, 1))
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn link_again(
        &self,
        inode: INodeNo,
        parent: INodeNo,
        name: &OsStr,
    ) -> Result<FileAttr, Errno> {
        let (node, parent) = (self.real(inode)?, self.real(parent)?);
        linkat(CWD, node.proc(), &parent.path, name, AtFlags::SYMLINK_FOLLOW)?;
        self.nodes.lookup(&parent, name)
    }

    pub(super) fn open_file(&self, uid: u32, inode: INodeNo, flags: OpenFlags) -> Result<u64, Errno> {
        let file = self.real(inode)?.open(flags_of(flags))?;
        Ok(self.shared.opens.add(inode.0, uid, access_of(flags), file))
    }

    pub(super) fn read_file(&self, handle: FileHandle, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        use std::os::unix::fs::FileExt;
        let open = self.opened(handle)?;
        let mut bytes = vec![0; size as usize];
        let mut done = 0;
        while done < bytes.len() {
            match open.local().file().read_at(&mut bytes[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(io(&error)),
            }
        }
        bytes.truncate(done);
        Ok(bytes)
    }

    pub(super) fn seek(&self, handle: FileHandle, offset: i64, whence: i32) -> Result<i64, Errno> {
        // The kernel counts by itself but for these two.
        const DATA: i32 = 3;
        const HOLE: i32 = 4;
        let from = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
        let to = match whence {
            DATA => SeekFrom::Data(from),
            HOLE => SeekFrom::Hole(from),
            _ => return Err(Errno::INVAL),
        };
        let at = rustix::fs::seek(self.opened(handle)?.local().file(), to)?;
        i64::try_from(at).map_err(|_| Errno::OVERFLOW)
    }
}

fn timestamp(time: Option<TimeOrNow>) -> rustix::fs::Timespec {
    let special = |nanos| rustix::fs::Timespec { tv_sec: 0, tv_nsec: nanos };
    match time {
        None => special(UTIME_OMIT),
        Some(TimeOrNow::Now) => special(UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(UNIX_EPOCH) {
            Ok(since) => {
                rustix::fs::Timespec { tv_sec: since.as_secs() as i64, tv_nsec: since.subsec_nanos().into() }
            }
            Err(before) => rustix::fs::Timespec {
                tv_sec: -(before.duration().as_secs_f64().ceil() as i64),
                tv_nsec: ((1_000_000_000 - before.duration().subsec_nanos()) % 1_000_000_000).into(),
            },
        },
    }
}
