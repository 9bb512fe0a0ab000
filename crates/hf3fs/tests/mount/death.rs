//! Programs and daemons that are killed.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, MountOptions};

use crate::bed::{Bed, LONG, command, compile, run, wait};
use crate::processes::KilledOnDrop;

fn shared_memory(of: u32) -> usize {
    // Files in /dev/shm that a process has mapped.
    let maps = std::fs::read_to_string(format!("/proc/{of}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains("/dev/shm/hf3fs-iov-") && !line.contains("(deleted)")).count()
}

fn start_stay(bed: &Bed) -> Option<Child> {
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
    let Some(mut child) = start_stay(&bed) else { return };
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

#[test]
fn a_killed_daemon_does_not_hang_programs() {
    let mut bed = Bed::folder();
    let Some(daemon) = KilledOnDrop::daemon(&bed, None) else { return };
    let Some(child) = start_stay(&bed) else { return };
    drop(daemon);
    let output = wait(child);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("no answer\n"), "{output:?}");
    // The next daemon replaces the dead mount, and removes what it left.
    let options =
        MountOptions { emulated_gpu: true, ..MountOptions::new(&bed.mount(), &bed.dir.join("root")) };
    bed.daemon = Some(Daemon::start(options).unwrap());
    let fio = compile("crates/hf3fs/tests/programs/fio_like.c").unwrap();
    let mut fio = command(&fio);
    fio.arg(bed.mount()).arg(bed.file()).arg("10");
    assert!(run(fio).contains("all of them right"));
}
