//! Transfers between files and GPU memory: through a ring of pinned host memory, filled while the copy engine empties it.
//!
//! Each lane is a thread with two slots and a stream of copies for each buffer it had to do with lately. What is not in the page
//! cache is read past it, as a whole number of pages into a slot.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use onehop_gpu::{Copier, Mark, Place, Region, Rows};
use onehop_os::{DmaMemory, HostMem, ThreadStarter};
use onehop_target::shares::Shares;
use onehop_target::transport::Shareable;
use onehop_target::tree::TransferMemory;
use onehop_target::turns::{Next, Queue};
use onehop_usrbio::gpu::AnyGpu;
use rustix::io::Errno;

use super::failure;
use super::job::{JobChunk, PIECE, Rest};
use crate::error::Result;
use crate::lock;
use crate::table::{LinkContent, LinkedBuffer};

const PAGE: u64 = 4096;
/// A piece, and the pages at both of its ends that come along when the page cache is passed by.
const SLOT: usize = PIECE as usize + 2 * PAGE as usize;
const SLOTS: usize = 2;
/// Buffers of which a lane keeps the stream of copies.
const MOST_COPIERS: usize = 8;
/// Lanes of a GPU for what a user reads or writes, at most: as many keep a copy engine of PCIe 5 busy on slow memory too.
const MOST_LANES: usize = 16;
/// Lanes that users share, who leave as many to others.
const LANES: u64 = 2 * MOST_LANES as u64;
/// More of them, for users who come when others have those: one each.
const RESERVE: u64 = MOST_LANES as u64;
/// Below this, reading past the page cache costs more than it saves.
const LEAST_PAST: u64 = 64 << 10;
/// Most earlier rings of a lane that abandoned copies may still read.
const MOST_LEFT: usize = 2;
const IDLE: Duration = Duration::from_secs(1);

/// Which way bytes went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GpuRoute {
    Cached,
    Pinned,
    Written,
    /// Straight between another machine and GPU memory.
    Direct,
    DirectWritten,
}

/// A person, and whether it is what they read: their writes may wait for a disk.
type LaneUser = (u32, bool);

/// The lanes of a GPU.
pub(crate) struct GpuLanes {
    starter: Arc<ThreadStarter>,
    pub device: Arc<AnyGpu>,
    queue: Queue<Rest, LaneUser>,
    lanes: AtomicUsize,
    most: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl GpuLanes {
    /// With one lane, so that a GPU which will not have any memory of ours is noticed now. What a user reads or writes has as many as
    /// there are `threads`, at most.
    pub fn new(starter: &Arc<ThreadStarter>, device: Arc<AnyGpu>, threads: usize) -> Result<Arc<Self>> {
        let most = threads.clamp(1, MOST_LANES);
        let shares = Shares::new(LANES).with_reserve(RESERVE, 1).with_limit(most as u64);
        let this = Arc::new(Self {
            starter: starter.clone(),
            device,
            queue: Queue::with_shares(shares),
            lanes: AtomicUsize::new(0),
            most,
            threads: Mutex::default(),
        });
        this.start()?;
        Ok(this)
    }

    fn start(self: &Arc<Self>) -> Result<()> {
        let most = (LANES + RESERVE) as usize;
        let one_more = |lanes| (lanes < most).then(|| lanes + 1);
        if self.lanes.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
            return Ok(());
        }
        let started =
            GpuCopyLane::new(self.device.clone()).map_err(crate::Error::from).and_then(|mut lane| {
                let this = self.clone();
                self.starter.spawn("usrbio GPU", move || lane.run(&this)).map_err(crate::Error::Thread)
            });
        let thread = started.inspect_err(|_| {
            self.lanes.fetch_sub(1, Ordering::AcqRel);
        })?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Whether a lane that has nothing to do may end: there are others enough for one user.
    fn ends_one(&self) -> bool {
        let one_less = |lanes| (lanes > self.most).then(|| lanes - 1);
        self.lanes.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less).is_ok()
    }

    pub fn add(self: &Arc<Self>, user: LaneUser, work: Rest) {
        if self.queue.add(user, work) {
            // There is one lane at least; without more it takes longer.
            let _ = self.start();
        }
    }

    /// Has lanes let go of buffers that are gone.
    pub fn let_go(&self) {
        self.queue.wake();
    }

    /// Does what is there, and ends.
    pub fn end(&self) {
        self.queue.end();
        loop {
            // A lane may have started another.
            let Some(thread) = lock(&self.threads).pop() else { return };
            let _ = thread.join();
        }
    }
}

struct GpuCopyLane {
    device: Arc<AnyGpu>,
    ring: Region,
    copiers: Vec<BufferCopier>,
    turn: usize,
    /// The copy that is under way while the next slot is filled.
    pending: Option<PendingCopy>,
    /// An abandoned copy may still read the ring.
    is_stale: bool,
    /// Earlier rings that abandoned copies may still read.
    left: Vec<LeftRing>,
}

/// A ring that is left to the GPU, with the copiers out of it.
struct LeftRing {
    _ring: Region,
    copiers: Vec<(BufferCopier, Option<Mark>)>,
}

impl LeftRing {
    /// Whether all copies out of it have ended. A copier that does not say has not.
    fn is_over(&mut self) -> bool {
        self.copiers.retain_mut(|(one, last)| {
            let mark = last.map_or_else(|| one.copier.mark(), Ok);
            let is_over = mark.and_then(|mark| one.copier.is_over(*last.insert(mark)));
            !is_over.unwrap_or_else(|error| !error.is_under_way())
        });
        self.copiers.is_empty()
    }
}

fn new_ring(device: &AnyGpu) -> onehop_gpu::Result<Region> {
    device.gpu().adopt(Place::PinnedHost, HostMem::touched(SLOT * SLOTS)?)
}

struct BufferCopier {
    buffer: Arc<LinkedBuffer>,
    copier: Box<dyn Copier>,
}

struct PendingCopy {
    piece: JobChunk,
    /// The route and the number of its bytes.
    read: (GpuRoute, usize),
    mark: Mark,
}

impl GpuCopyLane {
    fn new(device: Arc<AnyGpu>) -> onehop_gpu::Result<Self> {
        let ring = new_ring(&device)?;
        Ok(Self {
            device,
            ring,
            copiers: Vec::new(),
            turn: 0,
            pending: None,
            is_stale: false,
            left: Vec::new(),
        })
    }

    /// Leaves a ring to the GPU that may still read it, and takes a new one. Rings whose copies have ended are freed first.
    ///
    /// # Errors
    /// `EBUSY` while copies may read [`MOST_LEFT`] earlier rings: a GPU that never answers gets no more memory.
    fn renew_if_stale(&mut self) -> std::io::Result<()> {
        self.free_left();
        if self.is_stale {
            self.settle();
            if self.left.len() >= MOST_LEFT {
                return Err(std::io::Error::from_raw_os_error(Errno::BUSY.raw_os_error()));
            }
            let new = new_ring(&self.device).map_err(std::io::Error::other)?;
            let copiers = self.copiers.drain(..).map(|one| (one, None)).collect();
            self.left.push(LeftRing { _ring: std::mem::replace(&mut self.ring, new), copiers });
            self.is_stale = false;
        }
        Ok(())
    }

    /// Frees the rings whose copies have ended.
    fn free_left(&mut self) {
        self.left.retain_mut(|left| !left.is_over());
    }

    fn run(&mut self, of: &Arc<GpuLanes>) {
        let mut worker = of.queue.worker();
        loop {
            // Read first: a buffer that goes after the look at the buffers ends the wait.
            let wakes = of.queue.wakes();
            // Copiers of a ring that is stale say when it can be freed.
            self.copiers.retain(|one| !one.buffer.is_gone() || self.pending.is_some() || self.is_stale);
            // With a copy under way nothing is waited for: it ends, and somebody wants to know.
            let waits = self.pending.is_none();
            let limit = if waits { IDLE } else { Duration::ZERO };
            match worker.next_since(wakes, limit) {
                Next::Work(piece, is_short) => {
                    if is_short {
                        let _ = of.start();
                    }
                    self.piece(piece);
                }
                Next::Nothing => {
                    self.settle();
                    self.free_left();
                    // One that did not wait still counts for a user, whose work since then has been left to it.
                    if waits && !self.is_stale && self.left.is_empty() && of.ends_one() {
                        return;
                    }
                }
                Next::Over => return self.settle(),
            }
        }
    }

    fn piece(&mut self, piece: JobChunk) {
        // The file of one user may keep this lane for ever: nothing of another's is left to wait for it.
        if self.pending.as_ref().is_some_and(|pending| pending.piece.job.uid() != piece.job.uid()) {
            self.settle();
        }
        if let Some(result) = piece.refused() {
            return piece.end(result);
        }
        if let Some(result) = self.direct(&piece).unwrap_or_else(|error| Some(failure(&error))) {
            return piece.end(result);
        }
        if !piece.job.reads() {
            let result = self.write(&piece).unwrap_or_else(|error| failure(&error));
            return piece.end(result);
        }
        if let Err(error) = self.renew_if_stale() {
            return piece.end(failure(&error));
        }
        let slot = self.turn * SLOT;
        self.turn = (self.turn + 1) % SLOTS;
        let begun = self.fill(&piece, slot).and_then(|(from, read)| {
            let mark = if read.1 == 0 { None } else { Some(self.copy(&piece, from, read.1)?) };
            Ok((read, mark))
        });
        // The other slot's copy went on meanwhile.
        self.settle();
        match begun {
            Ok((read, None)) => self.end_read(piece, read),
            Ok((read, Some(mark))) => {
                self.pending = Some(PendingCopy { piece, read, mark });
            }
            Err(error) => piece.end(failure(&error)),
        }
    }

    /// Has another machine's card and ours carry a piece, without a slot. None where they cannot.
    fn direct(&self, piece: &JobChunk) -> std::io::Result<Option<i64>> {
        let LinkContent::Gpu(gpu) = &piece.job.buffer.what else { return Ok(None) };
        let (file, start) = (piece.job.open.file(), piece.offset());
        let range = start..start + piece.len as usize;
        let memory: Shareable = Arc::new(gpu.region.clone());
        let (way, count) = if piece.job.reads() {
            (GpuRoute::Direct, file.read_direct(&memory, range, piece.at())?)
        } else {
            (GpuRoute::DirectWritten, file.write_direct(&memory, range, piece.at())?)
        };
        let Some(count) = count else { return Ok(None) };
        if way == GpuRoute::Direct {
            self.device.settle_writes_of_others().map_err(std::io::Error::other)?;
        }
        piece.job.count(way, self.device.gpu().simulated(), count as u64);
        Ok(Some(count as i64))
    }

    /// All bytes of a piece are where they belong.
    fn end_read(&self, piece: JobChunk, (route, count): (GpuRoute, usize)) {
        piece.job.count(route, self.device.gpu().simulated(), count as u64);
        piece.end(count as i64);
    }

    /// Reads a piece into a slot; gives where in the ring its first byte is, by which route it came, and how many there are.
    fn fill(&self, piece: &JobChunk, slot: usize) -> std::io::Result<(usize, (GpuRoute, usize))> {
        let ring = self.ring.host().ok_or_else(|| std::io::Error::other("the ring is no host memory"))?;
        let (file, at, len) = (piece.job.open.file(), piece.at(), piece.len);
        let slot_of = |len| TransferMemory { mem: ring, at: slot, len, shared: false };
        if len >= LEAST_PAST && file.is_cold(at, len) {
            let first = at / PAGE * PAGE;
            let whole = (at + len).next_multiple_of(PAGE) - first;
            if let Some(count) = file.read_past(slot_of(whole as usize), first)? {
                let skip = (at - first) as usize;
                let count = count.saturating_sub(skip).min(len as usize);
                return Ok((slot + skip, (GpuRoute::Pinned, count)));
            }
        }
        let count = file.read(slot_of(len as usize), at)?;
        Ok((slot, (GpuRoute::Cached, count)))
    }

    fn copy(&mut self, piece: &JobChunk, from: usize, count: usize) -> std::io::Result<Mark> {
        let copier = self.copier(&piece.job.buffer).map_err(std::io::Error::other)?;
        let rows = Rows { from, to: piece.offset(), row: count, rows: 1, step: count };
        let (begun, marked) = (copier.copy(&rows), copier.mark());
        if begun.is_ok()
            && let Ok(mark) = &marked
        {
            return Ok(*mark);
        }
        // A part of what was refused may have been begun.
        let ended = marked.and_then(|mark| copier.wait(mark));
        self.is_stale |= ended.as_ref().is_err_and(onehop_gpu::Error::is_under_way);
        Err(begun.and(ended).err().map_or_else(|| std::io::ErrorKind::Other.into(), std::io::Error::other))
    }

    fn copier(&mut self, buffer: &Arc<LinkedBuffer>) -> onehop_gpu::Result<&mut Box<dyn Copier>> {
        let place = self.copiers.iter().position(|one| Arc::ptr_eq(&one.buffer, buffer));
        if let Some(place) = place {
            // The one that was used last stands last.
            let one = self.copiers.remove(place);
            self.copiers.push(one);
        } else {
            let LinkContent::Gpu(gpu) = &buffer.what else {
                return Err(onehop_os::Error::NotReachable.into());
            };
            let copier = self.device.gpu().copier(&self.ring, &gpu.region)?;
            if self.copiers.len() >= MOST_COPIERS {
                self.settle();
                if !self.is_stale {
                    self.copiers.remove(0);
                }
            }
            self.copiers.push(BufferCopier { buffer: buffer.clone(), copier });
        }
        let last = self.copiers.last_mut();
        Ok(&mut last.ok_or(onehop_os::Error::NotReachable)?.copier)
    }

    /// Waits for the copy that is under way, and tells.
    fn settle(&mut self) {
        let Some(PendingCopy { piece, read, mark }) = self.pending.take() else { return };
        // The buffer itself: another one may have its number by now.
        let copies = self.copiers.iter_mut().find(|one| Arc::ptr_eq(&one.buffer, &piece.job.buffer));
        let ended = match copies {
            Some(copies) => copies.copier.wait(mark),
            None => Err(onehop_os::Error::NotReachable.into()),
        };
        self.is_stale |= ended.as_ref().is_err_and(onehop_gpu::Error::is_under_way);
        match ended {
            Ok(()) => self.end_read(piece, read),
            Err(error) => piece.end(failure(&std::io::Error::other(error))),
        }
    }

    /// Out of GPU memory into a slot, and from there into the file.
    fn write(&mut self, piece: &JobChunk) -> std::io::Result<i64> {
        self.settle();
        self.renew_if_stale()?;
        let LinkContent::Gpu(gpu) = &piece.job.buffer.what else {
            return Err(std::io::Error::other("no GPU memory"));
        };
        let ring = self.ring.host().ok_or_else(|| std::io::Error::other("the ring is no host memory"))?;
        let mut bytes = vec![0; piece.len as usize];
        gpu.region.read(piece.offset(), &mut bytes).map_err(std::io::Error::other)?;
        ring.write(0, &bytes).map_err(std::io::Error::other)?;
        let from = TransferMemory { mem: ring, at: 0, len: bytes.len(), shared: false };
        let count = piece.job.open.file().write(from, piece.at())?;
        piece.job.count(GpuRoute::Written, self.device.gpu().simulated(), count as u64);
        Ok(count as i64)
    }
}

#[cfg(test)]
#[path = "gpu_tests.rs"]
mod tests;
