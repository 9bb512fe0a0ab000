//! What a mount's own checks have to keep closed: folders that are reached by number, bits that a write takes away, and mounts that
//! lead back to the daemon.

use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use onehop_os::hf3fs::{hardlink, punch_holes};
use onehop_serve::{Daemon, Error, MountOptions};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use crate::attacks::{ATTACKER, attacked, become_user};
use crate::bed::{Bed, command, part, part_of, run};

fn code(done: onehop_os::Result<()>) -> Option<i32> {
    done.err().and_then(|error| error.errno())
}

/// Run by [`links_are_made_in_open_folders_only`].
#[test]
fn linker() {
    let Some(dir) = part_of() else { return };
    let number = |of: &str| std::fs::metadata(dir.join("root").join(of)).unwrap().ino();
    let (inner, open) = (number("private/tmp"), number("folder"));
    become_user(ATTACKER, &[]);
    let own = File::create(dir.join("mnt/folder/own")).unwrap();
    let denied = Some(Errno::ACCESS.raw_os_error());
    assert_eq!(code(hardlink(&own, inner, b"link")), denied);
    assert_eq!(code(hardlink(&own, open, b"link")), denied);
    let folder = File::open(dir.join("mnt/folder")).unwrap();
    assert_eq!(code(hardlink(&own, inner, b"link")), denied);
    assert_eq!(code(hardlink(&own, open, b"link")), None);
    assert_eq!(folder.metadata().unwrap().ino(), open);
}

#[test]
fn links_are_made_in_open_folders_only() {
    let Some(bed) = attacked() else { return };
    let root = bed.dir.join("root");
    std::fs::create_dir_all(root.join("private/tmp")).unwrap();
    for (of, mode) in [("private/tmp", 0o1777), ("private", 0o700), ("folder", 0o777)] {
        std::fs::set_permissions(root.join(of), Permissions::from_mode(mode)).unwrap();
    }
    // Root looks it up, so that its number is known; and has it open, which is no matter for others.
    let mut shell = command("sh".as_ref());
    let script = "stat \"$1\" >/dev/null && exec 3<\"$1\" && echo open && exec sleep 60";
    let path = bed.mount().join("private/tmp");
    let mut shell =
        shell.args(["-c", script, "sh"]).arg(&path).stdout(std::process::Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
    run(part("closed::linker", &bed));
    shell.kill().unwrap();
    shell.wait().unwrap();
    assert_eq!(std::fs::read_dir(root.join("private/tmp")).unwrap().count(), 0);
    assert!(root.join("folder/link").exists());
}

/// Run by [`holes_take_rights_away`]: a program that gave its own rights up has the file open from before.
#[test]
fn puncher() {
    let Some(dir) = part_of() else { return };
    let [ioctl, call] = ["ioctl", "call"]
        .map(|of| File::options().read(true).write(true).open(dir.join("mnt").join(of)).unwrap());
    become_user(ATTACKER, &[]);
    punch_holes(&ioctl, &[(0, 2)], 0).unwrap();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&call, flags, 0, 2).unwrap();
}

#[test]
fn holes_take_rights_away() {
    let Some(bed) = attacked() else { return };
    let files = ["ioctl", "call"].map(|of| bed.dir.join("root").join(of));
    for file in &files {
        std::fs::write(file, b"program").unwrap();
        chown(file, Some(0), Some(0)).unwrap();
        std::fs::set_permissions(file, Permissions::from_mode(0o6777)).unwrap();
    }
    run(part("closed::puncher", &bed));
    for file in files {
        assert_eq!(std::fs::read(&file).unwrap(), b"\0\0ogram");
        assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o7777, 0o777, "{}", file.display());
    }
}

/// Asks for what is behind a mount that leads back to who serves it.
fn leads_nowhere(bed: &Bed) {
    let back = bed.dir.join("root/folder");
    mount_bind(bed.mount(), &back).unwrap();
    let script = "stat \"$1/folder/file.bin\" 2>&1; stat \"$1/folder\" 2>&1; cat \"$1/file.bin\" | wc -c";
    let mut shell = command("sh".as_ref());
    shell.args(["-c", script, "sh"]).arg(bed.mount());
    let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(shell)));
    unmount(&back, UnmountFlags::DETACH).unwrap();
    let said = said.unwrap();
    assert_eq!(said.matches("Too many levels of symbolic links").count(), 2, "{said}");
    assert!(said.ends_with("6000011\n"), "{said}");
}

#[test]
fn a_mount_does_not_show_itself() {
    let Some(bed) = attacked() else { return };
    leads_nowhere(&bed);
    let (root, inner) = (bed.dir.join("root"), bed.dir.join("root/inner"));
    std::fs::create_dir(&inner).unwrap();
    let error = Daemon::start(MountOptions::new(&inner, &root)).err().unwrap();
    assert!(matches!(&error, Error::Folder { why, .. } if why.contains("lies within")), "{error}");
    let Some((bed, _target, _)) = crate::target::start() else { return };
    leads_nowhere(&bed);
}
