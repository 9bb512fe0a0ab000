//! Every command on a terminal of 80 columns: lines that fit, colours that are colours, and none where they are unwanted.

use std::fs::File;
use std::io::Read;
use std::process::Child;
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::run::{Dir, command, fixture};

const COLUMNS: usize = 80;
const LIMIT: Duration = Duration::from_secs(120);
const PLAIN: &[(&str, &str)] = &[("TERM", "dumb"), ("NO_COLOR", "1")];
const USUAL: &[(&str, &str)] = &[("TERM", "xterm-256color")];

/// What a command writes to a terminal, stdout and stderr together, and its exit code.
fn on_terminal(args: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
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
    let mut child: Child = command.stdout(theirs.try_clone().unwrap()).stderr(theirs).spawn().unwrap();
    // The command holds the other ends: when they are gone, reading ends (EIO).
    drop(command);
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut all, mut part) = (Vec::new(), [0; 4096]);
        let mut ours = File::from(ours);
        while let Ok(count @ 1..) = ours.read(&mut part) {
            all.extend_from_slice(&part[..count]);
        }
        let _ = send.send(all);
    });
    let Ok(written) = receive.recv_timeout(LIMIT) else {
        let _ = child.kill();
        panic!("{args:?} did not end within {LIMIT:?}");
    };
    let code = child.wait().unwrap().code();
    (code, String::from_utf8(written).unwrap().replace("\r\n", "\n"))
}

/// Text without what moves the cursor or sets a colour.
fn without_codes(text: &str) -> String {
    let mut out = String::new();
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\x1b' => {
                let _ = letters.find(|c| c.is_ascii_alphabetic());
            }
            '\r' => out.push('\n'),
            letter => out.push(letter),
        }
    }
    out
}

/// Lines fit, but for single words.
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

/// The names of a command's subcommands, by its help.
fn subcommands(help: &str) -> Vec<String> {
    let list = help.split("\nCommands:\n").nth(1).unwrap_or_default();
    let rows = list.lines().take_while(|line| !line.is_empty());
    let names = rows.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(Into::into)
        .collect()
}

fn check_help(words: &[&str], seen: &mut usize) {
    let args = [words, &["--help"]].concat();
    let (code, help) = on_terminal(&args, PLAIN);
    assert_eq!(code, Some(0), "{args:?}: {help}");
    assert!(!help.contains('\x1b') && help.contains("Usage:"), "{args:?}: {help}");
    assert_fits(&args, &help);
    *seen += 1;
    for name in subcommands(&help) {
        check_help(&[words, &[&name]].concat(), seen);
    }
}

#[test]
fn all_help_fits() {
    let mut seen = 0;
    check_help(&[], &mut seen);
    assert!(seen >= 25, "only {seen} commands were found");
}

/// Commands that need no hardware, and their exit codes.
fn commands(dir: &Dir) -> Vec<(Vec<String>, i32)> {
    let bytes = dir.noise("some file with a name.bin", 300_000).0;
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
    add(2, &["drive", "identify", "-d", "/dev/nvme99n1"]);
    add(2, &["drive", "identify", "-d", "sim:mem:64M?nonsense=with-a-value-that-is-rather-long"]);
    add(2, &["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "--timeout", "soon"]);
    add(2, &["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "-g", "cuda:0"]);
    add(2, &["doctor", "--from", &nowhere]);
    add(2, &["teapot"]);
    add(1, &["mount", dir.path().to_str().unwrap(), "--status"]);
    add(2, &["mount", dir.path().to_str().unwrap(), "--root", "/proc/sys"]);
    all
}

#[test]
fn all_output_fits() {
    let dir = Dir::new();
    for (args, wanted) in commands(&dir) {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, text) = on_terminal(&args, USUAL);
        assert_eq!(code, Some(wanted), "{args:?}: {text}");
        assert_fits(&args, &text);
        assert!(!text.contains("\\u{"), "{args:?}: something was escaped that is ours: {text}");
    }
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
fn colours_are_shown_where_they_are_wanted() {
    let args = ["doctor", "--from", "example"];
    let text = on_terminal(&args, USUAL).1;
    assert!(text.contains("\x1b[1mEnvironment\x1b[0m") && text.contains("\x1b[33mwarn"), "{text:?}");
    for plain in [&[("TERM", "xterm-256color"), ("NO_COLOR", "1")][..], &[("TERM", "dumb")]] {
        let text = on_terminal(&args, plain).1;
        assert!(text.contains("Environment") && !text.contains('\x1b'), "{plain:?}: {text:?}");
    }
}
