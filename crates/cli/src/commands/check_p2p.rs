//! `onehop drive check-p2p`: what this machine lets a drive and a GPU do to each other, step by step, by transfers whose
//! bytes are compared.

mod registers;
mod routes;
mod steps;

use std::time::Duration;

use serde_json::json;

use crate::commands::Context;
use crate::drives::{self, DriveArg};
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::report::{Report, Text};
use crate::units;
use steps::{Bench, Row, State};

/// Try each step between a drive and a GPU, in each direction, and show which routes work here; nothing is written
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop drive check-p2p -d 0000:0b:00.0 -g 0\n  onehop drive check-p2p -d 'sim:mem:64M?cmb=16M' -g emu\n\n\
                  Only blocks are read, and compared; the drive's contents stay as they are. The GPU reads the drive's \
                  registers on request only (--gpu-reads-registers), after everything else. The exit code is 1 if a step \
                  gave wrong bytes or the drive does not serve the CPU, before or afterwards, and 0 if all was told that \
                  there is to tell."
)]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    #[command(flatten)]
    gpu: GpuArg,
    /// The block that is read
    #[arg(long, value_name = "N", value_parser = units::parse_number, default_value = "0")]
    lba: u64,
    /// The namespace
    #[arg(long, value_name = "N", default_value_t = 1)]
    nsid: u32,
    /// Have the GPU read the drive's registers (BAR0), too, as the last step. No route needs it. A root complex or a switch
    /// that loses such reads may take the drive's link down, until the power is switched off and on, or leave the GPU
    /// waiting until it is reset; on a healthy one nothing changes. The first answer of all ones ends the step, and a GPU that
    /// does not answer is given up after the time limit and ten seconds
    #[arg(long)]
    gpu_reads_registers: bool,
    /// How long a command may take before its step counts as failed
    #[arg(long, value_name = "TIME", value_parser = units::parse_time, default_value = "2s")]
    timeout: Duration,
}

/// Runs it.
pub(crate) fn run(args: &Args, context: &Context) -> Result<Report> {
    let gpu = gpus::choose(&args.gpu)?;
    let port = drives::find(&args.drive.drive)?.backend;
    let (drive, simulated) = (port.name.clone(), port.simulated);
    let mapper = port.mapper.name().to_owned();
    let mut bench =
        Bench::new(port, gpu.gpu.clone(), (args.nsid, args.lba), args.timeout, args.gpu_reads_registers);
    let rows = bench.run(&context.stop)?;
    let gone = bench.gone();
    drop(bench);
    let routes = routes::of(&rows);
    let mut text = Text::default();
    text.row(
        "drive",
        format!("{drive}{}, reaches memory by {mapper}", if simulated { " (simulated)" } else { "" }),
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
    let failure = failure.or_else(|| steps::first_needed(&rows).map(CliError::Failed));
    let failure = failure.or_else(|| gone.map(CliError::Drive));
    let mut simulated: Vec<_> = simulated.then_some("drive").into_iter().collect();
    simulated.extend(gpu.gpu.simulated().then_some("gpu"));
    let document = json!({
        "drive": drive, "gpu": gpu.gpu.name(), "simulated": simulated, "mapper": mapper,
        "steps": rows, "routes": routes,
    });
    Ok(Report::new(document, text)?.failed(failure))
}

fn describe(row: &Row, text: &mut Text) {
    let took =
        if row.state == State::Untested { String::new() } else { format!(", {}", units::time(row.took)) };
    let why = if row.why.is_empty() { String::new() } else { format!(": {}", row.why) };
    text.line(format_args!("{:<9} {}{took}{why}", row.state.name(), row.what));
}
