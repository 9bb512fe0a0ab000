//! Two users of one mount: neither sees or uses what is the other's.

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
use crate::bed::{Bed, command, part, part_of, run, skipped, wait};
use crate::clock::Attack;
use crate::exhaustion::many_descriptors;

const ONE: u32 = 21_001;
const OTHER: u32 = 21_002;

fn ring(mount: &Arc<Mount>) -> Ring {
    let name =
        RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
    Ring::create(mount, 8, name, None).unwrap()
}

/// What a read into a buffer gives.
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

/// Run as the first user by [`users_keep_to_themselves`]: has a buffer and a file, and waits for the other's end.
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
    std::fs::write(dir.join("told/new"), words).unwrap();
    std::fs::rename(dir.join("told/new"), dir.join("told/first")).unwrap();
    let start = std::time::Instant::now();
    while !dir.join("told/over").exists() {
        assert!(start.elapsed() < crate::bed::LONG);
        std::thread::sleep(Duration::from_millis(5));
    }
    // It has all that it had, as it was.
    assert_eq!(buffer.memory().to_vec(0, 8).unwrap(), b"secret\0\0");
    assert_eq!(read(&ring, buffer.id(), inode(&file), 6), 6);
    assert_eq!(links(mount.path()).len(), 2);
}

/// Run as the second user, who knows everything that the first does.
#[test]
fn second_user() {
    let Ok(dir) = std::env::var("ONEHOP_TEST_SECOND_USER") else { return };
    let dir = PathBuf::from(dir);
    let told = std::fs::read_to_string(dir.join("told/first")).unwrap();
    let [id, secret, target] = told.split(' ').collect::<Vec<_>>()[..] else { panic!("{told}") };
    let (id, secret, target) = (Name::parse(id).unwrap().id, secret.parse().unwrap(), Path::new(target));
    let mount = Arc::new(Mount::open(&dir.join("mnt")).unwrap());
    let iovs = mount.path().join("3fs-virt/iovs");
    assert_eq!(links(mount.path()), Vec::<PathBuf>::new());
    let link = iovs.join(id.to_string());
    assert!(std::fs::read_link(&link).is_err() && std::fs::symlink_metadata(&link).is_err());
    assert!(std::fs::remove_file(&link).is_err());
    assert!(Buffer::open(&mount, id, 4096, 0).is_err());
    // Its memory cannot be opened, nor given to the daemon as if it were ours.
    assert_eq!(std::fs::File::open(target).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    for name in [id.to_string(), Id::random().unwrap().to_string()] {
        assert!(symlink(target, iovs.join(name)).is_err());
    }
    assert!(std::fs::remove_file(target).is_err());
    // A ring of ours reaches what is ours, and not theirs.
    let own = std::fs::File::open(mount.path().join("file.bin")).unwrap();
    let (buffer, ring) = (Buffer::create(&mount, 4096, 0, None).unwrap(), ring(&mount));
    let refused = |errno: Errno| -i64::from(errno.raw_os_error());
    assert_eq!(read(&ring, buffer.id(), inode(&own), 4096), 4096);
    assert_eq!(read(&ring, id, inode(&own), 4096), refused(Errno::ACCESS));
    assert_eq!(read(&ring, buffer.id(), secret, 6), refused(Errno::BADF));
    assert_eq!(links(mount.path()).len(), 2);
}

#[test]
fn users_keep_to_themselves() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can be two users");
    }
    let Some(bed) = Bed::start() else { return };
    let told = bed.dir.join("told");
    std::fs::create_dir(&told).unwrap();
    std::fs::set_permissions(&told, std::fs::Permissions::from_mode(0o777)).unwrap();
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
        Err(error) => return skipped(&format!("other users may not run this test's program: {error}")),
    };
    let begun = std::time::Instant::now();
    while !told.join("first").exists() {
        assert!(begun.elapsed() < crate::bed::LONG, "{:?}", wait(first));
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = wait(start("users::second_user", "ONEHOP_TEST_SECOND_USER", OTHER).unwrap());
    std::fs::write(told.join("over"), "").unwrap();
    let first = wait(first);
    for output in [first, second] {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
    bed.until("all gone", |report| report["buffers"] == 0 && report["rings"] == 0);
}

/// Run as a user by [`handles_of_folders_are_no_files`]: has folders open, and would have holes in them.
#[test]
fn user_of_folders() {
    let Some(dir) = part_of() else { return };
    let open = |path: &str| std::fs::File::open(dir.join("mnt").join(path)).unwrap();
    let mut held: Vec<_> = (0..16).map(|_| open("folder")).collect();
    held.extend((0..16).map(|_| open("3fs-virt/onehop/stats")));
    for file in held {
        assert!(onehop_os::hf3fs::punch_holes(&file, &[(0, 1 << 20)], 0).is_err());
    }
}

#[test]
fn handles_of_folders_are_no_files() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can be two users");
    }
    let Some(bed) = Bed::start() else { return };
    let secret = bed.dir.join("root/secret");
    std::fs::write(&secret, "secret").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    // Root has it open as the first file of this mount, and so with the lowest handle there is.
    let mut shell = command("sh".as_ref());
    shell.args(["-c", "exec 3<>\"$1\"; echo open; read end", "sh"]).arg(bed.mount().join("secret"));
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 5];
    std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut said).unwrap();
    let mut user = part("users::user_of_folders", &bed);
    let user = user.uid(ONE).gid(ONE).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let user = user.map(wait);
    drop(shell.stdin.take());
    wait(shell);
    let output = match user {
        Ok(output) => output,
        Err(error) => return skipped(&format!("other users may not run this test's program: {error}")),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    assert_eq!(std::fs::read(secret).unwrap(), b"secret");
}

/// A person, and numbers of theirs.
const PERSON: u32 = 21_003;
const SUBORDINATES: [u32; 2] = [500_000, 500_001];
/// Folders that a user may have open.
const MOST_FOLDERS: usize = 4096;

/// Run by [`subordinate_numbers_have_their_person_s_share`].
#[test]
fn persons() {
    let Some(dir) = part_of() else { return };
    many_descriptors();
    // Opens so many folders as a user; gives those, and why there are no more.
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
    let (held, error) = open(SUBORDINATES[0], MOST_FOLDERS + 1);
    assert_eq!((held.len(), error), (MOST_FOLDERS, Some(Errno::MFILE.raw_os_error())));
    for uid in [SUBORDINATES[1], PERSON] {
        assert_eq!(open(uid, 1).1, Some(Errno::MFILE.raw_os_error()), "{uid}");
    }
    assert_eq!(open(OTHER, 1).1, None);
    drop(held);
    // Its kernel tells the mount in a moment.
    let start = std::time::Instant::now();
    while open(SUBORDINATES[1], 1).1.is_some() {
        assert!(start.elapsed() < crate::bed::LONG);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn subordinate_numbers_have_their_person_s_share() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can be several users");
    }
    let bed = Bed::folder();
    let subuids = bed.dir.join("subuid");
    std::fs::write(&subuids, format!("{PERSON}:{}:65536\n", SUBORDINATES[0])).unwrap();
    let options = onehop_serve::MountOptions::new(&bed.mount(), &bed.dir.join("root"));
    let Some(bed) = bed.mounted(onehop_serve::MountOptions { subuids, ..options }) else { return };
    run(part("users::persons", &bed));
}
