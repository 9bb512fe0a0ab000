//! `onehop mount`: serves a folder through FUSE and usrbio until it is stopped.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, Error as Serve, Options};
use serde_json::Value;

use super::Context;
use crate::error::{CliError, Result};
use crate::report::{Report, Text};
use crate::units;

/// Mount a folder so that programs written for 3FS read and write its files by usrbio, into GPU memory too
#[derive(clap::Args)]
#[command(
    after_help = "Runs until Ctrl-C, SIGTERM or an unmount, and exits 0 then: files of other programs that are still \
                        open end in errors.\n\n\
                        Examples:\n  onehop mount /mnt/hf3fs --root /data/models\n  onehop mount /mnt/hf3fs --status --json"
)]
pub(crate) struct Args {
    /// Where to mount: an empty folder
    mount_point: PathBuf,
    /// The folder whose files are served
    #[arg(long, required_unless_present = "status")]
    root: Option<PathBuf>,
    /// Say what the daemon of that mount has done, and which way bytes went
    #[arg(long, conflicts_with = "root")]
    status: bool,
}

/// How often it is looked whether the mount is to end.
const LOOK: Duration = Duration::from_millis(50);

/// Runs it.
pub(crate) fn run(args: &Args, context: &Context) -> Result<Report> {
    match &args.root {
        Some(root) => serve(&args.mount_point, root, context),
        None => status(&args.mount_point),
    }
}

fn serve(point: &Path, root: &Path, context: &Context) -> Result<Report> {
    context.stop.end_in_order();
    let start = Instant::now();
    let daemon = Daemon::start(Options::new(point, root)).map_err(refused)?;
    // People, and scripts that wait for it, read this on stderr.
    eprintln!("onehop: {} is mounted at {}; Ctrl-C unmounts", root.display(), point.display());
    while !daemon.is_over() && !context.stop.is_set() {
        std::thread::sleep(LOOK);
    }
    let document = document(&daemon.report())?;
    daemon.end().map_err(refused)?;
    let mut text = text(&document);
    text.row("mounted", format!("for {}", units::time(start.elapsed())));
    Report::new(document, text)
}

fn status(point: &Path) -> Result<Report> {
    let path = point.join(onehop_serve::STATS);
    let words = std::fs::read_to_string(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            CliError::Failed(format!("nothing of onehop's is mounted at {}", point.display()))
        }
        _ => CliError::file("reading", &path, error),
    })?;
    let document = document(&words)?;
    let text = text(&document);
    Report::new(document, text)
}

fn document(words: &str) -> Result<Value> {
    serde_json::from_str(words)
        .map_err(|e| CliError::Failed(format!("the daemon's report cannot be read: {e}")))
}

fn text(document: &Value) -> Text {
    let mut text = Text::default();
    let number = |name: &str| document[name].as_u64().unwrap_or(0);
    let counts = ["programs", "buffers", "rings", "open_files"].map(number);
    let [programs, buffers, rings, files] = counts;
    text.row("now", format!("{programs} programs, {buffers} buffers, {rings} rings, {files} open files"));
    for way in document["ways"].as_array().into_iter().flatten() {
        let name = |field: &str| way[field].as_str().unwrap_or_default();
        let simulated =
            if way["simulated"].as_array().is_some_and(|list| !list.is_empty()) { ", simulated" } else { "" };
        let bytes = units::bytes(way["bytes"].as_u64().unwrap_or(0));
        let transfers = way["transfers"].as_u64().unwrap_or(0);
        let (direction, memory) = (name("direction"), name("memory"));
        text.row(name("route"), format!("{direction} {memory}{simulated}: {bytes} in {transfers} transfers"));
    }
    text.row("refused", number("refused"));
    text.row(
        "failed",
        format!("{}, and {} rings that broke their own rules", number("failed"), number("broken_rings")),
    );
    text
}

fn refused(error: Serve) -> CliError {
    match &error {
        Serve::Mount { source, .. } if source.raw_os_error().is_some() => {
            let fix = "Run it as root where there is /dev/fuse, or install fuse3 for users";
            CliError::not_possible("mounting", error.to_string(), fix)
        }
        Serve::Folder { .. } => CliError::Usage(error.to_string()),
        _ => CliError::Failed(error.to_string()),
    }
}
