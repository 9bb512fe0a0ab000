//! `onehop drive …`.

use crate::run::{Dir, assert_page, code, document, onehop, refuse, stdout, succeed};

#[test]
fn list_shows_drives() {
    let all = succeed(&["drive", "list", "-d", "sim:mem:1M"]);
    assert!(all["drives"].is_array());
    assert_eq!(all["given"]["serial"], "ONEHOP-SIM-1");
    assert_eq!(code(&onehop(&["drive", "list"])), 0);
}

#[test]
fn identify_shows_identity_and_features() {
    let spec = "sim:mem:8M?ns=2&lba=4096&mdts=3&queues=5&mqes=63&dstrd=2&cmb=1M&serial=ABC&model=Thing";
    let all = succeed(&["drive", "identify", "-d", spec]);
    for (field, wanted) in [
        ("serial", "\"ABC\""),
        ("model", "\"Thing\""),
        ("version", "\"1.4\""),
        ("max_transfer_bytes", "32768"),
        ("queue_count", "5"),
        ("queue_entries", "64"),
        ("doorbell_stride_bytes", "16"),
        ("cmb", "true"),
        ("simulated", "[\"drive\"]"),
    ] {
        assert_eq!(all[field].to_string(), wanted, "{field}");
    }
    for name in ["smart", "errors", "dump-bar0", "reset"] {
        let document = succeed(&["drive", name, "-d", spec]);
        assert_eq!(document["simulated"], serde_json::json!(["drive"]), "{name}");
    }
    assert_eq!(succeed(&["drive", "list", "-d", spec])["given"]["simulated"], serde_json::json!(["drive"]));
    assert_eq!(all["namespaces"].as_array().unwrap().len(), 2);
    assert_eq!(all["namespaces"][0]["block_bytes"], 4096);
    let one = succeed(&["drive", "identify", "-d", spec, "--nsid", "2"]);
    assert_eq!((one["namespaces"].as_array().unwrap().len(), &one["namespaces"][0]["nsid"]), (1, &2.into()));
    let text = stdout(&onehop(&["drive", "identify", "-d", spec]));
    assert!(text.contains("Thing") && text.contains("namespace 2"), "{text}");
}

#[test]
fn an_image_keeps_its_serial() {
    let dir = Dir::new();
    let drive = format!("sim:{}?size=1M", dir.file("disk.img"));
    let serial = |_| succeed(&["drive", "identify", "-d", &drive])["serial"].clone();
    assert_eq!(serial(1), serial(2));
}

#[test]
fn health_and_errors() {
    let smart = succeed(&["drive", "smart", "-d", "sim:mem:1M"]);
    assert_eq!(smart["warnings"], serde_json::json!([]));
    assert!((-50..150).contains(&smart["temperature_c"].as_i64().unwrap()), "{smart:#}");
    let errors = succeed(&["drive", "errors", "-d", "sim:mem:1M", "--count", "3"]);
    assert!(errors["entries"].is_array() && errors["kept"].as_u64().unwrap() >= 1);
}

#[test]
fn registers_by_name() {
    let find = |all: &serde_json::Value, name: &str| {
        all["registers"].as_array().unwrap().iter().find(|r| r["name"] == name).unwrap().clone()
    };
    let down = succeed(&["drive", "dump-bar0", "-d", "sim:mem:1M?mqes=63"]);
    assert_eq!(find(&down, "CAP")["fields"]["MQES"], 63);
    assert_eq!(find(&down, "CSTS")["fields"]["RDY"], 0);
    assert_eq!(find(&down, "VS")["value"], "0x00010400");
    let up = succeed(&["drive", "dump-bar0", "-d", "sim:mem:1M", "--up"]);
    assert_eq!(
        (&find(&up, "CSTS")["fields"]["RDY"], &find(&up, "CC")["fields"]["EN"]),
        (&1.into(), &1.into())
    );
    let text = stdout(&onehop(&["drive", "dump-bar0", "-d", "sim:mem:1M"]));
    assert!(text.contains("capabilities") && text.contains("MPSMIN 0"), "{text}");
}

#[test]
fn reset_is_timed() {
    let reset = succeed(&["drive", "reset", "-d", "sim:mem:1M?ready=30ms"]);
    assert!(reset["reset_seconds"].as_f64().unwrap() >= 0.03, "{reset:#}");
    assert!(reset["open_seconds"].as_f64().unwrap() >= 0.03, "{reset:#}");
}

#[test]
fn bench_queue_measures_and_names_its_reference() {
    let bench = succeed(&["bench", "queue", "--depth", "1,8"]);
    let rows = bench["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, depth) in rows.iter().zip([1, 8]) {
        assert_eq!(
            (&row["side"], &row["mode"], &row["depth"]),
            (&"cpu".into(), &"owner".into(), &depth.into())
        );
        for field in ["iops", "p50_ns", "cycles_submit", "cycles_complete", "controller_ns"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{field}");
        }
        assert_eq!(row["latency_of"], "batch");
        assert_eq!(row["p99_ns"].is_number(), row["latency_samples"].as_u64().unwrap() >= 1000, "{row}");
    }
    let real = succeed(&["bench", "queue", "-d", "sim:mem:4M", "--depth", "4", "--block", "8K"]);
    assert_eq!(real["rows"][0]["block"], 8192);
    assert!(real["rows"][0]["controller_ns"].is_null());
    let dir = Dir::new();
    let folder = dir.file("report");
    let reported = succeed(&["bench", "queue", "--depth", "4", "--report", &folder]);
    assert_page(&folder, "queue", &reported, "What a command costs");

    refuse(&["bench", "queue", "--depth", "0"], 2, "");
    refuse(&["bench", "queue", "--block", "1000"], 2, "");
    refuse(&["bench", "queue", "-d", "sim:mem:4M?mqes=3", "--depth", "64"], 2, "3 deep");
    refuse(&["drive", "bind", "-d", "ffff:17:1f.7", "--driver", "e1000e"], 2, "vfio-pci, onehop");
    // Refused on every machine, with and without CUDA.
    refuse(&["bench", "queue", "--side", "gpu", "-g", "999"], 3, "GPU 999");
}

/// The steps and routes of a check, by name.
fn verdicts(check: &serde_json::Value, list: &str, name: &str) -> Vec<(String, String)> {
    let word = |row: &serde_json::Value, field: &str| row[field].as_str().unwrap().to_owned();
    check[list].as_array().unwrap().iter().map(|row| (word(row, name), word(row, "verdict"))).collect()
}

#[test]
fn check_p2p_reports_steps_and_routes() {
    let check = ["drive", "check-p2p", "-d", "sim:mem:8M?cmb=1M", "-g", "emu"];
    let all = succeed(&[&check[..], &["--gpu-reads-registers"]].concat());
    let steps = verdicts(&all, "steps", "id");
    assert_eq!(steps.len(), 12);
    assert!(steps.iter().all(|(_, verdict)| verdict == "yes"), "{steps:?}");
    assert!(all["steps"][11]["why"].as_str().unwrap().ends_with("as the CPU reads them"), "{all}");
    // The GPU reads registers only on request.
    let check = succeed(&check);
    let skipped = &check["steps"][11];
    assert_eq!((skipped["id"].as_str(), skipped["verdict"].as_str()), (Some("gpu-reads"), Some("untested")));
    assert!(skipped["why"].as_str().unwrap().contains("--gpu-reads-registers"), "{skipped}");
    assert_eq!(check["routes"], all["routes"]);
    assert_eq!(check["simulated"], serde_json::json!(["drive", "gpu"]));
    // Without a CMB no queue can be in it, but all routes work.
    let check = succeed(&["drive", "check-p2p", "-d", "sim:mem:8M", "-g", "emu", "--lba", "7"]);
    assert!(verdicts(&check, "steps", "id").contains(&("sq-cmb".into(), "no".into())));
    assert!(verdicts(&check, "routes", "route").contains(&("gpu/tier3".into(), "yes".into())));
}

#[test]
fn check_p2p_ends_when_nothing_answers() {
    let spec = "sim:mem:8M?fault=lost@op=read";
    let out = onehop(&["drive", "check-p2p", "-d", spec, "-g", "emu", "--timeout", "100ms", "--json"]);
    assert_eq!(code(&out), 1);
    let check = document("drive check-p2p", &out);
    let steps = verdicts(&check, "steps", "id");
    assert_eq!(steps[2], ("host-read".into(), "no".into()));
    assert!(steps[3..].iter().all(|(_, verdict)| verdict == "untested"), "{steps:?}");
    assert_eq!(check["error"]["exit_code"], 1);
    refuse(&["drive", "check-p2p", "-d", "sim:mem:8M", "-g", "emu", "--lba", "999999999"], 2, "namespace 1");
}
