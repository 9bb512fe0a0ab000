//! Two mounts of one folder: who gets a lock sees what was written under it, and who opens a file what its last writer has closed.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use onehop_serve::{Daemon, MountOptions};

use crate::bed::{Bed, part, part_of, run, skipped, top, wait};
use crate::target::start_twice;

/// A bed whose folder is mounted twice.
pub fn twice() -> Option<(Bed, Daemon)> {
    let bed = Bed::start()?;
    let second = bed.dir.join("second");
    std::fs::create_dir(&second).unwrap();
    let daemon = Daemon::start(MountOptions::new(&second, &bed.dir.join("root"))).unwrap();
    Some((bed, daemon))
}

fn have(program: &str, arguments: &[&str]) -> bool {
    let found = Command::new(program).args(arguments).stdout(Stdio::null()).status();
    if !found.as_ref().is_ok_and(|status| status.success()) {
        skipped(&format!("{program} {arguments:?}: {found:?}"));
        return false;
    }
    true
}

fn ends_well(child: Child) {
    let output = wait(child);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn nothing_that_was_written_under_a_lock_is_missed() {
    let Some((bed, second)) = twice() else { return };
    if !have("python3", &["--version"]) {
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
        children.into_iter().for_each(ends_well);
        let bytes = std::fs::read(below).unwrap();
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!([number(0), number(4096), bytes.len() as u64 - 8192], [3 * TURNS; 3], "{kind}");
    }
    second.end().unwrap();
}

/// Run by [`what_two_mounts_append_stays_whole`].
#[test]
fn appenders() {
    let Some(dir) = part_of() else { return };
    std::thread::scope(|scope| {
        for (of, letter) in [("mnt", b'a'), ("second", b'b')] {
            let file = File::options().append(true).create(true).open(dir.join(of).join("log")).unwrap();
            // No multiple of a page, so that most records lie in several.
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
fn what_two_mounts_append_stays_whole() {
    let Some((bed, second)) = twice() else { return };
    assert!(run(part("coherence::appenders", &bed)).contains("1 passed"));
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
    let Some((bed, second)) = twice() else { return };
    if !have("sqlite3", &["--version"]) {
        return;
    }
    const TRANSACTIONS: usize = 500;
    let sqlite = |path: &Path, input: &str| {
        let mut shell = Command::new("sqlite3");
        // Without waits for the disk, which the journal's content does not depend on, transactions follow closely.
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
        ends_well(sqlite(&near, &begin));
        let work = format!("PRAGMA journal_mode={mode};\n{}", one.repeat(TRANSACTIONS));
        [&near, &far].map(|path| sqlite(path, &work)).into_iter().for_each(ends_well);
        for path in [&near, &far] {
            let look = "PRAGMA integrity_check; SELECT n FROM t; SELECT count(*) FROM log;";
            let said = wait(sqlite(path, look)).stdout;
            let wanted = format!("ok\n{0}\n{0}\n", 2 * TRANSACTIONS);
            assert_eq!(String::from_utf8_lossy(&said), wanted, "{mode}");
        }
    }
    second.end().unwrap();
}

/// Run by the tests below: what one mount has closed or removed, the other knows at the next open.
#[test]
fn reader_of_what_was_closed() {
    let Some(dir) = part_of() else { return };
    let [near, far] = ["mnt", "second"].map(|of| dir.join(of).join("closed"));
    for turn in 1..30_usize {
        let text = "z".repeat(turn * turn);
        std::fs::write(&near, &text).unwrap();
        let mut file = File::open(&far).unwrap();
        assert_eq!(file.metadata().unwrap().len(), text.len() as u64);
        let mut seen = String::new();
        file.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, text);
        // And the same length again: not only that tells.
        let text = text.replace('z', "y");
        std::fs::write(&near, &text).unwrap();
        drop(File::open(&far).unwrap());
        seen.clear();
        file.rewind().unwrap();
        file.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, text);
    }
}

/// Run by [`names_that_are_gone_are_not_opened`].
#[test]
fn opener_of_what_was_removed() {
    let Some(dir) = part_of() else { return };
    let [near, far] = ["mnt", "second"].map(|of| dir.join(of).join("removed"));
    for turn in 0..30 {
        let text = turn.to_string();
        std::fs::write(&near, &text).unwrap();
        assert_eq!(std::fs::read_to_string(&far).unwrap(), text);
        std::fs::remove_file(&near).unwrap();
        if turn % 2 == 0 {
            assert_eq!(File::open(&far).unwrap_err().kind(), ErrorKind::NotFound);
        }
    }
    // Who has it open may open it again, though it has no name.
    std::fs::write(&near, "held").unwrap();
    let held = File::open(&near).unwrap();
    std::fs::remove_file(&near).unwrap();
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&held));
    assert_eq!(std::fs::read_to_string(again).unwrap(), "held");
}

#[test]
fn who_opens_a_file_sees_what_was_closed() {
    let Some((bed, second)) = twice() else { return };
    run(part("coherence::reader_of_what_was_closed", &bed));
    second.end().unwrap();
    let Some((bed, _target, second)) = start_twice() else { return };
    run(part("coherence::reader_of_what_was_closed", &bed));
    second.end().unwrap();
}

/// Punches holes into a file that the kernel keeps, and that a mapping has changed.
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
fn what_was_in_a_hole_does_not_come_back() {
    let Some(bed) = Bed::start() else { return };
    if !have("python3", &["--version"]) {
        return;
    }
    let below = bed.dir.join("root/holed");
    std::fs::write(&below, [b'A'; 16384]).unwrap();
    let mut python = Command::new("python3");
    python.args(["-c", HOLES]).arg(bed.mount().join("holed")).stderr(Stdio::piped());
    ends_well(python.spawn().unwrap());
    let mut wanted = [b'A'; 16384];
    (wanted[0], wanted[16383]) = (b'B', b'C');
    wanted[1000..3000].fill(0);
    wanted[5000..7000].fill(0);
    assert!(std::fs::read(below).unwrap() == wanted);
}

#[test]
fn names_that_are_gone_are_not_opened() {
    let Some((bed, second)) = twice() else { return };
    run(part("coherence::opener_of_what_was_removed", &bed));
    second.end().unwrap();
}
