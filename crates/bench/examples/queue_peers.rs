//! Other people's GPU queues beside ours: the same GPU, the same process, the same null controller, launches by turns.
//!
//! Their code comes as PTX with the two kernels of `peer.h`; nothing of it is in this repository. Every launch is checked,
//! theirs and ours: entries by their seal, outcomes one by one, the controller's count. One setting a run, so that
//! kernels that never end take nothing else with them.
//!
//! ```text
//! cargo run --release -p onehop-bench --example queue_peers -- theirs.ptx --name Theirs --queues 16 --threads 1024
//! ```
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use onehop_bench::{Controller, GpuBench, PeerKernel, PeerPlan, QueueMode, QueueRun, RingsAt, median};
use onehop_gpu::cuda::{Arg, Code, Cuda, CudaGpu, Shape, Started};
use serde_json::{Value, json};

/// How long a launch of theirs should take: long enough that its start and end do not count.
const LAUNCH: Duration = Duration::from_millis(40);
/// Rounds of all threads in the checked launches, and at least in those that are timed.
const ROUNDS: u32 = 16;
/// Launches of a turn.
const LAUNCHES: usize = 2;
/// Commands in flight on a queue of ours at most, in owner and in shared mode. Both are also measured with as many as
/// theirs has: one a thread, or fewer where the ring has no room for them.
const DEPTH: u32 = 256;
const SHARED_DEPTH: u32 = 1023;

/// Measures other people's GPU queues beside ours
#[derive(Parser)]
struct Args {
    /// PTX with their kernels: see peer.h
    kernels: PathBuf,
    /// Their name
    #[arg(long, default_value = "theirs")]
    name: String,
    /// Which GPU
    #[arg(short, long, default_value = "0")]
    gpu: String,
    /// Queues
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    queues: u32,
    /// Their threads on each queue; 1 is one command in flight, of ours too
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=65536))]
    threads: u32,
    /// Threads of their blocks [default: all those of a queue, 1024 at most]
    #[arg(long)]
    block: Option<u32>,
    /// Entries of their rings
    #[arg(long, default_value_t = 1024)]
    entries: u32,
    /// Bytes that they need for each queue's account
    #[arg(long, default_value_t = 4 << 20)]
    space: usize,
    /// Rings in host memory instead of the GPU's
    #[arg(long)]
    host: bool,
    /// The controllers run on CPU threads; for rings in host memory
    #[arg(long, requires = "host")]
    cpu: bool,
    /// The controller completes the last command of a batch first
    #[arg(long)]
    reverse: bool,
    /// Turns of theirs and ours
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// Commands of a launch at most
    #[arg(long, default_value_t = 4_000_000)]
    most: u32,
    /// Also writes what was measured to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Prints the head of the table first
    #[arg(long)]
    head: bool,
}

type Error = Box<dyn std::error::Error>;

/// Their kernels on a GPU.
struct Theirs<'a> {
    gpu: &'a CudaGpu,
    code: Code,
    registers: u32,
}

impl<'a> Theirs<'a> {
    fn load(gpu: &'a CudaGpu, args: &Args) -> Result<Self, Error> {
        let text = fs::read_to_string(&args.kernels)
            .map_err(|error| format!("{}: {error}", args.kernels.display()))?;
        let code = gpu.load_code(&text)?;
        code.registers(PeerKernel::Prepare.name())?;
        let registers = code.registers(PeerKernel::Run.name())?;
        Ok(Self { gpu, code, registers })
    }

    fn start(
        &self,
        kernel: PeerKernel,
        shape: Shape,
        job: Arg,
        limit: Duration,
    ) -> onehop_gpu::Result<Started> {
        // SAFETY: the user who names the PTX on the command line vouches for it: that its kernels take a `peer_job`, write
        // nothing but the rings, doorbells, accounts, outcomes and the cycle count of that job, and end.
        unsafe { self.gpu.start_kernel(&self.code, kernel.name(), shape, &[job], limit) }
    }
}

/// One of our settings beside theirs.
struct Ours {
    name: &'static str,
    plan: QueueRun,
    rates: Vec<f64>,
    registers: u32,
}

/// What was measured, in commands per second.
struct Measured {
    theirs: Vec<f64>,
    ours: Vec<Ours>,
    clock: f64,
    /// Completions that went to the wrong thread, and how many were checked.
    elsewhere: [usize; 2],
    ceiling: f64,
    /// Registers of a thread of theirs.
    registers: u32,
}

fn rings(args: &Args) -> RingsAt {
    if args.host { RingsAt::Host } else { RingsAt::Vram }
}

fn controller(args: &Args) -> Controller {
    if args.cpu { Controller::Cpu } else { Controller::Gpu }
}

/// Commands in flight on a queue of theirs: one a thread, as many as the ring has room for.
fn window(args: &Args) -> u32 {
    args.threads.min(args.entries.saturating_sub(1)).clamp(1, SHARED_DEPTH)
}

/// Our settings for the same queues: each mode with the window that it is made for, and with theirs.
fn ours(args: &Args) -> Vec<Ours> {
    let shared = QueueMode::Shared(args.queues * args.threads);
    let equal = window(args);
    let settings = match args.threads {
        1 => vec![("owner", QueueMode::Owner, 1)],
        _ => vec![
            ("owner", QueueMode::Owner, DEPTH),
            ("owner, equal window", QueueMode::Owner, equal),
            ("shared", shared, SHARED_DEPTH),
            ("shared, equal window", shared, equal),
        ],
    };
    let of_queue = if args.threads == 1 { 20_000 } else { 100_000 };
    let commands = (of_queue * args.queues).min(args.most);
    let plan = |mode, depth| QueueRun {
        mode,
        queues: args.queues,
        depth,
        commands,
        rings: rings(args),
        reverse: args.reverse,
        controller: controller(args),
    };
    let make = |(name, mode, depth)| Ours { name, plan: plan(mode, depth), rates: Vec::new(), registers: 0 };
    settings.into_iter().map(make).collect()
}

/// The number of commands with which a launch of theirs takes about as long as it should.
fn theirs(args: &Args, rate: Option<f64>) -> PeerPlan {
    let plan = PeerPlan {
        queues: args.queues,
        threads: args.threads,
        block: args.block.unwrap_or(args.threads.min(1024)),
        entries: args.entries,
        space: args.space,
        commands: 0,
        rings: rings(args),
        reverse: args.reverse,
        controller: controller(args),
    };
    let all = plan.all_threads().max(1);
    let wanted = rate.map_or(0.0, |rate| rate * LAUNCH.as_secs_f64()).min(args.most.into()) as u32;
    PeerPlan { commands: (wanted / all).max(ROUNDS) * all, ..plan }
}

fn measure(args: &Args, bench: &GpuBench, kernels: &Theirs<'_>) -> Result<Measured, Error> {
    let start = |kernel, shape, job, limit| kernels.start(kernel, shape, job, limit);
    let close = theirs(args, None);
    let looked = bench.peer(&close, true, LAUNCHES, &start)?;
    let plan = theirs(args, looked.rates.last().copied());
    let mut ours = ours(args);
    let ceiling = ours.first().map_or(Ok(0.0), |first| bench.ceiling(&first.plan))?;
    let elsewhere = [looked.elsewhere, close.commands as usize * LAUNCHES];
    let (mut rates, mut clock) = (Vec::new(), 0.0);
    for _ in 0..args.turns.max(1) {
        for setting in &mut ours {
            let (rates, registers) = bench.rates(&setting.plan, LAUNCHES)?;
            setting.rates.extend(rates);
            setting.registers = registers;
        }
        // The first one warms up.
        let run = bench.peer(&plan, false, LAUNCHES + 1, &start)?;
        rates.extend(&run.rates[1..]);
        clock = run.clock;
    }
    Ok(Measured { theirs: rates, ours, clock, elsewhere, ceiling, registers: kernels.registers })
}

/// Median, least and most.
fn spread(rates: &[f64]) -> [f64; 3] {
    let mut rates = rates.to_vec();
    let middle = median(&mut rates);
    [middle, rates.first().copied().unwrap_or(0.0), rates.last().copied().unwrap_or(0.0)]
}

fn ours_document(ours: &Ours) -> Value {
    let Ours { name, plan, rates, registers } = ours;
    json!({ "setting": name, "window": plan.depth, "rates": rates, "registers": registers })
}

fn document(args: &Args, outcome: &Result<Measured, Error>) -> Value {
    let mut document = json!({
        "name": args.name, "queues": args.queues, "threads": args.threads, "entries": args.entries,
        "rings": if args.host { "host" } else { "vram" }, "controller": if args.cpu { "cpu" } else { "gpu" }, "order": if args.reverse { "reversed" } else { "in order" },
    });
    match outcome {
        Ok(measured) => {
            document["theirs"] = json!(measured.theirs);
            document["window"] = json!(window(args));
            document["ours"] = json!(measured.ours.iter().map(ours_document).collect::<Vec<_>>());
            document["controller_alone"] = json!(measured.ceiling);
            document["clock"] = json!(measured.clock);
            document["elsewhere"] = json!(measured.elsewhere);
            document["registers"] = json!(measured.registers);
        }
        Err(why) => document["error"] = json!(why.to_string()),
    }
    document
}

fn head() {
    println!(
        "| whose | rings | order | queues | threads a queue | setting | in flight | M commands/s: median (least, most) \
         | launches | times theirs | controller alone | ns (cycles) one by one | registers | completions to the wrong thread |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
}

/// A line for theirs, and one for each setting of ours.
fn row(args: &Args, outcome: &Result<Measured, Error>) {
    let place = match (args.host, args.cpu) {
        (false, _) => "VRAM",
        (true, false) => "host",
        (true, true) => "host, controllers on CPU threads",
    };
    let order = if args.reverse { "reversed" } else { "in order" };
    let begin = format!("| {place} | {order} | {} | {} |", args.queues, args.threads);
    let measured = match outcome {
        Ok(measured) => measured,
        Err(why) => {
            return println!(
                "| {} {begin} failed: {} |",
                args.name,
                why.to_string().replace(['|', '\n'], " ")
            );
        }
    };
    let [theirs, ..] = spread(&measured.theirs);
    let line = |whose: &str, setting: &str, window: u32, rates: &[f64], registers: u32, wrong: String| {
        let [middle, least, most] = spread(rates);
        let single = match args.queues * args.threads {
            1 => format!("{:.0} ({:.0})", 1e9 / middle, measured.clock / middle),
            _ => "–".into(),
        };
        println!(
            "| {whose} {begin} {setting} | {window} | {:.2} ({:.2}, {:.2}) | {} | {:.1} | {:.0} | {single} | {registers} \
             | {wrong} |",
            middle / 1e6,
            least / 1e6,
            most / 1e6,
            rates.len(),
            middle / theirs,
            measured.ceiling / 1e6,
        );
    };
    let wrong = format!("{} of {}", measured.elsewhere[0], measured.elsewhere[1]);
    line(&args.name, "–", window(args), &measured.theirs, measured.registers, wrong);
    for Ours { name, plan, rates, registers } in &measured.ours {
        line("onehop", name, plan.depth, rates, *registers, "–".into());
    }
}

fn report(args: &Args, outcome: &Result<Measured, Error>) -> Result<(), Error> {
    row(args, outcome);
    if let Some(path) = &args.json {
        fs::write(path, format!("{:#}\n", document(args, outcome)))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if let Err(why) = outcome {
        eprintln!("{why}");
        // At once: the driver would wait for a kernel that never ends.
        std::process::exit(1);
    }
    Ok(())
}

fn run(args: &Args) -> Result<(), Error> {
    let gpu = Cuda::load()?.open(&args.gpu)?;
    // All kernels are loaded before the controller runs: one that is loaded meanwhile may have to wait for its end.
    let kernels = Theirs::load(&gpu, args)?;
    let bench = GpuBench::new(gpu.clone())?;
    report(args, &measure(args, &bench, &kernels))
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.head {
        head();
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn windows(of: &[&str]) -> Vec<(&'static str, u32)> {
        let args = Args::try_parse_from([&["queue_peers", "theirs.ptx"], of].concat()).unwrap();
        ours(&args).iter().map(|ours| (ours.name, ours.plan.depth)).collect()
    }

    #[test]
    fn equal_windows_are_measured_beside_our_own() {
        let few = windows(&["--threads", "32"]);
        assert_eq!(
            few,
            [("owner", 256), ("owner, equal window", 32), ("shared", 1023), ("shared, equal window", 32)]
        );
        // A ring holds one command fewer than it has entries.
        assert!(windows(&["--threads", "1024"]).contains(&("shared, equal window", 1023)));
        assert!(windows(&["--threads", "256", "--entries", "128"]).contains(&("owner, equal window", 127)));
        assert_eq!(windows(&["--threads", "1"]), [("owner", 1)]);
    }
}
