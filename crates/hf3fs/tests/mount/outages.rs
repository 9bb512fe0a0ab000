//! A daemon that is killed while programs write to a target, and a target that stops answering: nothing hangs, programs
//! get an error, and no acknowledged write is lost.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use onehop_serve::MountOptions;
use onehop_target::client::{self, RemoteTree};
use onehop_target::tcp::TcpConnector;
use rustix::process::{Pid, Signal, kill_process};

use crate::bed::{Bed, LONG, command, compile};
use crate::processes::KilledOnDrop;
use crate::target::{key, serve};

const RECORD: usize = 5000;

/// A program that writes, and its output.
struct Journal {
    child: Child,
    lines: Receiver<String>,
    file: &'static str,
    acknowledged: Vec<u64>,
}

impl Journal {
    fn start(program: &Path, bed: &Bed, kind: &'static str, first: u64) -> Self {
        let mut journal = command(program);
        journal.arg(bed.mount()).arg(bed.mount().join(kind)).arg(first.to_string()).arg(kind);
        let mut child = journal.stdout(Stdio::piped()).spawn().unwrap();
        let (tx, rx) = channel();
        let out = child.stdout.take().unwrap();
        std::thread::spawn(move || {
            BufReader::new(out).lines().map_while(Result::ok).try_for_each(|l| tx.send(l))
        });
        Self { child, lines: rx, file: kind, acknowledged: Vec::new() }
    }

    /// One that writes with a ring, and one with calls.
    fn both(program: &Path, bed: &Bed, first: u64) -> [Self; 2] {
        ["ring", "calls"].map(|kind| Self::start(program, bed, kind, first))
    }

    /// Waits until `count` more records are acknowledged.
    fn wait_for_records(&mut self, count: usize) {
        for _ in 0..count {
            let line = self.lines.recv_timeout(LONG).expect("no more records are written");
            self.acknowledged.push(line.parse().expect("a record that failed"));
        }
    }

    /// The error with which the program ended.
    fn error(&mut self) -> i32 {
        loop {
            let line = self.lines.recv_timeout(LONG).expect("the program hangs, or was killed");
            if let Some(error) = line.strip_prefix("ended by ") {
                let start = Instant::now();
                while self.child.try_wait().unwrap().is_none() {
                    assert!(start.elapsed() < LONG, "the program does not end");
                    std::thread::sleep(Duration::from_millis(2));
                }
                return error.parse().unwrap();
            }
            self.acknowledged.push(line.parse().unwrap());
        }
    }

    /// Checks that the target has all acknowledged records. Returns the next number.
    fn check(&self, bed: &Bed) -> u64 {
        let bytes = std::fs::read(bed.dir.join("root").join(self.file)).unwrap();
        for number in &self.acknowledged {
            let at = *number as usize * RECORD;
            let wanted = (0..RECORD).map(|i| (number * 31 + i as u64 * 7) as u8);
            let have = bytes.get(at..at + RECORD).unwrap_or_default();
            assert!(have.iter().copied().eq(wanted), "record {number} of {} is lost", self.file);
        }
        self.acknowledged.iter().max().unwrap() + 1
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // It has ended, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_killed_daemon_loses_no_acknowledged_write() {
    let bed = Bed::folder();
    let Some(program) = compile("crates/hf3fs/tests/programs/journal.c") else { return };
    let (target, address) = serve(&bed.dir, "127.0.0.1:0");
    let (mut first, mut before) = (0, Vec::new());
    for _ in 0..3 {
        let Some(daemon) = KilledOnDrop::daemon(&bed, Some(address)) else { return };
        assert_eq!(target.report().sessions, 1, "the previous daemon's session was not ended");
        let mut journals = Journal::both(&program, &bed, first);
        journals.iter_mut().for_each(|journal| journal.wait_for_records(50));
        drop(daemon);
        for journal in &mut journals {
            let error = journal.error();
            assert!([-libc::ENOTCONN, -libc::ECONNABORTED].contains(&error), "{}: {error}", journal.file);
        }
        before.extend(journals);
        first = before.iter().map(|journal| journal.check(&bed)).max().unwrap();
    }
    // Each round continued after the previous ones, and did not overwrite their records.
    assert!(first >= 150);
}

#[test]
fn requests_to_a_silent_target_time_out() {
    let bed = Bed::folder();
    let Some(program) = compile("crates/hf3fs/tests/programs/journal.c") else { return };
    let (target, address) = KilledOnDrop::target(&bed, "127.0.0.1:0");
    let connector = TcpConnector::new(&address).unwrap();
    let (stall, give_up) = (Duration::from_secs(1), Duration::from_secs(4));
    let options = client::ClientOptions { stall, give_up, ..client::ClientOptions::new(key()) };
    let tree = RemoteTree::connect(Box::new(connector), options).unwrap();
    let options = MountOptions::of_target(&bed.mount(), tree);
    let Some(bed) = bed.mounted(options) else { return };
    let mut journals = Journal::both(&program, &bed, 0);
    journals.iter_mut().for_each(|journal| journal.wait_for_records(50));
    // Like a machine that hangs: connections stay open, but nothing arrives.
    kill_process(Pid::from_child(&target.0), Signal::STOP).unwrap();
    for journal in &mut journals {
        assert_eq!(journal.error(), -libc::ETIMEDOUT, "{}", journal.file);
    }
    let first = journals.iter().map(|journal| journal.check(&bed)).max().unwrap();
    drop(target);
    // Its successor serves the same mount.
    let _target = KilledOnDrop::target(&bed, &address);
    bed.until("it is connected again", |report| report["remote"]["connections"] != 0);
    let mut again = Journal::both(&program, &bed, first);
    again.iter_mut().for_each(|journal| journal.wait_for_records(50));
    drop(again);
    assert!(journals.iter().all(|journal| journal.check(&bed) <= first));
}

#[test]
fn a_mount_of_a_silent_target_ends_in_time() {
    let bed = Bed::folder();
    let Some(program) = compile("crates/hf3fs/tests/programs/journal.c") else { return };
    let (target, address) = KilledOnDrop::target(&bed, "127.0.0.1:0");
    let connector = TcpConnector::new(&address).unwrap();
    let options =
        client::ClientOptions { stall: Duration::from_secs(1), ..client::ClientOptions::new(key()) };
    let give_up = options.give_up;
    let tree = RemoteTree::connect(Box::new(connector), options).unwrap();
    let options = MountOptions::of_target(&bed.mount(), tree);
    let Some(mut bed) = bed.mounted(options) else { return };
    let mut journals = Journal::both(&program, &bed, 0);
    journals.iter_mut().for_each(|journal| journal.wait_for_records(20));
    kill_process(Pid::from_child(&target.0), Signal::STOP).unwrap();
    // By now both wait for the target.
    std::thread::sleep(Duration::from_secs(2));
    let start = Instant::now();
    bed.daemon.take().unwrap().end().unwrap();
    assert!(start.elapsed() < give_up / 3, "{:?}", start.elapsed());
    for journal in &mut journals {
        assert_ne!(journal.error(), 0);
    }
}

/// When a user accesses paths below the root, the kernel reads the root's access control list.
#[test]
fn the_status_does_not_wait_for_the_target() {
    if !rustix::process::geteuid().is_root() {
        return crate::bed::skipped("only root acts as other users");
    }
    let bed = Bed::folder();
    let (target, address) = KilledOnDrop::target(&bed, "127.0.0.1:0");
    let options = client::ClientOptions::new(key());
    let give_up = options.give_up;
    let tree = RemoteTree::connect(Box::new(TcpConnector::new(&address).unwrap()), options).unwrap();
    let options = MountOptions::of_target(&bed.mount(), tree);
    let Some(bed) = bed.mounted(options) else { return };
    kill_process(Pid::from_child(&target.0), Signal::STOP).unwrap();
    // By now the kernel has dropped its cached attributes of the root.
    std::thread::sleep(Duration::from_secs(2));
    for _ in 0..2 {
        let start = Instant::now();
        let mut status = command("cat".as_ref());
        status.arg(bed.mount().join(onehop_serve::STATS)).uid(crate::attacks::ATTACKER);
        crate::bed::run(status);
        assert!(start.elapsed() < give_up / 3, "{:?}", start.elapsed());
    }
    kill_process(Pid::from_child(&target.0), Signal::CONT).unwrap();
}

#[test]
fn the_status_reports_a_lost_target() {
    let bed = Bed::folder();
    let (target, address) = KilledOnDrop::target(&bed, "127.0.0.1:0");
    let connector = TcpConnector::new(&address).unwrap();
    let options =
        client::ClientOptions { stall: Duration::from_secs(1), ..client::ClientOptions::new(key()) };
    let give_up = options.give_up;
    let tree = RemoteTree::connect(Box::new(connector), options).unwrap();
    let options = MountOptions::of_target(&bed.mount(), tree);
    let Some(bed) = bed.mounted(options) else { return };
    drop(target);
    bed.until("nothing is connected", |report| report["remote"]["connections"] == 0);
    // By now the kernel has dropped its cached attributes of the root.
    std::thread::sleep(Duration::from_secs(2));
    let start = Instant::now();
    let mut status = command("cat".as_ref());
    status.arg(bed.mount().join(onehop_serve::STATS));
    let stdout = crate::bed::run(status);
    assert!(start.elapsed() < give_up / 3, "{:?}", start.elapsed());
    let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert!(report["remote"]["why"].is_string(), "{report:#}");
}
