//! Ctrl-C: the first ends in order, the second at once.

use std::fs::File;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::run::{Dir, command, document};

/// Sends a signal.
pub(crate) fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

fn start(args: &[&str]) -> Child {
    let child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Long enough for the transfer to be under way on a busy machine; it takes much longer.
    std::thread::sleep(Duration::from_millis(700));
    child
}

/// A read of more than a minute.
const SLOW: &str = "sim:mem:512M?bandwidth=4M";

#[test]
fn ctrl_c_ends_in_order() {
    for route in ["gpu/tier3", "cpu/direct", "cpu/pinned"] {
        for name in ["-INT", "-TERM"] {
            let read = ["--json", "read", "-d", SLOW, "--lba", "0", "--blocks", "1048576", "-g", "emu"];
            let child = start(&[&read[..], &["--route", route]].concat());
            signal(&child, name);
            let signalled = Instant::now();
            let output = child.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(130), "{route}: {output:?}");
            assert!(signalled.elapsed() < Duration::from_secs(10), "{route} took {:?}", signalled.elapsed());
            let document = document("read", &output);
            assert_eq!(document["error"]["kind"], "interrupted");
            assert!(String::from_utf8_lossy(&output.stderr).starts_with("onehop: stopped"));
        }
    }
}

#[test]
fn ctrl_c_works_within_a_tensor() {
    let dir = Dir::new();
    let path = dir.file("one.safetensors");
    let bytes = 16_u64 << 30;
    let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
    let child = start(&["load", &path, "-g", "emu", "--threads", "1", "--route", "cpu/cached"]);
    signal(&child, "-INT");
    let signalled = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(signalled.elapsed() < Duration::from_secs(2), "took {:?}", signalled.elapsed());
    // No device was used, so the message mentions none.
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("onehop: stopped") && !text.contains("device"), "{text}");
}

#[test]
fn the_second_ctrl_c_exits_at_once() {
    // Disabling this controller takes a minute; until then it may write to the command's memory.
    let lost = "fault=lost@n=1&fault=lost@op=delete-sq&fault=lost@op=abort&fault=stuck-rdy@on=disable";
    let drive = format!("sim:mem:1M?to=120&{lost}");
    let mut child = start(&[
        "read",
        "-d",
        &drive,
        "--lba",
        "0",
        "--blocks",
        "1",
        "--route",
        "cpu/direct",
        "--timeout",
        "100s",
    ]);
    signal(&child, "-INT");
    std::thread::sleep(Duration::from_millis(1500));
    assert!(child.try_wait().unwrap().is_none(), "it ended after the first");
    let signalled = Instant::now();
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(signalled.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_stopped_copy_leaves_no_partial_file() {
    let dir = Dir::new();
    let out = dir.file("out.bin");
    let child = start(&["read", "-d", SLOW, "--lba", "0", "--blocks", "1048576", "--out", &out]);
    signal(&child, "-INT");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert!(!std::path::Path::new(&out).exists());
}

#[test]
fn ctrl_c_does_not_wait_for_the_command_timeout() {
    for (route, drive) in [
        ("cpu/direct", "sim:mem:16M?fault=lost@n=3"),
        ("cpu/pinned", "sim:mem:16M?fault=lost@n=3"),
        ("cpu/direct", "sim:mem:16M?latency=60s"),
        ("gpu/tier3", "sim:mem:16M?fault=lost@n=3"),
    ] {
        let read = ["--json", "read", "-d", drive, "--lba", "0", "--blocks", "32768", "-g", "emu"];
        let mut child = start(&[&read[..], &["--timeout", "60s", "--route", route]].concat());
        assert!(child.try_wait().unwrap().is_none(), "{route}: over before it was stopped");
        signal(&child, "-TERM");
        let signalled = Instant::now();
        let output = child.wait_with_output().unwrap();
        assert!(signalled.elapsed() < Duration::from_secs(5), "{route} took {:?}", signalled.elapsed());
        assert_eq!(output.status.code(), Some(130), "{route}: {output:?}");
        assert_eq!(document("read", &output)["error"]["kind"], "interrupted");
    }
}
