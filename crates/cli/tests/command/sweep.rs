//! `onehop bench sweep`: routes, bytes, limits, reports, comparisons, refusals.

use std::fs;

use crate::run::{Dir, assert_page, refuse, succeed};

/// The smallest measurement.
const SMALL: [&str; 8] = ["--block", "4K", "--repeats", "3", "--time", "1ms", "--memory", "64K"];

fn args<'a>(front: &[&'a str], back: &[&'a str]) -> Vec<&'a str> {
    [&["bench", "sweep", "-g", "emu"], front, &SMALL, back].concat()
}

#[test]
fn every_route_of_a_simulated_drive_has_a_row_or_a_reason() {
    let dir = Dir::new();
    let folder = dir.file("report");
    let document = succeed(&args(&["-d", "sim:mem:1M?cmb=1M", "--depth", "1,4", "--report", &folder], &[]));
    let rows = document["rows"].as_array().unwrap();
    for route in
        ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned", "cpu/memcpy"]
    {
        for io in ["READ", "RANDREAD", "WRITE"] {
            let same = |row: &&serde_json::Value| row["route"] == route && row["IoType"] == io;
            assert_eq!(rows.iter().filter(same).count(), 2, "{route} {io}");
            for row in rows.iter().filter(same) {
                let result = &row["result"];
                assert_eq!(result["verified"], true, "{row}");
                assert_eq!(result["gbps_each"].as_array().unwrap().len(), 3);
                for field in
                    ["DataSetSize", "IOSize", "Throughput", "Avg_Latency", "ops", "total_time", "iops"]
                {
                    assert!(result[field].as_f64().unwrap() > 0.0, "{field} {row}");
                }
                assert!(result["limit"]["what"].is_string() && result["of_limit"].is_number(), "{row}");
                assert!(result["cpu_ns_per_byte"].as_f64().unwrap() >= 0.0);
                // A percentile needs ten samples beyond it.
                let samples = result["latency_samples"].as_u64().unwrap();
                let times: Vec<f64> = ["p50_us", "p99_us", "p999_us"]
                    .iter()
                    .filter_map(|field| result[field].as_f64())
                    .collect();
                assert_eq!(times.len(), [1, 1000, 10_000].iter().filter(|least| samples >= **least).count());
                assert!(times[0] > 0.0 && times.is_sorted(), "{row}");
                assert_eq!(result["latency_apart"], route.starts_with("gpu/"), "{row}");
                if !route.starts_with("gpu/") {
                    assert_eq!(result["ops"], samples, "percentiles are of all blocks: {row}");
                }
            }
        }
    }
    for route in ["cpu/cached", "cufile"] {
        let row = rows.iter().find(|row| row["route"] == route).unwrap();
        assert!(row["result"].is_null() && row["note"].as_str().unwrap().contains("--file"), "{row}");
    }
    assert_eq!(document["simulated"], serde_json::json!(["drive", "gpu"]));

    assert_page(&folder, "sweep", &document, "nothing about hardware");
}

#[test]
fn files_are_written_only_with_consent() {
    let dir = Dir::new();
    let (file, bytes) = dir.noise("a.bin", 300_000);
    let document = succeed(&args(&["--file", &file, "--depth", "2"], &[]));
    let rows = document["rows"].as_array().unwrap();
    let measured = |route: &str| rows.iter().any(|r| r["route"] == route && r["result"]["verified"] == true);
    assert!(measured("cpu/cached") && measured("cpu/memcpy"));
    assert!(rows.iter().all(|row| row["IoType"].as_str().unwrap().ends_with("READ")));
    let cufile = rows.iter().find(|row| row["route"] == "cufile").unwrap();
    assert!(cufile["result"].is_null() && cufile["note"].as_str().unwrap().contains("cuFile"), "{cufile}");
    assert_eq!(fs::read(&file).unwrap(), bytes, "reading changed the file");

    refuse(&args(&["--file", &file, "--io", "write"], &[]), 2, "--yes");
    assert_eq!(fs::read(&file).unwrap(), bytes);
    let written =
        succeed(&args(&["--file", &file, "--io", "write,randwrite", "--yes", "--size", "64K"], &[]));
    assert!(written["rows"].as_array().unwrap().iter().any(|row| row["result"]["verified"] == true));
    let after = fs::read(&file).unwrap();
    assert!(after[65536..] == bytes[65536..] && after[..65536] != bytes[..65536]);
    let pinned: Vec<_> =
        written["rows"].as_array().unwrap().iter().filter(|row| row["route"] == "cpu/pinned").collect();
    for row in &pinned {
        // Without O_DIRECT or io_uring, the note says so.
        let why = row["note"].as_str().unwrap_or_default();
        let excused = ["O_DIRECT", "page cache", "io_uring"].iter().any(|word| why.contains(word));
        assert!(row["result"]["verified"] == true || excused, "{row}");
    }
    assert!(pinned.len() >= 2);

    let scratch = dir.file("scratch.bin");
    succeed(&args(&["--create", &scratch, "--size", "256K", "--route", "cpu/cached"], &[]));
    assert!(!fs::exists(&scratch).unwrap(), "the scratch file was not removed");
    refuse(&args(&["--create", &file], &[]), 1, "exists");
}

#[test]
fn drives_are_written_only_with_their_serial_number() {
    let dir = Dir::new();
    let (image, bytes) = dir.noise("disk.img", 1 << 20);
    let drive = format!("sim:{image}");
    refuse(&args(&["-d", &drive, "--io", "write"], &[]), 2, "--serial");
    refuse(&args(&["-d", &drive, "--io", "write", "--yes", "--serial", "OTHER"], &[]), 2, "serial number");
    let read = succeed(&args(&["-d", &drive, "--route", "cpu/direct", "--depth", "1"], &[]));
    assert!(read["rows"].as_array().unwrap().iter().all(|row| row["IoType"] != "WRITE"));
    assert_eq!(fs::read(&image).unwrap(), bytes);
    let more =
        ["--io", "write", "--yes", "--serial", "ONEHOP-SIM-1", "--size", "64K", "--route", "cpu/direct"];
    succeed(&args(&[&["-d", &drive], &more[..]].concat(), &[]));
    let after = fs::read(&image).unwrap();
    assert!(after[65536..] == bytes[65536..] && after[..4096] != bytes[..4096]);
}

#[test]
fn faster_than_the_link_is_a_failure() {
    let given =
        args(&["-d", "sim:mem:1M", "--route", "cpu/direct", "--depth", "1", "--link", "0.000001"], &[]);
    let document = refuse(&given, 1, "faster than possible");
    assert_eq!(document["rows"][0]["result"]["limit"]["hard"], true);
    assert!(document["rows"][0]["result"]["of_limit"].as_f64().unwrap() > 1.0);
}

#[test]
fn a_failing_drive_gives_no_results() {
    let given = args(&["-d", "sim:mem:1M?fault=media@lba=8-8", "--route", "cpu/direct", "--depth", "1"], &[]);
    let document = refuse(&given, 1, "failed");
    assert!(document["rows"].is_null(), "{document}");
}

#[test]
fn two_runs_are_compared() {
    let dir = Dir::new();
    let folder = dir.file("one");
    let few =
        ["-d", "sim:mem:1M", "--route", "cpu/direct", "--depth", "1", "--io", "read", "--report", &folder];
    succeed(&args(&few, &[]));
    let json = format!("{folder}/sweep.json");
    let two = dir.file("two");
    let found = succeed(&["bench", "sweep", "--compare", &json, &json, "--report", &two]);
    assert_eq!(found["changes"][0]["verdict"], "same");
    assert_eq!(found["differ"], serde_json::json!([]));
    assert!(fs::read_to_string(format!("{two}/compare.html")).unwrap().contains("side by side"));

    let mut faster: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let result = &mut faster["rows"][0]["result"];
    (result["gbps"], result["gbps_each"]) = (900.0.into(), serde_json::json!([900.0, 900.0, 900.0]));
    fs::write(dir.file("faster.json"), faster.to_string()).unwrap();
    let found = succeed(&["bench", "sweep", "--compare", &json, &dir.file("faster.json")]);
    assert_eq!(found["changes"][0]["verdict"], "faster");

    for (name, content, text) in [
        ("none.json", "", "EOF"),
        ("other.json", "{\"a\":1}", "onehop_bench_sweep"),
        ("new.json", "{\"onehop_bench_sweep\":7}", "version 7"),
        ("nan.json", "{\"onehop_bench_sweep\":1,\"rows\":[]}", "missing field"),
    ] {
        let path = dir.file(name);
        fs::write(&path, content).unwrap();
        refuse(&["bench", "sweep", "--compare", &json, &path], 1, text);
    }
    refuse(&["bench", "sweep", "--compare", &json, &dir.file("nowhere.json")], 1, "nowhere.json");
}

#[test]
fn invalid_arguments_are_refused() {
    refuse(&["bench", "sweep", "--route", "gpu/tier9"], 2, "routes are");
    refuse(&["bench", "sweep", "--io", "erase"], 2, "randread");
    refuse(&["bench", "sweep", "--block", "0"], 2, "above 0");
    refuse(&["bench", "sweep", "--size", "0"], 2, "above 0");
    refuse(&["bench", "sweep", "-g", "emu", "-d", "sim:mem:1M", "--block", "100"], 2, "multiples of 512");
    refuse(&["bench", "sweep", "-g", "emu", "-d", "sim:mem:1M", "--block", "16M"], 3, "such blocks");
    refuse(&["bench", "sweep", "--link", "nan"], 2, "63.0");
    refuse(&["bench", "sweep", "--file", "/dev/null", "-g", "emu"], 2, "regular");
    refuse(&["bench", "sweep", "--file", "/nowhere/x", "-g", "emu"], 1, "/nowhere/x");
    let dir = Dir::new();
    let (file, _) = dir.noise("file", 10);
    let commands =
        [&["bench", "sweep", "-g", "emu"][..], &["bench", "queue"], &["bench", "load", &file, "-g", "emu"]];
    for command in commands {
        refuse(&[command, &["--report", &format!("{file}/below")]].concat(), 1, "below");
    }
}

#[test]
fn a_full_sweep_covers_more_and_ends_in_time() {
    let full = ["bench", "sweep", "-g", "emu", "-d", "sim:mem:4M", "--full", "--budget", "1s"];
    let document = succeed(&[&full[..], &["--repeats", "1", "--time", "1ms"]].concat());
    let rows = document["rows"].as_array().unwrap();
    let has = |field: &str, value: serde_json::Value| rows.iter().any(|row| row[field] == value);
    assert!(has("IoType", "RANDWRITE".into()) && has("depth", 128.into()) && has("Threads", 4.into()));
    assert!(has("block", 512.into()) && has("block", (16 << 20).into()));
    let late = rows.iter().filter(|row| row["note"].as_str().is_some_and(|note| note.contains("--budget")));
    let late = late.count();
    assert!(late > 0 && late < rows.len(), "{late} of {}", rows.len());
}
