//! What is done with files of the folder, for the user who asks.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use fuser::{FileAttr, FileHandle, FopenFlags, INodeNo, OpenFlags};
use onehop_target::tree::Tree;
use onehop_target::wire::{ACCESS_LIST, AttrChange, Caller, Make, NO_USER, Name, OpenMode, ROOT, Xattr};
use rustix::fs::{OFlags, fstat};
use rustix::io::Errno;

use super::attr::attr;
use super::callers::process_of;
use super::folders::{FolderEntry, OpenFolder};
use super::threads::CallClass;
use super::{Mounted, io, is_virtual, virt};
use crate::daemon::DaemonShared;
use crate::opens::Open;

/// Set by the kernel alone, when a program is run.
const EXECUTE: OFlags = OFlags::from_bits_retain(0x20);

/// How the daemon opens what a program opens. What the kernel does by itself is left out: it takes care of its own cache. So is
/// `O_APPEND`, which comes with each write: rings write at places of their own.
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
    let why = if name.len() > onehop_target::wire::MOST_NAME { Errno::NAMETOOLONG } else { Errno::INVAL };
    Name::new(name.as_bytes()).ok_or(why)
}

/// A file of the folder; nothing is made or moved in 3fs-virt.
fn real(inode: INodeNo) -> Result<u64, Errno> {
    if is_virtual(inode) { Err(Errno::PERM) } else { Ok(inode.0) }
}

/// Whose turn a question about a file is. What is known of the root is needed on the way to everything, and said soon, whatever a
/// target does.
pub(super) fn waits_for(inode: INodeNo, uid: u32) -> u32 {
    if inode.0 == ROOT { NO_USER } else { uid }
}

/// The same for an access control list. A target may take its time over the root's list of defaults, so who asks for that waits.
pub(super) fn waits_for_list(inode: INodeNo, name: &OsStr, uid: u32) -> u32 {
    if name == ACCESS_LIST { waits_for(inode, uid) } else { uid }
}

/// Whether a program that opens a file so is content to wait for another.
pub(super) fn may_wait(flags: OpenFlags) -> bool {
    !OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::NONBLOCK)
}

/// Which threads open a file so: one that is cut short may have its blocks freed first.
pub(super) fn class_of_open(flags: OpenFlags) -> CallClass {
    if access_of(flags).truncate { CallClass::Disk } else { CallClass::Other }
}

/// What a call acts on that may find a lease in its way, and who asks.
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
    // Who has it open may cut it off, whatever its mode says.
    let open = handle.and_then(|handle| shared.opens.get(handle.0));
    if let (Some(open), Some(size)) = (&open, change.size) {
        open.written_by(by.uid == 0).and_then(|()| open.file().set_len(size)).map_err(|e| io(&e))?;
        change.size = None;
        // What is left would be a change of owner to the same one.
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
) -> Result<u64, Errno> {
    let access = access_of(flags);
    shared.opens.check(by.uid)?;
    let file = tree.open(real(inode)?, access, by)?;
    // It lost its last name, of which the kernel knows nothing, and nobody here has it open: the kernel came by a name that it
    // believes in. It looks the name up again.
    let is_gone = |file: &File| fstat(file).is_ok_and(|stat| stat.st_nlink == 0);
    if file.local().is_some_and(is_gone) && !shared.opens.is_open(inode.0) {
        return Err(Errno::STALE);
    }
    // Who opens a file sees what was written before by who has closed it, wherever that was.
    shared.forget_attributes(inode.0);
    Ok(shared.opens.add(inode.0, by.uid, access, file))
}

/// Whether the kernel caches what goes to and from an open file. What can only be appended goes past its cache: through that, the
/// kernel cuts a write where the first page ends, and what others append elsewhere could come between the parts.
pub(super) fn cached(flags: OpenFlags) -> FopenFlags {
    let flags = OFlags::from_bits_retain(flags.0 as u32);
    let only_appends = flags.contains(OFlags::APPEND) && flags & OFlags::RWMODE == OFlags::WRONLY;
    if only_appends { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() }
}

/// A write, but for its bytes.
pub(super) struct Write {
    pub open: Arc<Open>,
    /// None behind the file's end.
    pub at: Option<u64>,
    pub keeps_set_id: bool,
    /// Whether it is what programs have changed by their mappings.
    pub is_mapped: bool,
}

impl Write {
    pub fn run(&self, data: &[u8]) -> Result<usize, Errno> {
        let file = self.open.file();
        self.open.written_by(self.keeps_set_id).map_err(|error| io(&error))?;
        let done = self.at.map_or_else(|| file.append_bytes(data), |at| file.write_bytes(data, at));
        done.map_err(|error| io(&error))
    }
}

impl Mounted {
    /// A file of the folder; nothing is made or moved in 3fs-virt.
    pub(super) fn real(&self, inode: INodeNo) -> Result<u64, Errno> {
        real(inode)
    }

    pub(super) fn opened(&self, handle: FileHandle) -> Result<Arc<Open>, Errno> {
        self.shared.opens.get(handle.0).ok_or(Errno::BADF)
    }

    pub(super) fn find(&self, by: &Caller, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        // The kernel looks these up for who comes by a handle; what is above the root is nobody's business.
        if name == ".." || name == "." {
            return Err(Errno::NOENT);
        }
        Ok(attr(&self.tree.lookup(parent.0, &named(name)?, by)?))
    }

    /// Opens a folder for a caller, who asks by this thread; gives its handle.
    pub(super) fn open_folder(&self, by: &Caller, inode: INodeNo, thread: u32) -> Result<u64, Errno> {
        let (handle, watcher) =
            (self.shared.opens.handle(), (inode.0 == virt::IOVS).then(|| process_of(thread)));
        let folder = if is_virtual(inode) {
            virt::list(&self.shared, inode.0, by.uid)?;
            OpenFolder::of_ours(inode.0, by.uid, watcher)
        } else {
            OpenFolder::open(&*self.tree, by, inode.0)?
        };
        self.folders.add(handle, folder)?;
        if let Some(pid) = watcher {
            self.shared.table.folder_opened(pid, by.uid);
        }
        Ok(handle)
    }

    /// Gives names of an open folder from a place on, until `add` has enough.
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
            // The kernel has seen that the caller may, or takes it from a file that the caller is changing.
            Xattr::Remove { name } if name == b"security.capability" => {
                self.tree.xattr(self.real(inode)?, ask, &Caller::ROOT)
            }
            _ => self.tree.xattr(self.real(inode)?, ask, by),
        }
    }

    pub(super) fn read_file(&self, handle: FileHandle, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let open = self.opened(handle)?;
        let mut bytes = vec![0; size as usize];
        let count = open.file().read_bytes(&mut bytes, offset).map_err(|e| io(&e))?;
        bytes.truncate(count);
        Ok(bytes)
    }

    pub(super) fn seek(&self, handle: FileHandle, offset: i64, whence: i32) -> Result<i64, Errno> {
        // The kernel counts by itself but for these two.
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
    fn who_cuts_a_file_short_waits_for_a_disk() {
        let class = |flags: OFlags| class_of_open(OpenFlags(flags.bits() as i32));
        assert_eq!(class(OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC), CallClass::Disk);
        assert_eq!(class(OFlags::CREATE | OFlags::WRONLY), CallClass::Other);
    }
}
