//! Two mounts of one folder: a lock makes writes visible to its next owner, and close makes them visible to the next
//! open.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_serve::{Daemon, MountOptions};

use crate::bed::{Bed, run, skipped, subtest, subtest_dir, top, wait};
use crate::target::start_twice;

/// A bed whose folder is mounted twice.
pub fn mounted_twice() -> Option<(Bed, Daemon)> {
    let bed = Bed::start()?;
    let second = bed.dir.join("second");
    std::fs::create_dir(&second).unwrap();
    let daemon = Daemon::start(MountOptions::new(&second, &bed.dir.join("root"))).unwrap();
    Some((bed, daemon))
}

fn is_installed(program: &str, arguments: &[&str]) -> bool {
    let found = Command::new(program).args(arguments).stdout(Stdio::null()).status();
    if !found.as_ref().is_ok_and(|status| status.success()) {
        skipped(&format!("{program} {arguments:?}: {found:?}"));
        return false;
    }
    true
}

fn expect_success(child: Child) {
    let output = wait(child);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn locks_make_writes_visible() {
    let Some((bed, second)) = mounted_twice() else { return };
    if !is_installed("python3", &["--version"]) {
        return;
    }
    const TURNS: u64 = 300;
    for kind in ["fcntl", "flock", "ofd"] {
        let below = bed.dir.join("root").join(kind);
        std::fs::write(&below, [0; 8192]).unwrap();
        let children = ["mnt", "second", "root"].map(|of| {
            let mut python = Command::new("python3");
            python.arg(top().join("crates/hf3fs/tests/programs/counters.py"));
            python.arg(bed.dir.join(of).join(kind)).args([kind, &TURNS.to_string()]);
            python.stderr(Stdio::piped()).spawn().unwrap()
        });
        children.into_iter().for_each(expect_success);
        let bytes = std::fs::read(below).unwrap();
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!([number(0), number(4096), bytes.len() as u64 - 8192], [3 * TURNS; 3], "{kind}");
    }
    second.end().unwrap();
}

/// Run by [`appends_of_two_mounts_are_atomic`].
#[test]
fn appenders() {
    let Some(dir) = subtest_dir() else { return };
    std::thread::scope(|scope| {
        for (of, letter) in [("mnt", b'a'), ("second", b'b')] {
            let file = File::options().append(true).create(true).open(dir.join(of).join("log")).unwrap();
            // Not a multiple of the page size, so that most records span pages.
            let mut record = [letter; RECORD];
            record[RECORD - 1] = b'\n';
            scope.spawn(move || {
                (0..RECORDS).for_each(|_| assert_eq!((&file).write(&record).unwrap(), RECORD))
            });
        }
    });
}

const RECORD: usize = 5000;
const RECORDS: usize = 1500;

#[test]
fn appends_of_two_mounts_are_atomic() {
    let Some((bed, second)) = mounted_twice() else { return };
    assert!(run(subtest("coherence::appenders", &bed)).contains("1 passed"));
    let log = std::fs::read(bed.dir.join("root/log")).unwrap();
    assert_eq!(log.len(), 2 * RECORDS * RECORD);
    let is_whole = |record: &[u8]| {
        let (end, letters) = record.split_last().unwrap();
        *end == b'\n' && letters.iter().all(|letter| *letter == record[0])
    };
    let torn = log.chunks(RECORD).filter(|record| !is_whole(record)).count();
    assert_eq!(torn, 0, "of {} records", 2 * RECORDS);
    second.end().unwrap();
}

#[test]
fn sqlite_loses_nothing_across_two_mounts() {
    let Some((bed, second)) = mounted_twice() else { return };
    if !is_installed("sqlite3", &["--version"]) {
        return;
    }
    const TRANSACTIONS: usize = 500;
    let sqlite = |path: &Path, input: &str| {
        let mut shell = Command::new("sqlite3");
        // Without syncs, which do not affect the journal's contents, transactions overlap more.
        shell.args(["-bail", "-cmd", ".timeout 100000", "-cmd", "PRAGMA synchronous=OFF;"]).arg(path);
        let mut child =
            shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child
    };
    let one = "BEGIN IMMEDIATE; UPDATE t SET n = n + 1; INSERT INTO log VALUES(randomblob(300)); COMMIT;\n";
    for mode in ["DELETE", "TRUNCATE", "PERSIST"] {
        let [near, far] = ["mnt", "second"].map(|of| bed.dir.join(of).join(format!("{mode}.db")));
        let begin = format!(
            "PRAGMA journal_mode={mode}; CREATE TABLE t(n); CREATE TABLE log(b); INSERT INTO t VALUES(0);"
        );
        expect_success(sqlite(&near, &begin));
        let work = format!("PRAGMA journal_mode={mode};\n{}", one.repeat(TRANSACTIONS));
        [&near, &far].map(|path| sqlite(path, &work)).into_iter().for_each(expect_success);
        for path in [&near, &far] {
            let query = "PRAGMA integrity_check; SELECT n FROM t; SELECT count(*) FROM log;";
            let stdout = wait(sqlite(path, query)).stdout;
            let wanted = format!("ok\n{0}\n{0}\n", 2 * TRANSACTIONS);
            assert_eq!(String::from_utf8_lossy(&stdout), wanted, "{mode}");
        }
    }
    second.end().unwrap();
}

/// Run by the tests below: what one mount has closed, the other sees at the next open.
#[test]
fn reader_after_close() {
    let Some(dir) = subtest_dir() else { return };
    let [near, far] = ["mnt", "second"].map(|of| dir.join(of).join("closed"));
    for turn in 1..30_usize {
        let text = "z".repeat(turn * turn);
        std::fs::write(&near, &text).unwrap();
        let mut file = File::open(&far).unwrap();
        assert_eq!(file.metadata().unwrap().len(), text.len() as u64);
        let mut seen = String::new();
        file.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, text);
        // Again with the same length.
        let text = text.replace('z', "y");
        std::fs::write(&near, &text).unwrap();
        drop(File::open(&far).unwrap());
        seen.clear();
        file.rewind().unwrap();
        file.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, text);
    }
}

/// Run by [`removed_names_cannot_be_opened`].
#[test]
fn opener_after_removal() {
    let Some(dir) = subtest_dir() else { return };
    let [near, far] = ["mnt", "second"].map(|of| dir.join(of).join("removed"));
    for turn in 0..30 {
        let text = turn.to_string();
        std::fs::write(&near, &text).unwrap();
        assert_eq!(std::fs::read_to_string(&far).unwrap(), text);
        let held = (turn % 4 < 2).then(|| File::open(&far).unwrap());
        std::fs::remove_file(&near).unwrap();
        if turn % 2 == 0 {
            assert_eq!(File::open(&far).unwrap_err().kind(), ErrorKind::NotFound);
        }
        if let Some(file) = held {
            let again = format!("/proc/self/fd/{}", file.as_raw_fd());
            assert_eq!(std::fs::read_to_string(again).unwrap(), text);
        }
    }
    // Two names of a file that is held, both cached there.
    let [linked, far_linked] = [&near, &far].map(|name| name.with_file_name("linked"));
    std::fs::write(&near, "twice").unwrap();
    std::fs::hard_link(&near, &linked).unwrap();
    let held = File::open(&far).unwrap();
    drop(File::open(&far_linked).unwrap());
    [&near, &linked].into_iter().for_each(|name| std::fs::remove_file(name).unwrap());
    for name in [&far, &far_linked, &far] {
        assert_eq!(File::open(name).unwrap_err().kind(), ErrorKind::NotFound);
    }
    drop(held);
    // An open file without a name can be opened again.
    std::fs::write(&near, "held").unwrap();
    let held = File::open(&near).unwrap();
    std::fs::remove_file(&near).unwrap();
    let again = format!("/proc/self/fd/{}", held.as_raw_fd());
    assert_eq!(std::fs::read_to_string(&again).unwrap(), "held");
    // Also by a path through the mount.
    let link = near.with_file_name("link");
    std::os::unix::fs::symlink(again, &link).unwrap();
    for _ in 0..4 {
        assert_eq!(std::fs::read_to_string(&link).unwrap(), "held");
    }
}

/// Run by [`removed_names_cannot_be_opened`]: a name that always exists can always be opened.
#[test]
fn opener_of_replaced_files() {
    let Some(dir) = subtest_dir() else { return };
    let [name, other] = ["replaced", "new"].map(|name| dir.join("mnt").join(name));
    std::fs::write(&name, "old").unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                std::fs::write(&other, "new").unwrap();
                std::fs::rename(&other, &name).unwrap();
            }
        });
        let opened = (0..5000).try_for_each(|_| File::open(&name).map(drop));
        is_over.store(true, Ordering::Release);
        opened.unwrap();
    });
}

#[test]
fn open_sees_closed_writes() {
    let Some((bed, second)) = mounted_twice() else { return };
    run(subtest("coherence::reader_after_close", &bed));
    second.end().unwrap();
    let Some((bed, _target, second)) = start_twice() else { return };
    run(subtest("coherence::reader_after_close", &bed));
    second.end().unwrap();
}

/// Punches holes into a file in the page cache, with a dirty mapping.
const HOLES: &str = "
import fcntl, mmap, os, struct, sys
file = os.open(sys.argv[1], os.O_RDWR)
def punch(start, end):
    places = [struct.pack('<Q', place).ljust(8000, b'\\0') for place in (start, end)]
    fcntl.ioctl(file, 0x7e90680d, bytearray(struct.pack('<QQ', 1, 0) + b''.join(places)))
assert os.pread(file, 16384, 0) == b'A' * 16384
punch(1000, 3000)
assert os.pread(file, 16384, 0) == b'A' * 1000 + bytes(2000) + b'A' * 13384, 'a hole is not seen'
mapped = mmap.mmap(file, 16384)
mapped[0] = ord('B')
punch(5000, 7000)
assert mapped[5000:7000] == bytes(2000), 'a hole is not seen in a mapping'
mapped[16383] = ord('C')
mapped.flush()
";

#[test]
fn holes_stay_zero() {
    let Some(bed) = Bed::start() else { return };
    if !is_installed("python3", &["--version"]) {
        return;
    }
    let below = bed.dir.join("root/holed");
    std::fs::write(&below, [b'A'; 16384]).unwrap();
    let mut python = Command::new("python3");
    python.args(["-c", HOLES]).arg(bed.mount().join("holed")).stderr(Stdio::piped());
    expect_success(python.spawn().unwrap());
    let mut wanted = [b'A'; 16384];
    (wanted[0], wanted[16383]) = (b'B', b'C');
    wanted[1000..3000].fill(0);
    wanted[5000..7000].fill(0);
    assert!(std::fs::read(below).unwrap() == wanted);
}

#[test]
fn removed_names_cannot_be_opened() {
    let Some((bed, second)) = mounted_twice() else { return };
    run(subtest("coherence::opener_after_removal", &bed));
    run(subtest("coherence::opener_of_replaced_files", &bed));
    second.end().unwrap();
    let Some((bed, _target, second)) = start_twice() else { return };
    run(subtest("coherence::opener_after_removal", &bed));
    second.end().unwrap();
}
