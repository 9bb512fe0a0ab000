//! `onehop sdr rx`: receives samples from a board into GPU memory, where the GPU analyses them.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use onehop_gpu::Region;
use onehop_radio::Shape;
use onehop_sdr::{Counts, Measurements, Processor, Receiver, RxOptions, SampleRoute, Settings};
use serde_json::{Value, json};

use super::board::{self, BoardArg, OpenedBoard};
use super::load::CpuTime;
use super::notice::{self, SelfTestProgress};
use super::recording::{self, Content, Recording};
use super::{Packing, check_seconds, picture, route, view, why_not};
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::outputs;
use crate::report::{self, Report, ReportText};
use crate::units;

/// Maximum number of blocks that the GPU processes at once: half of the slots into which blocks are copied.
const BATCH: usize = 4;
/// Interval between reads of the GPU's results.
const SHOW_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between checks for the end while no block arrives.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Receive samples into GPU memory, and show rate, losses, level and spectrum
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop sdr rx -d 'sim:usdr?signal=chirp&rate=1M' -g emu --png spectrum.png\n  \
                  onehop sdr rx -d 'sim:usdr?signal=counter&rate=250M' -g 0 --seconds 60 --json"
)]
pub(crate) struct Args {
    #[command(flatten)]
    board: BoardArg,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    gpu: GpuArg,
    /// The route: auto (the best that works), cpu/direct or cpu/pinned
    #[arg(long, value_name = "ROUTE", default_value = "auto", value_parser = route)]
    route: std::option::Option<SampleRoute>,
    /// How long to receive: 2, 0.5, 500ms
    #[arg(long, value_name = "TIME", default_value = "2", value_parser = check_seconds)]
    seconds: f64,
    /// Multiply recorded samples by this, and record them as cf32
    #[arg(long, value_name = "FACTOR", requires = "out")]
    gain: Option<f32>,
    /// Keep the DC component in the spectrum
    #[arg(long)]
    keep_dc: bool,
    /// Bins of the spectrum: a power of two from 64 to 4096
    #[arg(long, value_name = "BINS", default_value = "2048", value_parser = bins)]
    bins: u32,
    /// Write the spectrum as a picture
    #[arg(long, value_name = "FILE", value_parser = outputs::parser())]
    png: Option<PathBuf>,
    /// Write the samples from GPU memory as the board sent them, to NAME.sigmf-data and NAME.sigmf-meta; ci12 as ci16
    #[arg(long, value_name = "NAME", value_parser = outputs::parser_with(&recording::ENDINGS))]
    out: Option<PathBuf>,
}

fn bins(text: &str) -> std::result::Result<u32, String> {
    let bins = text.parse().ok().filter(|bins: &u32| bins.is_power_of_two() && (64..=4096).contains(bins));
    bins.ok_or_else(|| "expected a power of two from 64 to 4096".into())
}

/// The result of a reception.
struct Received {
    measurements: Measurements,
    counts: Counts,
    crc: Option<u32>,
    /// Numbers of checked and of wrong samples.
    checked: Option<(u64, u64)>,
    first_wrong: Option<(u32, u32)>,
    /// How long samples flowed, and the time until the last one was analysed.
    took: Duration,
    total: Duration,
    cpu: CpuTime,
    gpu_time: Duration,
    stopped: bool,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    if args.gain.is_some_and(|gain| !gain.is_finite() || gain == 0.0) {
        return Err(CliError::Usage("--gain must be finite and not zero".into()));
    }
    let opened = board::open(&args.board)?;
    let gpu = gpus::choose(&args.gpu)?;
    let shape = args.packing.shape(&opened.session.card().profile.rx, opened.rate)?;
    let timeout = opened.timeout(shape.samples());
    let options = RxOptions { shape, only: args.route, self_test: Some(timeout) };
    let mut receiver = {
        let mut progress = SelfTestProgress::new(context, shape);
        let watch = &mut |filled| progress.update(filled);
        Receiver::open_watched(&opened.session, &gpu.gpu, &options, watch).map_err(notice::self_test_error)?
    };
    let settings = Settings {
        remove_dc: !args.keep_dc,
        log: args.bins.ilog2(),
        counter: opened.counter,
        ..Settings::default()
    };
    let processor = Processor::new(&gpu.gpu, shape, settings)?;
    let before = opened.stats();
    let received = receive(args, context, &opened, &mut receiver, processor)?;
    let after = opened.stats();
    if let Some(path) = &args.png {
        picture::write(path, &received.measurements.spectrum)?;
    }
    let samples = u64::from(shape.samples());
    let sent = after.zip(before).map(|(after, before)| (after.sent_blocks - before.sent_blocks) * samples);
    let summary =
        RxSummary { opened: &opened, gpu: &gpu, receiver: &receiver, shape, received: &received, sent };
    if let Some(warning) = summary.warning() {
        report::warn(&warning);
    }
    let report = Report::new(summary.document(args), summary.text(args))?;
    Ok(report.failed(summary.failure()))
}

fn receive(
    args: &Args,
    context: &CommandContext,
    opened: &OpenedBoard,
    receiver: &mut Receiver,
    mut processor: Processor,
) -> Result<Received> {
    let Some(shape) = receiver.shape() else {
        return Err(CliError::Failed("the board failed to stop and keeps its ring".into()));
    };
    let timeout = opened.timeout(shape.samples());
    let hardware = &opened.session.card().name;
    let content = Content { format: shape.format, gain: args.gain, rate: opened.rate, hardware };
    let mut recording = args.out.as_ref().map(|path| Recording::create(path, &content)).transpose()?;
    let (mut crc, mut measurements, mut checked, mut first_wrong) =
        (0, Measurements::default(), (0, 0), None);
    let mut status = StatusLine::new(context.json);
    receiver.start()?;
    let (start, cpu) = (Instant::now(), CpuTime::now());
    let (mut last_update, mut last_block, mut flowing) = (start, start, true);
    let mut took = Duration::ZERO;
    loop {
        let long_enough = receiver.counts().blocks > 0 && start.elapsed().as_secs_f64() >= args.seconds;
        if flowing && (long_enough || context.stop.is_set()) {
            receiver.stop()?;
            (flowing, took) = (false, start.elapsed());
        }
        let Some(block) = receiver.acquire(POLL_INTERVAL)? else {
            if !flowing {
                break;
            }
            if last_block.elapsed() >= timeout {
                let waited = units::time(timeout);
                return Err(CliError::Failed(format!("the board sent nothing for {waited}")));
            }
            continue;
        };
        let mut batch = vec![block.hold()];
        last_block = Instant::now();
        // A recording processes and writes one block at a time.
        while recording.is_none() && batch.len() < BATCH {
            let Some(more) = receiver.acquire(Duration::ZERO)? else { break };
            batch.push(more.hold());
        }
        let mut parts = Vec::with_capacity(batch.len());
        for block in &batch {
            parts.append(&mut block.parts()?);
        }
        let parts: Vec<_> = parts.iter().map(|(memory, first)| (memory, *first)).collect();
        match &mut recording {
            None => processor.process_all(&parts)?,
            Some(recording) => {
                for part in parts {
                    crc = record(recording, &mut processor, part, crc)?;
                }
            }
        }
        for _ in batch {
            receiver.release();
        }
        if last_update.elapsed() >= SHOW_INTERVAL || !flowing {
            last_update = Instant::now();
            collect_results(&mut processor, &mut measurements, &mut checked, &mut first_wrong)?;
            status.show(&measurements, &receiver.counts(), start.elapsed(), shape);
        }
    }
    collect_results(&mut processor, &mut measurements, &mut checked, &mut first_wrong)?;
    if let Some(recording) = recording.take() {
        recording.finish()?;
    }
    Ok(Received {
        counts: receiver.counts(),
        crc: args.out.as_ref().map(|_| crc),
        checked: measurements.wrong.map(|_| checked),
        first_wrong,
        took,
        total: start.elapsed(),
        cpu: CpuTime::now().since(cpu),
        gpu_time: processor.gpu_time(),
        stopped: context.stop.check().is_err(),
        measurements,
    })
}

/// Processes samples and writes them to the recording; returns the updated checksum.
fn record(
    recording: &mut Recording,
    processor: &mut Processor,
    (memory, first): (&Region, u64),
    crc: u32,
) -> Result<u32> {
    processor.process(memory, first)?;
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    recording.add(first, &bytes)?;
    Ok(crc32c::crc32c_append(crc, &bytes))
}

/// Reads new results from the GPU, if there are any.
fn collect_results(
    processor: &mut Processor,
    measurements: &mut Measurements,
    checked: &mut (u64, u64),
    first_wrong: &mut Option<(u32, u32)>,
) -> Result<()> {
    let new = processor.take()?;
    if new.samples > 0 {
        checked.0 += new.samples;
        checked.1 += new.wrong.unwrap_or(0);
        *first_wrong = first_wrong.or(new.first_wrong);
        *measurements = new;
    }
    Ok(())
}

/// A status line that is redrawn on a terminal.
struct StatusLine(bool);

impl StatusLine {
    fn new(json: bool) -> Self {
        Self(!json && crate::terminal::has_bars())
    }

    fn show(&mut self, measurements: &Measurements, counts: &Counts, time: Duration, shape: Shape) {
        if self.0 {
            let rate = counts.delivered as f64 * f64::from(shape.format.bytes())
                / 1e9
                / time.as_secs_f64().max(1e-9);
            let words = format!("{rate:.2} GB/s, {} lost, {:.1} dBFS", counts.lost, measurements.level);
            let _ = write!(std::io::stderr(), "\r{} {words:<40}", view::line(&measurements.spectrum));
        }
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        if self.0 {
            let _ = writeln!(std::io::stderr());
        }
    }
}

/// The data of the report.
struct RxSummary<'a> {
    opened: &'a OpenedBoard,
    gpu: &'a Chosen,
    receiver: &'a Receiver,
    shape: Shape,
    received: &'a Received,
    /// Samples sent, as counted by a simulated board.
    sent: Option<u64>,
}

impl RxSummary<'_> {
    fn bytes(&self) -> u64 {
        self.received.counts.delivered * u64::from(self.shape.format.bytes())
    }

    fn gbps(&self) -> f64 {
        self.bytes() as f64 / 1e9 / self.seconds()
    }

    fn seconds(&self) -> f64 {
        self.received.took.as_secs_f64().max(1e-9)
    }

    /// A fraction of the total time.
    fn share(&self, time: Duration) -> f64 {
        time.as_secs_f64() / self.received.total.as_secs_f64().max(1e-9)
    }

    fn simulated(&self) -> Vec<&'static str> {
        let parts = [(self.opened.session.card().simulated, "board"), (self.gpu.gpu.simulated(), "gpu")];
        parts.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect()
    }

    /// Frequency and level of the strongest bin.
    fn strongest(&self) -> (f64, f64) {
        let spectrum = &self.received.measurements.spectrum;
        let top = spectrum.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
        let rate = self.rate();
        ((top.0 as f64 / spectrum.len().max(1) as f64 - 0.5) * rate, top.1)
    }

    /// Samples per second: the board's rate if known, otherwise the measured one.
    fn rate(&self) -> f64 {
        let counts = self.received.counts;
        self.opened.rate.unwrap_or((counts.delivered + counts.lost) as f64 / self.seconds())
    }

    /// A warning about lost samples.
    fn warning(&self) -> Option<String> {
        let Counts { delivered, lost, gaps, partial, .. } = self.received.counts;
        if lost == 0 {
            return None;
        }
        let share = lost as f64 / (delivered + lost) as f64 * 100.0;
        let why = if partial > 0 {
            format!(
                "bursts are missing in {partial} blocks, because the board's FIFO overflowed: lower the rate"
            )
        } else if self.gpu.gpu.simulated() && self.share(self.received.gpu_time) > 0.5 {
            "the emulated GPU is too slow for this rate: lower the rate, or use a GPU (-g 0)".into()
        } else {
            "blocks were not processed in time: use larger buffers (--buffer), or lower the rate".into()
        };
        let gaps = units::count(gaps, "gap");
        Some(format!("{lost} samples ({share:.1} %) were lost in {gaps}; {why}"))
    }

    fn verified(&self) -> Option<bool> {
        self.received.checked.map(|(_, wrong)| wrong == 0)
    }

    fn adds_up(&self) -> bool {
        self.sent.is_none_or(|sent| self.received.counts.delivered + self.received.counts.lost == sent)
    }

    fn failure(&self) -> Option<CliError> {
        if let (Some((checked, wrong @ 1..)), Some((expected, found))) =
            (self.received.checked, self.received.first_wrong)
        {
            return Some(CliError::Mismatch(format!(
                "{wrong} of {checked} samples in GPU memory differ from those sent, first {found:#x} instead of {expected:#x}"
            )));
        }
        if !self.adds_up() {
            let Counts { delivered, lost, .. } = self.received.counts;
            return Some(CliError::Failed(format!(
                "{} were sent, {delivered} delivered and {lost} reported lost",
                self.sent.unwrap_or_default()
            )));
        }
        let errors = self.received.counts.clock_errors;
        if errors > 0 {
            return Some(CliError::Failed(format!(
                "sample numbers are wrong: the board's clock differs in {}, or more samples were lost than the board can report",
                units::count(errors, "block")
            )));
        }
        if let Some(broken) = self.opened.violation_error() {
            return Some(broken);
        }
        self.received.stopped.then_some(CliError::Stopped(super::BOARD_IDLE))
    }

    fn document(&self, args: &Args) -> Value {
        let Received { measurements, counts, crc, took, cpu, gpu_time, .. } = self.received;
        let share = |time: &Duration| self.share(*time);
        let (strongest, level) = self.strongest();
        let direct = self.receiver.route() == SampleRoute::Direct;
        json!({
            "device": self.opened.session.card().name,
            "bytes": self.bytes(),
            "seconds": took.as_secs_f64(),
            "gbps": self.gbps(),
            "route": self.receiver.route().name(),
            "initiator": "cpu",
            "simulated": self.simulated(),
            "placement": { "sq": null, "cq": "host", "data": if direct { "vram" } else { "host" } },
            "gpu": self.gpu.gpu.name(),
            "why_not_better": why_not(self.receiver.why_not_better()),
            "crc32c": crc.map(|crc| format!("{crc:08x}")),
            "verified": self.verified(),
            "commands": counts.blocks,
            "retries": 0,
            "errors": counts.clock_errors,
            "format": self.shape.format.name(),
            "block_bytes": self.shape.bytes(),
            "samples": counts.delivered,
            "lost_samples": counts.lost,
            "gaps": counts.gaps,
            "partial_blocks": counts.partial,
            "warnings": self.warning().into_iter().collect::<Vec<_>>(),
            "sent_samples": self.sent,
            "samples_per_second": counts.delivered as f64 / self.seconds(),
            "level_dbfs": measurements.level,
            "peak_dbfs": measurements.peak,
            "dc": measurements.dc,
            "strongest": { "hz": strongest, "dbfs": level },
            "spectrum_dbfs": measurements.spectrum,
            "cpu_load": share(&cpu.process),
            "board_cpu_load": self.opened.simulation.as_ref().map(|_| share(&cpu.board)),
            "gpu_load": share(gpu_time),
            "board_behind_seconds": self.opened.stats().map(|stats| stats.most_behind.as_secs_f64()),
            "out": args.out.as_ref().map(|path| path.display().to_string()),
            "png": args.png.as_ref().map(|path| path.display().to_string()),
        })
    }

    fn text(&self, args: &Args) -> ReportText {
        let Received { measurements, counts, cpu, gpu_time, .. } = self.received;
        let card = self.opened.session.card();
        let mut text = ReportText::default();
        text.row("board", format!("{}{}", card.name, if card.simulated { " (simulated)" } else { "" }));
        text.row("gpu", format!("{}: {}", self.gpu.gpu.name(), self.gpu.why));
        text.row(
            "route",
            match self.receiver.route() {
                SampleRoute::Direct => "cpu/direct: the board wrote the ring in GPU memory",
                SampleRoute::Pinned => {
                    "cpu/pinned: the board wrote a ring in host memory, and blocks were copied from there"
                }
            },
        );
        for no in self.receiver.why_not_better() {
            text.row("", format!("not {}: {}. {}", no.route.name(), no.reason, no.fix));
        }
        text.row(
            "received",
            format!(
                "{} samples ({}) in {:.2} s: {:.3} MS/s, {:.3} GB/s{}",
                counts.delivered,
                self.shape.format,
                self.seconds(),
                counts.delivered as f64 / self.seconds() / 1e6,
                self.gbps(),
                if self.simulated().is_empty() { "" } else { " (simulated: says nothing about hardware)" },
            ),
        );
        let is_patient = self.opened.simulation.as_ref().is_some_and(|model| model.config().patient);
        let sum = match (self.sent, self.adds_up()) {
            (None, _) => "",
            (Some(_), true) if is_patient => "; the board waits (patient=1), so it cannot lose samples",
            (Some(_), true) => "; received and lost add up to the samples sent",
            (Some(_), false) => "; RECEIVED AND LOST DO NOT ADD UP TO THE SAMPLES SENT",
        };
        text.row(
            "lost",
            format!("{} in {}{sum}", units::count(counts.lost, "sample"), units::count(counts.gaps, "gap")),
        );
        text.row(
            "level",
            format!(
                "{:.1} dBFS, peak {:.1} dBFS, dc {:+.4} {:+.4}",
                measurements.level, measurements.peak, measurements.dc[0], measurements.dc[1]
            ),
        );
        let (hz, level) = self.strongest();
        text.row("strongest", format!("{:+.6} MHz at {level:.1} dBFS", hz / 1e6));
        let share = |time: &Duration| self.share(*time) * 100.0;
        let simulation = self.opened.simulation.as_ref();
        let board = simulation
            .map_or(String::new(), |_| format!(", the simulated board's thread {:.0} %", share(&cpu.board)));
        text.row("load", format!("CPU {:.0} %{board}, GPU {:.1} %", share(&cpu.process), share(gpu_time)));
        text.row(
            "verified",
            match self.received.checked {
                Some((checked, 0)) => {
                    format!("yes: the GPU compared each of {checked} samples with its number")
                }
                Some((_, wrong)) => format!("NO: {wrong} samples differ from those sent"),
                None => "not possible with this signal (signal=counter can be checked)".into(),
            },
        );
        let recorded =
            args.out.iter().flat_map(|path| recording::ENDINGS.map(|e| outputs::with_ending(path, e)));
        for path in recorded.chain(args.png.clone()) {
            text.row("written", path.display());
        }
        for line in view::chart(&measurements.spectrum, self.rate()) {
            text.line(line);
        }
        text
    }
}
