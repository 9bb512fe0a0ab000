//! A file system below the root that does not answer calls that lock its files: nobody else waits for it.

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
use crate::bed::{Bed, LONG, part, part_of, run, skipped, wait};
use crate::clock::Attack;
use crate::hung_fs::Mounted;
use crate::stalled::{finds_nothing, until};

const ANOTHER: u32 = ATTACKER + 2;
/// Calls that hang: more than a session has threads.
const MANY: usize = 8;
/// What they are.
const CALLS: [&str; 5] = ["lock", "ask", "unlock", "close", "wait"];
const CALL: &str = "ONEHOP_TEST_CALL";

/// Run by [`alone`]: locks files of the file system that hangs, or unlocks them.
#[test]
fn locker() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &[]);
    let call = std::env::var(CALL).unwrap();
    let low = LockRange { start: 0, end: 9 };
    let files = (0..MANY).map(|number| File::open(dir.join(format!("mnt/stuck/{number}"))).unwrap());
    let files: Vec<_> = files.collect();
    match &*call {
        "unlock" => assert!(files.iter().all(|file| lock_range(file, low, Some(LockKind::Shared)).unwrap())),
        // These go when the process closes the file, which waits for that.
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
                // Nobody gets such a lock.
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
fn beside() {
    let Some(dir) = part_of() else { return };
    become_user(ANOTHER, &[]);
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    let folder = dir.join("mnt/folder");
    assert!(finds_nothing(&folder));
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

/// Calls of one user that hang: more than the threads that one user's calls hold.
const MANY_OF_ONE: usize = 40;

/// Run by [`alone_with_one_user`]: a user whose calls hang unlocks other files, and closes them.
#[test]
fn unlocker() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &[]);
    let (call, low) = (std::env::var(CALL).unwrap(), LockRange { start: 0, end: 9 });
    let hung = (0..MANY_OF_ONE).map(|number| File::open(dir.join(format!("mnt/stuck/{number}"))).unwrap());
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

/// Run by [`alone_with_closed_files`]: a user closes files of the file system that hangs, and then uses others.
#[test]
fn closer() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &[]);
    let hung = (0..MANY_OF_ONE).map(|number| File::open(dir.join(format!("mnt/stuck/{number}"))).unwrap());
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
fn closed_files_of_a_file_system_that_hangs_keep_no_call_waiting() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    run(part("hung::alone_with_closed_files", &Bed::folder()));
}

/// Run by the test above.
#[test]
fn alone_with_closed_files() {
    let Some((bed, stuck)) = with_stuck() else { return };
    let mut closer = part("hung::closer", &bed);
    let mut closer = closer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    until(&mut closer, "ready");
    stuck.gate.set(true);
    closer.stdin.as_mut().unwrap().write_all(b"!").unwrap();
    until(&mut closer, "closed");
    bed.until("the mount knows that they are closed", |report| report["open_files"] == 0);
    closer.stdin.as_mut().unwrap().write_all(b"!").unwrap();
    // By a thread that may wait for ever where this fails.
    let (say, said) = channel();
    let went_on = std::thread::spawn(move || {
        until(&mut closer, "went on");
        say.send(()).unwrap();
        closer
    });
    let went = said.recv_timeout(LONG / 4);
    let hangs = stuck.gate.holds_a_request();
    stuck.gate.set(false);
    let ended = wait(went_on.join().unwrap());
    assert!(went.is_ok() && hangs, "the user's other calls wait; something hangs: {hangs}");
    assert!(ended.status.success(), "{ended:?}");
}

/// For what a test runs: a mount, and below its root a file system that can hang.
fn with_stuck() -> Option<(Bed, Mounted)> {
    part_of()?;
    let bed = Bed::start()?;
    let root = bed.dir.join("root");
    std::fs::set_permissions(root.join("folder"), Permissions::from_mode(0o777)).unwrap();
    let stuck = Mounted::new(&root.join("stuck"))?;
    Some((bed, stuck))
}

#[test]
fn a_file_system_that_hangs_keeps_no_lock_of_another_from_being_given_up() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    run(part("hung::alone_with_one_user", &Bed::folder()));
}

/// Run by the test above.
#[test]
fn alone_with_one_user() {
    let Some((bed, stuck)) = with_stuck() else { return };
    for call in ["lock", "unlock"] {
        let mut unlocker = part("hung::unlocker", &bed);
        unlocker.env(CALL, call).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut unlocker = unlocker.spawn().unwrap();
        until(&mut unlocker, "ready");
        stuck.locks.set(true);
        unlocker.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        // By a thread that may wait for ever where this fails.
        let (say, said) = channel();
        let went_on = std::thread::spawn(move || {
            until(&mut unlocker, "went on");
            say.send(()).unwrap();
            unlocker
        });
        let went = said.recv_timeout(LONG / 4);
        let hangs = stuck.locks.holds_a_request();
        stuck.locks.set(false);
        let ended = wait(went_on.join().unwrap());
        assert!(went.is_ok() && hangs, "{call}: the user's other files wait");
        assert!(ended.status.success(), "{call}: {ended:?}");
    }
}

/// By a process that serves nothing else: programs that other tests begin have files of theirs as they begin, and would hang, too.
#[test]
fn locks_of_a_file_system_that_hangs_keep_nobody_else_waiting() {
    let _attack = Attack::begin();
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    run(part("hung::alone", &Bed::folder()));
}

/// Run by the test above.
#[test]
fn alone() {
    let Some((bed, stuck)) = with_stuck() else { return };
    for call in CALLS {
        let mut locker = part("hung::locker", &bed);
        locker.env(CALL, call).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut locker = locker.spawn().unwrap();
        until(&mut locker, "ready");
        // Before: a program that begins closes what it has of this process, where the file system is asked.
        let mut beside = part("hung::beside", &bed);
        beside.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut beside = beside.spawn().unwrap();
        until(&mut beside, "ready");
        stuck.locks.set(true);
        // Not by its end: programs that are about to begin may have the pipe, too.
        locker.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        until(&mut locker, "waiting");
        let start = Instant::now();
        while !stuck.locks.holds_a_request() {
            assert!(start.elapsed() < LONG, "{call}: nothing hangs");
            std::thread::sleep(Duration::from_millis(2));
        }
        // By a thread that may wait for ever where this fails.
        let (say, said) = channel();
        beside.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        std::thread::spawn(move || {
            until(&mut beside, "went on");
            say.send(beside.wait().unwrap())
        });
        let other = said.recv_timeout(LONG / 4);
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
