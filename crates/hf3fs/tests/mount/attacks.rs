//! Programs of an ordinary user who attacks the others of a mount: by swapping names, by files that are there already, by bits and lists
//! that give rights.

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

use crate::bed::{Bed, how_long, part, part_of, run, skipped};
use crate::clock::Attack;
use crate::target::{connect, start, start_twice};

pub const ATTACKER: u32 = 21_011;
const GROUP: u32 = 21_012;
/// How long a race is run, unless a person wants another time. Without protection each was won within a second or six.
const RACE: Duration = Duration::from_secs(6);

/// This thread, and those that it starts, are an ordinary user's from now on.
pub fn become_user(uid: u32, groups: &[u32]) {
    let groups: Vec<_> = groups.iter().copied().map(Gid::from_raw).collect();
    set_thread_groups(&groups).unwrap();
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_res_gid(group, group, group).unwrap();
    set_thread_res_uid(user, user, user).unwrap();
}

/// A mount for attacks; none where this is not root's, who alone can be two users.
pub fn attacked() -> Option<Bed> {
    as_two_users(Bed::start)
}

/// The same of what starts in another way.
fn as_two_users<T>(start: impl FnOnce() -> Option<T>) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        skipped("only root can be two users");
        return None;
    }
    start()
}

fn file_of(path: PathBuf, (uid, mode): (u32, u32), bytes: &[u8]) -> PathBuf {
    std::fs::write(&path, bytes).unwrap();
    // A change of owner takes bits away.
    chown(&path, Some(uid), Some(uid)).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

/// A folder of the attacker's, who reaches it below the root too, with a file of root's in it.
fn own_folder(bed: &Bed) -> PathBuf {
    let folder = bed.dir.join("root/owned");
    std::fs::create_dir(&folder).unwrap();
    file_of(folder.join("secret"), (0, 0o600), b"secret");
    chown(&folder, Some(ATTACKER), Some(ATTACKER)).unwrap();
    folder
}

/// Time limit of a race on a busy machine.
const BUSY: Duration = Duration::from_secs(40);

/// Attacks while something is done to names at the same time, and cleans up in between.
fn race(disturb: impl Fn() + Sync, mut attack: impl FnMut(&mut dyn FnMut() -> bool)) {
    let (quiet, wanted, over) = (Mutex::new(()), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                // A lock has no queue: the other might wait for many turns.
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
                start.elapsed() < how_long(RACE)
            });
        }));
        over.store(true, Ordering::Release);
        drop(guard);
        ended.unwrap();
    });
}

/// Tells the program of a race where in the bed names are swapped.
const SWAPPED_IN: &str = "ONEHOP_TEST_SWAPPED_IN";

/// Runs the program of a race. Names are swapped in `root`, past all mounts, or in `second`, through another mount.
fn run_race(name: &str, bed: &Bed, swapped_in: &str) {
    let mut program = part(name, bed);
    program.env(SWAPPED_IN, swapped_in);
    print!("{}", run(program));
}

/// In such a program: the attacker's folder where names are swapped.
fn swapped_in(dir: &Path) -> PathBuf {
    dir.join(std::env::var(SWAPPED_IN).unwrap()).join("owned")
}

fn rename(folder: &Path, from: &str, to: &str, flags: RenameFlags) -> bool {
    renameat_with(CWD, folder.join(from), CWD, folder.join(to), flags).is_ok()
}

/// Run by [`swapped_names_give_no_file_of_root_s_away`].
#[test]
fn swapper() {
    let Some(dir) = part_of() else { return };
    let (below, through, swapped) = (dir.join("root/owned"), dir.join("mnt/owned"), swapped_in(&dir));
    let secret = std::fs::metadata(below.join("secret")).unwrap().ino();
    become_user(ATTACKER, &[]);
    let made = through.join("made");
    let (mut rounds, mut mode, begun) = (0, 0o4755, Instant::now());
    race(
        || {
            rename(&swapped, "made", "secret", RenameFlags::EXCHANGE);
        },
        |phase| {
            loop {
                let held = File::options().read(true).write(true).create_new(true).mode(mode).open(&made);
                let _ = std::fs::set_permissions(&made, Permissions::from_mode(mode));
                let _ = chown(&made, None, Some(ATTACKER));
                let on = phase();
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
                    // A target makes no file that runs as its owner.
                    Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => mode = 0o755,
                    Err(_) => {}
                }
                phase();
                // A busy machine needs longer to make as many files.
                if !on && (rounds > 10 || begun.elapsed() > BUSY) {
                    break;
                }
            }
        },
    );
    println!("{rounds} files made");
    assert!(rounds > 10);
}

#[test]
fn swapped_names_give_no_file_of_root_s_away() {
    let _attack = Attack::begin();
    let Some(bed) = attacked() else { return };
    own_folder(&bed);
    run_race("attacks::swapper", &bed, "root");
}

#[test]
fn swapped_names_give_no_file_of_a_target_s_root_away() {
    let _attack = Attack::begin();
    let Some((bed, _target, _)) = as_two_users(start) else { return };
    own_folder(&bed);
    run_race("attacks::swapper", &bed, "root");
}

/// Run by [`files_of_others_are_not_opened_as_if_they_were_new`].
#[test]
fn opener() {
    let Some(dir) = part_of() else { return };
    let (below, through, swapped) = (dir.join("root/owned"), dir.join("mnt/owned"), swapped_in(&dir));
    let secret = std::fs::metadata(below.join("secret")).unwrap().ino();
    become_user(ATTACKER, &[]);
    let (mut rounds, mut tries, begun) = (0, 0, Instant::now());
    // Another name each time: for a second the kernel knows what the last ones were.
    let number = AtomicUsize::new(0);
    let name = || format!("made{}", number.load(Ordering::Acquire) % 10_000);
    race(
        || {
            let name = name();
            rename(&swapped, "secret", &name, RenameFlags::NOREPLACE);
            rename(&swapped, &name, "secret", RenameFlags::NOREPLACE);
        },
        |_| {
            // A busy machine needs longer to make as many files.
            while begun.elapsed() < how_long(RACE) || rounds <= 10 && begun.elapsed() < BUSY {
                let name = name();
                let mut options = File::options();
                options.read(true).write(true).create(true).truncate(tries % 2 == 1);
                tries += 1;
                if let Ok(file) = options.open(through.join(&name)) {
                    rounds += 1;
                    assert_ne!(file.metadata().unwrap().ino(), secret, "root's file is open");
                    // Nothing is renamed to a name that is there, so it is still this file's.
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
fn files_of_others_are_not_opened_as_if_they_were_new() {
    let _attack = Attack::begin();
    let Some(bed) = attacked() else { return };
    others_are_not_opened(&bed, "root");
}

#[test]
fn files_of_others_are_not_opened_through_two_mounts_of_a_target() {
    let _attack = Attack::begin();
    let Some((bed, _target, second)) = as_two_users(start_twice) else { return };
    others_are_not_opened(&bed, "second");
    second.end().unwrap();
}

fn others_are_not_opened(bed: &Bed, swapped_in: &str) {
    let folder = own_folder(bed);
    run_race("attacks::opener", bed, swapped_in);
    assert_eq!(std::fs::read(folder.join("secret")).unwrap(), b"secret");
}

/// Run by [`writes_take_rights_away`]: writes to programs that run as somebody else, in all ways.
#[test]
fn writer() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &[]);
    let open = |name: &str| File::options().read(true).write(true).open(dir.join("mnt").join(name)).unwrap();
    crate::beside::Writer::new(&dir, 4096).write(&open("ring"));
    std::io::Write::write_all(&mut open("call"), b"x").unwrap();
    open("cut").set_len(1).unwrap();
    rustix::fs::fallocate(open("room"), rustix::fs::FallocateFlags::empty(), 0, 8192).unwrap();
    File::options().write(true).truncate(true).open(dir.join("mnt/empty")).unwrap();
}

#[test]
fn writes_take_rights_away() {
    let _attack = Attack::begin();
    let Some(bed) = attacked() else { return };
    let names = ["ring", "call", "cut", "room", "empty"];
    let files = names.map(|name| file_of(bed.dir.join("root").join(name), (0, 0o6777), b"program"));
    run(part("attacks::writer", &bed));
    let modes = files.map(|file| std::fs::metadata(file).unwrap().mode() & 0o7777);
    assert_eq!(modes, [0o777; 5]);
}

/// Of files that anybody may write, whether or not they could take it away themselves.
#[test]
fn writes_take_capabilities_away() {
    let _attack = Attack::begin();
    const NAME: &str = "security.capability";
    // Revision 2, effective, CAP_CHOWN.
    let capability: Vec<u8> =
        [0x0200_0001_u32, 1, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    let Some(bed) = attacked() else { return };
    let files = ["ring", "call", "cut", "room", "empty"].map(|name| {
        let file = file_of(bed.dir.join("root").join(name), (0, 0o666), b"program");
        rustix::fs::setxattr(&file, NAME, &capability, rustix::fs::XattrFlags::empty()).unwrap();
        file
    });
    run(part("attacks::writer", &bed));
    for file in files {
        let found = rustix::fs::getxattr(&file, NAME, &mut [0; 64]);
        assert_eq!(found, Err(Errno::NODATA), "{}", file.display());
    }
}

/// A file system of its own for a bed's root, of which 2 parts in 5 are root's alone. It goes with the value.
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

    /// Blocks that nobody uses.
    fn free(&self) -> rustix::fs::StatVfs {
        rustix::fs::statvfs(&self.0).unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        let _ = std::fs::remove_dir_all(self.0.parent().unwrap());
    }
}

/// Run by [`blocks_that_are_reserved_stay_root_s`]: takes all that there is, in all ways.
#[test]
fn filler() {
    let Some(dir) = part_of() else { return };
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
    let written = crate::beside::Writer::new(&dir, 4 << 20).write(&open("ring"));
    assert!(written < 1 << 20, "{written} bytes by a ring");
}

#[test]
fn blocks_that_are_reserved_stay_root_s() {
    let _attack = Attack::begin();
    let Some(bed) = as_two_users(|| Some(Bed::folder())) else { return };
    let Some(disk) = Disk::mount(&bed.dir) else { return };
    std::fs::set_permissions(&disk.0, Permissions::from_mode(0o777)).unwrap();
    let options = onehop_serve::MountOptions::new(&bed.mount(), &disk.0);
    let Some(bed) = bed.mounted(options) else { return };
    let before = disk.free();
    let reserved = before.f_bfree - before.f_bavail;
    assert!(reserved * before.f_frsize > 8 << 20);
    run(part("attacks::filler", &bed));
    // Some blocks hold what is known of files, for which the file system takes what it needs.
    let left = disk.free().f_bfree;
    assert!(left > reserved - reserved / 20, "{left} of {reserved} reserved blocks are left");
}

/// Run by [`programs_may_be_run_that_may_not_be_read`].
#[test]
fn runner() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &[]);
    let program = dir.join("mnt/program");
    assert!(std::process::Command::new(&program).arg("0").status().unwrap().success());
    assert_eq!(File::open(&program).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
}

#[test]
fn programs_may_be_run_that_may_not_be_read() {
    let _attack = Attack::begin();
    let Some(bed) = attacked() else { return };
    let program = bed.dir.join("root/program");
    std::fs::copy("/bin/sleep", &program).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o711)).unwrap();
    run(part("attacks::runner", &bed));
}

/// Run by [`programs_that_run_are_not_cut_short`].
#[test]
fn cutter() {
    let Some(dir) = part_of() else { return };
    let program = dir.join("mnt/program");
    let mut running = std::process::Command::new(&program).arg("60").spawn().unwrap();
    // Each needs the right to write; the last is not opened to be written.
    for flags in [OFlags::WRONLY, OFlags::RDWR, OFlags::WRONLY | OFlags::TRUNC, OFlags::TRUNC] {
        let opened = rustix::fs::open(&program, flags, rustix::fs::Mode::empty());
        assert_eq!(opened.err(), Some(Errno::TXTBSY), "{flags:?}");
    }
    running.kill().unwrap();
    running.wait().unwrap();
}

#[test]
fn programs_that_run_are_not_cut_short() {
    let _attack = Attack::begin();
    let check = |bed: &Bed| {
        let program = bed.dir.join("root/program");
        std::fs::copy("/bin/sleep", &program).unwrap();
        run(part("attacks::cutter", bed));
        assert!(std::fs::read(program).unwrap() == std::fs::read("/bin/sleep").unwrap());
    };
    let Some(bed) = Bed::start() else { return };
    check(&bed);
    let Some((bed, _target, _)) = crate::target::start() else { return };
    check(&bed);
}

/// Run by [`memory_with_holes_takes_no_addresses_from_others`].
#[test]
fn mapper() {
    let Some(dir) = part_of() else { return };
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
    // What else is asked for is had.
    assert_eq!(std::fs::read_dir(dir.join("mnt/folder")).unwrap().count(), 0);
}

#[test]
fn memory_with_holes_takes_no_addresses_from_others() {
    let _attack = Attack::begin();
    let Some(bed) = attacked() else { return };
    run(part("attacks::mapper", &bed));
    bed.until("its memory is gone", |report| report["buffers"] == 0);
    run(part("attacks::mapper", &bed));
}

const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const NAMED_GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

/// An access control list as Linux keeps it.
fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend([tag.to_le_bytes(), rights.to_le_bytes()].concat());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Lists that give the attacker, or take away, what the mode alone would not.
fn lists() -> [(&'static str, u32, Vec<u8>); 5] {
    const NOBODY: u32 = u32::MAX;
    let with = |named: (u16, u16, u32), others| {
        let [user, group] = [(USER_OBJ, 6, NOBODY), (GROUP_OBJ, 0, NOBODY)];
        let [mask, other] = [(MASK, 6, NOBODY), (OTHER, others, NOBODY)];
        let named_user = named.0 == USER;
        list(&if named_user { [user, named, group, mask, other] } else { [user, group, named, mask, other] })
    };
    [
        ("granted", 0, with((USER, 6, ATTACKER), 0)),
        ("denied", 0, with((USER, 0, ATTACKER), 6)),
        ("granted-group", 0, with((NAMED_GROUP, 6, GROUP), 0)),
        ("denied-group", 0, with((NAMED_GROUP, 0, GROUP), 6)),
        // The mask stands where a mode has the group's rights.
        ("masked", GROUP, with((USER, 6, ATTACKER + 1), 0)),
    ]
}

/// Run by [`access_control_lists_hold`].
#[test]
fn listed() {
    let Some(dir) = part_of() else { return };
    let mount = dir.join("mnt");
    become_user(ATTACKER, &[GROUP]);
    for (name, _, _) in lists() {
        let opened = File::options().read(true).write(true).open(mount.join(name));
        assert_eq!(opened.is_ok(), name.starts_with("granted"), "{name}: {opened:?}");
        assert!(opened.is_ok() || opened.unwrap_err().kind() == std::io::ErrorKind::PermissionDenied);
    }
    // A folder's list for what is made in it takes the umask's place.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    File::create(mount.join("folder/file")).unwrap();
    File::create(mount.join("plain")).unwrap();
    std::fs::create_dir(mount.join("folder/inner")).unwrap();
}

#[test]
fn access_control_lists_hold() {
    let _attack = Attack::begin();
    let Some(bed) = attacked() else { return };
    lists_hold(&bed);
}

#[test]
fn access_control_lists_of_a_target_hold() {
    let _attack = Attack::begin();
    let Some((bed, _target, address)) = as_two_users(start) else { return };
    if !lists_hold(&bed) {
        return;
    }
    // The mount's kernel has checked the lists. The target checks them for one that does not.
    let tree = connect(address);
    let by = Caller { uid: ATTACKER, gid: ATTACKER, groups: vec![GROUP], umask: 0 };
    for (name, _, _) in lists() {
        let access = OpenMode { read: true, write: true, ..OpenMode::default() };
        let file = tree.lookup(ROOT, &Name::new(name.as_bytes()).unwrap(), &by).unwrap().node;
        let wanted = if name.starts_with("granted") { None } else { Some(Errno::ACCESS) };
        assert_eq!(tree.open(file, access, &by).err(), wanted, "{name}");
    }
}

/// Makes the files, and has a user try them; not where there can be no lists.
fn lists_hold(bed: &Bed) -> bool {
    let root = bed.dir.join("root");
    for (name, group, list) in lists() {
        let file = file_of(root.join(name), (0, 0o600), b"");
        chown(&file, None, Some(group)).unwrap();
        match setxattr(&file, "system.posix_acl_access", &list, XattrFlags::empty()) {
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
    let inherited = list(&[(USER_OBJ, 7, u32::MAX), (GROUP_OBJ, 5, u32::MAX), (OTHER, 5, u32::MAX)]);
    setxattr(root.join("folder"), "system.posix_acl_default", &inherited, XattrFlags::empty()).unwrap();
    run(part("attacks::listed", bed));
    let mode = |path: &str| std::fs::metadata(root.join(path)).unwrap().mode() & 0o7777;
    assert_eq!(["folder/file", "plain", "folder/inner"].map(mode), [0o644, 0o600, 0o755]);
    let made = std::fs::metadata(root.join("plain")).unwrap();
    assert_eq!((made.uid(), made.gid()), (ATTACKER, ATTACKER));
    true
}
