//! `onehop bench gather`: streams, caches, bytes, refusals.

use std::fs;

use serde_json::Value;

use crate::run::{Dir, code, onehop, refuse, stdout, succeed};

/// The smallest measurement.
const SMALL: [&str; 6] = ["bench", "gather", "-g", "emu", "--batches", "3"];

fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SMALL[..], more].concat()
}

fn rows(document: &Value) -> &[Value] {
    document["rows"].as_array().unwrap()
}

#[test]
fn every_stream_cache_and_batch_has_a_row() {
    let given = ["-d", "sim:mem:1M", "--batch", "48,200", "--cache", "2M,64K", "--zipf", "1.2"];
    let document = succeed(&args(&given));
    assert_eq!(rows(&document).len(), 8);
    for (ids, cache, batch) in
        [("uniform", 2 << 20, 48), ("uniform", 64 << 10, 200), ("zipf", 2 << 20, 200), ("zipf", 64 << 10, 48)]
    {
        let is_it = |row: &&Value| row["ids"] == ids && row["cache_bytes"] == cache && row["batch"] == batch;
        let row = rows(&document).iter().find(is_it).unwrap();
        for field in ["rows_per_s", "kernel_rows_per_s", "cold_rows_per_s", "cold_reads_per_s", "p50_us"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{field} {row}");
        }
        // Three gathers are too few for other percentiles.
        assert!(row["p99_us"].is_null() && row["p999_us"].is_null() && row["latency_samples"] == 3, "{row}");
        let of_plain =
            row["cold_reads_per_s"].as_f64().unwrap() / document["plain_reads_per_s"].as_f64().unwrap();
        assert!((row["cold_of_drive"].as_f64().unwrap() / of_plain - 1.0).abs() < 1e-6, "{row}");
        assert!((0.0..=1.0).contains(&row["hit_rate"].as_f64().unwrap()), "{row}");
        assert!(row["commands_per_page"].as_f64().unwrap() >= 1.0, "{row}");
        if cache == 2 << 20 {
            assert_eq!(
                (&row["commands_per_page"], &row["cold_commands_per_page"]),
                (&1.0.into(), &1.0.into())
            );
        }
    }
    let all = 4 * 2 * (48 + 200) * 2;
    assert_eq!((&document["verified"], &document["verified_rows"]), (&true.into(), &all.into()));
    assert!(document["verified_by"].as_str().unwrap().contains("written"));
    assert_eq!(document["simulated"], serde_json::json!(["drive", "gpu"]));
    assert_eq!((&document["table_bytes"], &document["table_rows"]), (&(1 << 20).into(), &4096.into()));
}

#[test]
fn a_table_that_exists_is_read_and_not_written() {
    let dir = Dir::new();
    let (image, bytes) = dir.noise("disk.img", 1 << 20);
    let drive = format!("sim:{image}");
    let given = ["-d", &drive, "--size", "300K", "--row", "264", "--batch", "100", "--page", "1K"];
    let document = succeed(&args(&given));
    assert_eq!((&document["table_bytes"], &document["table_rows"]), (&307_200.into(), &1163.into()));
    assert!(!document["verified_by"].as_str().unwrap().contains("written"));
    assert!(fs::read(&image).unwrap() == bytes, "the drive was written");
}

#[test]
fn recorded_streams_are_text_or_numbers() {
    let dir = Dir::new();
    let (text, binary) = (dir.file("ids.txt"), dir.file("ids.u64"));
    fs::write(&text, "1\n2\n4095\n").unwrap();
    fs::write(&binary, [7_u64, 7, 9, 11].map(u64::to_le_bytes).concat()).unwrap();
    for (file, count) in [(&text, 3), (&binary, 4)] {
        let given = ["-d", "sim:mem:1M", "--batch", "8", "--cache", "2M", "--ids", file];
        let document = succeed(&args(&given));
        assert_eq!((rows(&document).len(), &document["recorded_ids"]), (1, &count.into()));
        let row = &rows(&document)[0];
        assert_eq!((&row["ids"], &row["hit_rate"]), (&"recorded".into(), &1.0.into()), "{row}");
        assert_eq!(row["cold_commands_per_page"], 1.0);
    }
    fs::write(&text, "1\n4096\n").unwrap();
    refuse(&args(&["-d", "sim:mem:1M", "--ids", &text]), 2, "id 2 is row 4096");
    fs::write(&text, "one\n").unwrap();
    refuse(&args(&["-d", "sim:mem:1M", "--ids", &text]), 2, "neither");
    refuse(&args(&["-d", "sim:mem:1M", "--ids", &dir.file("nowhere")]), 1, "nowhere");
    refuse(&args(&["--ids", &text, "--pattern", "zipf"]), 2, "cannot be used with");
}

#[test]
fn the_requested_route_is_used() {
    let given = ["-d", "sim:mem:1M", "--batch", "8", "--cache", "64K", "--pattern", "uniform", "--route"];
    for route in ["gpu/tier3", "gpu/tier1"] {
        assert_eq!(succeed(&args(&[&given[..], &[route]].concat()))["route"], route);
    }
    refuse(&args(&[&given[..], &["cpu/direct"]].concat()), 2, "gpu/ route");
    refuse(&args(&[&given[..], &["gpu/tier9"]].concat()), 2, "routes are");
}

#[test]
fn a_drive_that_fails_gives_no_results() {
    let document = refuse(&args(&["-d", "sim:mem:1M?fault=media@lba=8-8", "--batch", "48"]), 1, "failed");
    assert!(document["rows"].is_null(), "{document:#}");
}

#[test]
fn the_text_is_a_table() {
    let output = onehop(&args(&["-d", "sim:mem:1M", "--batch", "48", "--cache", "2M"]));
    let text = stdout(&output);
    assert_eq!(code(&output), 0, "{text}");
    for word in
        ["reference", "rows/s", "of drive", "uniform", "zipf", "every row of every gather", "simulated"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn invalid_arguments_are_refused() {
    for (given, text) in [
        (&["--row", "6"][..], "multiples of 4"),
        (&["--row", "0"], "multiples of 4"),
        (&["--row", "2M"], "up to 1M"),
        (&["--row", "256", "--stride", "128"], "no less"),
        (&["--row", "1M", "-d", "sim:mem:512K"], "--row"),
        (&["--page", "100"], "powers of two"),
        (&["--page", "128K"], "powers of two"),
        (&["--cache", "0"], "cache of 0"),
        (&["--batch", "0"], "1 to"),
        (&["--zipf", "0"], "above 0"),
        (&["--zipf", "nan"], "above 0"),
    ] {
        refuse(&args(given), 2, text);
    }
}
