//! `onehop doctor`: shows which routes this machine or a recorded one has, why others do not work, and what to change.

use std::path::{Path, PathBuf};
use std::time::Duration;

use onehop_doctor::{Facts, FactsRequest, Only, Style, examine, recorded_files, render};
use onehop_pci::{Address, Record, Root};

use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::outputs;
use crate::report::{Report, ReportText};
use crate::terminal;
use crate::units;

/// Check which routes into GPU memory this machine has, why others fail, and what to change
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop doctor\n  onehop doctor -g 0 -d 0000:0b:00.0 /models/a.safetensors --all\n  \
                  onehop doctor --record here\n  onehop doctor --from here\n  onehop doctor --from example\n\nIt changes nothing. It \
                  tests CUDA, a copy, a dma-buf, io_uring and O_DIRECT. Checks that need root are unknown without it."
)]
pub(crate) struct Args {
    /// Files to check: file system, drive, extents, O_DIRECT
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    #[arg(short = 'g', long = "gpu", value_name = "GPU", help = crate::args::ONE_GPU)]
    gpu: Option<String>,
    /// Only this drive or card: its PCI address [default: all]
    #[arg(short = 'd', long = "drive", value_name = "DEVICE")]
    drive: Option<String>,
    /// Check a recorded system: a folder written by --record, its system.json, a copy of /sys and /proc, or `example`
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Record the system in DIR/system.json, including names, serial numbers and mount points
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    record: Option<PathBuf>,
    /// Also show the reason and source of each check, and every pair of a GPU and a device
    #[arg(long)]
    all: bool,
    /// How long to wait for CUDA
    #[arg(long, value_name = "TIME", default_value = "1500ms", value_parser = units::parse_time)]
    patience: Duration,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let mut root = root(args.from.as_deref())?;
    if args.record.is_some() {
        root = root.recording();
    }
    let recorded = if args.files.is_empty() { recorded_files(&root) } else { args.files.clone() };
    let files =
        recorded.iter().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone())).collect();
    let (timeout, stop) = (Some(args.patience), context.stop.signal());
    let facts = Facts::gather(&root, &FactsRequest { files, timeout, stop })?;
    context.stop.check()?;
    let only = Only {
        gpu: args.gpu.as_deref().map(|name| gpu(&facts, name)).transpose()?,
        device: args.drive.as_deref().map(|name| device(&facts, name)).transpose()?,
    };
    let diagnosis = examine(&facts, &only, root.about());
    let written = args.record.as_ref().map(|folder| write(&root, &facts, folder)).transpose()?.flatten();
    let mut text = ReportText::default();
    let style = Style { colour: terminal::has_colour(&std::io::stdout()), all: args.all };
    text.coloured(render(&diagnosis, style).trim_end().to_owned());
    if let Some(path) = written {
        text.line("");
        text.line(format!("Recorded in {}, with names, serial numbers and mount points", path.display()));
    }
    Report::new(&diagnosis, text)
}

/// The name of the built-in example system.
const EXAMPLE: &str = "example";

/// This machine, or a recorded one.
pub(crate) fn root(from: Option<&Path>) -> Result<Root> {
    let Some(path) = from else { return Ok(Root::here()) };
    if path == Path::new(EXAMPLE) && !path.exists() {
        let record = Record::parse(onehop_doctor::EXAMPLE.as_bytes())
            .map_err(|why| CliError::Failed(format!("the example: {why}")))?;
        return Ok(Root::recorded(record));
    }
    if !path.exists() {
        return Err(CliError::Usage(format!(
            "--from {}: no such file or folder. `onehop doctor --record DIR` writes a record; --from {EXAMPLE} shows one",
            path.display()
        )));
    }
    Ok(Root::open(path)?)
}

/// The GPU with this CUDA ordinal or address.
pub(crate) fn gpu(facts: &Facts, name: &str) -> Result<Address> {
    let known = facts.gpus.iter().find(|gpu| {
        gpu.ordinal.is_some_and(|ordinal| ordinal.to_string() == name) || name.parse() == Ok(gpu.address)
    });
    known.map(|gpu| gpu.address).ok_or_else(|| {
        if let Some(number) = name.strip_prefix("cuda:") {
            return CliError::Usage(format!("-g takes the number alone: -g {}", number.escape_debug()));
        }
        let have: Vec<_> = facts.gpus.iter().map(|gpu| gpu.address.to_string()).collect();
        let have = if have.is_empty() {
            "this system has no NVIDIA GPU".into()
        } else {
            format!("this system has {}", have.join(", "))
        };
        CliError::not_possible(format!("selecting GPU {}", name.escape_debug()), have, "Omit -g to see all")
    })
}

/// The device at this address.
pub(crate) fn device(facts: &Facts, name: &str) -> Result<Address> {
    let address: Address = name.parse().map_err(|_| {
        CliError::Usage(crate::drives::block_device(name).unwrap_or_else(|| {
            format!("'{}' is not a PCI address such as 0000:0b:00.0", name.escape_debug())
        }))
    })?;
    facts.device(address).map(|device| device.address).ok_or_else(|| {
        CliError::not_possible(
            format!("selecting {address}"),
            "this system has no such device",
            "`onehop topo` shows all devices",
        )
    })
}

fn write(root: &Root, facts: &Facts, folder: &Path) -> Result<Option<PathBuf>> {
    let Some(mut record) = root.record() else { return Ok(None) };
    let kernel = &facts.kernel;
    let by = env!("ONEHOP_VERSION");
    record.about = format!("{}, kernel {}, recorded by onehop {by}", kernel.cpu.name, kernel.release);
    std::fs::create_dir_all(folder).map_err(|e| CliError::file("creating", folder, e))?;
    let path = folder.join("system.json");
    outputs::write(&path, record.to_bytes())?;
    Ok(Some(path))
}
