//! `cpu/pinned`: blocks go through host memory, in lanes side by side. While one lane waits for the drive, another copies
//! to the GPU.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use onehop_drive::{Buffer, Drive, GpuJob, IoQueue, Moved, Namespace, Op};
use onehop_gpu::{Copier, Gpu, Mark, Place, Region, Rows};
use onehop_os::HostMem;

use crate::chunk::Chunks;
use crate::copy::copy;
use crate::engine::{block_bytes, by_queue};
use crate::error::{Error, ErrorKind, Result};
use crate::progress::Progress;

/// Bytes that a lane moves at a time.
const STEP: u64 = 1 << 20;
/// Steps of a lane that have memory: one may be read while the one before is copied.
const STEPS: usize = 2;
/// Lanes of a drive of this machine. Their memory is locked, which users may do with a few MiB.
const LANES: u16 = 2;
/// Lanes of a drive across a network: a connection's bytes are received by one CPU.
const REMOTE_LANES: u16 = 4;
/// How often a caller is asked whether to go on.
const TICK: Duration = Duration::from_millis(20);

/// A queue, and host memory that the drive and the GPU reach.
struct PinnedLane {
    queue: IoQueue,
    buffer: Buffer,
    region: Region,
    host: HostMem,
}

impl PinnedLane {
    fn open(drive: &Drive, gpu: &dyn Gpu) -> Result<Self> {
        let (region, buffer) = drive.gpu_buffer(gpu, Place::PinnedHost, STEP as usize * STEPS)?;
        let host = buffer.host()?.clone();
        Ok(Self { queue: drive.queue()?, buffer, region, host })
    }

    /// Moves chunks until there are no more, or all lanes are stopped.
    fn run(&self, shared: &LanesJob<'_>, progress: &Sender<u64>) -> Result<Moved> {
        let block = block_bytes(shared.ns);
        let mut copies = match shared.op {
            Op::Read => Some(Copies::new(shared.gpu.copier(&self.region, shared.memory)?)),
            _ => None,
        };
        let mut moved = Moved::default();
        for step in (0..STEPS).cycle() {
            let chunk = shared.next();
            if chunk.is_empty() {
                break;
            }
            if let Some(copies) = &mut copies {
                copies.wait(step)?;
            }
            let (mut at, before) = (step * STEP as usize, moved.bytes);
            for job in &chunk {
                let (bytes, there) = ((job.blocks * block) as usize, job.offset as usize);
                if copies.is_none() {
                    let from = |offset, out: &mut [u8]| Ok(shared.memory.read(there + offset, out)?);
                    copy(bytes, from, |offset, data| Ok(self.host.write(at + offset, data)?))?;
                }
                let go_on = || !shared.is_cancelled.load(Ordering::Relaxed);
                let place = (&self.buffer, at as u64);
                moved.add(&by_queue(&self.queue, shared.op, shared.ns, job, place, &go_on)?);
                if let Some(copies) = &mut copies {
                    let rows = Rows { from: at, to: there, row: bytes, rows: 1, step: bytes };
                    copies.copier.copy(&rows)?;
                }
                at += bytes;
            }
            if let Some(copies) = &mut copies {
                copies.mark(step)?;
            }
            // No one listens any more once the transfer has failed.
            let _ = progress.send(moved.bytes - before);
        }
        for step in 0..STEPS {
            if let Some(copies) = &mut copies {
                copies.wait(step)?;
            }
        }
        Ok(moved)
    }
}

/// Copies to the GPU, and where those from each step's memory end.
struct Copies {
    copier: Box<dyn Copier>,
    marks: [Option<Mark>; STEPS],
}

impl Copies {
    fn new(copier: Box<dyn Copier>) -> Self {
        Self { copier, marks: [None; STEPS] }
    }

    fn mark(&mut self, step: usize) -> Result<()> {
        self.marks[step] = Some(self.copier.mark()?);
        Ok(())
    }

    /// Waits until the memory of a step is free again.
    fn wait(&mut self, step: usize) -> Result<()> {
        match self.marks[step].take() {
            Some(mark) => Ok(self.copier.wait(mark)?),
            None => Ok(()),
        }
    }
}

/// What all lanes work on.
struct LanesJob<'a> {
    op: Op,
    ns: &'a Namespace,
    gpu: &'a dyn Gpu,
    memory: &'a Region,
    chunks: Mutex<Chunks>,
    /// A lane has failed, so no further chunks are begun. What is in flight comes to its own end.
    has_failed: AtomicBool,
    /// The caller has cancelled.
    is_cancelled: AtomicBool,
}

/// Cancels what other threads do when this one panics.
struct CancelOnPanic<'a>(&'a AtomicBool);

impl Drop for CancelOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl LanesJob<'_> {
    fn next(&self) -> Vec<GpuJob> {
        if self.has_failed.load(Ordering::Relaxed) || self.is_cancelled.load(Ordering::Relaxed) {
            return Vec::new();
        }
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The lanes of a route.
pub(crate) struct Lanes(Vec<PinnedLane>);

impl Lanes {
    /// As many as `bytes` bytes keep busy, and the drive has queues for.
    pub(crate) fn open(drive: &Drive, gpu: &dyn Gpu, bytes: u64) -> Result<Self> {
        let most = u64::from(if drive.is_remote() { REMOTE_LANES } else { LANES });
        let most = most.min(bytes.div_ceil(STEP));
        let mut lanes = vec![PinnedLane::open(drive, gpu)?];
        // Others want queues of this drive, too.
        while (lanes.len() as u64) < most && drive.free_queues() > drive.identity().queues / 2 {
            // The first one does it alone where there is no memory for more.
            let Ok(lane) = PinnedLane::open(drive, gpu) else { break };
            lanes.push(lane);
        }
        Ok(Self(lanes))
    }

    pub(crate) fn count(&self) -> u16 {
        self.0.len() as u16
    }

    /// The queue of the first lane.
    pub(crate) fn queue(&self) -> Option<&IoQueue> {
        self.0.first().map(|lane| &lane.queue)
    }

    /// Moves the blocks of `jobs`.
    pub(crate) fn transfer(
        &self,
        op: Op,
        (ns, jobs): (&Namespace, &[GpuJob]),
        (gpu, memory): (&dyn Gpu, &Region),
        command: u64,
        progress: &dyn Progress,
    ) -> Result<Moved> {
        let chunks = Mutex::new(Chunks::of_size(jobs, block_bytes(ns), command, STEP));
        let (has_failed, is_cancelled) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = LanesJob { op, ns, gpu, memory, chunks, has_failed, is_cancelled };
        let (sender, moved) = channel();
        let run = |lane: &PinnedLane, sender: Sender<u64>| {
            let _guard = CancelOnPanic(&shared.is_cancelled);
            let end = lane.run(&shared, &sender);
            if end.is_err() {
                shared.has_failed.store(true, Ordering::Relaxed);
            }
            end
        };
        let ends: std::io::Result<Vec<_>> = std::thread::scope(|scope| {
            let _guard = CancelOnPanic(&shared.is_cancelled);
            let mut lanes = Vec::new();
            for lane in &self.0 {
                let (run, sender) = (&run, sender.clone());
                match std::thread::Builder::new().spawn_scoped(scope, move || run(lane, sender)) {
                    Ok(lane) => lanes.push(lane),
                    // Those that have begun do it all.
                    Err(_) if !lanes.is_empty() => break,
                    Err(error) => return Err(error),
                }
            }
            drop(sender);
            loop {
                match moved.recv_timeout(TICK) {
                    Ok(bytes) => progress.moved(bytes),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                if progress.is_cancelled() {
                    shared.is_cancelled.store(true, Ordering::Relaxed);
                }
            }
            Ok(lanes
                .into_iter()
                .map(|lane| lane.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect())
        });
        let ends = ends.map_err(|source| onehop_os::Error::System {
            call: "starting a thread".into(),
            source,
            hint: "",
        })?;
        let mut moved = Moved::default();
        let mut failed = None;
        for end in ends {
            match end {
                Ok(part) => moved.add(&part),
                Err(error) if failed.as_ref().is_none_or(|before| weight(&error) > weight(before)) => {
                    failed = Some(error);
                }
                Err(_) => {}
            }
        }
        let left = shared.chunks.into_inner().unwrap_or_else(PoisonError::into_inner).take();
        match failed {
            Some(error) => Err(error),
            None if left.is_empty() => Ok(moved),
            None => Err(Error::Cancelled),
        }
    }
}

/// Which of several lanes' errors the caller gets. That the outcome of a write is unknown is more than any other says.
fn weight(error: &Error) -> u8 {
    match error {
        Error::Drive(onehop_drive::Error::OutcomeUnknown { .. }) => 2,
        _ if error.kind() == ErrorKind::Cancelled => 0,
        _ => 1,
    }
}
