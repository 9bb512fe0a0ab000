//! Programs of an ordinary user who attacks the other users of a mount: by swapping names, with files that already
//! exist, and with mode bits and access control lists.

use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use onehop_target::tree::Tree;
use onehop_target::wire::{Caller, Name, OpenMode, ROOT};
use rustix::fs::{CWD, OFlags, RenameFlags, XattrFlags, renameat_with, setxattr};
use rustix::io::Errno;
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::bed::{Bed, attack_time, run, skipped, subtest, subtest_dir};
use crate::clock::Attack;
use crate::target::{connect, start, start_twice};

pub const ATTACKER: u32 = 21_011;
const GROUP: u32 = 21_012;
/// How long a race runs by default. Without the protection, each succeeded within 6 s.
const RACE_TIME: Duration = Duration::from_secs(6);

/// Makes this thread, and the threads that it starts, run as an ordinary user.
pub fn become_user(uid: u32, groups: &[u32]) {
    let groups: Vec<_> = groups.iter().copied().map(Gid::from_raw).collect();
    set_thread_groups(&groups).unwrap();
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_res_gid(group, group, group).unwrap();
    set_thread_res_uid(user, user, user).unwrap();
}

/// A mount for attacks; `None` without root, which is needed to run as two users.
pub fn root_bed() -> Option<Bed> {
    if_root(Bed::start)
}

/// Starts something if this is root.
fn if_root<T>(start: impl FnOnce() -> Option<T>) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        skipped("only root can be two users");
        return None;
    }
    start()
}

fn create_file(path: PathBuf, (uid, mode): (u32, u32), bytes: &[u8]) -> PathBuf {
    std::fs::write(&path, bytes).unwrap();
    // Changing the owner clears mode bits.
    chown(&path, Some(uid), Some(uid)).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

/// A folder of the attacker, also accessible below the root, with a file of root in it.
fn attacker_folder(bed: &Bed) -> PathBuf {
    let folder = bed.dir.join("root/owned");
    std::fs::create_dir(&folder).unwrap();
    create_file(folder.join("secret"), (0, 0o600), b"secret");
    chown(&folder, Some(ATTACKER), Some(ATTACKER)).unwrap();
    folder
}

/// The time limit of a race on a busy machine.
const RACE_LIMIT: Duration = Duration::from_secs(40);

/// Runs `disturb` concurrently with an attack. The attack calls its argument to pause and resume `disturb` around its
/// cleanup; the result is false once the time is over.
fn race(disturb: impl Fn() + Sync, mut attack: impl FnMut(&mut dyn FnMut() -> bool)) {
    let (quiet, wanted, over) = (Mutex::new(()), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                // The lock is not fair: the other thread might starve.
                while wanted.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                let _quiet = quiet.lock();
                disturb();
            }
        });
        let start = Instant::now();
        let mut guard = None;
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            attack(&mut || {
                // Nothing disturbs between a call and the next one.
                wanted.store(guard.is_none(), Ordering::Release);
                guard = if guard.is_some() { None } else { quiet.lock().ok() };
                wanted.store(false, Ordering::Release);
                start.elapsed() < attack_time(RACE_TIME)
            });
        }));
        over.store(true, Ordering::Release);
        drop(guard);
        ended.unwrap();
    });
}

/// Names the folder of the bed in which a race swaps names.
const SWAPPED_IN: &str = "ONEHOP_TEST_SWAPPED_IN";

/// Runs a test as a race. Names are swapped in `root`, below the mounts, or in `second`, through another mount.
fn run_race(name: &str, bed: &Bed, swapped_in: &str) {
    let mut program = subtest(name, bed);
    program.env(SWAPPED_IN, swapped_in);
    print!("{}", run(program));
}

/// In that process: the attacker's folder in which names are swapped.
fn swapped_in(dir: &Path) -> PathBuf {
    dir.join(std::env::var(SWAPPED_IN).unwrap()).join("owned")
}

fn rename(folder: &Path, from: &str, to: &str, flags: RenameFlags) -> bool {
    renameat_with(CWD, folder.join(from), CWD, folder.join(to), flags).is_ok()
}

/// Run by [`swapped_names_do_not_change_root_files`].
#[test]
fn swapper() {
    let Some(dir) = subtest_dir() else { return };
    let (below, through, swapped) = (dir.join("root/owned"), dir.join("mnt/owned"), swapped_in(&dir));
    let secret = std::fs::metadata(below.join("secret")).unwrap().ino();
    become_user(ATTACKER, &[]);
    let made = through.join("made");
    let (mut rounds, mut mode, start) = (0, 0o4755, Instant::now());
    race(
        || {
            rename(&swapped, "made", "secret", RenameFlags::EXCHANGE);
        },
        |phase| {
            loop {
                let held = File::options().read(true).write(true).create_new(true).mode(mode).open(&made);
                let _ = std::fs::set_permissions(&made, Permissions::from_mode(mode));
                let _ = chown(&made, None, Some(ATTACKER));
                let in_time = phase();
                for entry in std::fs::read_dir(&below).unwrap().flatten() {
                    let (name, found) = (entry.file_name(), entry.metadata().unwrap());
                    let wanted = if found.ino() == secret { 0 } else { ATTACKER };
                    assert_eq!(found.uid(), wanted, "{name:?} of mode {:o}", found.mode());
                    assert!(found.ino() != secret || found.mode() & 0o7777 == 0o600, "{:o}", found.mode());
                    if found.ino() != secret {
                        std::fs::remove_file(entry.path()).unwrap();
                    } else if name != "secret" {
                        std::fs::rename(entry.path(), below.join("secret")).unwrap();
                    }
                }
                match held {
                    Ok(_) => rounds += 1,
                    // A target refuses to create setuid files.
                    Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => mode = 0o755,
                    Err(_) => {}
                }
                phase();
                // A busy machine takes longer to create enough files.
                if !in_time && (rounds > 10 || start.elapsed() > RACE_LIMIT) {
                    break;
                }
            }
        },
    );
    println!("{rounds} files made");
    assert!(rounds > 10);
}

#[test]
fn swapped_names_do_not_change_root_files() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    attacker_folder(&bed);
    run_race("attacks::swapper", &bed, "root");
}

#[test]
fn swapped_names_do_not_change_root_files_of_a_target() {
    let _attack = Attack::begin();
    let Some((bed, _target, _)) = if_root(start) else { return };
    attacker_folder(&bed);
    run_race("attacks::swapper", &bed, "root");
}

/// Run by [`o_creat_does_not_open_other_users_files`].
#[test]
fn opener() {
    let Some(dir) = subtest_dir() else { return };
    let (below, through, swapped) = (dir.join("root/owned"), dir.join("mnt/owned"), swapped_in(&dir));
    let secret = std::fs::metadata(below.join("secret")).unwrap().ino();
    become_user(ATTACKER, &[]);
    let (mut rounds, mut tries, start) = (0, 0, Instant::now());
    // A new name each time: the kernel caches names for a second.
    let number = AtomicUsize::new(0);
    let name = || format!("made{}", number.load(Ordering::Acquire) % 10_000);
    race(
        || {
            let name = name();
            rename(&swapped, "secret", &name, RenameFlags::NOREPLACE);
            rename(&swapped, &name, "secret", RenameFlags::NOREPLACE);
        },
        |_| {
            // A busy machine takes longer to create enough files.
            while start.elapsed() < attack_time(RACE_TIME) || rounds <= 10 && start.elapsed() < RACE_LIMIT {
                let name = name();
                let mut options = File::options();
                options.read(true).write(true).create(true).truncate(tries % 2 == 1);
                tries += 1;
                if let Ok(file) = options.open(through.join(&name)) {
                    rounds += 1;
                    assert_ne!(file.metadata().unwrap().ino(), secret, "root's file is open");
                    // Renames do not replace a file, so the name still belongs to this one.
                    std::fs::remove_file(through.join(&name)).unwrap();
                }
                number.fetch_add(1, Ordering::AcqRel);
            }
        },
    );
    println!("{rounds} files opened in {tries} tries");
    assert!(rounds > 10);
}

#[test]
fn o_creat_does_not_open_other_users_files() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    check_o_creat(&bed, "root");
}

#[test]
fn o_creat_does_not_open_other_users_files_through_two_mounts() {
    let _attack = Attack::begin();
    let Some((bed, _target, second)) = if_root(start_twice) else { return };
    check_o_creat(&bed, "second");
    second.end().unwrap();
}

fn check_o_creat(bed: &Bed, swapped_in: &str) {
    let folder = attacker_folder(bed);
    run_race("attacks::opener", bed, swapped_in);
    assert_eq!(std::fs::read(folder.join("secret")).unwrap(), b"secret");
}

/// Run by [`writes_clear_setuid`]: writes to setuid programs in every way.
#[test]
fn writer() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let open = |name: &str| File::options().read(true).write(true).open(dir.join("mnt").join(name)).unwrap();
    crate::mixed_io::Writer::new(&dir, 4096).write(&open("ring"));
    std::io::Write::write_all(&mut open("call"), b"x").unwrap();
    open("cut").set_len(1).unwrap();
    rustix::fs::fallocate(open("room"), rustix::fs::FallocateFlags::empty(), 0, 8192).unwrap();
    File::options().write(true).truncate(true).open(dir.join("mnt/empty")).unwrap();
}

#[test]
fn writes_clear_setuid() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    let names = ["ring", "call", "cut", "room", "empty"];
    let files = names.map(|name| create_file(bed.dir.join("root").join(name), (0, 0o6777), b"program"));
    run(subtest("attacks::writer", &bed));
    let modes = files.map(|file| std::fs::metadata(file).unwrap().mode() & 0o7777);
    assert_eq!(modes, [0o777; 5]);
}

/// With files that all users may write, whether or not they could remove the capability themselves.
#[test]
fn writes_clear_capabilities() {
    let _attack = Attack::begin();
    const NAME: &str = "security.capability";
    // Revision 2, effective, CAP_CHOWN.
    let capability: Vec<u8> =
        [0x0200_0001_u32, 1, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    let Some(bed) = root_bed() else { return };
    let files = ["ring", "call", "cut", "room", "empty"].map(|name| {
        let file = create_file(bed.dir.join("root").join(name), (0, 0o666), b"program");
        rustix::fs::setxattr(&file, NAME, &capability, rustix::fs::XattrFlags::empty()).unwrap();
        file
    });
    run(subtest("attacks::writer", &bed));
    for file in files {
        let found = rustix::fs::getxattr(&file, NAME, &mut [0; 64]);
        assert_eq!(found, Err(Errno::NODATA), "{}", file.display());
    }
}

/// A file system for a bed's root, with 40 % of its blocks reserved for root. Unmounted on drop.
pub struct Disk(pub PathBuf);

impl Disk {
    pub fn mount(dir: &Path) -> Option<Self> {
        let (image, root) = (dir.join("image"), dir.join("root"));
        File::create(&image).unwrap().set_len(32 << 20).unwrap();
        let ran = |command: &mut std::process::Command| {
            command.output().is_ok_and(|output| output.status.success()).then_some(())
        };
        let made = ran(std::process::Command::new("mkfs.ext4").args(["-q", "-F", "-m", "40"]).arg(&image))
            .and_then(|()| {
                ran(std::process::Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&root))
            });
        if made.is_none() {
            skipped("there is no mkfs.ext4, or there are no loop devices");
        }
        made.map(|()| Self(root))
    }

    /// The state of its blocks.
    fn statvfs(&self) -> rustix::fs::StatVfs {
        rustix::fs::statvfs(&self.0).unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        let _ = std::fs::remove_dir_all(self.0.parent().unwrap());
    }
}

/// Run by [`reserved_blocks_stay_reserved`]: fills the disk in every way.
#[test]
fn filler() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let open = |name: &str| {
        let path = dir.join("mnt").join(name);
        File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap()
    };
    let full = |error: std::io::Error| assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    let mut call = open("call");
    while std::io::Write::write_all(&mut call, &vec![1; 1 << 20]).map_err(full).is_ok() {}
    while std::io::Write::write_all(&mut call, &[1; 4096]).map_err(full).is_ok() {}
    let flags = rustix::fs::FallocateFlags::empty();
    assert_eq!(rustix::fs::fallocate(open("room"), flags, 0, 4 << 20), Err(Errno::NOSPC));
    let written = crate::mixed_io::Writer::new(&dir, 4 << 20).write(&open("ring"));
    assert!(written < 1 << 20, "{written} bytes by a ring");
}

#[test]
fn reserved_blocks_stay_reserved() {
    let _attack = Attack::begin();
    let Some(bed) = if_root(|| Some(Bed::folder())) else { return };
    let Some(disk) = Disk::mount(&bed.dir) else { return };
    std::fs::set_permissions(&disk.0, Permissions::from_mode(0o777)).unwrap();
    let options = onehop_serve::MountOptions::new(&bed.mount(), &disk.0);
    let Some(bed) = bed.mounted(options) else { return };
    let before = disk.statvfs();
    let reserved = before.f_bfree - before.f_bavail;
    assert!(reserved * before.f_frsize > 8 << 20);
    run(subtest("attacks::filler", &bed));
    // Metadata may also take some reserved blocks.
    let left = disk.statvfs().f_bfree;
    assert!(left > reserved - reserved / 20, "{left} of {reserved} reserved blocks are left");
}

/// Run by [`executables_need_not_be_readable`].
#[test]
fn runner() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let program = dir.join("mnt/program");
    assert!(std::process::Command::new(&program).arg("0").status().unwrap().success());
    assert_eq!(File::open(&program).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
}

#[test]
fn executables_need_not_be_readable() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    let program = bed.dir.join("root/program");
    std::fs::copy("/bin/sleep", &program).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o711)).unwrap();
    run(subtest("attacks::runner", &bed));
}

/// Run by [`running_programs_cannot_be_written`].
#[test]
fn cutter() {
    let Some(dir) = subtest_dir() else { return };
    let program = dir.join("mnt/program");
    let mut running = std::process::Command::new(&program).arg("60").spawn().unwrap();
    // Each needs write access, although the last does not open for writing.
    for flags in [OFlags::WRONLY, OFlags::RDWR, OFlags::WRONLY | OFlags::TRUNC, OFlags::TRUNC] {
        let opened = rustix::fs::open(&program, flags, rustix::fs::Mode::empty());
        assert_eq!(opened.err(), Some(Errno::TXTBSY), "{flags:?}");
    }
    running.kill().unwrap();
    running.wait().unwrap();
}

#[test]
fn running_programs_cannot_be_written() {
    let _attack = Attack::begin();
    let check = |bed: &Bed| {
        let program = bed.dir.join("root/program");
        std::fs::copy("/bin/sleep", &program).unwrap();
        run(subtest("attacks::cutter", bed));
        assert!(std::fs::read(program).unwrap() == std::fs::read("/bin/sleep").unwrap());
    };
    let Some(bed) = Bed::start() else { return };
    check(&bed);
    let Some((bed, _target, _)) = crate::target::start() else { return };
    check(&bed);
}

/// Run by [`sparse_memory_does_not_exhaust_addresses`].
#[test]
fn mapper() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let name = || onehop_usrbio::Id::random().unwrap().to_string();
    let memory = Path::new("/dev/shm").join(format!("onehop-test-{}", name()));
    File::create(&memory).unwrap().set_len(3 << 40).unwrap();
    let link = |_| std::os::unix::fs::symlink(&memory, dir.join("mnt/3fs-virt/iovs").join(name()));
    let made: Vec<_> = (0..64).map(link).collect();
    std::fs::remove_file(&memory).unwrap();
    let code = |done: &std::io::Result<()>| done.as_ref().err().and_then(std::io::Error::raw_os_error);
    assert_eq!(code(&made[0]), None);
    let refused = Some(Errno::NOMEM.raw_os_error());
    assert!(made[1..].iter().all(|done| code(done) == refused), "{made:?}");
    // Other calls still work.
    assert_eq!(std::fs::read_dir(dir.join("mnt/folder")).unwrap().count(), 0);
}

#[test]
fn sparse_memory_does_not_exhaust_addresses() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    run(subtest("attacks::mapper", &bed));
    bed.until("its memory is gone", |report| report["buffers"] == 0);
    run(subtest("attacks::mapper", &bed));
}

const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const NAMED_GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

/// An access control list in Linux's format.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend([tag.to_le_bytes(), rights.to_le_bytes()].concat());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Lists that grant or deny the attacker what the mode alone would not.
fn acls() -> [(&'static str, u32, Vec<u8>); 5] {
    const UNDEFINED_ID: u32 = u32::MAX;
    let with = |named: (u16, u16, u32), others| {
        let [user, group] = [(USER_OBJ, 6, UNDEFINED_ID), (GROUP_OBJ, 0, UNDEFINED_ID)];
        let [mask, other] = [(MASK, 6, UNDEFINED_ID), (OTHER, others, UNDEFINED_ID)];
        let named_user = named.0 == USER;
        acl(&if named_user { [user, named, group, mask, other] } else { [user, group, named, mask, other] })
    };
    [
        ("granted", 0, with((USER, 6, ATTACKER), 0)),
        ("denied", 0, with((USER, 0, ATTACKER), 6)),
        ("granted-group", 0, with((NAMED_GROUP, 6, GROUP), 0)),
        ("denied-group", 0, with((NAMED_GROUP, 0, GROUP), 6)),
        // With a list, the group bits of the mode are the mask.
        ("masked", GROUP, with((USER, 6, ATTACKER + 1), 0)),
    ]
}

/// Run by [`access_control_lists_are_enforced`].
#[test]
fn acl_user() {
    let Some(dir) = subtest_dir() else { return };
    let mount = dir.join("mnt");
    become_user(ATTACKER, &[GROUP]);
    for (name, _, _) in acls() {
        let opened = File::options().read(true).write(true).open(mount.join(name));
        assert_eq!(opened.is_ok(), name.starts_with("granted"), "{name}: {opened:?}");
        assert!(opened.is_ok() || opened.unwrap_err().kind() == std::io::ErrorKind::PermissionDenied);
    }
    // A folder's default list replaces the umask for new files.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    File::create(mount.join("folder/file")).unwrap();
    File::create(mount.join("plain")).unwrap();
    std::fs::create_dir(mount.join("folder/inner")).unwrap();
}

#[test]
fn access_control_lists_are_enforced() {
    let _attack = Attack::begin();
    let Some(bed) = root_bed() else { return };
    check_acls(&bed);
}

#[test]
fn access_control_lists_of_a_target_are_enforced() {
    let _attack = Attack::begin();
    let Some((bed, _target, address)) = if_root(start) else { return };
    if !check_acls(&bed) {
        return;
    }
    // The mount's kernel has checked the lists. The target checks them for clients that do not.
    let tree = connect(address);
    let by = Caller { uid: ATTACKER, gid: ATTACKER, groups: vec![GROUP], umask: 0 };
    for (name, _, _) in acls() {
        let access = OpenMode { read: true, write: true, ..OpenMode::default() };
        let file = tree.lookup(ROOT, &Name::new(name.as_bytes()).unwrap(), &by).unwrap().node;
        let wanted = if name.starts_with("granted") { None } else { Some(Errno::ACCESS) };
        assert_eq!(tree.open(file, access, &by).err(), wanted, "{name}");
    }
}

/// Creates the files and has a user open them. Returns false if the file system has no lists.
fn check_acls(bed: &Bed) -> bool {
    let root = bed.dir.join("root");
    for (name, group, acl) in acls() {
        let file = create_file(root.join(name), (0, 0o600), b"");
        chown(&file, None, Some(group)).unwrap();
        match setxattr(&file, "system.posix_acl_access", &acl, XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                skipped("this file system has no access control lists");
                return false;
            }
            other => other.unwrap(),
        }
    }
    for folder in [root.clone(), root.join("folder")] {
        std::fs::set_permissions(folder, Permissions::from_mode(0o777)).unwrap();
    }
    let inherited = acl(&[(USER_OBJ, 7, u32::MAX), (GROUP_OBJ, 5, u32::MAX), (OTHER, 5, u32::MAX)]);
    setxattr(root.join("folder"), "system.posix_acl_default", &inherited, XattrFlags::empty()).unwrap();
    run(subtest("attacks::acl_user", bed));
    let mode = |path: &str| std::fs::metadata(root.join(path)).unwrap().mode() & 0o7777;
    assert_eq!(["folder/file", "plain", "folder/inner"].map(mode), [0o644, 0o600, 0o755]);
    let made = std::fs::metadata(root.join("plain")).unwrap();
    assert_eq!((made.uid(), made.gid()), (ATTACKER, ATTACKER));
    true
}
