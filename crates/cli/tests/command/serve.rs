//! `onehop sim serve`: the socket, served devices, refusals.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use onehop_os::StopSignal;

use crate::run::{Dir, command, document, refuse, stdout, succeed};

fn start(drive: &str, socket: &str, more: &[&str], json: bool) -> Child {
    let args = ["sim", "serve", "-d", drive, "--socket", socket];
    let args = [if json { &["--json"][..] } else { &[] }, &args, more].concat();
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !Path::new(socket).exists() {
        assert!(Instant::now() < until, "no socket");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

#[test]
fn ctrl_c_removes_the_socket() {
    let dir = Dir::new();
    let socket = dir.file("drive.sock");
    let child = start("sim:mem:1M", &socket, &[], true);
    refuse(&["sim", "serve", "-d", "sim:mem:1M", "--socket", &socket], 1, "in use");
    assert!(Path::new(&socket).exists());
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let document = document("sim serve", &output);
    assert_eq!(document["error"]["kind"], "interrupted");
    // The other server connected to check whether the socket is in use.
    assert_eq!((document["clients"].as_u64(), document["breaches"].as_array().unwrap().len()), (Some(1), 0));
    assert!(!Path::new(&socket).exists());
}

#[test]
fn once_ends_with_its_client_and_replaces_a_stale_socket() {
    let dir = Dir::new();
    let socket = dir.file("drive.sock");
    drop(UnixListener::bind(&socket).unwrap());
    assert!(UnixStream::connect(&socket).is_err());
    let child = start("sim:mem:1M", &socket, &["--once"], true);
    let until = Instant::now() + Duration::from_secs(20);
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < until, "the server does not listen");
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let document = document("sim serve", &output);
    assert_eq!((document["clients"].as_u64(), document["io_commands"].as_u64()), (Some(1), Some(0)));
    assert!(!Path::new(&socket).exists());
}

/// Commands work on a served drive, with doorbells by message and mapped.
#[test]
fn commands_work_on_a_served_drive() {
    for more in [&[][..], &["--map-doorbells", "--forgive-memory-space"]] {
        let dir = Dir::new();
        let socket = dir.file("drive.sock");
        let child = start("sim:mem:16M", &socket, more, true);
        let drive = format!("vfio-user:{socket}");
        let known = succeed(&["drive", "identify", "-d", &drive]);
        assert_eq!(known["serial"], "ONEHOP-SIM-1", "{known:#}");
        let (from, to) = (dir.file("from"), dir.file("to"));
        let bytes: Vec<u8> =
            (0..1u32 << 18).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        std::fs::write(&from, &bytes).unwrap();
        let write = ["write", "-d", &drive, "--lba", "8", "--in", &from, "--serial", "ONEHOP-SIM-1", "--yes"];
        succeed(&write);
        for route in ["cpu/direct", "gpu/tier3"] {
            let read =
                ["read", "-d", &drive, "--lba", "8", "--blocks", "2048", "--route", route, "-g", "emu"];
            succeed(&[&read[..], &["--verify", "--out", &to]].concat());
            assert!(std::fs::read(&to).unwrap() == bytes, "{route}, {more:?}");
        }
        succeed(&["drive", "smart", "-d", &drive]);
        succeed(&["drive", "reset", "-d", &drive]);
        let sweep = ["bench", "sweep", "-d", &drive, "--io", "read", "--time", "2ms", "--repeats", "1"];
        succeed(&[&sweep[..], &["--block", "4K", "-g", "emu"]].concat());
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        let document = document("sim serve", &child.wait_with_output().unwrap());
        assert_eq!(document["breaches"].as_array().unwrap().len(), 0, "{more:?}: {document:#}");
    }
    refuse(&["drive", "identify", "-d", "vfio-user:/nowhere/cntrl"], 1, "start its server first");
    refuse(&["drive", "identify", "-d", "vfio-user:"], 2, "is not a drive");
}

#[test]
fn unsupported_devices_are_refused() {
    let dir = Dir::new();
    let (socket, file) = (dir.file("drive.sock"), dir.file("file"));
    std::fs::write(&file, "no socket").unwrap();
    let serve = |drive: &str, socket: &str, code, why: &str| {
        refuse(&["sim", "serve", "-d", drive, "--socket", socket], code, why);
    };
    serve("qtest:a,b", &socket, 2, "not a simulated device");
    serve("sim:usdr?colour=red", &socket, 2, "no option 'colour'");
    serve("sim:mem:1M?workers=0", &socket, 2, "workers=0");
    serve("sim:mem:1M?null=1", &socket, 2, "moves no data");
    serve("sim:mem:1M?nonsense=1", &socket, 2, "unknown option");
    let other = ["sim", "serve", "-d", "sim:mem:1M", "--socket", &socket, "--protocol", "nbd"];
    refuse(&other, 2, "vfio-user");
    let board = ["sim", "serve", "-d", "sim:usdr", "--socket", &socket, "--map-doorbells"];
    refuse(&board, 2, "is for drives");
    serve("sim:mem:1M", &file, 1, "not a socket");
    serve("sim:mem:1M", &dir.file("no/such/folder"), 1, "bind");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "no socket");
}

#[test]
fn violations_beyond_the_recorded_ones_are_counted() {
    for json in [true, false] {
        let dir = Dir::new();
        let socket = dir.file("drive.sock");
        let child = start("sim:mem:1M", &socket, &["--once"], json);
        let port = onehop_vfio_user::client::open(Path::new(&socket), &StopSignal::default()).unwrap();
        // The version register is read-only.
        (0..5000).for_each(|_| port.regs.write32(8, 0));
        // A doorbell must not be read.
        port.regs.read32(0x1000);
        drop(port);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        if json {
            let document = document("sim serve", &output);
            let breaches = document["breaches"].as_array().unwrap();
            assert_eq!((document["breach_count"].as_u64(), breaches.len()), (Some(5001), 4097));
            assert_eq!(breaches[4096]["rule"], "doorbell-read");
        } else {
            let text = stdout(&output);
            let count = "violations  5001, 4097 of them recorded";
            assert!(text.contains(count) && text.contains("\n  doorbell-read"), "{text}");
        }
    }
}
