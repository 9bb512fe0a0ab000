//! `onehop load`: loads the tensors of model files into GPU memory.

mod account;
pub(crate) mod bench;
mod descriptors;
mod local;
mod owned;
mod planned;
mod verdict;

use std::path::{Path, PathBuf};

use clap::ArgGroup;
use onehop_files::Which;
use onehop_gpu::Region;
use onehop_load::{Dtype, Manifest, Plan, Selection, check, plan};

use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::gpus::{Chosen, GpuArg};
use crate::outputs;
use crate::report::Report;
use crate::transfer::RouteArgs;
use crate::units;

pub(crate) use local::{FilePart, read};

/// Load model files (safetensors, GGUF) into GPU memory
#[derive(clap::Args)]
#[command(
    mut_arg("route", |route| route.help(ROUTES)),
    group = ArgGroup::new("source").required(true).args(["files", "drive"]),
    override_usage = "onehop load [OPTIONS] FILE...\n       onehop load [OPTIONS] -d DRIVE --path /IN/FS...\n       \
                      onehop load [OPTIONS] -d DRIVE --map MAP",
    after_help = "Examples:\n  onehop load model.safetensors -g 0\n  onehop load model.safetensors --write-manifest sums.json\n  onehop load model.safetensors --manifest sums.json\n  onehop load llama-70b/ --rank 0/4 --cut \
                        '*q_proj.weight=0' --cut '*o_proj.weight=1'\n  onehop load llama-70b/ -g 0,1,2,3 --cut \
                        '*q_proj.weight=0'\n  onehop load model/ --plan --json\n  onehop load -d \
                        sim:ext4.img --path /models/llama --route gpu/posted --verify\n\nA directory is loaded by its \
                        *.index.json, its only *.safetensors or shards of one model, or its GGUF file."
)]
pub(crate) struct Args {
    /// Files, indexes (*.index.json) or directories, which form one model. Builds with --features remote also accept
    /// http(s):// and s3:// addresses
    #[arg(value_name = "FILE", conflicts_with_all = ["drive", "path", "map", "partition", "nsid"])]
    #[arg(conflicts_with_all = crate::transfer::DRIVE_OPTIONS)]
    files: Vec<PathBuf>,
    /// The drive with the model, which onehop drives: a PCI address such as 0000:0b:00.0, sim:IMAGE?lba=4096,
    /// qtest:SOCKET,MEMORY-FILE, vfio-user:SOCKET, nvme-tcp://HOST:PORT/NQN
    #[arg(short = 'd', long, value_name = "DRIVE", requires = "where_on_drive")]
    drive: Option<String>,
    /// A file, index or directory in the drive's file system (ext2/3/4, FAT, exFAT), which onehop reads itself; may be
    /// repeated
    #[arg(long, value_name = "/IN/FS", requires = "drive", group = "where_on_drive")]
    path: Vec<PathBuf>,
    /// Find the model's files by this extent map (see onehop map), without reading the drive's file system
    #[arg(long, value_name = "MAP", requires = "drive", group = "where_on_drive", conflicts_with = "path")]
    map: Option<PathBuf>,
    /// The partition with the model, or none to ignore any partition table [default: the only partition with a known
    /// file system]
    #[arg(long, value_name = "N|none", value_parser = onehop_transfer::volume::parse_partition, requires = "path")]
    partition: Option<Which>,
    /// The drive's namespace
    #[arg(long, value_name = "N", default_value_t = 1, requires = "drive")]
    nsid: u32,
    #[command(flatten)]
    gpu: GpuArg,
    #[command(flatten)]
    route: RouteArgs,
    /// Print what would be read and how much memory it needs, without loading
    #[arg(long, conflicts_with_all = ["verify", "manifest"])]
    plan: bool,
    /// Read the files again, and compare every byte in GPU memory
    #[arg(long)]
    verify: bool,
    /// Compare the tensors in GPU memory with this manifest of checksums, written by --write-manifest
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Write the checksums of all tensors in GPU memory to this file, after comparing every byte with the files
    /// (--verify)
    #[arg(long, value_name = "FILE", value_parser = outputs::parser(), conflicts_with_all = ["drive", "plan", "manifest", "only", "except", "dtype", "rank", "cut"])]
    write_manifest: Option<PathBuf>,
    /// Only tensors with this name (`*` matches any text, `?` any character); may be repeated. A name or pattern that
    /// matches no tensor is an error, here and below
    #[arg(long, value_name = "PATTERN")]
    only: Vec<String>,
    /// No tensors with this name
    #[arg(long, value_name = "PATTERN")]
    except: Vec<String>,
    /// Only tensors of this type (BF16, F32, Q4_K …)
    #[arg(long, value_name = "TYPE", value_parser = parse_dtype)]
    dtype: Vec<Dtype>,
    /// Load this rank's part of the tensors of --cut: rank/ranks. With several GPUs, the rank of the first [default:
    /// one rank per GPU]
    #[arg(long, value_name = "R/N", value_parser = parse_rank, requires = "cut")]
    rank: Option<(u64, u64)>,
    /// Cut tensors with this name along this dimension: pattern=dimension
    #[arg(long, value_name = "PATTERN=DIM", value_parser = parse_cut)]
    cut: Vec<(String, usize)>,
}

/// The help of `--route` for commands that also load local files.
pub(crate) const ROUTES: &str = "The route: auto (the best that works), or exactly this one. Local files: cpu/cached (the page \
    cache), cpu/pinned (past it), cufile (NVIDIA's library). Drives: gpu/tier3, gpu/posted, gpu/tier2, gpu/tier1, cpu/direct, cpu/pinned";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RouteChoice {
    Ring(onehop_load::engine::Route),
    /// Not a route of local files, and why.
    NeedsDrive(&'static str),
}

fn parse_route(text: &str) -> std::result::Result<RouteChoice, String> {
    use onehop_load::engine::Route as Ring;
    Ok(match text {
        "auto" => RouteChoice::Ring(Ring::Auto),
        "cpu/cached" => RouteChoice::Ring(Ring::Cached),
        "cpu/pinned" => RouteChoice::Ring(Ring::Pinned),
        "cufile" => RouteChoice::Ring(Ring::CuFile),
        "gpu/tier3" | "gpu/posted" | "gpu/tier2" | "gpu/tier1" | "cpu/direct" => RouteChoice::NeedsDrive(
            "only the kernel reads files of a mounted file system; this route needs a drive that onehop drives itself",
        ),
        _ => return Err("routes are auto, cpu/pinned, cpu/cached, cufile, and the routes of drives".into()),
    })
}

fn parse_dtype(text: &str) -> std::result::Result<Dtype, String> {
    text.to_uppercase().parse().map_err(|e: onehop_load::UnknownDtype| e.to_string())
}

fn parse_rank(text: &str) -> std::result::Result<(u64, u64), String> {
    let numbers = text.split_once('/').and_then(|(r, n)| Some((r.parse().ok()?, n.parse().ok()?)));
    match numbers {
        Some((rank, ranks)) if rank < ranks => Ok((rank, ranks)),
        _ => Err("a rank is written as 0/4: the first of four".into()),
    }
}

fn parse_cut(text: &str) -> std::result::Result<(String, usize), String> {
    let cut = text.rsplit_once('=').and_then(|(pattern, dim)| Some((pattern.to_owned(), dim.parse().ok()?)));
    cut.ok_or_else(|| "a cut is written as PATTERN=DIMENSION: '*.q_proj.weight=0'".into())
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    if !args.cut.is_empty() && args.rank.is_none() && !args.gpu.is_all() && args.gpu.names().len() < 2 {
        return Err(CliError::Usage("--cut needs several ranks: --rank 0/4, or several GPUs".into()));
    }
    match &args.drive {
        Some(drive) => owned::run(args, drive, context),
        None => local::run(args, context).map_err(CliError::for_local_files),
    }
}

/// A GPU and its part of the model.
struct Share {
    gpu: Chosen,
    plan: Plan,
    fit: Option<plan::Fit>,
    /// Its rank, and the number of ranks.
    rank: (u64, u64),
}

/// A share after loading.
struct LoadedShare {
    share: Share,
    arena: Region,
    /// Checksums of the tensors, if they were requested.
    sums: Option<Vec<u32>>,
    /// Its route, if each share has its own.
    route: Option<&'static str>,
}

impl LoadedShare {
    /// Adds the arena, and the checksums if `wanted`.
    fn new(share: Share, arena: Region, wanted: bool, context: &CommandContext) -> Result<Self> {
        let keep_going = || context.stop.check().is_ok();
        let sums = || check::check_sums(&share.plan, &*share.gpu.gpu, &arena, &keep_going);
        let sums = if wanted { Some(sums()?) } else { None };
        Ok(Self { share, arena, sums, route: None })
    }

    /// The combined checksum of its tensors.
    fn crc32c(&self) -> Option<u32> {
        self.sums.as_ref().map(|sums| check::combined(&self.share.plan, sums))
    }
}

/// The combined checksum of all tensors of all GPUs.
fn crc32c(loaded: &[LoadedShare]) -> Option<u32> {
    loaded.iter().try_fold(0, |crc, one| {
        Some(crc32c::crc32c_combine(crc, one.crc32c()?, one.share.plan.tensor_bytes as usize))
    })
}

/// Combines GPUs and plans.
fn shares(args: &Args, gpus: Vec<Chosen>, plans: Vec<Plan>) -> Result<Vec<Share>> {
    let count = gpus.len();
    let share = |(i, (gpu, plan)): (usize, (Chosen, Plan))| {
        let fit = plan.fit_on(&*gpu.gpu)?;
        Ok(Share { gpu, plan, fit, rank: rank(args, i, count)? })
    };
    gpus.into_iter().zip(plans).enumerate().map(share).collect()
}

/// Fails if a share does not fit into its GPU's memory.
fn ensure_fits(shares: &[Share]) -> Result<()> {
    match shares.iter().find_map(|share| Some((share, share.fit.filter(|fit| !fit.fits)?))) {
        None => Ok(()),
        Some((Share { gpu, .. }, fit)) => Err(CliError::Failed(format!(
            "the model needs {} of memory on GPU {}, but only {} is free: {} is missing. Load a part of the model (--only, \
             --dtype, --rank), or end other programs that use the GPU",
            units::bytes(fit.peak_gpu_bytes),
            gpu.gpu.name(),
            units::bytes(fit.free_gpu_bytes),
            units::bytes(fit.missing_bytes),
        ))),
    }
}

/// The selection for GPU number `gpu` of `count`.
fn selection(args: &Args, gpu: usize, count: usize) -> Result<Selection> {
    let mut selection = Selection::default();
    for pattern in &args.only {
        selection = selection.only(pattern);
    }
    for pattern in &args.except {
        selection = selection.except(pattern);
    }
    for dtype in &args.dtype {
        selection = selection.dtype(*dtype);
    }
    for (pattern, dim) in &args.cut {
        selection = selection.cut(pattern, *dim);
    }
    let (rank, ranks) = rank(args, gpu, count)?;
    Ok(selection.rank(rank, ranks).map_err(onehop_load::Error::from)?)
}

/// The rank of a GPU: counted from --rank, or from 0.
fn rank(args: &Args, gpu: usize, count: usize) -> Result<(u64, u64)> {
    let (first, ranks) = args.rank.unwrap_or((0, count as u64));
    let rank = first + gpu as u64;
    if first + count as u64 > ranks {
        return Err(CliError::Usage(format!(
            "--rank {first}/{ranks}: with {count} GPUs, these would be ranks {first} to {} of {ranks}",
            first + count as u64 - 1
        )));
    }
    Ok((rank, ranks))
}

fn read_manifest(path: &Path) -> Result<(&Path, Manifest)> {
    Ok((path, Manifest::read(&onehop_load::LocalFile::open(path)?)?))
}
