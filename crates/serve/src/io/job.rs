//! One transfer that cannot be done at once: cut into pieces that several threads do side by side, and put together again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use onehop_os::HostMem;
use onehop_usrbio::ring::{Done, Entry, Request};

use super::failure;
use super::gpu::Way;
use crate::daemon::Shared;
use crate::lock;
use crate::opens::Open;
use crate::table::{Buffer, What};
use crate::workers::Ring;

/// Bytes of a piece at most.
pub(crate) const PIECE: u64 = 4 << 20;

/// A transfer under way.
pub(crate) struct Job {
    shared: Arc<Shared>,
    ring: Arc<Ring>,
    index: i32,
    userdata: u64,
    pub request: Request,
    pub buffer: Arc<Buffer>,
    pub open: Arc<Open>,
    left: AtomicUsize,
    /// What became of each piece: bytes, or an error number with a minus sign.
    results: Mutex<Vec<i64>>,
}

/// A part of one.
pub(crate) struct Piece {
    pub job: Arc<Job>,
    place: usize,
    /// Where it begins in the transfer.
    pub start: u64,
    pub len: u64,
}

impl Piece {
    /// Where it is in the file.
    pub fn at(&self) -> u64 {
        self.job.request.at + self.start
    }

    /// Where it is in the buffer.
    pub fn offset(&self) -> usize {
        (self.job.request.offset + self.start) as usize
    }

    /// Says what became of it; whoever says so last ends the transfer.
    pub fn end(self, result: i64) {
        lock(&self.job.results)[self.place] = result;
        if self.job.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.job.end();
        }
    }
}

impl Job {
    pub fn new(
        shared: &Arc<Shared>,
        ring: &Arc<Ring>,
        entry: &Entry,
        request: &Request,
        buffer: Arc<Buffer>,
        open: Arc<Open>,
    ) -> Self {
        let pieces = request.len.div_ceil(PIECE) as usize;
        Self {
            shared: shared.clone(),
            ring: ring.clone(),
            index: entry.index,
            userdata: entry.userdata,
            request: *request,
            buffer,
            open,
            left: AtomicUsize::new(pieces),
            results: Mutex::new(vec![0; pieces]),
        }
    }

    pub fn reads(&self) -> bool {
        self.ring.server.name().read
    }

    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Hands its pieces to who does them.
    pub fn begin(job: &Arc<Self>) {
        let len = job.request.len;
        let pieces = (0..len.div_ceil(PIECE)).map(|place| {
            let start = place * PIECE;
            Piece { job: job.clone(), place: place as usize, start, len: PIECE.min(len - start) }
        });
        let uid = job.ring.owner.uid;
        match &job.buffer.what {
            What::Gpu(gpu) => gpu.engine.add(uid, pieces),
            What::Host(_) | What::Ring(_) => job.shared.pool.add(uid, pieces),
        }
    }

    /// The bytes of all pieces up to the first that is short; an error if any piece is one.
    fn result(&self) -> i64 {
        let results = lock(&self.results);
        if let Some(error) = results.iter().find(|result| **result < 0) {
            return *error;
        }
        let mut sum = 0;
        for (place, result) in results.iter().enumerate() {
            sum += result;
            let whole = PIECE.min(self.request.len - place as u64 * PIECE);
            if (*result as u64) < whole {
                break;
            }
        }
        sum
    }

    fn end(&self) {
        let mut result = self.result();
        if self.reads() && result >= 0 && (result as u64) < self.request.len {
            // What lies behind the file's end is zeroes and nothing that was there before.
            let (from, bytes) = (self.request.offset + result as u64, self.request.len - result as u64);
            if let Err(error) = self.zero(from as usize, bytes as usize) {
                result = failure(&error);
            }
        }
        if result < 0 {
            self.shared.stats.failed.fetch_add(1, Ordering::Relaxed);
        }
        if !self.reads() {
            // Whatever came of it as a whole: pieces of it were written, or parts of them.
            self.shared.written(self.request.inode, self.request.at, self.request.len);
        }
        self.ring.server.complete(&[Done { index: self.index, userdata: self.userdata, result }]);
    }

    fn zero(&self, from: usize, bytes: usize) -> std::io::Result<()> {
        match &self.buffer.what {
            What::Host(mem) => self.zero_host(mem, from, bytes),
            What::Gpu(gpu) => {
                self.shared.stats.zeroed[1].count(bytes as u64);
                gpu.region.fill(from, bytes, 0).map_err(std::io::Error::other)
            }
            What::Ring(_) => Ok(()),
        }
    }

    /// By the kernel: the memory may be gone.
    fn zero_host(&self, mem: &HostMem, from: usize, bytes: usize) -> std::io::Result<()> {
        self.shared.stats.zeroed[0].count(bytes as u64);
        self.shared.zeroes.read_into(mem, from, bytes)
    }

    /// Counts bytes that went to or from a GPU.
    pub fn count(&self, way: Way, simulated: bool, bytes: u64) {
        let stats = &self.shared.stats;
        let ways = match way {
            Way::Cached => &stats.gpu_cached,
            Way::Pinned => &stats.gpu_pinned,
            Way::Written => &stats.gpu_written,
            Way::Direct => &stats.gpu_direct,
            Way::DirectWritten => &stats.gpu_direct_written,
        };
        ways[usize::from(simulated)].count(bytes);
    }
}
