//! `onehop mount`: serves until it is stopped, and leaves nothing behind.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::run::{Dir, command, document, refuse, succeed};
use crate::signals::signal;

#[test]
fn a_folder_is_served_until_sigterm() {
    let dir = Dir::new();
    let (root, point) = (dir.file("root"), dir.file("mnt"));
    std::fs::create_dir_all(&root).unwrap();
    std::fs::create_dir_all(&point).unwrap();
    std::fs::write(dir.path().join("root/a"), "bytes").unwrap();
    let mut daemon = command(&["--json", "mount", &point, "--root", &root]);
    let mut daemon = daemon.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(daemon.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    if !line.contains("is mounted at") {
        // Not eprintln, which is captured in tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED: nothing can be mounted here: {}", line.trim());
        assert_eq!(daemon.wait().unwrap().code(), Some(3));
        return;
    }
    assert_eq!(std::fs::read_to_string(format!("{point}/a")).unwrap(), "bytes");
    let status = succeed(&["mount", &point, "--status"]);
    assert_eq!((&status["rings"], &status["failed"]), (&0.into(), &0.into()));
    let rings = &status["yours"]["rings"];
    assert!(rings["taken"] == 0 && rings["left"].as_u64() > Some(1000), "{rings}");
    status_of_a_stopped_daemon(&daemon, &point);
    signal(&daemon, "-TERM");
    let output = daemon.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = document("mount", &output);
    assert_eq!(report["broken_rings"], 0);
    assert!(report.get("yours").is_none());
    assert_eq!(std::fs::read_dir(&point).unwrap().count(), 0, "the folder is still mounted");
    refuse(&["mount", &point, "--status"], 1, "no onehop mount");
}

/// Whether all threads of a process are stopped.
fn is_stopped(process: &Child) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
    let state =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
    tasks.map(|task| state(task.unwrap())).all(|stat| stat.rsplit(')').next().unwrap().starts_with(" T"))
}

/// A stopped daemon does not answer, but Ctrl-C ends the wait for it. All its threads must be stopped first, because the
/// kernel does not release a process whose request the daemon has received.
fn status_of_a_stopped_daemon(daemon: &Child, point: &str) {
    signal(daemon, "-STOP");
    let start = Instant::now();
    while !is_stopped(daemon) {
        assert!(start.elapsed() < Duration::from_secs(20), "the daemon does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut status = command(&["mount", point, "--status"]);
    let mut status = status.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Long enough to send the request.
    std::thread::sleep(Duration::from_millis(700));
    let is_waiting = status.try_wait().unwrap().is_none();
    signal(&status, "-INT");
    let (signalled, mut ended) = (Instant::now(), None);
    while ended.is_none() && signalled.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
        ended = status.try_wait().unwrap();
    }
    signal(daemon, "-CONT");
    assert!(is_waiting, "a stopped daemon answered");
    assert_eq!(ended.expect("Ctrl-C is ignored").code(), Some(130));
    assert!(status.wait_with_output().unwrap().stderr.starts_with(b"onehop: stopped"));
}

#[test]
fn invalid_folders() {
    let dir = Dir::new();
    let here = dir.path().to_str().unwrap();
    refuse(&["mount", here, "--root", &dir.file("nowhere")], 2, "no such folder");
    refuse(&["mount", &dir.file("nowhere"), "--root", here], 2, "no such folder");
    refuse(&["mount", here, "--root", here, "--nonempty"], 2, "is inside it");
    std::fs::create_dir(dir.file("inner")).unwrap();
    refuse(&["mount", &dir.file("inner"), "--root", here], 2, "it is inside the folder");
    refuse(&["mount", here], 2, "--root");
    std::fs::write(dir.path().join("a file"), "bytes").unwrap();
    refuse(&["mount", &dir.file("inner"), "--root", &dir.file("a file")], 2, "it is not a folder");
    std::fs::create_dir(dir.path().join("root")).unwrap();
    refuse(&["mount", here, "--root", &dir.file("root")], 2, "is not empty");
    refuse(&["mount", here, "--status", "--nonempty"], 2, "--nonempty");
}
