//! The mount that was here before: what a daemon that was killed has left, and which mount of a target it was.

use std::path::Path;

use onehop_target::client::RemoteTree;
use onehop_target::wire::MountId;
use onehop_usrbio::mount::{FS_TYPE, at};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

use crate::error::{Error, Result};

const SOURCE: &str = "onehop";

/// What the kernel's table of mounts names as the source of a mount: the next one at the same place learns from it which this was.
pub(crate) fn source(target: Option<&RemoteTree>) -> String {
    target.map_or_else(|| SOURCE.into(), |tree| named(tree.mount_id()))
}

fn named(id: MountId) -> String {
    format!("{SOURCE}:{:032x}", u128::from_be_bytes(id))
}

/// Takes a mount away that answers nothing, because its daemon was killed. Where it was one of a target's, what it had asked for
/// is ended there first; while that fails it stays.
pub(crate) fn unmount_stale(path: &Path, target: Option<&RemoteTree>) -> Result<()> {
    // Asked of the file system itself: the kernel remembers what a dead one said.
    let (flags, mask) = (AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
    if !matches!(statx(CWD, path, flags, mask), Err(Errno::NOTCONN)) {
        return Ok(());
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let before = place(path).and_then(|place| id(&place, &mounts, rustix::process::geteuid().as_raw()));
    if let (Some(before), Some(target)) = (before, target) {
        let call = "ending what the mount that was killed had asked the target for, of";
        target.succeed(before).map_err(|errno| Error::file(call, path, errno))?;
    }
    // Where this is not ours to do, opening the folder says what is wrong.
    let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH);
    Ok(())
}

/// The path without links, though nothing can be asked of its end.
fn place(path: &Path) -> Option<std::path::PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(folder.canonicalize().ok()?.join(path.file_name()?))
}

/// Which mount is at a place. One of another user is not believed: it could name a mount that lives.
fn id(place: &Path, mounts: &str, user: u32) -> Option<MountId> {
    let mount = at(place, mounts)?;
    let mine = format!("user_id={user}");
    if mount.fs_type != FS_TYPE || !mount.options.split(',').any(|option| option == mine) {
        return None;
    }
    let digits = mount.source.strip_prefix(SOURCE)?.strip_prefix(':')?;
    u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_before_is_known_by_its_source() {
        let (old, new) = ([7; 16], [9; 16]);
        let line = |place: &str, fs: &str, source: &str, user: u32| {
            format!("36 35 0:40 / {place} rw,nosuid - {fs} {source} rw,user_id={user},group_id=0\n")
        };
        let both =
            line("/mnt/a\\040b", FS_TYPE, &named(old), 0) + &line("/mnt/a\\040b", FS_TYPE, &named(new), 0);
        let found = |mounts: &str, user| id(Path::new("/mnt/a b"), mounts, user);
        assert_eq!(found(&both, 0), Some(new), "the one on top");
        assert_eq!(found(&both, 1000), None, "another user's");
        for other in [
            line("/mnt/a\\040b", "fuse.sshfs", &named(old), 0),
            line("/mnt/a\\040b", FS_TYPE, SOURCE, 0),
            line("/mnt/a\\040b", FS_TYPE, "onehop:zz", 0),
            line("/mnt/other", FS_TYPE, &named(old), 0),
            "nonsense\n\n36 - x\n".to_owned(),
        ] {
            assert_eq!(found(&other, 0), None, "{other}");
        }
        assert_eq!(source(None), "onehop");
    }
}
