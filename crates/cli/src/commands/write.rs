//! `onehop write`: copies a file into GPU memory, and writes it from there to a drive.

use std::fs::File;
use std::path::PathBuf;

use onehop_drive::{Drive, GpuJob, Namespace, Op};
use onehop_transfer::{Engine, TransferOutcome, TransferSetup, block_bytes, bytes_of, copy, verify_blocks};

use crate::commands::CommandContext;
use crate::drives::{self, DriveArg};
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::report::{Report, ReportText};
use crate::transfer::{self, RouteArgs, TransferWatch};
use crate::units;

/// Write a file through GPU memory to blocks of a drive
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  onehop write -d sim:disk.img --lba 16 --in part.bin --serial ONEHOP-SIM-1 --yes \
                        --verify\n\n`onehop drive identify` shows the serial number, which ensures that the right drive is written."
)]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    /// The first block
    #[arg(long, value_name = "N", value_parser = units::parse_number)]
    lba: u64,
    /// The file to write
    #[arg(long = "in", value_name = "FILE")]
    input: PathBuf,
    /// The drive's own serial number
    #[arg(long, value_name = "S")]
    serial: String,
    /// Yes, overwrite these blocks
    #[arg(long)]
    yes: bool,
    /// Pad the last block with zeroes if the file ends within it
    #[arg(long)]
    pad: bool,
    /// The namespace
    #[arg(long, value_name = "N", default_value_t = 1)]
    nsid: u32,
    #[command(flatten)]
    gpu: GpuArg,
    #[command(flatten)]
    route: RouteArgs,
    /// Read the blocks back by the CPU and compare every byte
    #[arg(long)]
    verify: bool,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let gpu = gpus::choose(&args.gpu)?;
    let options = args.route.options()?;
    let (mut file, file_bytes) = open_input(args)?;
    let found = drives::find(&args.drive.drive, &context.stop)?;
    let drive = drives::bring_up(found, options.drive_options(true), &context.stop)?;
    let ns = drive.namespace(args.nsid)?;
    let blocks = blocks_of(args, ns, file_bytes)?;
    let bytes = bytes_of(ns, args.lba, blocks)?;
    allow(args, &drive, blocks)?;
    let job = GpuJob { lba: args.lba, blocks, offset: 0 };
    let plan = TransferSetup { drive: &drive, ns, gpu: &gpu, options: &options };
    let (engine, memory) = Engine::open(&plan, bytes)?;
    copy::load(&mut file, &args.input, file_bytes as usize, &memory.region, &context.stop)?;
    let moved = {
        let watch = TransferWatch::new("writing", bytes, &context.stop);
        let moved = engine.transfer(Op::Write, ns, &[job], &memory, &watch);
        moved.map_err(|error| CliError::from(error).for_write(&context.stop))?
    };
    let crc = copy::crc32c(&memory.region, 0, bytes as usize)?;
    let mut outcome = TransferOutcome::new(&drive, &gpu, &engine, &moved, Some(crc));
    // The flush needs a queue, and the drive may grant no more than the engine has.
    drop(engine);
    drive.queue()?.flush(ns)?;
    outcome.look_again(&drive);
    let mut failure = None;
    if args.verify {
        let watch = TransferWatch::new("verifying", bytes, &context.stop);
        failure = verify_blocks(Op::Write, (&drive, ns), &job, &memory.region, &mut outcome, &watch)?;
    }
    let mut text = ReportText::default();
    transfer::rows(&outcome, &mut text);
    text.row("flushed", "yes (drive confirmed)");
    Ok(Report::new(outcome, text)?.failed(failure.map(Into::into)))
}

fn open_input(args: &Args) -> Result<(File, u64)> {
    let refuse = |why: &str| Err(CliError::Usage(format!("--in {}: {why}", args.input.display())));
    let failed = |e| CliError::file("reading the metadata of", &args.input, e);
    // Checked before opening: opening a FIFO waits for its other end.
    if !args.input.metadata().map_err(failed)?.is_file() {
        return refuse("only a regular file has a known size");
    }
    let file = File::open(&args.input).map_err(|e| CliError::file("opening", &args.input, e))?;
    let meta = file.metadata().map_err(failed)?;
    if meta.len() == 0 {
        return refuse("the file is empty, so there is nothing to write");
    }
    Ok((file, meta.len()))
}

/// The number of blocks of the file. Fails if it does not fill the last one and `--pad` is missing.
fn blocks_of(args: &Args, ns: &Namespace, bytes: u64) -> Result<u64> {
    let block = block_bytes(ns);
    let over = bytes % block;
    if over != 0 && !args.pad {
        return Err(CliError::Usage(format!(
            "{} has {bytes} bytes, which is {} blocks of {block} bytes and {over} more; add --pad to fill the \
             last block with {} zero bytes",
            args.input.display(),
            bytes / block,
            block - over
        )));
    }
    Ok(bytes.div_ceil(block))
}

/// Fails unless the arguments name this drive's serial number and allow overwriting.
fn allow(args: &Args, drive: &Drive, blocks: u64) -> Result<()> {
    drives::allow_writes(drive, &args.drive.drive, &args.serial)?;
    if !args.yes {
        return Err(CliError::Usage(format!(
            "this would overwrite blocks {} to {} of namespace {} of {}; add --yes to confirm",
            args.lba,
            args.lba + blocks - 1,
            args.nsid,
            drive.name()
        )));
    }
    Ok(())
}
