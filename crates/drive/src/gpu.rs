//! Queue pairs that GPU kernels drive by themselves; the CPU creates, monitors and recovers them.

mod cell;
mod export;
mod gate;
mod launch;
mod memory;
mod meter;
mod plan;
mod run;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};

use crate::doubts::until_certain;
use crate::drive::DriveInner;
use crate::ladder::Incident;
use crate::options::{lasts, within};
use crate::queue::Moved;
use crate::ring::Dma;
use crate::{Buffer, Drive, Error, Namespace, Op, Recovery, Result};

use cell::{GpuCell, TakenBy};
pub use export::ExportedQueue;
pub(crate) use memory::{Cmb, restore_cmb};
use meter::Meter;
use plan::BatchPlan;
use run::Run;

/// What the host writes into a queue's poison word, and why.
pub(crate) mod poison {
    /// The controller failed or is gone.
    pub(crate) const FAILED: u32 = 1;
    /// The controller is about to be reset.
    pub(crate) const RESET: u32 = 2;
    /// The host revokes an exported queue.
    pub(crate) const OVER: u32 = 3;
}

/// Where the parts of a GPU-driven transfer are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The submission queues.
    pub sq: Place,
    /// The completion queues.
    pub cq: Place,
    /// The data.
    pub data: Place,
}

impl Placement {
    /// Everything in host memory: the platform must let the GPU write the drive's doorbells.
    pub const TIER1: Self = Self { sq: Place::PinnedHost, cq: Place::PinnedHost, data: Place::PinnedHost };
    /// Data in VRAM: the platform must let the drive write VRAM.
    pub const TIER2: Self = Self { sq: Place::PinnedHost, cq: Place::PinnedHost, data: Place::Vram };
    /// Everything in VRAM: the drive must also read VRAM.
    pub const TIER3: Self = Self { sq: Place::Vram, cq: Place::Vram, data: Place::Vram };
    /// Only posted writes cross between GPU and drive: entries to host memory, completions and data to VRAM.
    pub const POSTED: Self = Self { sq: Place::PinnedHost, cq: Place::Vram, data: Place::Vram };
    /// The same, with the submission queue in the drive's own memory.
    pub const POSTED_CMB: Self = Self { sq: Place::Cmb, cq: Place::Vram, data: Place::Vram };

    /// The route's name, if this placement is one of a route.
    #[must_use]
    pub fn route(&self) -> Option<&'static str> {
        match *self {
            Self::TIER1 => Some("gpu/tier1"),
            Self::TIER2 => Some("gpu/tier2"),
            Self::TIER3 => Some("gpu/tier3"),
            Self::POSTED | Self::POSTED_CMB => Some("gpu/posted"),
            _ => None,
        }
    }
}

/// How the GPU's threads share the queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GpuMode {
    /// Each queue is owned by one warp.
    Owner,
    /// One queue for so many threads: those of onehop's kernels, unless the queue is exported.
    Shared {
        /// The threads.
        threads: u32,
    },
}

/// The queues of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuSetup {
    /// How its threads share them.
    pub mode: GpuMode,
    /// Where they are.
    pub placement: Placement,
    /// How many; one in shared mode.
    pub queues: u16,
    /// Commands in flight on each.
    pub depth: u32,
    /// The controller counts as stalled after this time without a completion.
    pub stall: Duration,
    /// How long a job may take, with all its launches and the creation of its queues. The last try of that creation may take
    /// as long as [`Options`](crate::Options) says. In an exported queue: how long a command may take with all its tries.
    pub limit: Duration,
}

impl GpuSetup {
    /// Owner mode with a placement, and sizes that suit it.
    #[must_use]
    pub fn new(placement: Placement) -> Self {
        Self {
            mode: GpuMode::Owner,
            placement,
            queues: 2,
            depth: 64,
            stall: Duration::from_secs(5),
            limit: Duration::from_secs(600),
        }
    }

    fn check(&self) -> Result<()> {
        match self.mode {
            GpuMode::Owner => within("queues", self.queues.into(), 1, u64::MAX)?,
            GpuMode::Shared { threads } => within("threads", threads.into(), 1, u64::MAX)?,
        }
        within("depth", self.depth.into(), 1, u64::MAX)?;
        lasts("stall", self.stall)?;
        lasts("limit", self.limit)
    }
}

/// One read or write of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuJob {
    /// The first block.
    pub lba: u64,
    /// How many blocks.
    pub blocks: u64,
    /// The offset in the buffer.
    pub offset: u64,
}

/// Queue pairs for one GPU on one drive. Any thread may use them; jobs run one after the other.
pub struct GpuQueues {
    drive: Arc<DriveInner>,
    gpu: Arc<dyn Gpu>,
    setup: GpuSetup,
    cell: Arc<GpuCell>,
    turn: Mutex<Spare>,
}

/// Memory for lists and launches that no launch uses.
#[derive(Default)]
struct Spare {
    lists: Vec<Dma>,
    launch: Vec<Region>,
}

impl Drive {
    /// Queue pairs for kernels of this GPU.
    ///
    /// # Errors
    /// When a number or time of the setup is zero, the controller has too few queues, or a placement is impossible.
    pub fn gpu_queues(&self, gpu: Arc<dyn Gpu>, setup: GpuSetup) -> Result<GpuQueues> {
        setup.check()?;
        if self.is_remote() {
            let why =
                "it is reached through a network connection, and only the CPU sends its commands".to_owned();
            return Err(Error::Unsupported { drive: self.name().to_owned(), why });
        }
        // Loaded now, before another program's persistent kernel occupies the GPU: the driver loads none while one
        // runs.
        gpu.load_kernels()?;
        let cell = GpuCell::create(&self.0, &*gpu, &setup)?;
        Ok(GpuQueues { drive: self.0.clone(), gpu, setup, cell, turn: Mutex::default() })
    }

    /// Memory for data of a GPU-driven transfer: a region of the GPU that the drive can reach.
    ///
    /// # Errors
    /// When there is none, or the drive cannot reach it.
    pub fn gpu_buffer(&self, gpu: &dyn Gpu, place: Place, bytes: usize) -> Result<(Region, Buffer)> {
        if place == Place::Vram && self.is_remote() {
            let why = "data from the network is received into host memory, and copied from there".to_owned();
            return Err(Error::Placement { part: "data", place: "vram", why });
        }
        let region = memory::region(&self.0, gpu, place, bytes)?;
        let buffer = self.map(region.clone())?;
        Ok((region, buffer))
    }
}

impl GpuQueues {
    /// Has the GPU read blocks into a buffer. Where that is GPU memory, kernels of the GPU that owns it see the data if they are
    /// launched afterwards; other GPUs may need a flush of it first.
    ///
    /// # Errors
    /// The first command that failed, or why the GPU stopped.
    pub fn read(&self, ns: &Namespace, jobs: &[GpuJob], into: &Buffer) -> Result<Moved> {
        self.run(Op::Read, ns, jobs, into, None, &mut |_| true)
    }

    /// Has the GPU write blocks from a buffer.
    ///
    /// # Errors
    /// The first command that failed, or why the GPU stopped.
    pub fn write(&self, ns: &Namespace, jobs: &[GpuJob], from: &Buffer) -> Result<Moved> {
        self.run(Op::Write, ns, jobs, from, None, &mut |_| true)
    }

    /// As [`read`](Self::read) or [`write`](Self::write), with progress reports. `progress` is called every few
    /// hundredths of a second with the bytes moved since the last call; the job is cancelled when it returns false.
    ///
    /// # Errors
    /// As for the others; and [`Error::Cancelled`].
    pub fn transfer(
        &self,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        buffer: &Buffer,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Moved> {
        self.run(op, ns, jobs, buffer, None, progress)
    }

    /// As [`read`](Self::read) or [`write`](Self::write), by kernels of the same GPU that measure times
    /// ([`Instruments::metered`](onehop_gpu::Instruments::metered)); they are slower than the others. Returns the time of each job: from when a warp began to
    /// write its first command's entry (one in flight: rang its doorbell) until its last command's outcome was stored.
    ///
    /// # Errors
    /// As for the others; and in shared mode, where not all threads measure times.
    pub fn timed(
        &self,
        metered: &dyn Gpu,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        buffer: &Buffer,
    ) -> Result<(Moved, Vec<Duration>)> {
        if self.setup.mode != GpuMode::Owner {
            let why = "times are taken of queues in owner mode only".to_owned();
            return Err(Error::Unsupported { drive: self.drive.name().to_owned(), why });
        }
        let mut meter = Meter::new(metered, self.setup.queues.into(), jobs.len());
        let report = self.run(op, ns, jobs, buffer, Some(&mut meter), &mut |_| true)?;
        Ok((report, meter.times()))
    }

    fn run(
        &self,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        buffer: &Buffer,
        mut meter: Option<&mut Meter<'_>>,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Moved> {
        if op.writes() {
            self.drive.allow_writes()?;
        }
        ns.check(&self.drive.control)?;
        buffer.belongs(&self.drive.control)?;
        // Launches share the rings and their state: one at a time.
        let mut spare = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        let _writing = op.writes().then(|| ns.account.writing());
        let start = Instant::now();
        let describe =
            || format!("a GPU-driven {} of {} namespace {}", op.name(), self.drive.name(), ns.nsid);
        until_certain(self.drive.options.retries, describe, |time| {
            let mut plan = BatchPlan::new(&self.drive, op, ns, jobs, buffer)?;
            // All of it was reported the first time.
            let mut silent = |_| progress(0);
            let progress: &mut dyn FnMut(u64) -> bool = if time == 0 { &mut *progress } else { &mut silent };
            let watched = (meter.as_deref_mut(), progress);
            Run::new(self, op, ns, buffer, start, &mut spare, watched).transfer(&mut plan)
        })
    }

    /// Takes all commands in flight from the controller.
    fn recover(&self, cause: String, polite: bool) -> Result<Recovery> {
        let start = Instant::now();
        let mut state = self.drive.alive()?;
        match self.cell.taken_by() {
            // Another thread has reset the controller: that is why the kernel ended.
            Some(TakenBy::Reset) => return Ok(Recovery::ControllerReset),
            Some(TakenBy::Deletion) if polite => return Ok(Recovery::QueueDelete),
            // Data of completed reads may still be on its way after the queues were deleted: only a reset stops it.
            _ => {}
        }
        let healthy = self.drive.control.is_running().is_ok_and(|running| running);
        if healthy && polite && matches!(self.cell.delete(&self.drive, &mut state), Ok(true)) {
            let recovery = Recovery::QueueDelete;
            state.incidents.push(Incident { cause, recovery, took: start.elapsed() });
            return Ok(recovery);
        }
        self.drive.reset(&mut state, &cause)
    }
}

impl Drop for GpuQueues {
    fn drop(&mut self) {
        self.cell.close_for_good(&self.drive);
    }
}
