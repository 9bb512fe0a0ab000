//! `onehop sdr`: text, documents, refusals.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::run::{Dir, command, document, onehop, refuse, stderr, stdout, succeed};

const EMU: [&str; 2] = ["-g", "emu"];

fn rx(device: &str, more: &[&str]) -> serde_json::Value {
    succeed(
        &[&["sdr", "rx", "--seconds", "0.3", "--buffer", "16K", "--device", device], &EMU[..], more].concat(),
    )
}

#[test]
fn every_sample_that_was_sent_is_accounted_for() {
    for route in ["cpu/direct", "cpu/pinned"] {
        for format in ["ci16", "ci12"] {
            let device = "sim:usdr?signal=counter&rate=5M";
            let document = rx(device, &["--route", route, "--format", format]);
            assert_eq!(
                (&document["route"], &document["verified"]),
                (&route.into(), &true.into()),
                "{document:#}"
            );
            let number = |name: &str| document[name].as_u64().unwrap();
            assert_eq!(number("samples") + number("lost_samples"), number("sent_samples"));
            assert!(number("samples") > 0);
            assert_eq!(document["simulated"], serde_json::json!(["board", "gpu"]));
            assert_eq!(document["errors"], 0);
        }
    }
}

#[test]
fn a_tone_is_found_at_its_frequency() {
    let dir = Dir::new();
    let [png, out] = ["spectrum.png", "tone"].map(|name| dir.path().join(name).display().to_string());
    let device = "sim:usdr?rate=1M&signal=tone&freq=0.25&level=-20&dc=0.1";
    let document = rx(device, &["--png", &png, "--out", &out, "--bins", "256"]);
    let strongest = &document["strongest"];
    assert!((strongest["hz"].as_f64().unwrap() - 250e3).abs() < 4e3, "{strongest}");
    assert!((strongest["dbfs"].as_f64().unwrap() + 20.0).abs() < 0.5, "{strongest}");
    assert!((document["dc"][0].as_f64().unwrap() - 0.1).abs() < 0.01);
    assert!(std::fs::read(&png).unwrap().starts_with(b"\x89PNG"));
    let data = std::fs::read(format!("{out}.sigmf-data")).unwrap();
    assert_eq!(data.len() as u64, document["bytes"].as_u64().unwrap());
    assert_eq!(format!("{:08x}", crc32c::crc32c(&data)), document["crc32c"]);
    let meta: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("{out}.sigmf-meta")).unwrap()).unwrap();
    assert_eq!(meta["global"]["core:datatype"], "ci16_le");
    // A recording can be sent.
    let input = format!("{out}.sigmf-data");
    let args = ["sdr", "tx", "--in", &input, "-g", "emu", "-d", "sim:usdr?rate=50M"];
    let sent = succeed(&args);
    assert_eq!((&sent["bytes"], &sent["crc32c"]), (&document["bytes"], &document["crc32c"]));
    // Without metadata, the format is assumed.
    std::fs::remove_file(format!("{out}.sigmf-meta")).unwrap();
    let output = onehop(&args);
    assert!(output.status.success() && stderr(&output).contains("are assumed to be ci16_le"), "{output:?}");
}

#[test]
fn recordings_match_what_the_board_sent() {
    let dir = Dir::new();
    let device = "sim:usdr?rate=1M&signal=tone&freq=0.25&level=-20&dc=0.25";
    let part = |out: &str, what: &str| std::fs::read(format!("{out}.sigmf-{what}")).unwrap();
    let global = |out: &str| {
        let meta: serde_json::Value = serde_json::from_slice(&part(out, "meta")).unwrap();
        meta["global"].clone()
    };
    let mean = |values: Vec<f32>| values.iter().sum::<f32>() / values.len() as f32;
    for format in ["ci16", "ci12"] {
        // Recorded without gain and with the DC component, as boards can send them.
        let out = dir.file(format);
        let document = rx(device, &["--format", format, "--out", &out]);
        let data = part(&out, "data");
        assert_eq!(global(&out)["core:datatype"], "ci16_le");
        assert_eq!(data.len() as u64, document["samples"].as_u64().unwrap() * 4);
        let full = |n: &[u8]| f32::from(i16::from_le_bytes([n[0], n[1]])) / 32768.0;
        let found = mean(data.chunks_exact(4).map(full).collect());
        assert!((found - 0.25).abs() < 0.01, "{found}");
        let input = format!("{out}.sigmf-data");
        let sent = succeed(&["sdr", "tx", "--in", &input, "-g", "emu", "-d", "sim:usdr?rate=50M"]);
        assert_eq!(sent["bytes"], data.len());
        // With --gain, the metadata says so.
        rx(device, &["--format", format, "--out", &out, "--gain", "2"]);
        let (data, global) = (part(&out, "data"), global(&out));
        assert_eq!(global["core:datatype"], "cf32_le");
        assert!(global["core:description"].as_str().unwrap().contains("multiplied by 2"));
        let found = data.chunks_exact(8).map(|n| f32::from_le_bytes([n[0], n[1], n[2], n[3]]));
        let found = mean(found.collect());
        assert!((found - 0.5).abs() < 0.02, "{found}");
        refuse(&["sdr", "tx", "--in", &input, "-g", "emu"], 1, "boards accept ci16_le only");
    }
    refuse(&["sdr", "rx", "--gain", "2"], 2, "--out");
}

#[test]
fn a_failed_recording_keeps_the_earlier_one() {
    let dir = Dir::new();
    let out = dir.file("kept");
    let files = ["data", "meta"].map(|ending| format!("{out}.sigmf-{ending}"));
    let read = || files.clone().map(|file| std::fs::read(file).unwrap());
    rx("sim:usdr?rate=1M", &["--out", &out]);
    let earlier = read();
    // While a recording in another format is running, no other may use its name. Then it is killed.
    let args = ["sdr", "rx", "-g", "emu", "--seconds", "600", "--buffer", "16K", "--format", "ci12"];
    let args = [&args[..], &["--gain", "2", "--out", &out, "-d", "sim:usdr?rate=4M"]].concat();
    let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let partial = format!("{out}.partial.sigmf-data");
    let until = Instant::now() + Duration::from_secs(20);
    while std::fs::metadata(&partial).map_or(0, |meta| meta.len()) == 0 {
        assert!(Instant::now() < until, "nothing is recorded");
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = ["sdr", "rx", "-g", "emu", "--seconds", "0.1", "--out", &out, "-d", "sim:usdr?rate=1M"];
    refuse(&second, 1, "another process is recording to");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(read() == earlier, "the earlier recording was changed");
    refuse(&["sdr", "tx", "--in", &partial, "-g", "emu"], 1, "samples are cf32_le");
    // The next recording replaces both.
    rx("sim:usdr?rate=1M&signal=noise", &["--out", &out]);
    assert!(read()[0] != earlier[0] && !std::fs::exists(&partial).unwrap());
}

/// Buffers of four seconds each: the ring is played for two minutes.
#[test]
fn transmitting_ends_at_ctrl_c() {
    let dir = Dir::new();
    let (path, _) = dir.noise("samples", 2 << 20);
    let args = ["sdr", "tx", "--in", &path, "-g", "emu", "--buffer", "64K", "--route", "cpu/pinned"];
    let args = [&args[..], &["-d", "sim:usdr?rate=4k"]].concat();
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let signalled = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(signalled.elapsed() < Duration::from_secs(10), "took {:?}", signalled.elapsed());
}

#[test]
fn the_text_shows_a_spectrum() {
    let output = onehop(&[
        "sdr",
        "rx",
        "--seconds",
        "0.2",
        "--buffer",
        "16K",
        "-g",
        "emu",
        "--device",
        "sim:usdr?signal=chirp",
    ]);
    let text = stdout(&output);
    for word in [
        "route       cpu/direct",
        "received and lost add up to the samples sent",
        "dBFS",
        "+5.000 MHz",
        "simulated",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    // The DC component is removed, except with --keep-dc.
    let constant = |more: &[&str]| {
        let document = rx("sim:usdr?rate=1M&signal=tone&freq=0.25&level=-60&dc=0.25", more);
        document["strongest"]["hz"].as_f64().unwrap()
    };
    assert!((constant(&[]) - 250e3).abs() < 1e3 && constant(&["--keep-dc"]).abs() < 1e3);
    // The names of written files, and a board that cannot lose samples.
    let dir = Dir::new();
    let out = dir.file("kept");
    let received = ["sdr", "rx", "--seconds", "0.1", "-g", "emu", "--out", &out];
    let text = stdout(&onehop(&[&received[..], &["-d", "sim:usdr?rate=1M&patient=1"]].concat()));
    let data = format!("{out}.sigmf-data");
    for word in [&data, &format!("{out}.sigmf-meta"), "the board waits (patient=1), so it cannot lose"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    for (route, memory) in [("cpu/direct", "GPU memory"), ("cpu/pinned", "host memory")] {
        let sent = ["sdr", "tx", "--in", &data, "-g", "emu", "--route", route, "-d", "sim:usdr?rate=1M"];
        let text = stdout(&onehop(&sent));
        assert!(text.contains(&format!("{route}: the board reads {memory}\n")), "{text}");
    }
}

#[test]
fn impossible_requests_are_explained() {
    let dropped = "sim:usdr?p2p=dropped&rate=20M";
    let document = rx(dropped, &[]);
    assert_eq!(document["route"], "cpu/pinned");
    assert!(
        document["why_not_better"][0]["reason"].as_str().unwrap().contains("drops what the board writes")
    );
    let only = ["sdr", "rx", "-g", "emu", "--buffer", "64K", "--route", "cpu/direct", "--device", dropped];
    refuse(&only, 3, "drops what the board writes");
    refuse(&["sdr", "rx", "-g", "emu", "--device", "ffff:1f:1f.7"], 3, "no PCI device ffff:1f:1f.7");
    refuse(&["sdr", "info", "--device", "sim:radio"], 2, "no simulated board 'radio'; sim:usdr is one");
    refuse(&["sdr", "info", "--device", "0b:00.0?freq=1"], 2, "not an option of a real board");
    refuse(&["sdr", "info", "--device", "sim:usdr?rate=fast"], 2, "samples per second");
    refuse(&["sdr", "info", "--device", "radio"], 2, "is not a board");
    refuse(&["sdr", "info", "--buffer", "2M"], 2, "at most 1048576");
    refuse(&["sdr", "rx", "--bins", "100"], 2, "power of two");
    refuse(&["sdr", "rx", "--route", "gpu/tier3"], 2, "cpu/pinned");
}

#[test]
fn the_self_test_reports_what_works() {
    let device = "sim:usdr?signal=counter&rate=20M&p2p=writes";
    let document = succeed(&["sdr", "selftest", "--buffer", "16K", "-g", "emu", "--device", device]);
    let status = |id: &str| {
        let checks = document["checks"].as_array().unwrap();
        checks.iter().find(|check| check["id"] == id).map(|check| check["status"].clone())
    };
    assert_eq!(status("rx to GPU memory"), Some("pass".into()), "{document:#}");
    assert_eq!(status("tx from GPU memory"), Some("fail".into()));
    assert_eq!(status("samples"), Some("pass".into()));
    // Untested steps do not pass: with a board that waits, the ring never overflows.
    let device = "sim:usdr?signal=counter&rate=20M&patient=1";
    let document = succeed(&["sdr", "selftest", "--buffer", "16K", "-g", "emu", "-d", device]);
    let checks = document["checks"].as_array().unwrap();
    let unknown: Vec<_> = checks.iter().filter(|check| check["status"] == "unknown").collect();
    assert_eq!(unknown.len(), 1, "{document:#}");
    assert_eq!(unknown[0]["id"], "overflow");
    assert!(unknown[0]["fix"].as_str().unwrap().contains("patient=1"), "{document:#}");
    let device = "sim:usdr?signal=counter&rate=20M&untold=1&time=0";
    refuse(&["sdr", "selftest", "--buffer", "16K", "-g", "emu", "-d", device], 1, "samples are wrong");
}

#[test]
fn slow_boards_cause_no_long_wait() {
    // A ring of the largest buffers would take 42 s to fill.
    let begun = Instant::now();
    let document = succeed(&["sdr", "rx", "--seconds", "0.1", "-g", "emu", "-d", "sim:usdr?rate=200k"]);
    assert_eq!((&document["block_bytes"], &document["lost_samples"]), (&24960.into(), &0.into()));
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    // A self-test of three seconds reports its progress.
    let output = onehop(&[
        "sdr",
        "rx",
        "--seconds",
        "0.1",
        "--buffer",
        "4096",
        "-g",
        "emu",
        "-d",
        "sim:usdr?rate=10k",
    ]);
    let stderr = stderr(&output);
    assert!(
        output.status.success() && stderr.contains("self-test, ") && stderr.contains("of 32 buffers"),
        "{stderr}"
    );
}

#[test]
fn a_self_test_ends_at_ctrl_c() {
    let args = ["sdr", "rx", "-g", "emu", "--buffer", "64K", "-d", "sim:usdr?rate=1k"];
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let signalled = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(signalled.elapsed() < Duration::from_secs(10), "took {:?}", signalled.elapsed());
}

#[test]
fn losses_cause_a_warning() {
    // A rate that is too high for the emulated GPU.
    let args = ["sdr", "rx", "--seconds", "0.5", "--buffer", "16K", "-g", "emu", "-d", "sim:usdr?rate=400M"];
    let output = onehop(&args);
    let stderr = stderr(&output);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("warning: ") && stderr.contains("the emulated GPU is too slow"), "{stderr}");
    // Missing bursts cause a warning, too, and other samples keep their numbers.
    let dir = Dir::new();
    for format in ["ci16", "ci12"] {
        let out = dir.file(format);
        let device = "sim:usdr?rate=1M&signal=counter&missing=1@n=3";
        let args = ["--format", format, "--buffer", "128K", "--seconds", "1", "--out", &out, "-d", device];
        let document = succeed(&[&["sdr", "rx", "-g", "emu"], &args[..]].concat());
        let number = |name: &str| document[name].as_u64().unwrap();
        assert_eq!(document["verified"], true, "{document:#}");
        assert_eq!(number("samples") + number("lost_samples"), number("sent_samples"));
        assert!(number("partial_blocks") > 0 && number("lost_samples") > 0);
        let warning = document["warnings"][0].as_str().unwrap();
        assert!(warning.contains("bursts are missing in"), "{warning}");
        // Each gap in the file begins another capture.
        let meta = std::fs::read(format!("{out}.sigmf-meta")).unwrap();
        let meta: serde_json::Value = serde_json::from_slice(&meta).unwrap();
        let captures = meta["captures"].as_array().unwrap();
        assert!(captures.len() as u64 > number("partial_blocks"), "{meta:#}");
        let data = std::fs::metadata(format!("{out}.sigmf-data")).unwrap().len();
        assert_eq!(data, number("samples") * 4);
    }
}

#[test]
fn samples_are_sent_at_the_board_s_rate() {
    let dir = Dir::new();
    let (path, data) = dir.noise("samples", 4 << 20);
    let document = succeed(&["sdr", "tx", "--in", &path, "-g", "emu", "-d", "sim:usdr?rate=10M"]);
    let seconds = document["seconds"].as_f64().unwrap();
    assert!(seconds >= data.len() as f64 / 4.0 / 10e6, "{document:#}");
}

/// The command line in the README loses nothing.
#[test]
fn the_command_in_the_readme_loses_nothing() {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let text = std::fs::read_to_string(readme).unwrap();
    let line = text.lines().find(|line| line.starts_with("onehop sdr rx ")).unwrap();
    let args: Vec<_> = line.split('#').next().unwrap().split_whitespace().skip(1).collect();
    let args: Vec<_> = args.iter().map(|arg| arg.trim_matches('\'')).collect();
    let document = succeed(&args);
    assert_eq!(
        (&document["lost_samples"], &document["warnings"]),
        (&0.into(), &serde_json::json!([])),
        "{document:#}"
    );
}

#[test]
fn ctrl_c_ends_in_order() {
    let args = [
        "--json",
        "sdr",
        "rx",
        "--seconds",
        "600",
        "--buffer",
        "16K",
        "-g",
        "emu",
        "--device",
        "sim:usdr?rate=1M",
    ];
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Long enough for samples to flow on a busy machine; the command would run much longer.
    std::thread::sleep(Duration::from_millis(700));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let document = document("sdr rx", &output);
    assert_eq!(document["error"]["kind"], "interrupted");
    assert_eq!(document["error"]["message"], "stopped; the board is idle");
}
