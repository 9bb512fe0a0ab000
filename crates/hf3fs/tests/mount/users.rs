//! Two users of one mount: neither can see or use the other's resources.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use onehop_usrbio::buffer::{Buffer, Ring};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::Request;
use onehop_usrbio::{Id, Name, Priority, RingName};
use rustix::io::Errno;

use crate::attacks::become_user;
use crate::bed::{Bed, command, run, skipped, subtest, subtest_dir, wait};
use crate::clock::Attack;
use crate::exhaustion::raise_descriptor_limit;

const ONE: u32 = 21_001;
const OTHER: u32 = 21_002;

fn ring(mount: &Arc<Mount>) -> Ring {
    let name =
        RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
    Ring::create(mount, 8, name, None).unwrap()
}

/// Reads into a buffer. Returns the result.
fn read(ring: &Ring, buffer: Id, inode: u64, len: u64) -> i64 {
    ring.prepare(&Request { buffer, offset: 0, inode, at: 0, len, userdata: 0 }).unwrap();
    ring.submit();
    let mut done = Vec::new();
    let until = SystemTime::now() + crate::bed::LONG;
    ring.wait(&mut done, (1, 8), Some(until), Duration::from_millis(1)).unwrap();
    done[0].result
}

fn links(mount: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(mount.join("3fs-virt/iovs")).unwrap();
    let is_buffer = |path: &PathBuf| !path.to_string_lossy().contains("submit-ios");
    all.map(|entry| entry.unwrap().path()).filter(is_buffer).collect()
}

fn inode(file: &std::fs::File) -> u64 {
    rustix::fs::fstat(file).unwrap().st_ino
}

/// Run as the first user by [`users_are_isolated`]: has a buffer and a file, and waits for the second user's end.
#[test]
fn first_user() {
    let Ok(dir) = std::env::var("ONEHOP_TEST_FIRST_USER") else { return };
    let dir = PathBuf::from(dir);
    let mount = Arc::new(Mount::open(&dir.join("mnt")).unwrap());
    let file = std::fs::File::open(dir.join("mnt/secret")).unwrap();
    let (buffer, ring) = (Buffer::create(&mount, 4096, 0, None).unwrap(), ring(&mount));
    assert_eq!(read(&ring, buffer.id(), inode(&file), 6), 6);
    let target =
        std::fs::read_link(mount.path().join("3fs-virt/iovs").join(buffer.id().to_string())).unwrap();
    let words = format!("{} {} {}", buffer.id(), inode(&file), target.display());
    std::fs::write(dir.join("shared/new"), words).unwrap();
    std::fs::rename(dir.join("shared/new"), dir.join("shared/first")).unwrap();
    let start = std::time::Instant::now();
    while !dir.join("shared/over").exists() {
        assert!(start.elapsed() < crate::bed::LONG);
        std::thread::sleep(Duration::from_millis(5));
    }
    // Nothing has changed for the first user.
    assert_eq!(buffer.memory().to_vec(0, 8).unwrap(), b"secret\0\0");
    assert_eq!(read(&ring, buffer.id(), inode(&file), 6), 6);
    assert_eq!(links(mount.path()).len(), 2);
}

/// Run as the second user, who knows the first user's names and numbers.
#[test]
fn second_user() {
    let Ok(dir) = std::env::var("ONEHOP_TEST_SECOND_USER") else { return };
    let dir = PathBuf::from(dir);
    let shared = std::fs::read_to_string(dir.join("shared/first")).unwrap();
    let [id, secret, target] = shared.split(' ').collect::<Vec<_>>()[..] else { panic!("{shared}") };
    let (id, secret, target) = (Name::parse(id).unwrap().id, secret.parse().unwrap(), Path::new(target));
    let mount = Arc::new(Mount::open(&dir.join("mnt")).unwrap());
    let iovs = mount.path().join("3fs-virt/iovs");
    assert_eq!(links(mount.path()), Vec::<PathBuf>::new());
    let link = iovs.join(id.to_string());
    assert!(std::fs::read_link(&link).is_err() && std::fs::symlink_metadata(&link).is_err());
    assert!(std::fs::remove_file(&link).is_err());
    assert!(Buffer::open(&mount, id, 4096, 0).is_err());
    // The other user's memory can neither be opened nor registered.
    assert_eq!(std::fs::File::open(target).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    for name in [id.to_string(), Id::random().unwrap().to_string()] {
        assert!(symlink(target, iovs.join(name)).is_err());
    }
    assert!(std::fs::remove_file(target).is_err());
    // A ring accesses its own user's buffers and files only.
    let own = std::fs::File::open(mount.path().join("file.bin")).unwrap();
    let (buffer, ring) = (Buffer::create(&mount, 4096, 0, None).unwrap(), ring(&mount));
    let refused = |errno: Errno| -i64::from(errno.raw_os_error());
    assert_eq!(read(&ring, buffer.id(), inode(&own), 4096), 4096);
    assert_eq!(read(&ring, id, inode(&own), 4096), refused(Errno::ACCESS));
    assert_eq!(read(&ring, buffer.id(), secret, 6), refused(Errno::BADF));
    assert_eq!(links(mount.path()).len(), 2);
}

#[test]
fn users_are_isolated() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can be two users");
    }
    let Some(bed) = Bed::start() else { return };
    let shared = bed.dir.join("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o777)).unwrap();
    let secret = bed.dir.join("root/secret");
    std::fs::write(&secret, "secret").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&secret, Some(ONE), Some(ONE)).unwrap();
    let start = |name: &str, variable: &str, uid| {
        let mut program = command(&std::env::current_exe().unwrap());
        program.args(["--exact", name, "--nocapture"]).env(variable, &bed.dir);
        program.uid(uid).gid(uid).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let first = match start("users::first_user", "ONEHOP_TEST_FIRST_USER", ONE) {
        Ok(first) => first,
        Err(error) => return skipped(&format!("other users cannot run this test's program: {error}")),
    };
    let begun = std::time::Instant::now();
    while !shared.join("first").exists() {
        assert!(begun.elapsed() < crate::bed::LONG, "{:?}", wait(first));
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = wait(start("users::second_user", "ONEHOP_TEST_SECOND_USER", OTHER).unwrap());
    std::fs::write(shared.join("over"), "").unwrap();
    let first = wait(first);
    for output in [first, second] {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
    bed.until("all gone", |report| report["buffers"] == 0 && report["rings"] == 0);
}

/// Run as a user by [`folder_handles_are_not_file_handles`]: has folders open, and tries to punch holes into them.
#[test]
fn folder_user() {
    let Some(dir) = subtest_dir() else { return };
    let open = |path: &str| std::fs::File::open(dir.join("mnt").join(path)).unwrap();
    let mut held: Vec<_> = (0..16).map(|_| open("folder")).collect();
    held.extend((0..16).map(|_| open("3fs-virt/onehop/stats")));
    for file in held {
        assert!(onehop_os::hf3fs::punch_holes(&file, &[(0, 1 << 20)], 0).is_err());
    }
}

#[test]
fn folder_handles_are_not_file_handles() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can be two users");
    }
    let Some(bed) = Bed::start() else { return };
    let secret = bed.dir.join("root/secret");
    std::fs::write(&secret, "secret").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    // Root opens it as the first file of this mount, so that it gets the lowest handle.
    let mut shell = command("sh".as_ref());
    shell.args(["-c", "exec 3<>\"$1\"; echo open; read end", "sh"]).arg(bed.mount().join("secret"));
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = [0; 5];
    std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut stdout).unwrap();
    let mut user = subtest("users::folder_user", &bed);
    let user = user.uid(ONE).gid(ONE).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let user = user.map(wait);
    drop(shell.stdin.take());
    wait(shell);
    let output = match user {
        Ok(output) => output,
        Err(error) => return skipped(&format!("other users cannot run this test's program: {error}")),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    assert_eq!(std::fs::read(secret).unwrap(), b"secret");
}

/// A user, and their subordinate user IDs.
const USER: u32 = 21_003;
const SUBORDINATES: [u32; 2] = [500_000, 500_001];
/// The limit on a user's open folders.
const MAX_FOLDERS: usize = 4096;

/// Run by [`subordinate_ids_share_their_user_s_limits`].
#[test]
fn folder_holders() {
    let Some(dir) = subtest_dir() else { return };
    raise_descriptor_limit();
    // Opens `count` folders as a user. Returns those that opened, and the error.
    let open = |uid: u32, count: usize| {
        let folder = dir.join("mnt/folder");
        let user = std::thread::spawn(move || {
            become_user(uid, &[]);
            let (mut held, mut error) = (Vec::new(), None);
            while held.len() < count && error.is_none() {
                match std::fs::File::open(&folder) {
                    Ok(file) => held.push(file),
                    Err(why) => error = why.raw_os_error(),
                }
            }
            (held, error)
        });
        user.join().unwrap()
    };
    let (held, error) = open(SUBORDINATES[0], MAX_FOLDERS + 1);
    assert_eq!((held.len(), error), (MAX_FOLDERS, Some(Errno::MFILE.raw_os_error())));
    for uid in [SUBORDINATES[1], USER] {
        assert_eq!(open(uid, 1).1, Some(Errno::MFILE.raw_os_error()), "{uid}");
    }
    assert_eq!(open(OTHER, 1).1, None);
    drop(held);
    // The kernel reports the closed folders to the mount a moment later.
    let start = std::time::Instant::now();
    while open(SUBORDINATES[1], 1).1.is_some() {
        assert!(start.elapsed() < crate::bed::LONG);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn subordinate_ids_share_their_user_s_limits() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can be several users");
    }
    let bed = Bed::folder();
    let subuids = bed.dir.join("subuid");
    std::fs::write(&subuids, format!("{USER}:{}:65536\n", SUBORDINATES[0])).unwrap();
    let options = onehop_serve::MountOptions::new(&bed.mount(), &bed.dir.join("root"));
    let Some(bed) = bed.mounted(onehop_serve::MountOptions { subuids, ..options }) else { return };
    run(subtest("users::folder_holders", &bed));
}
