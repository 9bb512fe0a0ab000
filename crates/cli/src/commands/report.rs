//! `onehop report`: writes diagnostics of a drive and a GPU into one archive for a public hardware report. The archive
//! names neither the machine nor its owner.

mod archive;
#[cfg(test)]
mod machines;
mod private;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args;
use crate::commands::CommandContext;
use crate::commands::bench::report::machine;
use crate::drives::{self, DriveArg};
use crate::error::{CliError, Result};
use crate::gpus::GpuArg;
use crate::report::{self, Report, ReportText, Versioned};
use crate::units;
use archive::Archive;
use private::Private;

/// Run the diagnostics of a drive and a GPU, read-only, and write the results without names or serial numbers into one
/// archive
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop report -d 0000:0b:00.0 -g 0\n  onehop report -d sim:mem:64M -g emu --out try.tar.gz\n\nIt runs \
                  doctor, topo, drive identify, drive check-p2p, and a short bench sweep that only reads. A drive in use is \
                  refused, as by those commands; the archive then holds what doctor found. Serial numbers, hardware \
                  identifiers, host and user names, home directories, mount points, and the paths, hosts and NQNs of -d are \
                  removed. Read the archive before \
                  you publish it."
)]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    #[command(flatten)]
    gpu: GpuArg,
    /// The archive to write, which must not exist
    #[arg(long, value_name = "FILE", default_value = "onehop-report.tar.gz")]
    out: PathBuf,
    /// About how long the sweep may take
    #[arg(long, value_name = "TIME", value_parser = units::parse_time, default_value = "60s")]
    budget: Duration,
}

/// A command of the report, and its result.
#[derive(Serialize)]
struct ReportStep {
    /// The name of its files in the archive.
    #[serde(skip)]
    name: &'static str,
    command: String,
    exit_code: u8,
    seconds: f64,
    error: Option<String>,
    #[serde(skip)]
    document: Value,
    #[serde(skip)]
    text: String,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let lines = lines(args)?;
    let archive = Archive::create(&args.out)?;
    let mut private = Private::of_this_machine();
    private.add_drive_name(&args.drive.drive);
    let (mut steps, mut failure) = (Vec::new(), None);
    for (name, line) in lines {
        // A drive or GPU that has just failed is not measured.
        if name == "sweep" && failure.is_some() {
            report::note("the sweep is skipped, because an earlier step failed");
            break;
        }
        let (step, mut failed) = step(name, &line, context)?;
        if let Some(error) = failed.take_if(|error| error.is_argument_error()) {
            return Err(error);
        }
        private.add_document(&step.document);
        steps.push(step);
        failure = failure.or(failed);
    }
    let members = members(&steps, &private)?;
    let bytes = archive.write(&members)?;
    let mut text = ReportText::default();
    for step in &steps {
        let result = step
            .error
            .as_ref()
            .map_or("done".to_owned(), |why| format!("exit code {}: {why}", step.exit_code));
        text.row(step.name, result);
    }
    text.row("archive", format!("{}, {}", args.out.display(), units::bytes(bytes)));
    let removed = private.removed();
    text.row("removed", format!("names and numbers of this machine, in {}", units::count(removed, "place")));
    text.row("next", "read it, then attach it to a hardware report");
    let names: Vec<_> = members.iter().map(|(name, _)| name).collect();
    let document = json!({
        "out": args.out.display().to_string(), "bytes": bytes, "members": names, "steps": steps, "removed": removed,
    });
    Ok(Report::new(document, text)?.failed(failure))
}

/// The command lines. None of them writes to a drive: the sweep only reads, and without `--serial` no command writes to
/// a drive that keeps its data.
fn lines(args: &Args) -> Result<Vec<(&'static str, Vec<String>)>> {
    let drive = args.drive.drive.as_str();
    let mut about = Vec::new();
    match drives::address(drive) {
        Ok(name) => about.extend(["-d".to_owned(), name.address.to_string()]),
        // A kernel name such as /dev/nvme0n1; the error says what to use instead.
        Err(error) if drives::block_device(drive).is_some() => return Err(error.into()),
        // Not a drive on this machine's PCI bus.
        Err(_) => {}
    }
    // Without -g the commands choose a GPU. Doctor does not know the emulated one.
    let named = args.gpu.gpu.as_deref();
    let gpu: Vec<_> = named.iter().flat_map(|gpu| ["-g".to_owned(), gpu.to_string()]).collect();
    if named.is_some_and(|gpu| !gpu.starts_with("emu")) {
        about.extend(gpu.clone());
    }
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    let budget = format!("{}ms", args.budget.as_millis());
    let sweep = ["bench", "sweep", "-d", drive, "--io", "read,randread", "--budget", &budget];
    Ok(vec![
        ("doctor", [words(&["doctor", "--all"]), about.clone()].concat()),
        ("topo", [words(&["topo", "--explain"]), about].concat()),
        ("identify", words(&["drive", "identify", "-d", drive])),
        ("check-p2p", [words(&["drive", "check-p2p", "-d", drive]), gpu.clone()].concat()),
        ("sweep", [words(&sweep), gpu].concat()),
    ])
}

/// Runs a command line as `main` does. Only a stop of the whole report is an error here.
fn step(
    name: &'static str,
    line: &[String],
    context: &CommandContext,
) -> Result<(ReportStep, Option<CliError>)> {
    context.stop.check()?;
    let command = format!("onehop {}", line.join(" "));
    report::note(&command);
    let start = Instant::now();
    let words = std::iter::once("onehop").chain(line.iter().map(String::as_str));
    let parsed = args::Args::try_parse_from(words).map_err(|error| {
        CliError::Usage(error.to_string().split("\n\n").next().unwrap_or_default().to_owned())
    })?;
    let inner = CommandContext { stop: context.stop.clone(), json: true };
    let (document, text, failed) = match crate::run(&parsed.command, &inner) {
        Ok(report) => report.into_parts()?,
        Err(error @ (CliError::Interrupted | CliError::Stopped(_))) => return Err(error),
        Err(error) => {
            let document = Versioned::new(&json!({ "error": error.document() })).to_value()?;
            (document, format!("onehop: {error}\n"), Some(error))
        }
    };
    if let Some(failed) = &failed {
        report::note(&failed.to_string());
    }
    let step = ReportStep {
        name,
        command,
        exit_code: failed.as_ref().map_or(0, CliError::code),
        seconds: start.elapsed().as_secs_f64(),
        error: failed.as_ref().map(ToString::to_string),
        document,
        text,
    };
    Ok((step, failed))
}

/// The files of the archive, without what identifies this machine.
fn members(steps: &[ReportStep], private: &Private) -> Result<Vec<(String, Vec<u8>)>> {
    let about = Versioned::new(&json!({ "machine": machine(), "steps": steps })).to_value()?;
    let mut members = vec![("README.txt".to_owned(), README.as_bytes().to_vec())];
    let mut add = |name: String, document: &Value| {
        let mut document = document.clone();
        private.clean(&mut document);
        members.push((name, format!("{document:#}\n").into_bytes()));
    };
    add("report.json".to_owned(), &about);
    for step in steps {
        add(format!("{}.json", step.name), &step.document);
    }
    for step in steps {
        let text = private.text(&without_colours(&step.text));
        members.push((format!("{}.txt", step.name), text.into_bytes()));
    }
    Ok(members)
}

/// Removes colour codes.
fn without_colours(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str(part.split_once('m').map_or("", |(_, rest)| rest));
    }
    out
}

const README: &str = "Results of `onehop report` on one machine.\n\n\
    report.json     the machine, and the commands with their exit codes\n\
    NAME.json       the output of each command with --json; `onehop schema` describes it\n\
    NAME.txt        the same as text\n\n\
    Serial numbers, hardware identifiers, host and user names, home directories and mount points were replaced by words in\n\
    brackets. Names of running programs and hardware models were kept. Read the files before you publish them.\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_left_out() {
        assert_eq!(without_colours("\x1b[1mEnvironment\x1b[0m: a\n\x1b[33mwarn"), "Environment: a\nwarn");
        assert_eq!(without_colours("[1m, plain"), "[1m, plain");
    }
}
