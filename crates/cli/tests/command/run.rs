//! Helpers that run the binary.

pub mod schema;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

pub fn onehop(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onehop"));
    command.args(args).stdin(Stdio::null());
    command
}

pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("killed: {output:?}"))
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs with `--json`; returns the exit code and the document, which must match its schema.
pub fn json(args: &[&str]) -> (i32, Value) {
    let output = onehop(&[&["--json"], args].concat());
    let document = serde_json::from_str(&stdout(&output))
        .unwrap_or_else(|e| panic!("{args:?}: {e}: {} {}", stdout(&output), stderr(&output)));
    assert!(!stderr(&output).contains("panicked"), "{args:?}: {}", stderr(&output));
    schema::check_output(args, &document);
    (code(&output), document)
}

/// Parses the document in the output of a command, which must match its schema.
pub fn document(command: &str, output: &Output) -> Value {
    let document =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{command}: {e}: {output:?}"));
    schema::check(command, &document);
    document
}

/// Like [`json`], for a command that must succeed.
pub fn succeed(args: &[&str]) -> Value {
    let (code, document) = json(args);
    assert_eq!(code, 0, "{args:?}: {document:#}");
    document
}

/// Like [`json`], for a command that must fail with this exit code and a message with this text.
pub fn refuse(args: &[&str], expected: i32, text: &str) -> Value {
    let (code, document) = json(args);
    assert_eq!(code, expected, "{args:?}: {document:#}");
    let message = document["error"]["message"].as_str().unwrap_or_else(|| panic!("{args:?}: {document:#}"));
    assert!(message.contains(text), "{args:?}: {message}");
    assert_eq!(document["error"]["exit_code"], expected);
    document
}

/// Every command, including groups such as `drive`, as listed by help.
pub fn command_tree() -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    let mut at = 0;
    while at < all.len() {
        let words: Vec<String> = all[at].clone();
        let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
        let help = stdout(&onehop(&args));
        let list = help.split("\nCommands:\n").nth(1).unwrap_or_default();
        let rows = list.lines().take_while(|line| !line.is_empty());
        let names = rows.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        for name in names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
            all.push([&words[..], &[name.to_owned()]].concat());
        }
        at += 1;
    }
    assert!(all.len() > 35, "help lists only {} commands", all.len());
    all
}

/// The commands of [`command_tree`] that are not groups.
pub fn leaf_commands() -> Vec<Vec<String>> {
    let all = command_tree();
    let is_group =
        |words: &Vec<String>| all.iter().any(|other| other.len() > words.len() && other.starts_with(words));
    all.iter().filter(|words| !is_group(words)).cloned().collect()
}

/// Checks that a report's page contains a text and loads nothing, and that its raw results are those printed.
pub fn assert_page(folder: &str, name: &str, document: &Value, text: &str) {
    let page = std::fs::read_to_string(format!("{folder}/{name}.html")).unwrap();
    let written = std::fs::read(format!("{folder}/{name}.json")).unwrap();
    assert_eq!(&serde_json::from_slice::<Value>(&written).unwrap(), document);
    assert!(page.contains("<svg") && page.contains(text));
    for loads in ["http:", "https:", "url(", "@import", " src="] {
        assert!(!page.contains(loads), "the page loads something: {loads}");
    }
}

/// Reports a skipped test. It bypasses the test runner's capture, so that skipped tests can be counted.
pub fn skip(why: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED: {why}\n").as_bytes());
}

/// A composed machine of the doctor's tests.
pub fn fixture(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../doctor/fixtures/{name}.json"));
    path.to_str().unwrap().to_owned()
}

/// A directory that is removed on drop.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("cli-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let at = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&at).unwrap();
        Self(at)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// Creates a file in which all blocks differ.
    pub fn noise(&self, name: &str, bytes: usize) -> (String, Vec<u8>) {
        let data: Vec<u8> =
            (0..bytes as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 29) as u8).collect();
        let path = self.file(name);
        std::fs::write(&path, &data).unwrap();
        (path, data)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
