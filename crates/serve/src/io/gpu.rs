//! Transfers between files and GPU memory: through a ring of pinned host memory, filled while the copy engine empties
//! it.
//!
//! A lane is a thread with two slots, and a stream of copies for each buffer that it used recently. Data that is not in
//! the page cache is read with direct I/O, as whole pages into a slot.

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
use super::job::{CHUNK_BYTES, ChunkBundle, EndedTransfer, JobChunk, QueuedTransfers, complete};
use crate::error::Result;
use crate::lock;
use crate::table::{LinkContent, LinkedBuffer};

const PAGE: u64 = 4096;
/// A chunk, and a page at each end: direct I/O reads whole pages.
const SLOT: usize = CHUNK_BYTES as usize + 2 * PAGE as usize;
const SLOTS: usize = 2;
/// Bytes of a lane's ring.
const RING: usize = SLOTS * SLOT;
/// Buffers whose copy stream a lane keeps.
const MAX_COPIERS: usize = 8;
/// Lanes of a GPU for one user's reads or writes: enough to keep a copy engine of PCIe 5 busy, even with slow memory.
const MAX_LANES: usize = 16;
/// Lanes that users share. Each user leaves as many to others.
const LANES: u64 = 2 * MAX_LANES as u64;
/// Further lanes, one for each user who finds the others taken.
const RESERVE: u64 = MAX_LANES as u64;
/// Below this size, direct I/O costs more than it saves.
const MIN_DIRECT_IO: u64 = 64 << 10;
/// CUDA sends copies into a GPU of fewer bytes through the engine that runs kernels, where those of another process wait
/// some milliseconds for their turn, unless they are of several rows.
const MIN_COPY: usize = 32 << 10;
/// Earlier rings of a lane that abandoned copies may still read.
const MAX_ORPHANED_RINGS: usize = 2;
const IDLE: Duration = Duration::from_secs(1);

/// The route that bytes took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GpuRoute {
    Cached,
    Pinned,
    Written,
    /// Directly between another machine and GPU memory.
    Direct,
    DirectWritten,
}

/// A person, and whether it reads. Writes may wait for a disk.
type LaneUser = (u32, bool);

/// The lanes of a GPU.
pub(crate) struct GpuLanes {
    starter: Arc<ThreadStarter>,
    pub device: Arc<AnyGpu>,
    queue: Queue<QueuedTransfers, LaneUser>,
    lanes: AtomicUsize,
    most: usize,
    /// Rings for lanes that are started next.
    rings: Mutex<Vec<Region>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl GpuLanes {
    /// One user's reads or writes get `threads` lanes at most. Their rings are pinned now, because pinning stops copies that
    /// are under way.
    ///
    /// # Errors
    /// When the GPU cannot use our memory.
    pub fn new(starter: &Arc<ThreadStarter>, device: Arc<AnyGpu>, threads: usize) -> Result<Arc<Self>> {
        let most = threads.clamp(1, MAX_LANES);
        let shares = Shares::new(LANES).with_reserve(RESERVE, 1).with_limit(most as u64);
        // With little memory, lanes get theirs when they start.
        let memory = new_rings(&device, most).or_else(|_| new_rings(&device, 1))?;
        let ends = (RING..=memory.len()).step_by(RING);
        let rings: onehop_gpu::Result<_> = ends.map(|end| memory.slice(end - RING..end)).collect();
        let this = Arc::new(Self {
            starter: starter.clone(),
            device,
            queue: Queue::with_shares(shares),
            lanes: AtomicUsize::new(0),
            most,
            rings: Mutex::new(rings?),
            threads: Mutex::default(),
        });
        this.start_if_fewer_than(1)?;
        Ok(this)
    }

    /// Starts a lane if there is work for another one.
    fn start(self: &Arc<Self>) -> Result<()> {
        // One that has been started and has no work yet will take some.
        self.start_if_fewer_than(self.queue.useful_threads().min((LANES + RESERVE) as usize))
    }

    fn start_if_fewer_than(self: &Arc<Self>, wanted: usize) -> Result<()> {
        let one_more = |lanes| (lanes < wanted).then(|| lanes + 1);
        if self.lanes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).is_err() {
            return Ok(());
        }
        let spare = lock(&self.rings).pop();
        let ring = spare.map_or_else(|| new_rings(&self.device, 1), Ok);
        let started = ring.map_err(crate::Error::from).and_then(|ring| {
            let (this, mut lane) = (self.clone(), GpuCopyLane::new(self.device.clone(), ring.clone()));
            let run = move || {
                let _panicked = PanickedLane(&this);
                lane.run(&this);
            };
            let spawned = self.starter.spawn("usrbio GPU", run);
            spawned.map_err(|error| {
                self.keep_ring(ring);
                crate::Error::Thread(error)
            })
        });
        let thread = started.inspect_err(|_| {
            self.lanes.fetch_sub(1, Ordering::AcqRel);
        })?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Whether an idle lane may end because enough others remain for one user.
    fn ends_one(&self) -> bool {
        let one_less = |lanes| (lanes > self.most).then(|| lanes - 1);
        self.lanes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok()
    }

    /// Keeps the ring of a lane that ends, as many as one user's lanes have.
    fn keep_ring(&self, ring: Region) {
        let mut rings = lock(&self.rings);
        if rings.len() < self.most {
            rings.push(ring);
        }
    }

    pub fn add(self: &Arc<Self>, user: LaneUser, work: QueuedTransfers) {
        if self.queue.add(user, work) {
            // Ignored: there is at least one lane, so it only takes longer.
            let _ = self.start();
        }
    }

    /// Makes the lanes drop buffers that are gone.
    pub fn drop_removed_buffers(&self) {
        self.queue.wake();
    }

    /// Finishes queued work, and ends.
    pub fn end(&self) {
        self.queue.end();
        loop {
            // A lane may have started another one.
            let Some(thread) = lock(&self.threads).pop() else { return };
            let _ = thread.join();
        }
    }
}

/// A lane that panics is one less.
struct PanickedLane<'a>(&'a GpuLanes);

impl Drop for PanickedLane<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lanes.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

struct GpuCopyLane {
    device: Arc<AnyGpu>,
    ring: Region,
    copiers: Vec<BufferCopier>,
    next_slot: usize,
    /// The copies in flight while the next slot is filled.
    pending: Option<PendingCopies>,
    /// An abandoned copy may still read the ring.
    is_stale: bool,
    /// Earlier rings that abandoned copies may still read.
    orphaned: Vec<OrphanedRing>,
}

/// A ring that abandoned copies may still read, with their copiers.
struct OrphanedRing {
    _ring: Region,
    copiers: Vec<(BufferCopier, Option<Mark>)>,
}

impl OrphanedRing {
    /// Whether all copies have ended. A copier that does not answer counts as running.
    fn is_over(&mut self) -> bool {
        self.copiers.retain_mut(|(one, last)| {
            let mark = last.map_or_else(|| one.copier.mark(), Ok);
            let is_over = mark.and_then(|mark| one.copier.is_over(*last.insert(mark)));
            !is_over.unwrap_or_else(|error| !error.is_under_way())
        });
        self.copiers.is_empty()
    }
}

/// Memory for the rings of so many lanes.
fn new_rings(device: &AnyGpu, lanes: usize) -> onehop_gpu::Result<Region> {
    device.gpu().adopt(Place::PinnedHost, HostMem::touched(lanes * RING)?)
}

/// Copies between the ring and a buffer.
struct BufferCopier {
    buffer: Arc<LinkedBuffer>,
    /// Whether it copies into the buffer.
    reads: bool,
    copier: Box<dyn Copier>,
}

/// Copies in flight, all into one buffer.
struct PendingCopies {
    buffer: Arc<LinkedBuffer>,
    chunks: Vec<ReadChunk>,
    mark: Mark,
}

/// A chunk in a slot.
struct ReadChunk {
    chunk: JobChunk,
    /// The ring offset of its first byte.
    from: usize,
    route: GpuRoute,
    count: usize,
}

/// Copies as few: what is adjacent in both memories is one. Each is the offset in the one, that in the other, and the
/// number of bytes.
fn merged(copies: impl IntoIterator<Item = (usize, usize, usize)>) -> Vec<(usize, usize, usize)> {
    let mut all: Vec<(usize, usize, usize)> = Vec::new();
    for (from, to, bytes) in copies {
        match all.last_mut() {
            Some(last) if (last.0 + last.2, last.1 + last.2) == (from, to) => last.2 += bytes,
            _ => all.push((from, to, bytes)),
        }
    }
    all
}

/// A copy into the GPU, as rows that the copy engine moves at any size.
fn rows_in((from, to, bytes): (usize, usize, usize)) -> Rows {
    let rows = if bytes < MIN_COPY && bytes.is_multiple_of(2) { 2 } else { 1 };
    Rows { from, to, row: bytes / rows, rows, step: bytes / rows }
}

/// A copy out of the GPU.
fn rows_out((from, to, bytes): (usize, usize, usize)) -> Rows {
    Rows { from, to, row: bytes, rows: 1, step: bytes }
}

impl GpuCopyLane {
    fn new(device: Arc<AnyGpu>, ring: Region) -> Self {
        Self {
            device,
            ring,
            copiers: Vec::new(),
            next_slot: 0,
            pending: None,
            is_stale: false,
            orphaned: Vec::new(),
        }
    }

    /// Replaces a ring that the GPU may still read. Frees earlier rings whose copies have ended first.
    ///
    /// # Errors
    /// `EBUSY` while copies may read [`MAX_ORPHANED_RINGS`] earlier rings. A silent GPU gets no more memory.
    fn renew_if_stale(&mut self) -> std::io::Result<()> {
        self.free_orphaned();
        if self.is_stale {
            self.settle();
            if self.orphaned.len() >= MAX_ORPHANED_RINGS {
                return Err(std::io::Error::from_raw_os_error(Errno::BUSY.raw_os_error()));
            }
            let new = new_rings(&self.device, 1).map_err(std::io::Error::other)?;
            let copiers = self.copiers.drain(..).map(|one| (one, None)).collect();
            self.orphaned.push(OrphanedRing { _ring: std::mem::replace(&mut self.ring, new), copiers });
            self.is_stale = false;
        }
        Ok(())
    }

    /// Frees the rings whose copies have ended.
    fn free_orphaned(&mut self) {
        self.orphaned.retain_mut(|ring| !ring.is_over());
    }

    fn run(&mut self, of: &Arc<GpuLanes>) {
        let mut worker = of.queue.worker();
        loop {
            // Before the buffers are checked, so that one that goes afterwards ends the wait.
            let wakes = of.queue.wakes();
            // Copiers of a stale ring report when it can be freed.
            self.copiers.retain(|one| !one.buffer.is_gone() || self.pending.is_some() || self.is_stale);
            // Does not wait while a copy is in flight: it ends soon, and its program waits for it.
            let waits = self.pending.is_none();
            let limit = if waits { IDLE } else { Duration::ZERO };
            match worker.next_since(wakes, limit) {
                Next::Work(chunks, is_short) => {
                    if is_short {
                        let _ = of.start();
                    }
                    self.transfer(chunks, of);
                }
                Next::Nothing => {
                    self.settle();
                    self.free_orphaned();
                    // A lane that did not wait still holds a user's share, and work queued since may rely on it.
                    if waits && !self.is_stale && self.orphaned.is_empty() && of.ends_one() {
                        self.copiers.clear();
                        of.keep_ring(self.ring.clone());
                        // Work that was added meanwhile may have counted on this lane.
                        let _ = of.start();
                        return;
                    }
                }
                Next::Over => return self.settle(),
            }
        }
    }

    /// Transfers chunks of one ring. Those that may wait for a disk go back to the queue if others are among them.
    fn transfer(&mut self, ChunkBundle(chunks): ChunkBundle, of: &Arc<GpuLanes>) {
        let Some(job) = chunks.first().map(|chunk| chunk.job.clone()) else { return };
        // Another user's file may block this lane for ever, so finish this user's copies first.
        let is_another =
            |pending: &PendingCopies| pending.chunks.iter().any(|one| one.chunk.job.uid() != job.uid());
        if self.pending.as_ref().is_some_and(is_another) {
            self.settle();
        }
        let (mut ended, mut left) = (Vec::new(), Vec::new());
        for chunk in chunks {
            let result = chunk.refused().map_or_else(|| self.direct(&chunk), |result| Ok(Some(result)));
            match result.unwrap_or_else(|error| Some(failure(&error))) {
                Some(result) => ended.extend(chunk.end(result)),
                None => left.push(chunk),
            }
        }
        complete(ended);
        if left.is_empty() {
            return;
        }
        if !job.reads() {
            return self.write(left);
        }
        let slow = self.read(left);
        if !slow.is_empty() {
            of.add(job.lane_user(), QueuedTransfers::one_by_one(slow));
        }
    }

    /// Reads chunks into a slot, and starts their copies. Returns those that may wait for a disk, unless there is only one.
    fn read(&mut self, chunks: Vec<JobChunk>) -> Vec<JobChunk> {
        if let Err(error) = self.renew_if_stale() {
            ChunkBundle(chunks).end_each(|_| failure(&error));
            return Vec::new();
        }
        let mut at = self.next_slot * SLOT;
        self.next_slot = (self.next_slot + 1) % SLOTS;
        let (may_wait, mut slow, mut ended, mut begun) =
            (chunks.len() == 1, Vec::new(), Vec::new(), Vec::<ReadChunk>::new());
        for chunk in chunks {
            let filled = self.fill(&chunk, at, may_wait);
            // Without direct I/O, chunks that are adjacent in the buffer are so here.
            at += if matches!(filled, Ok(Some(_))) { chunk.len as usize } else { 0 };
            match filled {
                Ok(None) => slow.push(chunk),
                Ok(Some((from, route, count))) => begun.push(ReadChunk { chunk, from, route, count }),
                Err(error) => ended.extend(chunk.end(failure(&error))),
            }
        }
        let (nothing, begun): (Vec<_>, Vec<_>) = begun.into_iter().partition(|one| one.count == 0);
        ended.extend(nothing.into_iter().filter_map(|one| self.end_read(one)));
        let buffer = begun.first().map(|one| one.chunk.job.buffer.clone());
        let copies = merged(begun.iter().map(|one| (one.from, one.chunk.offset(), one.count)));
        let copies: Vec<_> = copies.into_iter().map(rows_in).collect();
        let copied = buffer.map(|buffer| self.copy(&buffer, true, &copies).map(|mark| (buffer, mark)));
        // The copies of the other slot ran meanwhile.
        self.settle();
        match copied {
            None => {}
            Some(Ok((buffer, mark))) => self.pending = Some(PendingCopies { buffer, chunks: begun, mark }),
            Some(Err(error)) => {
                ended.extend(begun.into_iter().filter_map(|one| one.chunk.end(failure(&error))))
            }
        }
        complete(ended);
        slow
    }

    /// Lets the network card transfer a chunk directly, without a slot; `None` if that is not possible.
    fn direct(&self, chunk: &JobChunk) -> std::io::Result<Option<i64>> {
        let LinkContent::Gpu(gpu) = &chunk.job.buffer.what else { return Ok(None) };
        let (file, start) = (chunk.job.open.file(), chunk.offset());
        let range = start..start + chunk.len as usize;
        let memory: Shareable = Arc::new(gpu.region.clone());
        let (route, count) = if chunk.job.reads() {
            (GpuRoute::Direct, file.read_direct(&memory, range, chunk.at())?)
        } else {
            (GpuRoute::DirectWritten, file.write_direct(&memory, range, chunk.at())?)
        };
        let Some(count) = count else { return Ok(None) };
        if route == GpuRoute::Direct {
            self.device.sync_remote_writes().map_err(std::io::Error::other)?;
        }
        chunk.job.count(route, self.device.gpu().simulated(), count as u64);
        Ok(Some(count as i64))
    }

    /// Ends a chunk whose bytes have all arrived.
    fn end_read(&self, ReadChunk { chunk, route, count, .. }: ReadChunk) -> Option<EndedTransfer> {
        chunk.job.count(route, self.device.gpu().simulated(), count as u64);
        chunk.end(count as i64)
    }

    /// Reads a chunk into a slot. Returns the ring offset of its first byte, the route, and the number of bytes; `None` if
    /// this may wait for a disk, and must not.
    fn fill(
        &self,
        chunk: &JobChunk,
        slot: usize,
        may_wait: bool,
    ) -> std::io::Result<Option<(usize, GpuRoute, usize)>> {
        let ring = self.ring.host().ok_or_else(|| std::io::Error::other("the ring is not host memory"))?;
        let (file, at, len) = (chunk.job.open.file(), chunk.at(), chunk.len);
        let slot_of = |len| TransferMemory { mem: ring, at: slot, len, shared: false };
        if !may_wait {
            let count = file.read_now(slot_of(len as usize), at)?.filter(|count| *count as u64 == len);
            return Ok(count.map(|count| (slot, GpuRoute::Cached, count)));
        }
        if len >= MIN_DIRECT_IO && file.is_cold(at, len) {
            let first = at / PAGE * PAGE;
            let whole = (at + len).next_multiple_of(PAGE) - first;
            if let Some(count) = file.read_past(slot_of(whole as usize), first)? {
                let skip = (at - first) as usize;
                let count = count.saturating_sub(skip).min(len as usize);
                return Ok(Some((slot + skip, GpuRoute::Pinned, count)));
            }
        }
        let count = file.read(slot_of(len as usize), at)?;
        Ok(Some((slot, GpuRoute::Cached, count)))
    }

    /// Starts copies between the ring and a buffer.
    fn copy(&mut self, buffer: &Arc<LinkedBuffer>, reads: bool, all: &[Rows]) -> std::io::Result<Mark> {
        let copier = self.copier(buffer, reads).map_err(std::io::Error::other)?;
        let (begun, marked) = (copier.copy_all(all), copier.mark());
        if begun.is_ok()
            && let Ok(mark) = &marked
        {
            return Ok(*mark);
        }
        // Some of them may have been started before the error.
        let ended = marked.and_then(|mark| copier.wait(mark));
        self.is_stale |= ended.as_ref().is_err_and(onehop_gpu::Error::is_under_way);
        Err(begun.and(ended).err().map_or_else(|| std::io::ErrorKind::Other.into(), std::io::Error::other))
    }

    fn copier(
        &mut self,
        buffer: &Arc<LinkedBuffer>,
        reads: bool,
    ) -> onehop_gpu::Result<&mut Box<dyn Copier>> {
        let is_it = |one: &BufferCopier| Arc::ptr_eq(&one.buffer, buffer) && one.reads == reads;
        if let Some(place) = self.copiers.iter().position(is_it) {
            // Most recently used last.
            let one = self.copiers.remove(place);
            self.copiers.push(one);
        } else {
            let LinkContent::Gpu(gpu) = &buffer.what else {
                return Err(onehop_os::Error::NotReachable.into());
            };
            let (from, to) = if reads { (&self.ring, &gpu.region) } else { (&gpu.region, &self.ring) };
            let copier = self.device.gpu().copier(from, to)?;
            if self.copiers.len() >= MAX_COPIERS {
                self.settle();
                if !self.is_stale {
                    self.copiers.remove(0);
                }
            }
            self.copiers.push(BufferCopier { buffer: buffer.clone(), reads, copier });
        }
        let last = self.copiers.last_mut();
        Ok(&mut last.ok_or(onehop_os::Error::NotReachable)?.copier)
    }

    /// Waits for the copies in flight, and completes their chunks.
    fn settle(&mut self) {
        let Some(PendingCopies { buffer, chunks, mark }) = self.pending.take() else { return };
        // Compared by pointer: another buffer may have its ID by now.
        let is_it = |one: &&mut BufferCopier| Arc::ptr_eq(&one.buffer, &buffer) && one.reads;
        let waited = match self.copiers.iter_mut().find(is_it) {
            Some(copies) => copies.copier.wait(mark),
            None => Err(onehop_os::Error::NotReachable.into()),
        };
        self.is_stale |= waited.as_ref().is_err_and(onehop_gpu::Error::is_under_way);
        let waited = waited.map_err(std::io::Error::other);
        let ended = chunks.into_iter().filter_map(|one| match &waited {
            Ok(()) => self.end_read(one),
            Err(error) => one.chunk.end(failure(error)),
        });
        complete(ended.collect());
    }

    /// Copies chunks from GPU memory into the ring, and writes them to the file.
    fn write(&mut self, chunks: Vec<JobChunk>) {
        self.settle();
        let place = |end: &mut usize, chunk: &JobChunk| {
            let at = *end;
            *end += chunk.len as usize;
            Some(at)
        };
        let places: Vec<usize> = chunks.iter().scan(0, place).collect();
        let copies = chunks.iter().zip(&places).map(|(chunk, to)| (chunk.offset(), *to, chunk.len as usize));
        let copies: Vec<_> = merged(copies).into_iter().map(rows_out).collect();
        let copied = self.renew_if_stale().and_then(|()| match chunks.first() {
            Some(first) => {
                let mark = self.copy(&first.job.buffer, false, &copies)?;
                self.wait_for(&first.job.buffer, mark)
            }
            None => Ok(()),
        });
        let ended = chunks.into_iter().zip(places).filter_map(|(chunk, at)| {
            let written = match &copied {
                Ok(()) => self.write_to_file(&chunk, at).unwrap_or_else(|error| failure(&error)),
                Err(error) => failure(error),
            };
            chunk.end(written)
        });
        complete(ended.collect());
    }

    /// Waits for copies from a buffer.
    fn wait_for(&mut self, buffer: &Arc<LinkedBuffer>, mark: Mark) -> std::io::Result<()> {
        let waited = self.copier(buffer, false).and_then(|copier| copier.wait(mark));
        self.is_stale |= waited.as_ref().is_err_and(onehop_gpu::Error::is_under_way);
        waited.map_err(std::io::Error::other)
    }

    /// Writes a chunk that is in the ring.
    fn write_to_file(&self, chunk: &JobChunk, at: usize) -> std::io::Result<i64> {
        let ring = self.ring.host().ok_or_else(|| std::io::Error::other("the ring is not host memory"))?;
        let from = TransferMemory { mem: ring, at, len: chunk.len as usize, shared: false };
        let count = chunk.job.open.file().write(from, chunk.at())?;
        chunk.job.count(GpuRoute::Written, self.device.gpu().simulated(), count as u64);
        Ok(count as i64)
    }
}

#[cfg(test)]
#[path = "gpu_tests.rs"]
mod tests;
