//! A drive under onehop's driver: GPU-initiated and CPU-initiated commands, directly into GPU memory or through host
//! memory.

use std::cell::OnceCell;
use std::sync::Arc;
use std::thread::yield_now;

use onehop_drive::{
    Batch, Buffer, Drive, Error as DriveError, GpuJob, GpuQueues, GpuSetup, Io, IoQueue, Namespace, Op,
    Options, Placement, Token,
};
use onehop_gpu::{Copier, Gpu, Mark, Place, Region, Rows};
use onehop_os::{ControllerBackend, HostMem, StopSignal, cycles};

use super::{Cell, Move, NotMeasurable, PreparedRoute, SweepLane, SweepTarget};
use crate::stats::{Clock, Quantiles};
use crate::{Error, Result};

const ROUTES: [&str; 9] = [
    "gpu/tier3",
    "gpu/posted",
    "gpu/tier2",
    "gpu/tier1",
    "cpu/direct",
    "cpu/pinned",
    "cpu/memcpy",
    "cpu/cached",
    "cufile",
];
/// Commands of a block that queues have room for, and their entries at most.
const COMMANDS: u32 = 16;
const MOST_DEPTH: u32 = 1023;
/// Bytes that are read at a time to compare.
const STEP: u64 = 1 << 20;
const COPIED_TWICE: &str = "each block is copied in host memory once more than in a plain program";

/// A drive that was opened for a sweep.
pub struct DriveTarget {
    drive: Drive,
    ns: Namespace,
    gpu: Arc<dyn Gpu>,
    bytes: u64,
    checker: (IoQueue, Buffer),
    /// The GPU with kernels that take times.
    metered: OnceCell<Arc<dyn Gpu>>,
}

impl DriveTarget {
    /// Opens a drive. Only its first `bytes` bytes are read and written.
    ///
    /// # Errors
    /// When the drive cannot be opened, or has no such namespace.
    pub fn open(port: ControllerBackend, nsid: u32, gpu: Arc<dyn Gpu>, plan: &DrivePlan) -> Result<Self> {
        let queues = plan.threads.saturating_add(1).min(u32::from(u16::MAX)) as u16;
        let standard = Options::default();
        let options = Options {
            writable: plan.writable,
            queues: queues.max(standard.queues),
            // A block may take several commands.
            depth: plan.depth.saturating_mul(COMMANDS).clamp(64, MOST_DEPTH),
            stop: plan.stop.clone(),
            ..standard
        };
        let drive = Drive::open(port, options)?;
        let ns = drive.namespace(nsid)?.clone();
        let whole = ns.format.transfer_bytes(ns.blocks).unwrap_or(u64::MAX);
        let bytes = plan.bytes.map_or(whole, |bytes| bytes.min(whole));
        let step = STEP.next_multiple_of(ns.format.transfer_bytes(1).unwrap_or(1).max(1));
        let checker = (drive.queue()?, drive.buffer(step as usize)?);
        Ok(Self { drive, ns, gpu, bytes, checker, metered: OnceCell::new() })
    }

    /// The drive.
    #[must_use]
    pub fn drive(&self) -> &Drive {
        &self.drive
    }

    /// Writes different bytes to every block, so that blocks can be distinguished.
    ///
    /// # Errors
    /// When the drive may not be written, or fails.
    pub fn fill(&self) -> Result<()> {
        let (queue, buffer) = &self.checker;
        let step = buffer.bytes() / self.unit();
        let blocks = self.bytes / self.unit();
        let mut data = vec![0; buffer.bytes() as usize];
        for lba in (0..blocks).step_by(step.max(1) as usize) {
            for (i, word) in data.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                *word = super::order::mix(lba << 24 | i as u64).to_le_bytes();
            }
            buffer.host()?.write(0, &data)?;
            queue.write(&self.ns, lba, step.min(blocks - lba), buffer, 0)?;
        }
        // What a power loss takes afterwards is no wrong byte.
        queue.flush(&self.ns)?;
        Ok(())
    }

    fn attempt(&self, route: &str, cell: &Cell, bytes: u64) -> Result<PreparedRoute> {
        let op = if cell.io.writes() { Op::Write } else { Op::Read };
        let bytes = usize::try_from(bytes).map_err(|_| Error::Setup("a pass is too large".into()))?;
        match route {
            "cpu/direct" => {
                let (memory, buffer) = self.drive.gpu_buffer(&*self.gpu, Place::Vram, bytes)?;
                self.by_cpu(cell, memory, |_| Ok(Landing::There(buffer.clone())), op)
            }
            "cpu/pinned" | "cpu/memcpy" => {
                let memory = self.gpu.alloc(Place::Vram, bytes)?;
                let stage = |slots: usize| self.stage(route, cell.block as usize * slots, &memory);
                let way = self.by_cpu(cell, memory.clone(), stage, op)?;
                let copied_twice = route == "cpu/memcpy" && op == Op::Read;
                Ok(PreparedRoute { note: copied_twice.then(|| COPIED_TWICE.to_owned()), ..way })
            }
            gpu => {
                let mut last = None;
                for placement in placements(gpu) {
                    match self.by_gpu(cell, *placement, bytes, op) {
                        Err(lacks @ Error::Drive(DriveError::Placement { .. })) => last = Some(lacks),
                        other => return other,
                    }
                }
                Err(last.unwrap_or_else(|| Error::Setup(format!("{gpu} is not a route"))))
            }
        }
    }

    fn by_gpu(&self, cell: &Cell, placement: Placement, bytes: usize, op: Op) -> Result<PreparedRoute> {
        self.gpu.load_kernels()?;
        let metered = self.metered()?;
        let queues = u16::try_from(cell.threads).unwrap_or(u16::MAX);
        let setup = GpuSetup { queues, depth: cell.depth, ..GpuSetup::new(placement) };
        let queues = self.drive.gpu_queues(self.gpu.clone(), setup)?;
        let (memory, buffer) = self.drive.gpu_buffer(&*self.gpu, placement.data, bytes)?;
        let (ns, unit) = (self.ns.clone(), self.unit());
        let blocks = cell.block / unit;
        let lane = GpuLane { queues, metered, ns, op, buffer, unit, blocks, jobs: Vec::new() };
        let note = (placement == Placement::POSTED_CMB)
            .then(|| "submission queues in the drive's memory".to_owned());
        Ok(PreparedRoute {
            lanes: vec![Box::new(lane)],
            memory,
            threads: cell.threads,
            depth: cell.depth,
            note,
        })
    }

    fn metered(&self) -> Result<Arc<dyn Gpu>> {
        if let Some(metered) = self.metered.get() {
            return Ok(metered.clone());
        }
        let metered = self.gpu.instruments()?.metered()?;
        Ok(self.metered.get_or_init(|| metered).clone())
    }

    fn by_cpu(
        &self,
        cell: &Cell,
        memory: Region,
        mut landing: impl FnMut(usize) -> Result<Landing>,
        op: Op,
    ) -> Result<PreparedRoute> {
        let unit = self.unit();
        let most = self.ns.format.blocks_within(self.drive.identity().max_transfer).max(1);
        let blocks = cell.block / unit;
        let commands = u32::try_from(blocks.div_ceil(most)).unwrap_or(u32::MAX);
        let mut lanes: Vec<Box<dyn SweepLane>> = Vec::new();
        let mut depth = cell.depth;
        for _ in 0..cell.threads {
            let queue = self.drive.queue()?;
            depth = depth.min(queue.depth() / commands.max(1)).max(1);
            let landing = landing(depth as usize)?;
            let ns = self.ns.clone();
            lanes.push(Box::new(CpuLane {
                queue,
                ns,
                op,
                unit,
                blocks,
                most,
                depth,
                landing,
                memory: memory.clone(),
                copy: Vec::new(),
            }));
        }
        Ok(PreparedRoute { lanes, memory, threads: cell.threads, depth, note: None })
    }

    /// Host memory that blocks go through: known to the copy engine, or any.
    fn stage(&self, route: &str, bytes: usize, memory: &Region) -> Result<Landing> {
        if route == "cpu/memcpy" {
            let buffer = self.drive.buffer(bytes)?;
            let host = buffer.host()?.clone();
            return Ok(Landing::Staged { buffer, host, copier: None });
        }
        let (region, buffer) = self.drive.gpu_buffer(&*self.gpu, Place::PinnedHost, bytes)?;
        let host = buffer.host()?.clone();
        Ok(Landing::Staged { buffer, host, copier: Some(self.gpu.copier(&region, memory)?) })
    }
}

/// The settings of a drive for a sweep.
#[derive(Clone, Debug)]
pub struct DrivePlan {
    /// Whether it may be written.
    pub writable: bool,
    /// Bytes that are used; all of the namespace without it.
    pub bytes: Option<u64>,
    /// The most threads of any cell.
    pub threads: u32,
    /// The largest depth of any cell.
    pub depth: u32,
    /// Ends every wait for the drive once it is set.
    pub stop: StopSignal,
}

/// The placements of a route, the best first.
fn placements(route: &str) -> &'static [Placement] {
    match route {
        "gpu/tier3" => &[Placement::TIER3],
        "gpu/posted" => &[Placement::POSTED_CMB, Placement::POSTED],
        "gpu/tier2" => &[Placement::TIER2],
        "gpu/tier1" => &[Placement::TIER1],
        _ => &[],
    }
}

impl SweepTarget for DriveTarget {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn unit(&self) -> u64 {
        self.ns.format.transfer_bytes(1).unwrap_or(1).max(1)
    }

    fn routes(&self) -> &'static [&'static str] {
        &ROUTES
    }

    fn open(
        &self,
        route: &str,
        cell: &Cell,
        bytes: u64,
    ) -> Result<std::result::Result<PreparedRoute, NotMeasurable>> {
        let why = match route {
            "cpu/cached" => "the page cache is Linux's, which does not have this drive: --file measures it",
            "cufile" => {
                "cuFile reads files of mounted file systems, and onehop drives this drive: --file measures it"
            }
            _ => {
                return match self.attempt(route, cell, bytes) {
                    Ok(way) => Ok(Ok(way)),
                    Err(error) => lacking(error).map(Err),
                };
            }
        };
        Ok(Err(NotMeasurable(why.into())))
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let (queue, buffer) = &self.checker;
        for (i, part) in out.chunks_mut(buffer.bytes() as usize).enumerate() {
            let lba = (at + i as u64 * buffer.bytes()) / self.unit();
            queue.read(&self.ns, lba, part.len() as u64 / self.unit(), buffer, 0)?;
            buffer.host()?.read(0, part)?;
        }
        Ok(())
    }
}

/// Turns the error of an impossible route into a reason; returns other errors unchanged.
fn lacking(error: Error) -> Result<NotMeasurable> {
    match &error {
        Error::Gpu(_)
        | Error::Drive(
            DriveError::Placement { .. }
            | DriveError::NoQueue { .. }
            | DriveError::Unsupported { .. }
            | DriveError::NoMemory(_)
            | DriveError::Memory(_)
            | DriveError::Gpu(_),
        ) => Ok(NotMeasurable(error.to_string())),
        _ => Err(error),
    }
}

/// Commands by GPU threads: all queues are one lane, whose launches are started by one thread.
struct GpuLane {
    queues: GpuQueues,
    metered: Arc<dyn Gpu>,
    ns: Namespace,
    op: Op,
    buffer: Buffer,
    unit: u64,
    blocks: u64,
    jobs: Vec<GpuJob>,
}

impl GpuLane {
    fn describe(&mut self, moves: &[Move]) {
        let (unit, blocks) = (self.unit, self.blocks);
        self.jobs.clear();
        self.jobs.extend(moves.iter().map(|m| GpuJob { lba: m.at / unit, blocks, offset: m.slot }));
    }
}

impl SweepLane for GpuLane {
    fn pass(&mut self, moves: &[Move], _: &mut Quantiles) -> Result<()> {
        self.describe(moves);
        match self.op {
            Op::Write => self.queues.write(&self.ns, &self.jobs, &self.buffer)?,
            _ => self.queues.read(&self.ns, &self.jobs, &self.buffer)?,
        };
        Ok(())
    }

    fn timed_pass(&mut self, moves: &[Move], times: &mut Quantiles, clock: &Clock) -> Result<()> {
        self.describe(moves);
        let (_, took) = self.queues.timed(&*self.metered, self.op, &self.ns, &self.jobs, &self.buffer)?;
        took.into_iter().for_each(|time| times.add(clock.cycles(time)));
        Ok(())
    }
}

/// Where a drive's data lands.
enum Landing {
    /// In its final place.
    There(Buffer),
    /// In host memory, from where it is copied: by the copy engine, or by the thread that reads it.
    Staged { buffer: Buffer, host: HostMem, copier: Option<Box<dyn Copier>> },
}

/// Commands by one CPU thread on a queue of its own.
struct CpuLane {
    queue: IoQueue,
    ns: Namespace,
    op: Op,
    unit: u64,
    /// Of a block of the sweep, and of a command.
    blocks: u64,
    most: u64,
    depth: u32,
    landing: Landing,
    memory: Region,
    /// The intermediate memory of `cpu/memcpy`.
    copy: Vec<u8>,
}

/// A block under way.
struct Flight {
    /// The part of the host memory that it goes through.
    stage: usize,
    slot: u64,
    begun: u64,
    state: FlightState,
}

enum FlightState {
    /// At the drive, by these commands.
    Moving(Vec<Token>),
    /// On its way from host memory.
    Copying(Mark),
    Over,
}

impl SweepLane for CpuLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        let mut free: Vec<usize> = (0..self.depth as usize).collect();
        let mut flying: Vec<Flight> = Vec::with_capacity(free.len());
        let mut moves = moves.iter();
        loop {
            let more = self.submit(&mut moves, &mut free, &mut flying)?;
            if flying.is_empty() {
                return Ok(());
            }
            let (mut i, mut some) = (0, more);
            while let Some(flight) = flying.get_mut(i) {
                self.look(flight)?;
                if matches!(flight.state, FlightState::Over) {
                    times.add(cycles().saturating_sub(flight.begun));
                    free.push(flight.stage);
                    flying.swap_remove(i);
                    some = true;
                } else {
                    i += 1;
                }
            }
            if !some {
                self.queue.check_stop()?;
                yield_now();
            }
        }
    }
}

impl CpuLane {
    /// Submits as many blocks as there is room for, with one doorbell; returns whether there were any.
    fn submit(
        &self,
        moves: &mut std::slice::Iter<'_, Move>,
        free: &mut Vec<usize>,
        flying: &mut Vec<Flight>,
    ) -> Result<bool> {
        let count = free.len().min(moves.as_slice().len());
        if count == 0 {
            return Ok(false);
        }
        let next = moves.as_slice().iter().take(count).zip(free.drain(free.len() - count..));
        let next: Vec<(Move, usize, u64)> = next.map(|(m, stage)| (*m, stage, cycles())).collect();
        moves.nth(count - 1);
        if let (Op::Write, Landing::Staged { host, .. }) = (self.op, &self.landing) {
            let block = (self.blocks * self.unit) as usize;
            for (m, stage, _) in &next {
                self.memory.read_to(m.slot as usize, host, stage * block, block)?;
            }
        }
        let mut batch = self.queue.batch()?;
        for (Move { at, slot }, stage, begun) in next {
            let tokens = self.commands(&mut batch, at, stage, slot)?;
            flying.push(Flight { stage, slot, begun, state: FlightState::Moving(tokens) });
        }
        Ok(true)
    }

    /// The commands of one block.
    fn commands(&self, batch: &mut Batch<'_>, at: u64, stage: usize, slot: u64) -> Result<Vec<Token>> {
        let (buffer, start) = match &self.landing {
            Landing::There(buffer) => (buffer, slot),
            Landing::Staged { buffer, .. } => (buffer, stage as u64 * self.blocks * self.unit),
        };
        let mut tokens = Vec::with_capacity(1);
        let mut done = 0;
        while done < self.blocks {
            let count = self.most.min(self.blocks - done);
            let io = Io::new(self.op, at / self.unit + done, count as u32, buffer, start + done * self.unit);
            tokens.push(batch.submit(&self.ns, &io)?);
            done += count;
        }
        Ok(tokens)
    }

    /// Advances a block, if it can.
    fn look(&mut self, flight: &mut Flight) -> Result<()> {
        let block = (self.blocks * self.unit) as usize;
        match &mut flight.state {
            FlightState::Moving(tokens) => {
                while let Some(token) = tokens.last() {
                    match self.queue.test(*token) {
                        None => return Ok(()),
                        Some(end) => drop(end?),
                    }
                    tokens.pop();
                }
                flight.state = FlightState::Over;
                if let (Op::Read, Landing::Staged { host, copier, .. }) = (self.op, &mut self.landing) {
                    let (from, to) = (flight.stage * block, flight.slot as usize);
                    match copier {
                        Some(copier) => {
                            copier.copy(&Rows { from, to, row: block, rows: 1, step: block })?;
                            flight.state = FlightState::Copying(copier.mark()?);
                        }
                        None => {
                            // One copy more than a plain program makes: memory that a drive writes cannot be borrowed
                            // as a slice.
                            self.copy.resize(block, 0);
                            host.read(from, &mut self.copy)?;
                            self.memory.write(to, &self.copy)?;
                        }
                    }
                }
            }
            FlightState::Copying(mark) => {
                if let Landing::Staged { copier: Some(copier), .. } = &mut self.landing
                    && copier.is_over(*mark)?
                {
                    flight.state = FlightState::Over;
                }
            }
            FlightState::Over => {}
        }
        Ok(())
    }
}
