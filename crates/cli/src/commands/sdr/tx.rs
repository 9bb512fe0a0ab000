//! `onehop sdr tx`: sends samples from a file to a board, through GPU memory.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use onehop_radio::BUFFERS;
use onehop_sdr::{SampleRoute, Transmitter, TxOptions};
use serde_json::json;

use super::board::{self, BoardArg, OpenedBoard};
use super::recording::Recorded;
use super::{route, samples_for, why_not};
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::report::{self, Report, ReportText};
use crate::units;

/// Interval between checks for Ctrl-C while no buffer is free.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Send samples from GPU memory to a board
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop sdr tx --in recording.sigmf-data -g emu")]
pub(crate) struct Args {
    #[command(flatten)]
    board: BoardArg,
    #[command(flatten)]
    gpu: GpuArg,
    /// Samples of 16 bits, I first, little-endian: ci16, the data of a SigMF recording
    #[arg(long = "in", value_name = "FILE")]
    input: PathBuf,
    /// Buffer size in bytes [default: samples of 1/32 s, at most 64K]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    buffer: Option<u64>,
    /// The route: auto (the best that works), cpu/direct or cpu/pinned
    #[arg(long, value_name = "ROUTE", default_value = "auto", value_parser = route)]
    route: std::option::Option<SampleRoute>,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let recorded = Recorded::of(&args.input)?;
    let mut file = File::open(&args.input).map_err(|e| CliError::file("opening", &args.input, e))?;
    let opened = board::open(&args.board)?;
    if let Some(warning) = recorded.and_then(|recorded| recorded.rate_mismatch(opened.rate)) {
        report::warn(&warning);
    }
    let gpu = gpus::choose(&args.gpu)?;
    let card = opened.session.card();
    let default = u64::from(samples_for(opened.rate).saturating_mul(4)).min(64 << 10);
    let bytes = u32::try_from(args.buffer.unwrap_or(default)).unwrap_or(u32::MAX);
    let timeout = opened.timeout(bytes.min(card.profile.tx.max_bytes) / 4);
    let options = TxOptions { bytes, only: args.route, self_test: timeout };
    let mut transmitter = Transmitter::open(&opened.session, &gpu.gpu, &options)?;
    let Sent { bytes: sent, crc, seconds } = send(args, context, &mut file, &opened, &mut transmitter)?;
    let is_direct = transmitter.route() == SampleRoute::Direct;
    let mut text = ReportText::default();
    text.row("board", format!("{}{}", card.name, if card.simulated { " (simulated)" } else { "" }));
    text.row("gpu", format!("{}: {}", gpu.gpu.name(), gpu.why));
    text.row(
        "route",
        format!(
            "{}: the board reads {} memory",
            transmitter.route().name(),
            if is_direct { "GPU" } else { "host" }
        ),
    );
    for no in transmitter.why_not_better() {
        text.row("", format!("not {}: {}. {}", no.route.name(), no.reason, no.fix));
    }
    let rate = sent as f64 / 4e6 / seconds.max(1e-9);
    text.row("sent", format!("{sent} bytes in {seconds:.2} s: {rate:.2} million samples per second"));
    text.row("late", transmitter.late());
    let simulated: Vec<_> = [(card.simulated, "board"), (gpu.gpu.simulated(), "gpu")]
        .into_iter()
        .filter(|(is, _)| *is)
        .map(|(_, n)| n)
        .collect();
    let document = json!({
        "device": card.name,
        "bytes": sent,
        "seconds": seconds,
        "gbps": sent as f64 / 1e9 / seconds.max(1e-9),
        "route": transmitter.route().name(),
        "initiator": "cpu",
        "simulated": simulated,
        "placement": { "sq": null, "cq": "host", "data": if is_direct { "vram" } else { "host" } },
        "gpu": gpu.gpu.name(),
        "why_not_better": why_not(transmitter.why_not_better()),
        "crc32c": format!("{crc:08x}"),
        "verified": null,
        "commands": transmitter.posted(),
        "retries": 0,
        "errors": 0,
        "late": transmitter.late(),
    });
    Ok(Report::new(document, text)?.failed(opened.violation_error()))
}

/// The result of sending.
struct Sent {
    bytes: u64,
    crc: u32,
    seconds: f64,
}

fn send(
    args: &Args,
    context: &CommandContext,
    file: &mut File,
    opened: &OpenedBoard,
    transmitter: &mut Transmitter,
) -> Result<Sent> {
    let mut chunk = vec![0; transmitter.bytes() as usize];
    let samples = transmitter.bytes() / 4;
    let (start, mut bytes, mut crc) = (Instant::now(), 0, 0);
    loop {
        context.stop.check()?;
        let count = fill(file, &mut chunk).map_err(|e| CliError::file("reading", &args.input, e))?;
        if !count.is_multiple_of(4) {
            return Err(CliError::Usage(format!("{} ends within a sample", args.input.display())));
        }
        if count == 0 {
            break;
        }
        wait_for(context, opened.timeout(samples), |limit| Ok(transmitter.acquire(limit)?.is_some()))?;
        let block = transmitter.acquire(Duration::ZERO)?.ok_or_else(no_event)?;
        block.memory().write(0, &chunk[..count])?;
        block.submit((count / 4) as u32, None)?;
        crc = crc32c::crc32c_append(crc, &chunk[..count]);
        bytes += count as u64;
    }
    // All buffers may still be waiting to be played.
    wait_for(context, opened.timeout(BUFFERS * samples), |limit| transmitter.drain(limit))?;
    Ok(Sent { bytes, crc, seconds: start.elapsed().as_secs_f64() })
}

/// Waits until `is_done`, Ctrl-C, or the timeout.
fn wait_for(
    context: &CommandContext,
    timeout: Duration,
    mut is_done: impl FnMut(Duration) -> onehop_sdr::Result<bool>,
) -> Result<()> {
    let start = Instant::now();
    while !is_done(POLL_INTERVAL)? {
        context.stop.check()?;
        if start.elapsed() >= timeout {
            return Err(no_event());
        }
    }
    Ok(())
}

fn no_event() -> CliError {
    CliError::Failed("the board accepts no samples: it has reported no event for a long time".into())
}

/// Reads until the chunk is full or the file ends.
fn fill(file: &mut File, chunk: &mut [u8]) -> std::io::Result<usize> {
    let mut done = 0;
    while done < chunk.len() {
        match file.read(&mut chunk[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}
