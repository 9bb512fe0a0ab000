//! `3fs-virt`: the virtual folder in which programs create their links and find the daemon's.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::{FileAttr, FileType};
use onehop_os::hf3fs::{MAKE_LINK, REMOVE_LINK};
use onehop_usrbio::ring::RingServer;
use onehop_usrbio::{Name, Priority};
use rustix::io::Errno;

use super::attr::{VIRTUAL, pseudo_attr};
use super::folders::FolderEntry;
use super::ioctl::link_texts;
use crate::daemon::DaemonShared;
use crate::shm::map_shared;
use crate::table::{LinkContent, LinkedBuffer, Owner, is_too_long};
use crate::workers::ServedRing;

const TOP: u64 = VIRTUAL + 1;
pub(crate) const IOVS: u64 = VIRTUAL + 2;
const OURS: u64 = VIRTUAL + 3;
pub(super) const STATS: u64 = VIRTUAL + 4;
const SOCKET: u64 = VIRTUAL + 5;
const SEMAPHORES: u64 = VIRTUAL + 8;
const BUFFERS: u64 = VIRTUAL + (1 << 32);

fn folder(inode: u64, perm: u16) -> FileAttr {
    pseudo_attr(inode, FileType::Directory, perm, (0, 0), 0)
}

fn link(inode: u64, owner: (u32, u32), target: usize) -> FileAttr {
    pseudo_attr(inode, FileType::Symlink, 0o777, owner, target as u64)
}

fn buffer_attr(buffer: &LinkedBuffer) -> FileAttr {
    let owner = (buffer.owner.uid, buffer.owner.gid);
    let attr = link(BUFFERS + buffer.inode, owner, buffer.target.as_os_str().len());
    FileAttr { atime: buffer.made, mtime: buffer.made, ctime: buffer.made, ..attr }
}

fn fixed(inode: u64) -> Option<FileAttr> {
    match inode {
        TOP | OURS => Some(folder(inode, 0o755)),
        // Everybody may create links here, and remove their own.
        IOVS => Some(folder(inode, 0o1777)),
        STATS => Some(pseudo_attr(inode, FileType::RegularFile, 0o444, (0, 0), 0)),
        SOCKET => Some(link(inode, (0, 0), 64)),
        _ if (SEMAPHORES..SEMAPHORES + 3).contains(&inode) => Some(link(inode, (0, 0), 64)),
        _ => None,
    }
}

/// Whether it is one of the daemon's own entries, which never change.
pub(super) fn is_fixed(inode: u64) -> bool {
    fixed(inode).is_some()
}

/// The entry `3fs-virt` in the root of the mount.
pub(super) fn top(name: &OsStr) -> Option<FileAttr> {
    (name == "3fs-virt").then(|| folder(TOP, 0o755))
}

pub(super) fn attr(shared: &DaemonShared, inode: u64) -> Result<FileAttr, Errno> {
    if let Some(attr) = fixed(inode) {
        return Ok(attr);
    }
    let buffer = inode.checked_sub(BUFFERS).and_then(|serial| shared.table.inode(serial));
    buffer.map(|buffer| buffer_attr(&buffer)).ok_or(Errno::NOENT)
}

/// Looks a name up. Users do not see the links of others.
pub(crate) fn lookup(shared: &DaemonShared, parent: u64, name: &OsStr, uid: u32) -> Result<FileAttr, Errno> {
    let name = name.to_str().ok_or(Errno::NOENT)?;
    let known = match (parent, name) {
        (TOP, "iovs") => Some(IOVS),
        (TOP, "onehop") => Some(OURS),
        (OURS, "stats") => Some(STATS),
        (OURS, "socket") => Some(SOCKET),
        (IOVS, _) => {
            let place = Priority::ALL.iter().position(|priority| priority.link() == name);
            place.map(|place| SEMAPHORES + place as u64)
        }
        _ => None,
    };
    if let Some(attr) = known.and_then(fixed) {
        return Ok(attr);
    }
    let buffer = if parent == IOVS { shared.table.link(name) } else { None };
    let buffer = buffer.filter(|buffer| buffer.is_seen_by(uid));
    buffer.map(|buffer| buffer_attr(&buffer)).ok_or(Errno::NOENT)
}

/// The names in a virtual folder that a user sees. Their offsets stay the same while others are added and removed.
pub(super) fn list(shared: &DaemonShared, inode: u64, uid: u32) -> Result<Vec<FolderEntry>, Errno> {
    let at = |inode, kind, name: &str, next| FolderEntry { inode, kind, next, name: name.into() };
    let entry = |inode, kind, name: &str| at(inode, kind, name, inode - VIRTUAL + 2);
    let mut names = match inode {
        TOP => vec![entry(IOVS, FileType::Directory, "iovs"), entry(OURS, FileType::Directory, "onehop")],
        OURS => {
            vec![entry(STATS, FileType::RegularFile, "stats"), entry(SOCKET, FileType::Symlink, "socket")]
        }
        IOVS => (SEMAPHORES..)
            .zip(Priority::ALL)
            .map(|(inode, priority)| entry(inode, FileType::Symlink, priority.link()))
            .collect(),
        _ => return Err(Errno::NOTDIR),
    };
    if inode == IOVS {
        let all = shared.table.all();
        let seen = all.iter().filter(|buffer| buffer.is_seen_by(uid));
        names.extend(seen.map(|b| entry(BUFFERS + b.inode, FileType::Symlink, &b.link)));
    }
    names.push(at(inode, FileType::Directory, ".", 1));
    names.push(at(inode, FileType::Directory, "..", 2));
    names.sort_by_key(|entry| entry.next);
    Ok(names)
}

/// The target of a link for this user: each user has semaphores of their own.
pub(super) fn readlink(shared: &Arc<DaemonShared>, inode: u64, uid: u32) -> Result<PathBuf, Errno> {
    if inode == SOCKET {
        return Ok(shared.socket.clone());
    }
    let place = inode.checked_sub(SEMAPHORES).and_then(|n| Priority::ALL.get(usize::try_from(n).ok()?));
    if let Some(priority) = place {
        let group = shared.workers.group(shared, uid, *priority);
        return group.map(|group| group.path.clone()).map_err(|e| Errno::from_raw_os_error(e.errno()));
    }
    let buffer = inode.checked_sub(BUFFERS).and_then(|serial| shared.table.inode(serial));
    let buffer = buffer.filter(|buffer| buffer.is_seen_by(uid));
    buffer.map(|buffer| buffer.target.clone()).ok_or(Errno::INVAL)
}

/// Registers the memory that a new link names.
pub(super) fn symlink(
    shared: &Arc<DaemonShared>,
    name: &OsStr,
    target: &Path,
    owner: Owner,
) -> Result<FileAttr, Errno> {
    let text = name.to_str().ok_or(Errno::INVAL)?;
    let name = Name::parse(text).map_err(|_| Errno::INVAL)?;
    if name.gpu.is_some() {
        // The text of a link cannot hold enough to identify GPU memory, which is registered over the socket.
        return Err(Errno::OPNOTSUPP);
    }
    if shared.table.get(name.id).is_some() {
        return Err(Errno::EXIST);
    }
    let acting = shared.act_as(owner)?;
    let mem = map_shared(target, owner.uid, shared.table.room(owner.uid))?;
    drop(acting);
    if name.block > mem.len() as u64 {
        return Err(Errno::INVAL);
    }
    let buffer = match name.ring {
        None => shared.table.add(name, text, target, owner, LinkContent::Host(mem))?,
        Some(ring) => {
            if ring.depth > onehop_usrbio::ring::entries(mem.len()) || is_too_long(mem.len()) {
                return Err(Errno::INVAL);
            }
            let server = RingServer::new(mem, ring).map_err(|e| Errno::from_raw_os_error(e.errno()))?;
            let ring = Arc::new(ServedRing::new(server, owner));
            let buffer = shared.table.add(name, text, target, owner, LinkContent::Ring(ring.clone()))?;
            shared.workers.add(shared, &ring).map_err(|e| {
                shared.table.remove(&buffer);
                Errno::from_raw_os_error(e.errno())
            })?;
            if buffer.is_gone() {
                // It was removed before it was added to the workers, so that removal did not end it.
                shared.release(buffer.clone(), || ());
            }
            buffer
        }
    };
    Ok(buffer_attr(&buffer))
}

/// Whether this ioctl creates or removes a link.
pub(super) fn is_link_call(inode: u64, command: u32) -> bool {
    inode == IOVS && [MAKE_LINK, REMOVE_LINK].contains(&command)
}

/// Creates or removes a link. A removal is answered once no transfer uses the memory any more.
pub(super) fn ioctl(
    shared: &Arc<DaemonShared>,
    command: u32,
    data: &[u8],
    owner: Owner,
    answer: impl FnOnce(Result<(), Errno>) + Send + 'static,
) {
    match link_texts(data) {
        Ok((name, target)) if command == MAKE_LINK => answer(symlink(shared, name, target, owner).map(drop)),
        Ok((name, _)) => remove(shared, name, owner.uid, answer),
        Err(error) => answer(Err(error)),
    }
}

/// Removes a link. Does not wait for its memory: the kernel holds the folder's lock meanwhile.
pub(crate) fn unlink(shared: &Arc<DaemonShared>, name: &OsStr, uid: u32) -> Result<(), Errno> {
    take_out(shared, name, uid).map(|gone| shared.release(gone, || ()))
}

/// The same, but answers when only transfers in flight use the memory.
pub(crate) fn remove(
    shared: &Arc<DaemonShared>,
    name: &OsStr,
    uid: u32,
    answer: impl FnOnce(Result<(), Errno>) + Send + 'static,
) {
    match take_out(shared, name, uid) {
        Ok(gone) => shared.release(gone, || answer(Ok(()))),
        Err(error) => answer(Err(error)),
    }
}

fn take_out(shared: &DaemonShared, name: &OsStr, uid: u32) -> Result<Arc<LinkedBuffer>, Errno> {
    let buffer = name.to_str().and_then(|name| shared.table.link(name));
    let buffer = buffer.filter(|buffer| buffer.is_seen_by(uid) && shared.table.remove(buffer));
    buffer.ok_or(Errno::NOENT)
}
