//! Locks of byte ranges behave like the kernel's, and a user with the most ranges does not delay others.

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
use crate::bed::{Bed, LONG, run, skipped, subtest, subtest_dir, wait};
use crate::stalled::{missing_names_are_not_found, read_until};

const ANOTHER: u32 = ATTACKER + 2;
/// The limits on locked ranges, for a user and for an open file.
const MAX_RANGES: usize = 8192;
const MAX_RANGES_OF_FILE: u64 = 4096;
/// The limit on the median time of another user's calls. On an idle machine it is some 0.1 ms.
const LATENCY_LIMIT: Duration = Duration::from_millis(50);

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Locks or unlocks a range.
fn lock(file: &File, start: u64, end: u64, kind: Option<LockKind>) -> Result<bool, Option<i32>> {
    lock_range(file, LockRange { start, end }, kind).map_err(|error| error.errno())
}

/// Run by [`many_locked_ranges_do_not_delay_other_users`]: locks as many ranges of one file as a user may, and keeps
/// locking.
#[test]
fn locker() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let (shared, full) = (Some(LockKind::Shared), Err(Some(Errno::NOLCK.raw_os_error())));
    let [path, other] = ["locked", "other"].map(|name| dir.join("mnt/folder").join(name));
    let take = || {
        let file = open(&path);
        let taken = (0..).take_while(|at| lock(&file, 4 * at, 4 * at + 2, shared) == Ok(true)).count();
        (file, taken)
    };
    let files: Vec<_> = std::iter::repeat_with(take).take_while(|(_, taken)| *taken > 0).collect();
    assert_eq!(files.iter().map(|(_, taken)| taken).sum::<usize>(), MAX_RANGES);
    // Neither on another file, nor by splitting a range.
    assert_eq!(lock(&open(&other), 0, 0, shared), full);
    assert_eq!(lock(&files[0].0, 1, 1, None), full);
    println!("ready");
    std::io::stdout().flush().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (number, (file, _)) in (0..8).zip(files.iter().cycle()) {
            let is_over = &is_over;
            scope.spawn(move || {
                for at in (number..MAX_RANGES_OF_FILE).step_by(8).cycle() {
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
    // Released ranges can be locked again. The kernel reports closed files to the daemon later.
    drop(files);
    let (other, start) = (open(&other), Instant::now());
    while lock(&other, 0, 0, shared) != Ok(true) {
        assert!(start.elapsed() < LONG, "ranges of files that are closed still count");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Run by [`many_locked_ranges_do_not_delay_other_users`]: another user looks names up, and locks ranges of the same
/// file and of another.
#[test]
fn other_user() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ANOTHER, &[]);
    let folder = dir.join("mnt/folder");
    let files = ["locked", "other"].map(|name| open(&folder.join(name)));
    let mut took = [(); 3].map(|()| Vec::new());
    for _ in 0..50 {
        let start = Instant::now();
        assert!(missing_names_are_not_found(&folder));
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
    assert!(medians.iter().all(|median| *median < LATENCY_LIMIT), "{medians:?}");
}

#[test]
fn many_locked_ranges_do_not_delay_other_users() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    let Some(bed) = Bed::start() else { return };
    let folder = bed.dir.join("root/folder");
    for name in ["locked", "other"] {
        File::create(folder.join(name)).unwrap();
        std::fs::set_permissions(folder.join(name), Permissions::from_mode(0o666)).unwrap();
    }
    let mut locker = subtest("ranges::locker", &bed);
    let mut locker = locker.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    read_until(&mut locker, "ready");
    println!("{}", run(subtest("ranges::other_user", &bed)));
    assert!(locker.try_wait().unwrap().is_none());
    drop(locker.stdin.take());
    let ended = wait(locker);
    assert!(ended.status.success(), "{ended:?}");
}

/// Run by [`ranges_behave_like_the_kernel_s`]: three open files lock random ranges of a file through the mount, and the
/// same ranges of another file without it.
#[test]
fn random_locker() {
    let Some(dir) = subtest_dir() else { return };
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
fn ranges_behave_like_the_kernel_s() {
    let Some(bed) = Bed::start() else { return };
    for name in ["ours", "theirs"] {
        File::create(bed.dir.join("root/folder").join(name)).unwrap();
    }
    run(subtest("ranges::random_locker", &bed));
}
