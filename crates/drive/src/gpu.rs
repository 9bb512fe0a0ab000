//! Queue pairs that GPU kernels drive by themselves; the CPU creates them, watches, and recovers.

mod cell;
mod gate;
mod launch;
mod lend;
mod memory;
mod meter;
mod plan;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};
use onehop_proto::kernel::{Exit, Outcome, Work};

use crate::canary::{Canary, Nonces};
use crate::command::describe;
use crate::drive::Inner;
use crate::ladder::Incident;
use crate::{Buffer, Drive, Error, Namespace, Op, Recovery, Result};

use cell::GpuCell;
use launch::LaunchMemory;
pub use lend::LentQueue;
pub(crate) use memory::{Cmb, restore_cmb};
use meter::Meter;
use plan::{Batch, Plan};

/// What the host writes into a queue's poison word, and why.
pub(crate) mod poison {
    /// The controller failed or is gone.
    pub(crate) const FAILED: u32 = 1;
    /// The controller is about to be reset.
    pub(crate) const RESET: u32 = 2;
    /// A queue that was lent is taken back.
    pub(crate) const OVER: u32 = 3;
}

/// Where the parts of a GPU-driven transfer lie.
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
    /// Posted writes alone cross between GPU and drive: entries to host memory, completions and data to VRAM.
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
    /// One queue for so many threads: of ours, when it is not lent to others.
    Shared {
        /// The threads.
        threads: u32,
    },
}

/// What queues a GPU is to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuSetup {
    /// How its threads share them.
    pub mode: GpuMode,
    /// Where they lie.
    pub placement: Placement,
    /// How many; one in shared mode.
    pub queues: u16,
    /// Commands in flight on each.
    pub depth: u32,
    /// How long nothing may complete before the controller is taken to have stalled.
    pub stall: Duration,
    /// How long a job may take, with all its launches; in a queue that is lent, a command with all its tries.
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
}

/// One read or write of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuJob {
    /// The first block.
    pub lba: u64,
    /// How many blocks.
    pub blocks: u64,
    /// From which byte of the buffer on.
    pub offset: u64,
}

/// What a job took.
#[derive(Clone, Debug, Default)]
pub struct GpuReport {
    /// Data bytes, extended metadata included.
    pub bytes: u64,
    /// Commands.
    pub commands: u64,
    /// How often one of them was tried again.
    pub retries: u64,
    /// Stretches of memory whose data arrived after it was completed; noticed only with
    /// [`Options::canary`](crate::Options).
    pub late_data: u64,
    /// Kernel launches.
    pub launches: u64,
    /// From the first launch to the last completion.
    pub took: Duration,
}

/// Queue pairs for one GPU on one drive. Any thread may use them; jobs are carried out one after the other.
pub struct GpuQueues {
    drive: Arc<Inner>,
    gpu: Arc<dyn Gpu>,
    setup: GpuSetup,
    cell: Arc<GpuCell>,
    turn: Mutex<()>,
}

impl Drive {
    /// Queue pairs for kernels of this GPU.
    ///
    /// # Errors
    /// When the controller has too few, or a part cannot lie where it should.
    pub fn gpu_queues(&self, gpu: Arc<dyn Gpu>, setup: GpuSetup) -> Result<GpuQueues> {
        let cell = GpuCell::create(&self.0, &*gpu, &setup)?;
        Ok(GpuQueues { drive: self.0.clone(), gpu, setup, cell, turn: Mutex::default() })
    }

    /// Memory for data of a GPU-driven transfer: a region of the GPU that the drive can reach.
    ///
    /// # Errors
    /// When there is none, or the drive cannot reach it.
    pub fn gpu_buffer(&self, gpu: &dyn Gpu, place: Place, bytes: usize) -> Result<(Region, Buffer)> {
        let region = memory::region(&self.0, gpu, place, bytes)?;
        let buffer = self.map(region.clone())?;
        Ok((region, buffer))
    }
}

/// A command of a job, and how it stands.
struct Item {
    work: Work,
    /// The job that it belongs to.
    job: usize,
    recoveries: u32,
}

impl GpuQueues {
    /// Has the GPU read blocks into a buffer.
    ///
    /// # Errors
    /// The first command that failed, or why the GPU stopped.
    pub fn read(&self, ns: &Namespace, jobs: &[GpuJob], into: &Buffer) -> Result<GpuReport> {
        self.run(Op::Read, ns, jobs, into, None)
    }

    /// Has the GPU write blocks from a buffer.
    ///
    /// # Errors
    /// The first command that failed, or why the GPU stopped.
    pub fn write(&self, ns: &Namespace, jobs: &[GpuJob], from: &Buffer) -> Result<GpuReport> {
        self.run(Op::Write, ns, jobs, from, None)
    }

    /// As [`read`](Self::read) or [`write`](Self::write), by kernels of the same GPU that take the times
    /// ([`Gpu::metered`]); they are slower than the others. Gives what each job took: from when a warp began to write its
    /// first command's entry (one in flight: rang its doorbell) until its last command's outcome was written down.
    ///
    /// # Errors
    /// As for the others; and in shared mode, whose threads do not all take times.
    pub fn timed(
        &self,
        metered: &dyn Gpu,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        buffer: &Buffer,
    ) -> Result<(GpuReport, Vec<Duration>)> {
        if self.setup.mode != GpuMode::Owner {
            let why = "times are taken of queues in owner mode only".to_owned();
            return Err(Error::Unsupported { drive: self.drive.name().to_owned(), why });
        }
        let mut meter = Meter::new(metered, self.setup.queues.max(1).into(), jobs.len());
        let report = self.run(op, ns, jobs, buffer, Some(&mut meter))?;
        Ok((report, meter.times()))
    }

    fn run(
        &self,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        buffer: &Buffer,
        meter: Option<&mut Meter<'_>>,
    ) -> Result<GpuReport> {
        if op.writes() {
            self.drive.allow_writes_to(ns)?;
        }
        ns.check(&self.drive.control)?;
        buffer.belongs(&self.drive.control)?;
        // Launches share rings and their account of them: one at a time.
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        let mut plan = Plan::new(&self.drive, op, ns, jobs, buffer)?;
        let mut run = Run {
            queues: self,
            op,
            ns,
            buffer,
            meter,
            start: Instant::now(),
            count: plan.commands,
            nonces: self.drive.options.canary.then(Nonces::new),
            report: GpuReport { bytes: plan.bytes, commands: plan.commands, ..GpuReport::default() },
        };
        // Counted before and after: a flush or a power loss meanwhile must find them not yet durable.
        self.count_writes(op);
        let result = run.batches(&mut plan);
        self.count_writes(op);
        run.report.took = run.start.elapsed();
        result.map(|()| run.report)
    }

    fn count_writes(&self, op: Op) {
        if op.writes() {
            self.drive.durability.wrote();
        }
    }

    /// Gets everything that is in flight out of the controller's hands.
    fn recover(&self, cause: String, polite: bool) -> Result<Recovery> {
        let start = Instant::now();
        let mut state = self.drive.alive()?;
        if self.cell.is_stale() {
            // Somebody else has reset the controller: that is why the kernel ended.
            return Ok(Recovery::ControllerReset);
        }
        let healthy = self.drive.control.is_running().is_ok_and(|running| running);
        if healthy && polite && self.cell.delete(&self.drive, &mut state).is_ok() {
            let recovery = Recovery::QueueDelete;
            state.incidents.push(Incident { cause, recovery, took: start.elapsed() });
            return Ok(recovery);
        }
        self.drive.reset(&mut state, &cause)
    }
}

/// A job under way.
struct Run<'a, 'm> {
    queues: &'a GpuQueues,
    op: Op,
    ns: &'a Namespace,
    buffer: &'a Buffer,
    /// Where times are to be taken.
    meter: Option<&'a mut Meter<'m>>,
    start: Instant,
    /// Commands in all.
    count: u64,
    /// Where reads are guarded.
    nonces: Option<Nonces>,
    report: GpuReport,
}

impl Run<'_, '_> {
    fn batches(&mut self, plan: &mut Plan<'_>) -> Result<()> {
        while let Some(batch) = plan.next_batch()? {
            self.batch(batch)?;
        }
        Ok(())
    }

    /// Carries commands out. When this returns, the controller has let go of them, or their memory is kept.
    fn batch(&mut self, batch: Batch) -> Result<()> {
        let drive = &self.queues.drive;
        let canaries = self.place_canaries(&batch.works)?;
        let mut left =
            batch.works.into_iter().map(|(work, job, _)| Item { work, job, recoveries: 0 }).collect();
        let mut result = self.carry_out(&mut left);
        if result.is_ok() {
            result = self.wait_for_data(&canaries);
        }
        if result.is_err() && canaries.iter().any(|canary| !canary.is_gone(self.buffer)) {
            // Data that was announced may still come.
            drive.kept.keep(self.buffer.clone());
        }
        if drive.state().dead.is_some() {
            drive.kept.keep((batch.lists, self.buffer.clone()));
        }
        result
    }

    /// Marks the memory of reads, where they are to be guarded: one canary for each stretch without a gap.
    fn place_canaries(&mut self, works: &[(Work, usize, u64)]) -> Result<Vec<Canary>> {
        let Some(nonces) = self.nonces.as_mut().filter(|_| self.op == Op::Read) else {
            return Ok(Vec::new());
        };
        let bytes = |work: &Work| self.ns.format.transfer_bytes(work.blocks.into()).unwrap_or(u64::MAX);
        let mut stretches: Vec<(u64, u64)> = Vec::new();
        for (work, _, offset) in works {
            match stretches.last_mut() {
                Some((start, len)) if *start + *len == *offset => *len += bytes(work),
                _ => stretches.push((*offset, bytes(work))),
            }
        }
        stretches.into_iter().map(|(at, len)| Canary::place(self.buffer, at, len, nonces.next())).collect()
    }

    /// Waits until all data that was announced has arrived.
    fn wait_for_data(&mut self, canaries: &[Canary]) -> Result<()> {
        let (start, stall) = (Instant::now(), self.queues.setup.stall);
        for canary in canaries {
            if canary.is_gone(self.buffer) {
                continue;
            }
            self.report.late_data += 1;
            while !canary.is_gone(self.buffer) {
                if start.elapsed() >= stall {
                    let drive = self.queues.drive.name();
                    let command = format!("a GPU-driven read of {drive} namespace {}", self.ns.nsid);
                    return Err(Error::DataMissing { command, waited: stall });
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Launches until every command has an end.
    fn carry_out(&mut self, left: &mut Vec<Item>) -> Result<()> {
        let queues = self.queues;
        while !left.is_empty() {
            let limit = queues.setup.limit.saturating_sub(self.start.elapsed());
            if limit.is_zero() {
                return Err(self.stopped(left, format!("its {:?} were over", queues.setup.limit)));
            }
            let meter = self.meter.as_deref_mut();
            let memory = queues.write_launch(left, meter.as_deref())?;
            self.report.launches += 1;
            let gpu = meter.as_deref().map_or(&*queues.gpu, |meter| meter.gpu);
            let exits = queues.launch(gpu, self.ns, left.len() as u32, &memory, limit)?;
            if let Some(meter) = meter {
                meter.read(left, &memory)?;
            }
            let again = self.read_outcomes(left, &memory)?;
            // A stray completion says more than what it led to.
            let stray = exits.iter().find(|exit| matches!(exit, Exit::Stray(_)));
            let exit = stray.or_else(|| exits.iter().find(|exit| **exit != Exit::Finished));
            let Some(exit) = exit else {
                if again.is_empty() {
                    return Ok(());
                }
                let cause = "a GPU launch that left commands without an outcome";
                queues.recover(cause.to_owned(), true)?;
                return Err(self.stopped(&again, format!("it was {cause}; this is a defect of onehop")));
            };
            let cause = format!("a GPU launch that ended with {exit:?}");
            let recovery = queues.recover(cause, stray.is_none())?;
            let drive = &queues.drive;
            for item in &again {
                if item.recoveries > drive.options.retries {
                    let work = &item.work;
                    let command = describe(self.op.name(), drive.name(), self.ns.nsid, work.lba, work.blocks);
                    let (waited, retries) = (queues.setup.stall, item.recoveries);
                    return Err(Error::TimedOut { command, waited, retries, recovery });
                }
            }
            *left = again;
        }
        Ok(())
    }

    fn stopped(&self, left: &[Item], why: String) -> Error {
        Error::Launch { done: self.count.saturating_sub(left.len() as u64), count: self.count, why }
    }

    /// Adds up what ended and gives back what did not.
    fn read_outcomes(&mut self, items: &mut Vec<Item>, memory: &LaunchMemory) -> Result<Vec<Item>> {
        let drive = &self.queues.drive;
        let mut again = Vec::new();
        let mut failed = None;
        for (i, mut item) in items.drain(..).enumerate() {
            let at = memory.outcomes + i * Outcome::BYTES as usize;
            // Earlier launches' are counted already; an item that was never started says nothing.
            let retries = memory.region.word(at + 4)?.max(item.work.tries());
            self.report.retries += u64::from(retries - item.work.tries());
            item.work = item.work.with_tries(retries);
            match Outcome::from_word(memory.region.word(at)?) {
                Outcome::Done(status) if status.is_ok() => {}
                Outcome::Done(status) => {
                    let work = &item.work;
                    let command = describe(self.op.name(), drive.name(), self.ns.nsid, work.lba, work.blocks);
                    failed = failed.or(Some(Error::Command { command, status }));
                }
                Outcome::Pending => again.push(item),
                Outcome::InDoubt => {
                    item.recoveries += 1;
                    self.report.retries += 1;
                    again.push(item);
                }
            }
        }
        match failed {
            // Nothing may be left in the controller's hands when a caller learns that its job failed.
            Some(error) if again.is_empty() => Err(error),
            Some(error) => {
                let cause = "a GPU launch that left commands behind a failed one".to_owned();
                self.queues.recover(cause, true).and(Err(error))
            }
            None => Ok(again),
        }
    }
}

impl Drop for GpuQueues {
    fn drop(&mut self) {
        self.cell.close_for_good(&self.drive);
    }
}
