//! `onehop topo`: the PCIe tree, and the way of a byte between two devices.

use std::path::{Path, PathBuf};

use onehop_doctor::topo::{self, Explanation, explain, explain_text, picture};
use onehop_doctor::{Facts, FactsRequest};
use serde_json::json;

use crate::commands::doctor::{device, gpu, root};
use crate::error::{CliError, Result};
use crate::report::{Report, Text};

/// Show the PCIe tree with links, BARs and IOMMU groups, and the way of a byte between two devices
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop topo\n  onehop topo --explain -d 0000:0b:00.0 -g 0000:0a:00.0\n  onehop topo --explain \
                  --html topo.html"
)]
pub(crate) struct Args {
    /// Also draw the way of a byte into GPU memory: with two copies, and with one hop
    #[arg(long)]
    explain: bool,
    /// The GPU of --explain: a PCI address [default: each]
    #[arg(short = 'g', long = "gpu", value_name = "GPU")]
    gpu: Option<String>,
    /// The drive or card of --explain: a PCI address [default: each]
    #[arg(short = 'd', long = "drive", value_name = "DEVICE")]
    drive: Option<String>,
    /// Also write a page with the pictures; it loads nothing
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Also write the tree as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Show every function, not only those that bytes pass
    #[arg(long)]
    all: bool,
    /// Look at a recorded system: a folder that `onehop doctor --record` wrote, its system.json, or a copy of /sys and /proc
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<Report> {
    let root = root(args.from.as_deref())?;
    // Only a recorded answer of CUDA is worth having: asking it takes longer than all the rest.
    let patience = (!root.is_here()).then(|| std::time::Duration::from_secs(1));
    let facts = Facts::gather(&root, &FactsRequest { files: Vec::new(), patience })?;
    let ways = if args.explain { ways(args, &facts)? } else { Vec::new() };
    if let Some(path) = &args.svg {
        write(path, &picture(&facts, args.all))?;
    }
    if let Some(path) = &args.html {
        write(path, &topo::page(&facts, args.all, root.about(), &ways))?;
    }
    let mut text = Text::default();
    if let Some(about) = root.about() {
        text.line(format_args!("recorded system: {about}"));
    }
    text.line(topo::tree(&facts, args.all).trim_end());
    for way in &ways {
        text.line(format_args!("\n{}", explain_text(way).trim_end()));
    }
    Report::new(json!({ "system": root.about(), "tree": facts.tree, "ways": ways }), text)
}

/// The pairs to explain.
fn ways(args: &Args, facts: &Facts) -> Result<Vec<Explanation>> {
    let gpus = match &args.gpu {
        Some(name) => vec![gpu(facts, name)?],
        None => facts.gpus.iter().map(|gpu| gpu.address).collect(),
    };
    let devices = match &args.drive {
        Some(name) => vec![device(facts, name)?],
        None => facts.peers(),
    };
    let pairs = gpus.iter().flat_map(|gpu| devices.iter().map(move |device| (*gpu, *device)));
    let ways: Vec<_> = pairs.filter_map(|(gpu, device)| explain(facts, gpu, device)).collect();
    if ways.is_empty() {
        return Err(CliError::not_possible(
            "explaining the way of a byte",
            "this system does not show both a GPU and a device to go between",
            "Look at a recorded one: --from DIR",
        ));
    }
    Ok(ways)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| CliError::file("writing", path, e))
}
