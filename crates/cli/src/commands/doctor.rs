//! `onehop doctor`: what this machine, or a recorded one, can do, and what keeps it from more.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use onehop_doctor::{Facts, FactsRequest, Only, Style, examine, recorded_files, render};
use onehop_pci::{Address, Root};

use crate::error::{CliError, Result};
use crate::report::{Report, Text};
use crate::units;

/// Tell whether this machine can go direct, per GPU, device and direction; why not, and what to change
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop doctor\n  onehop doctor -g 0 -d 0000:0b:00.0 /models/a.safetensors --all\n  \
                  onehop doctor --record here\n  onehop doctor --from here\n\nIt changes nothing. What can be tried is tried \
                  (CUDA, a copy, a dma-buf, io_uring, O_DIRECT); what cannot be told without root is said to be unknown."
)]
pub(crate) struct Args {
    /// Files whose way to a drive is of interest
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Only this GPU: a CUDA ordinal or a PCI address
    #[arg(short = 'g', long = "gpu", value_name = "GPU")]
    gpu: Option<String>,
    /// Only this drive or card: a PCI address
    #[arg(short = 'd', long = "drive", value_name = "DEVICE")]
    drive: Option<String>,
    /// Look at a recorded system: a folder that --record wrote, its system.json, or a copy of /sys and /proc
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Write down what is read and answered, into DIR/system.json: it holds names, serial numbers and mount points
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    record: Option<PathBuf>,
    /// Also say why each check matters, and where it was read; and show every pair of a GPU and a device
    #[arg(long)]
    all: bool,
    /// How long CUDA may take to answer
    #[arg(long, value_name = "TIME", default_value = "1500ms", value_parser = units::parse_time)]
    patience: Duration,
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<Report> {
    let mut root = root(args.from.as_deref())?;
    if args.record.is_some() {
        root = root.recording();
    }
    let recorded = if args.files.is_empty() { recorded_files(&root) } else { args.files.clone() };
    let files =
        recorded.iter().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone())).collect();
    let facts = Facts::gather(&root, &FactsRequest { files, patience: Some(args.patience) })?;
    let only = Only {
        gpu: args.gpu.as_deref().map(|name| gpu(&facts, name)).transpose()?,
        device: args.drive.as_deref().map(|name| device(&facts, name)).transpose()?,
    };
    let diagnosis = examine(&facts, &only, root.about());
    if let Some(folder) = &args.record {
        write(&root, &facts, folder)?;
    }
    let mut text = Text::default();
    let style = Style { colour: std::io::stdout().is_terminal(), all: args.all };
    text.line(render(&diagnosis, style).trim_end());
    Report::new(&diagnosis, text)
}

/// This machine, or a recorded one.
pub(crate) fn root(from: Option<&Path>) -> Result<Root> {
    from.map_or_else(|| Ok(Root::here()), |path| Ok(Root::open(path)?))
}

/// The GPU of a name.
pub(crate) fn gpu(facts: &Facts, name: &str) -> Result<Address> {
    let known = facts.gpus.iter().find(|gpu| {
        gpu.ordinal.is_some_and(|ordinal| ordinal.to_string() == name) || name.parse() == Ok(gpu.address)
    });
    known.map(|gpu| gpu.address).ok_or_else(|| {
        let have: Vec<_> = facts.gpus.iter().map(|gpu| gpu.address.to_string()).collect();
        let have =
            if have.is_empty() { "it has none".into() } else { format!("there are {}", have.join(", ")) };
        CliError::not_possible(
            format!("looking at GPU {}", name.escape_debug()),
            have,
            "Leave -g out to see all",
        )
    })
}

/// The device of an address.
pub(crate) fn device(facts: &Facts, name: &str) -> Result<Address> {
    let address: Address = name.parse().map_err(|_| {
        CliError::Usage(format!("'{}' is no PCI address such as 0000:0b:00.0", name.escape_debug()))
    })?;
    facts.device(address).map(|device| device.address).ok_or_else(|| {
        CliError::not_possible(
            format!("looking at {address}"),
            "there is no such device",
            "onehop topo shows all",
        )
    })
}

fn write(root: &Root, facts: &Facts, folder: &Path) -> Result<()> {
    let Some(mut record) = root.record() else { return Ok(()) };
    let kernel = &facts.kernel;
    let by = env!("CARGO_PKG_VERSION");
    record.about = format!("{}, kernel {}, recorded by onehop {by}", kernel.cpu.name, kernel.release);
    std::fs::create_dir_all(folder).map_err(|e| CliError::file("creating", folder, e))?;
    let path = folder.join("system.json");
    std::fs::write(&path, record.to_bytes()).map_err(|e| CliError::file("writing", &path, e))
}
