//! `onehop mount`: serves until it is asked to end, and leaves nothing behind.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use crate::run::{Dir, command, document, refuse, succeed};

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
        // Not eprintln: a test that passes would not show it.
        let _ = writeln!(std::io::stderr(), "SKIPPED: nothing can be mounted here: {}", line.trim());
        assert_eq!(daemon.wait().unwrap().code(), Some(3));
        return;
    }
    assert_eq!(std::fs::read_to_string(format!("{point}/a")).unwrap(), "bytes");
    let status = succeed(&["mount", &point, "--status"]);
    assert_eq!((&status["rings"], &status["failed"]), (&0.into(), &0.into()));
    let rings = &status["yours"]["rings"];
    assert!(rings["taken"] == 0 && rings["left"].as_u64() > Some(1000), "{rings}");
    let sent = Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = daemon.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = document("mount", &output);
    assert_eq!(report["broken_rings"], 0);
    assert!(report.get("yours").is_none());
    assert_eq!(std::fs::read_dir(&point).unwrap().count(), 0, "it is still mounted");
    refuse(&["mount", &point, "--status"], 1, "no onehop mount");
}

#[test]
fn invalid_folders() {
    let dir = Dir::new();
    let here = dir.path().to_str().unwrap();
    refuse(&["mount", here, "--root", &dir.file("nowhere")], 2, "no such folder");
    refuse(&["mount", &dir.file("nowhere"), "--root", here], 2, "no such folder");
    refuse(&["mount", here, "--root", here, "--nonempty"], 2, "lies within it");
    std::fs::create_dir(dir.file("inner")).unwrap();
    refuse(&["mount", &dir.file("inner"), "--root", here], 2, "it lies within the folder");
    refuse(&["mount", here], 2, "--root");
    std::fs::write(dir.path().join("a file"), "bytes").unwrap();
    refuse(&["mount", &dir.file("inner"), "--root", &dir.file("a file")], 2, "it is not a folder");
    std::fs::create_dir(dir.path().join("root")).unwrap();
    refuse(&["mount", here, "--root", &dir.file("root")], 2, "is not empty");
    refuse(&["mount", here, "--status", "--nonempty"], 2, "--nonempty");
}
