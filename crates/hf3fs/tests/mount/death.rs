//! Programs that are killed, and a daemon that is.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, Options};

use crate::bed::{Bed, LONG, command, compile, run, skipped, wait};

fn shared_memory(of: u32) -> usize {
    // Files in /dev/shm that a process has mapped.
    let maps = std::fs::read_to_string(format!("/proc/{of}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains("/dev/shm/hf3fs-iov-") && !line.contains("(deleted)")).count()
}

fn stay(bed: &Bed) -> Option<Child> {
    let program = compile("crates/hf3fs/tests/programs/stay.c")?;
    let mut stay = command(&program);
    stay.arg(bed.mount()).arg(bed.file()).stdout(Stdio::piped());
    let mut child = stay.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "there\n");
    Some(child)
}

#[test]
fn a_killed_program_leaves_nothing() {
    let Some(bed) = Bed::start() else { return };
    let Some(mut child) = stay(&bed) else { return };
    bed.until("it is there", |report| report["buffers"] == 2 && report["rings"] == 1);
    assert_eq!(shared_memory(child.id()), 1);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
    let name = maps
        .lines()
        .find_map(|line| Some(PathBuf::from(&line[line.find("/dev/shm/hf3fs-iov-")?..])))
        .unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    bed.until("it is forgotten", |report| {
        ["buffers", "rings", "open_files"].iter().all(|field| report[field] == 0)
    });
    let start = Instant::now();
    while name.exists() {
        assert!(start.elapsed() < LONG, "{} is still there", name.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Run by [`a_killed_daemon_hangs_nobody`] in a process of its own; nothing otherwise.
#[test]
fn daemon_of_another_process() {
    let Ok(dir) = std::env::var("ONEHOP_TEST_DAEMON") else { return };
    let dir = PathBuf::from(dir);
    let _daemon = Daemon::start(Options::new(&dir.join("mnt"), &dir.join("root"))).unwrap();
    std::fs::write(dir.join("ready"), "").unwrap();
    std::thread::sleep(LONG);
}

/// A daemon in a process of its own, which is killed when this is dropped.
struct Killed(Child);

impl Killed {
    fn daemon(bed: &Bed) -> Self {
        let mut daemon = Command::new(std::env::current_exe().unwrap());
        daemon.args(["--exact", "death::daemon_of_another_process"]).env("ONEHOP_TEST_DAEMON", &bed.dir);
        Self(daemon.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_daemon_hangs_nobody() {
    let mut bed = Bed::folder();
    if std::fs::metadata("/dev/fuse").is_err() || !rustix::process::geteuid().is_root() {
        return skipped("only root mounts and unmounts as it likes, and there must be a /dev/fuse");
    }
    let mut daemon = Killed::daemon(&bed);
    let start = Instant::now();
    while !bed.dir.join("ready").exists() {
        if let Some(status) = daemon.0.try_wait().unwrap() {
            return skipped(&format!("nothing can be mounted here: {status}"));
        }
        assert!(start.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(10));
    }
    let Some(child) = stay(&bed) else { return };
    drop(daemon);
    let output = wait(child);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("no answer\n"), "{output:?}");
    // The next daemon takes the dead mount's place, and what it left behind with it.
    bed.daemon = Some(Daemon::start(Options::new(&bed.mount(), &bed.dir.join("root"))).unwrap());
    let fio = compile("crates/hf3fs/tests/programs/fio_like.c").unwrap();
    let mut fio = command(&fio);
    fio.arg(bed.mount()).arg(bed.file()).arg("10");
    assert!(run(fio).contains("all of them right"));
}
