//! The threads of a load, and what they have in common.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_gpu::{Copier, Mark, Rows};

use super::choice::Opened;
use super::segments::{SegmentCopiers, Segments};
use crate::error::{Error, Result};
use crate::plan::{Chunk, Chunks};

/// How long the threads of a load that is over may take to end.
const END: Duration = Duration::from_secs(10);

/// How long a thread without memory for its chunk sleeps before it asks again.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A chunk, and the GPUs that get it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) chunk: Chunk,
    pub(super) gpus: Range<usize>,
}

/// The chunks of all plans, made as they are asked for: one plan's after the other's in turn, so that the GPUs fill up side
/// by side.
pub(super) struct RoundRobin {
    /// Each with the GPUs that get its chunks.
    lists: Vec<(Chunks, Range<usize>)>,
    next: usize,
}

impl RoundRobin {
    pub(super) fn new(lists: Vec<(Chunks, Range<usize>)>) -> Self {
        Self { lists, next: 0 }
    }
}

impl Iterator for RoundRobin {
    type Item = Job;

    fn next(&mut self) -> Option<Job> {
        for _ in 0..self.lists.len() {
            let turn = self.next % self.lists.len();
            self.next = turn + 1;
            let (chunks, gpus) = self.lists.get_mut(turn)?;
            if let Some(chunk) = chunks.next() {
                return Some(Job { chunk, gpus: gpus.clone() });
            }
        }
        None
    }
}

/// What all threads of a load have in common.
pub(super) struct Shared {
    pub(super) sources: Vec<Opened>,
    /// Where there are such, chunks wait for the memory of theirs.
    pub(super) segments: Option<Arc<Segments>>,
    /// What no thread has taken yet.
    left: Mutex<RoundRobin>,
    stop: AtomicBool,
    /// What ended it, until somebody is told.
    failed: Mutex<Option<Error>>,
    pub(super) cached_bytes: AtomicU64,
    pub(super) through_bytes: AtomicU64,
    pub(super) direct_bytes: AtomicU64,
    pub(super) cufile_bytes: AtomicU64,
    pub(super) remote_bytes: AtomicU64,
    pub(super) retries: AtomicU64,
    /// Threads that have read past the page cache.
    pub(super) disk_threads: AtomicUsize,
    /// What the kernel said to those that have no io_uring, or no memory registered with it.
    pub(super) why_calls: OnceLock<String>,
    pub(super) why_unregistered: OnceLock<String>,
    /// What it said when it was asked what the page cache has.
    pub(super) why_unknown: OnceLock<String>,
}

impl Shared {
    pub(super) fn new(sources: Vec<Opened>, left: RoundRobin) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            sources,
            segments: None,
            left: Mutex::new(left),
            stop: AtomicBool::new(false),
            failed: Mutex::new(None),
            cached_bytes: zero(),
            through_bytes: zero(),
            direct_bytes: zero(),
            cufile_bytes: zero(),
            remote_bytes: zero(),
            retries: zero(),
            disk_threads: AtomicUsize::new(0),
            why_calls: OnceLock::new(),
            why_unregistered: OnceLock::new(),
            why_unknown: OnceLock::new(),
        }
    }

    /// The next chunk for a thread; none when the load is over or given up.
    pub(super) fn next(&self) -> Option<Job> {
        if self.is_stopped() {
            return None;
        }
        self.left.lock().unwrap_or_else(PoisonError::into_inner).next()
    }

    /// Whether there is memory for a chunk.
    pub(super) fn admits(&self, chunk: &Chunk) -> Result<bool> {
        self.segments.as_ref().map_or(Ok(true), |segments| segments.admit(chunk))
    }

    /// Waits until there is memory for a chunk, and has `attend` look after the copies meanwhile: what they bring may have to
    /// be used before there is. False when the load was given up.
    pub(super) fn wait_for_memory(&self, chunk: &Chunk, attend: impl Fn() -> Result<()>) -> Result<bool> {
        while !self.is_stopped() {
            if self.admits(chunk)? {
                return Ok(true);
            }
            attend()?;
            std::thread::sleep(MEMORY_POLL_INTERVAL);
        }
        Ok(false)
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends it for this reason, unless there was one before.
    fn fail(&self, error: Error) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.stop();
    }

    /// Why it is over before its end. The reason itself is given once.
    pub(super) fn why(&self) -> Error {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or(Error::Cancelled)
    }
}

/// The copies out of a part of the ring to each GPU.
pub(super) struct Lane {
    /// Bytes of a slot of that part.
    pub(super) slot: usize,
    pub(super) copiers: Copiers,
    pub(super) arrived: Vec<Sender<Chunk>>,
}

/// What copies.
pub(super) enum Copiers {
    /// To the arena of each GPU.
    Arenas(Vec<Box<dyn Copier>>),
    /// To the segments of one.
    Segments(SegmentCopiers),
}

/// Where copies end, by the place of their copier.
pub(super) type Marks = Vec<(usize, Mark)>;

impl Lane {
    /// Begins to copy what was read into these slots.
    pub(super) fn copy<'a>(&mut self, full: impl Iterator<Item = (usize, &'a Job)> + Clone) -> Result<Marks> {
        let copiers = match &mut self.copiers {
            Copiers::Arenas(copiers) => copiers,
            Copiers::Segments(segments) => return segments.copy(self.slot, full),
        };
        if full.clone().any(|(_, job)| job.gpus.end > copiers.len()) {
            return Err(Error::Incomplete);
        }
        let mut marks = Vec::with_capacity(copiers.len());
        for (gpu, copier) in copiers.iter_mut().enumerate() {
            let wanted = full.clone().filter(|(_, job)| job.gpus.contains(&gpu));
            let rows = wanted.flat_map(|(slot, job)| {
                let start = slot * self.slot;
                job.chunk.copies.iter().map(move |copy| Rows {
                    from: start + copy.slot as usize,
                    to: copy.to as usize,
                    row: copy.row as usize,
                    rows: copy.rows as usize,
                    step: copy.step as usize,
                })
            });
            let rows: Vec<Rows> = rows.collect();
            if !rows.is_empty() {
                copier.copy_all(&rows)?;
                marks.push((gpu, copier.mark()?));
            }
        }
        Ok(marks)
    }

    /// Whether the slots may be filled again.
    pub(super) fn is_over(&mut self, marks: &Marks) -> Result<bool> {
        for (index, mark) in marks {
            let copier = match &mut self.copiers {
                Copiers::Arenas(copiers) => copiers.get_mut(*index),
                Copiers::Segments(segments) => segments.get(*index),
            };
            if let Some(copier) = copier
                && !copier.is_over(*mark)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whoever waited may have gone: then the load was given up, and they have set the flag.
    pub(super) fn tell(&self, chunk: &Chunk, gpus: Range<usize>) {
        for arrived in self.arrived.get(gpus).into_iter().flatten() {
            let _ = arrived.send(chunk.clone());
        }
    }
}

/// The threads. Dropping it ends them.
pub(super) struct WorkerPool {
    pub(super) shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerPool {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared: Arc::new(shared), threads: Vec::new() }
    }

    /// Starts one. What goes wrong with it ends all.
    pub(super) fn spawn(
        &mut self,
        name: &str,
        work: impl Fn(&Shared) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let shared = self.shared.clone();
        // What it works with goes after it was told what went wrong: that may take as long as a GPU that does not answer.
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            if let Err(error) = work(&shared) {
                shared.fail(error);
            }
        });
        self.threads.push(thread.map_err(Error::Thread)?);
        Ok(())
    }
}

impl Drop for WorkerPool {
    /// Waits for the threads for a while: one that the disk or the GPU never answers is left alone with the memory that
    /// it holds.
    fn drop(&mut self) {
        self.shared.stop();
        let start = Instant::now();
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && start.elapsed() < END {
                std::thread::sleep(Duration::from_micros(200));
            }
            if thread.is_finished() {
                // One that panicked has not told what it did not do: the account of the chunks shows that.
                let _ = thread.join();
            }
        }
    }
}
