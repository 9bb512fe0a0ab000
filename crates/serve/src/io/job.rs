//! A transfer that cannot be done at once. It is divided into chunks, which several threads transfer in parallel.
//!
//! Chunks are created when a thread is ready for them, so the memory that a transfer takes does not depend on its
//! length.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use onehop_os::HostMem;
use onehop_target::turns::Divisible;
use onehop_usrbio::ring::{Done, Request, Submission};
use rustix::io::Errno;

use super::gpu::GpuRoute;
use super::{failure, refused};
use crate::daemon::DaemonShared;
use crate::lock;
use crate::opens::Open;
use crate::table::{LinkContent, LinkedBuffer};
use crate::workers::ServedRing;

/// The most bytes of a chunk.
pub(crate) const CHUNK_BYTES: u64 = 4 << 20;

/// A transfer in flight.
pub(crate) struct TransferJob {
    shared: Arc<DaemonShared>,
    ring: Arc<ServedRing>,
    index: i32,
    userdata: u64,
    pub request: Request,
    pub buffer: Arc<LinkedBuffer>,
    pub open: Arc<Open>,
    progress: Mutex<JobProgress>,
}

/// The progress of a transfer.
#[derive(Default)]
struct JobProgress {
    /// Chunks started so far.
    begun: u64,
    in_flight: u64,
    /// The first short chunk, and its bytes or a negative error number. No further chunks are started.
    short: Option<(u64, i64)>,
    /// The first chunk that failed.
    failed: Option<(u64, i64)>,
}

/// A part of a transfer.
pub(crate) struct JobChunk {
    pub job: Arc<TransferJob>,
    number: u64,
    /// The offset in the transfer.
    pub start: u64,
    pub len: u64,
}

impl JobChunk {
    /// The offset in the file.
    pub fn at(&self) -> u64 {
        self.job.request.at + self.start
    }

    /// The offset in the buffer.
    pub fn offset(&self) -> usize {
        (self.job.request.offset + self.start) as usize
    }

    /// A negative error number if the chunk must not be transferred: its program has ended or unregistered the memory,
    /// or the file has a hole that the ring refuses.
    pub fn refused(&self) -> Option<i64> {
        if self.job.buffer.is_gone() {
            return Some(refused(Errno::CANCELED));
        }
        if !self.job.ring.refuses_holes() {
            return None;
        }
        match self.job.open.file().has_hole(self.at(), self.len) {
            Ok(has_hole) => has_hole.then(|| refused(Errno::NODATA)),
            Err(error) => Some(failure(&error)),
        }
    }

    /// Records the result. The last chunk completes the transfer.
    pub fn end(self, result: i64) {
        let job = &self.job;
        let mut progress = lock(&job.progress);
        let is_before = |known: Option<(u64, i64)>| known.is_none_or(|(number, _)| self.number < number);
        if result < self.len as i64 && is_before(progress.short) {
            progress.short = Some((self.number, result));
        }
        if result < 0 && is_before(progress.failed) {
            progress.failed = Some((self.number, result));
        }
        progress.in_flight -= 1;
        if progress.in_flight == 0 && (progress.short.is_some() || progress.begun == job.chunks()) {
            let (short, failed) = (progress.short, progress.failed);
            drop(progress);
            job.end(short, failed);
        }
    }
}

/// The chunks of a transfer that are not started yet.
pub(crate) struct RemainingChunks(pub Arc<TransferJob>);

impl Divisible for RemainingChunks {
    type Part = JobChunk;

    fn divide(self) -> (Option<JobChunk>, Option<Self>) {
        let Self(job) = self;
        let mut progress = lock(&job.progress);
        if progress.short.is_some() {
            return (None, None);
        }
        let number = progress.begun;
        progress.begun += 1;
        progress.in_flight += 1;
        let is_last = progress.begun == job.chunks();
        drop(progress);
        let (start, rest) = (number * CHUNK_BYTES, (!is_last).then(|| Self(job.clone())));
        let len = CHUNK_BYTES.min(job.request.len - start);
        (Some(JobChunk { job, number, start, len }), rest)
    }
}

impl TransferJob {
    pub fn new(
        shared: &Arc<DaemonShared>,
        ring: &Arc<ServedRing>,
        entry: &Submission,
        request: &Request,
        buffer: Arc<LinkedBuffer>,
        open: Arc<Open>,
    ) -> Result<Self, Errno> {
        // A ring entry costs its program a few bytes, and a transfer costs the daemon some hundred.
        if !shared.jobs.take(ring.owner.uid, 1) {
            return Err(Errno::AGAIN);
        }
        Ok(Self {
            shared: shared.clone(),
            ring: ring.clone(),
            index: entry.index,
            userdata: entry.userdata,
            request: *request,
            buffer,
            open,
            progress: Mutex::default(),
        })
    }

    pub fn chunks(&self) -> u64 {
        self.request.len.div_ceil(CHUNK_BYTES)
    }

    pub fn reads(&self) -> bool {
        self.ring.server.name().read
    }

    /// The user.
    pub fn uid(&self) -> u32 {
        self.ring.owner.uid
    }

    pub fn shared(&self) -> &DaemonShared {
        &self.shared
    }

    /// Queues the transfer. A user's reads do not wait behind their writes, which may wait for a disk.
    pub fn begin(self) {
        let (uid, job) = (self.shared.persons.of(self.ring.owner.uid), Arc::new(self));
        let shared = &job.shared;
        match &job.buffer.what {
            LinkContent::Gpu(gpu) => gpu.engine.add((uid, job.reads()), RemainingChunks(job.clone())),
            LinkContent::Host(_) | LinkContent::Ring(_) if job.reads() => {
                shared.ring_reads.add(uid, RemainingChunks(job.clone()));
            }
            LinkContent::Host(_) | LinkContent::Ring(_) => {
                shared.ring_writes.add(uid, RemainingChunks(job.clone()))
            }
        }
    }

    /// The bytes up to the first short chunk, or an error if any chunk failed.
    fn result(&self, short: Option<(u64, i64)>, failed: Option<(u64, i64)>) -> i64 {
        match (short, failed) {
            (_, Some((_, error))) => error,
            (Some((number, bytes)), None) => (number * CHUNK_BYTES) as i64 + bytes,
            (None, None) => self.request.len as i64,
        }
    }

    fn end(&self, short: Option<(u64, i64)>, failed: Option<(u64, i64)>) {
        let mut result = self.result(short, failed);
        if let (true, 0.., Some((number, _))) = (self.reads(), result, short) {
            // Zeroes the memory behind the end of the file, up to the end of the chunk. Memory beyond that is left
            // alone: it may be a hole of any length, which this process would have to fill with pages.
            let until = ((number + 1) * CHUNK_BYTES).min(self.request.len);
            let (from, bytes) = (self.request.offset + result as u64, until - result as u64);
            if let Err(error) = self.zero(from as usize, bytes as usize) {
                result = failure(&error);
            }
        }
        // A refused hole is not a failure.
        let is_hole = self.ring.refuses_holes() && result == refused(Errno::NODATA);
        if result < 0 && !is_hole {
            self.shared.stats.failed.fetch_add(1, Ordering::Relaxed);
        }
        if !self.reads() {
            // Even after an error: some chunks, or parts of them, were written.
            self.shared.written(self.request.inode, self.request.at, self.request.len);
        }
        // A network card may have registered the memory again after the buffer was removed.
        if self.buffer.is_gone() {
            self.shared.forget_registrations(&self.buffer);
        }
        // Before the completion: the program may submit the next request at once.
        self.shared.jobs.put_back(self.ring.owner.uid, 1);
        self.ring.server.complete(&[Done { index: self.index, userdata: self.userdata, result }]);
    }

    fn zero(&self, from: usize, bytes: usize) -> std::io::Result<()> {
        match &self.buffer.what {
            LinkContent::Host(mem) => self.zero_host(mem, from, bytes),
            LinkContent::Gpu(gpu) => {
                gpu.region.fill(from, bytes, 0).map_err(std::io::Error::other)?;
                self.shared.stats.zeroed[1].count(bytes as u64);
                Ok(())
            }
            LinkContent::Ring(_) => Ok(()),
        }
    }

    /// Lets the kernel write: the memory may have been truncated.
    fn zero_host(&self, mem: &HostMem, from: usize, bytes: usize) -> std::io::Result<()> {
        self.shared.zeroes.read_into(mem, from, bytes)?;
        self.shared.stats.zeroed[0].count(bytes as u64);
        Ok(())
    }

    /// Counts bytes that were moved to or from a GPU.
    pub fn count(&self, route: GpuRoute, simulated: bool, bytes: u64) {
        let stats = &self.shared.stats;
        let counters = match route {
            GpuRoute::Cached => &stats.gpu_cached,
            GpuRoute::Pinned => &stats.gpu_pinned,
            GpuRoute::Written => &stats.gpu_written,
            GpuRoute::Direct => &stats.gpu_direct,
            GpuRoute::DirectWritten => &stats.gpu_direct_written,
        };
        counters[usize::from(simulated)].count(bytes);
    }
}
