//! `onehop sdr`: what people see, what checks read, what is refused.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::run::{Dir, command, onehop, refuse, stdout, succeed};

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
fn a_tone_is_seen_where_it_is() {
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
    // What was received can be sent.
    let sent = succeed(&[
        "sdr",
        "tx",
        "--in",
        &format!("{out}.sigmf-data"),
        "-g",
        "emu",
        "--device",
        "sim:usdr?rate=50M",
    ]);
    assert_eq!((&sent["bytes"], &sent["crc32c"]), (&document["bytes"], &document["crc32c"]));
}

#[test]
fn people_see_a_spectrum() {
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
    for word in ["route       cpu/direct", "that is what was sent", "dBFS", "+5.000 MHz", "simulated"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn what_cannot_be_had_is_said() {
    let dropped = "sim:usdr?p2p=dropped&rate=20M";
    let document = rx(dropped, &[]);
    assert_eq!(document["route"], "cpu/pinned");
    assert!(
        document["why_not_better"][0]["reason"].as_str().unwrap().contains("drops what the board writes")
    );
    let only = ["sdr", "rx", "-g", "emu", "--buffer", "64K", "--route", "cpu/direct", "--device", dropped];
    refuse(&only, 3, "drops what the board writes");
    refuse(&["sdr", "rx", "-g", "emu", "--device", "ffff:1f:1f.7"], 1, "there is no");
    refuse(&["sdr", "info", "--device", "0b:00.0?freq=1"], 2, "no option of a real board");
    refuse(&["sdr", "info", "--device", "sim:usdr?rate=fast"], 2, "samples a second");
    refuse(&["sdr", "info", "--device", "radio"], 2, "is no board");
    refuse(&["sdr", "info", "--buffer", "2M"], 2, "at most 1048576");
    refuse(&["sdr", "rx", "--bins", "100"], 2, "power of two");
    refuse(&["sdr", "rx", "--route", "gpu/tier3"], 2, "cpu/pinned");
}

#[test]
fn the_self_test_says_what_works() {
    let device = "sim:usdr?signal=counter&rate=20M&p2p=writes";
    let document = succeed(&["sdr", "selftest", "--buffer", "16K", "-g", "emu", "--device", device]);
    let status = |id: &str| {
        let checks = document["checks"].as_array().unwrap();
        checks.iter().find(|check| check["id"] == id).map(|check| check["status"].clone())
    };
    assert_eq!(status("rx to GPU memory"), Some("pass".into()), "{document:#}");
    assert_eq!(status("tx from GPU memory"), Some("fail".into()));
    assert_eq!(status("samples"), Some("pass".into()));
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
    // Long enough for samples to flow on a busy machine; it takes much longer.
    std::thread::sleep(Duration::from_millis(700));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["error"]["kind"], "interrupted");
}
