//! `onehop drive check-p2p`: tests the accesses between a drive and a GPU step by step, by transfers whose bytes are
//! compared.

mod registers;
mod routes;
mod steps;

use std::time::Duration;

use serde_json::json;

use crate::commands::CommandContext;
use crate::drives::{self, DriveArg};
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::report::{Report, ReportText};
use crate::units;
use steps::{CheckSetup, StepResult, StepState};

/// Test each step between a drive and a GPU in both directions, and show which routes work; writes nothing
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop drive check-p2p -d 0000:0b:00.0 -g 0\n  onehop drive check-p2p -d 'sim:mem:64M?cmb=16M' -g emu\n\n\
                  It only reads blocks and compares them. The GPU reads the drive's registers only with \
                  --gpu-reads-registers, as the last step. The exit code is 1 if a step delivered wrong bytes, or if the \
                  drive failed to serve the CPU before or afterwards; otherwise 0."
)]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    #[command(flatten)]
    gpu: GpuArg,
    /// The block to read
    #[arg(long, value_name = "N", value_parser = units::parse_number, default_value = "0")]
    lba: u64,
    /// The namespace
    #[arg(long, value_name = "N", default_value_t = 1)]
    nsid: u32,
    /// Also let the GPU read the drive's registers (BAR0), as the last step. No route needs it. A root complex or
    /// switch that loses such reads may take the drive's link down until a power cycle, or hang the GPU until it is
    /// reset
    #[arg(long)]
    gpu_reads_registers: bool,
    /// How long a command may take before its step fails
    #[arg(long, value_name = "TIME", value_parser = units::parse_time, default_value = "2s")]
    timeout: Duration,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let gpu = gpus::choose(&args.gpu)?;
    let port = drives::find(&args.drive.drive, &context.stop)?.backend;
    let (drive, simulated) = (port.name.clone(), port.simulated);
    let mapper = port.mapper.name().to_owned();
    let mut setup =
        CheckSetup::new(port, gpu.gpu.clone(), (args.nsid, args.lba), args.timeout, args.gpu_reads_registers);
    let rows = setup.run(&context.stop)?;
    let gone = setup.gone();
    drop(setup);
    let routes = routes::verdicts(&rows);
    let mut text = ReportText::default();
    text.row(
        "drive",
        format!("{drive}{}, memory mapped by {mapper}", if simulated { " (simulated)" } else { "" }),
    );
    text.row("gpu", format!("{} ({})", gpu.gpu.name(), gpu.why));
    for row in &rows {
        describe(row, &mut text);
    }
    for route in &routes {
        let direction = if route.direction == "to_gpu" { "to the GPU" } else { "from the GPU" };
        text.line(format_args!(
            "  {:<11} {direction:<13} {:<9} {}",
            route.route, route.verdict, route.reason
        ));
    }
    let wrong = rows.iter().find(|row| row.wrong_bytes);
    let failure = wrong.map(|row| CliError::Mismatch(format!("{}: {}", row.what, row.why)));
    let failure = failure.or_else(|| steps::first_required_failure(&rows).map(CliError::Failed));
    let failure = failure.or_else(|| gone.map(CliError::Drive));
    let mut simulated: Vec<_> = simulated.then_some("drive").into_iter().collect();
    simulated.extend(gpu.gpu.simulated().then_some("gpu"));
    let document = json!({
        "drive": drive, "gpu": gpu.gpu.name(), "simulated": simulated, "mapper": mapper,
        "steps": rows, "routes": routes,
    });
    Ok(Report::new(document, text)?.failed(failure))
}

fn describe(row: &StepResult, text: &mut ReportText) {
    let took =
        if row.state == StepState::Untested { String::new() } else { format!(", {}", units::time(row.took)) };
    let why = if row.why.is_empty() { String::new() } else { format!(": {}", row.why) };
    text.line(format_args!("{:<9} {}{took}{why}", row.state.name(), row.what));
}
