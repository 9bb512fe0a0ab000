//! `onehop drive recover`: removes a drive that reads as all ones from the bus, and rescans.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::drives::{self, RealDriveArg};
use crate::error::Result;
use crate::report::{Report, ReportText};
use crate::units;
use onehop_pci::Root;

/// Remove a drive from the bus and rescan, for a drive that reads as all ones
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  onehop drive recover -d 0000:0b:00.0\n\nIf the drive does not come back, power-cycle the \
                  machine."
)]
pub(crate) struct Args {
    #[command(flatten)]
    drive: RealDriveArg,
    /// How long to wait for the drive
    #[arg(long, value_name = "TIME", value_parser = units::parse_time, default_value = "10s")]
    timeout: Duration,
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    recover(&Root::here(), &args.drive.drive, args.timeout)
}

pub(super) fn recover(root: &Root, drive: &str, timeout: Duration) -> Result<Report> {
    let name = drives::address(drive)?;
    let was_present = onehop_pci::is_present(root, name.address);
    let start = Instant::now();
    onehop_pci::rescan(root, name.address, timeout)?;
    let took = start.elapsed();
    let mut text = ReportText::default();
    text.row("drive", name.address);
    text.row("before", if was_present { "responding" } else { "not responding" });
    text.row("now", format!("responding, {} after its removal from the bus", units::time(took)));
    Report::new(
        json!({ "drive": name.address, "was_present": was_present, "seconds": took.as_secs_f64() }),
        text,
    )
}
