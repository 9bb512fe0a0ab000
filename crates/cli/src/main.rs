//! The `onehop` command: moves bytes from a PCIe device into GPU memory in one hop, and reports the route that they
//! took.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod drives;
mod error;
mod fat;
mod gpus;
mod model;
mod noise;
mod outputs;
mod progress;
mod report;
mod sources;
mod stop;
mod terminal;
mod transfer;
mod units;

use std::process::ExitCode;

use clap::error::ErrorKind;

use args::{Command, DriveCommand, SimCommand};
use commands::CommandContext;
use error::{CliError, Result};
use report::Report;
use stop::StopFlag;

fn main() -> ExitCode {
    let args = match args::parse() {
        Ok(args) => args,
        Err(error) => return print_parse_error(&error),
    };
    let json = args.json;
    let result = StopFlag::install().and_then(|stop| run(&args.command, &CommandContext { stop, json }));
    ExitCode::from(match result {
        Ok(report) => report.print(json),
        Err(error) => report::print_error(&error, json),
    })
}

pub(crate) fn run(command: &Command, context: &CommandContext) -> Result<Report> {
    match command {
        Command::Demo(args) => commands::demo::run(args, context),
        Command::Load(args) => commands::load::run(args, context),
        Command::Map(args) => commands::map::run(args, context),
        Command::Read(args) => commands::read::run(args, context),
        Command::Write(args) => commands::write::run(args, context),
        Command::Doctor(args) => commands::doctor::run(args, context),
        Command::Topo(args) => commands::topo::run(args, context),
        Command::Report(args) => commands::report::run(args, context),
        Command::Mount(args) => commands::mount::run(args, context),
        Command::Target(args) => commands::target::run(args, context),
        Command::Bench(args) => commands::bench::run(args, context),
        Command::Sim { command: SimCommand::Serve(args) } => commands::serve::run(args, context),
        Command::Sdr { command } => commands::sdr::run(command, context),
        Command::Cufile { command } => commands::cufile::run(command),
        Command::Completions(args) => commands::completions::run(args),
        Command::Man(args) => commands::man::run(args),
        Command::Schema(args) => commands::schema::run(args),
        Command::Drive { command } => match command {
            DriveCommand::List(args) => commands::list::run(args, context),
            DriveCommand::Identify(args) => commands::identify::run(args, context),
            DriveCommand::Smart(args) => commands::smart::run(args, context),
            DriveCommand::Errors(args) => commands::errors::run(args, context),
            DriveCommand::DumpBar0(args) => commands::bar0::run(args, context),
            DriveCommand::Reset(args) => commands::reset::run(args, context),
            DriveCommand::Bind(args) => commands::bind::bind(args),
            DriveCommand::Unbind(args) => commands::bind::unbind(args),
            DriveCommand::Recover(args) => commands::recover::run(args),
            DriveCommand::CheckP2p(args) => commands::check_p2p::run(args, context),
        },
    }
}

/// Prints what clap reports: help, the version, or an argument error.
fn print_parse_error(error: &clap::Error) -> ExitCode {
    let printed = report::print_usage(error);
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return ExitCode::from(printed.map_or_else(|error| report::print_error(&error, false), |()| 0));
    }
    // Parsing failed, so clap has no value for --json.
    if std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json") {
        let text = error.to_string();
        // The message ends at the first empty line; usage follows. For a missing command, clap prints help instead.
        let message = match error.kind() {
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "a command is missing",
            _ => text.split("\n\n").next().unwrap_or_default(),
        };
        let words: Vec<_> = message.strip_prefix("error: ").unwrap_or(message).split_whitespace().collect();
        report::print_error_document(&CliError::Usage(words.join(" ")));
    }
    ExitCode::from(2)
}
