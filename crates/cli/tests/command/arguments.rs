//! Help, documentation, and invalid arguments: there is always an answer, never a panic.

use std::collections::BTreeSet;

use proptest::prelude::*;

use crate::run::{code, command, command_tree, json, onehop, refuse, stderr, stdout, succeed};

#[test]
fn every_command_has_help_with_an_example() {
    for words in command_tree() {
        let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
        let output = onehop(&args);
        let text = stdout(&output);
        assert_eq!(code(&output), 0, "{words:?}");
        assert!(text.contains("Example"), "{words:?}: {text}");
        let example = format!("  onehop {}", words.join(" "));
        assert!(text.contains(example.trim_end()), "{words:?}: {text}");
        assert!(text.contains("--json"), "{words:?}: {text}");
    }
    let version = stdout(&onehop(&["--version"]));
    let (number, commit) = version.trim().strip_prefix("onehop ").unwrap().split_once(' ').unzip();
    assert_eq!(number.unwrap_or(version.trim().trim_start_matches("onehop ")), env!("CARGO_PKG_VERSION"));
    let hexadecimal = |commit: &str| commit.len() > 9 && commit.bytes().all(|b| b.is_ascii_hexdigit());
    // Sources unpacked from a package have no commit.
    if commit.is_some() || std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.git")).exists() {
        assert!(hexadecimal(commit.unwrap().trim_matches(['(', ')'])), "{version}");
    }
}

/// The long options in a text.
fn options(text: &str) -> BTreeSet<&str> {
    let word = |at: usize| text[at..].split(|c: char| c != '-' && !c.is_ascii_alphanumeric()).next().unwrap();
    let begins = text
        .match_indices("--")
        .filter(|(at, _)| !text[..*at].ends_with(|c: char| c == '-' || c.is_alphanumeric()));
    begins.map(|(at, _)| word(at).trim_end_matches('-')).filter(|word| word.len() > 2).collect()
}

#[test]
fn the_documentation_lists_exactly_the_existing_options() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md")).unwrap();
    let documented = options(&page);
    let helps: Vec<_> = command_tree()
        .iter()
        .map(|words| {
            assert!(page.contains(&words.join(" ")), "docs/cli.md lacks onehop {}", words.join(" "));
            let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
            stdout(&onehop(&args))
        })
        .collect();
    // Common to all commands; the last is an option of cargo.
    let common = BTreeSet::from(["--help", "--version", "--features"]);
    let real: BTreeSet<_> = helps.iter().flat_map(|help| options(help)).collect();
    let missing: Vec<_> = real.difference(&documented).filter(|option| !common.contains(*option)).collect();
    assert!(missing.is_empty(), "docs/cli.md lacks {missing:?}");
    let unknown: Vec<_> = documented.difference(&real).filter(|option| !common.contains(*option)).collect();
    assert!(unknown.is_empty(), "docs/cli.md names {unknown:?}, which no command has");
}

/// The long options listed in a command's help, with their short forms.
fn listed(help: &str) -> Vec<(&str, Option<&str>)> {
    let entries = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    let split = entries.map(|line| match line.split_once(", ") {
        Some((short, rest)) if short.len() == 2 => (rest, Some(short)),
        _ => (line, None),
    });
    let name =
        |rest: &str| rest.split(|c: char| c != '-' && !c.is_ascii_alphanumeric()).next().unwrap().len();
    // Other lines that begin with a dash are options in examples and values of options.
    let found = split.map(|(rest, short)| (&rest[..name(rest)], short));
    let mut all: Vec<_> = found.filter(|(long, _)| long.len() > 3 && long.starts_with("--")).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Options that no test here uses, and why.
const UNTESTED_OPTIONS: &[(&str, &str, &str)] = &[
    ("bench queue", "--rings", "needs an NVIDIA GPU: crates/bench/tests/gpu"),
    ("bench queue", "--controller", "needs an NVIDIA GPU: crates/bench/tests/gpu"),
    ("bench queue", "--controller-gpu", "needs two NVIDIA GPUs: docs/benchmarks.md"),
    ("bench queue", "--reverse", "needs an NVIDIA GPU: crates/bench/tests/gpu"),
    ("bench queue", "--commands", "needs an NVIDIA GPU: crates/bench/tests/gpu"),
    ("bench target", "--nic", "needs RDMA: bed/guest/jobs/rdma-target"),
    ("mount", "--nic", "needs RDMA: bed/guest/jobs/rdma-target"),
    ("target", "--nic", "needs RDMA: bed/guest/jobs/rdma-target"),
];

/// A test file uses an option if it contains both option and command, because commands are often in a helper.
#[test]
fn every_option_of_every_command_is_used_by_a_test() {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/command")).unwrap();
    let paths = folder.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some());
    // Except this file, which lists untested options.
    let files: Vec<_> = paths
        .filter(|path| !path.ends_with("arguments.rs"))
        .map(|path| std::fs::read_to_string(path).unwrap())
        .collect();
    let commands = command_tree();
    let is_group =
        |words: &[String]| commands.iter().any(|other| other.len() > words.len() && other.starts_with(words));
    let (mut unused, mut checked) = (Vec::new(), 0);
    for words in commands.iter().filter(|words| !is_group(words)) {
        let name = words.join(" ");
        let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
        let last = format!("\"{}\"", words.last().unwrap());
        for (long, short) in listed(&stdout(&onehop(&args))) {
            if ["--help", "--json"].contains(&long) {
                continue;
            }
            checked += 1;
            let quoted = [Some(long), short].map(|option| option.map(|option| format!("\"{option}\"")));
            let has = |text: &&String| {
                text.contains(&last) && quoted.iter().flatten().any(|option| text.contains(option))
            };
            if !files.iter().any(|text| has(&text)) {
                unused.push((name.clone(), long.to_owned()));
            }
        }
    }
    assert!(checked > 200, "only {checked} options were found");
    let excused: Vec<_> =
        UNTESTED_OPTIONS.iter().map(|(name, long, _)| (name.to_string(), long.to_string())).collect();
    let new: Vec<_> = unused.iter().filter(|option| !excused.contains(option)).collect();
    assert!(new.is_empty(), "no test uses {new:?}");
    let stale: Vec<_> = excused.iter().filter(|option| !unused.contains(option)).collect();
    assert!(stale.is_empty(), "tests use {stale:?}, which UNTESTED_OPTIONS lists");
}

/// The same option has the same meaning in all commands.
#[test]
fn common_options_have_the_same_description() {
    let help = |words: &[&str]| {
        let text = stdout(&onehop(&[words, &["--help"]].concat()));
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let after = |text: &str, option: &str| {
        let at = text.find(option).unwrap_or_else(|| panic!("no {option}: {text}"));
        text[at + option.len()..].split(" -").next().unwrap().to_owned()
    };
    let gpu = after(&help(&["read"]), "-g, --gpu <GPU>");
    assert!(gpu.contains("CUDA ordinal") && gpu.contains("PCI address") && gpu.contains("emu"), "{gpu}");
    let others: [&[&str]; 8] = [
        &["load"],
        &["report"],
        &["write"],
        &["demo"],
        &["drive", "check-p2p"],
        &["sdr", "rx"],
        &["bench", "sweep"],
        &["bench", "load"],
    ];
    for words in others {
        assert_eq!(after(&help(words), "-g, --gpu <GPU>"), gpu, "{words:?}");
    }
    for words in [&["read"][..], &["write"], &["load"], &["drive", "identify"], &["bench", "sweep"], &["map"]]
    {
        assert!(help(words).contains("0000:0b:00.0"), "{words:?} shows no PCI address");
    }
    for words in [&["read"][..], &["write"], &["load"], &["demo"], &["bench", "sweep"]] {
        let text = help(words);
        for route in ["gpu/tier3", "gpu/posted", "cpu/direct", "cpu/pinned"] {
            assert!(text.contains(route), "{words:?}: {route}");
        }
    }
    assert!(help(&["load"]).contains("manifest of checksums, written by --write-manifest"));
    let times: [(&[&str], &str); 5] = [
        (&["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", "--timeout"], "soon"),
        (&["doctor", "--patience"], "1h"),
        (&["mount", "/mnt", "--target", "a:1", "--give-up"], "-"),
        (&["report", "-d", "sim:mem:16M", "--budget"], "0"),
        (&["bench", "target", "--time"], "0.1ms"),
    ];
    for (words, bad) in times {
        refuse(&[words, &[bad]].concat(), 2, "such as 500ms, 10s or 10 (seconds)");
    }
    refuse(&["bench", "load", "x", "--pause", "50"], 2, "such as 50ms or 1 (second)");
}

#[test]
fn shells_can_complete_every_command() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let document = json(&["completions", shell]).1;
        let printed = stdout(&onehop(&["completions", shell]));
        assert_eq!(document["script"].as_str().unwrap().trim_end(), printed.trim_end(), "{shell}");
        for word in ["check-p2p", "doctor", "verify"] {
            assert!(printed.contains(word), "{shell}: {word}");
        }
    }
    // Bash accepts the script.
    let script = stdout(&onehop(&["completions", "bash"]));
    let ended = std::process::Command::new("bash").args(["-n", "-c", &script]).status().unwrap();
    assert!(ended.success());
    refuse(&["completions", "teapot"], 2, "teapot");
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = std::env::temp_dir().join(format!("onehop-man-{}", std::process::id()));
    let document = succeed(&["man", folder.to_str().unwrap()]);
    let files: Vec<_> = document["pages"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect();
    let mut there: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let mut named: Vec<_> = files.iter().map(|name| (*name).to_owned()).collect();
    let mut wanted: Vec<_> = command_tree()
        .iter()
        .map(|words| format!("{}.1", [&["onehop".to_owned()], &words[..]].concat().join("-")))
        .collect();
    for list in [&mut there, &mut named, &mut wanted] {
        list.sort_unstable();
    }
    assert_eq!(there, wanted);
    assert_eq!(named, wanted);
    for name in wanted {
        let page = std::fs::read_to_string(folder.join(&name)).unwrap();
        assert!(page.contains(".SH SYNOPSIS") && page.contains("Example"), "{name}");
        let version = format!("\"onehop {}\"", env!("CARGO_PKG_VERSION"));
        assert!(page.lines().any(|line| line.starts_with(".TH ") && line.contains(&version)), "{name}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    refuse(&["man", "/dev/null/man"], 1, "/dev/null/man");
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    for args in [&["--help"][..], &["--version"], &["drive", "--help"]] {
        let full = std::fs::File::create("/dev/full").unwrap();
        let mut command = crate::run::command(args);
        let output = command.stdout(full).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
        assert!(message.contains("standard output"), "{args:?}: {message}");
    }
}

#[test]
fn a_missing_command_is_reported_as_json() {
    for args in [&["--json"][..], &["--json", "drive"], &["bench", "--json"], &["sdr", "--json"]] {
        let output = crate::run::command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let message = document["error"]["message"].as_str().unwrap();
        assert!(message.contains("requires a subcommand") || message == "a command is missing", "{message}");
    }
}

#[test]
fn unknown_commands_are_refused() {
    refuse(&["teapot"], 2, "teapot");
    refuse(&["drive", "teapot"], 2, "teapot");
    refuse(&["read", "FILE", "--lba", "0"], 2, "--lba");
    // These commands have no required arguments; all others must report missing ones.
    let without_required = [
        "bench gather",
        "bench pages",
        "bench queue",
        "bench sweep",
        "bench target",
        "cufile env",
        "demo",
        "doctor",
        "drive list",
        "schema",
        "sdr info",
        "sdr rx",
        "sdr selftest",
        "topo",
    ];
    for words in command_tree().iter().filter(|words| !without_required.contains(&words.join(" ").as_str())) {
        let args: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = onehop(&args);
        assert_eq!(code(&output), 2, "{words:?}");
        assert!(stdout(&output).is_empty() && !stderr(&output).is_empty(), "{words:?}");
    }
}

#[test]
fn drives_that_do_not_exist() {
    for spec in [
        "",
        ":",
        "sim",
        "sim:",
        "sim:?",
        "sim:mem:",
        "sim:mem:0",
        "sim:mem:1",
        "sim:mem:-1M",
        "sim:mem:1M?",
        "sim:mem:1M?&&&",
        "sim:mem:1M?lba",
        "sim:mem:1M?lba=",
        "sim:mem:1M?lba=0",
        "sim:mem:1M?lba=513",
        "sim:mem:1M?lba=4294967296",
        "sim:mem:1M?queues=0",
        "sim:mem:1M?queues=65535",
        "sim:mem:1M?mqes=0",
        "sim:mem:1M?dstrd=255",
        "sim:mem:1M?mpsmin=9",
        "sim:mem:1M?mdts=200",
        "sim:mem:1M?fault=",
        "sim:mem:1M?fault=@",
        "sim:mem:1M?fault=late@n=0",
        "sim:mem:1M?fault=media",
        "sim:mem:1M?ns=0",
        "sim:mem:1M?ns=1024",
        "sim:mem:1M?serial=",
        "sim:mem:1M?serial=\u{1f600}",
        "sim:mem:99999999999T",
        "sim:mem:1M?cmb=1",
        "sim:mem:1M?what=ever",
        "sim:/dev/null",
        "sim:/dev/zero?size=1M",
        "sim:/",
        "sim:\n",
        "qtest:",
        "qtest:,",
        "qtest:a",
        "qtest:a,b",
        "qtest:a,b,bdf=99.9",
        "nvme-tcp://",
        "nvme-tcp://a/models",
        "nvme-tcp://[::1/nqn.x",
        "vfio-user:",
        "vfio-user:/",
        "vfio-user:/dev/null",
        "vfio-user:\u{1f600}",
        "0000:0b:00.0",
        "ffffffff:ff:ff.f",
        "nvme0",
        "/dev/nvme0n1",
        "-1",
        "\u{7f}\u{202e}",
        "sim:mem:1M?version=9.9",
        "sim:mem:1M?crto=1",
        "sim:mem:1M?ready=1000s",
        "sim:mem:1M?null=2",
    ] {
        let args = ["drive", "identify", &format!("-d={spec}")];
        let (code, document) = json(&args);
        let fits = match code {
            0 => document["serial"].is_string(),
            1..=3 => document["error"]["exit_code"] == code && document["error"]["message"] != "",
            _ => false,
        };
        assert!(fits, "{spec:?}: {code} {document:#}");
    }
}

#[test]
fn invalid_numbers() {
    for number in ["", "-1", "1.5", "0x", "1e9", "18446744073709551616", "٣", "1 "] {
        refuse(&["read", "-d", "sim:mem:1M", &format!("--lba={number}"), "--blocks", "1"], 2, "--lba");
    }
    for (flag, values) in [
        ("--depth", ["0", "65536", "-1"]),
        ("--threads", ["0", "1025", "x"]),
        ("--queues", ["0", "1025", "99999"]),
        ("--timeout", ["0s", "5x", "99999999999s"]),
        ("--nsid", ["-1", "4294967296", ""]),
        ("--route", ["", "gpu", "gpu/tier4"]),
        ("--mode", ["", "both", "OWNER"]),
    ] {
        for value in values {
            let args =
                ["read", "-d", "sim:mem:1M", "--lba", "0", "--blocks", "1", &format!("{flag}={value}")];
            refuse(&args, 2, flag);
        }
    }
}

#[test]
fn a_closed_pipe_causes_no_panic() {
    let mut child = command(&["drive", "identify", "-d", "sim:mem:1M"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_drive_names_get_an_answer(
        spec in "(sim:mem:[0-9]{1,3}[KM]?|sim:|qtest:|)[?&]?((lba|mdts|queues|mqes|dstrd|cmb|ms|ns|fault|mpsmin|scatter|[a-z]{1,4})=[0-9a-zA-Z@,./-]{0,6}&?){0,3}[\\PC]{0,3}"
    ) {
        let output = onehop(&["--json", "read", "--lba", "0", "--blocks", "1", &format!("-d={spec}")]);
        prop_assert!(matches!(code(&output), 0..=3), "{}: {:?}", spec, output);
        prop_assert!(!stderr(&output).contains("panicked"), "{}: {}", spec, stderr(&output));
        prop_assert!(serde_json::from_str::<serde_json::Value>(&stdout(&output)).is_ok(), "{}", spec);
    }
}

/// Options that do not apply are refused, not ignored.
#[test]
fn options_of_another_source_are_refused() {
    for args in [
        &["load", "m.safetensors", "--map", "m.map"][..],
        &["load", "m.safetensors", "--path", "/m"],
        &["load", "m.safetensors", "--nsid", "2"],
        &["read", "m.safetensors", "--partition", "3"],
        &["load", "m.safetensors", "--mode", "shared"],
        &["load", "m.safetensors", "--queues", "3"],
        &["load", "m.safetensors", "--depth", "64"],
        &["load", "m.safetensors", "--timeout", "2s"],
        &["read", "m.safetensors", "--depth", "64"],
        &["map", "m.safetensors", "--path", "/m", "--out", "m.map"],
        &["mount", "mnt", "--root", "src", "--transport", "rdma"],
        &["mount", "mnt", "--root", "src", "--nic", "mlx5_9"],
        &["mount", "mnt", "--root", "src", "--key-file", "key"],
        &["mount", "mnt", "--root", "src", "--insecure-loopback-for-tests"],
        &["mount", "mnt", "--root", "src", "--connections", "2"],
        &["mount", "mnt", "--root", "src", "--give-up", "5s"],
        &["mount", "mnt", "--root", "src", "--local-locks"],
    ] {
        refuse(args, 2, "cannot be used with");
    }
}
