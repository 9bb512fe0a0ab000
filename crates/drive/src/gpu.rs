//! Queue pairs that GPU kernels drive by themselves; the CPU creates them, watches, and recovers.

mod cell;
mod memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, KernelJob, Launch, Place, Region};
use onehop_proto::kernel::{Exit, Outcome, Work};
use onehop_proto::queue::NO_CID;

use crate::canary::Canary;
use crate::command::{ListSlot, Pointers, describe, list_pages, max_blocks};
use crate::drive::Inner;
use crate::ladder::Incident;
use crate::ring::Dma;
use crate::{Buffer, Drive, Error, Namespace, Op, Recovery, Result};

use cell::GpuCell;
pub(crate) use memory::{Cmb, restore_cmb};

/// What the host writes into a queue's poison word, and why.
pub(crate) mod poison {
    /// The controller failed or is gone.
    pub(crate) const FAILED: u32 = 1;
    /// The controller is about to be reset.
    pub(crate) const RESET: u32 = 2;
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
    /// One queue for so many threads.
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
    /// How long one launch may take.
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
    /// Reads whose data arrived after their completion; noticed only with [`Options::canary`](crate::Options).
    pub late_data: u64,
    /// Kernel launches.
    pub launches: u64,
    /// From the first launch to the last completion.
    pub took: Duration,
}

/// Queue pairs for one GPU on one drive.
pub struct GpuQueues {
    drive: Arc<Inner>,
    gpu: Arc<dyn Gpu>,
    setup: GpuSetup,
    cell: Arc<GpuCell>,
}

impl Drive {
    /// Queue pairs for kernels of this GPU.
    ///
    /// # Errors
    /// When the controller has too few, or a part cannot lie where it should.
    pub fn gpu_queues(&self, gpu: Arc<dyn Gpu>, setup: GpuSetup) -> Result<GpuQueues> {
        let cell = GpuCell::create(&self.0, &*gpu, &setup)?;
        Ok(GpuQueues { drive: self.0.clone(), gpu, setup, cell })
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
    recoveries: u32,
    canary: Option<Canary>,
}

/// The memory of one launch.
struct LaunchMemory {
    region: Region,
    works: usize,
    outcomes: usize,
}

impl GpuQueues {
    /// Has the GPU read blocks into a buffer.
    ///
    /// # Errors
    /// The first command that failed, or why the GPU stopped.
    pub fn read(&self, ns: &Namespace, jobs: &[GpuJob], into: &Buffer) -> Result<GpuReport> {
        self.run(Op::Read, ns, jobs, into)
    }

    /// Has the GPU write blocks from a buffer.
    ///
    /// # Errors
    /// The first command that failed, or why the GPU stopped.
    pub fn write(&self, ns: &Namespace, jobs: &[GpuJob], from: &Buffer) -> Result<GpuReport> {
        self.run(Op::Write, ns, jobs, from)
    }

    fn run(&self, op: Op, ns: &Namespace, jobs: &[GpuJob], buffer: &Buffer) -> Result<GpuReport> {
        if op.writes() && !self.drive.options.writable {
            return Err(Error::ReadOnly { drive: self.drive.name().to_owned() });
        }
        let (works, lists) = self.plan(op, ns, jobs, buffer)?;
        let start = Instant::now();
        let mut report = GpuReport { commands: works.len() as u64, ..GpuReport::default() };
        for (work, _) in &works {
            report.bytes += ns.format.transfer_bytes(work.blocks.into()).unwrap_or(u64::MAX);
        }
        let mut left = Vec::with_capacity(works.len());
        for (work, offset) in works {
            let bytes = ns.format.transfer_bytes(work.blocks.into()).unwrap_or(u64::MAX);
            let guarded = self.drive.options.canary && op == Op::Read;
            let canary = if guarded { Some(Canary::place(buffer, offset, bytes)?) } else { None };
            left.push(Item { work, recoveries: 0, canary });
        }
        let canaries: Vec<Canary> = left.iter().filter_map(|item| item.canary).collect();
        let mut result = self.carry_out(op, ns, &mut left, &mut report);
        if result.is_ok() {
            result = self.wait_for_data(ns, &canaries, buffer, &mut report);
        }
        report.took = start.elapsed();
        if let Err(error @ (Error::Dead { .. } | Error::Gone { .. })) = &result {
            // The device may still write into what it was given.
            crate::drive::leak_unless_gone(error, (lists, buffer.clone()));
        }
        result.map(|()| report)
    }

    /// Splits jobs into commands of what the controller moves at once, and describes their memory.
    fn plan(
        &self,
        op: Op,
        ns: &Namespace,
        jobs: &[GpuJob],
        buffer: &Buffer,
    ) -> Result<(Vec<(Work, u64)>, Dma)> {
        let identity = self.drive.identity();
        if ns.format.has_separate_metadata() {
            let why = "GPU-driven transfers do not carry separate metadata; format the namespace without, or extended";
            return Err(Error::Unsupported { drive: self.drive.name().to_owned(), why: why.into() });
        }
        let step = u64::from(max_blocks(&ns.format, identity.max_transfer));
        let count: u64 = jobs.iter().map(|job| job.blocks.div_ceil(step)).sum();
        let pages = list_pages(identity.page_shift, identity.max_transfer);
        let bytes = (count.max(1) * pages) << identity.page_shift;
        let lists = Dma::alloc(&*self.drive.control.port.mapper, bytes as usize, identity.page_shift)?;
        let pointers =
            Pointers { page_shift: identity.page_shift, max_transfer: identity.max_transfer, sgl: false };
        let mut works = Vec::with_capacity(count as usize);
        for job in jobs {
            onehop_proto::format::check_range(ns.blocks, job.lba, job.blocks)
                .map_err(|source| Error::Range { nsid: ns.nsid, source })?;
            for done in (0..job.blocks).step_by(step as usize) {
                let blocks = step.min(job.blocks - done) as u32;
                let bytes = ns.format.transfer_bytes(blocks.into()).unwrap_or(u64::MAX);
                let offset = job.offset + ns.format.transfer_bytes(done).unwrap_or(u64::MAX - job.offset);
                let list = ListSlot {
                    lists: &lists,
                    first_page: works.len() as u64 * pages,
                    page_shift: identity.page_shift,
                };
                let pointed = pointers.point(onehop_proto::Sqe::default(), (buffer, offset), bytes, &list)?;
                let (prp1, prp2) = (pointed.prp1(), pointed.prp2());
                let work = Work { lba: job.lba + done, prp1, prp2, blocks, control: op.opcode().into() };
                works.push((work, offset));
            }
        }
        Ok((works, lists))
    }

    /// Waits until all data that was announced has arrived.
    fn wait_for_data(
        &self,
        ns: &Namespace,
        canaries: &[Canary],
        buffer: &Buffer,
        report: &mut GpuReport,
    ) -> Result<()> {
        let start = Instant::now();
        for canary in canaries {
            if canary.is_gone(buffer) {
                continue;
            }
            report.late_data += 1;
            while !canary.is_gone(buffer) {
                if start.elapsed() >= self.setup.stall {
                    let command = format!("a GPU-driven read of {} namespace {}", self.drive.name(), ns.nsid);
                    return Err(Error::DataMissing { command, waited: self.setup.stall });
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Launches until every command has an end.
    fn carry_out(&self, op: Op, ns: &Namespace, left: &mut Vec<Item>, report: &mut GpuReport) -> Result<()> {
        while !left.is_empty() {
            let memory = self.write_launch(left)?;
            report.launches += 1;
            let exits = self.launch(ns, left.len() as u32, &memory)?;
            let again = self.read_outcomes(op, ns, left, &memory, report)?;
            // A stray completion says more than what it led to.
            let stray = exits.iter().find(|exit| matches!(exit, Exit::Stray(_)));
            let exit = stray.or_else(|| exits.iter().find(|exit| **exit != Exit::Finished));
            let Some(exit) = exit else { return Ok(()) };
            let recovery = self.recover(*exit)?;
            for item in &again {
                if item.recoveries > self.drive.options.retries {
                    let what =
                        describe(op.name(), self.drive.name(), ns.nsid, item.work.lba, item.work.blocks);
                    let (waited, retries) = (self.setup.stall, item.recoveries);
                    return Err(Error::TimedOut { command: what, waited, retries, recovery });
                }
            }
            if *exit == Exit::TimedOut && again.iter().all(|item| item.recoveries == 0) {
                let count = report.commands as u32;
                let done = count - again.len() as u32;
                return Err(Error::Launch {
                    done,
                    count,
                    why: format!("its {:?} were over", self.setup.limit),
                });
            }
            *left = again;
        }
        Ok(())
    }

    fn write_launch(&self, items: &[Item]) -> Result<LaunchMemory> {
        let works = 0;
        let outcomes = items.len() * Work::BYTES as usize;
        let bytes = outcomes + items.len() * Outcome::BYTES as usize;
        let region = self.gpu.alloc(Place::PinnedHost, bytes)?;
        for (i, item) in items.iter().enumerate() {
            let mut words = [0; Work::BYTES as usize];
            for (to, word) in words.chunks_exact_mut(4).zip(item.work.words()) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            region.write(works + i * Work::BYTES as usize, &words)?;
        }
        Ok(LaunchMemory { region, works, outcomes })
    }

    fn launch(&self, ns: &Namespace, count: u32, memory: &LaunchMemory) -> Result<Vec<Exit>> {
        let view = self.drive.identity().controller();
        let running = {
            let mut state = self.drive.alive()?;
            let queues = self.cell.ensure(&self.drive, &mut state, &*self.gpu)?;
            let job = KernelJob {
                works: memory.region.addr().plus(memory.works as u64),
                outcomes: memory.region.addr().plus(memory.outcomes as u64),
                count,
                nsid: ns.nsid,
                retries: self.drive.options.retries,
                retry_delay: std::array::from_fn(|crd| {
                    Duration::from_millis(view.retry_delay_ms(crd as u8).into())
                }),
                stall: self.setup.stall,
                limit: self.setup.limit,
                poison: self.cell.poison_addr(),
            };
            let launch = match self.setup.mode {
                GpuMode::Owner => Launch::Owner(queues),
                GpuMode::Shared { threads } => match queues.first() {
                    Some(queue) => Launch::Shared(*queue, threads),
                    None => return Err(Error::Gpu("a shared launch needs a queue".into())),
                },
            };
            let running = self.gpu.launch(&launch, &job)?;
            self.cell.running.store(true, Ordering::Release);
            running
        };
        while !running.is_done() {
            std::thread::sleep(Duration::from_micros(200));
            match self.drive.control.status() {
                Ok(status) if !status.cfs() => {}
                _ => self.cell.poison(poison::FAILED),
            }
            if let Ok(mut state) = self.drive.admin.try_lock() {
                // What the drive has to tell can wait for a better moment; a dead one shows in the status.
                let _ = self.drive.serve_events(&mut state);
            }
        }
        let exits = running.join();
        self.cell.running.store(false, Ordering::Release);
        let mut exits = exits?;
        if self.cell.has_strays()? {
            exits.push(Exit::Stray(NO_CID));
        }
        Ok(exits)
    }

    /// Adds up what ended and gives back what did not.
    fn read_outcomes(
        &self,
        op: Op,
        ns: &Namespace,
        items: &mut Vec<Item>,
        memory: &LaunchMemory,
        report: &mut GpuReport,
    ) -> Result<Vec<Item>> {
        let mut again = Vec::new();
        let mut failed = None;
        for (i, mut item) in items.drain(..).enumerate() {
            let at = memory.outcomes + i * Outcome::BYTES as usize;
            // Earlier launches' are counted already; an item that was never started says nothing.
            let retries = memory.region.word(at + 4)?.max(item.work.tries());
            report.retries += u64::from(retries - item.work.tries());
            match Outcome::from_word(memory.region.word(at)?) {
                Outcome::Done(status) if status.is_ok() => {}
                Outcome::Done(status) => {
                    let command =
                        describe(op.name(), self.drive.name(), ns.nsid, item.work.lba, item.work.blocks);
                    failed = failed.or(Some(Error::Command { command, status }));
                }
                Outcome::Pending => {
                    item.work = item.work.with_tries(retries);
                    again.push(item);
                }
                Outcome::InDoubt => {
                    item.work = item.work.with_tries(retries);
                    item.recoveries += 1;
                    report.retries += 1;
                    again.push(item);
                }
            }
        }
        match failed {
            // Nothing may be left in the controller's hands when a caller learns that its job failed.
            Some(error) if again.is_empty() => Err(error),
            Some(error) => self.recover(Exit::TimedOut).and(Err(error)),
            None => Ok(again),
        }
    }

    /// Gets everything that is in flight out of the controller's hands.
    fn recover(&self, exit: Exit) -> Result<Recovery> {
        let start = Instant::now();
        let mut state = self.drive.alive()?;
        if self.cell.is_stale() {
            // Somebody else has reset the controller: that is why the kernel ended.
            return Ok(Recovery::ControllerReset);
        }
        let cause = format!("a GPU launch that ended with {exit:?}");
        let healthy = self.drive.control.status().is_ok_and(|status| status.rdy() && !status.cfs());
        if healthy && !matches!(exit, Exit::Stray(_)) && self.cell.delete(&self.drive, &mut state).is_ok() {
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
