//! Programs on a target's folder: they work as on a local one, even when the target restarts.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, MountOptions};
use onehop_target::auth::Key;
use onehop_target::client::{self, RemoteTree};
use onehop_target::server::{self, Target};
use onehop_target::tcp::{TcpAcceptor, TcpConnector};

use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

use crate::bed::{Bed, LONG, command, compile, run, subtest, subtest_dir, wait};
use crate::files_through_the_kernel;

pub fn key() -> Option<Key> {
    Key::new(&[9; 32])
}

/// Serves the folder of a bed.
pub fn serve(dir: &Path, address: &str) -> (Target, SocketAddr) {
    let start = Instant::now();
    // The port of a target that has just ended may still be in use.
    let acceptor = loop {
        match TcpAcceptor::listen(address) {
            Ok(acceptor) => break acceptor,
            Err(error) => assert!(start.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let address = acceptor.local().unwrap();
    let options = server::ServerOptions::new(&dir.join("root"), key());
    (Target::start(options, vec![Box::new(acceptor)]).unwrap(), address)
}

/// A client of a target.
pub fn connect(address: SocketAddr) -> RemoteTree {
    let connector = TcpConnector::new(&address.to_string()).unwrap();
    RemoteTree::connect(Box::new(connector), client::ClientOptions::new(key())).unwrap()
}

/// A mount of a target's folder.
pub fn start() -> Option<(Bed, Target, SocketAddr)> {
    let bed = Bed::folder();
    let (target, address) = serve(&bed.dir, "127.0.0.1:0");
    let options = MountOptions::of_target(&bed.mount(), connect(address));
    Some((bed.mounted(options)?, target, address))
}

/// A target's folder that is mounted twice, as on two machines.
pub fn start_twice() -> Option<(Bed, Target, Daemon)> {
    let (bed, target, address) = start()?;
    let second = bed.dir.join("second");
    std::fs::create_dir(&second).unwrap();
    let daemon = Daemon::start(MountOptions::of_target(&second, connect(address))).unwrap();
    Some((bed, target, daemon))
}

#[test]
fn programs_work_on_a_target() {
    let Some((bed, target, _)) = start() else { return };
    files_through_the_kernel(&bed);
    let Some(program) = compile("crates/hf3fs/tests/programs/calls.c") else { return };
    let mut calls = command(&program);
    calls.arg(bed.mount()).arg(bed.mount().join("folder"));
    assert_eq!(run(calls), "all of them\n");
    for name in ["gpu_read", "gpu_wrap", "gpu_share"] {
        let mut example = command(&compile(&format!("examples/3fs/{name}.c")).unwrap());
        example.arg(bed.mount()).arg(bed.file()).args(["6000011", "0"]);
        assert!(run(example).contains("all of them right"), "{name}");
    }
    let report = bed.report();
    let routes = report["routes"].as_array().unwrap();
    for (route, memory, direction) in
        [("tcp/host", "host", "read"), ("tcp/host", "host", "write"), ("tcp/pinned", "vram", "read")]
    {
        let is_it = |entry: &&serde_json::Value| {
            entry["route"] == route && entry["memory"] == memory && entry["direction"] == direction
        };
        let entry =
            routes.iter().find(is_it).unwrap_or_else(|| panic!("{route} {memory} {direction}: {report:#}"));
        assert!(entry["why_not_better"][0]["reason"].as_str().unwrap().contains("TCP"), "{entry:#}");
    }
    assert_eq!(report["remote"]["transport"], "tcp");
    assert_eq!((&report["remote"]["reconnects"], &report["failed"]), (&0.into(), &0.into()), "{report:#}");
    assert!(target.report().read_bytes > 18_000_033);
    // The folder that was created exists.
    assert!(bed.dir.join("root/folder").is_dir());
}

/// Run by [`locks_on_a_target_are_refused_unless_local`]: prints the results of both kinds of locks.
#[test]
fn locker() {
    let Some(dir) = subtest_dir() else { return };
    let file = std::fs::File::options().read(true).write(true).open(dir.join("mnt/file.bin")).unwrap();
    let code = |done: Result<(), Errno>| done.err().map_or(0, Errno::raw_os_error);
    let locks = [FlockOperation::NonBlockingLockExclusive, FlockOperation::NonBlockingLockShared];
    for lock in locks {
        println!("errors {} {}", code(fcntl_lock(&file, lock)), code(flock(&file, lock)));
    }
    fcntl_lock(&file, FlockOperation::Unlock).unwrap();
    flock(&file, FlockOperation::Unlock).unwrap();
}

#[test]
fn locks_on_a_target_are_refused_unless_local() {
    let Some((bed, _target, _)) = start() else { return };
    let errno = Errno::NOLCK.raw_os_error();
    let stdout = run(subtest("target::locker", &bed));
    assert_eq!(stdout.matches(&format!("errors {errno} {errno}")).count(), 2, "{stdout}");
    // With the option for local locks, they hold within the mount.
    let bed = Bed::folder();
    let (_target, address) = serve(&bed.dir, "127.0.0.1:0");
    let options = MountOptions::of_target(&bed.mount(), connect(address));
    let options = MountOptions { local_locks: true, ..options };
    let Some(bed) = bed.mounted(options) else { return };
    assert_eq!(run(subtest("target::locker", &bed)).matches("errors 0 0").count(), 2);
}

#[test]
fn programs_continue_after_the_target_restarts() {
    let Some((bed, mut target, address)) = start() else { return };
    let Some(program) = compile("crates/hf3fs/tests/programs/fio_like.c") else { return };
    let mut fio = command(&program);
    fio.arg(bed.mount()).arg(bed.file()).arg("1500").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = fio.spawn().unwrap();
    let mut restarts = 0;
    while child.try_wait().unwrap().is_none() && restarts < 4 {
        std::thread::sleep(Duration::from_millis(100));
        assert!(target.drain(LONG));
        target = serve(&bed.dir, &address.to_string()).0;
        restarts += 1;
    }
    let output = wait(child);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("all of them right"), "{output:?}");
    let report = bed.report();
    assert!(report["remote"]["sessions_lost"].as_u64().unwrap() >= 1, "{report:#}");
}
