//! Refusals: exit codes and messages.

use crate::load;
use crate::run::{Dir, code, command, refuse, skip, stderr, succeed};

#[test]
fn writes_need_the_serial_number_and_yes() {
    let dir = Dir::new();
    let (input, _) = dir.noise("in.bin", 4096);
    let image = dir.file("disk.img");
    let drive = format!("sim:{image}?size=1M&serial=RIGHT");
    let write = |more: &[&str]| {
        let args = ["write", "-d", &drive, "--lba", "0", "--in", &input];
        [&args[..], more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    for (more, words) in [
        (&["--yes"][..], "--serial"),
        (&["--serial", "WRONG", "--yes"], "'WRONG' is not the serial number"),
        (&["--serial", "", "--yes"], "is not the serial number"),
        (&["--serial", "right", "--yes"], "drive identify"),
        (&["--serial", "RIGHT"], "add --yes"),
    ] {
        let args = write(more);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let document = refuse(&args, 2, words);
        // The message does not contain the right serial number.
        assert!(more.contains(&"RIGHT") || !document.to_string().contains("'RIGHT'"));
    }
    if let Ok(bytes) = std::fs::read(&image) {
        assert!(bytes.iter().all(|b| *b == 0), "a refused write changed the image");
    }
    let args = write(&["--serial", "RIGHT", "--yes"]);
    succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn a_namespace_with_protection_information_is_written_by_every_route() {
    let dir = Dir::new();
    let (input, bytes) = dir.noise("in.bin", 8 << 10);
    for (n, ext) in ["ext=0", "ext=1"].into_iter().enumerate() {
        let drive = format!("sim:{}?size=1M&ms=8&{ext}&pi=1", dir.file(&format!("disk{n}.img")));
        let write = |route| {
            let args = ["write", "-d", &drive, "--lba", "5", "--in", &input, "--route", route, "--verify"];
            [&args[..], &["--serial", "ONEHOP-SIM-1", "--yes"]].concat()
        };
        let out = dir.file("out.bin");
        for route in ["auto", "cpu/direct", "gpu/tier1", "gpu/tier3"] {
            succeed(&write(route));
            for route in ["auto", "cpu/direct", "gpu/tier1"] {
                let read = ["read", "-d", &drive, "--lba", "5", "--blocks", "16", "--route", route];
                succeed(&[&read[..], &["--verify", "--out", &out]].concat());
                assert!(std::fs::read(&out).unwrap() == bytes, "{route}, {ext}");
            }
        }
        let known = succeed(&["drive", "identify", "-d", &drive]);
        assert_eq!(known["namespaces"][0]["metadata_bytes"], 8, "{known:#}");
    }
}

/// Metadata larger than protection information is transferred. The controller generates part of it, which differs from
/// what was sent.
#[test]
fn metadata_made_by_the_controller_is_not_a_mismatch() {
    let dir = Dir::new();
    let (input, _) = dir.noise("in.bin", 16 * 576);
    let drive = "sim:mem:1M?ms=64&ext=1&pi=1";
    let args = ["write", "-d", drive, "--lba", "5", "--in", &input, "--verify", "--yes"];
    succeed(&[&args[..], &["--serial", "ONEHOP-SIM-1"]].concat());
}

#[test]
fn a_part_of_a_block_is_refused_with_the_sizes() {
    let dir = Dir::new();
    let (input, data) = dir.noise("in.bin", 1025);
    let drive = format!("sim:{}?size=1M", dir.file("disk.img"));
    let args = [
        "write",
        "-d",
        &drive,
        "--lba",
        "7",
        "--in",
        &input,
        "--serial",
        "ONEHOP-SIM-1",
        "--yes",
        "--verify",
    ];
    refuse(&args, 2, "1025 bytes, which is 2 blocks of 512 bytes and 1 more; add --pad");
    let wrote = succeed(&[&args[..], &["--pad"]].concat());
    assert_eq!(wrote["bytes"], 1536);
    let image = std::fs::read(dir.file("disk.img")).unwrap();
    assert!(image[7 * 512..7 * 512 + 1025] == data && image[7 * 512 + 1025..].iter().all(|b| *b == 0));
    let (empty, _) = dir.noise("empty.bin", 0);
    let args = ["write", "-d", &drive, "--lba", "0", "--in", &empty, "--serial", "ONEHOP-SIM-1", "--yes"];
    refuse(&args, 2, "empty");
}

#[test]
fn blocks_past_the_end() {
    let max = u64::MAX.to_string();
    for (lba, blocks) in [("0", "0"), ("2048", "1"), ("0", "2049"), (&max, "1"), ("0", &max), (&max, &max)] {
        refuse(&["read", "-d", "sim:mem:1M", "--lba", lba, "--blocks", blocks], 2, "namespace 1");
    }
    refuse(&["read", "-d", "sim:mem:1M", "--nsid", "2", "--lba", "0", "--blocks", "1"], 2, "namespace 2");
    refuse(&["drive", "identify", "-d", "sim:mem:1M", "--nsid", "4294967295"], 2, "namespace");
    // More than fits in memory is refused before anything is tried.
    let huge = ["read", "-d", "sim:mem:16T", "--lba", "0", "--blocks", "0x700000000"];
    let document = refuse(&huge, 3, "memory of GPU emu");
    assert!(document["error"]["fix"].as_str().unwrap().contains("fewer"));
}

#[test]
fn unavailable_devices_and_routes() {
    let read = |more: &[&'static str]| [&["read", "--lba", "0", "--blocks", "1"], more].concat();
    let none = |more: &[&'static str], words| {
        let document = refuse(&read(more), 3, words);
        assert!(!document["error"]["reason"].as_str().unwrap().is_empty());
        assert!(!document["error"]["fix"].as_str().unwrap().is_empty());
    };
    none(&["-d", "ffff:17:1f.7"], "no PCI device of this address");
    none(&["-d", "ffff:17:1f.7?via=pagemap"], "no PCI device of this address");
    none(&["-d", "sim:mem:1M", "-g", "99"], "using GPU 99");
    none(&["-d", "sim:mem:1M", "-g", "ffff:17:1f.7"], "-g emu");
    none(&["-d", "sim:mem:1M", "--route", "cufile"], "that Linux has mounted");
    none(&["-d", "sim:mem:1M", "--route", "cpu/cached"], "page cache");
    none(&["-d", "sim:mem:1M", "-g", "emu:ffff:17:1f.7"], "-g emu");
    for command in ["bind", "unbind", "reset", "check-p2p"] {
        refuse(&["drive", command, "-d", "ffff:17:1f.7"], 3, "no PCI device of this address");
    }
    for command in ["bind", "unbind", "recover"] {
        refuse(&["drive", command, "-d", "sim:mem:1M"], 2, "only real drives");
    }
    refuse(&["drive", "identify", "-d", "ffff:17:1f.7?via=magic"], 2, "vfio, iommufd, kmod or pagemap");
}

/// Advice to try another driver would be wrong, because the device is no drive.
#[test]
fn a_device_that_is_not_a_drive_is_refused_without_advice_to_force_it() {
    let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let class = |device: &std::fs::DirEntry| std::fs::read_to_string(device.path().join("class"));
    let other =
        devices.into_iter().find(|device| class(device).is_ok_and(|class| !class.starts_with("0x0108")));
    let Some(other) = other else { return skip("this machine shows no PCI device that is not a drive") };
    let address = other.file_name().into_string().unwrap();
    for via in ["", "?via=vfio", "?via=iommufd", "?via=kmod", "?via=pagemap"] {
        let drive = format!("{address}{via}");
        let error =
            refuse(&["drive", "identify", "-d", &drive], 3, "another kind of device")["error"].to_string();
        assert!(!error.contains("pagemap") && error.contains("onehop drive list"), "{drive}: {error}");
    }
}

#[test]
fn contradicting_arguments() {
    for more in [
        &["--threads", "4"][..],
        &["--mode", "shared", "--queues", "2"],
        &["--route", "cpu/direct", "--mode", "owner"],
        &["--route", "cpu/pinned", "--queues", "1"],
        &["-g", "teapot"],
        &["-g", ""],
    ] {
        refuse(&[&["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1"], more].concat(), 2, "");
    }
}

#[test]
fn the_drives_own_image_is_not_overwritten() {
    let dir = Dir::new();
    let (image, data) = dir.noise("disk.img", 1 << 20);
    let (drive, link) = (format!("sim:{image}"), dir.file("link.bin"));
    std::fs::hard_link(&image, &link).unwrap();
    for out in [&image, &link] {
        refuse(
            &["read", "-d", &drive, "--lba", "0", "--blocks", "1", "--out", out],
            2,
            "the file that is read",
        );
    }
    assert!(std::fs::read(&image).unwrap() == data);
}

#[test]
fn files_that_cannot_be_used() {
    let dir = Dir::new();
    let nowhere = dir.file("no/such/file");
    refuse(&["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "--out", &nowhere], 1, "no/such");
    let write = ["write", "-d", "sim:mem:1M", "--lba", "0", "--serial", "x", "--yes", "--in"];
    refuse(&[&write[..], &[&nowhere]].concat(), 1, "no/such");
    refuse(&[&write[..], &[&dir.file("")]].concat(), 2, "regular file");
    refuse(&["drive", "identify", "-d", &format!("sim:{nowhere}")], 1, "no such file");
    refuse(&["drive", "identify", "-d", "qtest:/nonexistent.sock,/nonexistent"], 1, "");
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    for more in [&[][..], &["--json"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let args = [&["drive", "identify", "-d", "sim:mem:1M"], more].concat();
        let ended = command(&args).stdout(full).output().unwrap();
        let message = stderr(&ended);
        assert_eq!(code(&ended), 1, "{message}");
        assert!(message.contains("standard output"), "{message}");
    }
}

/// With `ms`, a simulated drive stores metadata in a second file.
#[test]
fn bytes_are_not_copied_over_the_files_of_the_drive() {
    let dir = Dir::new();
    let (input, _) = dir.noise("in.bin", 4096);
    let image = dir.file("disk.img");
    let (meta, link, linked) = (format!("{image}.meta"), dir.file("hard"), dir.file("soft"));
    let drive = format!("sim:{image}?size=1M&ms=8&pi=1");
    let write = ["write", "-d", &drive, "--lba", "0", "--in", &input, "--serial", "ONEHOP-SIM-1", "--yes"];
    succeed(&write);
    std::fs::hard_link(&meta, &link).unwrap();
    std::os::unix::fs::symlink(&meta, &linked).unwrap();
    let before = [&image, &meta].map(|file| std::fs::read(file).unwrap());
    // The metadata file is protected even if this drive does not use it.
    for drive in [drive, format!("sim:{image}")] {
        for out in [&image, &meta, &link, &linked] {
            let read = ["read", "-d", &drive, "--lba", "0", "--blocks", "8", "-g", "emu", "--out", out];
            refuse(&read, 2, "is the file that is read");
            let map = ["map", "-d", &drive, "--path", "/file", "--out", out];
            refuse(&map, 2, "is the file that is read");
        }
    }
    assert!([&image, &meta].map(|file| std::fs::read(file).unwrap()) == before);
}

/// Opening a FIFO would wait for a reader, perhaps forever.
#[test]
fn outputs_are_regular_files_or_character_devices() {
    let dir = Dir::new();
    let (fifo, socket, below) = (dir.file("fifo"), dir.file("socket"), dir.file("folder"));
    let made = std::process::Command::new("mkfifo").args([&fifo, &dir.file("rx.sigmf-meta")]).status();
    assert!(made.unwrap().success());
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::fs::create_dir(&below).unwrap();
    let linked = dir.file("soft");
    std::os::unix::fs::symlink(&fifo, &linked).unwrap();
    // Model and drive do not exist, which shows that outputs are checked first.
    let commands: [&[&str]; 7] = [
        &["read", "-d", "sim:/nowhere", "--lba", "0", "--blocks", "1", "-g", "emu", "--out"],
        &["read", "/nowhere", "-g", "emu", "--out"],
        &["map", "/nowhere", "--out"],
        &["topo", "--from", "example", "--html"],
        &["topo", "--from", "example", "--svg"],
        &["load", "/nowhere", "-g", "emu", "--verify", "--write-manifest"],
        &["sdr", "rx", "-d", "sim:usdr", "-g", "emu", "--png"],
    ];
    for command in commands {
        for (out, what) in
            [(&fifo, "a FIFO"), (&linked, "a FIFO"), (&socket, "a socket"), (&below, "a directory")]
        {
            refuse(&[command, &[out]].concat(), 2, what);
        }
    }
    let rx = ["sdr", "rx", "-d", "sim:usdr", "-g", "emu", "--out"];
    refuse(&[&rx[..], &[&dir.file("rx")]].concat(), 2, "rx.sigmf-meta is a FIFO");
    // File names that the command chooses are checked when they are written.
    std::process::Command::new("mkfifo").arg(format!("{below}/system.json")).status().unwrap();
    refuse(&["doctor", "--record", &below], 2, "system.json is a FIFO");

    let read = ["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "-g", "emu", "--out"];
    succeed(&[&read[..], &["/dev/null"]].concat());
    refuse(&[&read[..], &["/dev/full"]].concat(), 1, "No space left");
    // Standard output is a pipe, which already has a reader.
    let output = command(&[&read[..], &["/dev/stdout"]].concat()).output().unwrap();
    assert!(code(&output) == 0 && output.stdout.starts_with(&[0; 512]), "{output:?}");
}

/// Kernel and PyTorch names of devices are refused with the names to use instead.
#[test]
fn kernel_and_pytorch_names_are_refused_with_advice() {
    let dir = Dir::new();
    let file = dir.path().join("m.safetensors");
    load::model(&file, &[("a", 4096)], 1);
    let file = load::text(&file);
    for drive in ["/dev/nvme0n1", "/dev/nvme0n1p1", "/dev/nvme0", "nvme0n1"] {
        let blocks = ["read", "-d", drive, "--lba", "0", "--blocks", "1", "-g", "emu"];
        for command in [
            &blocks[..],
            &["read", "-d", drive, "--path", "/a.safetensors", "-g", "emu"],
            &["load", "-d", drive, "--path", "/a.safetensors", "-g", "emu"],
            &["drive", "identify", "-d", drive],
            &["drive", "check-p2p", "-d", drive, "-g", "emu"],
        ] {
            let document = refuse(command, 2, "-d takes the PCI address of its controller");
            assert!(document["error"]["message"].as_str().unwrap().contains(&format!("'{drive}'")));
        }
    }
    for command in [
        &["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "-g", "cuda:0"][..],
        &["read", file, "-g", "cuda:0"],
        &["load", file, "-g", "cuda:0"],
        &["drive", "check-p2p", "-d", "sim:mem:1M", "-g", "cuda:0"],
    ] {
        refuse(command, 2, "'cuda:0' is not a GPU: -g takes the number alone, -g 0");
    }
    // Names are checked before the first GPU is opened.
    refuse(&["load", file, "-g", "0,cuda:1"], 2, "-g takes the number alone, -g 1");
}

/// Wrong arguments have the exit code 2, and the message says what is expected.
#[test]
fn wrong_arguments_have_their_own_exit_code() {
    let dir = Dir::new();
    let text = dir.file("text");
    std::fs::write(&text, "no archive").unwrap();
    let archive = dir.file("report.tar.gz");
    let (read, drive) = (["read", "-d", "sim:mem:1M"], "sim:mem:16M");
    let cases: [(&[&str], &str); 21] = [
        (&["read"], "<FILE|--drive <DRIVE>>"),
        (&read, "<--path </IN/FS>|--map <MAP>|--lba <N>>"),
        (&["read", "-d", "sim:mem:1M", "--lba", "0"], "--blocks"),
        (&["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "-g", "cuda:0"], "-g 0"),
        (&["read", &text, "--len", "-5"], "a size such as 4096"),
        (&["load"], "<FILE|--drive <DRIVE>>"),
        (&["map", "--out", &archive], "<FILE|--drive <DRIVE>>"),
        (&["load", &text, "--threads", "-1"], "a whole number from 1 to 1024"),
        (&["bench", "queue", "--depth", "0"], "a whole number from 1 to 32767"),
        (&["bench", "queue", "--block", "1M"], "--block 1048576: this drive moves at most 131072 bytes"),
        (&["bench", "queue", "-g", "0"], "--gpu is for --side gpu"),
        (&["bench", "queue", "--mode", "shared"], "--mode is for --side gpu"),
        (&["bench", "queue", "--side", "gpu", "-d", drive], "--drive is for --side cpu"),
        (&["bench", "sweep", "--file", "f", "--nsid", "1"], "--nsid"),
        (&["bench", "sweep", "-g", "emu", "-d", drive, "--block", "1000"], "multiples of 512 bytes"),
        (&["bench", "target", "--listen", "here"], "expected HOST:PORT"),
        (&["target", "--root", "/", "--listen", "1.2.3.4", "--key-file", &text], "expected HOST:PORT"),
        (&["drive", "identify", "-d", "sim:usdr"], "see onehop sdr"),
        (&["report", "-d", "1", "--out", &archive], "'1' is not a drive"),
        (&["report", "-d", drive, "-g", "nosuch", "--out", &archive], "'nosuch' is not a GPU"),
        (&["sdr", "tx", "-g", "emu", "--in", "x.sigmf-meta"], "they are in x.sigmf-data"),
    ];
    for (args, words) in cases {
        refuse(args, 2, words);
    }
    assert!(!std::path::Path::new(&archive).exists(), "wrong arguments leave an archive behind");
}
