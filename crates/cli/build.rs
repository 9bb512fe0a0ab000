//! Passes the commit to `onehop --version`. A source tree without git has none.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    // Only if this is the project's repository, not another one in which the sources were unpacked.
    let commit = git(&["rev-parse", "--show-prefix"])
        .filter(|prefix| prefix == "crates/cli/")
        .and_then(|_| git(&["rev-parse", "--short=12", "HEAD"]));
    let Some(commit) = commit else {
        println!("cargo::rustc-env=ONEHOP_VERSION={version}");
        return;
    };
    // The log of HEAD grows with every commit and checkout.
    for file in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", file]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    println!("cargo::rustc-env=ONEHOP_VERSION={version} ({commit})");
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
