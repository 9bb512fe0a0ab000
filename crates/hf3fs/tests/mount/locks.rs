//! Locks exclude all users of a folder: through a mount, through a second mount, and without a mount.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use onehop_os::locks::{LockKind, LockRange, lock_in_the_way, lock_range};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

use crate::bed::{Bed, LONG, run, skipped, subtest, subtest_dir, wait};
use crate::coherence::mounted_twice;

fn open(dir: &Path, of: &str) -> File {
    File::options().read(true).write(true).open(dir.join(of).join("file.bin")).unwrap()
}

const PLACES: [&str; 3] = ["mnt", "second", "root"];
const EXCLUSIVE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
const SHARED: FlockOperation = FlockOperation::NonBlockingLockShared;

/// Run by [`two_mounts_and_the_folder_exclude_each_other`].
#[test]
fn locker() {
    let Some(dir) = subtest_dir() else { return };
    let files = PLACES.map(|of| open(&dir, of));
    let [first, second, _] = &files;
    type Call = fn(&File, FlockOperation) -> Result<(), Errno>;
    let calls: [Call; 2] = [|file, how| flock(file, how), |file, how| fcntl_lock(file, how)];
    for (by, call) in calls.iter().enumerate() {
        for (place, holder) in files.iter().enumerate() {
            call(holder, EXCLUSIVE).unwrap();
            for (other, file) in files.iter().enumerate().filter(|(other, _)| *other != place) {
                let ends = [EXCLUSIVE, SHARED].map(|how| call(file, how));
                assert_eq!(ends, [Err(Errno::AGAIN); 2], "{by}: {} before {}", PLACES[place], PLACES[other]);
            }
            call(holder, SHARED).unwrap();
            for file in &files {
                call(file, SHARED).unwrap();
            }
            assert_eq!(call(holder, EXCLUSIVE), Err(Errno::AGAIN));
            for file in &files {
                call(file, FlockOperation::NonBlockingUnlock).unwrap();
            }
        }
    }
    // Closing releases locks: the last descriptor for `flock`, any descriptor of the process for `fcntl`.
    let gone = open(&dir, "mnt");
    flock(&gone, EXCLUSIVE).unwrap();
    let again = gone.try_clone().unwrap();
    drop(gone);
    assert_eq!(flock(second, EXCLUSIVE), Err(Errno::AGAIN));
    drop(again);
    wait_until(|| flock(second, EXCLUSIVE).is_ok());
    flock(second, FlockOperation::Unlock).unwrap();
    fcntl_lock(first, EXCLUSIVE).unwrap();
    assert_eq!(fcntl_lock(second, EXCLUSIVE), Err(Errno::AGAIN));
    drop(open(&dir, "mnt"));
    fcntl_lock(second, EXCLUSIVE).unwrap();
    fcntl_lock(second, FlockOperation::Unlock).unwrap();
    ranges(&files);
    // `flock` also locks a file that is open for reading only.
    let readers = PLACES.map(|of| File::open(dir.join(of).join("file.bin")).unwrap());
    flock(&readers[0], EXCLUSIVE).unwrap();
    assert!(readers[1..].iter().all(|file| flock(file, SHARED) == Err(Errno::AGAIN)));
    assert_eq!(fcntl_lock(&readers[1], EXCLUSIVE), Err(Errno::BADF));
    flock(&readers[0], FlockOperation::Unlock).unwrap();
    readers_become_writers(&dir);
}

/// A process locks through a read descriptor and through a write one. Until it writes, the file can be executed.
fn readers_become_writers(dir: &Path) {
    let reader = File::open(dir.join("mnt/file.bin")).unwrap();
    let [writer, second] = ["mnt", "second"].map(|of| open(dir, of));
    fcntl_lock(&reader, SHARED).unwrap();
    fcntl_lock(&second, SHARED).unwrap();
    assert_eq!(fcntl_lock(&writer, EXCLUSIVE), Err(Errno::AGAIN));
    fcntl_lock(&second, FlockOperation::NonBlockingUnlock).unwrap();
    fcntl_lock(&writer, EXCLUSIVE).unwrap();
    assert_eq!(fcntl_lock(&second, SHARED), Err(Errno::AGAIN));
    fcntl_lock(&reader, FlockOperation::NonBlockingUnlock).unwrap();
    fcntl_lock(&second, EXCLUSIVE).unwrap();
    fcntl_lock(&second, FlockOperation::NonBlockingUnlock).unwrap();
    drop((reader, writer, second));

    let program = dir.join("root/program");
    std::fs::copy("/bin/true", &program).unwrap();
    let by_mount = File::open(dir.join("mnt/program")).unwrap();
    assert!(lock_range(&by_mount, LockRange { start: 0, end: 0 }, Some(LockKind::Shared)).unwrap());
    assert!(Command::new(&program).status().unwrap().success());
}

fn ranges(files: &[File; 3]) {
    let low = LockRange { start: 0, end: 99 };
    let high = LockRange { start: 100, end: i64::MAX as u64 };
    let middle = LockRange { start: 50, end: 149 };
    let set = |file: &File, range, kind| lock_range(file, range, kind).unwrap();
    for (holder, other) in [(0, 1), (1, 0), (0, 2), (2, 0)] {
        let (holder, other) = (&files[holder], &files[other]);
        assert!(set(holder, low, Some(LockKind::Exclusive)) && set(other, high, Some(LockKind::Exclusive)));
        assert!(!set(holder, middle, Some(LockKind::Shared)) && !set(other, middle, Some(LockKind::Shared)));
        let found = lock_in_the_way(other, middle, LockKind::Shared).unwrap();
        assert_eq!(found, Some((low, LockKind::Exclusive)));
        // The unlocked part is free, the rest is not.
        let part = LockRange { start: 50, end: 99 };
        assert!(set(holder, part, None) && set(other, part, Some(LockKind::Shared)));
        assert!(!set(other, LockRange { start: 49, end: 49 }, Some(LockKind::Shared)));
        for file in [holder, other] {
            assert!(set(file, LockRange::WHOLE, None));
        }
    }
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn two_mounts_and_the_folder_exclude_each_other() {
    let Some((bed, second)) = mounted_twice() else { return };
    run(subtest("locks::locker", &bed));
    second.end().unwrap();
}

/// Run by [`a_waiter_gets_the_lock_or_can_be_killed`]: waits for a lock.
#[test]
fn waiter() {
    let Some(dir) = subtest_dir() else { return };
    flock(open(&dir, "mnt"), FlockOperation::LockExclusive).unwrap();
    println!("locked");
}

/// Run by [`a_waiter_gets_the_lock_or_can_be_killed`].
#[test]
fn holder() {
    let Some(dir) = subtest_dir() else { return };
    let bed = Bed { dir: dir.clone(), daemon: None };
    for of in PLACES {
        let held = open(&dir, of);
        // The kernel reports the last close to the mount later.
        wait_until(|| flock(&held, EXCLUSIVE).is_ok());
        let mut killed = subtest("locks::waiter", &bed).spawn().unwrap();
        let waits = subtest("locks::waiter", &bed).stdout(std::process::Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert!(killed.try_wait().unwrap().is_none());
        killed.kill().unwrap();
        let start = Instant::now();
        assert_eq!(killed.wait().unwrap().signal(), Some(9));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(flock(open(&dir, "second"), EXCLUSIVE), Err(Errno::AGAIN));
        drop(held);
        let output = wait(waits);
        assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("locked"));
    }
    // The folder belongs to the test.
    std::mem::forget(bed);
}

#[test]
fn a_waiter_gets_the_lock_or_can_be_killed() {
    let Some((bed, second)) = mounted_twice() else { return };
    run(subtest("locks::holder", &bed));
    second.end().unwrap();
}

/// Two processes count in one database through one mount, so with the same caches. SQLite locks ranges.
#[test]
fn sqlite_loses_nothing() {
    let Some(bed) = Bed::start() else { return };
    if !Command::new("python3").args(["-c", "import sqlite3"]).status().is_ok_and(|status| status.success()) {
        return skipped("this Python has no sqlite3");
    }
    let script = "import sqlite3, sys\n\
                  db = sqlite3.connect(sys.argv[1], timeout=100, isolation_level=None)\n\
                  db.execute('create table if not exists t(n)')\n\
                  db.execute('insert into t select 0 where not exists (select * from t)')\n\
                  for _ in range(int(sys.argv[2])):\n    db.execute('begin immediate')\n    \
                  n, = db.execute('select n from t').fetchone()\n    db.execute('update t set n = ?', (n + 1,))\n    \
                  db.execute('commit')\n\
                  print(db.execute('select n from t').fetchone()[0])\n";
    let start = |times: &str| {
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(bed.mount().join("folder/db")).arg(times);
        python.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        python
    };
    run(start("0"));
    for child in [(); 2].map(|()| start("40").spawn().unwrap()) {
        let output = wait(child);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(run(start("0")), "80\n");
}
