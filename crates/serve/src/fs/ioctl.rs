//! The ioctls of 3FS: what a mount is, and operations for which POSIX has no call.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use fuser::{FileHandle, INodeNo};
use onehop_os::hf3fs::{MAGIC, MOST_HOLES, NAME_BYTES};
use onehop_target::wire::Caller;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::Mounted;
use crate::daemon::DaemonShared;
use crate::opens::Open;

const GET_MOUNT_NAME: u32 = 0x8020_6800;
const GET_MAGIC: u32 = 0x8004_6802;
pub(super) const FSYNC: u32 = 0x8004_680b;
const HARDLINK: u32 = 0x4108_680c;
pub(super) const PUNCH_HOLES: u32 = 0x7e90_680d;

const NAME: &[u8] = b"onehop";

/// The file or folder of an ioctl.
#[derive(Clone, Copy)]
pub(super) struct On {
    pub inode: INodeNo,
    pub handle: FileHandle,
    /// Whether `handle` is a folder's.
    pub folder: bool,
}

impl On {
    /// The open file.
    pub fn file(self, mounted: &Mounted) -> Result<Arc<Open>, Errno> {
        let open = if self.folder { None } else { mounted.opened(self.handle).ok() };
        open.filter(|open| open.inode == self.inode.0).ok_or(Errno::BADF)
    }
}

pub(super) fn run(
    mounted: &Mounted,
    by: &Caller,
    on: On,
    command: u32,
    data: &[u8],
) -> Result<Vec<u8>, Errno> {
    match command {
        GET_MAGIC => Ok(MAGIC.to_le_bytes().to_vec()),
        GET_MOUNT_NAME => {
            let mut name = vec![0; 32];
            name[..NAME.len()].copy_from_slice(NAME);
            Ok(name)
        }
        HARDLINK => hardlink(mounted, by, on.inode, data),
        _ => Err(Errno::NOTTY),
    }
}

fn number(data: &[u8], at: usize) -> Result<u64, Errno> {
    let bytes = data.get(at..at + 8).ok_or(Errno::INVAL)?;
    Ok(u64::from_le_bytes(bytes.try_into().map_err(|_| Errno::INVAL)?))
}

/// The name and target of a link. Programs pass them by ioctl instead of calling `symlink` or `unlink` in the folder of
/// links.
pub(super) fn link_texts(data: &[u8]) -> Result<(&OsStr, &Path), Errno> {
    let mut texts = data.split(|byte| *byte == 0);
    // The text after the last zero byte counts as well.
    let ([Some(name), Some(target)], Some(_)) = ([texts.next(), texts.next()], texts.next()) else {
        return Err(Errno::INVAL);
    };
    Ok((OsStr::from_bytes(name), Path::new(OsStr::from_bytes(target))))
}

/// The folder comes as a bare inode number, which the kernel has not checked. So the caller's user must have that
/// folder open: otherwise a number would give access to folders that are closed to them.
fn hardlink(mounted: &Mounted, by: &Caller, inode: INodeNo, data: &[u8]) -> Result<Vec<u8>, Errno> {
    let folder = INodeNo(number(data, 0)?);
    let name = data.get(8..8 + NAME_BYTES).ok_or(Errno::INVAL)?;
    let end = name.iter().position(|byte| *byte == 0).ok_or(Errno::INVAL)?;
    let name = OsStr::from_bytes(&name[..end]);
    if end == 0 || name.as_bytes().contains(&b'/') {
        return Err(Errno::INVAL);
    }
    if !mounted.folders.has_open(folder.0, by.uid) {
        return Err(Errno::ACCESS);
    }
    let made = mounted.link_again(by, inode, folder, name)?;
    // The kernel did not look the new name up, so it will not send a `forget` for it.
    drop(mounted.tree.forget(made.ino.0, 1));
    Ok(Vec::new())
}

/// Punches holes without the kernel's knowledge, so its cached pages are dropped twice: before, because it would write
/// dirty mapped pages back into the holes, and after.
pub(super) fn punch_holes(
    shared: &DaemonShared,
    open: &Open,
    keeps_set_id: bool,
    data: &[u8],
) -> Result<(), Errno> {
    shared.forget_pages(open.inode);
    let punched = punch_all(open, keeps_set_id, data);
    shared.forget_pages(open.inode);
    punched
}

fn punch_all(open: &Open, keeps_set_id: bool, data: &[u8]) -> Result<(), Errno> {
    let count = number(data, 0)? as u32 as usize;
    if count > MOST_HOLES {
        return Err(Errno::INVAL);
    }
    open.written_by(keeps_set_id).map_err(|error| super::io(&error))?;
    for place in 0..count {
        let (start, end) = (number(data, 16 + 8 * place)?, number(data, 16 + 8 * (MOST_HOLES + place))?);
        let length = end.checked_sub(start).filter(|length| *length > 0).ok_or(Errno::INVAL)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        open.file().allocate(flags.bits(), start, length).map_err(|error| super::io(&error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_two_texts() {
        let texts =
            |data| link_texts(data).map(|(name, target)| (name.to_str().unwrap(), target.to_str().unwrap()));
        assert_eq!(texts(b"ab\0/c\0\0\0"), Ok(("ab", "/c")));
        assert_eq!(texts(b"ab\0\0"), Ok(("ab", "")));
        for broken in [&b""[..], b"ab", b"ab\0", b"ab\0/c"] {
            assert_eq!(texts(broken), Err(Errno::INVAL), "{broken:?}");
        }
    }
}
