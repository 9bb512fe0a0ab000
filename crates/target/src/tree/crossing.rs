//! Mounts below the root that are not entered.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;

use super::TreeResult;

/// The prefix of the source of `onehop mount`'s mounts, and their type.
const ONEHOP_MOUNTS: (&str, &str) = ("onehop", "fuse.hf3fs");

/// A file system whose answers depend on the process that asks: it would show users this process's memory map, and what
/// only root may see of other processes.
const PROCFS: &str = "proc";

/// Refuses a mount that would make this process wait for itself or for a user, or answer for itself instead of the
/// user. Reads only what the kernel knows, without asking the file system.
///
/// # Errors
/// `ELOOP` for a mount by onehop, which may show the folder that is served. `EACCES` for procfs, and for the FUSE mount
/// of another user, who could block each thread that enters it for ever.
pub(super) fn check(path: &OwnedFd) -> TreeResult<()> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(path, "", flags, StatxFlags::MNT_ID)?;
    if !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
        || stat.stx_mask & StatxFlags::MNT_ID.bits() == 0
    {
        return Ok(());
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").map_err(|error| super::errno(&error))?;
    let mount = format!("{} ", stat.stx_mnt_id);
    let line = mounts.lines().find(|line| line.starts_with(&mount));
    line.map_or(Ok(()), |line| check_line(line, rustix::process::geteuid().as_raw()))
}

/// The same for a mount's line in mountinfo.
fn check_line(line: &str, own: u32) -> TreeResult<()> {
    let mut what = line.split_once(" - ").map_or("", |(_, what)| what).split(' ');
    let (kind, source, options) = (what.next(), what.next(), what.next());
    let kind = kind.unwrap_or_default();
    if kind == ONEHOP_MOUNTS.1 && source.is_some_and(|source| source.starts_with(ONEHOP_MOUNTS.0)) {
        return Err(Errno::LOOP);
    }
    if kind == PROCFS {
        return Err(Errno::ACCESS);
    }
    if kind != "fuse" && kind != "fuseblk" && !kind.starts_with("fuse.") {
        return Ok(());
    }
    let mut options = options.unwrap_or_default().split(',');
    let user = options.find_map(|option| option.strip_prefix("user_id=")?.parse::<u32>().ok());
    if user.is_some_and(|user| user != 0 && user != own) { Err(Errno::ACCESS) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mounts() {
        let line = |what: &str| format!("36 35 0:50 / /mnt/a\\040b rw,nosuid shared:7 - {what}");
        for (what, wanted) in [
            ("ext4 /dev/sda1 rw", Ok(())),
            ("fuse.hf3fs onehop rw,user_id=0,group_id=0", Err(Errno::LOOP)),
            ("fuse.hf3fs onehop:00ff rw,user_id=0,group_id=0", Err(Errno::LOOP)),
            ("fuse.hf3fs hf3fs.stage rw,user_id=0,group_id=0", Ok(())),
            ("fuse.sshfs far: rw,user_id=30000,group_id=30000,allow_other", Err(Errno::ACCESS)),
            ("fuse.sshfs far: rw,user_id=1000,group_id=1000", Ok(())),
            ("fuse /dev/fuse rw,user_id=30000", Err(Errno::ACCESS)),
            ("tmpfs user_id=30000 rw,size=1", Ok(())),
            ("proc proc rw", Err(Errno::ACCESS)),
            ("ext4 proc rw", Ok(())),
        ] {
            assert_eq!(check_line(&line(what), 1000), wanted, "{what}");
        }
    }
}
