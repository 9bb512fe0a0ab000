//! `onehop demo`: the whole way with nothing but this machine. A simulated drive holds a model; GPU threads read its
//! header, then its tensors, into GPU memory; every byte is checked.

use std::time::{Duration, Instant};

use onehop_drive::{Drive, GpuJob, Namespace, Op, Options};
use onehop_gpu::Region;
use onehop_load::Dtype;
use onehop_load::plan::Placed;
use onehop_sim::{Config, Fault, Media, Sim};
use serde::{Serialize, Serializer};

use crate::commands::Context;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::model;
use crate::report::{Report, Text};
use crate::transfer::{self, Engine, Outcome, Plan, RouteArgs, Tally};
use crate::units;

/// Where the model starts on the drive.
const FIRST_BLOCK: u64 = 256;
const BLOCK: u64 = 4096;
/// How long a command may take: short, so that the demo is over soon even where one is lost.
const PATIENCE: Duration = Duration::from_millis(500);
/// The largest model that the demo makes.
const MOST: u64 = 1 << 30;

/// Load a small model from a simulated drive by GPU-initiated commands, and check every byte
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop demo\n  onehop demo --fault fail-once@op=read,n=5 --fault lost@n=40\n  \
                        onehop demo --route gpu/posted --mode shared --json"
)]
pub(crate) struct Args {
    #[command(flatten)]
    gpu: GpuArg,
    #[command(flatten)]
    route: RouteArgs,
    /// What is to go wrong with the drive, as for sim: (fail-once@n=5, late@n=9,delay=20ms, lost@n=3); may be repeated
    #[arg(long, value_name = "NAME@WHEN")]
    fault: Vec<String>,
    /// Bytes of the model
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = units::parse_size)]
    size: u64,
    /// What the model's bytes are drawn from
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = units::parse_number)]
    seed: u64,
}

/// A tensor in GPU memory, and whether it is the right one.
#[derive(Serialize)]
struct Loaded {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: u64,
    /// Where it lies in the arena.
    offset: u64,
    /// What the model itself says.
    expected: Option<String>,
    #[serde(serialize_with = "hex")]
    crc32c: u32,
    verified: bool,
}

/// The demo's account: that of every transfer, and what was loaded.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    outcome: &'a Outcome,
    seed: u64,
    header: Header,
    ranges: Vec<(u64, u64)>,
    tensors: &'a [Loaded],
    faults: &'a [String],
    faults_struck: u64,
    /// Rules of NVMe that the strict simulator saw broken: none, or it is a defect of onehop.
    violations: Vec<String>,
    total_seconds: f64,
}

#[derive(Clone, Copy, Serialize)]
struct Header {
    first_block: u64,
    block_bytes: u64,
    bytes: u64,
    commands: u64,
}

/// What the loading gave.
struct Load {
    engine: Engine,
    arena: Region,
    plan: onehop_load::Plan,
    jobs: Vec<GpuJob>,
    tensors: Vec<Loaded>,
    header: Header,
    tally: Tally,
}

/// Runs it.
pub(crate) fn run(args: &Args, context: &Context) -> Result<Report> {
    let start = Instant::now();
    if !((64 << 10)..=MOST).contains(&args.size) {
        return Err(CliError::Usage("--size: the demo's model has from 64K to 1G bytes".into()));
    }
    let route = RouteArgs { timeout: args.route.timeout.or(Some(PATIENCE)), ..args.route.clone() };
    let gpu = gpus::choose(&args.gpu)?;
    let file = model::make(args.size, args.seed)?;
    let sim = make_drive(args, &file)?;
    let options = Options { abort_wait: Duration::from_millis(200), ..route.options(false) };
    let drive = Drive::open(sim.port(), options)?;
    let load = load(&drive, &gpu, &route, file.len() as u64, context)?;
    let mut outcome = Outcome::new(&drive, &gpu, &load.engine, &load.tally, crc32c(&load.tensors));
    let same = check_bytes(&load, &file)?;
    let verified = same && load.tensors.iter().all(|tensor| tensor.verified);
    outcome.judge(
        verified,
        "compared with the model's own check sums, and with the file that was put on the drive",
    );
    let document = Document {
        outcome: &outcome,
        seed: args.seed,
        header: load.header,
        ranges: load.jobs.iter().map(|job| (job.lba, job.blocks)).collect(),
        tensors: &load.tensors,
        faults: &args.fault,
        faults_struck: sim.stats().faults,
        violations: sim.violations().iter().map(|v| format!("{v:?}")).collect(),
        total_seconds: start.elapsed().as_secs_f64(),
    };
    let failure = judge(&document, verified);
    Ok(Report::new(&document, tell(&document, &drive))?.failed(failure))
}

/// A simulated drive in memory, with the model on its blocks.
fn make_drive(args: &Args, file: &[u8]) -> Result<Sim> {
    let bytes = (FIRST_BLOCK * BLOCK + file.len() as u64).next_multiple_of(16 << 20);
    let faults = args.fault.iter().map(|text| Fault::parse(text)).collect::<onehop_sim::Result<Vec<_>>>()?;
    let sim = Sim::new(Config {
        media: Media::Memory(bytes),
        lba: BLOCK as u32,
        cmb: 1 << 20,
        serial: "ONEHOP-DEMO".into(),
        faults,
        ..Config::default()
    })?;
    // Around the controller: this is how the model got there before the story starts.
    sim.write_media(1, FIRST_BLOCK * BLOCK, file)?;
    Ok(sim)
}

/// Header first, then all tensors into one arena. `length` is what a file system would tell of the file.
fn load(drive: &Drive, gpu: &Chosen, args: &RouteArgs, length: u64, context: &Context) -> Result<Load> {
    let ns = drive.namespace(1)?;
    let plan = Plan { drive, ns, gpu, args };
    let (engine, first) = Engine::open(&plan, BLOCK)?;
    let job = GpuJob { lba: FIRST_BLOCK, blocks: 1, offset: 0 };
    let mut tally = engine.transfer(Op::Read, ns, &[job], &first, &context.stop)?;
    let header_bytes = model::header_bytes(&copy_out(&first.region, 8)?, length)?;
    let header = if header_bytes <= BLOCK {
        copy_out(&first.region, header_bytes)?
    } else {
        let (header, took) = read_header(&engine, ns, header_bytes, context)?;
        tally.add(&took);
        header
    };
    let about = Header {
        first_block: FIRST_BLOCK,
        block_bytes: BLOCK,
        bytes: header_bytes,
        commands: tally.commands,
    };
    let described = model::parse(header, length)?;
    let plan = model::plan(&described.model, BLOCK)?;
    let jobs = model::jobs(&plan, FIRST_BLOCK)?;
    let arena = engine.memory(plan.gpu_bytes)?;
    tally.add(&engine.transfer(Op::Read, ns, &jobs, &arena, &context.stop)?);
    let tensors = plan
        .tensors
        .iter()
        .map(|tensor| {
            check_tensor(&arena.region, described.hashes.get(&tensor.name).cloned(), tensor.clone())
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(Load { engine, arena: arena.region, plan, jobs, tensors, header: about, tally })
}

/// The first bytes of GPU memory, for the CPU.
fn copy_out(region: &Region, bytes: u64) -> Result<Vec<u8>> {
    let mut out = vec![0; bytes as usize];
    region.read(0, &mut out)?;
    Ok(out)
}

/// All blocks of a header that is longer than a block, by way of GPU memory.
fn read_header(engine: &Engine, ns: &Namespace, bytes: u64, context: &Context) -> Result<(Vec<u8>, Tally)> {
    let blocks = bytes.div_ceil(BLOCK);
    let memory = engine.memory(blocks * BLOCK)?;
    let job = GpuJob { lba: FIRST_BLOCK, blocks, offset: 0 };
    let tally = engine.transfer(Op::Read, ns, &[job], &memory, &context.stop)?;
    Ok((copy_out(&memory.region, bytes)?, tally))
}

fn check_tensor(arena: &Region, expected: Option<String>, tensor: Placed) -> Result<Loaded> {
    let crc32c = transfer::crc32c(arena, tensor.at as usize, tensor.bytes as usize)?;
    let verified = expected.as_ref() == Some(&model::hash(crc32c));
    let Placed { name, dtype, shape, bytes, at: offset, .. } = tensor;
    Ok(Loaded { name, dtype, shape, bytes, offset, expected, crc32c, verified })
}

/// The check sum of all tensors, one behind the other: what lies between them in the arena is nobody's.
fn crc32c(tensors: &[Loaded]) -> u32 {
    tensors.iter().fold(0, |crc, t| crc32c::crc32c_combine(crc, t.crc32c, t.bytes as usize))
}

fn hex<S: Serializer>(crc: &u32, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&model::hash(*crc))
}

/// Beyond the check sums: whether the tensors are, byte for byte, what was put on the drive.
fn check_bytes(load: &Load, file: &[u8]) -> Result<bool> {
    for piece in &load.plan.pieces {
        let wanted = file.get(piece.from as usize..(piece.from + piece.row) as usize).unwrap_or_default();
        let mut got = vec![0; piece.row as usize];
        load.arena.read(piece.to as usize, &mut got)?;
        if got != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

fn judge(document: &Document<'_>, verified: bool) -> Option<CliError> {
    if !verified {
        return Some(CliError::Mismatch("the tensors in GPU memory are not those of the model".into()));
    }
    let first = document.violations.first()?;
    let count = units::count(document.violations.len() as u64, "rule");
    Some(CliError::Failed(format!(
        "the simulated drive saw {count} of NVMe broken, first {first}; this is a defect of onehop"
    )))
}

fn tell(document: &Document<'_>, drive: &Drive) -> Text {
    let Document { header, tensors, .. } = document;
    let mut text = Text::default();
    text.row(
        "model",
        format!(
            "{} tensors drawn from seed {}, on blocks of {} bytes of '{}' (serial {})",
            tensors.len(),
            document.seed,
            header.block_bytes,
            drive.identity().model(),
            drive.identity().serial(),
        ),
    );
    text.row(
        "header",
        format!(
            "{} bytes from block {} on, read by {}",
            header.bytes,
            header.first_block,
            units::count(header.commands, "command")
        ),
    );
    for tensor in *tensors {
        text.row(
            "",
            format!(
                "{:<26} {:<5} {:<12} {:>9}  {} {}",
                tensor.name,
                tensor.dtype,
                format!("{:?}", tensor.shape),
                units::bytes(tensor.bytes),
                model::hash(tensor.crc32c),
                if tensor.verified { "as the model says" } else { "NOT what the model says" },
            ),
        );
    }
    let ranges: Vec<_> =
        document.ranges.iter().map(|(lba, blocks)| format!("{lba} to {}", lba + blocks - 1)).collect();
    text.row("plan", format!("one arena in GPU memory, filled from blocks {}", ranges.join(", ")));
    document.outcome.rows(&mut text);
    if !document.faults.is_empty() {
        text.row(
            "faults",
            format!(
                "{}: struck {}",
                document.faults.join(", "),
                units::count(document.faults_struck, "time")
            ),
        );
    }
    text.row(
        "rules",
        format!("{} of NVMe's broken, as the strict simulated drive counts", document.violations.len()),
    );
    text.row("time", format!("{:.2} s in all", document.total_seconds));
    text
}
