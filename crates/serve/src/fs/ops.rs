//! File operations, on behalf of a user.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use fuser::{FileAttr, FileHandle, FopenFlags, INodeNo, OpenFlags};
use onehop_target::tree::Tree;
use onehop_target::wire::{ACCESS_LIST, AttrChange, Caller, Make, NO_USER, Name, OpenMode, ROOT, Xattr};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::attr::attr;
use super::callers::process_of;
use super::folders::{FolderEntry, OpenFolder};
use super::threads::CallClass;
use super::{Mounted, io, is_virtual, virt};
use crate::daemon::DaemonShared;
use crate::opens::Open;

/// Only the kernel sets this, when it executes a program (`FMODE_EXEC`).
const EXECUTE: OFlags = OFlags::from_bits_retain(0x20);

/// How the daemon opens a file that a program opens. Flags that the kernel handles itself are left out. So is
/// `O_APPEND`, which comes with each write, because rings write at offsets of their own.
fn access_of(flags: OpenFlags) -> OpenMode {
    let flags = OFlags::from_bits_retain(flags.0 as u32);
    let mode = flags & OFlags::RWMODE;
    OpenMode {
        read: mode != OFlags::WRONLY,
        write: mode != OFlags::RDONLY,
        truncate: flags.contains(OFlags::TRUNC),
        sync: flags.contains(OFlags::SYNC),
        data_sync: flags.contains(OFlags::DSYNC),
        no_atime: flags.contains(OFlags::NOATIME),
        execute: flags.contains(EXECUTE),
    }
}

pub(super) fn named(name: &OsStr) -> Result<Name, Errno> {
    let why = if name.len() > onehop_target::wire::MAX_NAME { Errno::NAMETOOLONG } else { Errno::INVAL };
    Name::new(name.as_bytes()).ok_or(why)
}

/// The inode of a file in the served folder. Nothing is created or moved in 3fs-virt.
fn real(inode: INodeNo) -> Result<u64, Errno> {
    if is_virtual(inode) { Err(Errno::PERM) } else { Ok(inode.0) }
}

/// Whose turn a question about a file takes. The root's attributes are needed for every path and always answered soon,
/// so they count for nobody.
pub(super) fn waits_for(inode: INodeNo, uid: u32) -> u32 {
    if inode.0 == ROOT { NO_USER } else { uid }
}

/// The same for an access control list. The root's default ACL may take a target long, so it counts for the user who
/// asks.
pub(super) fn waits_for_list(inode: INodeNo, name: &OsStr, uid: u32) -> u32 {
    if name == ACCESS_LIST { waits_for(inode, uid) } else { uid }
}

/// Whether an `open` with these flags may block.
pub(super) fn may_wait(flags: OpenFlags) -> bool {
    !OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::NONBLOCK)
}

/// Which threads open a file: truncating may have to free blocks first.
pub(super) fn class_of_open(flags: OpenFlags) -> CallClass {
    if access_of(flags).truncate { CallClass::Disk } else { CallClass::Other }
}

/// An attempt at a call that a lease may block.
pub(super) struct LeaseAttempt<'a> {
    pub shared: &'a DaemonShared,
    pub tree: &'a dyn Tree,
    pub by: &'a Caller,
}

pub(super) fn change(
    LeaseAttempt { shared, tree, by }: LeaseAttempt<'_>,
    inode: INodeNo,
    handle: Option<FileHandle>,
    mut change: AttrChange,
) -> Result<FileAttr, Errno> {
    let node = real(inode)?;
    // A file that is open for writing may be truncated even if its mode has changed since.
    let open = handle.and_then(|handle| shared.opens.get(handle.0));
    if let (Some(open), Some(size)) = (&open, change.size) {
        open.written_by(by.uid == 0).and_then(|()| open.file().set_len(size)).map_err(|e| io(&e))?;
        change.size = None;
        // Nothing is left but a change to the same owner.
        if change == AttrChange::default() {
            return Ok(attr(&tree.attr(node, by.uid)?));
        }
    }
    Ok(attr(&tree.change(node, &change, by)?))
}

pub(super) fn make_file(
    LeaseAttempt { shared, tree, by }: LeaseAttempt<'_>,
    parent: INodeNo,
    name: &OsStr,
    mode: u32,
    flags: OpenFlags,
) -> Result<(FileAttr, u64), Errno> {
    let (parent, name, access) = (real(parent)?, named(name)?, access_of(flags));
    let exclusive = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::EXCL);
    shared.opens.check(by.uid)?;
    let (made, file) = tree.create(parent, &name, mode, access, exclusive, by)?;
    let handle = shared.opens.add(made.node, by.uid, access, file);
    Ok((attr(&made), handle))
}

pub(super) fn open_file(
    LeaseAttempt { shared, tree, by }: LeaseAttempt<'_>,
    inode: INodeNo,
    flags: OpenFlags,
    thread: u32,
) -> Result<u64, Errno> {
    let access = access_of(flags);
    shared.opens.check(by.uid)?;
    let file = tree.open(real(inode)?, access, by)?;
    if !file.has_name() && !shared.nameless.admit(inode.0, thread) {
        return Err(Errno::STALE);
    }
    shared.nameless.over(thread);
    // Close-to-open consistency: an `open` sees what was written before the last `close`, on any mount.
    shared.forget_attributes(inode.0);
    Ok(shared.opens.add(inode.0, by.uid, access, file))
}

/// Whether the kernel caches the data of an open file. Append-only files bypass its cache: the kernel would split a
/// write at the first page boundary, and appends from elsewhere could come in between.
pub(super) fn cached(flags: OpenFlags) -> FopenFlags {
    let flags = OFlags::from_bits_retain(flags.0 as u32);
    let only_appends = flags.contains(OFlags::APPEND) && flags & OFlags::RWMODE == OFlags::WRONLY;
    if only_appends { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() }
}

/// A write without its data.
pub(super) struct Write {
    pub open: Arc<Open>,
    /// The offset; `None` to append.
    pub at: Option<u64>,
    pub keeps_set_id: bool,
    /// Whether it writes back dirty pages of a mapping.
    pub is_mapped: bool,
}

impl Write {
    pub fn run(&self, data: &[u8]) -> Result<usize, Errno> {
        let file = self.open.file();
        self.open.note_cached();
        self.open.written_by(self.keeps_set_id).map_err(|error| io(&error))?;
        let done = self.at.map_or_else(|| file.append_bytes(data), |at| file.write_bytes(data, at));
        done.map_err(|error| io(&error))
    }
}

impl Mounted {
    /// The inode of a file in the served folder.
    pub(super) fn real(&self, inode: INodeNo) -> Result<u64, Errno> {
        real(inode)
    }

    pub(super) fn opened(&self, handle: FileHandle) -> Result<Arc<Open>, Errno> {
        self.shared.opens.get(handle.0).ok_or(Errno::BADF)
    }

    pub(super) fn find(&self, by: &Caller, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        // The kernel looks these up for callers that come by a file handle. Nothing above the root is visible.
        if name == ".." || name == "." {
            return Err(Errno::NOENT);
        }
        Ok(attr(&self.tree.lookup(parent.0, &named(name)?, by)?))
    }

    /// Opens a folder for a caller's thread. Returns its handle.
    pub(super) fn open_folder(&self, by: &Caller, inode: INodeNo, thread: u32) -> Result<u64, Errno> {
        let (handle, watcher) =
            (self.shared.opens.handle(), (inode.0 == virt::IOVS).then(|| process_of(thread)));
        let folder = if is_virtual(inode) {
            virt::list(&self.shared, inode.0, by.uid)?;
            OpenFolder::of_virtual(inode.0, by.uid, watcher)
        } else {
            OpenFolder::open(&*self.tree, by, inode.0)?
        };
        self.folders.add(handle, folder)?;
        if let Some(pid) = watcher {
            self.shared.table.folder_opened(pid, by.uid);
        }
        Ok(handle)
    }

    /// Calls `add` for the names of an open folder from an offset on, until it returns true.
    pub(super) fn read_folder(
        &self,
        inode: INodeNo,
        handle: FileHandle,
        from: u64,
        mut add: impl FnMut(&FolderEntry) -> bool,
    ) -> Result<(), Errno> {
        let folder = self.folders.get(handle.0).ok_or(Errno::BADF)?;
        if !is_virtual(inode) {
            return folder.read(&*self.tree, from, self.folders.keep_many(folder.uid), add);
        }
        let names = virt::list(&self.shared, inode.0, folder.uid)?;
        let _ = names.iter().filter(|entry| entry.next > from).find(|entry| add(entry));
        Ok(())
    }

    pub(super) fn make(
        &self,
        by: &Caller,
        parent: INodeNo,
        name: &OsStr,
        make: &Make,
    ) -> Result<FileAttr, Errno> {
        Ok(attr(&self.tree.make(self.real(parent)?, &named(name)?, make, by)?))
    }

    pub(super) fn make_link(
        &self,
        by: &Caller,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
    ) -> Result<FileAttr, Errno> {
        let text = target.as_os_str().as_bytes().to_vec();
        self.make(by, parent, name, &Make::Link { text })
    }

    pub(super) fn remove(
        &self,
        by: &Caller,
        parent: INodeNo,
        name: &OsStr,
        folder: bool,
    ) -> Result<(), Errno> {
        self.tree.remove(self.real(parent)?, &named(name)?, folder, by)
    }

    pub(super) fn rename(
        &self,
        by: &Caller,
        (parent, name): (INodeNo, &OsStr),
        (to, new_name): (INodeNo, &OsStr),
        flags: u32,
    ) -> Result<(), Errno> {
        let (from, to) = (self.real(parent)?, self.real(to)?);
        self.tree.rename((from, &named(name)?), (to, &named(new_name)?), flags, by)
    }

    pub(super) fn link_again(
        &self,
        by: &Caller,
        inode: INodeNo,
        parent: INodeNo,
        name: &OsStr,
    ) -> Result<FileAttr, Errno> {
        Ok(attr(&self.tree.link(self.real(inode)?, self.real(parent)?, &named(name)?, by)?))
    }

    pub(super) fn xattr(&self, by: &Caller, inode: INodeNo, ask: &Xattr) -> Result<Vec<u8>, Errno> {
        match ask {
            Xattr::Get { .. } if is_virtual(inode) => Err(Errno::NODATA),
            Xattr::List if is_virtual(inode) => Ok(Vec::new()),
            // The kernel has checked the permission, or removes it because the caller writes to the file.
            Xattr::Remove { name } if name == b"security.capability" => {
                self.tree.xattr(self.real(inode)?, ask, &Caller::ROOT)
            }
            _ => self.tree.xattr(self.real(inode)?, ask, by),
        }
    }

    pub(super) fn read_file(&self, handle: FileHandle, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let open = self.opened(handle)?;
        let mut bytes = vec![0; size as usize];
        open.note_cached();
        let count = open.file().read_bytes(&mut bytes, offset).map_err(|e| io(&e))?;
        bytes.truncate(count);
        Ok(bytes)
    }

    pub(super) fn seek(&self, handle: FileHandle, offset: i64, whence: i32) -> Result<i64, Errno> {
        // The kernel handles all other values itself.
        const DATA: i32 = 3;
        const HOLE: i32 = 4;
        let from = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
        let hole = match whence {
            DATA => false,
            HOLE => true,
            _ => return Err(Errno::INVAL),
        };
        let at = self.opened(handle)?.file().seek(from, hole).map_err(|e| io(&e))?;
        i64::try_from(at).map_err(|_| Errno::OVERFLOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncating_opens_use_disk_threads() {
        let class = |flags: OFlags| class_of_open(OpenFlags(flags.bits() as i32));
        assert_eq!(class(OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC), CallClass::Disk);
        assert_eq!(class(OFlags::CREATE | OFlags::WRONLY), CallClass::Other);
    }
}
