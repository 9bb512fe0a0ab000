//! `onehop doctor` and `onehop topo`: this machine, recorded machines and composed ones.

use std::fs;

use crate::run::{Dir, code, fixture, onehop, refuse, stdout, succeed};

#[test]
fn this_machine_is_recorded_and_replayed() {
    let dir = Dir::new();
    let file = dir.file("a.bin");
    fs::write(&file, vec![7; 10_000]).unwrap();
    let record = dir.file("record");
    let here = succeed(&["doctor", &file, "--record", &record]);
    let again = succeed(&["doctor", "--from", &record]);
    // The text names the private data in the record.
    let text = stdout(&onehop(&["doctor", "--record", &record]));
    let place = format!("Recorded in {record}/system.json, with names, serial numbers");
    assert!(text.contains(&place), "{text}");
    assert_eq!((&here["checks"], &here["routes"]), (&again["checks"], &again["routes"]));
    let checks = here["checks"].as_array().unwrap();
    for check in checks {
        for field in ["id", "status", "found", "why", "fix"] {
            assert!(check.get(field).is_some(), "{check}");
        }
    }
    for id in ["place.user", "gpu.present", "iommu.mode", "kernel.version", "memory.lock", "file.direct_io"] {
        assert!(checks.iter().any(|check| check["id"] == id), "{id}");
    }
}

#[test]
fn a_composed_machine_has_its_routes() {
    let document =
        succeed(&["doctor", "--from", &fixture("am5-rtx5090-rebar-on"), "-g", "0", "-d", "03:00.0"]);
    let rows = document["routes"].as_array().unwrap();
    assert_eq!(rows.len(), 16);
    for row in rows {
        assert!(["yes", "no", "untested"].contains(&row["verdict"].as_str().unwrap()), "{row}");
        assert!(["to_gpu", "from_gpu"].contains(&row["direction"].as_str().unwrap()), "{row}");
        assert_eq!((&row["gpu"], &row["device"]), (&"0000:01:00.0".into(), &"0000:03:00.0".into()));
    }
    let output = onehop(&["doctor", "--from", &fixture("am5-rtx5090-rebar-on")]);
    let text = stdout(&output);
    assert!(code(&output) == 0 && text.contains("Most useful change") && !text.contains('\x1b'));
}

#[test]
fn the_tree_is_drawn() {
    let dir = Dir::new();
    let (html, svg) = (dir.file("t.html"), dir.file("t.svg"));
    let from = fixture("h100-switch-acs-on");
    let output = onehop(&["topo", "--explain", "--from", &from, "--html", &html, "--svg", &svg]);
    let text = stdout(&output);
    assert_eq!(code(&output), 0);
    for words in [
        "├─ 0000:17:01.0",
        "BAR2 128 GiB at 0x220000000000–",
        "Gen5 x16",
        "Directly: one hop",
        "group 42 DMA-FQ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (page, picture) = (fs::read_to_string(&html).unwrap(), fs::read_to_string(&svg).unwrap());
    assert!(picture.starts_with("<svg") && picture.contains("0x220000000000"));
    let loaded = ["http://", "https://", "src=", "url("]
        .iter()
        .any(|word| page.replace("http://www.w3.org/2000/svg", "").contains(word));
    assert!(page.contains("Directly: one hop") && !loaded, "the page loads something");
    let document = succeed(&["topo", "--explain", "--from", &from]);
    assert_eq!(document["paths"].as_array().unwrap().len(), 2);
    assert_eq!(document["tree"]["devices"]["0000:18:00.0"]["vendor"], 0x10de);
}

#[test]
fn a_tree_without_a_gpu_names_what_is_missing() {
    let dir = Dir::new();
    let (html, from) = (dir.file("t.html"), fixture("server-no-gpu"));
    let output = onehop(&["topo", "--explain", "--from", &from, "--html", &html]);
    let text = stdout(&output);
    assert_eq!(code(&output), 0);
    assert!(text.contains("─ 0000:") && text.contains("this system shows no NVIDIA GPU"), "{text}");
    let page = fs::read_to_string(&html).unwrap();
    assert!(page.contains("<svg") && page.contains("this system shows no NVIDIA GPU"));
    let document = succeed(&["topo", "--explain", "--from", &from]);
    assert!(
        document["missing"].as_str().unwrap().contains("no NVIDIA GPU")
            && document["paths"] == serde_json::json!([])
    );
    assert!(succeed(&["topo", "--from", &from])["missing"].is_null());
}

#[test]
fn the_example_works() {
    let document = succeed(&["doctor", "--from", "example"]);
    assert!(document["system"].as_str().unwrap().starts_with("composed: "));
    assert!(!document["routes"].as_array().unwrap().is_empty());
    let document = succeed(&["topo", "--explain", "--from", "example"]);
    assert!(!document["paths"].as_array().unwrap().is_empty() && document["missing"].is_null());
}

#[test]
fn missing_devices_are_refused() {
    let from = fixture("server-no-gpu");
    refuse(&["doctor", "-g", "7"], 3, "GPU 7");
    refuse(&["doctor", "-d", "nonsense"], 2, "not a PCI address");
    refuse(&["doctor", "-d", "/dev/nvme99n1"], 2, "-d takes the PCI address");
    refuse(&["topo", "--explain", "-g", "cuda:0"], 2, "-g 0");
    refuse(&["doctor", "--from", &from, "-d", "0000:77:00.0"], 3, "no such device");
    refuse(&["topo", "--explain", "--from", &from, "-g", "0"], 3, "no NVIDIA GPU");
    refuse(&["topo", "--from", &from, "-g", "0"], 2, "--explain");
    refuse(&["topo", "-d", "0000:77:00.0"], 2, "--explain");
    let dir = Dir::new();
    let path = dir.file("nothing");
    refuse(&["doctor", "--from", &path], 2, "no such file or folder");
    refuse(&["doctor", "--from", dir.path().to_str().unwrap()], 1, "neither system.json");
    fs::write(dir.path().join("system.json"), "{\"onehop_system\":9}").unwrap();
    refuse(&["doctor", "--from", dir.path().to_str().unwrap()], 1, "version 9");
}
