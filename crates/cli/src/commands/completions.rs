//! `onehop completions`: prints the completion script for a shell.

use clap::CommandFactory;
use clap_complete::Shell;
use serde_json::json;

use crate::args;
use crate::error::{CliError, Result};
use crate::report::{Report, ReportText};

/// Print the completion script for a shell
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop completions bash > ~/.local/share/bash-completion/completions/onehop\n  \
                  onehop completions fish > ~/.config/fish/completions/onehop.fish"
)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut args::Args::command(), "onehop", &mut script);
    let script = String::from_utf8(script)
        .map_err(|error| CliError::Failed(format!("the completion script is not UTF-8: {error}")))?;
    let mut text = ReportText::default();
    text.line(script.trim_end());
    Report::new(json!({ "shell": args.shell.to_string(), "script": script }), text)
}
