//! What a mount must prevent: links in folders that were not opened, setuid bits that survive a write, and mounts that
//! lead back to the daemon.

use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use onehop_os::hf3fs::{hardlink, punch_holes};
use onehop_serve::{Daemon, Error, MountOptions};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use crate::attacks::{ATTACKER, become_user, root_bed};
use crate::bed::{Bed, command, run, subtest, subtest_dir};
use crate::clock::Attack;

fn errno(done: onehop_os::Result<()>) -> Option<i32> {
    done.err().and_then(|error| error.errno())
}

/// Run by [`links_are_created_in_open_folders_only`].
#[test]
fn linker() {
    let Some(dir) = subtest_dir() else { return };
    let number = |of: &str| std::fs::metadata(dir.join("root").join(of)).unwrap().ino();
    let (inner, open) = (number("private/tmp"), number("folder"));
    become_user(ATTACKER, &[]);
    let own = File::create(dir.join("mnt/folder/own")).unwrap();
    let denied = Some(Errno::ACCESS.raw_os_error());
    assert_eq!(errno(hardlink(&own, inner, b"link")), denied);
    assert_eq!(errno(hardlink(&own, open, b"link")), denied);
    let folder = File::open(dir.join("mnt/folder")).unwrap();
    assert_eq!(errno(hardlink(&own, inner, b"link")), denied);
    assert_eq!(errno(hardlink(&own, open, b"link")), None);
    assert_eq!(folder.metadata().unwrap().ino(), open);
}

#[test]
fn links_are_created_in_open_folders_only() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    let root = bed.dir.join("root");
    std::fs::create_dir_all(root.join("private/tmp")).unwrap();
    for (of, mode) in [("private/tmp", 0o1777), ("private", 0o700), ("folder", 0o777)] {
        std::fs::set_permissions(root.join(of), Permissions::from_mode(mode)).unwrap();
    }
    // Root looks it up, so that its number is known, and has it open, which must not matter for other users.
    let mut shell = command("sh".as_ref());
    let script = "stat \"$1\" >/dev/null && exec 3<\"$1\" && echo open && exec sleep 60";
    let path = bed.mount().join("private/tmp");
    let mut shell =
        shell.args(["-c", script, "sh"]).arg(&path).stdout(std::process::Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
    run(subtest("protections::linker", &bed));
    shell.kill().unwrap();
    shell.wait().unwrap();
    assert_eq!(std::fs::read_dir(root.join("private/tmp")).unwrap().count(), 0);
    assert!(root.join("folder/link").exists());
}

/// Run by [`holes_clear_setuid`]: a program that dropped its privileges after it opened the files.
#[test]
fn puncher() {
    let Some(dir) = subtest_dir() else { return };
    let [ioctl, call] = ["ioctl", "call"]
        .map(|of| File::options().read(true).write(true).open(dir.join("mnt").join(of)).unwrap());
    become_user(ATTACKER, &[]);
    punch_holes(&ioctl, &[(0, 2)], 0).unwrap();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&call, flags, 0, 2).unwrap();
}

#[test]
fn holes_clear_setuid() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    let files = ["ioctl", "call"].map(|of| bed.dir.join("root").join(of));
    for file in &files {
        std::fs::write(file, b"program").unwrap();
        chown(file, Some(0), Some(0)).unwrap();
        std::fs::set_permissions(file, Permissions::from_mode(0o6777)).unwrap();
    }
    run(subtest("protections::puncher", &bed));
    for file in files {
        assert_eq!(std::fs::read(&file).unwrap(), b"\0\0ogram");
        assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o7777, 0o777, "{}", file.display());
    }
}

/// Files and folders, their owners, and their modes.
const OWNED: [(&str, u32, u32); 7] = [
    ("own", ATTACKER, 0o6755),
    ("not run by the group", ATTACKER, 0o6745),
    ("own without", ATTACKER, 0o644),
    ("root's", 0, 0o6777),
    ("root's without", 0, 0o666),
    ("own folder", ATTACKER, 0o6755),
    ("root's folder", 0, 0o6777),
];

/// Run by [`chown_without_a_change_clears_setuid`]: calls chown without a new owner, and truncates. Prints the results.
#[test]
fn chowner() {
    let Some(dir) = subtest_dir() else { return };
    let of = |name: &str| std::env::var(name).unwrap();
    let (folder, by) = (dir.join(of("ONEHOP_TEST_FOLDER")), of("ONEHOP_TEST_UID").parse().unwrap());
    if by != 0 {
        become_user(by, &[]);
    }
    for (name, _, _) in OWNED {
        let result = chown(folder.join(name), None, None).map_err(|error| error.raw_os_error());
        println!("{name}: {result:?}");
    }
    let cut = File::options().write(true).open(folder.join("cut")).and_then(|file| file.set_len(3));
    println!("cut: {:?}", cut.map_err(|error| error.raw_os_error()));
}

/// Runs [`chowner`] in the folder `name`, reached through `via`. Returns its output, and the modes afterwards.
fn chown_all(bed: &Bed, name: &str, via: &str, by: u32) -> (String, Vec<u32>) {
    let folder = bed.dir.join("root").join(name);
    std::fs::create_dir(&folder).unwrap();
    let all = OWNED.into_iter().chain([("cut", 0, 0o6777)]);
    let paths: Vec<_> = all
        .map(|(name, uid, mode)| {
            let path = folder.join(name);
            if name.ends_with("folder") {
                std::fs::create_dir(&path).unwrap();
            } else {
                std::fs::write(&path, "program").unwrap();
            }
            chown(&path, Some(uid), Some(uid)).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        })
        .collect();
    let mut chowner = subtest("protections::chowner", bed);
    chowner.env("ONEHOP_TEST_FOLDER", format!("{via}/{name}")).env("ONEHOP_TEST_UID", by.to_string());
    let stdout = run(chowner)
        .lines()
        .filter(|line| line.contains(": Ok(") || line.contains(": Err("))
        .collect::<Vec<_>>()
        .join("\n");
    (stdout, paths.iter().map(|path| std::fs::metadata(path).unwrap().mode() & 0o7777).collect())
}

#[test]
fn chown_without_a_change_clears_setuid() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    let Some((of_target, _target, _)) = crate::target::start() else { return };
    for bed in [&bed, &of_target] {
        for by in [ATTACKER, 0] {
            let (stdout, modes) = chown_all(bed, &format!("below {by}"), "root", by);
            assert!(stdout.contains("own: Ok(()") && modes[0] == 0o755, "{stdout} {modes:?}");
            // Through a mount, a user who may not clear the bits gets no error: the kernel makes the same request
            // before a write, which clears them.
            let stdout = stdout.replace("root's: Err(Some(1))", "root's: Ok(())");
            assert_eq!(chown_all(bed, &format!("through {by}"), "mnt", by), (stdout, modes));
        }
    }
}

/// Accesses a mount that leads back to its own daemon.
fn check_mount_loop(bed: &Bed) {
    let back = bed.dir.join("root/folder");
    mount_bind(bed.mount(), &back).unwrap();
    let script = "stat \"$1/folder/file.bin\" 2>&1; stat \"$1/folder\" 2>&1; cat \"$1/file.bin\" | wc -c";
    let mut shell = command("sh".as_ref());
    shell.args(["-c", script, "sh"]).arg(bed.mount());
    let stdout = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(shell)));
    unmount(&back, UnmountFlags::DETACH).unwrap();
    let stdout = stdout.unwrap();
    assert_eq!(stdout.matches("Too many levels of symbolic links").count(), 2, "{stdout}");
    assert!(stdout.ends_with("6000011\n"), "{stdout}");
}

#[test]
fn a_mount_does_not_show_itself() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    check_mount_loop(&bed);
    let (root, inner) = (bed.dir.join("root"), bed.dir.join("root/inner"));
    std::fs::create_dir(&inner).unwrap();
    let error = Daemon::start(MountOptions::new(&inner, &root)).err().unwrap();
    assert!(matches!(&error, Error::Folder { why, .. } if why.contains("is inside")), "{error}");
    let Some((bed, _target, _)) = crate::target::start() else { return };
    check_mount_loop(&bed);
}
