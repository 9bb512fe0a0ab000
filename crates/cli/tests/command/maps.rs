//! `onehop map`, and reads and loads by a map.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

use onehop_files::live::{LiveFile, System};
use onehop_files::{ExtentMap, Place};
use serde_json::{Value, json};

use crate::load::text;
use crate::mounted::Mounted;
use crate::owned::{crc, image, noise, sharded};
use crate::run::{Dir, code, command, document, refuse, skip, succeed};

#[test]
fn mapped_files_are_read_and_loaded_by_the_map_alone() {
    let dir = Dir::new();
    let (files, tensors) = sharded();
    let Some(image) = image(&dir, "4096", "inline_data", &files) else { return };
    let (drive, map) = (format!("sim:{}", text(&image)), dir.file("llama.map"));
    let made =
        succeed(&["map", "-d", &drive, "--path", "/llama", "--path", "/tiny.safetensors", "--out", &map]);
    let mapped = made["maps"].as_array().unwrap();
    assert_eq!(
        (mapped.len(), &mapped[0]["stability"], &mapped[3]["file_system"]),
        (4, &json!(5), &json!("ext4"))
    );
    let llama = dir.file("only.map");
    succeed(&["map", "-d", &drive, "--path", "/llama", "--out", &llama]);
    for route in ["gpu/tier3", "gpu/tier1", "cpu/direct", "cpu/pinned"] {
        let load = ["load", "-d", &drive, "--map", &llama, "-g", "emu", "--verify", "--route", route];
        let loaded = succeed(&load);
        assert_eq!((&loaded["verified"], &loaded["crc32c"]), (&json!(true), &crc(&tensors)), "{loaded:#}");
        assert!(loaded["verified_by"].as_str().unwrap().contains("map"));
    }
    let out = dir.file("out");
    let read = ["read", "-d", &drive, "--map", &map, "-g", "emu", "--out", &out, "--verify"];
    for (path, data) in [("/llama/two.safetensors", &files[2].1), ("/tiny.safetensors", &files[4].1)] {
        let got = succeed(&[&read[..], &["--path", path]].concat());
        assert_eq!((&got["verified"], &got["path"]), (&json!(true), &json!(path)));
        assert!(fs::read(&out).unwrap() == *data, "{path}");
    }
    let part = ["--path", "/llama/two.safetensors", "--offset", "777", "--len", "5000"];
    succeed(&[&read[..], &part[..]].concat());
    assert!(fs::read(&out).unwrap() == files[2].1[777..5777]);
    refuse(&read, 2, "the map has /llama/");
    refuse(&["load", "-d", &drive, "--map", &map, "--path", "/llama"], 2, "cannot be used with");
    refused(&dir, &image, (&drive, &llama));
}

#[test]
fn a_map_does_not_overwrite_a_mapped_file() {
    let dir = Dir::new();
    let (files, _) = sharded();
    let Some(image) = image(&dir, "4096", "inline_data", &files) else { return };
    let (drive, map) = (format!("sim:{}", text(&image)), dir.file("llama.map"));
    let before = fs::read(&image).unwrap();
    refuse(&["map", "-d", &drive, "--path", "/llama", "--out", text(&image)], 2, "is the file that is read");
    assert!(fs::read(&image).unwrap() == before);
    succeed(&["map", "-d", &drive, "--path", "/tiny.safetensors", "--out", &map]);
    let before = fs::read(&map).unwrap();
    refuse(&["read", "-d", &drive, "--map", &map, "-g", "emu", "--out", &map], 2, "is the file that is read");
    assert!(fs::read(&map).unwrap() == before);
}

#[test]
fn a_map_is_a_regular_file_of_limited_size() {
    let dir = Dir::new();
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    refuse(&["load", "-d", "sim:mem:16M", "--map", text(&fifo), "-g", "emu"], 1, "a FIFO");
    refuse(&["load", "-d", "sim:mem:16M", "--map", "/dev/zero", "-g", "emu"], 1, "not a regular file");
    let write = [
        "write",
        "-d",
        "sim:mem:16M",
        "--lba",
        "0",
        "--serial",
        "ONEHOP-SIM-1",
        "--yes",
        "--in",
        text(&fifo),
    ];
    refuse(&write, 2, "only a regular file");
    let long = dir.file("long.map");
    fs::File::create(&long).unwrap().set_len(100_000_001).unwrap();
    refuse(&["load", "-d", "sim:mem:16M", "--map", &long, "-g", "emu"], 1, "are more than the 100000000");
}

/// Other drives, changed drives and damaged maps are refused.
fn refused(dir: &Dir, image: &Path, (drive, map): (&str, &str)) {
    let load = |drive: &str, map: &str, code, holds| {
        refuse(&["load", "-d", drive, "--map", map, "-g", "emu", "--verify"], code, holds)
    };
    load(&format!("{drive}?serial=ANOTHER"), map, 1, "the extent map is for \"ONEHOP-SIM-1\"");
    load(&format!("{drive}?lba=4096"), map, 1, "the drive has changed");
    let bytes = fs::read(map).unwrap();
    let cut = dir.file("cut.map");
    fs::write(&cut, &bytes[..bytes.len() - 9]).unwrap();
    load(drive, &cut, 1, "extent map is damaged");
    fs::write(&cut, b"").unwrap();
    load(drive, &cut, 1, "empty");
    fs::write(&cut, [&bytes[..], &bytes[..]].concat()).unwrap();
    load(drive, &cut, 1, "two of the extent maps are of /llama/");
    load(drive, "/nowhere.map", 1, "nowhere");
    // A map of the index without its shards.
    let alone = dir.file("alone.map");
    succeed(&["map", "-d", drive, "--path", "/llama/model.safetensors.index.json", "--out", &alone]);
    load(drive, &alone, 1, "none of the extent maps");
    // Change a byte of a tensor, which only the checksum shows.
    let maps = ExtentMap::parse_all(&bytes).unwrap();
    let two = maps.iter().find(|map| map.file.path.ends_with("two.safetensors")).unwrap();
    let at = two.chunks().iter().find_map(|chunk| match chunk.extent.place {
        Place::Drive(at) if chunk.extent.len > 20_000 => Some(at + 10_000),
        _ => None,
    });
    let file = fs::File::options().write(true).read(true).open(image).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at.unwrap()).unwrap();
    file.write_all_at(&[!byte[0]], at.unwrap()).unwrap();
    let wrong = load(drive, map, 1, "two.safetensors has changed");
    assert_eq!(wrong["verified"], json!(false));
    let read =
        ["read", "-d", drive, "--map", map, "--path", "/llama/two.safetensors", "-g", "emu", "--verify"];
    assert_eq!(refuse(&read, 1, "CRC-32C")["verified"], json!(false));
}

#[test]
fn local_files_are_mapped_if_the_kernel_reports_extents() {
    let dir = Dir::new();
    let (file, data) = dir.noise("live.safetensors", 300_000);
    let out = dir.file("live.map");
    if let Err(error) = LiveFile::open(&file, &System::default()) {
        refuse(&["map", &file, "--out", &out], 1, &error.to_string());
        return skip(&format!("the kernel reports no extents here: {error}"));
    }
    let made = succeed(&["map", text(dir.path()), "--out", &out]);
    assert_eq!((&made["maps"][0]["path"], &made["maps"][0]["bytes"]), (&json!(file), &json!(data.len())));
    let maps = ExtentMap::parse_all(&fs::read(&out).unwrap()).unwrap();
    assert_eq!(maps.len(), 1);
    refuse(&["load", "-d", "sim:mem:16M", "--map", &out, "-g", "emu"], 1, "the drive has changed");
    refuse(&["map", "/dev/null", "--out", &out], 1, "device");
    refuse(&["map", "--out", &out], 2, "FILE");
}

/// Runs a command with arguments that need not be UTF-8; returns exit code and document.
fn with_bytes(args: &[&OsStr]) -> (i32, Value) {
    let output = command(&["--json"]).args(args).output().unwrap();
    (code(&output), document(args[0].to_str().unwrap(), &output))
}

fn args<'a>(words: &[&'a str], raw: &[&'a OsStr]) -> Vec<&'a OsStr> {
    words.iter().map(|word| OsStr::new(*word)).chain(raw.iter().copied()).collect()
}

/// File names may contain any bytes except `/` and NUL.
#[test]
fn non_utf8_names_are_mapped_read_and_loaded() {
    let dir = Dir::new();
    let (files, tensors) = sharded();
    let (one, raw) = (&files[1].1, OsStr::from_bytes(b"/m\xffdel"));
    let tree = dir.path().join("model-tree/m").with_file_name(OsStr::from_bytes(b"m\xffdel"));
    fs::create_dir_all(&tree).unwrap();
    let name = OsStr::from_bytes(b"w\xfe.safetensors");
    fs::write(tree.join(name), one).unwrap();
    let Some(image) = image(&dir, "4096", "^inline_data", &[]) else { return };
    let drive = format!("sim:{}", text(&image));
    let (map, out) = (dir.path().join(OsStr::from_bytes(b"m\xffp")), dir.file("out"));
    let file = Path::new(raw).join(name);
    let on_drive = ["-d", &drive, "--path"];
    let (status, made) =
        with_bytes(&args(&[&["map"], &on_drive[..]].concat(), &[raw, "--out".as_ref(), map.as_ref()]));
    assert_eq!((status, made["maps"][0]["bytes"].as_u64()), (0, Some(one.len() as u64)), "{made:#}");
    assert_eq!(made["maps"][0]["path"], json!("/m\u{fffd}del/w\u{fffd}.safetensors"));
    let read = ["read", "-d", &drive, "-g", "emu", "--verify", "--out", &out];
    let path = args(&["--path"], &[file.as_ref()]);
    for more in [path.clone(), [path, args(&["--map"], &[map.as_ref()])].concat()] {
        let (status, got) = with_bytes(&[args(&read, &[]), more].concat());
        assert_eq!((status, &got["verified"]), (0, &json!(true)), "{got:#}");
        assert!(fs::read(&out).unwrap() == *one);
    }
    let load = ["load", "-d", &drive, "-g", "emu", "--verify"];
    for more in [args(&["--path"], &[raw]), args(&["--map"], &[map.as_ref()])] {
        let (status, got) = with_bytes(&[args(&load, &[]), more].concat());
        assert_eq!((status, &got["crc32c"]), (0, &crc(&tensors[..2])), "{got:#}");
    }
    let (status, got) = with_bytes(&args(&["load", "-g", "emu", "--verify"], &[tree.as_ref()]));
    assert_eq!((status, &got["crc32c"]), (0, &crc(&tensors[..2])), "{got:#}");
    let (status, got) = with_bytes(&args(&["map"], &[tree.as_ref(), "--out".as_ref(), map.as_ref()]));
    match LiveFile::open(tree.join(name), &System::default()) {
        Ok(_) => assert_eq!((status, &got["maps"][0]["bytes"]), (0, &json!(one.len())), "{got:#}"),
        Err(error) => skip(&format!("the kernel reports no extents here: {error}")),
    }
}

/// A file system on the whole drive, whose first block looks like a partition table.
#[test]
fn the_whole_drive_can_be_selected() {
    let dir = Dir::new();
    let Some(image) = image(&dir, "4096", "^inline_data", &[("here", noise(9000, 1))]) else { return };
    let file = fs::File::options().write(true).open(&image).unwrap();
    let mut slot = [0; 16];
    slot[4] = 0x83;
    slot[8..12].copy_from_slice(&40960_u32.to_le_bytes());
    slot[12..].copy_from_slice(&2048_u32.to_le_bytes());
    file.write_all_at(&slot, 446).unwrap();
    file.write_all_at(&[0x55, 0xAA], 510).unwrap();
    let (drive, out) = (format!("sim:{}", text(&image)), dir.file("out"));
    let read = ["read", "-d", &drive, "--path", "/here", "-g", "emu", "--out", &out];
    refuse(&read, 2, "which partition?");
    succeed(&[&read[..], &["--partition", "none"]].concat());
    assert!(fs::read(&out).unwrap() == noise(9000, 1));
    succeed(&["map", "-d", &drive, "--path", "/here", "--partition", "none", "--out", &dir.file("map")]);
    let model = ["load", "-d", &drive, "--path", "/here", "-g", "emu", "--partition"];
    let other = refuse(&[&model[..], &["none"]].concat(), 1, "here");
    assert!(!other["error"]["message"].as_str().unwrap().contains("partition"), "{other:#}");
    for wrong in ["None", "whole", "-1", ""] {
        refuse(&[&model[..7], &[&format!("--partition={wrong}")]].concat(), 2, "nor `none`");
    }
    let bare = ["read", "-d", "sim:mem:1M", "--path", "/here", "-g", "emu", "--partition", "2"];
    refuse(&bare, 2, "which partition? there are none");
}

/// Creates a sysfs tree in which the loop device with `at` is the only partition of the drive `id`, with the same size. It
/// keeps the device's name, by which ext4 reports its options.
fn fake_sysfs(dir: &Dir, at: &Path, id: &Value) -> System {
    let device = fs::metadata(at).unwrap().dev();
    let number = format!("{}:{}", device >> 8 & 0xFFF, device & 0xFF | device >> 12 & !0xFF);
    let real = fs::canonicalize(Path::new("/sys/dev/block").join(&number)).unwrap();
    let sysfs = dir.path().join("sys");
    let disk = sysfs.join("devices/pci0000:00/0000:0b:00.0/nvme/nvme0/nvme0n1");
    let part = disk.join(real.file_name().unwrap());
    for path in [disk.join("queue"), part.clone(), sysfs.join("dev/block")] {
        fs::create_dir_all(path).unwrap();
    }
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    for (file, value) in [("serial", "serial"), ("nsid", "nsid"), ("wwid", "wwid")] {
        fs::write(disk.join(file), plain(&id[value])).unwrap();
    }
    let size = (id["bytes"].as_u64().unwrap() / 512).to_string();
    fs::write(disk.join("queue/logical_block_size"), plain(&id["lba_bytes"])).unwrap();
    for (path, text) in [("dev", "259:0"), ("size", &size)] {
        fs::write(disk.join(path), text).unwrap();
    }
    for (path, text) in [("partition", "1"), ("start", "0"), ("size", &size)] {
        fs::write(part.join(path), text).unwrap();
    }
    symlink(&part, sysfs.join("dev/block").join(number)).unwrap();
    System::default().with_sysfs(sysfs)
}

#[test]
fn files_mapped_while_mounted_load_from_the_detached_drive() {
    let dir = Dir::new();
    let Some(image) = image(&dir, "4096", "^inline_data", &[("here", noise(9000, 1))]) else { return };
    let drive = format!("sim:{}", text(&image));
    let id = dir.file("id.map");
    let id = succeed(&["map", "-d", &drive, "--path", "/here", "--out", &id])["maps"][0]["drive"].clone();
    let mounted = match Mounted::new(&image, dir.path().join("mounted")) {
        Ok(mounted) => mounted,
        Err(message) => return skip(&format!("nothing can be mounted here: {message}")),
    };
    let (files, tensors) = sharded();
    for (name, data) in &files {
        let path = mounted.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, data).unwrap();
    }
    let system = fake_sysfs(&dir, mounted.path(), &id);
    let map = dir.file("live.map");
    let live =
        |name: &&str| LiveFile::open(mounted.path().join(name), &system).unwrap().map().unwrap().to_bytes();
    let names = files.iter().map(|(name, _)| *name).filter(|name| name.starts_with("llama/"));
    let maps: Vec<u8> =
        names.filter(|name| !name.ends_with("config.json")).flat_map(|name| live(&name)).collect();
    fs::write(&map, maps).unwrap();
    drop(mounted);
    let loaded = succeed(&["load", "-d", &drive, "--map", &map, "-g", "emu", "--verify"]);
    assert_eq!((&loaded["verified"], &loaded["crc32c"]), (&json!(true), &crc(&tensors)), "{loaded:#}");
}
