//! Locks of byte ranges: they hold as the kernel's do, and a user who has all that are allowed keeps nobody else waiting.

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onehop_os::locks::{LockKind, LockRange, lock_in_the_way, lock_range};
use rustix::io::Errno;

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, LONG, part, part_of, run, skipped, wait};
use crate::stalled::{finds_nothing, until};

const ANOTHER: u32 = ATTACKER + 2;
/// Ranges that a user may have locked, and those of one open file.
const MOST: usize = 8192;
const MOST_OF_ONE: u64 = 4096;
/// What half of another user's calls take at most beside that. It is some 0.1 ms where the machine has nothing else to do.
const BOUND: Duration = Duration::from_millis(50);

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Locks, or unlocks; the error where there is one.
fn lock(file: &File, start: u64, end: u64, kind: Option<LockKind>) -> Result<bool, Option<i32>> {
    lock_range(file, LockRange { start, end }, kind).map_err(|error| error.errno())
}

/// Run by [`all_the_ranges_of_a_user_keep_nobody_waiting`]: takes all ranges of one file that there are for a user, and goes on
/// locking.
#[test]
fn locker() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &[]);
    let (shared, full) = (Some(LockKind::Shared), Err(Some(Errno::NOLCK.raw_os_error())));
    let [path, other] = ["locked", "other"].map(|name| dir.join("mnt/folder").join(name));
    let take = || {
        let file = open(&path);
        let taken = (0..).take_while(|at| lock(&file, 4 * at, 4 * at + 2, shared) == Ok(true)).count();
        (file, taken)
    };
    let files: Vec<_> = std::iter::repeat_with(take).take_while(|(_, taken)| *taken > 0).collect();
    assert_eq!(files.iter().map(|(_, taken)| taken).sum::<usize>(), MOST);
    // On no file, and not by a lock that is cut in two.
    assert_eq!(lock(&open(&other), 0, 0, shared), full);
    assert_eq!(lock(&files[0].0, 1, 1, None), full);
    println!("ready");
    std::io::stdout().flush().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (number, (file, _)) in (0..8).zip(files.iter().cycle()) {
            let is_over = &is_over;
            scope.spawn(move || {
                for at in (number..MOST_OF_ONE).step_by(8).cycle() {
                    if is_over.load(Ordering::Acquire) {
                        return;
                    }
                    assert_eq!(lock(file, 4 * at, 4 * at + 2, shared), Ok(true));
                }
            });
        }
        let _ = std::io::stdin().read(&mut [0]);
        is_over.store(true, Ordering::Release);
    });
    // What is given up can be had again. The kernel does not wait until the daemon knows that a file is closed.
    drop(files);
    let (other, start) = (open(&other), Instant::now());
    while lock(&other, 0, 0, shared) != Ok(true) {
        assert!(start.elapsed() < LONG, "ranges of files that are closed still count");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Run by the same: another user looks names up, and locks ranges of a file of its own and of the one with all those locks.
#[test]
fn beside() {
    let Some(dir) = part_of() else { return };
    become_user(ANOTHER, &[]);
    let folder = dir.join("mnt/folder");
    let files = ["locked", "other"].map(|name| open(&folder.join(name)));
    let mut took = [(); 3].map(|()| Vec::new());
    for _ in 0..50 {
        let start = Instant::now();
        assert!(finds_nothing(&folder));
        took[0].push(start.elapsed() / 100);
        for (file, took) in files.iter().zip(&mut took[1..]) {
            let start = Instant::now();
            assert_eq!(lock(file, 1 << 20, 1 << 20, Some(LockKind::Exclusive)), Ok(true));
            assert_eq!(lock(file, 1 << 20, 1 << 20, None), Ok(true));
            took.push(start.elapsed());
        }
    }
    let medians = took.map(|mut took| {
        took.sort();
        took[took.len() / 2]
    });
    println!("a lookup, and locks of two files: {medians:?}");
    assert!(medians.iter().all(|median| *median < BOUND), "{medians:?}");
}

#[test]
fn all_the_ranges_of_a_user_keep_nobody_waiting() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    let Some(bed) = Bed::start() else { return };
    let folder = bed.dir.join("root/folder");
    for name in ["locked", "other"] {
        File::create(folder.join(name)).unwrap();
        std::fs::set_permissions(folder.join(name), Permissions::from_mode(0o666)).unwrap();
    }
    let mut locker = part("ranges::locker", &bed);
    let mut locker = locker.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    until(&mut locker, "ready");
    println!("{}", run(part("ranges::beside", &bed)));
    assert!(locker.try_wait().unwrap().is_none());
    drop(locker.stdin.take());
    let ended = wait(locker);
    assert!(ended.status.success(), "{ended:?}");
}

/// Run by [`ranges_of_a_mount_are_those_of_the_kernel`]: three open files lock ranges of a file at random, by the mount and, of another
/// file, without it.
#[test]
fn thrower() {
    let Some(dir) = part_of() else { return };
    let [ours, theirs] = ["mnt/folder/ours", "root/folder/theirs"].map(|name| dir.join(name));
    let owners = [(); 3].map(|()| [&ours, &theirs].map(|path| open(path)));
    let seen_by = [&ours, &theirs].map(|path| open(path));
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut dice = |sides: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % sides
    };
    let end = LockRange::WHOLE.end;
    for turn in 0..2000 {
        let start = dice(12);
        let range = match dice(9) {
            0..2 => LockRange::WHOLE,
            2 => LockRange { start, end },
            _ => LockRange { start, end: start + dice(6) },
        };
        let kind = [None, Some(LockKind::Shared), Some(LockKind::Exclusive)][dice(3) as usize];
        let owner = &owners[dice(3) as usize];
        let done = owner.each_ref().map(|file| lock(file, range.start, range.end, kind));
        assert_eq!(done[0], done[1], "{turn}: {range:?} {kind:?}");
        let (at, kind) = (dice(18), [LockKind::Shared, LockKind::Exclusive][dice(2) as usize]);
        let asked = LockRange { start: at, end: at };
        let found = seen_by.each_ref().map(|file| lock_in_the_way(file, asked, kind).unwrap());
        assert_eq!(found[0], found[1], "{turn}: {asked:?} {kind:?}");
    }
}

#[test]
fn ranges_of_a_mount_are_those_of_the_kernel() {
    let Some(bed) = Bed::start() else { return };
    for name in ["ours", "theirs"] {
        File::create(bed.dir.join("root/folder").join(name)).unwrap();
    }
    run(part("ranges::thrower", &bed));
}
