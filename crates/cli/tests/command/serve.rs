//! `onehop sim serve`: the socket's life, and what cannot be served.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::run::{Dir, command, refuse};

fn start(drive: &str, socket: &str, more: &[&str]) -> Child {
    let args = [&["--json", "sim", "serve", "-d", drive, "--socket", socket], more].concat();
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
    let child = start("sim:mem:1M", &socket, &[]);
    refuse(&["sim", "serve", "-d", "sim:mem:1M", "--socket", &socket], 1, "in use");
    assert!(Path::new(&socket).exists());
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["error"]["kind"], "interrupted");
    // The other server looked whether somebody is there.
    assert_eq!((document["clients"].as_u64(), document["breaches"].as_array().unwrap().len()), (Some(1), 0));
    assert!(!Path::new(&socket).exists());
}

#[test]
fn once_ends_with_its_client_and_replaces_what_is_left_over() {
    let dir = Dir::new();
    let socket = dir.file("drive.sock");
    drop(UnixListener::bind(&socket).unwrap());
    assert!(UnixStream::connect(&socket).is_err());
    let child = start("sim:mem:1M", &socket, &["--once"]);
    let until = Instant::now() + Duration::from_secs(20);
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < until, "nobody listens");
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((document["clients"].as_u64(), document["io_commands"].as_u64()), (Some(1), Some(0)));
    assert!(!Path::new(&socket).exists());
}

#[test]
fn what_cannot_be_served_is_refused() {
    let dir = Dir::new();
    let (socket, file) = (dir.file("drive.sock"), dir.file("file"));
    std::fs::write(&file, "no socket").unwrap();
    let serve = |drive: &str, socket: &str, code, why: &str| {
        refuse(&["sim", "serve", "-d", drive, "--socket", socket], code, why);
    };
    serve("qtest:a,b", &socket, 2, "nothing simulated");
    serve("sim:usdr?colour=red", &socket, 2, "no option 'colour'");
    serve("sim:mem:1M?workers=0", &socket, 2, "workers=0");
    serve("sim:mem:1M?null=1", &socket, 2, "moves no data");
    serve("sim:mem:1M?nonsense=1", &socket, 2, "unknown option");
    serve("sim:mem:1M", &file, 1, "not a socket");
    serve("sim:mem:1M", &dir.file("no/such/folder"), 1, "bind");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "no socket");
}
