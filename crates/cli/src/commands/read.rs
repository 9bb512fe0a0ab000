//! `onehop read`: reads blocks of a drive, a file on it, or a local file into GPU memory.

use std::path::{Path, PathBuf};

use clap::ArgGroup;
use onehop_files::Which;
use onehop_gpu::Region;
use onehop_transfer::{FileOnDrive, FileRead, TransferOutcome, TransferSetup, bytes_of, copy, volume};
use serde::Serialize;

use crate::commands::{CommandContext, load};
use crate::drives;
use crate::error::{CliError, Result};
use crate::gpus::{self, GpuArg};
use crate::outputs;
use crate::report::{Report, ReportText};
use crate::sources::refuse_overwrite;
use crate::transfer::{self, RouteArgs, TransferWatch};
use crate::units;

/// Read a file, blocks of a drive, or a file of the drive's own file system into GPU memory
#[derive(clap::Args)]
#[command(
    mut_arg("route", |route| route.help(load::ROUTES)),
    group = ArgGroup::new("source").required(true).args(["file", "drive"]),
    group = ArgGroup::new("where_on_drive").multiple(true).args(["path", "map", "lba"]),
    override_usage = "onehop read [OPTIONS] FILE\n       onehop read [OPTIONS] -d DRIVE --path /IN/FS\n       \
                      onehop read [OPTIONS] -d DRIVE --map MAP\n       \
                      onehop read [OPTIONS] -d DRIVE --lba N --blocks M",
    after_help = "Examples:\n  onehop read weights.bin -g 0 --out back.bin\n  onehop read -d sim:mem:64M --lba 0 --blocks 2048 --verify\n  \
                        onehop read -d 'sim:disk.img?lba=4096' --lba 16 --blocks 256 --route gpu/posted --out part.bin\n  \
                        onehop read -d sim:ext4.img --path /models/a.gguf --offset 4096 --len 1M --verify"
)]
pub(crate) struct Args {
    /// A local file, on a file system that Linux has mounted
    #[arg(value_name = "FILE", conflicts_with_all = ["drive", "path", "lba", "blocks", "map", "nsid", "partition"])]
    #[arg(conflicts_with_all = crate::transfer::DRIVE_OPTIONS)]
    file: Option<PathBuf>,
    /// The drive: a PCI address such as 0000:0b:00.0, sim:mem:64M, sim:IMAGE?lba=4096&mdts=5, qtest:SOCKET,MEMORY-FILE,
    /// vfio-user:SOCKET, nvme-tcp://HOST:PORT/NQN
    #[arg(short = 'd', long, value_name = "DRIVE", requires = "where_on_drive")]
    drive: Option<String>,
    /// The first block
    #[arg(long, value_name = "N", value_parser = units::parse_number, requires = "blocks")]
    lba: Option<u64>,
    /// The number of blocks
    #[arg(long, value_name = "M", value_parser = units::parse_number, requires = "lba")]
    blocks: Option<u64>,
    /// The path of a file in the drive's file system (ext2/3/4, FAT, exFAT), which onehop reads itself
    #[arg(long, value_name = "/IN/FS", conflicts_with_all = ["lba", "blocks"])]
    path: Option<PathBuf>,
    /// Find the file by this extent map (see onehop map); if it has several files, --path names one
    #[arg(long, value_name = "MAP", conflicts_with_all = ["lba", "blocks", "partition"])]
    map: Option<PathBuf>,
    /// The partition with the file, or none to ignore any partition table [default: the only partition with a known
    /// file system]
    #[arg(long, value_name = "N|none", value_parser = volume::parse_partition, requires = "path")]
    partition: Option<Which>,
    /// The first byte to read
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, conflicts_with = "lba", default_value = "0")]
    offset: u64,
    /// The number of bytes to read [default: all]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, conflicts_with = "lba")]
    len: Option<u64>,
    /// The namespace
    #[arg(long, value_name = "N", default_value_t = 1)]
    nsid: u32,
    #[command(flatten)]
    gpu: GpuArg,
    #[command(flatten)]
    route: RouteArgs,
    /// Copy the bytes from GPU memory into this file
    #[arg(long, value_name = "FILE", value_parser = outputs::parser())]
    out: Option<PathBuf>,
    /// Read the blocks again by the CPU, and compare every byte
    #[arg(long)]
    verify: bool,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    if let Some(path) = &args.file {
        if let Some(out) = &args.out {
            refuse_overwrite(out, path)?;
        }
        let (offset, len, gpu) = (args.offset, args.len, &args.gpu);
        let (route, verify, out) = (args.route.route.name(), args.verify, args.out.as_deref());
        let threads = args.route.reading_threads()?;
        let part = load::FilePart { path, offset, len, gpu, route, threads, verify, out };
        return load::read(&part, context).map_err(CliError::for_local_files);
    }
    let gpu = gpus::choose(&args.gpu)?;
    let options = args.route.options()?;
    let found = drives::find(args.drive.as_deref().unwrap_or_default(), &context.stop)?;
    for input in args.map.iter().chain(&found.files) {
        args.out.iter().try_for_each(|out| refuse_overwrite(out, input))?;
    }
    let drive = drives::bring_up(found, options.drive_options(false), &context.stop)?;
    let setup =
        TransferSetup { drive: &drive, ns: drive.namespace(args.nsid)?, gpu: &gpu, options: &options };
    let path = args.path.as_deref();
    match (path, args.lba, args.blocks) {
        _ if args.map.is_some() => read_file(args, path, &setup, context),
        (Some(_), ..) => read_file(args, path, &setup, context),
        (None, Some(lba), Some(blocks)) => read_blocks(args, (lba, blocks), &setup, context),
        _ => Err(CliError::Usage("either --lba and --blocks, or --path".into())),
    }
}

fn read_blocks(
    args: &Args,
    (lba, blocks): (u64, u64),
    setup: &TransferSetup<'_>,
    context: &CommandContext,
) -> Result<Report> {
    let total = bytes_of(setup.ns, lba, blocks)?;
    let mut read = {
        let watch = TransferWatch::new("reading", total, &context.stop);
        onehop_transfer::read_blocks(setup, lba, blocks, &watch)?
    };
    read.outcome.note_crc32c(copy::crc32c(&read.data, 0, read.data.len())?);
    save(&read.data, args, context)?;
    let failure = if args.verify {
        let watch = TransferWatch::new("verifying", total, &context.stop);
        read.verify(setup.drive, setup.ns, &watch)?
    } else {
        None
    };
    let text = rows(&read.outcome, args);
    Ok(Report::new(read.outcome, text)?.failed(failure.map(Into::into)))
}

/// Copies the bytes from GPU memory into the output file, if one is named.
fn save(data: &Region, args: &Args, context: &CommandContext) -> Result<()> {
    let Some(out) = &args.out else { return Ok(()) };
    let watch = TransferWatch::new("copying out", data.len() as u64, &context.stop);
    Ok(copy::save(data, data.len(), out, &watch)?)
}

/// The JSON document: that of every transfer, and where the file was.
#[derive(Serialize)]
struct FileDocument {
    #[serde(flatten)]
    outcome: TransferOutcome,
    path: String,
    file_system: String,
    file_bytes: u64,
    offset: u64,
    /// Number of extents that were read.
    extent_count: usize,
    /// Bytes read from the drive, as whole blocks.
    read_bytes: u64,
    /// Bytes of holes, which are not read.
    hole_bytes: u64,
    /// Bytes that the CPU writes after the reads: file contents in file system metadata, and the zeros of a hole that
    /// begins within a block.
    inline_bytes: u64,
}

fn read_file(
    args: &Args,
    path: Option<&Path>,
    setup: &TransferSetup<'_>,
    context: &CommandContext,
) -> Result<Report> {
    let TransferSetup { drive, ns, .. } = *setup;
    let found = match &args.map {
        Some(map) => FileOnDrive::by_map(drive, ns, map, path)?,
        None => FileOnDrive::by_file_system(drive, ns, path.unwrap_or(Path::new("")), args.partition)?,
    };
    let mut read = {
        let bytes = found.bytes.saturating_sub(args.offset).min(args.len.unwrap_or(u64::MAX));
        let watch = TransferWatch::new("reading", bytes, &context.stop);
        found.read(setup, args.offset, args.len, &watch)?
    };
    read.outcome.note_crc32c(copy::crc32c(&read.data, 0, read.data.len())?);
    save(&read.data, args, context)?;
    let failure = if args.verify { found.verify(&mut read, &context.stop)? } else { None };
    let FileRead { span, outcome, ranges, read_bytes, .. } = read;
    let document = FileDocument {
        outcome,
        path: found.path,
        file_system: found.file_system,
        file_bytes: found.bytes,
        offset: args.offset,
        extent_count: ranges,
        read_bytes,
        hole_bytes: span.parts.zero_bytes(),
        inline_bytes: span.parts.inline_bytes(),
    };
    let mut text = ReportText::default();
    text.row(
        "file",
        format!(
            "{} on {}: {} in {} of the drive, read as whole blocks ({read_bytes} bytes)",
            document.path,
            document.file_system,
            units::bytes(span.bytes),
            units::count(document.extent_count as u64, "extent"),
        ),
    );
    for note in &found.notes {
        text.row("", note);
    }
    text.append(&rows(&document.outcome, args));
    Ok(Report::new(document, text)?.failed(failure.map(Into::into)))
}

fn rows(outcome: &TransferOutcome, args: &Args) -> ReportText {
    let mut text = ReportText::default();
    transfer::rows(outcome, &mut text);
    if let Some(out) = &args.out {
        text.row("out", format!("{} contains the bytes from GPU memory", out.display()));
    }
    text
}
