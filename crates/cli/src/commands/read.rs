//! `onehop read`: blocks of a drive, a file on it, or a file of this machine, into GPU memory.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onehop_drive::{Drive, GpuJob, Namespace, Op};
use onehop_files::{Blocks, Extent, ExtentMap, FileKind, Which, read_extents};
use onehop_gpu::Region;
use serde::Serialize;

use crate::commands::{Context, load};
use crate::drives;
use crate::error::{CliError, Result};
use crate::gpus::{self, Chosen, GpuArg};
use crate::report::{Report, Text};
use crate::sources::refuse_same;
use crate::transfer::{self, Engine, RouteArgs, TransferOutcome, TransferSetup, block_bytes};
use crate::units;
use crate::volume::{self, Span};

/// Read a file, blocks of a drive, or a file of the drive's own file system into GPU memory
#[derive(clap::Args)]
#[command(
    mut_arg("route", |route| route.help(load::ROUTES)),
    after_help = "Examples:\n  onehop read weights.bin -g 0 --out back.bin\n  onehop read -d sim:mem:64M --lba 0 --blocks 2048 --verify\n  \
                        onehop read -d 'sim:disk.img?lba=4096' --lba 16 --blocks 256 --route gpu/posted --out part.bin\n  \
                        onehop read -d sim:ext4.img --path /models/a.gguf --offset 4096 --len 1M --verify"
)]
pub(crate) struct Args {
    /// A file of this machine, on a file system that Linux has mounted
    #[arg(value_name = "FILE", conflicts_with_all = ["drive", "path", "lba", "blocks", "map", "nsid"])]
    file: Option<PathBuf>,
    /// The drive: a PCI address such as 0000:0b:00.0, sim:mem:64M, sim:IMAGE?lba=4096&mdts=5, qtest:SOCKET,MEMORY-FILE, vfio-user:SOCKET
    #[arg(short = 'd', long, value_name = "DRIVE", required_unless_present = "file")]
    drive: Option<String>,
    /// The first block
    #[arg(long, value_name = "N", value_parser = units::parse_number, required_unless_present_any = ["path", "file", "map"])]
    lba: Option<u64>,
    /// How many blocks
    #[arg(long, value_name = "M", value_parser = units::parse_number, required_unless_present_any = ["path", "file", "map"])]
    blocks: Option<u64>,
    /// A file by its path in the drive's file system (ext2/3/4, FAT, exFAT), which onehop reads by itself
    #[arg(long, value_name = "/IN/FS", conflicts_with_all = ["lba", "blocks"])]
    path: Option<PathBuf>,
    /// The file is where this extent map says (see onehop map); of several files in it, --path names one
    #[arg(long, value_name = "MAP", conflicts_with_all = ["lba", "blocks", "partition"])]
    map: Option<PathBuf>,
    /// The partition that holds the file, or none: the whole drive, whatever table it has [default: the only one with a
    /// known file system]
    #[arg(long, value_name = "N|none", value_parser = volume::parse_partition, requires = "path")]
    partition: Option<Which>,
    /// From which byte of the file on
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, conflicts_with = "lba", default_value = "0")]
    offset: u64,
    /// How many bytes of the file [default: all]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, conflicts_with = "lba")]
    len: Option<u64>,
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
    if let Some(path) = &args.file {
        if let Some(out) = &args.out {
            refuse_same(out, path)?;
        }
        let (offset, len, gpu) = (args.offset, args.len, &args.gpu);
        let (route, verify, out) = (args.route.route.name(), args.verify, args.out.as_deref());
        let threads = args.route.reading_threads()?;
        let part = load::Part { path, offset, len, gpu, route, threads, verify, out };
        return load::read(&part, context).map_err(CliError::of_files);
    }
    let gpu = gpus::choose(&args.gpu)?;
    args.route.gpu_mode()?;
    args.route.candidates()?;
    let found = drives::find(args.drive.as_deref().unwrap_or_default())?;
    for read in args.map.iter().chain(&found.image) {
        args.out.iter().try_for_each(|out| refuse_same(out, read))?;
    }
    let drive = Drive::open(found.port, args.route.options(false))?;
    let ns = drive.namespace(args.nsid)?;
    let path = args.path.as_deref();
    match (path, args.lba, args.blocks) {
        _ if args.map.is_some() => read_file(args, path, (&drive, ns, &gpu), context),
        (Some(_), ..) => read_file(args, path, (&drive, ns, &gpu), context),
        (None, Some(lba), Some(blocks)) => read_blocks(args, (lba, blocks), (&drive, ns, &gpu), context),
        _ => Err(CliError::Usage("either --lba and --blocks, or --path".into())),
    }
}

type With<'a> = (&'a Drive, &'a Namespace, &'a Chosen);

fn read_blocks(
    args: &Args,
    (lba, blocks): (u64, u64),
    (drive, ns, gpu): With<'_>,
    context: &Context,
) -> Result<Report> {
    let job = GpuJob { lba, blocks, offset: 0 };
    let bytes = bytes_of(ns, lba, blocks)?;
    let plan = TransferSetup { drive, ns, gpu, args: &args.route };
    let (engine, memory) = Engine::open(&plan, bytes)?;
    let tally = engine.transfer(Op::Read, ns, &[job], &memory, &context.stop)?;
    let crc = transfer::crc32c(&memory.region, 0, bytes as usize)?;
    let mut outcome = TransferOutcome::new(drive, gpu, &engine, &tally, Some(crc));
    // Its queues may be all that the drive grants.
    drop(engine);
    if let Some(out) = &args.out {
        transfer::save(&memory.region, bytes as usize, out, &context.stop)?;
    }
    let mut failure = None;
    if args.verify {
        let differs = transfer::verify(Op::Read, drive, ns, &job, &memory.region, &context.stop)?;
        outcome.judge(differs.is_none(), "compared with what the CPU read into host memory");
        failure = differs.map(|at| mismatch(at, block_bytes(ns), lba));
    }
    let text = rows(&outcome, args);
    Ok(Report::new(outcome, text)?.failed(failure))
}

/// A file's account: that of every transfer, and where the file was.
#[derive(Serialize)]
struct FileDocument {
    #[serde(flatten)]
    outcome: TransferOutcome,
    path: String,
    file_system: String,
    file_bytes: u64,
    offset: u64,
    /// Stretches of the drive that were read.
    ranges: usize,
    /// Bytes that were read from the drive, whole blocks.
    read_bytes: u64,
    /// Bytes of holes, which no drive is asked for.
    hole_bytes: u64,
    /// Bytes that the CPU puts there after the reads: those that the file system keeps among its own, and the zeros of a
    /// hole that begins within a block.
    inline_bytes: u64,
}

/// A file on the drive, however it was found.
struct FileOnDrive {
    path: String,
    file_system: String,
    bytes: u64,
    extents: Vec<Extent>,
    notes: Vec<String>,
    map: Option<ExtentMap>,
    blocks: Arc<dyn Blocks>,
}

/// Finds the file by the drive's own file system.
fn by_file_system(args: &Args, path: &Path, blocks: Arc<dyn Blocks>) -> Result<FileOnDrive> {
    let volume = volume::open(&blocks, args.partition)?;
    let file = volume.lookup(path.as_os_str().as_bytes())?;
    if file.kind != FileKind::File {
        return Err(CliError::Failed(format!("{} is a {}, not a file", path.display(), file.kind.name())));
    }
    Ok(FileOnDrive {
        path: path.display().to_string(),
        file_system: volume.fs_name().to_owned(),
        bytes: file.id.len,
        extents: volume.extents(&file)?.to_vec(),
        notes: volume.notes().to_vec(),
        map: None,
        blocks,
    })
}

/// Finds the file by an extent map.
fn by_map(map: &Path, path: Option<&Path>, (drive, ns): (&Drive, &Namespace)) -> Result<FileOnDrive> {
    let mut maps = volume::read_maps(map, drive, ns)?;
    let names: Vec<_> = maps.iter().map(|map| map.file.path.display().to_string()).collect();
    maps.retain(|map| path.is_none_or(|path| map.file.path == path));
    let (Some(map), true) = (maps.pop(), maps.is_empty()) else {
        return Err(CliError::Usage(format!("--path: the map tells of {}", names.join(", "))));
    };
    Ok(FileOnDrive {
        path: map.file.path.display().to_string(),
        file_system: map.file.fs.clone(),
        bytes: map.file.id.len,
        extents: map.extents()?,
        notes: Vec::new(),
        map: Some(map),
        blocks: volume::blocks(drive, ns)?,
    })
}

fn read_file(
    args: &Args,
    path: Option<&Path>,
    (drive, ns, gpu): With<'_>,
    context: &Context,
) -> Result<Report> {
    let found = match &args.map {
        Some(map) => by_map(map, path, (drive, ns))?,
        None => by_file_system(args, path.unwrap_or(Path::new("")), volume::blocks(drive, ns)?)?,
    };
    let span = Span::new(&found.extents, found.bytes, args.offset, args.len, block_bytes(ns))?;
    let plan = TransferSetup { drive, ns, gpu, args: &args.route };
    let (engine, memory) = Engine::open(&plan, span.memory)?;
    let jobs = span.jobs();
    let mut tally = engine.transfer(Op::Read, ns, &jobs, &memory, &context.stop)?;
    span.fill(&memory.region)?;
    let read_bytes = std::mem::replace(&mut tally.bytes, span.bytes);
    let part = memory.region.slice(span.skip as usize..(span.skip + span.bytes) as usize)?;
    let crc = transfer::crc32c(&part, 0, span.bytes as usize)?;
    let outcome = TransferOutcome::new(drive, gpu, &engine, &tally, Some(crc));
    drop(engine);
    if let Some(out) = &args.out {
        transfer::save(&part, span.bytes as usize, out, &context.stop)?;
    }
    let mut document = FileDocument {
        outcome,
        path: found.path.clone(),
        file_system: found.file_system.clone(),
        file_bytes: found.bytes,
        offset: args.offset,
        ranges: jobs.len(),
        read_bytes,
        hole_bytes: span.parts.zero_bytes(),
        inline_bytes: span.parts.inline_bytes(),
    };
    let failure = if args.verify {
        judge(args, &found, (&span, &memory.region), &mut document, context)?
    } else {
        None
    };
    let mut text = Text::default();
    text.row(
        "file",
        format!(
            "{} on {}: {} in {} of the drive, read as whole blocks ({read_bytes} bytes)",
            document.path,
            document.file_system,
            units::bytes(span.bytes),
            units::count(document.ranges as u64, "extent"),
        ),
    );
    for note in &found.notes {
        text.row("", note);
    }
    let rest = rows(&document.outcome, args);
    text.append(&rest);
    Ok(Report::new(document, text)?.failed(failure))
}

/// Compares GPU memory with the file, and the file with what was mapped, if it was; notes it, and gives what is wrong.
fn judge(
    args: &Args,
    found: &FileOnDrive,
    (span, region): (&Span, &Region),
    document: &mut FileDocument,
    context: &Context,
) -> Result<Option<CliError>> {
    let by = match &found.map {
        Some(map) => {
            if let Err(why) = map.verify(&*found.blocks) {
                document.outcome.judge(false, "the drive compared with the map's checksums");
                return Ok(Some(why.into()));
            }
            "the drive compared with the map's checksums, and every byte with what the CPU read of the file"
        }
        None => "compared with what the CPU read of the file",
    };
    let again = |at, out: &mut [u8]| Ok(read_extents(&*found.blocks, &found.extents, args.offset + at, out)?);
    let differs = volume::verify(span, region, again, || context.stop.check())?;
    document.outcome.judge(differs.is_none(), by);
    Ok(differs.map(|at| {
        let from = args.offset + at;
        CliError::Mismatch(format!("GPU memory and file differ from byte {from} of the file on"))
    }))
}

fn rows(outcome: &TransferOutcome, args: &Args) -> Text {
    let mut text = Text::default();
    outcome.rows(&mut text);
    if let Some(out) = &args.out {
        text.row("out", format!("{} holds the bytes from GPU memory", out.display()));
    }
    text
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
