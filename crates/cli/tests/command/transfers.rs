//! Reads and writes of drives by every route.

use serde_json::{Value, json};

use crate::run::{Dir, code, onehop, refuse, stdout, succeed};

const ROUTES: [(&str, &str, [&str; 3]); 6] = [
    ("gpu/tier3", "gpu", ["vram", "vram", "vram"]),
    ("gpu/posted", "gpu", ["cmb", "vram", "vram"]),
    ("gpu/tier2", "gpu", ["host", "host", "vram"]),
    ("gpu/tier1", "gpu", ["host", "host", "host"]),
    ("cpu/direct", "cpu", ["host", "host", "vram"]),
    ("cpu/pinned", "cpu", ["host", "host", "host"]),
];

const FIELDS: [&str; 14] = [
    "bytes",
    "seconds",
    "gbps",
    "route",
    "initiator",
    "simulated",
    "placement",
    "gpu",
    "why_not_better",
    "crc32c",
    "verified",
    "commands",
    "retries",
    "errors",
];

fn check(document: &Value, bytes: u64, data: &[u8]) {
    for field in FIELDS {
        assert!(document.get(field).is_some(), "{field}: {document:#}");
    }
    assert_eq!(document["bytes"], bytes);
    assert_eq!(document["crc32c"], format!("{:08x}", crc32c::crc32c(data)));
    assert_eq!(document["simulated"], json!(["drive", "gpu"]));
    assert_eq!(document["gpu"], "emu");
    assert_eq!(document["errors"], 0);
    let (gbps, seconds) = (document["gbps"].as_f64().unwrap(), document["seconds"].as_f64().unwrap());
    assert!((gbps * seconds * 1e9 / bytes as f64 - 1.0).abs() < 1e-6, "{document:#}");
}

#[test]
fn every_route_writes_and_reads_every_byte() {
    let dir = Dir::new();
    let (input, data) = dir.noise("in.bin", 3_000_000);
    let mut padded = data.clone();
    padded.resize(733 * 4096, 0);
    let out = dir.file("out.bin");
    for (i, (route, initiator, [sq, cq, place])) in ROUTES.into_iter().enumerate() {
        let drive = format!("sim:{}?size=8M&lba=4096&cmb=1M&serial=S-{i}", dir.file(&format!("disk{i}.img")));
        let serial = format!("S-{i}");
        let write = [
            "write", "-d", &drive, "--lba", "3", "--in", &input, "--serial", &serial, "--yes", "--pad",
            "--verify", "--route", route,
        ];
        let wrote = succeed(&write);
        check(&wrote, 733 * 4096, &padded);
        assert_eq!(wrote["verified"], true);
        let read = [
            "read", "-d", &drive, "--lba", "3", "--blocks", "733", "--route", route, "--out", &out,
            "--verify",
        ];
        let read = succeed(&read);
        check(&read, 733 * 4096, &padded);
        assert_eq!((&read["route"], &read["initiator"]), (&json!(route), &json!(initiator)));
        assert_eq!(read["placement"], json!({ "sq": sq, "cq": cq, "data": place }));
        assert_eq!((&read["verified"], &read["why_not_better"]), (&json!(true), &json!([])));
        assert!(std::fs::read(&out).unwrap() == padded, "{route}");
        // The image has the bytes in the right place, and nothing else was changed.
        let image = std::fs::read(dir.file(&format!("disk{i}.img"))).unwrap();
        assert!(image[3 * 4096..736 * 4096] == padded, "{route}");
        assert!(image[..3 * 4096].iter().chain(&image[736 * 4096..]).all(|b| *b == 0), "{route}");
    }
}

#[test]
fn threads_queues_and_depths() {
    let dir = Dir::new();
    let (image, data) = dir.noise("disk.img", 4 << 20);
    let drive = format!("sim:{image}?mdts=2");
    for how in [
        &["--mode", "owner", "--queues", "1", "--depth", "1"][..],
        &["--mode", "owner", "--queues", "5", "--depth", "3"],
        &["--mode", "shared", "--threads", "1"],
        &["--mode", "shared", "--threads", "64", "--depth", "8"],
        &["--route", "cpu/direct", "--depth", "65535"],
        &["--route", "cpu/pinned", "--depth", "1"],
    ] {
        let args = [&["read", "-d", &drive, "--lba", "1", "--blocks", "8191"], how].concat();
        let read = succeed(&args);
        check(&read, 8191 * 512, &data[512..]);
        assert_eq!(read["commands"], (8191u64 * 512).div_ceil(16 << 10), "{how:?}");
        assert_eq!(read["verified"], Value::Null);
    }
}

#[test]
fn auto_selects_the_best_route_and_reports_the_others() {
    let best = succeed(&["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "8"]);
    assert_eq!((&best["route"], &best["why_not_better"]), (&json!("gpu/tier3"), &json!([])));
    // GPU routes do not support separate metadata.
    let apart = ["read", "-d", "sim:mem:1M?ms=8", "--lba", "0", "--blocks", "8", "--verify"];
    let missed = succeed(&apart);
    assert_eq!(missed["route"], "cpu/direct");
    let routes: Vec<_> =
        missed["why_not_better"].as_array().unwrap().iter().map(|no| no["route"].clone()).collect();
    assert_eq!(routes, ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1"]);
    for no in missed["why_not_better"].as_array().unwrap() {
        assert!(no["reason"].as_str().unwrap().contains("metadata"), "{no}");
        assert!(!no["fix"].as_str().unwrap().is_empty());
    }
    // A named route is used, or the command fails.
    refuse(&[&apart[..], &["--route", "gpu/tier2"]].concat(), 3, "metadata");
    refuse(&[&apart[..], &["--mode", "owner"]].concat(), 3, "no route works");
    // Without a CMB, the submission queue of gpu/posted is in host memory, and the report says why.
    let posted =
        succeed(&["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "8", "--route", "gpu/posted"]);
    assert_eq!(posted["placement"], json!({ "sq": "host", "cq": "vram", "data": "vram" }));
    assert!(posted["why_not_better"][0]["reason"].as_str().unwrap().contains("cmb"), "{posted:#}");
}

#[test]
fn drives_with_unusual_properties() {
    for options in [
        "queues=1",
        "mqes=3&dstrd=2",
        "scatter=1&mdts=3",
        "lba=65536",
        "ms=8&ext=1",
        "ms=16",
        "mdts=0",
        "workers=0",
    ] {
        let drive = format!("sim:mem:4M?{options}");
        for route in ["auto", "cpu/direct", "cpu/pinned"] {
            let args = ["read", "-d", &drive, "--lba", "1", "--blocks", "40", "--verify", "--route", route];
            assert_eq!(succeed(&args)["verified"], true, "{options} {route}");
        }
    }
    let second = succeed(&["read", "-d", "sim:mem:4M?ns=2", "--nsid", "2", "--lba", "0", "--blocks", "1"]);
    assert_eq!(second["bytes"], 512);
}

#[test]
fn faults_are_recovered_or_reported() {
    let read = |fault: &str, route: &str| {
        let drive = format!("sim:mem:4M?fault={fault}");
        let args =
            ["read", "-d", &drive, "--lba", "0", "--blocks", "8192", "--route", route, "--timeout", "300ms"];
        let start = std::time::Instant::now();
        let (code, report) = crate::run::json(&[&args[..], &["--verify"]].concat());
        (code, report, start.elapsed().as_secs_f64())
    };
    for route in ["gpu/tier3", "cpu/direct", "cpu/pinned"] {
        for fault in ["fail-once@op=read,n=3", "lost@op=read,n=5", "late@op=read,n=4,delay=20ms"] {
            let (code, report, took) = read(fault, route);
            assert_eq!((code, &report["verified"]), (0, &json!(true)), "{fault} {route}: {report:#}");
            // After a lost command, the transfer is repeated.
            let counts = (report["retries"].as_u64().unwrap(), report["repeats"].as_u64().unwrap());
            let expected = (1, u64::from(fault.starts_with("lost")));
            assert!(counts == expected || fault.starts_with("late"), "{fault} {route}: {report:#}");
            assert!(report["seconds"].as_f64().unwrap() <= took, "{fault} {route}: {report:#}");
            let recovered = report["incidents"].as_array().unwrap().len();
            assert_eq!(recovered, usize::from(fault.starts_with("lost")), "{fault} {route}: {report:#}");
        }
        let (code, report, _) = read("media@lba=100", route);
        assert_eq!((code, &report["error"]["kind"]), (1, &json!("failed")), "{route}: {report:#}");
        let (code, _, _) = read("gone@op=read,n=9", route);
        assert_eq!(code, 1, "{route}");
    }
}

#[test]
fn a_recovery_of_the_flush_is_reported() {
    let dir = Dir::new();
    let (input, _) = dir.noise("in.bin", 4096);
    let write = [
        "write",
        "-d",
        "sim:mem:4M?vwc=1&serial=S&fault=lost@op=flush,n=1",
        "--lba",
        "0",
        "--in",
        &input,
        "--serial",
        "S",
        "--yes",
        "--timeout",
        "300ms",
    ];
    let wrote = succeed(&write);
    assert_eq!(wrote["incidents"].as_array().unwrap().len(), 1, "{wrote:#}");
}

#[test]
fn the_text_reports_the_transfer() {
    let output = onehop(&["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "8"]);
    let text = stdout(&output);
    assert_eq!(code(&output), 0);
    for word in ["gpu/tier3", "simulated", "emu", "4096 bytes by 1 command", "1 kernel launch", "verified"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

/// Every route reports three retries after four attempts.
#[test]
fn every_route_counts_retries_alike() {
    let drive = "sim:mem:64M?cmb=1M&fault=lost@lba=2-2";
    for route in ["cpu/direct", "cpu/pinned", "gpu/tier3", "gpu/tier1"] {
        let read = ["read", "-d", drive, "--lba", "0", "--blocks", "4", "-g", "emu", "--timeout", "200ms"];
        refuse(&[&read[..], &["--route", route]].concat(), 1, "and not after 3 retries");
    }
}
