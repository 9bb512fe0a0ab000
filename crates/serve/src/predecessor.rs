//! The mount that a killed daemon has left at a mount point, and which mount of a target it was.

use std::path::Path;

use onehop_target::client::RemoteTree;
use onehop_target::wire::MountId;
use onehop_usrbio::mount::{FS_TYPE, at};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

use crate::error::{Error, Result};

const SOURCE: &str = "onehop";

/// The source of a mount in the kernel's mount table. The next mount at the same place finds the mount's ID there.
pub(crate) fn source(target: Option<&RemoteTree>) -> String {
    target.map_or_else(|| SOURCE.into(), |tree| named(tree.mount_id()))
}

fn named(id: MountId) -> String {
    format!("{SOURCE}:{:032x}", u128::from_be_bytes(id))
}

/// Unmounts a mount whose daemon was killed. If it was a target's, its requests are ended at the target first; if that
/// fails, the mount stays.
pub(crate) fn unmount_stale(path: &Path, target: Option<&RemoteTree>) -> Result<()> {
    // Requester the file system itself: the kernel caches the answers of a dead one.
    let (flags, mask) = (AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
    if !matches!(statx(CWD, path, flags, mask), Err(Errno::NOTCONN)) {
        return Ok(());
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let before = place(path).and_then(|place| id(&place, &mounts, rustix::process::geteuid().as_raw()));
    if let (Some(before), Some(target)) = (before, target) {
        let call = "ending the requests of the killed mount at the target, for";
        target.succeed(before).map_err(|errno| Error::file(call, path, errno))?;
    }
    // Without permission to unmount, opening the folder reports the error.
    let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH);
    Ok(())
}

/// Resolves the path without asking the file system at its end.
fn place(path: &Path) -> Option<std::path::PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(folder.canonicalize().ok()?.join(path.file_name()?))
}

/// The ID of the mount at a path. A mount by another user is ignored: it could name a mount that is alive.
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
    fn the_stale_mount_is_identified_by_its_source() {
        let (old, new) = ([7; 16], [9; 16]);
        let line = |place: &str, fs: &str, source: &str, user: u32| {
            format!("36 35 0:40 / {place} rw,nosuid - {fs} {source} rw,user_id={user},group_id=0\n")
        };
        let both =
            line("/mnt/a\\040b", FS_TYPE, &named(old), 0) + &line("/mnt/a\\040b", FS_TYPE, &named(new), 0);
        let found = |mounts: &str, user| id(Path::new("/mnt/a b"), mounts, user);
        assert_eq!(found(&both, 0), Some(new), "the topmost mount");
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
