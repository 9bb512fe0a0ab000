//! One transfer that cannot be done at once: cut into pieces that several threads do side by side, and put together again.
//!
//! Pieces are cut off as threads come to do them: a transfer costs as much memory as the pieces under way, however long it is.

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

/// Bytes of a piece at most.
pub(crate) const PIECE: u64 = 4 << 20;

/// A transfer under way.
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

/// How far a transfer is.
#[derive(Default)]
struct JobProgress {
    /// Pieces that were begun, in their order.
    begun: u64,
    under_way: u64,
    /// The first piece that was not whole, and its bytes or an error number with a minus sign. No more pieces are begun.
    short: Option<(u64, i64)>,
    /// The first piece that failed.
    failed: Option<(u64, i64)>,
}

/// A part of one.
pub(crate) struct JobChunk {
    pub job: Arc<TransferJob>,
    place: u64,
    /// Where it begins in the transfer.
    pub start: u64,
    pub len: u64,
}

impl JobChunk {
    /// Where it is in the file.
    pub fn at(&self) -> u64 {
        self.job.request.at + self.start
    }

    /// Where it is in the buffer.
    pub fn offset(&self) -> usize {
        (self.job.request.offset + self.start) as usize
    }

    /// An error number with a minus sign where it is not to be done: its program has gone, or wants its memory back; or it would
    /// read a hole that the ring does not want.
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

    /// Says what became of it; the last of them ends the transfer.
    pub fn end(self, result: i64) {
        let job = &self.job;
        let mut progress = lock(&job.progress);
        let is_before = |known: Option<(u64, i64)>| known.is_none_or(|(place, _)| self.place < place);
        if result < self.len as i64 && is_before(progress.short) {
            progress.short = Some((self.place, result));
        }
        if result < 0 && is_before(progress.failed) {
            progress.failed = Some((self.place, result));
        }
        progress.under_way -= 1;
        if progress.under_way == 0 && (progress.short.is_some() || progress.begun == job.pieces()) {
            let (short, failed) = (progress.short, progress.failed);
            drop(progress);
            job.end(short, failed);
        }
    }
}

/// What is left of a transfer: pieces that were not begun.
pub(crate) struct Rest(pub Arc<TransferJob>);

impl Divisible for Rest {
    type Part = JobChunk;

    fn divide(self) -> (Option<JobChunk>, Option<Self>) {
        let Self(job) = self;
        let mut progress = lock(&job.progress);
        if progress.short.is_some() {
            return (None, None);
        }
        let place = progress.begun;
        progress.begun += 1;
        progress.under_way += 1;
        let is_last = progress.begun == job.pieces();
        drop(progress);
        let (start, rest) = (place * PIECE, (!is_last).then(|| Self(job.clone())));
        let len = PIECE.min(job.request.len - start);
        (Some(JobChunk { job, place, start, len }), rest)
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
        // What is in a ring costs its program a few bytes, and a transfer the daemon some hundred.
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

    pub fn pieces(&self) -> u64 {
        self.request.len.div_ceil(PIECE)
    }

    pub fn reads(&self) -> bool {
        self.ring.server.name().read
    }

    /// Whose it is.
    pub fn uid(&self) -> u32 {
        self.ring.owner.uid
    }

    pub fn shared(&self) -> &DaemonShared {
        &self.shared
    }

    /// Hands it to the threads that do it. A user's writes may wait for a disk, and their reads do not wait behind them.
    pub fn begin(self) {
        let (uid, job) = (self.shared.persons.of(self.ring.owner.uid), Arc::new(self));
        let shared = &job.shared;
        match &job.buffer.what {
            LinkContent::Gpu(gpu) => gpu.engine.add((uid, job.reads()), Rest(job.clone())),
            LinkContent::Host(_) | LinkContent::Ring(_) if job.reads() => {
                shared.ring_reads.add(uid, Rest(job.clone()));
            }
            LinkContent::Host(_) | LinkContent::Ring(_) => shared.ring_writes.add(uid, Rest(job.clone())),
        }
    }

    /// The bytes of all pieces up to the first that is short; an error if any piece is one.
    fn result(&self, short: Option<(u64, i64)>, failed: Option<(u64, i64)>) -> i64 {
        match (short, failed) {
            (_, Some((_, error))) => error,
            (Some((place, bytes)), None) => (place * PIECE) as i64 + bytes,
            (None, None) => self.request.len as i64,
        }
    }

    fn end(&self, short: Option<(u64, i64)>, failed: Option<(u64, i64)>) {
        let mut result = self.result(short, failed);
        if let (true, 0.., Some((place, _))) = (self.reads(), result, short) {
            // What lies behind the file's end is zeroes and nothing that was there before, up to the end of the piece. Memory
            // behind that is left alone: it may be a hole of any length, to be filled with pages at this process's cost.
            let until = ((place + 1) * PIECE).min(self.request.len);
            let (from, bytes) = (self.request.offset + result as u64, until - result as u64);
            if let Err(error) = self.zero(from as usize, bytes as usize) {
                result = failure(&error);
            }
        }
        // A hole that is not wanted is what the program asked for.
        let is_hole = self.ring.refuses_holes() && result == refused(Errno::NODATA);
        if result < 0 && !is_hole {
            self.shared.stats.failed.fetch_add(1, Ordering::Relaxed);
        }
        if !self.reads() {
            // Whatever came of it as a whole: pieces of it were written, or parts of them.
            self.shared.written(self.request.inode, self.request.at, self.request.len);
        }
        // It may have been registered with a network card since the buffer went.
        if self.buffer.is_gone() {
            self.shared.forget_registrations(&self.buffer);
        }
        // Before the program knows, which may ask for the next at once.
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

    /// By the kernel: the memory may be gone.
    fn zero_host(&self, mem: &HostMem, from: usize, bytes: usize) -> std::io::Result<()> {
        self.shared.zeroes.read_into(mem, from, bytes)?;
        self.shared.stats.zeroed[0].count(bytes as u64);
        Ok(())
    }

    /// Counts bytes that went to or from a GPU.
    pub fn count(&self, way: GpuRoute, simulated: bool, bytes: u64) {
        let stats = &self.shared.stats;
        let ways = match way {
            GpuRoute::Cached => &stats.gpu_cached,
            GpuRoute::Pinned => &stats.gpu_pinned,
            GpuRoute::Written => &stats.gpu_written,
            GpuRoute::Direct => &stats.gpu_direct,
            GpuRoute::DirectWritten => &stats.gpu_direct_written,
        };
        ways[usize::from(simulated)].count(bytes);
    }
}
