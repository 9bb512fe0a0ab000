//! `onehop man`: writes manual pages for all commands.

use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use serde_json::json;

use crate::args;
use crate::error::{CliError, Result};
use crate::report::{Report, ReportText};

/// Write a manual page for each command into a directory
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop man /tmp/man && man -l /tmp/man/onehop-load.1")]
pub(crate) struct Args {
    /// The directory, created if it does not exist
    dir: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    std::fs::create_dir_all(&args.dir).map_err(|e| CliError::file("create", &args.dir, e))?;
    let mut command = args::Args::command().version(env!("CARGO_PKG_VERSION")).disable_help_subcommand(true);
    command.build();
    let mut files = Vec::new();
    pages(&command, &args.dir, &mut files)
        .map_err(|e| CliError::file("write manual pages to", &args.dir, e))?;
    let mut text = ReportText::default();
    text.row("pages", format!("{} in {}", files.len(), args.dir.display()));
    Report::new(json!({ "dir": args.dir.display().to_string(), "pages": files }), text)
}

/// Writes a command's page and those of its subcommands; adds their names.
fn pages(command: &Command, dir: &Path, files: &mut Vec<String>) -> std::io::Result<()> {
    let page =
        Man::new(command.clone()).source(concat!("onehop ", env!("CARGO_PKG_VERSION"))).manual("onehop");
    files.push(page.get_filename());
    page.generate_to(dir)?;
    command.get_subcommands().try_for_each(|below| pages(below, dir, files))
}
