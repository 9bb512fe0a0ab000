//! `onehop topo`: shows the PCIe tree, and the path between two devices.

use std::path::PathBuf;

use onehop_doctor::topo::{self, Explanation, explain, explain_text, picture};
use onehop_doctor::{Facts, FactsRequest};
use serde_json::json;

use crate::commands::CommandContext;
use crate::commands::doctor::{device, gpu, root};
use crate::error::Result;
use crate::outputs;
use crate::report::{Report, ReportText};

/// Show the PCIe tree with links, BARs and IOMMU groups, and the path between two devices
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop topo\n  onehop topo --explain -d 0000:0b:00.0 -g 0000:0a:00.0\n  onehop topo --explain \
                  --html topo.html\n  onehop topo --explain --from example"
)]
pub(crate) struct Args {
    /// Also draw the path into GPU memory, with two copies and with one hop
    #[arg(long)]
    explain: bool,
    #[arg(short = 'g', long = "gpu", value_name = "GPU", requires = "explain", help = crate::args::ONE_GPU)]
    gpu: Option<String>,
    /// Only this drive or card: its PCI address [default: all]
    #[arg(short = 'd', long = "drive", value_name = "DEVICE", requires = "explain")]
    drive: Option<String>,
    /// Also write a self-contained HTML page
    #[arg(long, value_name = "FILE", value_parser = outputs::parser())]
    html: Option<PathBuf>,
    /// Also write the tree as SVG
    #[arg(long, value_name = "FILE", value_parser = outputs::parser())]
    svg: Option<PathBuf>,
    /// Show every function, not only those on routes
    #[arg(long)]
    all: bool,
    /// Show a recorded system: a folder written by `onehop doctor --record`, its system.json, a copy of /sys and /proc,
    /// or `example`
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let root = root(args.from.as_deref())?;
    // CUDA is not queried here, because that takes longer than the rest; a recorded answer is used.
    let timeout = (!root.is_here()).then(|| std::time::Duration::from_secs(1));
    let stop = context.stop.signal();
    let facts = Facts::gather(&root, &FactsRequest { files: Vec::new(), timeout, stop })?;
    context.stop.check()?;
    let paths = if args.explain { paths(args, &facts)? } else { Vec::new() };
    let missing = if args.explain { topo::missing(&facts) } else { None };
    if let Some(path) = &args.svg {
        outputs::write(path, picture(&facts, args.all))?;
    }
    if let Some(path) = &args.html {
        outputs::write(path, topo::page(&facts, args.all, root.about(), &paths, missing))?;
    }
    let mut text = ReportText::default();
    if let Some(about) = root.about() {
        text.line(format_args!("recorded system: {about}"));
    }
    text.line(topo::tree(&facts, args.all).trim_end());
    for path in &paths {
        text.line(format_args!("\n{}", explain_text(path).trim_end()));
    }
    if let Some(why) = missing {
        text.line(format_args!(
            "\n{why}\nonehop topo --explain --from example shows a composed machine that has both"
        ));
    }
    let document = json!({ "system": root.about(), "tree": facts.tree, "paths": paths, "missing": missing });
    Report::new(document, text)
}

/// The pairs to explain.
fn paths(args: &Args, facts: &Facts) -> Result<Vec<Explanation>> {
    let gpus = match &args.gpu {
        Some(name) => vec![gpu(facts, name)?],
        None => facts.gpus.iter().map(|gpu| gpu.address).collect(),
    };
    let devices = match &args.drive {
        Some(name) => vec![device(facts, name)?],
        None => facts.peers(),
    };
    let pairs = gpus.iter().flat_map(|gpu| devices.iter().map(move |device| (*gpu, *device)));
    Ok(pairs.filter_map(|(gpu, device)| explain(facts, gpu, device)).collect())
}
