//! `onehop map`: records the extents and checksums of files, to read them after the drive is detached from the kernel.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::ArgGroup;
use onehop_drive::Options;
use onehop_files::live::{LiveFile, Rung, System};
use onehop_files::{ExtentMap, Which};
use onehop_load::{Kind, Local, OnVolume, Store};
use onehop_transfer::volume;
use serde::Serialize;
use serde_json::json;

use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::outputs;
use crate::report::{Report, ReportText};
use crate::sources::refuse_overwrite;
use crate::{drives, units};

/// Record where files are stored on a drive, to read them once onehop drives it
#[derive(clap::Args)]
#[command(
    group = ArgGroup::new("source").required(true).args(["files", "drive"]),
    override_usage = "onehop map [OPTIONS] FILE... --out MAP\n       \
                      onehop map [OPTIONS] -d DRIVE --path /IN/FS... --out MAP",
    after_help = "Examples:\n  onehop map model/ --out model.map\n  onehop map -d sim:ext4.img --path /models/llama \
                        --out llama.map\n  onehop load -d sim:ext4.img --map llama.map --verify\n\nIn a directory, it maps model files: *.safetensors, *.gguf, *.safetensors.index.json. Each file is read once, \
                        for its checksums."
)]
pub(crate) struct Args {
    /// Local files and directories, on a file system that Linux has mounted
    #[arg(value_name = "FILE", conflicts_with_all = ["drive", "path", "partition", "nsid"])]
    files: Vec<PathBuf>,
    /// A drive whose file system onehop reads itself: a PCI address such as 0000:0b:00.0, or sim:IMAGE?lba=4096
    #[arg(short = 'd', long, value_name = "DRIVE", requires = "path")]
    drive: Option<String>,
    /// A file or directory in the drive's file system; may be repeated
    #[arg(long, value_name = "/IN/FS", requires = "drive")]
    path: Vec<PathBuf>,
    /// The partition with the files, or none to ignore any partition table [default: the only partition with a known
    /// file system]
    #[arg(long, value_name = "N|none", value_parser = volume::parse_partition, requires = "path")]
    partition: Option<Which>,
    /// The drive's namespace
    #[arg(long, value_name = "N", default_value_t = 1, requires = "drive")]
    nsid: u32,
    /// The map file to write
    #[arg(long, value_name = "MAP", value_parser = outputs::parser())]
    out: PathBuf,
}

/// An extent map, and how stable the extents were meanwhile.
struct MadeMap {
    map: ExtentMap,
    rung: Rung,
}

/// A map in the JSON document.
#[derive(Serialize)]
struct About<'a> {
    path: String,
    file_system: &'a str,
    bytes: u64,
    extents: usize,
    #[serde(rename = "checked_pieces")]
    checked_chunks: usize,
    drive: &'a onehop_files::DriveId,
    /// How stable the extents were while they were read, from 1 to 5.
    stability: u8,
    stability_text: &'static str,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let made = match &args.drive {
        Some(spec) => of_drive(args, spec, context)?,
        None => of_live_files(&args.files, context)?,
    };
    for MadeMap { map, .. } in made.iter().filter(|_| args.drive.is_none()) {
        refuse_overwrite(&args.out, &map.file.path)?;
    }
    let bytes: Vec<u8> = made.iter().flat_map(|made| made.map.to_bytes()).collect();
    outputs::write(&args.out, bytes)?;
    let maps = made.iter().map(about).collect::<Result<Vec<_>>>()?;
    let mut text = ReportText::default();
    for file in &maps {
        text.row(
            "mapped",
            format!(
                "{}: {} in {} on drive {:?} ({})",
                file.path,
                units::bytes(file.bytes),
                units::count(file.extents as u64, "extent"),
                file.drive.serial,
                file.file_system,
            ),
        );
        text.row("stability", file.stability_text);
    }
    text.row("out", args.out.display());
    Report::new(json!({ "out": args.out.display().to_string(), "maps": maps }), text)
}

fn about(made: &MadeMap) -> Result<About<'_>> {
    let MadeMap { map, rung } = made;
    Ok(About {
        path: map.file.path.display().to_string(),
        file_system: &map.file.fs,
        bytes: map.file.id.len,
        extents: map.extents()?.len(),
        checked_chunks: map.chunks().iter().filter(|chunk| chunk.crc32c.is_some()).count(),
        drive: &map.drive,
        stability: rung.number(),
        stability_text: rung.text(),
    })
}

/// Maps files of a mounted file system, as the kernel reports their extents.
fn of_live_files(paths: &[PathBuf], context: &CommandContext) -> Result<Vec<MadeMap>> {
    let system = System::default();
    let one = |path: PathBuf| {
        context.stop.check()?;
        let live = LiveFile::open(&path, &system)?;
        Ok(MadeMap { map: live.map()?, rung: live.rung() })
    };
    files_of(&Local, paths)?.into_iter().map(one).collect()
}

/// Maps files of a drive that onehop drives.
fn of_drive(args: &Args, spec: &str, context: &CommandContext) -> Result<Vec<MadeMap>> {
    let found = drives::find(spec, &context.stop)?;
    found.files.iter().try_for_each(|file| refuse_overwrite(&args.out, file))?;
    let drive = drives::bring_up(found, Options::default(), &context.stop)?;
    let ns = drive.namespace(args.nsid)?;
    let blocks = volume::blocks(&drive, ns)?;
    let store = OnVolume::new(volume::open(&blocks, args.partition)?, blocks);
    let id = volume::drive_id(&drive, ns)?;
    let one = |path: PathBuf| {
        context.stop.check()?;
        Ok(MadeMap { map: store.map(&path, id.clone())?, rung: Rung::Unmounted })
    };
    files_of(&store, &args.path)?.into_iter().map(one).collect()
}

/// The named files, and the model files of named directories.
fn files_of(store: &dyn Store, paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if store.kind(path)? == Kind::File {
            files.push(path.clone());
            continue;
        }
        let mut names = store.names(path)?;
        names.retain(|name| is_of_a_model(name));
        names.sort_unstable();
        if names.is_empty() {
            let why = "holds no *.safetensors, no *.gguf and no *.safetensors.index.json";
            return Err(CliError::Failed(format!("{} {why}", path.display())));
        }
        files.extend(names.iter().map(|name| path.join(name)));
    }
    Ok(files)
}

fn is_of_a_model(name: &OsStr) -> bool {
    // Names may be any bytes.
    let name = name.as_encoded_bytes();
    let ends = |ending: &str| name.ends_with(ending.as_bytes());
    !name.starts_with(b".") && (ends(".safetensors") || ends(".gguf") || ends(".safetensors.index.json"))
}
