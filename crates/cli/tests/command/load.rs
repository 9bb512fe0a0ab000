//! `onehop load` of local files, `onehop read`, and `onehop bench load`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::run::{
    Dir, assert_page, code, command, document, json, onehop, refuse, skip, stderr, stdout, succeed,
};

/// Writes a safetensors file; returns the checksum of its data.
pub fn model(path: &Path, tensors: &[(&str, usize)], seed: u32) -> u32 {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, bytes) in tensors {
        let at = data.len();
        data.extend((0..*bytes).map(|i| ((i as u32 ^ seed).wrapping_mul(0x9e37_79b9) >> 13) as u8));
        header.push(format!(
            r#""{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{at},{}]}}"#,
            data.len()
        ));
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(&data).unwrap();
    crc32c::crc32c(&data)
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub const TENSORS: [(&str, usize); 4] =
    [("a", 300_000), ("b", 1), ("layers.0.w", 2_000_001), ("layers.1.w", 70_000)];

#[test]
fn tensors_are_loaded_by_every_route() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    let crc = model(&file, &TENSORS, 1);
    for route in ["auto", "cpu/cached", "cpu/pinned"] {
        let (code, loaded) = json(&["load", text(&file), "-g", "emu", "--route", route, "--verify"]);
        if route == "cpu/pinned" && code == 1 {
            // The test directory may be on a file system without O_DIRECT.
            assert!(
                loaded["error"]["message"].as_str().unwrap().contains("past the page cache"),
                "{loaded:#}"
            );
            continue;
        }
        assert_eq!(code, 0, "{loaded:#}");
        assert_eq!(
            (&loaded["verified"], &loaded["crc32c"]),
            (&json!(true), &json!(format!("{crc:08x}"))),
            "{route}"
        );
        assert_eq!(
            (&loaded["tensors"], &loaded["files"], &loaded["initiator"]),
            (&json!(4), &json!(1), &json!("cpu"))
        );
        assert_eq!(loaded["simulated"], json!(["gpu"]));
        assert_eq!(loaded["bytes"], json!(2_370_002));
        assert!(loaded["why_not_better"][0]["fix"].is_string());
    }
    let part = succeed(&["load", text(&file), "-g", "emu", "--only", "layers.*", "--except", "*.1.w"]);
    assert_eq!((&part["tensors"], &part["bytes"]), (&json!(1), &json!(2_000_001)));
    let plan = succeed(&["load", text(&file), "-g", "emu", "--plan"]);
    assert!(plan["ranges"].is_array() && plan["read_bytes"].as_u64().unwrap() >= 2_370_002, "{plan:#}");
    assert!(plan["peak_gpu_bytes"].as_u64().unwrap() >= 2_370_002);
    let shown = stdout(&onehop(&["load", text(&file), "-g", "emu"]));
    for label in ["model", "route", "moved", "limit", "verified", "not cpu/direct"] {
        assert!(shown.contains(label), "{label}: {shown}");
    }
}

/// Runs a command under a seccomp filter that forbids a system call, as containers forbid io_uring. Exits with 99 if the
/// filter cannot be set.
const WITHOUT: &str = r#"
import ctypes, errno, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
CALL, ALLOW, DENY = int(sys.argv[1]), 0x7fff0000, 0x00050000 | errno.EPERM
code = b"".join(struct.pack("<HBBI", *line) for line in [(0x20, 0, 0, 0), (0x15, 0, 1, CALL), (6, 0, 0, DENY), (6, 0, 0, ALLOW)])
lines = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(lines)))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(99)
if libc.syscall(CALL, 1, None) != -1 or ctypes.get_errno() != errno.EPERM:
    sys.exit(99)
os.execv(sys.argv[2], sys.argv[2:])
"#;
const IO_URING_SETUP: &str = "425";
const IO_URING_REGISTER: &str = "427";

/// Loads a model past the page cache without a system call; returns the statistics, or skips the test.
fn past_the_cache_without(call: &str) -> Option<serde_json::Value> {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    let crc = model(&file, &TENSORS, 9);
    let mut python = Command::new("python3");
    python.args(["-c", WITHOUT, call, env!("CARGO_BIN_EXE_onehop"), "--json", "load", text(&file)]);
    let skipped = |why: &str| {
        skip(why);
        None
    };
    let Ok(output) = python.args(["-g", "emu", "--route", "cpu/pinned", "--verify"]).output() else {
        return skipped("python3 is not installed");
    };
    if code(&output) == 99 {
        return skipped("no seccomp filter can be set");
    }
    let loaded = document("load", &output);
    if code(&output) == 1 && loaded["error"]["message"].as_str().unwrap().contains("past the page cache") {
        return skipped("a file system with O_DIRECT for the tests' directory");
    }
    assert_eq!(loaded["verified"], json!(true), "{loaded:#}");
    assert_eq!((&loaded["route"], &loaded["crc32c"]), (&json!("cpu/pinned"), &json!(format!("{crc:08x}"))));
    assert!(loaded["route_why"].as_str().unwrap().contains("requested"), "{loaded:#}");
    Some(loaded["io"].clone())
}

#[test]
fn without_io_uring_the_disk_is_still_read() {
    let Some(io) = past_the_cache_without(IO_URING_SETUP) else { return };
    assert!(io["why_calls"].as_str().unwrap().contains("io_uring_setup"), "{io:#}");
    assert_eq!(io["why_unregistered"], json!(null));
}

#[test]
fn memory_that_io_uring_does_not_register_is_reported() {
    let Some(io) = past_the_cache_without(IO_URING_REGISTER) else { return };
    assert!(io["why_unregistered"].as_str().unwrap().contains("not permitted"), "{io:#}");
    assert_eq!(io["why_calls"], json!(null));
}

#[test]
fn local_files_of_any_content_are_read() {
    let dir = Dir::new();
    let (file, data) = dir.noise("some.bin", 1_500_001);
    let out = dir.path().join("out");
    let read = succeed(&["read", &file, "-g", "emu", "--verify", "--out", text(&out)]);
    assert_eq!((&read["bytes"], &read["verified"]), (&json!(data.len()), &json!(true)));
    assert!(std::fs::read(&out).unwrap() == data);
    assert_eq!(read["crc32c"], json!(format!("{:08x}", crc32c::crc32c(&data))));
    let by_one = succeed(&["read", &file, "-g", "emu", "--threads", "1", "--route", "cpu/cached"]);
    assert_eq!(by_one["io"]["threads"], json!(1));
    refuse(&["read", &file, "-g", "emu", "--threads", "257"], 2, "256");
    refuse(&["read", &file, "-g", "emu", "--nsid", "2"], 2, "cannot be used with");
    let part = [
        "read",
        &file,
        "-g",
        "emu",
        "--offset",
        "77777",
        "--len",
        "1000",
        "--route",
        "cpu/cached",
        "--out",
        text(&out),
    ];
    assert_eq!(succeed(&part)["route"], json!("cpu/cached"));
    assert!(std::fs::read(&out).unwrap() == data[77_777..78_777]);
    refuse(&["read", &file, "-g", "emu", "--offset", "1500002"], 2, "1500001 bytes");
    refuse(&["read", &file, "-g", "emu", "--route", "gpu/tier3"], 3, "mounted");
    refuse(&["read", "/nowhere", "-g", "emu"], 1, "nowhere");
    refuse(&["read", "/dev/null", "-g", "emu"], 1, "device");
    refuse(&["read", &file, "-g", "emu", "--len", "10", "--out", &file], 2, "the file that is read");
    assert!(std::fs::read(&file).unwrap() == data);
}

#[test]
fn directories_and_ranks() {
    let dir = Dir::new();
    for (i, name) in ["x1.safetensors", "x2.safetensors"].into_iter().enumerate() {
        model(&dir.path().join(name), &[(&format!("t{i}"), 4096)], i as u32);
    }
    let loaded = succeed(&["load", text(dir.path()), "-g", "emu", "--verify"]);
    assert_eq!(
        (&loaded["files"], &loaded["tensors"], &loaded["verified"]),
        (&json!(2), &json!(2), &json!(true))
    );
    let rank = succeed(&["load", text(dir.path()), "-g", "emu", "--rank", "1/4", "--cut", "*=0", "--verify"]);
    assert_eq!((&rank["bytes"], &rank["verified"]), (&json!(2048), &json!(true)));
}

#[test]
fn several_gpus_get_their_ranks() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    let crc = model(&file, &[("a", 400_000), ("b", 80_000), ("c", 7)], 3);
    let both = succeed(&["load", text(&file), "-g", "emu,emu", "--verify"]);
    assert_eq!((&both["verified"], &both["bytes"]), (&json!(true), &json!(2 * 480_007)));
    for (rank, gpu) in both["gpus"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&gpu["crc32c"], &gpu["rank"]), (&json!(format!("{crc:08x}")), &json!(rank)));
    }
    // Both GPUs get the same tensors, which are read once.
    assert!(both["read_bytes"].as_u64().unwrap() < 500_000, "{both:#}");
    let cut = ["load", text(&file), "-g", "emu,emu,emu,emu", "--cut", "a=0", "--cut", "b=0", "--verify"];
    let parts = succeed(&cut);
    assert_eq!((&parts["verified"], &parts["bytes"]), (&json!(true), &json!(480_000 + 4 * 7)));
    let gpus = parts["gpus"].as_array().unwrap();
    assert!(gpus.iter().all(|gpu| gpu["bytes"] == 120_007 && gpu["ranks"] == 4), "{parts:#}");
    assert!(parts["read_bytes"].as_u64().unwrap() < 500_000, "a byte was read twice: {parts:#}");
    // The last two ranks of four, as on a second machine.
    let last =
        succeed(&["load", text(&file), "-g", "emu,emu", "--rank", "2/4", "--cut", "a=0", "--cut", "b=0"]);
    assert_eq!(
        (&last["gpus"][0]["crc32c"], &last["gpus"][1]["crc32c"]),
        (&gpus[2]["crc32c"], &gpus[3]["crc32c"])
    );
    assert_eq!(last["gpus"][1]["rank"], json!(3));
    let plan = succeed(&["load", text(&file), "-g", "emu,emu", "--cut", "a=0", "--plan"]);
    assert_eq!((&plan["gpus"][1]["bytes"], plan["gpus"].as_array().unwrap().len()), (&json!(280_007), 2));
    assert_eq!(plan["read_bytes"], both["read_bytes"].as_u64().unwrap().next_multiple_of(4096));
    let one = succeed(&["load", text(&file), "-g", "emu"]);
    assert_eq!((&one["gpus"][0]["crc32c"], &one["gpus"][0]["ranks"]), (&one["crc32c"], &json!(1)));
    refuse(&["load", text(&file), "-g", "emu,emu", "--rank", "3/4", "--cut", "a=0"], 2, "ranks 3 to 4 of 4");
    refuse(&["load", text(&file), "-g", "emu", "--cut", "a=0"], 2, "--cut");
    refuse(&["load", text(&file), "-g", "emu", "--rank", "1/4"], 2, "--cut");
    refuse(&["load", text(&file), "-g", "emu", "--plan", "--verify"], 2, "--plan");
    refuse(&["load", text(&file), "-g", "emu,none"], 2, "'none' is not a GPU");
    refuse(&["load", text(&file), "-g", "emu,77"], 3, "GPU 77");
    refuse(&["read", text(&file), "-g", "emu,emu"], 2, "is not a GPU");
    refuse(&["load", text(&file), "-g", "emu,all"], 2, "'all' is not a GPU");
    if onehop_gpu::cuda::Cuda::load().is_err() {
        refuse(&["load", text(&file), "-g", "all", "--cut", "a=0"], 3, "using GPU all");
        refuse(&["bench", "load", text(&file), "-g", "all"], 3, "using GPU all");
    }
}

#[test]
fn files_that_cannot_be_loaded_are_refused() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    model(&file, &TENSORS, 1);
    refuse(&["load", "/nowhere/m.safetensors"], 1, "nowhere");
    refuse(&["load", text(&file), "--route", "gpu/tier3"], 3, "drive");
    refuse(&["load", text(&file), "--rank", "4/4"], 2, "rank");
    refuse(&["load", text(&file), "--dtype", "F99"], 2, "F99");
    if !cfg!(feature = "remote") {
        refuse(&["load", "https://example.org/m.safetensors", "-g", "emu"], 3, "--features remote");
    }
    std::fs::write(&file, b"not a model").unwrap();
    refuse(&["load", text(&file), "-g", "emu"], 1, "safetensors");
}

/// Without a GPU, a load fails, rather than leaving the bytes in host memory.
#[test]
fn without_a_gpu_local_files_need_an_explicit_emulated_one() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    model(&file, &TENSORS, 1);
    let commands = [&["load", text(&file)][..], &["load", text(&file), "--plan"], &["read", text(&file)]];
    for command in commands.into_iter().chain([&["bench", "load", text(&file), "--loads", "1"][..]]) {
        let (code, document) = json(command);
        if code == 0 {
            // This machine has a GPU.
            assert_eq!(document["simulated"], json!([]), "{document:#}");
            continue;
        }
        assert_eq!(code, 3, "{document:#}");
        assert!(document["error"]["fix"].as_str().unwrap().contains("-g emu"), "{document:#}");
        assert_eq!(document["error"]["kind"], "not_possible");
        succeed(&[command, &["-g", "emu"]].concat());
    }
    // Blocks of a drive are read into the emulated GPU, with a warning.
    let blocks = ["--json", "read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "8"];
    let output = onehop(&blocks);
    let read = document("read", &output);
    let emulated = read["simulated"].as_array().unwrap().contains(&json!("gpu"));
    assert_eq!(stderr(&output).contains("warning: using the emulated GPU (-g emu)"), emulated, "{output:?}");
    let named = onehop(&[&blocks[..], &["-g", "emu"]].concat());
    assert_eq!((code(&named), &*stderr(&named)), (0, ""));
}

#[test]
fn names_that_match_no_tensor_are_refused() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    model(&file, &TENSORS, 1);
    let load = ["load", text(&file), "-g", "emu"];
    for more in [
        &["--only", "nosuch*"][..],
        &["--only", "a", "--only", "nosuch*"],
        &["--except", "nosuch*"],
        &["--rank", "0/2", "--cut", "nosuch*=0"],
        &["--rank", "0/2", "--cut", "nosuch*=0", "--plan"],
    ] {
        refuse(&[&load[..], more].concat(), 2, "\"nosuch*\"");
    }
    refuse(&[&load[..], &["--only", "a", "--except", "*"]].concat(), 2, "leave no tensor");
    refuse(&[&load[..], &["--dtype", "BF16"]].concat(), 2, "leave no tensor");
}

#[test]
fn a_directory_of_several_models_is_refused() {
    let dir = Dir::new();
    for name in ["consolidated", "model"] {
        model(&dir.path().join(format!("{name}.safetensors")), &[(name, 100)], 1);
    }
    let load = ["load", text(dir.path()), "-g", "emu"];
    refuse(&load, 2, "(consolidated.safetensors, model.safetensors); name the files to load");
    let index = r#"{"weight_map":{"consolidated":"consolidated.safetensors"}}"#;
    std::fs::write(dir.path().join("consolidated.safetensors.index.json"), index).unwrap();
    refuse(&load, 2, "(consolidated.safetensors.index.json, model.safetensors)");
    // The same for named files.
    let copies = [text(&dir.path().join("model.safetensors")).to_owned(), dir.file("twin.safetensors")];
    std::fs::copy(&copies[0], &copies[1]).unwrap();
    refuse(&["load", &copies[0], &copies[1], "-g", "emu"], 2, "name the files that belong together");
}

/// The usual soft limit is 1024 descriptors, and a load needs up to three per shard.
#[test]
fn a_thousand_shards_are_loaded() {
    const SHARDS: usize = 1000;
    let dir = Dir::new();
    for i in 1..=SHARDS {
        model(
            &dir.path().join(format!("model-{i:05}-of-{SHARDS:05}.safetensors")),
            &[(&format!("t{i}"), 3)],
            1,
        );
    }
    let run = |limit: &str, more: &[&str]| {
        let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &script,
            env!("CARGO_BIN_EXE_onehop"),
            "--json",
            "load",
            text(dir.path()),
            "-g",
            "emu",
        ]);
        let output = command.args(more).output().unwrap();
        let document = serde_json::from_str::<serde_json::Value>(&stdout(&output));
        (code(&output), document.unwrap_or_else(|e| panic!("{e}: {output:?}")))
    };
    let hard = Command::new("sh").args(["-c", "ulimit -Hn"]).output().unwrap();
    if stdout(&hard).trim().parse().is_ok_and(|hard: u64| hard < 4096) {
        skip("this process may not have 4096 files open");
        return;
    }
    for more in [&["--verify"][..], &["--verify", "--route", "cpu/cached"]] {
        let (code, loaded) = run("-Sn 256", more);
        assert_eq!(
            (code, &loaded["tensors"], &loaded["verified"]),
            (0, &json!(SHARDS), &json!(true)),
            "{loaded:#}"
        );
    }
    let (code, plan) = run("-Sn 256", &["--plan"]);
    let needed = plan["descriptors"]["needed"].as_u64().unwrap();
    assert_eq!((code, &plan["descriptors"]["fits"]), (0, &json!(true)), "{plan:.2000}");
    assert!((3000..3500).contains(&needed), "{needed}");
    // If the limit cannot be raised, the plan says so, and the load is refused.
    let (code, plan) = run("-n 2000", &["--plan"]);
    assert_eq!(
        (code, &plan["descriptors"]["fits"], &plan["descriptors"]["limit"]),
        (0, &json!(false), &json!(2000))
    );
    for limit in ["-n 2000", "-n 500"] {
        let (code, refused) = run(limit, &[]);
        assert_eq!(code, 3, "{refused:#}");
        assert!(refused["error"]["fix"].as_str().unwrap().contains("ulimit -Hn"), "{refused:#}");
    }
}

#[test]
fn a_written_manifest_matches_the_loaded_bytes() {
    let dir = Dir::new();
    let (file, sums) = (dir.path().join("m.safetensors"), dir.path().join("sums.json"));
    model(&file, &TENSORS, 1);
    let load = ["load", text(&file), "-g", "emu"];
    let written = succeed(&[&load[..], &["--write-manifest", text(&sums)]].concat());
    assert_eq!(written["verified"], json!(true));
    let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(&sums).unwrap()).unwrap();
    assert_eq!(manifest["tensors"].as_object().unwrap().len(), TENSORS.len());
    let loaded = succeed(&[&load[..], &["--manifest", text(&sums)]].concat());
    assert_eq!(loaded["verified"], json!(true));
    assert!(loaded["verified_by"].as_str().unwrap().contains("the manifest's"), "{loaded:#}");
    model(&file, &TENSORS, 2);
    refuse(&[&load[..], &["--manifest", text(&sums)]].concat(), 1, "is not what it was");
    // A manifest needs all tensors, and must not overwrite a file of the model.
    refuse(
        &[&load[..], &["--write-manifest", text(&sums), "--only", "a"]].concat(),
        2,
        "cannot be used with",
    );
    let before = std::fs::read(&file).unwrap();
    refuse(&[&load[..], &["--write-manifest", text(&file)]].concat(), 2, "the file that is read");
    assert!(std::fs::read(&file).unwrap() == before);
}

#[test]
fn help_names_every_route_and_a_pci_address() {
    for command in ["load", "read"] {
        let help = stdout(&onehop(&[command, "--help"]));
        let words: Vec<_> = help.split(|c: char| c.is_whitespace() || "(),.:;".contains(c)).collect();
        for route in ["auto", "cpu/cached", "cpu/pinned", "cufile", "gpu/tier3", "gpu/posted", "cpu/direct"] {
            assert!(words.contains(&route), "{command}: {route}: {help}");
        }
        assert!(help.contains("0000:0b:00.0"), "{command}: {help}");
    }
    assert!(stdout(&onehop(&["load", "--help"])).contains("--write-manifest"));
}

/// Changes of a file's name or attributes during a load are reported, and do not fail the load.
#[test]
fn changes_of_attributes_do_not_end_a_load() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    model(&file, &[("a", 1 << 20)], 1);
    // The file stays open during all loads.
    let bench = ["bench", "load", text(&file), "-g", "emu", "--loads", "20", "--pause", "100ms"];
    let mut child = command(&bench);
    let child =
        child.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(700));
    std::fs::remove_file(&file).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    assert!(
        stderr(&output).contains("warning: ") && stderr(&output).contains("it was removed"),
        "{output:?}"
    );
    model(&file, &[("a", 1 << 20)], 1);
    assert_eq!(succeed(&["load", text(&file), "-g", "emu"])["warnings"], json!([]));
}

/// Untrusted names are escaped and truncated.
#[test]
fn hostile_names_in_messages() {
    let dir = Dir::new();
    let file = dir.path().join("m\u{1b}[2J.safetensors");
    let entry = format!(r#""{}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, "x".repeat(1 << 20));
    let header = format!("{{{entry},{entry}}}");
    std::fs::write(&file, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0]].concat()).unwrap();
    let output = onehop(&["load", text(&file), "-g", "emu"]);
    let stderr = stderr(&output);
    assert_eq!(code(&output), 1, "{stderr:.5000}");
    assert!(
        stderr.contains("m\\u{1b}[2J.safetensors") && stderr.contains("twice") && stderr.len() < 5000,
        "{stderr:.5000}"
    );
}

#[test]
fn a_manifest_does_not_verify_parts() {
    let dir = Dir::new();
    let (file, sums) = (dir.path().join("m.safetensors"), dir.path().join("sums.json"));
    model(&file, &[("cut", 4096), ("whole", 8)], 3);
    let right = succeed(&["load", text(&file), "-g", "emu", "--only", "whole"])["crc32c"].clone();
    let entry = |name: &str, bytes, sum: &str| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{bytes}],"bytes":{bytes},"crc32c":"{sum}"}}"#)
    };
    let entries = [entry("cut", 4096, "00000000"), entry("whole", 8, right.as_str().unwrap())].join(",");
    std::fs::write(&sums, format!(r#"{{"onehop_manifest":1,"tensors":{{{entries}}}}}"#)).unwrap();
    let load =
        ["load", text(&file), "-g", "emu", "--manifest", text(&sums), "--rank", "0/2", "--cut", "cut=0"];
    for (more, verified, by) in [
        (&[][..], json!(null), "of 1 of 2 tensors"),
        (&["--only", "cut"], json!(null), "of 0 of 1 tensors"),
        (&["--verify"], json!(true), "compared with the files"),
        (&["--only", "whole"], json!(true), "as they lie in GPU memory"),
    ] {
        let loaded = succeed(&[&load[..], more].concat());
        assert_eq!(loaded["verified"], verified, "{more:?}");
        assert!(loaded["verified_by"].as_str().unwrap().contains(by), "{loaded:#}");
    }
    let wrong = json(&["load", text(&file), "-g", "emu", "--manifest", text(&sums), "--verify"]);
    assert_eq!((wrong.0, &wrong.1["verified"]), (1, &json!(false)));
    assert_eq!(wrong.1["verified_by"], json!("the manifest's checksums"));
}

#[test]
fn a_manifest_is_checked_against_the_model() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    let header = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
    std::fs::write(&file, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), b"abc"].concat())
        .unwrap();
    let manifest = dir.path().join("sums.json");
    let against = |wanted: i32, tensors: &[(&str, &str)], holds: &str| {
        let entry = |(name, crc): &(&str, &str)| {
            format!(r#""{name}":{{"dtype":"U8","shape":[3],"bytes":3,"crc32c":"{crc}"}}"#)
        };
        let entries: Vec<_> = tensors.iter().map(entry).collect();
        std::fs::write(&manifest, format!(r#"{{"onehop_manifest":1,"tensors":{{{}}}}}"#, entries.join(",")))
            .unwrap();
        let args = ["load", text(&file), "-g", "emu", "--manifest", text(&manifest)];
        if wanted == 0 {
            assert_eq!(succeed(&args)["verified"], json!(true));
        } else {
            refuse(&args, wanted, holds);
        }
    };
    let sum = format!("{:08x}", crc32c::crc32c(b"abc"));
    against(0, &[("a", &sum)], "");
    against(1, &[("a", "00000000")], "sums.json: the tensor \"a\" is not what it was");
    against(1, &[], "sums.json: it has no checksum of the tensor \"a\"");
    against(1, &[("a", &sum), ("lost", &sum)], "\"lost\", which the model does not hold");
}

/// An ext4 image with these files; `None` without mke2fs.
fn image(dir: &Dir, files: &[(&str, Vec<u8>)]) -> Option<PathBuf> {
    let (tree, image) = (dir.path().join("tree"), dir.path().join("ext4.img"));
    std::fs::create_dir_all(tree.join("models")).unwrap();
    for (name, data) in files {
        std::fs::write(tree.join(name), data).unwrap();
    }
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let made = Command::new("mke2fs")
        .env("PATH", path)
        .args(["-q", "-t", "ext4", "-b", "4096", "-d", text(&tree), text(&image), "16M"])
        .status();
    if made.is_ok_and(|status| status.success()) {
        return Some(image);
    }
    skip("mke2fs is not installed");
    None
}

#[test]
fn files_of_a_drives_own_file_system_are_read() {
    let dir = Dir::new();
    let data: Vec<u8> = (0..1_234_567_u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect();
    let files = [("models/m.bin", data.clone()), ("empty", Vec::new()), ("tiny", b"tiny".to_vec())];
    let Some(image) = image(&dir, &files) else { return };
    let drive = format!("sim:{}?lba=4096", text(&image));
    let out = dir.path().join("out");
    for route in ["auto", "gpu/tier1", "gpu/posted", "cpu/direct", "cpu/pinned"] {
        let args =
            ["read", "-d", &drive, "-g", "emu", "--path", "/models/m.bin", "--route", route, "--verify"];
        let read = succeed(&[&args[..], &["--out", text(&out)]].concat());
        assert_eq!((&read["verified"], &read["bytes"]), (&json!(true), &json!(data.len())), "{route}");
        assert_eq!((&read["file_system"], &read["path"]), (&json!("ext4"), &json!("/models/m.bin")));
        assert!(std::fs::read(&out).unwrap() == data, "{route}");
    }
    let part =
        ["read", "-d", &drive, "-g", "emu", "--path", "models/m.bin", "--offset", "99999", "--len", "5001"];
    let read = succeed(&[&part[..], &["--out", text(&out), "--verify"]].concat());
    assert_eq!((&read["bytes"], &read["verified"]), (&json!(5001), &json!(true)));
    assert!(std::fs::read(&out).unwrap() == data[99_999..105_000]);
    assert_eq!(read["crc32c"], json!(format!("{:08x}", crc32c::crc32c(&data[99_999..105_000]))));
    for (path, bytes) in [("/empty", 0), ("/tiny", 4)] {
        let read = succeed(&["read", "-d", &drive, "-g", "emu", "--path", path, "--verify"]);
        assert_eq!((&read["bytes"], &read["verified"]), (&json!(bytes), &json!(true)), "{path}");
    }
    refuse(&["read", "-d", &drive, "-g", "emu", "--path", "/nope"], 1, "nope");
    refuse(&["read", "-d", &drive, "-g", "emu", "--path", "/models"], 1, "directory");
    refuse(&["read", "-d", &drive, "-g", "emu", "--path", "/tiny", "--offset", "5"], 2, "4 bytes");
    refuse(&["read", "-d", "sim:mem:1M", "-g", "emu", "--path", "/x"], 1, "no file system");
    refuse(&["read", "-d", &drive, "--path", "/x", "--lba", "0", "--blocks", "1"], 2, "--lba");
}

#[test]
fn bench_load_checks_every_load() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    model(&file, &TENSORS, 3);
    let bytes: usize = TENSORS.iter().map(|(_, bytes)| bytes).sum();
    let (code, bench) = json(&["bench", "load", text(&file), "-g", "emu", "--loads", "3"]);
    assert_eq!(code, 0, "{bench}");
    assert_eq!((&bench["bytes"], &bench["verified"]), (&json!(bytes), &json!(true)));
    let rows = bench["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    let rate = |value: &serde_json::Value| value.as_f64().unwrap();
    assert!(rows.iter().all(|row| rate(&row["gbps"]) > 0.0 && row["route"] == "cpu/cached"), "{bench}");
    assert!(rate(&bench["lowest_gbps"]) <= rate(&bench["median_gbps"]));
    let (code, both) = json(&["bench", "load", text(&file), "-g", "emu,emu", "--loads", "2"]);
    assert_eq!(
        (code, &both["bytes"], both["gpus"].as_array().map(Vec::len)),
        (0, &json!(2 * bytes), Some(2)),
        "{both}"
    );
    for gpus in ["emu", "emu,emu"] {
        let (code, kept) = json(&["bench", "load", text(&file), "-g", gpus, "--loads", "3", "--keep"]);
        assert_eq!((code, &kept["memory"], &kept["verified"]), (0, &json!("kept"), &json!(true)), "{kept}");
    }
    let folder = dir.file("report");
    let reported = succeed(&["bench", "load", text(&file), "-g", "emu", "--loads", "2", "--report", &folder]);
    assert_page(&folder, "load", &reported, "Loading a model");
    refuse(&["bench", "load", text(&file), "--loads", "0"], 2, "loads");
    refuse(&["bench", "load", text(&file), "-g", "emu", "--route", "cufile"], 3, "cuFile cannot be used");
    refuse(&["bench", "load", text(&dir.path().join("absent.safetensors"))], 1, "absent");
}
