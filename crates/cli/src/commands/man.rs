//! `onehop man`: manual pages of all commands.

use std::path::PathBuf;

use clap::{Command, CommandFactory};
use serde_json::json;

use crate::args;
use crate::error::{CliError, Result};
use crate::report::{Report, ReportText};

/// Write a manual page for each command into a directory
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop man /tmp/man && man -l /tmp/man/onehop-load.1")]
pub(crate) struct Args {
    /// The directory; it is created if it does not exist
    dir: PathBuf,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<Report> {
    std::fs::create_dir_all(&args.dir).map_err(|e| CliError::file("create", &args.dir, e))?;
    let mut command = args::Args::command().version(env!("CARGO_PKG_VERSION")).disable_help_subcommand(true);
    command.build();
    clap_mangen::generate_to(command.clone(), &args.dir)
        .map_err(|e| CliError::file("write manual pages to", &args.dir, e))?;
    let mut files = Vec::new();
    names(&command, "onehop", &mut files);
    let mut text = ReportText::default();
    text.row("pages", format!("{} in {}", files.len(), args.dir.display()));
    Report::new(json!({ "dir": args.dir.display().to_string(), "pages": files }), text)
}

/// The file of a command's page, and those of its subcommands.
fn names(command: &Command, name: &str, files: &mut Vec<String>) {
    files.push(format!("{name}.1"));
    for below in command.get_subcommands() {
        names(below, &format!("{name}-{}", below.get_name()), files);
    }
}
