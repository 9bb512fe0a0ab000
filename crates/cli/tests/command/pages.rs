//! `onehop bench pages`: rows, bytes, refusals.

use std::io::Write;

use serde_json::Value;

use crate::run::{Dir, document, onehop, refuse};

/// The smallest measurement in a folder.
fn measure(root: &str, more: &[&str]) -> Option<Value> {
    let small = ["--json", "bench", "pages", "--root", root, "-g", "emu", "--size", "4M", "--time", "1ms"];
    let small = [&small[..], &["--repeats", "2", "--threads", "2", "--depth", "1,4"], more].concat();
    let output = onehop(&small);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && stderr.contains("mount") {
        let _ = writeln!(std::io::stderr(), "SKIPPED: nothing can be mounted here: {}", stderr.trim());
        return None;
    }
    assert!(output.status.success(), "{stderr}");
    Some(document("bench pages", &output))
}

#[test]
fn every_way_size_and_direction_has_a_row() {
    let dir = Dir::new();
    let root = dir.path().display().to_string();
    let Some(document) = measure(&root, &["--page", "4K,64K"]) else { return };
    let rows = document["rows"].as_array().unwrap();
    // Two sizes, directions and depths; the library is for GPU memory.
    assert_eq!(rows.len(), 2 * 2 * 2 * (2 + 3));
    for row in rows {
        assert!(row["gbps"].as_f64().unwrap() > 0.0 && row["p50_us"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["each_gbps"].as_array().unwrap().len(), 2);
        // Each round moves the whole file.
        assert!(row["verified"].as_u64().unwrap() * row["page"].as_u64().unwrap() >= 3 * (4 << 20), "{row}");
    }
    let ways = |by: &str| rows.iter().filter(|row| row["by"] == by).count();
    assert_eq!((ways("registered") + ways("staged"), ways("ring"), ways("threads")), (8, 16, 16));
    assert_eq!((&document["gpu"], &document["simulated"][0]), (&"emu".into(), &"gpu".into()));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something is left");
    let some = ["--page", "8K", "--by", "threads", "--memory", "host", "--io", "write"];
    let document = measure(&root, &some).unwrap();
    assert_eq!((document["rows"].as_array().unwrap().len(), &document["gpu"]), (2, &Value::Null));
    let Some(document) = measure("/dev/shm", &["--page", "8K", "--by", "library", "--memory", "vram"]) else {
        return;
    };
    let rows = document["rows"].as_array().unwrap();
    assert!(rows.len() == 4 && rows.iter().all(|row| row["by"] == "registered"), "{rows:?}");
}

#[test]
fn impossible_sizes_are_refused() {
    let bench = |more: &[&'static str]| [&["bench", "pages"], more].concat();
    refuse(&bench(&["--page", "1000"]), 2, "multiples of 4K up to 16M");
    refuse(&bench(&["--page", "32M"]), 2, "multiples of 4K up to 16M");
    refuse(&bench(&["--size", "64K", "--page", "4K"]), 2, "at most --size");
    refuse(&bench(&["-g", "first"]), 2, "a CUDA number");
    refuse(&bench(&["--root", "/nowhere", "--memory", "host"]), 1, "/nowhere");
}
