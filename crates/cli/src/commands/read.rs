//! `onehop read`: blocks of a drive into GPU memory.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use onehop_drive::{Drive, GpuJob, Namespace, Op};

use crate::commands::Context;
use crate::drives::{self, DriveArg};
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::report::{Report, Text};
use crate::transfer::{self, Engine, Outcome, Plan, RouteArgs, block_bytes};
use crate::units;

/// Read blocks of a drive into GPU memory
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  onehop read -d sim:mem:64M --lba 0 --blocks 2048 --verify\n  \
                        onehop read -d 'sim:disk.img?lba=4096' --lba 16 --blocks 256 --route gpu/posted --out part.bin")]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    /// The first block
    #[arg(long, value_name = "N", value_parser = units::parse_number)]
    lba: u64,
    /// How many blocks
    #[arg(long, value_name = "M", value_parser = units::parse_number)]
    blocks: u64,
    /// The namespace
    #[arg(long, value_name = "N", default_value_t = 1)]
    nsid: u32,
    #[command(flatten)]
    gpu: GpuArg,
    #[command(flatten)]
    route: RouteArgs,
    /// Copy the bytes back out of GPU memory into this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Read the blocks once more by the CPU and compare every byte
    #[arg(long)]
    verify: bool,
}

/// Runs it.
pub(crate) fn run(args: &Args, context: &Context) -> Result<Report> {
    let gpu = gpus::choose(&args.gpu)?;
    args.route.gpu_mode()?;
    args.route.candidates()?;
    let found = drives::find(&args.drive.drive)?;
    if let (Some(out), Some(image)) = (&args.out, &found.image) {
        refuse_same(out, image)?;
    }
    let drive = Drive::open(found.port, args.route.options(false))?;
    let ns = drive.namespace(args.nsid)?;
    let job = GpuJob { lba: args.lba, blocks: args.blocks, offset: 0 };
    let bytes = bytes_of(ns, args.lba, args.blocks)?;
    let plan = Plan { drive: &drive, ns, gpu: &gpu, args: &args.route };
    let (engine, memory) = Engine::open(&plan, bytes)?;
    let tally = engine.transfer(Op::Read, ns, &[job], &memory, &context.stop)?;
    let crc = transfer::crc32c(&memory.region, 0, bytes as usize)?;
    let mut outcome = Outcome::new(&drive, &gpu, &engine, &tally, crc);
    // Its queues may be all that the drive grants.
    drop(engine);
    if let Some(out) = &args.out {
        transfer::save(&memory.region, bytes as usize, out, &context.stop)?;
    }
    let mut failure = None;
    if args.verify {
        let differs = transfer::verify(&drive, ns, &job, &memory.region, &context.stop)?;
        outcome.judge(differs.is_none(), "compared with what the CPU read into host memory");
        failure = differs.map(|at| mismatch(at, block_bytes(ns), args.lba));
    }
    let mut text = Text::default();
    outcome.rows(&mut text);
    if let Some(out) = &args.out {
        text.row("file", format!("{} holds the bytes from GPU memory", out.display()));
    }
    Ok(Report::new(outcome, text)?.failed(failure))
}

/// Bytes of so many blocks, which have to be there.
pub(crate) fn bytes_of(ns: &Namespace, lba: u64, blocks: u64) -> Result<u64> {
    onehop_proto::format::check_range(ns.blocks, lba, blocks)
        .map_err(|source| onehop_drive::Error::Range { nsid: ns.nsid, source })?;
    let bytes = ns.format.transfer_bytes(blocks);
    bytes.ok_or_else(|| CliError::Usage(format!("{blocks} blocks are more bytes than 64 bits count")))
}

/// The error for bytes that differ from what the drive holds.
pub(crate) fn mismatch(at: u64, block: u64, lba: u64) -> CliError {
    let place = format!("byte {at} (block {})", lba.saturating_add(at / block.max(1)));
    CliError::Mismatch(format!(
        "GPU memory and drive differ from {place} on: some write to GPU memory was lost, or somebody wrote to the \
         drive meanwhile"
    ))
}

/// The file to write must not be the one that holds the drive's blocks.
fn refuse_same(out: &Path, image: &Path) -> Result<()> {
    let identity = |path: &Path| path.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    if identity(out).is_some() && identity(out) == identity(image) {
        return Err(CliError::Usage(format!("--out {} is the drive's own image file", out.display())));
    }
    Ok(())
}
