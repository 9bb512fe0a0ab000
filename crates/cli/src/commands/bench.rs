//! `onehop bench queue`: measures the cost of a command on the CPU and on the GPU.

mod compare;
mod gather;
mod limits;
mod pages;
pub(crate) mod report;
mod sweep;
mod target;

use std::path::PathBuf;

use onehop_bench::page::{QueuePage, QueueRow, queue_page};
use onehop_bench::{Clock, Controller, CpuQueue, GpuBench, NULL_DRIVE, QueueMode, QueueRun, RingsAt};
use serde_json::json;

use crate::commands::CommandContext;
use crate::drives;
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::report::{Report, ReportText};
use crate::units;

/// Measure the cost of commands, the rate of every route, and the speed of loading
#[derive(clap::Args)]
#[command(subcommand_required = true, after_help = "Example:\n  onehop bench queue")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(clap::Subcommand)]
enum BenchCommand {
    Queue(QueueArgs),
    Sweep(sweep::Args),
    Load(super::load::bench::Args),
    Target(target::Args),
    Gather(gather::Args),
    Pages(pages::Args),
}

/// Who uses the queues.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum BenchSide {
    /// One CPU thread, one queue
    Cpu,
    /// An NVIDIA GPU
    Gpu,
}

/// Where the GPU's queues are.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum QueuePlacement {
    /// In the GPU's memory
    Vram,
    /// In host memory
    Host,
    /// Submission queues in host memory, completion queues in the GPU's: posted writes only
    Posted,
}

/// Where the null controller of the GPU's queues runs.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ControllerSide {
    /// As a kernel on a GPU: the measured one, or that of --controller-gpu
    Gpu,
    /// On CPU threads; for --rings host
    Cpu,
}

/// Measure submission and completion: commands per second, nanoseconds and cycles per command
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop bench queue --depth 1,64 --json\n  onehop bench queue --side gpu --queues \
                        1,16,64 --depth 256\n  onehop bench queue --report here\n\nThe CPU is measured with the null controller unless -d names a drive. It answers within \
                        the doorbell write and moves no data, so only the driver's own cost remains. The GPU is measured \
                        with a null controller that runs on the same GPU. The cost of each controller is printed as the \
                        reference."
)]
struct QueueArgs {
    /// The side to measure
    #[arg(long, value_delimiter = ',', default_value = "cpu")]
    side: Vec<BenchSide>,
    /// CPU: the drive to use: sim:…, qtest:… or vfio-user:… [default: the null controller]
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    drive: Option<String>,
    #[command(flatten)]
    gpu: GpuArg,
    /// Commands in flight on each queue, one row each: 1 to 4095, on the GPU to 32767
    #[arg(long, value_delimiter = ',', default_value = "1,2,8,32,64,256", value_parser = units::within::<u32>(1..=32767))]
    depth: Vec<u32>,
    /// CPU: bytes per command [default: 4K]
    #[arg(long, value_parser = units::parse_size)]
    block: Option<u64>,
    /// GPU: queues, 1 to 1024, one row each [default: 1,16,64]
    #[arg(long, value_delimiter = ',', value_parser = units::within::<u32>(1..=1024))]
    queues: Vec<u32>,
    /// GPU: how threads use the queues [default: owner]
    #[arg(long, value_delimiter = ',')]
    mode: Vec<crate::transfer::ModeArg>,
    /// GPU: threads on each queue of --mode shared, 1 to 65536 [default: 1024]
    #[arg(long, value_delimiter = ',', value_parser = units::within::<u32>(1..=65536))]
    threads: Vec<u32>,
    /// GPU: where the queues are [default: vram]
    #[arg(long, value_delimiter = ',')]
    rings: Vec<QueuePlacement>,
    /// GPU: where the null controller runs [default: gpu]
    #[arg(long, value_delimiter = ',')]
    controller: Vec<ControllerSide>,
    /// GPU: the GPU that runs the controller of --controller gpu [default: the measured GPU]
    #[arg(long, value_name = "GPU")]
    controller_gpu: Option<String>,
    /// GPU: the controller completes the last command of a batch first
    #[arg(long)]
    reverse: bool,
    /// GPU: commands per launch, at most 64 million [default: 200 000 per queue, at most 16 million; a tenth at depth
    /// 1]
    #[arg(long, value_parser = units::within::<u32>(1..=64_000_000))]
    commands: Option<u32>,
    /// Also write queue.html, a page with pictures, and queue.json into this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

impl QueueArgs {
    /// Refuses options of a side that is not measured.
    fn refuse_unused(&self) -> Result<()> {
        let cpu_options = [("--drive", self.drive.is_some()), ("--block", self.block.is_some())];
        let gpu_options = [
            ("--gpu", self.gpu.gpu.is_some()),
            ("--controller-gpu", self.controller_gpu.is_some()),
            ("--commands", self.commands.is_some()),
            ("--reverse", self.reverse),
            ("--queues", !self.queues.is_empty()),
            ("--mode", !self.mode.is_empty()),
            ("--threads", !self.threads.is_empty()),
            ("--rings", !self.rings.is_empty()),
            ("--controller", !self.controller.is_empty()),
        ];
        let sides = [(BenchSide::Cpu, "cpu", &cpu_options[..]), (BenchSide::Gpu, "gpu", &gpu_options[..])];
        for (_, name, options) in sides.iter().filter(|(side, ..)| !self.side.contains(side)) {
            if let Some((option, _)) = options.iter().find(|(_, is_given)| *is_given) {
                return Err(CliError::Usage(format!("{option} is for --side {name}")));
            }
        }
        Ok(())
    }
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let args = match &args.what {
        BenchCommand::Queue(args) => args,
        BenchCommand::Sweep(args) => return sweep::run(args, context),
        BenchCommand::Load(args) => return super::load::bench::run(args, context),
        BenchCommand::Target(args) => return target::run(args, context),
        BenchCommand::Gather(args) => return gather::run(args, context),
        BenchCommand::Pages(args) => return pages::run(args, context),
    };
    args.refuse_unused()?;
    let _folders = report::folder(args.report.as_deref())?;
    let machine = report::machine();
    let mut text = ReportText::default();
    let mut facts: Vec<(String, String)> = Vec::new();
    let mut fact = |name: &str, value: &str| facts.push((name.to_owned(), value.to_owned()));
    let mut document = json!({ "machine": machine });
    let mut rows = Vec::new();
    if args.side.contains(&BenchSide::Cpu) {
        let null = format!("sim:{NULL_DRIVE}");
        let drive = args.drive.as_deref().unwrap_or(&null);
        let clock = Clock::calibrate();
        text.row("drive", drive);
        text.row("clock", format!("{:.2} GHz (time-stamp counter)", clock.ghz()));
        fact("Drive of the CPU's side", drive);
        fact("Clock", &format!("{:.2} GHz (time-stamp counter)", clock.ghz()));
        document["drive"] = json!(drive);
        document["cycles_per_ns"] = json!(clock.ghz());
        for depth in &args.depth {
            context.stop.check()?;
            let queue = CpuQueue::open(
                drives::find(drive, &context.stop)?.backend,
                *depth,
                args.block.unwrap_or(4096),
                context.stop.signal(),
            )?;
            rows.push(QueueRow { row: queue.row(&clock)?, rings: "host", controller: "cpu" });
        }
    }
    if args.side.contains(&BenchSide::Gpu) {
        let mut gpu = gpus::cuda_only(&args.gpu)?;
        let name = gpu.device().name.clone();
        text.row("gpu", &name);
        fact("GPU", &name);
        document["gpu"] = json!(name);
        if let Some(other) = &args.controller_gpu {
            let other = gpus::cuda_only(&GpuArg { gpu: Some(other.clone()) })?;
            gpu = gpu.served_by(&other)?;
            let name = other.device().pci.clone();
            text.row("controller on", &name);
            fact("Controller on", &name);
            document["controller_gpu"] = json!(name);
        }
        let bench = GpuBench::new(gpu)?.stopped_by(context.stop.signal());
        for (plan, rings, controller) in plans(args) {
            context.stop.check()?;
            rows.push(QueueRow { row: bench.row(&plan)?, rings, controller });
        }
    }
    table(&mut text, &rows);
    document["rows"] = json!(
        rows.iter()
            .map(|line| {
                let mut row = json!(line.row);
                row["rings"] = json!(line.rings);
                row["controller"] = json!(line.controller);
                row
            })
            .collect::<Vec<_>>()
    );
    if let Some(folder) = &args.report {
        let page = queue_page(&QueuePage { machine: &machine, facts, rows: &rows });
        report::write(folder, "queue", &page, &document, &mut text)?;
    }
    Report::new(document, text)
}

/// All measurements on the GPU.
fn plans(args: &QueueArgs) -> Vec<(QueueRun, &'static str, &'static str)> {
    let mut plans = Vec::new();
    fn or<'a, T>(given: &'a [T], default: &'a [T]) -> &'a [T] {
        if given.is_empty() { default } else { given }
    }
    let (modes, threads) = (or(&args.mode, &[crate::transfer::ModeArg::Owner]), or(&args.threads, &[1024]));
    let controllers = or(&args.controller, &[ControllerSide::Gpu]);
    let places = or(&args.rings, &[QueuePlacement::Vram])
        .iter()
        .flat_map(|rings| controllers.iter().map(move |who| (rings, who)));
    for (rings, who) in places {
        let (rings, place) = match rings {
            QueuePlacement::Vram => (RingsAt::Vram, "vram"),
            QueuePlacement::Host => (RingsAt::Host, "host"),
            QueuePlacement::Posted => (RingsAt::Posted, "posted"),
        };
        let (controller, by) = match who {
            ControllerSide::Gpu => (Controller::Gpu, "gpu"),
            ControllerSide::Cpu => (Controller::Cpu, "cpu"),
        };
        for mode in modes {
            for queues in or(&args.queues, &[1, 16, 64]) {
                let modes = match mode {
                    crate::transfer::ModeArg::Owner => vec![QueueMode::Owner],
                    crate::transfer::ModeArg::Shared => {
                        threads.iter().map(|threads| QueueMode::Shared(threads * queues)).collect()
                    }
                };
                for mode in modes {
                    for depth in &args.depth {
                        let most = if *depth == 1 { 20_000 } else { 200_000 };
                        let commands = args.commands.unwrap_or((most * queues).min(16_000_000));
                        let (queues, depth, reverse) = (*queues, *depth, args.reverse);
                        let plan = QueueRun { mode, queues, depth, commands, rings, reverse, controller };
                        plans.push((plan, place, by));
                    }
                }
            }
        }
    }
    plans
}

fn table(text: &mut ReportText, lines: &[QueueRow]) {
    text.line("");
    text.line(
        "side mode   rings queues depth threads  ns/command     M/s  submit cyc  complete cyc         p50 ns         p99 ns  \
         samples of       regs   reference",
    );
    let or_none = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"));
    for QueueRow { row, rings, controller } in lines {
        let reference = row.controller_ns.map_or("none: a drive".to_owned(), |ns| {
            format!("the controller ({controller}): {ns:.2} ns, {:.0} M/s", 1e3 / ns)
        });
        text.line(format!(
            "{:<4} {:<6} {:<5} {:>6} {:>5} {:>7} {:>11.2} {:>7.2} {:>11} {:>13} {:>14} {:>14} {:>8} {:<7} {:>5}   {reference}",
            row.side,
            row.mode,
            rings,
            row.queues,
            row.depth,
            row.threads,
            row.ns_per_command,
            row.iops / 1e6,
            or_none(row.cycles_submit),
            or_none(row.cycles_complete),
            or_none(row.p50_ns),
            or_none(row.p99_ns),
            row.latency_samples,
            row.latency_of,
            row.regs.map_or_else(|| "-".to_owned(), |regs| regs.to_string()),
        ));
    }
}

impl From<onehop_bench::Error> for CliError {
    fn from(error: onehop_bench::Error) -> Self {
        match error {
            stopped if stopped.is_stopped() => Self::Interrupted,
            onehop_bench::Error::Drive(onehop_drive::Error::TooLong { bytes, limit }) => {
                Self::Usage(format!("--block {bytes}: this drive moves at most {limit} bytes by one command"))
            }
            onehop_bench::Error::Drive(error) => error.into(),
            onehop_bench::Error::Sim(error) => error.into(),
            onehop_bench::Error::Gpu(error) => error.into(),
            onehop_bench::Error::System(error) => error.into(),
            onehop_bench::Error::Setup(why) => Self::Usage(why),
            onehop_bench::Error::Row { what, why }
                if matches!(*why, onehop_bench::Error::WrongBytes { .. }) =>
            {
                Self::Mismatch(format!("{what}: {why}"))
            }
            onehop_bench::Error::WrongBytes { .. } => Self::Mismatch(error.to_string()),
            other @ (onehop_bench::Error::Row { .. }
            | onehop_bench::Error::File { .. }
            | onehop_bench::Error::Results { .. }
            | onehop_bench::Error::Stopped) => Self::Failed(other.to_string()),
            wrong @ (onehop_bench::Error::WrongData { .. } | onehop_bench::Error::Wrong(_)) => {
                Self::Mismatch(wrong.to_string())
            }
        }
    }
}
