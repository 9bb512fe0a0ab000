//! Files in `/dev/shm` that links name.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use onehop_os::HostMem;
use onehop_usrbio::SHM;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

/// The file system type of `/dev/shm`, from `statfs`.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// Opens a file in `/dev/shm` itself. Something that a user has mounted there is not entered: it might never answer.
///
/// # Errors
/// When there is no such file, or something is mounted on it.
pub(crate) fn open_shared(target: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let name = target.file_name().filter(|_| target.parent() == Some(Path::new(SHM))).ok_or(Errno::INVAL)?;
    let folder = openat(CWD, SHM, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    openat2(&folder, name, flags, Mode::empty(), within).map_err(|error| match error {
        Errno::XDEV => Errno::INVAL,
        other => other,
    })
}

/// Maps the shared memory that a link of `uid` names: a regular file in `/dev/shm` that is theirs, of at most `most`
/// bytes. It is opened with the credentials of this thread, which must be theirs.
pub(crate) fn map_shared(target: &Path, uid: u32, most: u64) -> Result<HostMem, Errno> {
    let file = File::from(open_shared(target, OFlags::RDWR | OFlags::NONBLOCK)?);
    // Another file system might never provide the pages.
    if rustix::fs::fstatfs(&file)?.f_type != TMPFS {
        return Err(Errno::INVAL);
    }
    let stat = rustix::fs::fstat(&file)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    if stat.st_uid != uid && uid != 0 {
        return Err(Errno::ACCESS);
    }
    let failed = |error: onehop_os::Error| error.errno().map_or(Errno::INVAL, Errno::from_raw_os_error);
    HostMem::of_shared_within(&file, most).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Also run in a child process, with something mounted on the file that the variable names.
    #[test]
    fn mounts_in_shared_memory_are_not_opened() {
        const FILE: &str = "ONEHOP_TEST_MOUNTED_ON";
        let map = |file: &Path| map_shared(file, rustix::process::geteuid().as_raw(), 1 << 20).map(drop);
        if let Some(file) = std::env::var_os(FILE).map(PathBuf::from) {
            assert_eq!(open_shared(&file, OFlags::PATH).err(), Some(Errno::INVAL));
            assert_eq!(map(&file), Err(Errno::INVAL));
            return;
        }
        let file = PathBuf::from(format!("{SHM}/onehop-test-{}", std::process::id()));
        std::fs::write(&file, [0; 4096]).unwrap();
        assert!(open_shared(&file, OFlags::PATH).is_ok());
        assert_eq!(map(&file), Ok(()));
        for elsewhere in ["/dev/null", "/dev/shm/../null", "/dev/shm"] {
            assert_eq!(map(Path::new(elsewhere)), Err(Errno::INVAL), "{elsewhere}");
        }
        if rustix::process::geteuid().is_root() {
            let script = "mount --bind /etc/passwd \"$0\"; exec \"$1\" --exact \"$2\"";
            let name = "shm::tests::mounts_in_shared_memory_are_not_opened";
            let mut inside = std::process::Command::new("unshare");
            inside.args(["--mount", "sh", "-euc", script]).arg(&file).arg(std::env::current_exe().unwrap());
            let ended = inside.arg(name).env(FILE, &file).output().unwrap();
            assert!(
                ended.status.success() && String::from_utf8_lossy(&ended.stdout).contains("1 passed"),
                "{ended:?}"
            );
        } else {
            println!("SKIPPED: mounting takes root");
        }
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn shared_memory_is_mapped_up_to_a_limit() {
        let (owner, target) = (rustix::process::geteuid().as_raw(), Path::new(SHM).join("onehop-test-table"));
        std::fs::write(&target, [1; 4096]).unwrap();
        let mapped = map_shared(&target, owner, 1 << 20).map(|mem| mem.len());
        let too_long = map_shared(&target, owner, 4095).err();
        std::fs::remove_file(&target).unwrap();
        assert_eq!((mapped, too_long), (Ok(4096), Some(Errno::NOMEM)));
    }
}
