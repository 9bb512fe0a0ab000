//! A route that is ready for use: its queues, and memory for the data.

use std::sync::Arc;
use std::time::Instant;

use onehop_drive::{
    Buffer, Drive, GpuJob, GpuMode, GpuQueues, GpuSetup, IoQueue, Moved, Namespace, Op, Placement,
};
use onehop_gpu::{Gpu, Place, Region};

use crate::chunk::{self, Chunks};
use crate::error::{Error, Result, left_words};
use crate::lanes::Lanes;
use crate::memory;
use crate::options::RouteOptions;
use crate::progress::{Progress, check};
use crate::route::{self, BetterRoute, Route, RouteRequest};

/// Default number of queues in owner mode.
const QUEUES: u16 = 2;

/// A GPU, and why it was chosen.
#[derive(Clone)]
pub struct Chosen {
    /// The GPU.
    pub gpu: Arc<dyn Gpu>,
    /// The reason, in words.
    pub why: String,
}

/// The ends of a transfer, and its options.
#[derive(Clone, Copy)]
pub struct TransferSetup<'a> {
    /// The drive.
    pub drive: &'a Drive,
    /// Its namespace.
    pub ns: &'a Namespace,
    /// The GPU.
    pub gpu: &'a Chosen,
    /// The route, and the use of its queues.
    pub options: &'a RouteOptions,
}

enum RouteQueues {
    Gpu(Box<GpuQueues>),
    Direct(IoQueue),
    Pinned(Lanes),
}

/// GPU memory for data, and its mapping for the drive if the route needs one.
pub struct Memory {
    /// The memory.
    pub region: Region,
    buffer: Option<Buffer>,
}

impl Memory {
    /// Whether the drive can access it.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.buffer.is_some()
    }

    fn reached(&self) -> Result<&Buffer> {
        self.buffer.as_ref().ok_or(Error::Defect("this route needs memory that the drive reaches"))
    }
}

/// A route that is ready for use: queues of the drive, and the means to move blocks between it and GPU memory.
pub struct Engine {
    drive: Drive,
    gpu: Arc<dyn Gpu>,
    queues: RouteQueues,
    /// The route.
    pub route: Route,
    /// How GPU threads use the queues, on routes where they do.
    pub mode: GpuMode,
    /// Number of queues.
    pub count: u16,
    /// Commands in flight per queue.
    pub depth: u32,
    /// Why this route was chosen.
    pub why: &'static str,
    /// Better routes that were tried, and why they failed.
    pub why_not_better: Vec<BetterRoute>,
}

impl Engine {
    /// Prepares the requested route, or the best that works, with memory for `bytes` bytes.
    ///
    /// # Errors
    /// When the options contradict each other, the GPU's memory is full, no route works, or the drive fails.
    pub fn open(plan: &TransferSetup<'_>, bytes: u64) -> Result<(Self, Memory)> {
        let mode = plan.options.gpu_mode()?;
        let candidates = plan.options.candidates()?;
        fits(&*plan.gpu.gpu, bytes)?;
        let mut tried = Vec::new();
        for route in candidates {
            match Self::attempt(plan, route, mode, bytes) {
                Ok((mut engine, memory)) => {
                    engine.why_not_better = tried;
                    return Ok((engine, memory));
                }
                Err(error) => {
                    let no = why_not(route, error)?;
                    // Two placements of one route may fail for the same reason.
                    if !tried.contains(&no) {
                        tried.push(no);
                    }
                }
            }
        }
        Err(no_route(&plan.options.route, tried))
    }

    fn attempt(plan: &TransferSetup<'_>, route: Route, mode: GpuMode, bytes: u64) -> Result<(Self, Memory)> {
        let granted = plan.drive.identity().queues.min(u32::from(u16::MAX)) as u16;
        let count = match (route, mode) {
            (Route::Gpu(_), GpuMode::Owner) => plan.options.queues.unwrap_or(QUEUES.min(granted)).max(1),
            _ => 1,
        };
        let data = data_place(route);
        if plan.options.in_gpu_memory && plan.gpu.gpu.own_memory() && data != Place::Vram {
            return Err(Error::not_possible(
                format!("route {}", route.name()),
                "it leaves the data in host memory, and the data is wanted in the memory of the GPU",
                "Use a route whose data lies in vram",
            ));
        }
        let queues = match route {
            Route::Gpu(placement) => RouteQueues::Gpu(Box::new(gpu_queues(plan, placement, mode, count)?)),
            Route::CpuDirect => RouteQueues::Direct(plan.drive.queue()?),
            Route::CpuPinned => RouteQueues::Pinned(Lanes::open(plan.drive, &*plan.gpu.gpu, bytes)?),
        };
        let count = if let RouteQueues::Pinned(lanes) = &queues { lanes.count() } else { count };
        let (drive, gpu) = (plan.drive.clone(), plan.gpu.gpu.clone());
        let depth = plan.options.depth.min(u32::from(drive.identity().cap.mqes_z()).max(1));
        let asked = matches!(plan.options.route, RouteRequest::Only(_));
        let why = if asked { "requested by name" } else { "the best that works here" };
        let why_not_better = Vec::new();
        let engine = Self { drive, gpu, queues, route, mode, count, depth, why, why_not_better };
        let memory = engine.memory(bytes)?;
        Ok((engine, memory))
    }

    /// Allocates GPU memory for this route.
    ///
    /// # Errors
    /// When there is not enough, or the drive cannot reach it.
    pub fn memory(&self, bytes: u64) -> Result<Memory> {
        let bytes = fits(&*self.gpu, bytes)?;
        let place = data_place(self.route);
        if matches!(self.queues, RouteQueues::Pinned(..)) {
            return Ok(Memory { region: self.gpu.alloc(place, bytes)?, buffer: None });
        }
        self.reachable(place, bytes as u64)
    }

    /// Allocates memory that the drive can reach, for any route.
    ///
    /// # Errors
    /// As for [`Engine::memory`].
    pub fn reachable(&self, place: Place, bytes: u64) -> Result<Memory> {
        let bytes = fits(&*self.gpu, bytes)?;
        let (region, buffer) = self.drive.gpu_buffer(&*self.gpu, place, bytes)?;
        Ok(Memory { region, buffer: Some(buffer) })
    }

    /// The GPU whose memory it is.
    #[must_use]
    pub fn gpu(&self) -> &dyn Gpu {
        &*self.gpu
    }

    /// Moves the blocks of `jobs` between the drive and `memory`.
    ///
    /// # Errors
    /// When the drive or the GPU fails, or the caller cancels.
    pub fn transfer(
        &self,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        memory: &Memory,
        progress: &dyn Progress,
    ) -> Result<Moved> {
        check(progress)?;
        if let RouteQueues::Gpu(queues) = &self.queues {
            let mut go_on = |bytes| {
                progress.moved(bytes);
                !progress.is_cancelled()
            };
            return match queues.transfer(op, ns, jobs, memory.reached()?, &mut go_on) {
                Err(onehop_drive::Error::Cancelled { .. }) => Err(Error::Cancelled),
                moved => Ok(moved?),
            };
        }
        let (start, command) = (Instant::now(), self.drive.identity().max_transfer);
        let mut moved = match &self.queues {
            RouteQueues::Pinned(lanes) if !memory.is_reached() => {
                lanes.transfer(op, (ns, jobs), (&*self.gpu, &memory.region), command, progress)?
            }
            _ => {
                let mut chunks = Chunks::new(jobs, block_bytes(ns), command, chunk::MOST_BYTES);
                self.in_place(op, ns, &mut chunks, memory.reached()?, progress)?
            }
        };
        moved.took = start.elapsed();
        Ok(moved)
    }

    /// Moves blocks by the CPU's queue between the drive and memory that it reaches.
    fn in_place(
        &self,
        op: Op,
        ns: &Namespace,
        chunks: &mut Chunks,
        buffer: &Buffer,
        progress: &dyn Progress,
    ) -> Result<Moved> {
        let queue = match &self.queues {
            RouteQueues::Direct(queue) => Some(queue),
            RouteQueues::Pinned(lanes) => lanes.queue(),
            RouteQueues::Gpu(_) => None,
        };
        let queue = queue.ok_or(Error::Defect("no CPU drives these queues"))?;
        let go_on = || !progress.is_cancelled();
        let mut moved = Moved::default();
        loop {
            check(progress)?;
            let chunk = chunks.take();
            if chunk.is_empty() {
                return Ok(moved);
            }
            let (began, before) = (Instant::now(), moved.bytes);
            for job in &chunk {
                moved.add(&by_queue(queue, op, ns, job, (buffer, job.offset), &go_on)?);
            }
            chunks.learn(began.elapsed());
            progress.moved(moved.bytes - before);
        }
    }
}

/// An emulated GPU's memory may be this machine's, which must not run out.
fn fits(gpu: &dyn Gpu, bytes: u64) -> Result<usize> {
    let refuse = |left| Error::NoRoom { bytes, gpu: gpu.name().to_owned(), left };
    let available = if gpu.own_memory() { gpu.free_memory()? } else { memory::available() };
    match available {
        Some(have) if bytes > have => Err(refuse(Some(have))),
        _ => usize::try_from(bytes).map_err(|_| refuse(None)),
    }
}

fn gpu_queues(
    plan: &TransferSetup<'_>,
    placement: Placement,
    mode: GpuMode,
    queues: u16,
) -> Result<GpuQueues> {
    if plan.ns.format.has_separate_metadata() {
        return Err(Error::not_possible(
            "a gpu/ route",
            format!(
                "namespace {} has metadata apart from its blocks, which GPU threads do not carry",
                plan.ns.nsid
            ),
            "Format the namespace without metadata or with extended blocks, or use a cpu/ route",
        ));
    }
    plan.gpu.gpu.load_kernels().map_err(onehop_drive::Error::from)?;
    let setup = GpuSetup {
        mode,
        queues,
        depth: plan.options.depth,
        stall: plan.options.patience(),
        ..GpuSetup::new(placement)
    };
    Ok(plan.drive.gpu_queues(plan.gpu.gpu.clone(), setup)?)
}

/// Moves one job while `go_on` says so.
pub(crate) fn by_queue(
    queue: &IoQueue,
    op: Op,
    ns: &Namespace,
    job: &GpuJob,
    place: (&Buffer, u64),
    go_on: &dyn Fn() -> bool,
) -> Result<Moved> {
    match queue.transfer_while(op, ns, job.lba, job.blocks, place, go_on) {
        Err(onehop_drive::Error::Cancelled { .. }) => Err(Error::Cancelled),
        moved => Ok(moved?),
    }
}

/// The place of a route's data.
fn data_place(route: Route) -> Place {
    match route {
        Route::Gpu(placement) => placement.data,
        Route::CpuDirect | Route::CpuPinned => Place::Vram,
    }
}

/// Bytes of a block in memory.
#[must_use]
pub fn block_bytes(ns: &Namespace) -> u64 {
    ns.format.transfer_bytes(1).unwrap_or(1)
}

/// The error when none of the tried routes works.
pub(crate) fn no_route(request: &RouteRequest, mut tried: Vec<BetterRoute>) -> Error {
    match (request, tried.pop()) {
        (RouteRequest::Only(name), Some(last)) => {
            Error::not_possible(format!("route {name}"), last.reason, last.fix)
        }
        (_, last) => Error::NoRoute(tried.into_iter().chain(last).collect()),
    }
}

/// Turns the error into the reason why a route does not work; returns the error itself if the drive failed.
pub(crate) fn why_not(route: Route, error: Error) -> Result<BetterRoute> {
    let route = route.name().to_owned();
    match error {
        Error::NotPossible { reason, fix, .. } => Ok(BetterRoute { route, reason, fix }),
        Error::Drive(error) => match route::remedy(&error) {
            Some(fix) => Ok(BetterRoute { route, reason: error.to_string(), fix: fix.into() }),
            None => Err(error.into()),
        },
        Error::NoRoom { left, .. } => {
            let fix = "Move fewer blocks at a time".into();
            Ok(BetterRoute { route, reason: left_words(left), fix })
        }
        Error::Gpu(_) | Error::Memory(_) => {
            let is_full = match &error {
                Error::Gpu(error) => error.is_no_room(),
                Error::Memory(error) => error.is_no_room(),
                _ => false,
            };
            let fix = if is_full { route::MOVE_LESS } else { "" };
            Ok(BetterRoute { route, reason: error.to_string(), fix: fix.into() })
        }
        other => Err(other),
    }
}
