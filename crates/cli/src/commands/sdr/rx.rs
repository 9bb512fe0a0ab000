//! `onehop sdr rx`: samples from a board into GPU memory, analysed by the GPU.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use onehop_gpu::Region;
use onehop_radio::Shape;
use onehop_sdr::{Counts, Measurements, Processor, Receiver, RxOptions, SampleRoute, Settings};
use serde_json::{Value, json};

use super::board::{self, BoardArg, OpenedBoard};
use super::load::CpuTime;
use super::notice::{self, Notice};
use super::recording::{self, Content, Recording};
use super::{Packing, check_seconds, picture, route, view, why_not};
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::outputs;
use crate::report::{self, Report, ReportText};
use crate::units;

/// Blocks that the GPU is given at once at most, when several have arrived: half of those that can be on their way to it.
const BATCH: usize = 4;
/// How often the GPU's results are read.
const SHOW_INTERVAL: Duration = Duration::from_millis(250);
/// How often the end is checked for while no block arrives.
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
    /// Write the samples back out of GPU memory as the board sent them, to NAME.sigmf-data and NAME.sigmf-meta; ci12 as ci16
    #[arg(long, value_name = "NAME", value_parser = outputs::parser_with(&recording::ENDINGS))]
    out: Option<PathBuf>,
}

fn bins(text: &str) -> std::result::Result<u32, String> {
    let bins = text.parse().ok().filter(|bins: &u32| bins.is_power_of_two() && (64..=4096).contains(bins));
    bins.ok_or_else(|| "expected a power of two from 64 to 4096".into())
}

/// The result of a reception.
struct Received {
    sight: Measurements,
    counts: Counts,
    crc: Option<u32>,
    /// Samples that were checked, and those of them that were wrong.
    checked: Option<(u64, u64)>,
    first_wrong: Option<(u32, u32)>,
    /// How long samples flowed, and how long it took until the last one had been analysed.
    took: Duration,
    whole: Duration,
    cpu: CpuTime,
    gpu_time: Duration,
    stopped: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    if args.gain.is_some_and(|gain| !gain.is_finite() || gain == 0.0) {
        return Err(CliError::Usage("--gain is a number, and not zero".into()));
    }
    let opened = board::open(&args.board)?;
    let gpu = gpus::choose(&args.gpu)?;
    let shape = args.packing.shape(&opened.session.card().profile.rx, opened.rate)?;
    let patience = opened.patience(shape.samples());
    let options = RxOptions { shape, only: args.route, self_test: Some(patience) };
    let mut receiver = {
        let mut notice = Notice::new(context, shape);
        let watch = &mut |filled| notice.tell(filled);
        Receiver::open_watched(&opened.session, &gpu.gpu, &options, watch).map_err(notice::ended)?
    };
    let settings = Settings {
        remove_dc: !args.keep_dc,
        log: args.bins.ilog2(),
        counter: opened.counter,
        ..Settings::default()
    };
    let processor = Processor::new(&gpu.gpu, shape, settings)?;
    let before = opened.stats();
    let taken = take(args, context, &opened, &mut receiver, processor)?;
    let after = opened.stats();
    if let Some(path) = &args.png {
        picture::write(path, &taken.sight.spectrum)?;
    }
    let samples = u64::from(shape.samples());
    let sent = after.zip(before).map(|(after, before)| (after.sent_blocks - before.sent_blocks) * samples);
    let account = RxSummary { opened: &opened, gpu: &gpu, receiver: &receiver, shape, taken: &taken, sent };
    if let Some(warning) = account.warning() {
        report::warn(&warning);
    }
    let report = Report::new(account.document(args), account.text(args))?;
    Ok(report.failed(account.failure()))
}

fn take(
    args: &Args,
    context: &CommandContext,
    opened: &OpenedBoard,
    receiver: &mut Receiver,
    mut processor: Processor,
) -> Result<Received> {
    let Some(shape) = receiver.shape() else {
        return Err(CliError::Failed("the board has lost its ring".into()));
    };
    let patience = opened.patience(shape.samples());
    let hardware = &opened.session.card().name;
    let content = Content { format: shape.format, gain: args.gain, rate: opened.rate, hardware };
    let mut recording = args.out.as_ref().map(|path| Recording::create(path, &content)).transpose()?;
    let (mut crc, mut sight, mut checked, mut first_wrong) = (0, Measurements::default(), (0, 0), None);
    let mut screen = Screen::new(context.json);
    receiver.start()?;
    let (begun, cpu) = (Instant::now(), CpuTime::now());
    let (mut looked, mut came, mut flowing) = (begun, begun, true);
    let mut took = Duration::ZERO;
    loop {
        let long_enough = receiver.counts().blocks > 0 && begun.elapsed().as_secs_f64() >= args.seconds;
        if flowing && (long_enough || context.stop.is_set()) {
            receiver.stop()?;
            (flowing, took) = (false, begun.elapsed());
        }
        let Some(block) = receiver.acquire(POLL_INTERVAL)? else {
            if !flowing {
                break;
            }
            if came.elapsed() >= patience {
                let waited = units::time(patience);
                return Err(CliError::Failed(format!("the board sent nothing for {waited}")));
            }
            continue;
        };
        let mut batch = vec![block.hold()];
        came = Instant::now();
        // What is written to a file is taken from the GPU block by block.
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
        if looked.elapsed() >= SHOW_INTERVAL || !flowing {
            looked = Instant::now();
            see(&mut processor, &mut sight, &mut checked, &mut first_wrong)?;
            screen.show(&sight, &receiver.counts(), begun.elapsed(), shape);
        }
    }
    see(&mut processor, &mut sight, &mut checked, &mut first_wrong)?;
    if let Some(recording) = recording.take() {
        recording.finish()?;
    }
    Ok(Received {
        counts: receiver.counts(),
        crc: args.out.as_ref().map(|_| crc),
        checked: sight.wrong.map(|_| checked),
        first_wrong,
        took,
        whole: begun.elapsed(),
        cpu: CpuTime::now().since(cpu),
        gpu_time: processor.gpu_time(),
        stopped: context.stop.check().is_err(),
        sight,
    })
}

/// Has the GPU work on samples, and writes them to a file; the checksum of everything that was received.
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

/// Takes the GPU's results, if there are any.
fn see(
    processor: &mut Processor,
    sight: &mut Measurements,
    checked: &mut (u64, u64),
    first_wrong: &mut Option<(u32, u32)>,
) -> Result<()> {
    let new = processor.take()?;
    if new.samples > 0 {
        checked.0 += new.samples;
        checked.1 += new.wrong.unwrap_or(0);
        *first_wrong = first_wrong.or(new.first_wrong);
        *sight = new;
    }
    Ok(())
}

/// A line that is redrawn on a terminal.
struct Screen(bool);

impl Screen {
    fn new(json: bool) -> Self {
        Self(!json && crate::terminal::has_bars())
    }

    fn show(&mut self, sight: &Measurements, counts: &Counts, time: Duration, shape: Shape) {
        if self.0 {
            let rate = counts.delivered as f64 * f64::from(shape.format.bytes())
                / 1e9
                / time.as_secs_f64().max(1e-9);
            let words = format!("{rate:.2} GB/s, {} lost, {:.1} dBFS", counts.lost, sight.level);
            let _ = write!(std::io::stderr(), "\r{} {words:<40}", view::line(&sight.spectrum));
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.0 {
            let _ = writeln!(std::io::stderr());
        }
    }
}

/// The whole report.
struct RxSummary<'a> {
    opened: &'a OpenedBoard,
    gpu: &'a Chosen,
    receiver: &'a Receiver,
    shape: Shape,
    taken: &'a Received,
    /// By the simulated board's own count, if there is one.
    sent: Option<u64>,
}

impl RxSummary<'_> {
    fn bytes(&self) -> u64 {
        self.taken.counts.delivered * u64::from(self.shape.format.bytes())
    }

    fn gbps(&self) -> f64 {
        self.bytes() as f64 / 1e9 / self.seconds()
    }

    fn seconds(&self) -> f64 {
        self.taken.took.as_secs_f64().max(1e-9)
    }

    /// A share of all the time that it took.
    fn share(&self, time: Duration) -> f64 {
        time.as_secs_f64() / self.taken.whole.as_secs_f64().max(1e-9)
    }

    fn simulated(&self) -> Vec<&'static str> {
        let parts = [(self.opened.session.card().simulated, "board"), (self.gpu.gpu.simulated(), "gpu")];
        parts.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect()
    }

    /// Where the strongest bin lies, and its level.
    fn strongest(&self) -> (f64, f64) {
        let spectrum = &self.taken.sight.spectrum;
        let top = spectrum.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
        let rate = self.rate();
        ((top.0 as f64 / spectrum.len().max(1) as f64 - 0.5) * rate, top.1)
    }

    /// Samples a second: the board's rate if it is known, else as they arrived.
    fn rate(&self) -> f64 {
        let counts = self.taken.counts;
        self.opened.rate.unwrap_or((counts.delivered + counts.lost) as f64 / self.seconds())
    }

    /// What is not a failure, but the user should know.
    fn warning(&self) -> Option<String> {
        let Counts { delivered, lost, gaps, partial, .. } = self.taken.counts;
        if lost == 0 {
            return None;
        }
        let share = lost as f64 / (delivered + lost) as f64 * 100.0;
        let why = if partial > 0 {
            format!(
                "bursts are missing in {partial} blocks, because the board's FIFO ran over: lower the rate"
            )
        } else if self.gpu.gpu.simulated() && self.share(self.taken.gpu_time) > 0.5 {
            "the emulated GPU is too slow for this rate: lower the rate, or use a GPU (-g 0)".into()
        } else {
            "blocks were not taken in time: use larger buffers (--buffer), or lower the rate".into()
        };
        let gaps = units::count(gaps, "gap");
        Some(format!("{lost} samples ({share:.1} %) were lost in {gaps}; {why}"))
    }

    fn verified(&self) -> Option<bool> {
        self.taken.checked.map(|(_, wrong)| wrong == 0)
    }

    fn adds_up(&self) -> bool {
        self.sent.is_none_or(|sent| self.taken.counts.delivered + self.taken.counts.lost == sent)
    }

    fn failure(&self) -> Option<CliError> {
        if let (Some((checked, wrong @ 1..)), Some((expected, found))) =
            (self.taken.checked, self.taken.first_wrong)
        {
            return Some(CliError::Mismatch(format!(
                "{wrong} of {checked} samples in GPU memory are not those that were sent, first {found:#x} instead of \
                 {expected:#x}"
            )));
        }
        if !self.adds_up() {
            let Counts { delivered, lost, .. } = self.taken.counts;
            return Some(CliError::Failed(format!(
                "{} were sent, {delivered} delivered and {lost} reported lost",
                self.sent.unwrap_or_default()
            )));
        }
        let errors = self.taken.counts.clock_errors;
        if errors > 0 {
            return Some(CliError::Failed(format!(
                "the numbers of samples are wrong: the board's clock differs in {}, or it lost more than it can report",
                units::count(errors, "block")
            )));
        }
        if let Some(broken) = self.opened.broken_rule() {
            return Some(broken);
        }
        self.taken.stopped.then_some(CliError::Stopped(super::AT_REST))
    }

    fn document(&self, args: &Args) -> Value {
        let Received { sight, counts, crc, took, cpu, gpu_time, .. } = self.taken;
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
            "level_dbfs": sight.level,
            "peak_dbfs": sight.peak,
            "dc": sight.dc,
            "strongest": { "hz": strongest, "dbfs": level },
            "spectrum_dbfs": sight.spectrum,
            "cpu_load": share(&cpu.ours),
            "board_cpu_load": self.opened.model.as_ref().map(|_| share(&cpu.board)),
            "gpu_load": share(gpu_time),
            "board_behind_seconds": self.opened.stats().map(|stats| stats.most_behind.as_secs_f64()),
            "out": args.out.as_ref().map(|path| path.display().to_string()),
            "png": args.png.as_ref().map(|path| path.display().to_string()),
        })
    }

    fn text(&self, args: &Args) -> ReportText {
        let Received { sight, counts, cpu, gpu_time, .. } = self.taken;
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
        let waits = self.opened.model.as_ref().is_some_and(|model| model.config().patient);
        let sum = match (self.sent, self.adds_up()) {
            (None, _) => "",
            (Some(_), true) if waits => "; the board waits (patient=1), so it cannot lose samples",
            (Some(_), true) => "; received and lost are what was sent",
            (Some(_), false) => "; RECEIVED AND LOST ARE NOT WHAT WAS SENT",
        };
        text.row(
            "lost",
            format!("{} in {}{sum}", units::count(counts.lost, "sample"), units::count(counts.gaps, "gap")),
        );
        text.row(
            "level",
            format!(
                "{:.1} dBFS, peak {:.1} dBFS, dc {:+.4} {:+.4}",
                sight.level, sight.peak, sight.dc[0], sight.dc[1]
            ),
        );
        let (hz, level) = self.strongest();
        text.row("strongest", format!("{:+.6} MHz at {level:.1} dBFS", hz / 1e6));
        let share = |time: &Duration| self.share(*time) * 100.0;
        let model = self.opened.model.as_ref();
        let model = model
            .map_or(String::new(), |_| format!(", the simulated board's thread {:.0} %", share(&cpu.board)));
        text.row("load", format!("CPU {:.0} %{model}, GPU {:.1} %", share(&cpu.ours), share(gpu_time)));
        text.row(
            "verified",
            match self.taken.checked {
                Some((checked, 0)) => {
                    format!("yes: the GPU compared each of {checked} samples with its number")
                }
                Some((_, wrong)) => format!("NO: {wrong} samples are not those that were sent"),
                None => "not possible with this signal (signal=counter is checked)".into(),
            },
        );
        let recorded =
            args.out.iter().flat_map(|path| recording::ENDINGS.map(|e| outputs::with_ending(path, e)));
        for path in recorded.chain(args.png.clone()) {
            text.row("written", path.display());
        }
        for line in view::chart(&sight.spectrum, self.rate()) {
            text.line(line);
        }
        text
    }
}
