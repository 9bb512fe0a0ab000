//! `onehop demo`: the whole path, on any machine. A simulated drive holds a file system with a model. The model is
//! loaded as by `onehop load -d`, by commands of GPU threads, and every byte is checked.

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
/// The default command timeout: short, so that the demo ends soon even if a command is lost.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Bytes written to the simulated media at a time.
const WRITE_BYTES: usize = 4 << 20;
/// Maximum size of the model.
const MAX_SIZE: u64 = 1 << 30;

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
    /// Size of the model
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = units::parse_size)]
    size: u64,
    /// The seed of the model's random bytes
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = units::parse_number)]
    seed: u64,
}

/// A loaded tensor, and whether its bytes are right.
#[derive(Serialize)]
struct TensorCheck {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: u64,
    /// Its offset in the arena.
    offset: u64,
    /// The checksum in the model's metadata.
    expected: Option<String>,
    #[serde(serialize_with = "hex")]
    crc32c: u32,
    verified: bool,
}

/// The JSON document: that of every transfer, and what was loaded.
#[derive(Serialize)]
struct DemoDocument<'a> {
    #[serde(flatten)]
    outcome: &'a TransferOutcome,
    seed: u64,
    path: &'static str,
    file_system: &'static str,
    block_bytes: u64,
    /// First block and number of blocks.
    extents: &'a [(u64, u64)],
    tensors: usize,
    tensor_checks: &'a [TensorCheck],
    faults: &'a [String],
    faults_struck: u64,
    /// NVMe rules that onehop violated, as detected by the simulator; any is a defect.
    violations: Vec<String>,
    total_seconds: f64,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let start = Instant::now();
    if !((64 << 10)..=MAX_SIZE).contains(&args.size) {
        return Err(CliError::Usage("--size: the demo's model has 64K to 1G bytes".into()));
    }
    let route = RouteArgs { timeout: args.route.timeout.or(Some(TIMEOUT)), ..args.route.clone() };
    let route = route.options()?;
    let gpu = gpus::choose_or(&args.gpu, Fallback::Emulated)?;
    let file = model::generate(args.size, args.seed, &context.stop)?;
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
    outcome.judge(verified, "compared with the model's own checksums, and with the file on the drive");
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
    Ok(Report::new(&document, report_text(&document, &drive))?.failed(failure))
}

/// Creates a simulated drive in memory with a file system and the model.
fn make_drive(args: &Args, file: &[u8], stop: &StopFlag) -> Result<Sim> {
    let image = fat::generate(file);
    let faults = args.fault.iter().map(|text| Fault::parse(text)).collect::<onehop_sim::Result<Vec<_>>>()?;
    let sim = Sim::new(Config {
        media: Media::Memory(image.bytes.next_multiple_of(16 << 20)),
        lba: BLOCK as u32,
        cmb: 1 << 20,
        serial: "ONEHOP-DEMO".into(),
        faults,
        ..Config::default()
    })?;
    // Written directly to the media, not by commands of the drive.
    for (at, data) in &image.ranges {
        for (chunk, at) in data.chunks(WRITE_BYTES).zip((*at..).step_by(WRITE_BYTES)) {
            stop.check()?;
            sim.write_media(1, at, chunk)?;
        }
    }
    Ok(sim)
}

/// Compares every tensor with its checksum in the model's metadata.
fn check_tensors(
    plan: &Plan,
    gpu: &dyn Gpu,
    arena: &Region,
    hashes: &BTreeMap<String, String>,
    context: &CommandContext,
) -> Result<Vec<TensorCheck>> {
    let keep_going = || context.stop.check().is_ok();
    let sums = check::check_sums(plan, gpu, arena, &keep_going)?;
    let one = |(tensor, crc32c): (&Placed, u32)| {
        let expected = hashes.get(&tensor.name).cloned();
        let verified = expected.as_ref() == Some(&model::hash(crc32c));
        let Placed { name, dtype, shape, bytes, at: offset, .. } = tensor.clone();
        TensorCheck { name, dtype, shape, bytes, offset, expected, crc32c, verified }
    };
    Ok(plan.tensors.iter().zip(sums).map(one).collect())
}

/// The combined checksum of all tensors, without the gaps between them.
fn crc32c(tensors: &[TensorCheck]) -> u32 {
    tensors.iter().fold(0, |crc, t| crc32c::crc32c_combine(crc, t.crc32c, t.bytes as usize))
}

fn hex<S: Serializer>(crc: &u32, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&model::hash(*crc))
}

/// Compares the tensors in GPU memory with the file, byte by byte.
fn check_bytes(plan: &Plan, arena: &Region, file: &[u8], stop: &StopFlag) -> Result<bool> {
    for extent in &plan.extents {
        stop.check()?;
        let expected =
            file.get(extent.from as usize..(extent.from + extent.row) as usize).unwrap_or_default();
        let mut got = vec![0; extent.row as usize];
        arena.read(extent.to as usize, &mut got)?;
        if got != expected {
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
        "onehop violated {count} of NVMe, first {first}, as the simulated drive detected; this is a defect of onehop"
    )))
}

/// Sorts ranges of blocks, and merges those that overlap or adjoin.
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

fn report_text(document: &DemoDocument<'_>, drive: &Drive) -> ReportText {
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
                if tensor.verified {
                    "matches the model's checksum"
                } else {
                    "DOES NOT MATCH the model's checksum"
                },
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
        format!(
            "{} NVMe rules violated, as counted by the strict simulated drive",
            document.violations.len()
        ),
    );
    text.row("time", format!("{:.2} s in all", document.total_seconds));
    text
}
