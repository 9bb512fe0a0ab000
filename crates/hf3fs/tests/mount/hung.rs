//! A file system below the root that stops answering lock requests: other users must not wait for it.

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use onehop_os::locks::{LockKind, LockRange, lock_in_the_way, lock_range};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, LONG, run, skipped, subtest, subtest_dir, wait};
use crate::clock::Attack;
use crate::hung_fs::Mounted;
use crate::stalled::{missing_names_are_not_found, read_until};

const ANOTHER: u32 = ATTACKER + 2;
/// The number of calls that hang: more than the threads of a session.
const CALL_COUNT: usize = 8;
/// The kinds of calls.
const CALLS: [&str; 5] = ["lock", "ask", "unlock", "close", "wait"];
const CALL_VAR: &str = "ONEHOP_TEST_CALL";

/// Run by [`alone`]: locks or unlocks files of the hung file system.
#[test]
fn locker() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let call = std::env::var(CALL_VAR).unwrap();
    let low = LockRange { start: 0, end: 9 };
    let files = (0..CALL_COUNT).map(|number| File::open(dir.join(format!("mnt/stuck/{number}"))).unwrap());
    let files: Vec<_> = files.collect();
    match &*call {
        "unlock" => assert!(files.iter().all(|file| lock_range(file, low, Some(LockKind::Shared)).unwrap())),
        // These locks are released on close, which waits for it.
        "close" => {
            files.iter().for_each(|file| fcntl_lock(file, FlockOperation::NonBlockingLockShared).unwrap())
        }
        _ => {}
    }
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    std::thread::scope(|scope| {
        for file in files {
            scope.spawn(|| match &*call {
                "lock" => flock(file, FlockOperation::NonBlockingLockShared).unwrap(),
                "ask" => assert_eq!(lock_in_the_way(file, low, LockKind::Shared).unwrap(), None),
                "unlock" => assert!(lock_range(file, LockRange { end: 5, ..low }, None).unwrap()),
                "close" => drop(file),
                // Such locks are never granted.
                _ => flock(file, FlockOperation::LockExclusive).unwrap(),
            });
        }
        std::thread::sleep(Duration::from_secs(1));
        println!("waiting");
        std::io::stdout().flush().unwrap();
    });
}

/// Run by [`alone`]: another user looks names up, and locks files of the mount's own file system.
#[test]
fn other_user() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ANOTHER, &[]);
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    let folder = dir.join("mnt/folder");
    assert!(missing_names_are_not_found(&folder));
    let open =
        || File::options().read(true).write(true).create(true).truncate(false).open(folder.join("file"));
    let files = [open().unwrap(), open().unwrap()];
    flock(&files[0], FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(flock(&files[1], FlockOperation::NonBlockingLockShared), Err(Errno::AGAIN));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| flock(&files[1], FlockOperation::LockExclusive));
        std::thread::sleep(Duration::from_millis(100));
        flock(&files[0], FlockOperation::Unlock).unwrap();
        waits.join().unwrap().unwrap();
    });
    assert!(lock_in_the_way(&files[0], LockRange::WHOLE, LockKind::Shared).unwrap().is_some());
    drop(files);
    println!("went on");
}

/// More hung calls than a user's thread limit.
const CALLS_OF_ONE_USER: usize = 40;

/// Run by [`alone_with_one_user`]: a user with hung calls unlocks and closes other files.
#[test]
fn unlocker() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let (call, low) = (std::env::var(CALL_VAR).unwrap(), LockRange { start: 0, end: 9 });
    let hung =
        (0..CALLS_OF_ONE_USER).map(|number| File::open(dir.join(format!("mnt/stuck/{number}"))).unwrap());
    let hung: Vec<_> = hung.collect();
    if call == "unlock" {
        assert!(hung.iter().all(|file| lock_range(file, low, Some(LockKind::Shared)).unwrap()));
    }
    let open = |name: &str| {
        let path = dir.join("mnt/folder").join(name);
        File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    };
    let [whole, ranges, closed] = ["whole", "ranges", "closed"].map(open);
    flock(&whole, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(lock_range(&ranges, low, Some(LockKind::Exclusive)).unwrap());
    fcntl_lock(&closed, FlockOperation::NonBlockingLockExclusive).unwrap();
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    std::thread::scope(|scope| {
        let kind = (call == "lock").then_some(LockKind::Shared);
        for file in &hung {
            scope.spawn(move || assert!(lock_range(file, low, kind).unwrap()));
        }
        std::thread::sleep(Duration::from_secs(1));
        flock(&whole, FlockOperation::Unlock).unwrap();
        assert!(lock_range(&ranges, LockRange { end: 4, ..low }, None).unwrap());
        drop(closed);
        assert!(lock_range(&whole, low, Some(LockKind::Shared)).unwrap());
        println!("went on");
        std::io::stdout().flush().unwrap();
    });
}

/// Run by [`alone_with_closed_files`]: a user closes files of the hung file system, and then uses others.
#[test]
fn closer() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let hung =
        (0..CALLS_OF_ONE_USER).map(|number| File::open(dir.join(format!("mnt/stuck/{number}"))).unwrap());
    let hung: Vec<_> = hung.collect();
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    drop(hung);
    println!("closed");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    let file = dir.join("mnt/folder/file");
    for number in 0..8 {
        std::fs::write(&file, [number; 9000]).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), [number; 9000]);
    }
    std::fs::remove_file(file).unwrap();
    println!("went on");
    std::io::stdout().flush().unwrap();
}

#[test]
fn closing_hung_files_does_not_block_other_calls() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    run(subtest("hung::alone_with_closed_files", &Bed::folder()));
}

/// Run by the test above.
#[test]
fn alone_with_closed_files() {
    let Some((bed, stuck)) = with_stuck() else { return };
    let mut closer = subtest("hung::closer", &bed);
    let mut closer = closer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    read_until(&mut closer, "ready");
    stuck.gate.set(true);
    closer.stdin.as_mut().unwrap().write_all(b"!").unwrap();
    read_until(&mut closer, "closed");
    bed.until("the mount knows that they are closed", |report| report["open_files"] == 0);
    closer.stdin.as_mut().unwrap().write_all(b"!").unwrap();
    // By another thread, which waits forever if this fails.
    let (tx, rx) = channel();
    let went_on = std::thread::spawn(move || {
        read_until(&mut closer, "went on");
        tx.send(()).unwrap();
        closer
    });
    let went = rx.recv_timeout(LONG / 4);
    let hangs = stuck.gate.holds_a_request();
    stuck.gate.set(false);
    let ended = wait(went_on.join().unwrap());
    assert!(went.is_ok() && hangs, "the user's other calls wait (a request hangs: {hangs})");
    assert!(ended.status.success(), "{ended:?}");
}

/// In a child process: a mount, and a file system below its root that can hang.
fn with_stuck() -> Option<(Bed, Mounted)> {
    subtest_dir()?;
    let bed = Bed::start()?;
    let root = bed.dir.join("root");
    std::fs::set_permissions(root.join("folder"), Permissions::from_mode(0o777)).unwrap();
    let stuck = Mounted::new(&root.join("stuck"))?;
    Some((bed, stuck))
}

#[test]
fn unlocks_do_not_wait_for_a_hung_file_system() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    run(subtest("hung::alone_with_one_user", &Bed::folder()));
}

/// Run by the test above.
#[test]
fn alone_with_one_user() {
    let Some((bed, stuck)) = with_stuck() else { return };
    for call in ["lock", "unlock"] {
        let mut unlocker = subtest("hung::unlocker", &bed);
        unlocker.env(CALL_VAR, call).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut unlocker = unlocker.spawn().unwrap();
        read_until(&mut unlocker, "ready");
        stuck.locks.set(true);
        unlocker.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        // By another thread, which waits forever if this fails.
        let (tx, rx) = channel();
        let went_on = std::thread::spawn(move || {
            read_until(&mut unlocker, "went on");
            tx.send(()).unwrap();
            unlocker
        });
        let went = rx.recv_timeout(LONG / 4);
        let hangs = stuck.locks.holds_a_request();
        stuck.locks.set(false);
        let ended = wait(went_on.join().unwrap());
        assert!(went.is_ok() && hangs, "{call}: calls on the user's other files wait");
        assert!(ended.status.success(), "{call}: {ended:?}");
    }
}

/// In a separate process: programs that other tests start inherit this process's files for a moment, and would hang,
/// too.
#[test]
fn hung_locks_do_not_delay_other_users() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    run(subtest("hung::alone", &Bed::folder()));
}

/// Run by the test above.
#[test]
fn alone() {
    let Some((bed, stuck)) = with_stuck() else { return };
    for call in CALLS {
        let mut locker = subtest("hung::locker", &bed);
        locker.env(CALL_VAR, call).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut locker = locker.spawn().unwrap();
        read_until(&mut locker, "ready");
        // Before the file system hangs: a new program closes inherited files, which asks the file system.
        let mut other_user = subtest("hung::other_user", &bed);
        other_user.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other_user = other_user.spawn().unwrap();
        read_until(&mut other_user, "ready");
        stuck.locks.set(true);
        // Not by closing stdin: other programs may have inherited the pipe.
        locker.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        read_until(&mut locker, "waiting");
        let start = Instant::now();
        while !stuck.locks.holds_a_request() {
            assert!(start.elapsed() < LONG, "{call}: nothing hangs");
            std::thread::sleep(Duration::from_millis(2));
        }
        // By another thread, which waits forever if this fails.
        let (tx, rx) = channel();
        other_user.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        std::thread::spawn(move || {
            read_until(&mut other_user, "went on");
            tx.send(other_user.wait().unwrap())
        });
        let other = rx.recv_timeout(LONG / 4);
        let is_waiting = locker.try_wait().unwrap().is_none();
        stuck.locks.set(false);
        if call == "wait" {
            locker.kill().unwrap();
        }
        let ended = wait(locker);
        let other = other.unwrap_or_else(|_| panic!("{call}: another user waits, or fails"));
        assert!(other.success(), "{call}: {other:?}");
        assert!(is_waiting && (call == "wait" || ended.status.success()), "{call}: {ended:?}");
    }
}
