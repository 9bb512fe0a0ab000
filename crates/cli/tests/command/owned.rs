//! `onehop load -d`: models on a drive that onehop drives.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use onehop_files::{Image, Place, Volume, Which};
use onehop_qtest::bed::{Qemu, QemuOptions};
use serde_json::{Value, json};

use crate::load::text;
use crate::run::{Dir, refuse, skip, succeed};

/// Named bytes: tensors or files.
pub type Named = Vec<(&'static str, Vec<u8>)>;

/// Bytes that are all different.
pub fn noise(bytes: usize, seed: u32) -> Vec<u8> {
    (0..bytes).map(|i| ((i as u32 ^ seed).wrapping_mul(0x9e37_79b9) >> 11) as u8).collect()
}

/// A safetensors file of these tensors, whose data starts `offset` bytes after a multiple of 8.
fn safetensors(tensors: &[(&str, Vec<u8>)], offset: usize) -> Vec<u8> {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, bytes) in tensors {
        let at = data.len();
        data.extend(bytes);
        header.push(format!(
            r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{at},{}]}}"#,
            bytes.len(),
            data.len()
        ));
    }
    let mut header = format!("{{{}}}", header.join(","));
    while header.len() % 8 != offset {
        header.push(' ');
    }
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// The checksum that a load of all tensors reports.
pub fn crc(tensors: &[(&str, Vec<u8>)]) -> Value {
    let all: Vec<u8> = tensors.iter().flat_map(|(_, data)| data.clone()).collect();
    json!(format!("{:08x}", crc32c::crc32c(&all)))
}

pub fn tool(name: &str, args: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    match Command::new(name).env("PATH", path).args(args).output() {
        Ok(output) => {
            assert!(output.status.success(), "{name} {args:?}: {output:?}");
            true
        }
        Err(_) => {
            skip(&format!("{name} is not installed"));
            false
        }
    }
}

/// An ext4 image with fragmented files: it was full of small files, half of which were removed before these were
/// written.
fn fragmented(dir: &Dir, block: &str, files: &[(&str, &[u8])]) -> Option<PathBuf> {
    let (tree, image) = (dir.path().join("tree"), dir.path().join("fragmented.img"));
    std::fs::create_dir_all(&tree).unwrap();
    for i in 0..600 {
        std::fs::write(tree.join(format!("f{i}")), noise(20_000, i)).unwrap();
    }
    let made = ["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-b", block];
    if !tool("mke2fs", &[&made[..], &["-d", text(&tree), text(&image), "26M"]].concat()) {
        return None;
    }
    let mut script: String = (0..600).step_by(2).map(|i| format!("rm f{i}\n")).collect();
    for (name, data) in files {
        let file = dir.path().join(name);
        std::fs::write(&file, data).unwrap();
        script += &format!("write {} {name}\n", text(&file));
    }
    let commands = dir.path().join("commands");
    std::fs::write(&commands, script).unwrap();
    tool("debugfs", &["-w", "-f", text(&commands), text(&image)]).then_some(image)
}

fn tensors() -> Named {
    vec![
        ("a", noise(3_000_000, 1)),
        ("b", noise(5, 2)),
        ("c", noise(777, 3)),
        ("d", noise((1 << 20) + 1, 4)),
        ("none", Vec::new()),
        ("e", noise(300_000, 5)),
    ]
}

const ROUTES: [&str; 6] = ["gpu/tier1", "gpu/tier2", "gpu/tier3", "gpu/posted", "cpu/direct", "cpu/pinned"];

#[test]
fn fragmented_files_are_loaded_by_every_route() {
    let dir = Dir::new();
    let tensors = tensors();
    let (aligned, unaligned) = (safetensors(&tensors, 0), safetensors(&tensors, 3));
    let files = [("m.safetensors", &aligned[..]), ("unaligned.safetensors", &unaligned[..])];
    let Some(image) = fragmented(&dir, "4096", &files) else { return };
    for (i, route) in ROUTES.iter().enumerate() {
        let (name, lba) = (["m", "unaligned"][i % 2], [512, 4096][i / 2 % 2]);
        let drive = format!("sim:{}?lba={lba}", text(&image));
        let path = format!("/{name}.safetensors");
        let load = ["load", "-d", &drive, "--path", &path, "-g", "emu", "--verify", "--route", route];
        let loaded = succeed(&load);
        assert_eq!((&loaded["verified"], &loaded["crc32c"]), (&json!(true), &crc(&tensors)), "{loaded:#}");
        assert_eq!((&loaded["route"], &loaded["tensors"]), (&json!(route), &json!(6)));
        assert_eq!((&loaded["bytes"], &loaded["errors"]), (&json!(4_349_359), &json!(0)));
        assert_eq!(loaded["simulated"], json!(["drive", "gpu"]));
        assert!(loaded["limit"]["what"].is_string() && loaded["placement"]["data"].is_string());
        // On direct routes, tensors at aligned addresses are not copied.
        let direct = loaded["direct_bytes"].as_u64().unwrap();
        assert_eq!(direct > 2_000_000, name == "m" && *route != "cpu/pinned", "{loaded:#}");
        assert!(name == "unaligned" || loaded["extent_count"].as_u64().unwrap() > 20, "{loaded:#}");
        assert_eq!(direct + loaded["staged_bytes"].as_u64().unwrap(), loaded["read_bytes"]);
        let arena = loaded["gpu_bytes"].as_u64().unwrap();
        assert!(arena < 4_349_359 + (256 << 10), "{arena}");
    }
    let drive = format!("sim:{}", text(&image));
    let plan = succeed(&[
        "load",
        "-d",
        &drive,
        "--path",
        "/m.safetensors",
        "-g",
        "emu",
        "--plan",
        "--route",
        "gpu/tier1",
    ]);
    assert_eq!((&plan["route"], &plan["tensors"]), (&json!("gpu/tier1"), &json!(6)));
    assert!(plan["ranges"].is_array() && plan["peak_gpu_bytes"].as_u64().unwrap() >= 4_349_359);
    // A rank's rows are fragmented, too.
    let rank = ["--rank", "1/2", "--cut", "a=0", "--only", "a"];
    let part = succeed(
        &[&["load", "-d", &drive, "--path", "/m.safetensors", "-g", "emu", "--verify"], &rank[..]].concat(),
    );
    assert_eq!((&part["bytes"], &part["verified"]), (&json!(1_500_000), &json!(true)));
    assert_eq!(part["crc32c"], json!(format!("{:08x}", crc32c::crc32c(&tensors[0].1[1_500_000..]))));
    let both = ["-g", "emu,emu", "--cut", "a=0", "--only", "a", "--verify"];
    let both = succeed(&[&["load", "-d", &drive, "--path", "/m.safetensors"], &both[..]].concat());
    assert_eq!((&both["bytes"], &both["verified"]), (&json!(3_000_000), &json!(true)));
    assert_eq!((&both["crc32c"], &both["gpus"][1]["crc32c"]), (&crc(&tensors[..1]), &part["crc32c"]));
    assert_eq!(both["gpus"][0]["route"], both["route"]);
    let faults = format!("{drive}?fault=fail-once@op=read,n=60&fault=lost@op=read,n=80");
    let recovered =
        ["load", "-d", &faults, "--path", "/m.safetensors", "-g", "emu", "--timeout", "300ms", "--verify"];
    let recovered = succeed(&recovered);
    assert!(recovered["retries"].as_u64().unwrap() >= 1 && recovered["verified"] == true, "{recovered:#}");
}

/// An ext4 image of these files. With the feature `inline_data`, short files are stored in metadata.
pub fn image(dir: &Dir, block: &str, features: &str, files: &[(&str, Vec<u8>)]) -> Option<PathBuf> {
    let (tree, image) = (dir.path().join("model-tree"), dir.path().join("model.img"));
    for (name, data) in files {
        let path = tree.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::File::create(path).unwrap();
        // Chunks of zeros become holes.
        for (i, part) in data.chunks(65536).enumerate() {
            if part.iter().any(|&b| b != 0) {
                std::os::unix::fs::FileExt::write_all_at(&file, part, i as u64 * 65536).unwrap();
            }
        }
        file.set_len(data.len() as u64).unwrap();
    }
    let made = ["-q", "-F", "-t", "ext4", "-b", block, "-O", features, "-I", "1024"];
    tool("mke2fs", &[&made[..], &["-d", text(&tree), text(&image), "40M"]].concat()).then_some(image)
}

/// Two shards with an index, the second with holes.
pub fn sharded() -> (Named, Named) {
    let first = vec![("x.w", noise(400_000, 9)), ("x.b", noise(64, 10))];
    let mut holes = noise(3_000_000, 11);
    holes[200_000..1_500_000].fill(0);
    holes[2_000_000..].fill(0);
    let second = vec![("y.w", holes), ("y.b", noise(33, 12))];
    let map = r#"{"weight_map":{"x.w":"one.safetensors","x.b":"one.safetensors","y.w":"two.safetensors","y.b":"two.safetensors"}}"#;
    let files = vec![
        ("llama/model.safetensors.index.json", map.as_bytes().to_vec()),
        ("llama/one.safetensors", safetensors(&first, 0)),
        ("llama/two.safetensors", safetensors(&second, 0)),
        ("llama/config.json", b"{}".to_vec()),
        ("tiny.safetensors", safetensors(&[("t", vec![7, 8, 9])], 0)),
    ];
    (files, [first, second].concat())
}

#[test]
fn directories_holes_and_inline_files() {
    let dir = Dir::new();
    let (files, tensors) = sharded();
    let Some(image) = image(&dir, "4096", "inline_data", &files) else { return };
    for (lba, route) in [(4096, "gpu/tier3"), (512, "gpu/tier1"), (512, "cpu/pinned")] {
        let drive = format!("sim:{}?lba={lba}", text(&image));
        let load = ["load", "-d", &drive, "--path", "/llama", "-g", "emu", "--verify", "--route", route];
        let loaded = succeed(&load);
        assert_eq!((&loaded["verified"], &loaded["crc32c"]), (&json!(true), &crc(&tensors)), "{loaded:#}");
        assert_eq!((&loaded["files"], &loaded["tensors"]), (&json!(2), &json!(4)));
        assert!(loaded["hole_bytes"].as_u64().unwrap() > 2_000_000, "{loaded:#}");
        assert!(loaded["read_bytes"].as_u64().unwrap() < 1_400_000);
        let tiny = succeed(&[
            "load",
            "-d",
            &drive,
            "--path",
            "tiny.safetensors",
            "-g",
            "emu",
            "--verify",
            "--route",
            route,
        ]);
        assert_eq!(
            (&tiny["verified"], &tiny["inline_bytes"].as_u64().is_some_and(|n| n > 0)),
            (&json!(true), &true)
        );
        assert_eq!((&tiny["read_bytes"], &tiny["commands"]), (&json!(0), &json!(0)));
    }
    let drive = format!("sim:{}", text(&image));
    let load = |path: &'static str| ["load", "-d", &drive, "-g", "emu", "--path", path].map(str::to_owned);
    let fails = |path, code, holds: &str| {
        let args = load(path);
        refuse(&args.iter().map(String::as_str).collect::<Vec<_>>(), code, holds);
    };
    fails("/nope", 1, "nope");
    fails("/llama/config.json", 1, "weight_map");
    fails("/lost+found", 1, "no *.safetensors");
    refuse(&["load", "-d", &drive, "-g", "emu"], 2, "--path");
    refuse(&["load", "-d", &drive, "x", "--path", "/llama"], 2, "cannot be used with");
    refuse(&["load", "-d", &drive, "--path", "/llama", "--route", "cpu/cached"], 3, "page cache");
    refuse(&["load", "-d", "sim:mem:1M", "--path", "/llama", "-g", "emu"], 1, "no file system");
}

#[test]
fn blocks_larger_than_the_file_systems_are_refused() {
    let dir = Dir::new();
    let files = [("m.safetensors", safetensors(&[("a", noise(100_000, 1))], 0))];
    let Some(image) = image(&dir, "1024", "inline_data", &files) else { return };
    let load = |lba: u32| {
        ["load", "-d", &format!("sim:{}?lba={lba}", text(&image)), "--path", "/m.safetensors", "-g", "emu"]
            .map(str::to_owned)
    };
    let args = load(512);
    succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let args = load(16384);
    refuse(&args.iter().map(String::as_str).collect::<Vec<_>>(), 3, "within a block of 16384");
}

/// A file with a hole that begins within a block of the drive. The rest of that block belongs to another file.
#[test]
fn holes_may_begin_within_a_block() {
    let dir = Dir::new();
    let tensor = [("a", [noise(700, 5), vec![0; 300_000]].concat())];
    let (whole, out) = (safetensors(&tensor, 0), dir.file("out"));
    let name = |i: u32| format!("{i}.safetensors");
    let names: Vec<String> = (0..16).map(name).collect();
    let files: Vec<_> = names.iter().map(|name| (&name[..], whole[..1024].to_vec())).collect();
    let Some(image) = image(&dir, "1024", "^inline_data", &files) else { return };
    let script: String = names.iter().map(|name| format!("sif {name} size {}\n", whole.len())).collect();
    std::fs::write(dir.path().join("commands"), script).unwrap();
    if !tool("debugfs", &["-w", "-f", &dir.file("commands"), text(&image)]) {
        return;
    }
    let volume = Volume::open(Arc::new(Image::open(&image).unwrap()), Which::Auto).unwrap();
    let starts_block = |name: &&String| {
        let extents = volume.lookup(name).and_then(|file| Ok(volume.extents(&file)?[0].place.clone()));
        matches!(extents.unwrap(), Place::Drive(at) if at % 4096 == 0)
    };
    let drive = format!("sim:{}?lba=4096", text(&image));
    let mut tried = 0;
    for name in names.iter().filter(starts_block) {
        for route in ["gpu/tier1", "cpu/pinned"] {
            let options = ["-d", &drive, "--path", name, "-g", "emu", "--route", route, "--verify"];
            succeed(&[&["read", "--out", &out], &options[..]].concat());
            assert!(std::fs::read(&out).unwrap() == whole, "{name} by {route}");
            let loaded = succeed(&[&["load"], &options[..]].concat());
            assert_eq!((&loaded["verified"], &loaded["crc32c"]), (&json!(true), &crc(&tensor)));
            tried += 1;
        }
    }
    assert!(tried > 0, "no file starts at a block of the drive");
}

#[test]
fn a_model_is_loaded_from_qemus_drive() {
    let dir = Dir::new();
    let (files, tensors) = sharded();
    let Some(image) = image(&dir, "4096", "inline_data", &files) else { return };
    let options =
        QemuOptions { disk_bytes: 40 << 20, lba: 4096, ram_bytes: 512 << 20, ..QemuOptions::default() };
    let Some(qemu) = Qemu::start_or_skip(&options).unwrap() else { return };
    copy_over(&image, qemu.image(1).unwrap());
    let drive = format!("qtest:{}", qemu.spec());
    for route in ["gpu/tier1", "gpu/posted", "cpu/direct"] {
        let load = ["load", "-d", &drive, "--path", "/llama", "-g", "emu", "--verify", "--route", route];
        let loaded = succeed(&load);
        assert_eq!((&loaded["verified"], &loaded["crc32c"]), (&json!(true), &crc(&tensors)), "{loaded:#}");
    }
}

/// Overwrites the image that QEMU has open, without replacing the file.
fn copy_over(from: &Path, to: &Path) {
    let mut to = std::fs::File::options().write(true).open(to).unwrap();
    std::io::copy(&mut std::fs::File::open(from).unwrap(), &mut to).unwrap();
}

#[test]
fn a_file_with_a_non_utf8_name_is_not_skipped() {
    let dir = Dir::new();
    let (root, image) = (dir.path().join("root"), dir.file("names.img"));
    std::fs::create_dir_all(root.join("m")).unwrap();
    std::fs::write(root.join("m/a.safetensors"), safetensors(&[("a", noise(100, 1))], 0)).unwrap();
    let unusual = root.join("m").join(OsStr::from_bytes(b"\xff.safetensors"));
    std::fs::write(unusual, safetensors(&[("b", noise(100, 2))], 0)).unwrap();
    if !tool("mke2fs", &["-q", "-t", "ext4", "-d", text(&root), &image, "16M"]) {
        return;
    }
    let drive = format!("sim:{image}");
    let both = ["load", "-d", &drive, "--path", "/m", "-g", "emu"];
    refuse(&both, 2, "may contain several models (a.safetensors, \u{fffd}.safetensors)");
    let one = succeed(&["load", "-d", &drive, "--path", "/m/a.safetensors", "-g", "emu", "--verify"]);
    assert_eq!((&one["tensors"], &one["verified"]), (&json!(1), &json!(true)));
}
