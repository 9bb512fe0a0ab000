//! `onehop bench queue`: what a command costs, in nanoseconds and cycles.

use onehop_bench::{Clock, CpuQueue, NULL_DRIVE, Row};
use serde_json::json;

use crate::commands::Context;
use crate::drives;
use crate::error::{CliError, Result};
use crate::report::{Report, Text};
use crate::units;

/// Measure what queues cost
#[derive(clap::Args)]
#[command(subcommand_required = true, after_help = "Example:\n  onehop bench queue")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Queue(QueueArgs),
}

/// Measure submission and completion by the CPU: cycles and nanoseconds a command, commands per second of one core
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  onehop bench queue --depth 1,64 --json\n\nWithout -d the null controller is \
                        measured against: it answers at once and moves nothing, within the doorbell write, so that \
                        what is left is the driver's own cost. Its own share is printed beside it."
)]
struct QueueArgs {
    /// The drive to measure with: the null controller, or sim:… or qtest:…
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    drive: Option<String>,
    /// Commands in flight, one row each
    #[arg(long, value_delimiter = ',', default_value = "1,2,8,32,64,256", value_parser = clap::value_parser!(u32).range(1..=32767))]
    depth: Vec<u32>,
    /// Bytes of a command
    #[arg(long, default_value = "4K", value_parser = units::parse_size)]
    block: u64,
}

/// Runs it.
pub(crate) fn run(args: &Args, context: &Context) -> Result<Report> {
    let What::Queue(args) = &args.what;
    let null = format!("sim:{NULL_DRIVE}");
    let drive = args.drive.as_deref().unwrap_or(&null);
    let clock = Clock::calibrate();
    let mut rows = Vec::new();
    for depth in &args.depth {
        context.stop.check()?;
        let queue = CpuQueue::open(drives::find(drive)?.port, *depth, args.block)?;
        rows.push(queue.row(&clock)?);
    }
    let document = json!({ "drive": drive, "cycles_per_ns": clock.ghz(), "rows": rows });
    Report::new(document, table(drive, &clock, &rows))
}

fn table(drive: &str, clock: &Clock, rows: &[Row]) -> Text {
    let mut text = Text::default();
    text.row("drive", drive);
    text.row("clock", format!("{:.2} GHz (time-stamp counter)", clock.ghz()));
    text.line("");
    text.line("depth   ns/command  M/s/core  submit cyc  complete cyc   batch p50 ns   batch p99 ns   limit");
    for row in rows {
        let limit = row.controller_ns.map_or("the drive".to_owned(), |ns| format!("controller {ns:.0} ns"));
        text.line(format!(
            "{:>5} {:>12.1} {:>9.2} {:>11.0} {:>13.0} {:>14.0} {:>14.0}   {limit}",
            row.depth,
            row.ns_per_command,
            row.iops / 1e6,
            row.cycles_submit,
            row.cycles_complete,
            row.p50_ns,
            row.p99_ns
        ));
    }
    text
}

impl From<onehop_bench::Error> for CliError {
    fn from(error: onehop_bench::Error) -> Self {
        match error {
            onehop_bench::Error::Drive(error) => error.into(),
            onehop_bench::Error::Sim(error) => error.into(),
            onehop_bench::Error::Setup(why) => Self::Usage(why),
            wrong @ onehop_bench::Error::WrongData { .. } => Self::Mismatch(wrong.to_string()),
        }
    }
}
