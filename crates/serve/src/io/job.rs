//! Transfers that cannot be done at once. Long ones are divided into chunks, which several threads transfer in parallel;
//! of short ones a thread takes several.
//!
//! Chunks are created when a thread is ready for them, so the memory that a transfer takes does not depend on its
//! length.

use std::collections::VecDeque;
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

/// A thread takes short transfers together up to this many bytes, and this many transfers: waking another thread takes
/// longer than moving them.
const BUNDLE: (u64, usize) = (256 << 10, 64);

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

    /// Records the result. The last chunk ends the transfer, which is then to be [completed](complete).
    pub fn end(self, result: i64) -> Option<EndedTransfer> {
        let mut progress = lock(&self.job.progress);
        let is_before = |known: Option<(u64, i64)>| known.is_none_or(|(number, _)| self.number < number);
        if result < self.len as i64 && is_before(progress.short) {
            progress.short = Some((self.number, result));
        }
        if result < 0 && is_before(progress.failed) {
            progress.failed = Some((self.number, result));
        }
        progress.in_flight -= 1;
        let is_over =
            progress.in_flight == 0 && (progress.short.is_some() || progress.begun == self.job.chunks());
        let (short, failed) = (progress.short, progress.failed);
        drop(progress);
        is_over.then(|| {
            let result = self.job.end(short, failed);
            EndedTransfer { job: self.job, result }
        })
    }
}

/// Chunks that one thread transfers: one of a long transfer, or several short transfers between one file and one buffer.
pub(crate) struct ChunkBundle(pub Vec<JobChunk>);

impl ChunkBundle {
    /// Transfers each chunk by `transfer`, and completes the transfers that end with them.
    pub fn end_each(self, transfer: impl Fn(&JobChunk) -> i64) {
        let ended = self.0.into_iter().filter_map(|chunk| {
            let result = transfer(&chunk);
            chunk.end(result)
        });
        complete(ended.collect());
    }
}

/// Transfers of one ring that are not over, in their order, which one thread does together; or one long one.
pub(crate) struct QueuedTransfers {
    jobs: VecDeque<Arc<TransferJob>>,
    /// Chunks of a bundle that may wait for a disk, and so get a thread each.
    slow: Vec<JobChunk>,
}

impl QueuedTransfers {
    /// Gives each chunk, of transfers of one ring, to a thread of its own.
    pub fn one_by_one(mut slow: Vec<JobChunk>) -> Self {
        slow.reverse();
        Self { jobs: VecDeque::new(), slow }
    }
}

impl Divisible for QueuedTransfers {
    type Part = ChunkBundle;

    fn divide(self) -> (Option<ChunkBundle>, Option<Self>) {
        let Self { mut jobs, mut slow } = self;
        if let Some(chunk) = slow.pop() {
            let has_rest = !jobs.is_empty() || !slow.is_empty();
            return (Some(ChunkBundle(vec![chunk])), has_rest.then_some(Self { jobs, slow }));
        }
        let (mut chunks, mut bytes): (Vec<JobChunk>, u64) = (Vec::new(), 0);
        while let Some(job) = jobs.front() {
            if chunks.first().is_some_and(|first| !job.joins(&first.job, bytes, chunks.len())) {
                break;
            }
            let (chunk, is_last) = TransferJob::divide(job);
            bytes += chunk.as_ref().map_or(0, |chunk| chunk.len);
            chunks.extend(chunk);
            if is_last {
                jobs.pop_front();
            }
        }
        let has_rest = !jobs.is_empty();
        ((!chunks.is_empty()).then_some(ChunkBundle(chunks)), has_rest.then_some(Self { jobs, slow }))
    }
}

/// A transfer whose last chunk has ended.
pub(crate) struct EndedTransfer {
    job: Arc<TransferJob>,
    result: i64,
}

/// Completes transfers of one ring: the kernel learns of written ranges, and the program of the results.
pub(crate) fn complete(ended: Vec<EndedTransfer>) {
    let Some(first) = ended.first().map(|one| one.job.clone()) else { return };
    let shared = &first.shared;
    if !first.reads() {
        // Even after an error: some chunks, or parts of them, were written.
        let requests = ended.iter().map(|one| &one.job.request);
        shared.written(requests.map(|request| (request.inode, request.at, request.len)));
    }
    for EndedTransfer { job, .. } in &ended {
        // A network card may have registered the memory again after the buffer was removed.
        if job.buffer.is_gone() {
            shared.forget_registrations(&job.buffer);
        }
    }
    // Before the completions: the program may submit the next requests at once.
    shared.jobs.put_back(first.ring.owner.uid, ended.len() as u64);
    let done: Vec<_> = ended
        .iter()
        .map(|EndedTransfer { job, result }| Done {
            index: job.index,
            userdata: job.userdata,
            result: *result,
        })
        .collect();
    first.ring.server.complete(&done);
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

    /// Queues transfers of one ring, those that one thread does together as one: each wakes a thread. A user's reads do not
    /// wait behind their writes, which may wait for a disk.
    pub fn begin_all(jobs: impl IntoIterator<Item = Self>) {
        let mut jobs = jobs.into_iter().map(Arc::new).peekable();
        while let Some(first) = jobs.next() {
            let (mut together, mut bytes) = (VecDeque::from([first.clone()]), first.request.len);
            while let Some(job) = jobs.next_if(|job| job.joins(&first, bytes, together.len())) {
                bytes += job.request.len;
                together.push_back(job);
            }
            let (shared, work) = (&first.shared, QueuedTransfers { jobs: together, slow: Vec::new() });
            let (person, reads) = first.lane_user();
            match &first.buffer.what {
                LinkContent::Gpu(gpu) => gpu.engine.add((person, reads), work),
                LinkContent::Host(_) | LinkContent::Ring(_) if reads => shared.ring_reads.add(person, work),
                LinkContent::Host(_) | LinkContent::Ring(_) => shared.ring_writes.add(person, work),
            }
        }
    }

    /// Whether this transfer fits into a bundle with `count` others of `bytes` bytes, of which `first` is one.
    fn joins(&self, first: &Self, bytes: u64, count: usize) -> bool {
        bytes + self.request.len <= BUNDLE.0 && count < BUNDLE.1 && self.is_bundled_with(first)
    }

    /// Whether one thread may do both one after the other: they are of the same file and buffer, and neither waits for
    /// another machine or writes to a disk.
    fn is_bundled_with(&self, other: &Self) -> bool {
        let waits = self.open.syncs() || self.open.file().local().is_none();
        !waits && Arc::ptr_eq(&self.open, &other.open) && Arc::ptr_eq(&self.buffer, &other.buffer)
    }

    /// The person, and whether it reads: who has turns on a GPU's lanes.
    pub fn lane_user(&self) -> (u32, bool) {
        (self.shared.persons.of(self.uid()), self.reads())
    }

    /// Starts the next chunk; none once one was short. Also returns whether it is the last.
    fn divide(job: &Arc<Self>) -> (Option<JobChunk>, bool) {
        let mut progress = lock(&job.progress);
        if progress.short.is_some() {
            return (None, true);
        }
        let number = progress.begun;
        progress.begun += 1;
        progress.in_flight += 1;
        let is_last = progress.begun == job.chunks();
        drop(progress);
        let start = number * CHUNK_BYTES;
        let len = CHUNK_BYTES.min(job.request.len - start);
        (Some(JobChunk { job: job.clone(), number, start, len }), is_last)
    }

    /// The bytes up to the first short chunk. A read is an error if any chunk failed: a program takes a short one for the
    /// end of the file. A write is one if it wrote nothing before.
    fn result(&self, short: Option<(u64, i64)>, failed: Option<(u64, i64)>) -> i64 {
        match (short, failed) {
            (Some((number, bytes)), _) if !self.reads() && (number > 0 || bytes > 0) => {
                (number * CHUNK_BYTES) as i64 + bytes.max(0)
            }
            (_, Some((_, error))) => error,
            (Some((number, bytes)), None) => (number * CHUNK_BYTES) as i64 + bytes,
            (None, None) => self.request.len as i64,
        }
    }

    /// Finishes the memory behind a short read. Returns the result.
    fn end(&self, short: Option<(u64, i64)>, failed: Option<(u64, i64)>) -> i64 {
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
        result
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
