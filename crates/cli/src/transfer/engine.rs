//! One route made ready: its queues, and memory for the data.

use std::sync::Arc;
use std::time::Instant;

use onehop_drive::{
    Buffer, Drive, GpuJob, GpuMode, GpuQueues, GpuSetup, IoQueue, Moved, Namespace, Op, Placement,
};
use onehop_gpu::{Gpu, Place, Region};
use onehop_os::HostMem;

use crate::error::{CliError, Result};
use crate::gpus::Chosen;
use crate::progress::Bar;
use crate::route::{self, Route, RouteRequest, WhyNot};
use crate::stop::StopFlag;
use crate::transfer::chunk::Chunks;
use crate::transfer::copy::copy_piece;
use crate::transfer::{RouteArgs, Tally};
use crate::{memory, units};

/// Host memory through which `cpu/pinned` goes.
const STAGING: usize = 4 << 20;

/// Queues that a GPU gets in owner mode unless somebody says otherwise.
const QUEUES: u16 = 2;

/// What a transfer is to be like.
pub(crate) struct TransferSetup<'a> {
    pub drive: &'a Drive,
    pub ns: &'a Namespace,
    pub gpu: &'a Chosen,
    pub args: &'a RouteArgs,
}

enum Queues {
    Gpu(Box<GpuQueues>),
    Direct(IoQueue),
    Pinned(IoQueue, Buffer, HostMem),
}

/// GPU memory for data, and the drive's way to it where the route needs one.
pub(crate) struct Memory {
    pub region: Region,
    buffer: Option<Buffer>,
}

impl Memory {
    /// Whether the drive writes it by itself.
    pub(crate) fn is_reached(&self) -> bool {
        self.buffer.is_some()
    }

    fn reached(&self) -> Result<&Buffer> {
        let why = "this route needs memory that the drive reaches";
        self.buffer.as_ref().ok_or_else(|| CliError::Failed(why.into()))
    }
}

/// A route made ready.
pub(crate) struct Engine {
    drive: Drive,
    gpu: Arc<dyn Gpu>,
    queues: Queues,
    pub route: Route,
    pub mode: GpuMode,
    pub count: u16,
    pub depth: u32,
    /// Why it is this route.
    pub why: &'static str,
    /// What was tried before and could not be had.
    pub why_not_better: Vec<WhyNot>,
}

impl Engine {
    /// Makes the route ready that was asked for, with memory for `bytes` bytes.
    pub(crate) fn open(plan: &TransferSetup<'_>, bytes: u64) -> Result<(Self, Memory)> {
        let mode = plan.args.gpu_mode()?;
        let candidates = plan.args.candidates()?;
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
                    // Two placements of one route may lack the same thing.
                    if !tried.contains(&no) {
                        tried.push(no);
                    }
                }
            }
        }
        Err(match (&plan.args.route, tried.pop()) {
            (RouteRequest::Only(name), Some(last)) => {
                CliError::not_possible(format!("route {name}"), last.reason, last.fix)
            }
            (_, last) => CliError::NoRoute(tried.into_iter().chain(last).collect()),
        })
    }

    fn attempt(plan: &TransferSetup<'_>, route: Route, mode: GpuMode, bytes: u64) -> Result<(Self, Memory)> {
        let granted = plan.drive.identity().queues.min(u32::from(u16::MAX)) as u16;
        let count = match (route, mode) {
            (Route::Gpu(_), GpuMode::Owner) => plan.args.queues.unwrap_or(QUEUES.min(granted)).max(1),
            _ => 1,
        };
        let queues = match route {
            Route::Gpu(placement) => Queues::Gpu(Box::new(gpu_queues(plan, placement, mode, count)?)),
            Route::CpuDirect => Queues::Direct(plan.drive.queue()?),
            Route::CpuPinned => {
                let staging = plan.drive.buffer(STAGING)?;
                let host = staging.host()?.clone();
                Queues::Pinned(plan.drive.queue()?, staging, host)
            }
        };
        let (drive, gpu) = (plan.drive.clone(), plan.gpu.gpu.clone());
        let depth = plan.args.depth.min(u32::from(drive.identity().cap.mqes_z()).max(1));
        let asked = matches!(plan.args.route, RouteRequest::Only(_));
        let why = if asked { "it was asked for by name" } else { "the best of those that work here" };
        let why_not_better = Vec::new();
        let engine = Self { drive, gpu, queues, route, mode, count, depth, why, why_not_better };
        let memory = engine.memory(bytes)?;
        Ok((engine, memory))
    }

    /// GPU memory for this route.
    pub(crate) fn memory(&self, bytes: u64) -> Result<Memory> {
        let bytes = fits(&*self.gpu, bytes)?;
        let place = match self.route {
            Route::Gpu(placement) => placement.data,
            Route::CpuDirect | Route::CpuPinned => Place::Vram,
        };
        if matches!(self.queues, Queues::Pinned(..)) {
            return Ok(Memory { region: self.gpu.alloc(place, bytes)?, buffer: None });
        }
        self.reachable(place, bytes as u64)
    }

    /// Memory of a kind that the drive reaches, whatever the route.
    pub(crate) fn reachable(&self, place: Place, bytes: u64) -> Result<Memory> {
        let bytes = fits(&*self.gpu, bytes)?;
        let (region, buffer) = self.drive.gpu_buffer(&*self.gpu, place, bytes)?;
        Ok(Memory { region, buffer: Some(buffer) })
    }

    /// The GPU whose memory it is.
    pub(crate) fn gpu(&self) -> &dyn Gpu {
        &*self.gpu
    }

    /// Moves blocks, in chunks between which Ctrl-C is heard.
    pub(crate) fn transfer(
        &self,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        memory: &Memory,
        stop: &StopFlag,
    ) -> Result<Tally> {
        let block = block_bytes(ns);
        let total = jobs.iter().map(|job| job.blocks.saturating_mul(block)).fold(0, u64::saturating_add);
        let bar = Bar::new(if op == Op::Read { "reading" } else { "writing" }, total);
        self.moves(op, ns, jobs, memory, stop, &bar)
    }

    /// The same, for a bar that other jobs move too.
    pub(crate) fn moves(
        &self,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        memory: &Memory,
        stop: &StopFlag,
        bar: &Bar,
    ) -> Result<Tally> {
        stop.check()?;
        if let Queues::Gpu(queues) = &self.queues {
            let mut progress = |bytes| {
                bar.add(bytes);
                !stop.is_set()
            };
            return match queues.transfer(op, ns, jobs, memory.reached()?, &mut progress) {
                Err(onehop_drive::Error::Cancelled { .. }) => Err(CliError::Interrupted),
                report => Ok(report?.into()),
            };
        }
        let mut chunks = Chunks::new(jobs, block_bytes(ns), self.drive.identity().max_transfer);
        let mut tally = Tally::default();
        let start = Instant::now();
        loop {
            stop.check()?;
            let chunk = chunks.take();
            if chunk.is_empty() {
                break;
            }
            let (began, before) = (Instant::now(), tally.bytes);
            for job in &chunk {
                self.move_by_cpu(op, ns, job, memory, &mut tally)?;
            }
            chunks.learn(began.elapsed());
            bar.add(tally.bytes - before);
        }
        tally.took = start.elapsed();
        Ok(tally)
    }

    fn move_by_cpu(
        &self,
        op: Op,
        ns: &Namespace,
        job: &GpuJob,
        memory: &Memory,
        tally: &mut Tally,
    ) -> Result<()> {
        let queue = match &self.queues {
            Queues::Pinned(queue, staging, host) if memory.buffer.is_none() => {
                return through_staging(op, ns, job, (queue, staging, host), &memory.region, tally);
            }
            Queues::Direct(queue) | Queues::Pinned(queue, ..) => queue,
            Queues::Gpu(_) => return Err(CliError::Failed("GPU threads drive these queues".into())),
        };
        tally.moved(&queue.transfer(op, ns, job.lba, job.blocks, memory.reached()?, job.offset)?);
        Ok(())
    }
}

/// An emulated GPU's memory may be this machine's: more than there is would take the machine down.
fn fits(gpu: &dyn Gpu, bytes: u64) -> Result<usize> {
    let refuse = |why: String| {
        let what = format!("holding {} in the memory of GPU {}", units::bytes(bytes), gpu.name());
        CliError::not_possible(what, why, "Move fewer blocks at a time")
    };
    let available = if gpu.own_memory() { gpu.free_memory()? } else { memory::available() };
    match available {
        Some(have) if bytes > have => Err(refuse(format!("there is {} left for it", units::bytes(have)))),
        _ => usize::try_from(bytes).map_err(|_| refuse("that is more than this machine addresses".into())),
    }
}

fn gpu_queues(
    plan: &TransferSetup<'_>,
    placement: Placement,
    mode: GpuMode,
    queues: u16,
) -> Result<GpuQueues> {
    if plan.ns.format.has_separate_metadata() {
        return Err(CliError::not_possible(
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
        depth: plan.args.depth,
        stall: plan.args.patience(),
        ..GpuSetup::new(placement)
    };
    Ok(plan.drive.gpu_queues(plan.gpu.gpu.clone(), setup)?)
}

/// One job in pieces of what the staging memory holds.
fn through_staging(
    op: Op,
    ns: &Namespace,
    job: &GpuJob,
    (queue, staging, host): (&IoQueue, &Buffer, &HostMem),
    region: &Region,
    tally: &mut Tally,
) -> Result<()> {
    let block = block_bytes(ns);
    let step = (STAGING as u64 / block).max(1);
    let mut done = 0;
    while done < job.blocks {
        let blocks = step.min(job.blocks - done);
        let (lba, at) = (job.lba + done, (job.offset + done * block) as usize);
        let bytes = (blocks * block) as usize;
        if op == Op::Write {
            copy_piece(
                bytes,
                |from, out| Ok(region.read(at + from, out)?),
                |to, data| Ok(host.write(to, data)?),
            )?;
        }
        tally.moved(&queue.transfer(op, ns, lba, blocks, staging, 0)?);
        if op == Op::Read {
            copy_piece(
                bytes,
                |from, out| Ok(host.read(from, out)?),
                |to, data| Ok(region.write(at + to, data)?),
            )?;
        }
        done += blocks;
    }
    Ok(())
}

/// Bytes of a block as it lies in memory.
pub(crate) fn block_bytes(ns: &Namespace) -> u64 {
    ns.format.transfer_bytes(1).unwrap_or(1)
}

/// The error as a reason why a route cannot be had; the error itself where it is the drive that failed.
fn why_not(route: Route, error: CliError) -> Result<WhyNot> {
    let route = route.name().to_owned();
    match error {
        CliError::NotPossible { reason, fix, .. } => Ok(WhyNot { route, reason, fix }),
        CliError::Drive(error) => match route::remedy(&error) {
            Some(fix) => Ok(WhyNot { route, reason: error.to_string(), fix: fix.into() }),
            None => Err(error.into()),
        },
        CliError::Gpu(_) | CliError::Memory(_) => {
            Ok(WhyNot { route, reason: error.to_string(), fix: "Move less at a time".into() })
        }
        other => Err(other),
    }
}

impl Tally {
    fn moved(&mut self, moved: &Moved) {
        self.bytes += moved.bytes;
        self.commands += moved.commands;
        self.retries += moved.retries;
    }
}
