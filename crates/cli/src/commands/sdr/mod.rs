//! `onehop sdr`: moves samples between an SDR board and GPU memory.

pub(crate) mod info;
pub(crate) mod rx;
pub(crate) mod selftest;
pub(crate) mod tx;

mod board;
mod load;
mod notice;
mod picture;
mod recording;
mod view;

pub(crate) use board::simulated;

use clap::Subcommand;
use onehop_radio::{BUFFERS, BoardLimits, Format, Shape};
use onehop_sdr::SampleRoute;
use onehop_transfer::BetterRoute;

use super::CommandContext;
use crate::error::{CliError, Result};
use crate::report::Report;
use crate::units;

#[derive(Subcommand)]
pub(crate) enum SdrCommand {
    Info(info::Args),
    Rx(rx::Args),
    Tx(tx::Args),
    Selftest(selftest::Args),
}

pub(crate) fn run(command: &SdrCommand, context: &CommandContext) -> Result<Report> {
    let result = match command {
        SdrCommand::Info(args) => info::run(args),
        SdrCommand::Rx(args) => rx::run(args, context),
        SdrCommand::Tx(args) => tx::run(args, context),
        SdrCommand::Selftest(args) => selftest::run(args, context),
    };
    result.map_err(|error| error.or_stopped(BOARD_IDLE))
}

/// What a stop message says about the board.
const BOARD_IDLE: &str = "the board is idle";

/// How samples are packed.
#[derive(Clone, clap::Args)]
struct Packing {
    /// The format of samples on the wire: ci16 or ci12
    #[arg(long, value_name = "FORMAT", default_value = "ci16", value_parser = format)]
    format: Format,
    /// Size of each of the 32 buffers [default: samples of 1/32 s if the rate is known; otherwise the largest possible]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    buffer: Option<u64>,
}

/// Minimum number of samples in a buffer of the default size: enough for a spectrum.
const MIN_SAMPLES: u32 = 1024;

/// The default number of samples in a buffer: the ring wraps in about a second, so the self-test is short.
fn samples_for(rate: Option<f64>) -> u32 {
    rate.map_or(u32::MAX, |rate| (rate / f64::from(BUFFERS)) as u32).max(MIN_SAMPLES)
}

impl Packing {
    fn shape(&self, limits: &BoardLimits, rate: Option<f64>) -> Result<Shape> {
        let Some(bytes) = self.buffer else {
            let bytes = samples_for(rate).saturating_mul(self.format.bytes()).min(limits.max_bytes);
            let largest = Shape::largest(self.format, limits);
            return Ok(Shape::of_bytes(self.format, limits, bytes).unwrap_or(largest));
        };
        let wrong = |why: String| CliError::Usage(format!("--buffer {bytes}: {why}"));
        if bytes > u64::from(limits.max_bytes) {
            return Err(wrong(format!("the board's buffers hold at most {} bytes", limits.max_bytes)));
        }
        Shape::of_bytes(self.format, limits, bytes as u32).map_err(|broken| wrong(broken.to_string()))
    }
}

fn format(text: &str) -> std::result::Result<Format, String> {
    let found = Format::ALL.into_iter().find(|format| format.name() == text);
    found.ok_or_else(|| "formats are ci16 and ci12".into())
}

/// Parses `--route`; `None` is the best route that works.
fn route(text: &str) -> std::result::Result<Option<SampleRoute>, String> {
    if text == "auto" {
        return Ok(None);
    }
    let found = SampleRoute::BEST_FIRST.into_iter().find(|route| route.name() == text);
    found.map(Some).ok_or_else(|| "routes of samples are auto, cpu/direct and cpu/pinned".into())
}

fn why_not(list: &[onehop_sdr::UnavailableRoute]) -> Vec<BetterRoute> {
    let one = |no: &onehop_sdr::UnavailableRoute| BetterRoute {
        route: no.route.name().into(),
        reason: no.reason.clone(),
        fix: no.fix.clone(),
    };
    list.iter().map(one).collect()
}

fn check_seconds(text: &str) -> std::result::Result<f64, String> {
    let (number, unit) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 1e-3),
        (None, number) => (number.unwrap_or(text), 1.0),
    };
    let seconds = number.parse().ok().map(|number: f64| number * unit);
    let seconds = seconds.filter(|seconds| (0.01..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| "expected a time from 0.01 to 86400 seconds, such as 2, 2s or 500ms".into())
}
