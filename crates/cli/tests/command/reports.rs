//! The archive of `onehop report`: what it contains, and what it must not contain.

use std::collections::BTreeMap;
use std::io::Read;

use serde_json::{Value, json};

use crate::run::{Dir, code, command, document, refuse, schema};

const SERIAL: &str = "PRIVATE-S6XYNS0T12";
const USER: &str = "ada-of-the-lab";

/// Runs the command as a user of this name; returns exit code, document and files of the archive.
fn report(dir: &Dir, name: &str, drive: &str, more: &[&str]) -> (i32, Value, BTreeMap<String, String>) {
    let out = dir.file(name);
    let args = [&["--json", "report", "-d", drive, "--out", &out, "--budget", "2s"], more].concat();
    let output = command(&args).env("USER", USER).env("HOME", dir.path()).output().unwrap();
    let document = document("report", &output);
    let bytes = std::fs::read(&out).unwrap();
    assert_eq!(document["bytes"], bytes.len());
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let header = entry.header().clone();
        let owner = (header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap());
        assert_eq!((owner, header.username().unwrap()), ((0, 0, 0), Some("")));
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        let path = entry.path().unwrap().strip_prefix("onehop-report").unwrap().to_str().unwrap().to_owned();
        files.insert(path, text);
    }
    (code(&output), document, files)
}

/// Whether a text contains a whole word.
fn has_word(text: &str, word: &str) -> bool {
    let is_end = |c: Option<char>| !c.is_some_and(char::is_alphanumeric);
    text.match_indices(word).any(|(at, _)| {
        is_end(text[..at].chars().next_back()) && is_end(text[at + word.len()..].chars().next())
    })
}

#[test]
fn a_report_contains_results_and_no_names() {
    let dir = Dir::new();
    let drive = format!("sim:{}?size=16M&serial={SERIAL}", dir.file("disk.img"));
    let (code, document, files) = report(&dir, "report.tar.gz", &drive, &["-g", "emu"]);
    assert_eq!(code, 0, "{document:#}");
    assert!(document["removed"].as_u64().unwrap() > 3, "{document:#}");
    let names: Vec<_> = files.keys().map(String::as_str).collect();
    for name in [
        "README.txt",
        "check-p2p.txt",
        "doctor.json",
        "identify.json",
        "report.json",
        "sweep.json",
        "topo.txt",
    ] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let host = host.trim();
    for (name, text) in &files {
        for secret in [SERIAL, USER, dir.path().to_str().unwrap()] {
            assert!(
                !text.to_lowercase().contains(&secret.to_lowercase()),
                "{name} contains {secret}: {text}"
            );
        }
        // A short name such as vm also occurs as an ordinary word.
        assert!(
            host.len() < 4 || host == "localhost" || !has_word(text, host),
            "{name} contains {host}: {text}"
        );
    }
    // Every document still matches its schema.
    for (file, command) in [
        ("doctor", "doctor"),
        ("topo", "topo"),
        ("identify", "drive identify"),
        ("check-p2p", "drive check-p2p"),
        ("sweep", "bench sweep"),
    ] {
        let document: Value = serde_json::from_str(&files[&format!("{file}.json")]).unwrap();
        schema::check(command, &document);
        assert!(document.get("error").is_none(), "{document:#}");
    }
    let identity: Value = serde_json::from_str(&files["identify.json"]).unwrap();
    assert_eq!((&identity["serial"], &identity["simulated"]), (&json!("[serial]"), &json!(["drive"])));
    let sweep: Value = serde_json::from_str(&files["sweep.json"]).unwrap();
    let rows = sweep["rows"].as_array().unwrap();
    let is_read = |row: &Value| ["READ", "RANDREAD"].contains(&row["IoType"].as_str().unwrap());
    assert!(rows.iter().any(|row| row["result"].is_object()) && rows.iter().all(is_read), "{sweep:#}");
    assert!(files["check-p2p.txt"].contains("gpu/tier3") && !files["doctor.txt"].contains('\x1b'));
}

#[test]
fn the_drive_is_not_written() {
    let dir = Dir::new();
    let (image, before) = dir.noise("disk.img", 1 << 20);
    let (code, ..) = report(&dir, "report.tar.gz", &format!("sim:{image}"), &["-g", "emu"]);
    assert_eq!(code, 0);
    assert!(std::fs::read(&image).unwrap() == before, "a report wrote to the drive");
}

/// A report is also for what does not work: it contains the failure and the other results.
#[test]
fn a_report_includes_a_missing_drive() {
    let dir = Dir::new();
    let (code, document, files) = report(&dir, "report.tar.gz", "ffff:17:1f.7", &["-g", "emu"]);
    assert_eq!((code, &document["error"]["kind"]), (3, &json!("not_possible")), "{document:#}");
    assert!(files.contains_key("doctor.json") && !files.contains_key("sweep.json"), "{document:#}");
    let failed: Value = serde_json::from_str(&files["identify.json"]).unwrap();
    assert_eq!(failed["error"]["exit_code"], 3);
    assert!(files["identify.txt"].contains("no PCI device of this address"));
}

#[test]
fn nothing_is_overwritten() {
    let dir = Dir::new();
    let (there, before) = dir.noise("there.tar.gz", 100);
    let args = ["report", "-d", "sim:mem:16M", "-g", "emu"];
    refuse(&[&args[..], &["--out", &there]].concat(), 2, "exists");
    assert!(std::fs::read(&there).unwrap() == before);
    refuse(&["report", "-d", "/dev/nvme0n1", "--out", &dir.file("x")], 2, "PCI address");
    let nowhere = dir.file("no/such/folder.tar.gz");
    refuse(&[&args[..], &["--out", &nowhere]].concat(), 1, "no/such/folder.tar.gz");
}
