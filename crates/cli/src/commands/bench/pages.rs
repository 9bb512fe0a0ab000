//! `onehop bench pages`: pages between one file and host or GPU memory, by the library, by rings of a mount and by plain
//! threads.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_bench::pages::{
    LibraryMover, PageFile, PageMover, PagePlan, PageRow, RingMover, ThreadMover, measure,
};
use onehop_bench::results::{Machine, RateLimit};
use onehop_gpu::Place;
use onehop_usrbio::gpu::{AnyGpu, GpuChoice, Gpus};
use serde::Serialize;

use super::{limits, report};
use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::progress::TransientBar;
use crate::report::{Report, ReportText};
use crate::units;

/// Measure pages between one file and memory, as KV caches move them, by the library, by rings of a mount and by plain threads
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop bench pages\n  onehop bench pages --root /dev/shm --size 4G -g 0 --json\n  onehop bench pages \
                  --memory vram --page 4K,64K --io write --depth 32\n\nA file of --size bytes is created in a folder below --root \
                  and removed afterwards. `onehop mount` serves that folder in a process of its own. Pages are at random places. Each \
                  round moves many; every byte of every page is compared outside of the measured time. The library \
                  moves batches of as many pages as are in flight; its rows are called registered or staged, as its pages were moved. \
                  The threads each call pread or pwrite, and copy pages to or from GPU memory by a stream of their own."
)]
pub(crate) struct Args {
    /// The folder in which the file is created [default: /dev/shm]
    #[arg(long, default_value = "/dev/shm", hide_default_value = true)]
    root: PathBuf,
    /// Size of the file
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = units::parse_size)]
    size: u64,
    /// The GPU: a CUDA number, or emu (emulated) [default: 0, or emu without CUDA]
    #[arg(short = 'g', long = "gpu", value_name = "GPU")]
    gpu: Option<String>,
    /// Where the pages' memory is
    #[arg(long, value_enum, value_delimiter = ',', default_value = "host,vram")]
    memory: Vec<PageMemory>,
    /// How pages are moved
    #[arg(long, value_enum, value_delimiter = ',', default_value = "library,ring,threads")]
    by: Vec<PageWay>,
    /// Directions: read (from the file), write
    #[arg(long, value_enum, value_delimiter = ',', default_value = "read,write")]
    io: Vec<PageIo>,
    /// Bytes of a page, multiples of 4K up to 16M, one row each
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4K,64K,256K,1M,2M", value_parser = units::parse_size)]
    page: Vec<u64>,
    /// Pages in flight, 1 to 1024, one row each
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "32", value_parser = units::within::<u32>(1..=1024))]
    depth: Vec<u32>,
    /// The most plain threads, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = units::within::<u32>(1..=256))]
    threads: u32,
    /// Repeats per row, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = units::within::<u32>(1..=1000))]
    repeats: u32,
    /// How long each repeat moves pages
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = units::parse_time)]
    time: Duration,
}

/// Where the pages' memory is.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PageMemory {
    /// Host memory
    Host,
    /// GPU memory
    Vram,
}

/// How pages are moved.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PageWay {
    /// By the library, `onehop.Pages`, which is for GPU memory
    Library,
    /// By rings of `onehop mount`
    Ring,
    /// By threads with system calls
    Threads,
}

/// The direction.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PageIo {
    /// From the file
    Read,
    /// To the file
    Write,
}

/// The largest page.
const MOST_PAGE: u64 = 16 << 20;
/// Bytes of a buffer, at least as many as a round has.
const BUFFER: usize = 128 << 20;
/// How long the mount may take to start, and to end.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(20);

/// The JSON document.
#[derive(Serialize)]
struct PagesDocument {
    machine: Machine,
    root: String,
    file_bytes: u64,
    gpu: Option<String>,
    simulated: Vec<&'static str>,
    limits: Vec<RateLimit>,
    rows: Vec<PageRow>,
    verified: bool,
}

/// A folder with the file and the mount point, removed on drop.
struct PagesFolder(PathBuf);

impl Drop for PagesFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.file());
        for folder in [self.root(), self.point(), self.0.clone()] {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

impl PagesFolder {
    fn new(root: &Path) -> Result<Self> {
        let this = Self(root.join(format!("onehop-bench-pages-{}", std::process::id())));
        for folder in [this.0.clone(), this.root(), this.point()] {
            std::fs::create_dir(&folder).map_err(|e| CliError::file("creating", &folder, e))?;
        }
        Ok(this)
    }

    fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    fn point(&self) -> PathBuf {
        self.0.join("mnt")
    }

    fn file(&self) -> PathBuf {
        self.root().join("pages")
    }
}

/// A mount in a process of its own.
struct ChildMount(Child);

impl ChildMount {
    fn start(folder: &PagesFolder, emulated: bool, context: &CommandContext) -> Result<Self> {
        let failed = |e| CliError::Failed(format!("onehop mount could not be started: {e}"));
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.arg("mount").arg(folder.point()).arg("--root").arg(folder.root());
        if emulated {
            command.env("HF3FS_GDR_ENABLED", "emulated");
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn();
        let mut this = Self(child.map_err(failed)?);
        let end = Instant::now() + MOUNT_TIMEOUT;
        while !folder.point().join("pages").exists() {
            context.stop.check()?;
            if let Some(status) = this.0.try_wait().map_err(failed)? {
                return Err(CliError::Failed(format!("onehop mount ended with {status}")));
            }
            if Instant::now() > end {
                let why = format!("the mount did not start within {}", units::time(MOUNT_TIMEOUT));
                return Err(CliError::Failed(why));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(this)
    }
}

impl Drop for ChildMount {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let end = Instant::now() + MOUNT_TIMEOUT;
        while Instant::now() < end && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

pub(super) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    // After Ctrl-C, any error is a consequence of it.
    measure_all(args, context).map_err(|error| context.stop.check().err().unwrap_or(error))
}

fn measure_all(args: &Args, context: &CommandContext) -> Result<Report> {
    let fits = |page: &u64| page.is_multiple_of(4096) && (4096..=MOST_PAGE).contains(page);
    if !args.page.iter().all(fits) {
        return Err(CliError::Usage("--page: multiples of 4K up to 16M".into()));
    }
    let most = args.page.iter().max().copied().unwrap_or(0)
        * u64::from(args.depth.iter().max().copied().unwrap_or(1));
    if most > args.size || most > BUFFER as u64 {
        let why = format!("--page times --depth is {}: at most --size and 128M", units::bytes(most));
        return Err(CliError::Usage(why));
    }
    let gpu =
        if args.memory.contains(&PageMemory::Vram) { Some(open_gpu(args.gpu.as_deref())?) } else { None };
    let folder = PagesFolder::new(&args.root)?;
    let mut file = PageFile::create(&folder.file(), args.size)?;
    let emulated = gpu.as_ref().is_some_and(|gpu| gpu.gpu().simulated());
    let mount = if args.by.contains(&PageWay::Ring) {
        Some(ChildMount::start(&folder, emulated, context)?)
    } else {
        None
    };
    let mut limits = vec![limits::memory_rate()?];
    if let Some(gpu) = gpu.as_ref().filter(|_| !emulated) {
        let ring = gpu.gpu().alloc(Place::PinnedHost, 16 << 20)?;
        let gbps = onehop_gpu::copy_rate(gpu.gpu(), &ring)? / 1e9;
        limits.push(RateLimit { what: "the copy engine (measured)".into(), gbps, hard: false });
    }
    let rows = rows(args, &folder, &mut file, (gpu.as_ref(), mount.as_ref()), context)?;
    let document = PagesDocument {
        machine: report::machine(),
        root: args.root.display().to_string(),
        file_bytes: args.size,
        gpu: gpu.as_ref().map(|gpu| gpu.gpu().name().to_owned()),
        simulated: emulated.then_some("gpu").into_iter().collect(),
        limits,
        rows,
        verified: true,
    };
    let text = text(&document);
    Report::new(document, text)
}

fn open_gpu(name: Option<&str>) -> Result<Arc<AnyGpu>> {
    let usage = || CliError::Usage("-g: a CUDA number such as 0, or emu".into());
    let cuda = Gpus::new(GpuChoice::Cuda);
    let opened = match name {
        Some("emu") => Gpus::new(GpuChoice::Emulated).open(0),
        None if cuda.count() == 0 => Gpus::new(GpuChoice::Emulated).open(0),
        name => cuda.open(name.map_or(Ok(0), |name| name.parse().map_err(|_| usage()))?),
    };
    opened.map_err(|error| CliError::Failed(error.to_string()))
}

fn rows(
    args: &Args,
    folder: &PagesFolder,
    file: &mut PageFile,
    (gpu, mount): (Option<&Arc<AnyGpu>>, Option<&ChildMount>),
    context: &CommandContext,
) -> Result<Vec<PageRow>> {
    let each = args.by.len() * args.io.len() * args.page.len() * args.depth.len();
    let bar = TransientBar::of_steps("measuring", (args.memory.len() * each) as u64);
    let bytes = BUFFER.min(args.size as usize);
    let deepest = args.depth.iter().max().copied().unwrap_or(1) as usize;
    let mut rows = Vec::new();
    for memory in &args.memory {
        let gpu = gpu.filter(|_| *memory == PageMemory::Vram);
        for page in args.page.iter().map(|page| *page as usize) {
            let of_memory = |way: &&PageWay| **way != PageWay::Library || gpu.is_some();
            for (way, io) in
                args.by.iter().filter(of_memory).flat_map(|way| args.io.iter().map(move |io| (way, io)))
            {
                let writes = *io == PageIo::Write;
                let mut mover: Box<dyn PageMover> = match (way, mount, gpu) {
                    (PageWay::Library, _, Some(gpu)) => {
                        Box::new(LibraryMover::new(file, gpu.shared(), bytes, writes)?)
                    }
                    (PageWay::Ring, Some(mount), _) => {
                        let (point, daemon) = (folder.point(), mount.0.id());
                        let file = point.join("pages");
                        Box::new(RingMover::new(&point, &file, gpu, bytes, deepest, daemon)?)
                    }
                    _ => {
                        let gpu = gpu.map(|gpu| gpu.gpu());
                        let threads = args.threads.min(deepest as u32) as usize;
                        Box::new(ThreadMover::new(file.path(), gpu, bytes, page, threads)?)
                    }
                };
                for depth in args.depth.iter().map(|depth| *depth as usize) {
                    let (time, repeats) = (args.time, args.repeats);
                    let plan = PagePlan { page, depth, writes, time, repeats };
                    rows.push(measure(&mut *mover, file, &plan, &|| context.stop.check().is_err())?);
                    bar.add(1);
                }
            }
        }
    }
    Ok(rows)
}

fn text(document: &PagesDocument) -> ReportText {
    let mut text = ReportText::default();
    let d = document;
    text.row("file", format!("{} in {}", units::bytes(d.file_bytes), d.root));
    if let Some(gpu) = &d.gpu {
        text.row("gpu", gpu);
    }
    if !d.simulated.is_empty() {
        text.row("simulated", "the GPU: its rows say nothing about hardware");
    }
    for limit in &d.limits {
        text.row("reference", format!("{}: {:.1} GB/s", limit.what, limit.gbps));
    }
    text.line("");
    text.line(format!(
        "{:>6} {:>6} {:>6} {:>6} {:>10} {:>8} {:>10} {:>10} {:>9}",
        "page", "memory", "io", "depth", "by", "GB/s", "median µs", "99 % µs", "CPU s/GB"
    ));
    for row in &d.rows {
        let micros = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.1}"));
        text.line(format!(
            "{:>6} {:>6} {:>6} {:>6} {:>10} {:>8.2} {:>10} {:>10} {:>9.3}",
            units::bytes(row.page as u64).replace(" KiB", "K").replace(" MiB", "M"),
            row.memory,
            row.io,
            row.depth,
            row.by,
            row.gbps,
            micros(row.p50_us),
            micros(row.p99_us),
            row.cpu_s_per_gb,
        ));
    }
    let verified: u64 = d.rows.iter().map(|row| row.verified).sum();
    text.row("verified", format!("{}, every byte of each", units::count(verified, "page")));
    text
}
