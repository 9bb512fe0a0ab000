//! `onehop target`: serves clients with the key until it is stopped.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use crate::run::{Dir, command, document, refuse};

fn first_line(child: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    line
}

fn end(child: Child, name: &str) -> serde_json::Value {
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    document(name, &output)
}

#[test]
fn a_folder_is_served_to_a_mount() {
    let dir = Dir::new();
    let (root, point, key) = (dir.file("root"), dir.file("mnt"), dir.file("key"));
    std::fs::create_dir_all(&root).unwrap();
    std::fs::create_dir_all(&point).unwrap();
    std::fs::write(format!("{root}/a"), "bytes").unwrap();
    std::fs::write(&key, "0123456789abcdef0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let serve = ["--json", "target", "--root", &root, "--listen", "127.0.0.1:0", "--key-file", &key];
    let mut target = command(&serve).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let line = first_line(&mut target);
    let address = line.split(" is served at ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
    assert!(!address.ends_with(":0"), "the bound port is not reported: {line}");
    let keyless = ["mount", &point, "--target", address, "--insecure-loopback-for-tests"];
    refuse(&keyless, 1, "a key is required");
    // Without a key, the target cannot be authenticated and nothing is encrypted.
    refuse(&keyless[..4], 2, "--key-file");
    refuse(&["bench", "target", "--target", address], 2, "--key-file");
    let mount = ["--json", "mount", &point, "--target", address, "--key-file", &key];
    let settings = ["--connections", "2", "--give-up", "50s", "--local-locks"];
    let mount = [&mount[..], &settings].concat();
    let mut mount = command(&mount).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let line = first_line(&mut mount);
    if line.contains("is mounted at") {
        assert_eq!(std::fs::read_to_string(format!("{point}/a")).unwrap(), "bytes");
        // An error without --local-locks.
        std::fs::File::open(format!("{point}/a")).unwrap().try_lock().unwrap();
        std::fs::write(format!("{point}/b"), "more").unwrap();
        assert_eq!(std::fs::read_to_string(format!("{root}/b")).unwrap(), "more");
        let report = end(mount, "mount");
        assert_eq!((&report["remote"]["transport"], &report["failed"]), (&"tcp".into(), &0.into()));
    } else {
        // Not eprintln, which is captured in tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED: nothing can be mounted here: {}", line.trim());
        assert_eq!(mount.wait().unwrap().code(), Some(3));
    }
    let report = end(target, "target");
    assert_eq!(report["address"], address, "{report}");
    assert!(report["sessions"].as_u64().unwrap() <= 1);
}

/// Starts a target on loopback; returns its address, too.
fn serve(root: &str, more: &[&str]) -> (Child, String) {
    let args =
        ["--json", "target", "--root", root, "--listen", "127.0.0.1:0", "--insecure-loopback-for-tests"];
    let args = [&args[..], more].concat();
    let mut target = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Warnings precede that line.
    let lines = BufReader::new(target.stderr.as_mut().unwrap()).lines().map(Result::unwrap);
    let address = lines
        .filter_map(|line| Some(line.split_once(" is served at ")?.1.split(';').next()?.to_owned()))
        .next();
    (target, address.expect("the target ended"))
}

#[test]
fn a_target_refuses_writes_or_takes_them_with_write_through() {
    let dir = Dir::new();
    let root = dir.path().to_str().unwrap();
    let measure = |address: &str, io| {
        let args =
            ["--json", "bench", "target", "--target", address, "--insecure-loopback-for-tests", "--io", io];
        let args = [&args[..], &["--size", "64K", "--block", "4K", "--depth", "1", "--time", "1ms"]].concat();
        command(&args).output().unwrap()
    };
    let (target, address) = serve(root, &["--read-only"]);
    let output = measure(&address, "write");
    assert_ne!(output.status.code(), Some(0), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("Read-only file system"), "{output:?}");
    assert_eq!(end(target, "target")["written_bytes"], 0);
    let (target, address) = serve(root, &["--write-through"]);
    let output = measure(&address, "write");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(end(target, "target")["written_bytes"].as_u64().unwrap() >= 64 << 10);
    let both = ["target", "--root", root, "--listen", "127.0.0.1:0", "--read-only", "--write-through"];
    refuse(&both, 2, "cannot be used with");
}

#[test]
fn access_requires_the_key() {
    let dir = Dir::new();
    let (root, key) = (dir.path().to_str().unwrap(), dir.file("key"));
    let listen = ["target", "--root", root, "--listen", "0.0.0.0:0"];
    refuse(&listen, 2, "--key-file");
    // Every user of this machine can reach a loopback address.
    refuse(&["target", "--root", root, "--listen", "127.0.0.1:0"], 2, "--key-file");
    refuse(&[&listen[..], &["--insecure-loopback-for-tests"]].concat(), 2, "--key-file");
    std::fs::write(&key, "0123456789abcdef0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    refuse(&[&listen[..], &["--key-file", &key]].concat(), 2, "chmod 600");
    refuse(&[&listen[..], &["--key-file", &dir.file("none")]].concat(), 2, "cannot be used");
    refuse(
        &[&listen[..], &["--key-file", &key, "--insecure-loopback-for-tests"]].concat(),
        2,
        "cannot be used with",
    );
    let none = ["target", "--root", &dir.file("none"), "--listen", "127.0.0.1:0"];
    refuse(&[&none[..], &["--insecure-loopback-for-tests"]].concat(), 1, "opening the folder");
    refuse(&["mount", root, "--target", "nowhere", "--insecure-loopback-for-tests"], 2, "HOST:PORT");
    let target = ["mount", root, "--target"];
    refuse(&[&target[..], &["127.0.0.1:1"]].concat(), 2, "--key-file");
    let keyless = |address| [&target[..], &[address, "--insecure-loopback-for-tests"]].concat();
    refuse(&keyless("127.0.0.1:1"), 1, "connecting to");
    // If one address or all are another machine's.
    for address in ["192.0.2.1:7464", "127.0.0.1:1,192.0.2.1:7464", "[2001:db8::1]:7464"] {
        refuse(&keyless(address), 2, "is not a loopback address");
        let bench = ["bench", "target", "--target", address, "--insecure-loopback-for-tests"];
        refuse(&bench, 2, "is not a loopback address");
    }
    refuse(&[&keyless("127.0.0.1:1")[..], &["--key-file", &key]].concat(), 2, "cannot be used with");
}

#[test]
fn a_connection_is_measured() {
    let of = [
        "--json",
        "bench",
        "target",
        "--size",
        "64K",
        "--block",
        "4K,1M",
        "--depth",
        "1,2",
        "--repeats",
        "1",
    ];
    let more = ["--io", "randread,write", "--time", "1ms", "--transport", "tcp", "--connections", "2"];
    let output = command(&[&of[..], &more].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = document("bench target", &output);
    let address = report["target"].as_str().unwrap().strip_prefix("a target in this process, at 127.0.0.1:");
    assert_ne!(address.unwrap(), "0");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8, "{report:#}");
    for row in rows {
        if row["block"] == 4096 {
            assert!(
                row["result"]["verified"] == true && row["result"]["limit"]["gbps"].as_f64().unwrap() > 0.0,
                "{row:#}"
            );
        } else {
            assert!(row["note"].as_str().unwrap().contains("0 such blocks"), "{row:#}");
        }
    }
    refuse(&["bench", "target", "--target", "127.0.0.1:1", "--transport", "tcp,rdma"], 2, "one --transport");
    let keyless = ["bench", "target", "--target", "127.0.0.1:1", "--insecure-loopback-for-tests"];
    refuse(&keyless, 1, "127.0.0.1:1");
}
