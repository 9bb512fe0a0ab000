//! Ctrl-C while a drive is opened, reconnected, or does not answer: commands stop at once, in any state of the drive.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::fabrics_target::{Act, Config, Outgoing, Target};
use crate::load::text;
use crate::owned::tool;
use crate::run::{Dir, command, refuse, succeed};

/// SIGINT's bit in the masks of /proc/PID/status.
const SIGINT: u64 = 1 << 1;

fn start(args: &[&str]) -> Child {
    let args = [&["--json"], args].concat();
    command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the command has installed its handler for Ctrl-C.
fn wait_for_handler(child: &mut Child) {
    let status = format!("/proc/{}/status", child.id());
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let caught = text.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        if caught.is_some_and(|mask| mask & SIGINT != 0) || child.try_wait().unwrap().is_some() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn ctrl_c(child: &Child) {
    signal(child, "-INT");
}

fn signal(child: &Child, name: &str) {
    // If the process has ended, its exit code shows that.
    let _ = Command::new("kill").args([name, &child.id().to_string()]).stderr(Stdio::null()).status();
}

/// Checks that the command was stopped, and reports that.
fn assert_stopped(what: &str, child: Child) {
    assert_stopped_with(what, "", child);
}

/// Like [`assert_stopped`], with a text that the message must contain.
fn assert_stopped_with(what: &str, text: &str, child: Child) {
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{what}: {output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(document["error"]["kind"], "interrupted", "{what}: {document:#}");
    assert_eq!(document["error"]["exit_code"], 130, "{what}");
    assert!(document["error"]["message"].as_str().unwrap().contains(text), "{what}: {document:#}");
}

/// Opening this drive takes four attempts of a minute each.
const NEVER_READY: &str = "sim:mem:1M?to=120&fault=stuck-rdy@on=enable";

#[test]
fn ctrl_c_stops_every_command_while_its_drive_is_not_ready() {
    let dir = Dir::new();
    let (input, _) = dir.noise("in.bin", 512);
    let [map, archive] = ["model.map", "report.tar.gz"].map(|name| dir.file(name));
    let on_drive = |words: &[&'static str], more: &[&str]| -> Vec<String> {
        [words, &["-d", NEVER_READY], more].concat().into_iter().map(str::to_owned).collect()
    };
    let commands = [
        on_drive(&["drive", "list"], &[]),
        on_drive(&["drive", "identify"], &[]),
        on_drive(&["drive", "smart"], &[]),
        on_drive(&["drive", "errors"], &[]),
        on_drive(&["drive", "dump-bar0", "--up"], &[]),
        on_drive(&["drive", "reset"], &[]),
        on_drive(&["drive", "check-p2p"], &["-g", "emu"]),
        on_drive(&["read"], &["--lba", "0", "--blocks", "1", "-g", "emu"]),
        on_drive(&["write"], &["--lba", "0", "--in", &input, "--serial", "x", "--yes", "-g", "emu"]),
        on_drive(&["load"], &["--path", "/model.safetensors", "-g", "emu"]),
        on_drive(&["map"], &["--path", "/model.safetensors", "--out", &map]),
        on_drive(&["bench", "queue"], &["--depth", "1"]),
        on_drive(&["bench", "sweep"], &["--io", "read", "-g", "emu"]),
        on_drive(&["bench", "gather"], &["-g", "emu"]),
        on_drive(&["report"], &["-g", "emu", "--out", &archive]),
    ];
    let run = |words: &Vec<String>| {
        let mut child = start(&words.iter().map(String::as_str).collect::<Vec<_>>());
        wait_for_handler(&mut child);
        ctrl_c(&child);
        (words.join(" "), child)
    };
    // All commands run at once, and are checked after all were signalled.
    for (what, child) in commands.iter().map(run).collect::<Vec<_>>() {
        assert_stopped(&what, child);
    }
}

/// Completions without data, commands that fail and may be retried after ten seconds, and a controller that neither aborts
/// commands nor deletes queues.
const TORN: &str = "fault=torn@op=read,delay=600s";
const SLOW_RETRIES: &str = "crdt=100,100,100&fault=fail-once@op=read|write,every=1,crd=1";
const UNRESPONSIVE: &str =
    "fault=lost@op=read|write&fault=abort-ignored&fault=lost@op=delete-sq&fault=lost@op=delete-cq";

#[test]
fn ctrl_c_stops_commands_while_a_drive_does_not_answer() {
    let (dir, made) = (Dir::new(), Dir::new());
    let (input, _) = dir.noise("in.bin", 1 << 20);
    let [map, image] = ["model.map", "disk.img"].map(|name| made.file(name));
    let mut commands: Vec<Vec<String>> = Vec::new();
    let mut add = |words: &[&str], faults: &str, more: &[&str]| {
        let drive = format!("sim:mem:16M?{faults}");
        let all = [words, &["-d", &drive], more].concat();
        commands.push(all.into_iter().map(str::to_owned).collect());
    };
    let wait = ["-g", "emu", "--timeout", "60s"];
    for route in ["cpu/direct", "cpu/pinned", "gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1"] {
        let route = [&wait[..], &["--route", route]].concat();
        for faults in ["fault=lost@op=read", TORN, SLOW_RETRIES, UNRESPONSIVE] {
            add(&["read", "--lba", "0", "--blocks", "64"], faults, &route);
        }
        let write = ["write", "--lba", "0", "--in", &input, "--serial", "ONEHOP-SIM-1", "--yes"];
        for faults in ["fault=lost@op=flush", "fault=lost@op=write", SLOW_RETRIES, UNRESPONSIVE] {
            add(&write, faults, &route);
        }
    }
    for mode in ["owner", "shared"] {
        add(&["read", "--lba", "0", "--blocks", "64", "--mode", mode], "fault=lost@op=read", &wait);
    }
    for faults in ["fault=lost@op=read", TORN, SLOW_RETRIES, UNRESPONSIVE] {
        add(&["map", "--path", "/f", "--out", &map], faults, &[]);
        add(&["read", "--path", "/f"], faults, &wait);
        add(&["load", "--path", "/m.safetensors"], faults, &wait);
        add(&["bench", "queue", "--depth", "1,4"], faults, &[]);
    }
    for faults in ["fault=lost@op=read,n=300", "fault=torn@op=read,n=300,delay=600s", UNRESPONSIVE] {
        for route in ["cpu/direct", "cpu/pinned", "cpu/memcpy", "gpu/tier3"] {
            // Runs longer than this test.
            let sweep = ["bench", "sweep", "--io", "randread", "--block", "4K", "--time", "600s"];
            add(&sweep, faults, &["--depth", "8", "-g", "emu", "--route", route]);
        }
    }
    for faults in ["fault=lost@op=read,n=300", "fault=torn@op=read,n=300,delay=600s", UNRESPONSIVE] {
        // Runs longer than this test.
        add(&["bench", "gather", "--batches", "1000000"], faults, &["-g", "emu"]);
    }
    for fault in ["lost@op=read", "torn@op=read,delay=600s", "fail-once@op=read,every=1,crd=3"] {
        commands
            .push(["demo", "--fault", fault].iter().chain(&wait).map(|word| (*word).to_owned()).collect());
    }
    // Generating the largest model takes a while.
    let largest = ["demo", "--size", "1G", "--fault", "lost@op=read"];
    commands.push(largest.iter().chain(&wait).map(|word| (*word).to_owned()).collect());
    if tool("mke2fs", &["-q", "-F", "-t", "ext4", "-d", text(dir.path()), &image, "16M"]) {
        // Lost reads of the file itself, after its extents were found. Each command needs its own image.
        let copy = made.file("copy.img");
        std::fs::copy(&image, &copy).unwrap();
        for (image, words) in [
            (&image, &["map", "--path", "/in.bin", "--out", &map][..]),
            (&copy, &["read", "--path", "/in.bin", "-g", "emu", "--timeout", "60s"]),
        ] {
            let drive = format!("sim:{image}?fault=lost@op=read,n=8");
            let all = words.iter().chain(&["-d", &drive]).map(|word| (*word).to_owned()).collect();
            commands.push(all);
        }
    }
    // A few at a time, because each has a thread that polls.
    for (turn, some) in commands.chunks(6).enumerate() {
        let mut started: Vec<_> = some
            .iter()
            .map(|words| (words.join(" "), start(&words.iter().map(String::as_str).collect::<Vec<_>>())))
            .collect();
        started.iter_mut().for_each(|(_, child)| wait_for_handler(child));
        // Long enough for the commands to wait; an earlier Ctrl-C works as well.
        std::thread::sleep(Duration::from_millis(700));
        let name = ["-INT", "-TERM", "-HUP"][turn % 3];
        started.iter().for_each(|(_, child)| signal(child, name));
        for (what, child) in started {
            assert_stopped(&what, child);
        }
    }
}

/// The target has received the data of a write, which it may still execute.
#[test]
fn an_interrupted_write_reports_an_unknown_outcome() {
    let dir = Dir::new();
    let (input, _) = dir.noise("in.bin", 64 << 10);
    let writes = Arc::new(AtomicBool::new(false));
    let began = writes.clone();
    let hook = move |out: Outgoing| {
        // After Ready to Transfer, drop the responses.
        began.fetch_or(out.kind == 9, Ordering::AcqRel);
        match (out.qid, out.kind) {
            (Some(1..), 5) if began.load(Ordering::Acquire) => Act::Drop,
            _ => Act::Send(out.bytes),
        }
    };
    let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
    let drive = target.name();
    let write = ["write", "-d", &drive, "--lba", "0", "--in", &input, "--serial", "FABRIC0001", "--yes"];
    let child = start(&[&write[..], &["-g", "emu", "--timeout", "60s"]].concat());
    while !writes.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
    }
    ctrl_c(&child);
    assert_stopped_with(&drive, "the outcome is unknown", child);
}

#[test]
fn ctrl_c_works_while_a_server_is_silent() {
    let dir = Dir::new();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let target =
        format!("nvme-tcp://127.0.0.1:{}/nqn.2026-11.org.example:x", tcp.local_addr().unwrap().port());
    let child = start(&["drive", "identify", "-d", &target]);
    let mut stream = tcp.accept().unwrap().0;
    stream.read_exact(&mut [0; 128]).unwrap();
    ctrl_c(&child);
    assert_stopped(&target, child);
    let socket = dir.file("s");
    let unix = UnixListener::bind(&socket).unwrap();
    let served = format!("vfio-user:{socket}");
    let child = start(&["drive", "identify", "-d", &served]);
    let mut stream = unix.accept().unwrap().0;
    stream.read_exact(&mut [0; 16]).unwrap();
    ctrl_c(&child);
    assert_stopped(&served, child);
}

/// The doctor examines each file, and checks for Ctrl-C in between.
#[test]
fn ctrl_c_stops_the_doctor_between_files() {
    let dir = Dir::new();
    let (file, _) = dir.noise("file", 4096);
    let files: Vec<_> = std::iter::repeat_n(file.as_str(), 10_000).collect();
    let mut child = start(&[&["doctor"], &files[..]].concat());
    wait_for_handler(&mut child);
    ctrl_c(&child);
    assert_stopped("doctor", child);
}

/// A target that does not answer keeps the file that the measurement created.
#[test]
fn a_stopped_measurement_names_the_file_it_could_not_remove() {
    let dir = Dir::new();
    let root = dir.file("root");
    std::fs::create_dir(&root).unwrap();
    let serve = ["target", "--root", &root, "--listen", "127.0.0.1:0", "--insecure-loopback-for-tests"];
    let mut target = start(&serve);
    // The first line warns that there is no key.
    let mut lines = BufReader::new(target.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.find(|line| line.contains(" is served at ")).unwrap();
    let address = line.split(" is served at ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
    let measure = ["bench", "target", "--target", address, "--insecure-loopback-for-tests", "--size", "1M"];
    let child = start(&[&measure[..], &["--time", "600s"]].concat());
    let file = format!(".onehop-bench-{}-{}", child.id(), 1 << 20);
    let is_made = || std::fs::metadata(format!("{root}/{file}")).is_ok_and(|made| made.len() == 1 << 20);
    while !is_made() {
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&target, "-STOP");
    ctrl_c(&child);
    let output = child.wait_with_output().unwrap();
    signal(&target, "-CONT");
    ctrl_c(&target);
    target.wait().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains(&format!("{address}/{file}")), "{stderr}");
}

#[test]
fn ctrl_c_works_while_reconnecting() {
    let [reads, is_down] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (began, went_down) = (reads.clone(), is_down.clone());
    let hook = move |out: Outgoing| {
        if out.kind != 7 || out.qid.is_none_or(|qid| qid == 0) {
            return Act::Send(out.bytes);
        }
        began.store(true, Ordering::Release);
        while !went_down.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Act::Close(Vec::new())
    };
    let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
    let drive = format!("{}?reconnect=600", target.name());
    let child =
        start(&["read", "-d", &drive, "--lba", "0", "--blocks", "8", "-g", "emu", "--timeout", "60s"]);
    while !reads.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
    }
    target.shared.is_down.store(true, Ordering::Release);
    is_down.store(true, Ordering::Release);
    // Long enough to be reconnecting; an earlier Ctrl-C works as well.
    std::thread::sleep(Duration::from_millis(500));
    ctrl_c(&child);
    assert_stopped(&drive, child);
}

/// A folder created for a report is removed if it stays empty.
#[test]
fn a_stopped_report_leaves_no_empty_folder() {
    let dir = Dir::new();
    let [made, there] = ["made/here", "there"].map(|name| dir.file(name));
    std::fs::create_dir(&there).unwrap();
    for folder in [&made, &there] {
        let mut child = start(&["bench", "queue", "-d", NEVER_READY, "--report", folder]);
        while !std::path::Path::new(folder).exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        wait_for_handler(&mut child);
        ctrl_c(&child);
        assert_stopped(folder, child);
    }
    assert!(!dir.path().join("made").exists() && dir.path().join("there").exists());
    // A failure leaves none either, and a folder with a report stays.
    refuse(&["bench", "queue", "-d", "sim:mem:1M?lba=4096", "--block", "512", "--report", &made], 2, "");
    assert!(!dir.path().join("made").exists());
    succeed(&["bench", "queue", "--depth", "1", "--report", &made]);
    assert!(std::path::Path::new(&made).join("queue.json").exists());
}

#[test]
fn invalid_namespace_data_is_reported() {
    let target = Target::start(Config { lbads: 40, ..Config::default() });
    let read = ["read", "-d", &target.name(), "--lba", "0", "--blocks", "1", "-g", "emu"];
    refuse(&read, 1, "blocks of 2^40 bytes are not supported");
    let absent = [&read[..], &["--nsid", "7"]].concat();
    refuse(&absent, 2, "no active namespace 7");
}
