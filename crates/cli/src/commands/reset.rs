//! `onehop drive reset`: resets the controller, and reports the time taken.

use std::time::Instant;

use serde_json::json;

use crate::commands::CommandContext;
use crate::drives::{self, DriveArg};
use crate::error::Result;
use crate::report::{Report, ReportText};
use crate::units;

/// Reset a drive's controller, initialize it again, and report the time taken
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop drive reset -d sim:mem:64M")]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let start = Instant::now();
    let drive = drives::open(&args.drive.drive, &context.stop)?;
    let opened = start.elapsed();
    let start = Instant::now();
    drive.reset()?;
    let reset = start.elapsed();
    let mut text = ReportText::default();
    text.row("drive", format!("{} (serial {})", drive.name(), drive.identity().serial()));
    text.row("opened", format!("in {}: disabled, enabled, identified", units::time(opened)));
    text.row("reset", format!("in {}: disabled, enabled, same drive as before", units::time(reset)));
    let document = json!({
        "drive": drive.name(),
        "serial": drive.identity().serial(),
        "simulated": super::simulated_drive(drive.identity().simulated),
        "open_seconds": opened.as_secs_f64(),
        "reset_seconds": reset.as_secs_f64(),
    });
    Report::new(document, text)
}
