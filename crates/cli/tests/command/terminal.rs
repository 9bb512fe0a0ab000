//! Every command on a terminal of 80 columns: lines fit, and colours are shown only on suitable terminals.

use std::fs::File;
use std::io::Read;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::load::{TENSORS, model, text};
use crate::run::{Dir, command, command_tree, fixture, leaf_commands, skip};

const COLUMNS: usize = 80;
const LIMIT: Duration = Duration::from_secs(120);
const PLAIN: &[(&str, &str)] = &[("TERM", "dumb"), ("NO_COLOR", "1")];
const COLOURED: &[(&str, &str)] = &[("TERM", "xterm-256color")];

/// Runs a command on a terminal; returns its exit code and the combined stdout and stderr.
fn on_terminal(args: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    on_terminal_until(None, args, environment)
}

/// Like [`on_terminal`]. If `words` are given, sends Ctrl-C once the command has written them.
fn on_terminal_until(
    words: Option<&str>,
    args: &[&str],
    environment: &[(&str, &str)],
) -> (Option<i32>, String) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs =
        rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    tcsetwinsize(&theirs, Winsize { ws_row: 24, ws_col: COLUMNS as u16, ws_xpixel: 0, ws_ypixel: 0 })
        .unwrap();
    let mut command = command(args);
    for name in ["NO_COLOR", "COLUMNS", "CLICOLOR", "CLICOLOR_FORCE", "CI"] {
        command.env_remove(name);
    }
    command.envs(environment.iter().copied());
    let mut child = command.stdout(theirs.try_clone().unwrap()).stderr(theirs).spawn().unwrap();
    // Reading ends (EIO) once all other ends are closed, including those in `command`.
    drop(command);
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut part = [0; 4096];
        let mut ours = File::from(ours);
        while let Ok(count @ 1..) = ours.read(&mut part) {
            let _ = send.send(part[..count].to_vec());
        }
    });
    let (mut all, mut is_signalled) = (Vec::new(), words.is_none());
    loop {
        match receive.recv_timeout(LIMIT) {
            Ok(part) => all.extend(part),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let _ = child.kill();
                panic!(
                    "{args:?} wrote nothing for {LIMIT:?} and did not end: {}",
                    String::from_utf8_lossy(&all)
                );
            }
        }
        if !is_signalled && words.is_some_and(|words| String::from_utf8_lossy(&all).contains(words)) {
            is_signalled = true;
            assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        }
    }
    let code = child.wait().unwrap().code();
    (code, String::from_utf8(all).unwrap().replace("\r\n", "\n"))
}

/// Removes colours, and starts a new line at cursor movements.
fn without_codes(text: &str) -> String {
    let mut out = String::new();
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\x1b' => {
                if letters.find(|c| c.is_ascii_alphabetic()) != Some('m') {
                    out.push('\n');
                }
            }
            '\r' => out.push('\n'),
            letter => out.push(letter),
        }
    }
    out
}

/// Checks that lines fit, except lines of a single word.
fn assert_fits(args: &[&str], text: &str) {
    for line in without_codes(text).lines() {
        let is_word = line.trim_matches([' ', '│']).split(' ').count() == 1;
        assert!(
            line.chars().count() <= COLUMNS || is_word,
            "{args:?}: {} columns: {line}",
            line.chars().count()
        );
    }
}

#[test]
fn all_help_fits() {
    for words in command_tree() {
        let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
        let (code, help) = on_terminal(&args, PLAIN);
        assert_eq!(code, Some(0), "{args:?}: {help}");
        assert!(!help.contains('\x1b') && help.contains("Usage:"), "{args:?}: {help}");
        assert_fits(&args, &help);
    }
}

/// Commands that need no hardware, and their exit codes.
fn commands(dir: &Dir) -> Vec<(Vec<String>, i32)> {
    let bytes = dir.noise("some file with a name.bin", 300_000).0;
    let weights = dir.path().join("model of some size.safetensors");
    model(&weights, &TENSORS, 7);
    let weights = text(&weights);
    let here = text(dir.path());
    let image = format!("sim:{}?size=1M", dir.file("disk.img"));
    let nowhere = format!("{}/{}", dir.path().display(), "nowhere/".repeat(12));
    let h100 = fixture("h100-switch-acs-on");
    let machines =
        ["epyc-two-sockets", "sdr-rtx4090-gen2x2-iommu-pt", "nested-switch-shared-group", "vgpu-host"];
    let mut all: Vec<(Vec<String>, i32)> = Vec::new();
    let mut add = |code, args: &[&str]| all.push((args.iter().map(|&arg| arg.to_owned()).collect(), code));
    for machine in machines.map(fixture) {
        add(0, &["doctor", "--from", &machine]);
        add(0, &["doctor", "--all", "--from", &machine]);
        add(0, &["topo", "--explain", "--all", "--from", &machine]);
    }
    add(0, &["doctor", "--from", &h100]);
    add(0, &["doctor", &bytes, "--patience", "100ms"]);
    add(0, &["topo"]);
    add(0, &["topo", "--explain", "--from", "example"]);
    add(0, &["drive", "list", "-d", "sim:mem:64M"]);
    for name in ["identify", "smart", "errors", "dump-bar0", "reset"] {
        add(0, &["drive", name, "-d", "sim:mem:64M?cmb=16M"]);
    }
    add(0, &["drive", "check-p2p", "-d", "sim:mem:64M?cmb=16M", "-g", "emu"]);
    add(0, &["read", "-d", "sim:mem:64M", "--lba", "0", "--blocks", "2048", "-g", "emu", "--verify"]);
    add(0, &["read", &bytes, "-g", "emu", "--verify"]);
    add(0, &["demo", "-g", "emu"]);
    add(0, &["load", weights, "-g", "emu", "--verify"]);
    add(0, &["load", weights, "-g", "emu", "--plan"]);
    add(2, &["load", weights, "-g", "emu", "--only", "nosuch*"]);
    add(2, &["map", weights, "--out", weights]);
    let write = ["write", "-d", &image, "--lba", "0", "--in", weights, "--pad", "-g", "emu"];
    add(2, &[&write[..], &["--yes", "--serial", "WRONG"]].concat());
    add(
        1,
        &["write", "-d", "sim:mem:1M", "--lba", "0", "--in", &nowhere, "--yes", "--serial", "ONEHOP-SIM-1"],
    );
    for name in ["bind", "unbind", "recover"] {
        add(2, &["drive", name, "-d", "sim:mem:64M"]);
        add(3, &["drive", name, "-d", "ffff:17:1f.7"]);
    }
    add(2, &["report", "-d", "sim:mem:16M", "-g", "emu", "--out", weights]);
    add(0, &["bench", "queue", "--depth", "1"]);
    let little = ["--block", "4K", "--repeats", "1", "--time", "1ms", "--depth", "1"];
    add(
        0,
        &[&["bench", "sweep", "-d", "sim:mem:1M", "-g", "emu", "--route", "cpu/direct"], &little[..]]
            .concat(),
    );
    add(0, &["bench", "load", weights, "-g", "emu", "--loads", "1"]);
    add(0, &["bench", "gather", "-d", "sim:mem:4M", "-g", "emu", "--batch", "48", "--batches", "2"]);
    let pages = ["bench", "pages", "--memory", "host", "--by", "threads", "--size", "1M", "--page", "4K"];
    add(0, &[&pages[..], &["--depth", "2", "--repeats", "1", "--time", "1ms"]].concat());
    add(0, &[&["bench", "target", "--size", "64K", "--io", "read"], &little[..]].concat());
    add(2, &["sim", "serve", "-d", "qtest:a,b", "--socket", &nowhere]);
    add(2, &["target", "--root", here, "--listen", "0.0.0.0:0"]);
    let board = ["-g", "emu", "-d", "sim:usdr?rate=1M&signal=tone"];
    add(0, &["sdr", "info", "-d", "sim:usdr"]);
    add(0, &[&["sdr", "rx", "--seconds", "0.2", "--buffer", "16K"], &board[..]].concat());
    add(0, &[&["sdr", "selftest", "--buffer", "16K"], &board[..]].concat());
    add(0, &[&["sdr", "tx", "--in", &bytes], &board[..]].concat());
    add(3, &["cufile", "env", "--library", &nowhere]);
    add(3, &["cufile", "run", "--library", &nowhere, "--", "true"]);
    add(0, &["man", &dir.file("pages")]);
    add(0, &["schema"]);
    add(2, &["schema", "teapot"]);
    add(2, &["completions", "teapot"]);
    add(2, &["drive", "identify", "-d", "/dev/nvme99n1"]);
    add(2, &["drive", "identify", "-d", "sim:mem:64M?nonsense=with-a-value-that-is-rather-long"]);
    add(2, &["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "--timeout", "soon"]);
    add(2, &["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "-g", "cuda:0"]);
    add(2, &["doctor", "--from", &nowhere]);
    add(2, &["teapot"]);
    add(1, &["mount", here, "--status"]);
    add(2, &["mount", here, "--root", "/proc/sys"]);
    all
}

#[test]
fn every_command_is_tested() {
    let tried = commands(&Dir::new());
    for words in leaf_commands() {
        assert!(
            tried.iter().any(|(args, _)| args.starts_with(&words)),
            "{words:?} is not tested on a terminal"
        );
    }
}

/// Commands that serve until Ctrl-C.
#[test]
fn output_of_servers_fits() {
    for environment in [COLOURED, PLAIN] {
        let dir = Dir::new();
        let (root, point, socket) = (dir.file("root"), dir.file("mount point"), dir.file("drive.sock"));
        std::fs::create_dir(&root).unwrap();
        std::fs::create_dir(&point).unwrap();
        let target = ["target", "--root", &root, "--listen", "127.0.0.1:0", "--insecure-loopback-for-tests"];
        let servers: [(&[&str], &str, i32); 3] = [
            (&["sim", "serve", "-d", "sim:mem:1M", "--socket", &socket], "Ctrl-C", 130),
            (&target, "Ctrl-C", 0),
            (&["mount", &point, "--root", &root], "Ctrl-C", 0),
        ];
        for (args, words, wanted) in servers {
            let (code, text) = on_terminal_until(Some(words), args, environment);
            if args[0] == "mount" && code == Some(3) {
                skip(&format!("nothing can be mounted here: {}", text.trim()));
                continue;
            }
            assert_eq!(code, Some(wanted), "{args:?}: {text}");
            assert_fits(args, &text);
            assert!(environment == COLOURED || !text.contains('\x1b'), "{args:?}: {text:?}");
        }
    }
}

#[test]
fn all_output_fits() {
    let dir = Dir::new();
    for (args, wanted) in commands(&dir) {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, text) = on_terminal(&args, COLOURED);
        assert_eq!(code, Some(wanted), "{args:?}: {text}");
        assert_fits(&args, &text);
        assert!(!text.contains("\\u{"), "{args:?}: own output was escaped: {text}");
    }
}

/// A bar with its rate, which is shown after half a second.
#[test]
fn progress_fits() {
    // The fault makes it last that long on every machine.
    let args = ["demo", "-g", "emu", "--size", "256M", "--fault", "late@op=read,n=200,delay=900ms"];
    let (code, text) = on_terminal(&args, COLOURED);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("loading [") && text.contains("/s, "), "{text:?}");
    assert_fits(&args, &text);
}

#[test]
fn plain_terminals_get_plain_text() {
    let dir = Dir::new();
    for (args, wanted) in commands(&dir) {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, text) = on_terminal(&args, PLAIN);
        assert_eq!(code, Some(wanted), "{args:?}: {text}");
        assert!(!text.contains(['\x1b', '\r']), "{args:?}: {text:?}");
        assert_fits(&args, &text);
    }
}

#[test]
fn colours_are_shown_on_suitable_terminals() {
    let args = ["doctor", "--from", "example"];
    let text = on_terminal(&args, COLOURED).1;
    assert!(text.contains("\x1b[1mEnvironment\x1b[0m") && text.contains("\x1b[33mwarn"), "{text:?}");
    for plain in [&[("TERM", "xterm-256color"), ("NO_COLOR", "1")][..], &[("TERM", "dumb")], &[("TERM", "")]]
    {
        let text = on_terminal(&args, plain).1;
        assert!(text.contains("Environment") && !text.contains('\x1b'), "{plain:?}: {text:?}");
    }
}
