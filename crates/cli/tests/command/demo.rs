//! `onehop demo`.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::run::{code, onehop, refuse, stdout, succeed};

#[test]
fn the_demo_verifies_every_tensor() {
    let start = Instant::now();
    let demo = succeed(&["demo"]);
    assert!(start.elapsed() < Duration::from_secs(20));
    assert_eq!((&demo["verified"], &demo["route"]), (&json!(true), &json!("gpu/tier3")));
    assert_eq!(demo["simulated"], json!(["drive", "gpu"]));
    assert_eq!(demo["violations"], json!([]));
    let tensors = demo["tensor_checks"].as_array().unwrap();
    assert!(tensors.len() >= 5);
    assert!(tensors.iter().all(|t| t["verified"] == true && t["crc32c"] == t["expected"]));
    assert_eq!((&demo["path"], &demo["file_system"]), (&json!("/models/model.safetensors"), &json!("FAT16")));
    let bytes: u64 = tensors.iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert!(bytes >= 15 << 20 && demo["bytes"].as_u64().unwrap() >= bytes);
    let text = stdout(&onehop(&["demo", "--size", "1M"]));
    assert!(text.contains("simulated") && text.contains("matches the model's checksum"), "{text}");
    // These lines are quoted in the documentation.
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/get-started.md")).unwrap();
    let is_shown =
        |line: &&str| ["route  ", "verified  ", "rules  "].iter().any(|label| line.starts_with(label));
    let shown: Vec<_> = page.lines().filter(is_shown).collect();
    assert_eq!(shown.len(), 3, "{shown:?}");
    for line in shown {
        assert!(text.contains(line.trim_end_matches([' ', '…'])), "docs/get-started.md shows {line}: {text}");
    }
}

#[test]
fn the_same_seed_gives_the_same_model() {
    let crc = |seed| succeed(&["demo", "--size", "256K", "--seed", seed])["crc32c"].clone();
    assert_eq!(crc("5"), crc("5"));
    assert_ne!(crc("5"), crc("6"));
    assert_eq!(crc("0"), crc("0"));
}

#[test]
fn the_demo_recovers_from_faults() {
    // The first commands read the file system, by the CPU. These faults affect reads of the model.
    let faults = [
        "--fault",
        "fail-once@op=read,n=46",
        "--fault",
        "lost@op=read,n=51",
        "--fault",
        "late@n=62,delay=20ms",
    ];
    for route in ["gpu/tier3", "gpu/posted", "gpu/tier1", "cpu/direct", "cpu/pinned"] {
        let demo = succeed(&[&["demo", "--size", "4M", "--route", route], &faults[..]].concat());
        assert_eq!(
            (&demo["verified"], &demo["faults_struck"]),
            (&json!(true), &json!(3)),
            "{route}: {demo:#}"
        );
        assert!(demo["retries"].as_u64().unwrap() >= 2, "{route}");
        assert_eq!(demo["route"], route);
    }
}

#[test]
fn the_demo_uses_the_requested_queues_and_threads() {
    let queues = |more: &[&str]| {
        let demo = succeed(&[&["demo", "--size", "256K"], more].concat());
        assert_eq!(demo["verified"], true, "{demo:#}");
        demo["queues"].clone()
    };
    assert_eq!(queues(&["--queues", "3"])["count"], 3);
    assert_eq!(queues(&["--mode", "shared", "--threads", "5"])["threads"], 5);
}

#[test]
fn the_demo_refuses_invalid_arguments() {
    refuse(&["demo", "--fault", "latte@n=1"], 2, "late, reorder");
    refuse(&["demo", "--size", "1K"], 2, "64K");
    refuse(&["demo", "--size", "2T"], 2, "1G");
    refuse(&["demo", "-g", "99"], 3, "GPU 99");
    refuse(&["demo", "--size", "64K", "--fault", "media@lba=17"], 1, "failed");
    assert_eq!(code(&onehop(&["demo", "--size", "64K", "--fault", "gone@op=read,n=2"])), 1);
}
