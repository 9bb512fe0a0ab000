//! `onehop drive errors`: the drive's error log.

use onehop_proto::log::{self, ErrorEntry, error_entries};
use serde_json::{Value, json};

use crate::commands::CommandContext;
use crate::drives::{self, DriveArg};
use crate::error::Result;
use crate::report::{Report, ReportText};
use crate::units;

/// Show a drive's error log, newest entries first
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop drive errors -d sim:mem:64M")]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    /// Entries to show at most, 1 to 65535
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = units::within::<u16>(1..=65535))]
    count: u16,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let drive = drives::open(&args.drive.drive, &context.stop)?;
    let capacity = u16::from(drive.identity().controller().elpe_z()) + 1;
    let count = usize::from(capacity.min(args.count));
    let page = drive.log_page(log::id::ERROR, u32::MAX, count * ErrorEntry::BYTES)?;
    let entries: Vec<_> = error_entries(&page).collect();
    let mut text = ReportText::default();
    text.row("drive", format!("{} (serial {})", drive.name(), drive.identity().serial()));
    text.row(
        "errors",
        format!(
            "{} in the log, which holds up to {capacity}",
            units::count(entries.len() as u64, "entry").replace("entrys", "entries")
        ),
    );
    for entry in &entries {
        text.row(&format!("#{}", entry.error_count()), describe(entry));
    }
    let list: Vec<_> = entries.iter().map(document).collect();
    let document = json!({
        "drive": drive.name(), "simulated": super::simulated_drive(drive.identity().simulated), "kept": capacity, "entries": list,
    });
    Report::new(document, text)
}

fn describe(entry: &ErrorEntry<'_>) -> String {
    format!(
        "{}; queue {}, command {:#06x}, namespace {}, block {}",
        entry.status(),
        entry.sqid(),
        entry.cid(),
        entry.nsid(),
        entry.lba()
    )
}

fn document(entry: &ErrorEntry<'_>) -> Value {
    json!({
        "error_count": entry.error_count(),
        "queue": entry.sqid(),
        "command_id": entry.cid(),
        "status": entry.status().to_string(),
        "status_field": format!("{:#06x}", entry.status_field()),
        "parameter": entry.parameter(),
        "lba": entry.lba(),
        "nsid": entry.nsid(),
    })
}
