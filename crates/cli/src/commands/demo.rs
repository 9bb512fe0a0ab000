//! `onehop demo`: the whole path, on any machine. A simulated drive holds a file system with a model; it is
//! loaded as `onehop load -d` loads any model, by commands of GPU threads; every byte is checked.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Options};
use onehop_gpu::{Gpu, Region};
use onehop_load::plan::Placed;
use onehop_load::{Dtype, Plan, Selection, check};
use onehop_sim::{Config, Fault, Media, Sim};
use onehop_transfer::{ModelOnDrive, ModelPlace, TransferOutcome, TransferSetup, block_bytes, plan_options};
use serde::{Serialize, Serializer};

use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::gpus::{self, Fallback, GpuArg};
use crate::report::{Report, ReportText};
use crate::stop::StopFlag;
use crate::transfer::{self, RouteArgs, TransferWatch};
use crate::{fat, model, units};

const BLOCK: u64 = 4096;
/// How long a command may take: short, so that the demo ends soon even if a command is lost.
const PATIENCE: Duration = Duration::from_millis(500);
/// Bytes of it that are put on the drive at a time.
const PUT: usize = 4 << 20;
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
    /// A fault of the simulated drive (fail-once@n=5, late@n=9,delay=20ms, lost@n=3); may be repeated
    #[arg(long, value_name = "NAME@WHEN")]
    fault: Vec<String>,
    /// Bytes of the model
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = units::parse_size)]
    size: u64,
    /// The seed of the model's random bytes
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = units::parse_number)]
    seed: u64,
}

/// A tensor in GPU memory, and whether its bytes are right.
#[derive(Serialize)]
struct Loaded {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: u64,
    /// Where it lies in the arena.
    offset: u64,
    /// The checksum that the model itself states.
    expected: Option<String>,
    #[serde(serialize_with = "hex")]
    crc32c: u32,
    verified: bool,
}

/// The demo's account: that of every transfer, and what was loaded.
#[derive(Serialize)]
struct DemoDocument<'a> {
    #[serde(flatten)]
    outcome: &'a TransferOutcome,
    seed: u64,
    path: &'static str,
    file_system: &'static str,
    block_bytes: u64,
    /// First block, and how many.
    extents: &'a [(u64, u64)],
    tensors: usize,
    tensor_checks: &'a [Loaded],
    faults: &'a [String],
    faults_struck: u64,
    /// Broken NVMe rules, as the strict simulator counts them; any is a defect of onehop.
    violations: Vec<String>,
    total_seconds: f64,
}

/// Runs the command.
pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let start = Instant::now();
    if !((64 << 10)..=MOST).contains(&args.size) {
        return Err(CliError::Usage("--size: the demo's model has from 64K to 1G bytes".into()));
    }
    let route = RouteArgs { timeout: args.route.timeout.or(Some(PATIENCE)), ..args.route.clone() };
    let route = route.options()?;
    let gpu = gpus::choose_or(&args.gpu, Fallback::Emulated)?;
    let file = model::make(args.size, args.seed, &context.stop)?;
    let sim = make_drive(args, &file, &context.stop)?;
    let stop = context.stop.signal();
    let options = Options { abort_wait: Duration::from_millis(200), stop, ..route.drive_options(false) };
    let drive = Drive::open(sim.port(), options)?;
    let ns = drive.namespace(1)?;
    let place = ModelPlace::FileSystem { paths: &[fat::PATH.into()], partition: None };
    let on_drive = ModelOnDrive::open(&drive, ns, place)?;
    let setup = TransferSetup { drive: &drive, ns, gpu: &gpu, options: &route };
    let plan = on_drive.plan(&Selection::default(), plan_options(ns))?;
    let onehop_transfer::Loaded { arena, mut outcome, landed, .. } = {
        let watch = TransferWatch::new("loading", plan.read_bytes, &context.stop);
        on_drive.load(&setup, &plan, &watch)?
    };
    let tensors = check_tensors(&plan, &*gpu.gpu, &arena, &model::hashes(&on_drive.model)?, context)?;
    outcome.crc32c = Some(model::hash(crc32c(&tensors)));
    let verified =
        check_bytes(&plan, &arena, &file, &context.stop)? && tensors.iter().all(|tensor| tensor.verified);
    outcome.judge(
        verified,
        "compared with the model's own checksums, and with the file that was put on the drive",
    );
    let document = DemoDocument {
        outcome: &outcome,
        seed: args.seed,
        path: fat::PATH,
        file_system: on_drive.file_system.unwrap_or_default(),
        block_bytes: block_bytes(ns),
        extents: &merged(&landed.extents),
        tensors: tensors.len(),
        tensor_checks: &tensors,
        faults: &args.fault,
        faults_struck: sim.stats().faults,
        violations: sim.violations().iter().map(|v| format!("{v:?}")).collect(),
        total_seconds: start.elapsed().as_secs_f64(),
    };
    let failure = judge(&document, verified);
    Ok(Report::new(&document, tell(&document, &drive))?.failed(failure))
}

/// A simulated drive in memory that holds a file system with the model.
fn make_drive(args: &Args, file: &[u8], stop: &StopFlag) -> Result<Sim> {
    let image = fat::make(file);
    let faults = args.fault.iter().map(|text| Fault::parse(text)).collect::<onehop_sim::Result<Vec<_>>>()?;
    let sim = Sim::new(Config {
        media: Media::Memory(image.bytes.next_multiple_of(16 << 20)),
        lba: BLOCK as u32,
        cmb: 1 << 20,
        serial: "ONEHOP-DEMO".into(),
        faults,
        ..Config::default()
    })?;
    // Written past the controller: the model is there before the demo starts.
    for (at, data) in &image.ranges {
        for (part, at) in data.chunks(PUT).zip((*at..).step_by(PUT)) {
            stop.check()?;
            sim.write_media(1, at, part)?;
        }
    }
    Ok(sim)
}

/// Compares every tensor with the checksum that the model itself states.
fn check_tensors(
    plan: &Plan,
    gpu: &dyn Gpu,
    arena: &Region,
    hashes: &BTreeMap<String, String>,
    context: &CommandContext,
) -> Result<Vec<Loaded>> {
    let go_on = || context.stop.check().is_ok();
    let sums = check::check_sums(plan, gpu, arena, &go_on)?;
    let one = |(tensor, crc32c): (&Placed, u32)| {
        let expected = hashes.get(&tensor.name).cloned();
        let verified = expected.as_ref() == Some(&model::hash(crc32c));
        let Placed { name, dtype, shape, bytes, at: offset, .. } = tensor.clone();
        Loaded { name, dtype, shape, bytes, offset, expected, crc32c, verified }
    };
    Ok(plan.tensors.iter().zip(sums).map(one).collect())
}

/// The checksum of all tensors, one after the other, without the gaps between them in the arena.
fn crc32c(tensors: &[Loaded]) -> u32 {
    tensors.iter().fold(0, |crc, t| crc32c::crc32c_combine(crc, t.crc32c, t.bytes as usize))
}

fn hex<S: Serializer>(crc: &u32, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&model::hash(*crc))
}

/// Beyond the checksums: whether the tensors are, byte for byte, what was put on the drive.
fn check_bytes(plan: &Plan, arena: &Region, file: &[u8], stop: &StopFlag) -> Result<bool> {
    for extent in &plan.extents {
        stop.check()?;
        let wanted = file.get(extent.from as usize..(extent.from + extent.row) as usize).unwrap_or_default();
        let mut got = vec![0; extent.row as usize];
        arena.read(extent.to as usize, &mut got)?;
        if got != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

fn judge(document: &DemoDocument<'_>, verified: bool) -> Option<CliError> {
    if !verified {
        return Some(CliError::Mismatch("the tensors in GPU memory are not those of the model".into()));
    }
    let first = document.violations.first()?;
    let count = units::count(document.violations.len() as u64, "rule");
    Some(CliError::Failed(format!(
        "the simulated drive saw {count} of NVMe broken, first {first}; this is a defect of onehop"
    )))
}

/// Ranges of blocks in their order, with none that overlap or follow each other.
fn merged(runs: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut sorted = runs.to_vec();
    sorted.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (lba, blocks) in sorted {
        match merged.last_mut() {
            Some((first, count)) if lba <= *first + *count => *count = (*count).max(lba + blocks - *first),
            _ => merged.push((lba, blocks)),
        }
    }
    merged
}

fn tell(document: &DemoDocument<'_>, drive: &Drive) -> ReportText {
    let DemoDocument { tensors, extents, .. } = document;
    let mut text = ReportText::default();
    text.row(
        "model",
        format!(
            "{} tensors drawn from seed {}: {} on {}, in {} of '{}' (serial {}, blocks of {} bytes)",
            tensors,
            document.seed,
            document.path,
            document.file_system,
            units::count(extents.len() as u64, "extent"),
            drive.identity().model(),
            drive.identity().serial(),
            document.block_bytes,
        ),
    );
    for tensor in document.tensor_checks {
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
    let extents: Vec<_> =
        extents.iter().map(|(lba, blocks)| format!("{lba} to {}", lba + blocks - 1)).collect();
    text.row("plan", format!("one arena in GPU memory, filled from blocks {}", extents.join(", ")));
    transfer::rows(document.outcome, &mut text);
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
        format!("{} NVMe rules broken, as the strict simulated drive counts", document.violations.len()),
    );
    text.row("time", format!("{:.2} s in all", document.total_seconds));
    text
}
