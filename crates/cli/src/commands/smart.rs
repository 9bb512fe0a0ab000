//! `onehop drive smart`: the drive's health log.

use onehop_proto::log::{self, CriticalWarning, Health};
use serde_json::{Value, json};

use crate::commands::CommandContext;
use crate::drives::{self, DriveArg};
use crate::error::{CliError, Result};
use crate::report::{Report, ReportText, number};

/// Bytes of a data unit, in which the log counts reads and writes.
const UNIT: u128 = 512_000;

/// Show a drive's health: temperature, wear, errors, hours
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop drive smart -d sim:mem:64M")]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let drive = drives::open(&args.drive.drive, &context.stop)?;
    let page = drive.log_page(log::id::HEALTH, u32::MAX, Health::BYTES)?;
    let health = Health::parse(&page).map_err(|e| CliError::Failed(format!("the health log: {e}")))?;
    let warnings = warnings(health.critical_warning());
    let mut text = ReportText::default();
    text.row("drive", format!("{} (serial {})", drive.name(), drive.identity().serial()));
    text.row("warnings", if warnings.is_empty() { "none".into() } else { warnings.join("; ") });
    text.row("temperature", temperature(health.temperature()));
    text.row(
        "wear",
        format!(
            "{} % used, {} % spare (threshold {} %)",
            health.percentage_used(),
            health.available_spare(),
            health.spare_threshold()
        ),
    );
    let gigabytes = |units: u128| units.saturating_mul(UNIT) as f64 / 1e9;
    text.row(
        "traffic",
        format!(
            "{:.1} GB read by {} commands, {:.1} GB written by {}",
            gigabytes(health.data_units_read()),
            health.host_reads(),
            gigabytes(health.data_units_written()),
            health.host_writes()
        ),
    );
    text.row(
        "life",
        format!(
            "{} hours, {} power cycles, {} unsafe shutdowns",
            health.power_on_hours(),
            health.power_cycles(),
            health.unsafe_shutdowns()
        ),
    );
    let (media, entries) = (health.media_errors(), health.error_entries());
    text.row("errors", format!("{media} media errors, {entries} error log entries"));
    let document = document(drive.name(), drive.identity().simulated, &health, &warnings);
    Report::new(document, text)
}

fn document(drive: &str, simulated: bool, health: &Health<'_>, warnings: &[&str]) -> Value {
    let sensors: Vec<_> = (0..8).filter_map(|i| health.sensor(i).map(celsius)).collect();
    json!({
        "drive": drive,
        "simulated": super::simulated_drive(simulated),
        "critical_warning": health.critical_warning().0,
        "warnings": warnings,
        "temperature_c": celsius(health.temperature()),
        "sensors_c": sensors,
        "available_spare_percent": health.available_spare(),
        "spare_threshold_percent": health.spare_threshold(),
        "used_percent": health.percentage_used(),
        "data_units_read": number(health.data_units_read()),
        "data_units_written": number(health.data_units_written()),
        "host_reads": number(health.host_reads()),
        "host_writes": number(health.host_writes()),
        "busy_minutes": number(health.busy_minutes()),
        "power_cycles": number(health.power_cycles()),
        "power_on_hours": number(health.power_on_hours()),
        "unsafe_shutdowns": number(health.unsafe_shutdowns()),
        "media_errors": number(health.media_errors()),
        "error_log_entries": number(health.error_entries()),
        "warning_temperature_minutes": health.warning_minutes(),
        "critical_temperature_minutes": health.critical_minutes(),
    })
}

fn warnings(warning: CriticalWarning) -> Vec<&'static str> {
    let all = [
        (warning.spare(), "available spare is below its threshold"),
        (warning.temperature(), "the temperature is above or below its threshold"),
        (warning.reliability(), "reliability is degraded"),
        (warning.read_only(), "the media is read-only"),
        (warning.backup(), "the volatile memory backup device has failed"),
        (warning.persistent_memory(), "the persistent memory region is read-only or unreliable"),
    ];
    all.into_iter().filter(|(set, _)| *set).map(|(_, words)| words).collect()
}

fn celsius(kelvins: u16) -> i32 {
    i32::from(kelvins) - 273
}

fn temperature(kelvins: u16) -> String {
    if kelvins == 0 { "not reported".into() } else { format!("{} °C", celsius(kelvins)) }
}
