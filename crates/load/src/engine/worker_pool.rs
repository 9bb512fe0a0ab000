//! The threads of a load, and their shared state.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_gpu::{Copier, Mark, Rows};

use super::choice::LoadSource;
use super::ranks::RankCopiers;
use super::segments::{SegmentCopiers, Segments};
use super::slot_pool::{Full, SlotCopier};
use crate::error::{Error, Result};
use crate::plan::{Arenas, Chunk};

/// Time limit for threads to end after a load.
const END: Duration = Duration::from_secs(10);

/// How long a thread without memory for its chunk sleeps before it asks again.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// The chunks of a load, in the order of reading.
pub(super) type ChunkSource = Box<dyn Iterator<Item = Chunk> + Send>;

/// State shared by all threads of a load.
pub(super) struct LoadShared {
    pub(super) sources: Vec<LoadSource>,
    /// Set for a load in segments: its chunks wait for memory.
    pub(super) segments: Option<Arc<Segments>>,
    /// Chunks of such a load that were given memory, and threads that have one without.
    admitted: AtomicU64,
    without_memory: AtomicUsize,
    /// Chunks that no thread has taken yet.
    left: Mutex<ChunkSource>,
    stop: AtomicBool,
    /// Whether all threads have ended.
    pub(super) has_ended: AtomicBool,
    /// The error that ended the load, until it is reported, and its text.
    failed: Mutex<Option<Error>>,
    failure: OnceLock<String>,
    pub(super) cached_bytes: AtomicU64,
    pub(super) through_bytes: AtomicU64,
    pub(super) direct_bytes: AtomicU64,
    pub(super) cufile_bytes: AtomicU64,
    pub(super) remote_bytes: AtomicU64,
    pub(super) retries: AtomicU64,
    /// Threads that have read past the page cache.
    pub(super) disk_threads: AtomicUsize,
    /// Why some threads use no io_uring, or could not register memory with it.
    pub(super) why_calls: OnceLock<String>,
    pub(super) why_unregistered: OnceLock<String>,
    /// Why the page cache could not be queried.
    pub(super) why_unknown: OnceLock<String>,
}

impl LoadShared {
    pub(super) fn new(sources: Vec<LoadSource>, left: ChunkSource) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            sources,
            segments: None,
            admitted: zero(),
            without_memory: AtomicUsize::new(0),
            left: Mutex::new(left),
            stop: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            failed: Mutex::new(None),
            failure: OnceLock::new(),
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

    /// The next chunk for a thread; `None` if the load is over or cancelled.
    pub(super) fn next(&self) -> Option<Chunk> {
        if self.is_stopped() {
            return None;
        }
        self.left.lock().unwrap_or_else(PoisonError::into_inner).next()
    }

    /// Whether there is memory for a chunk. It is called until there is, and not again.
    pub(super) fn admits(&self, chunk: &Chunk) -> Result<bool> {
        let Some(segments) = &self.segments else { return Ok(true) };
        let is_admitted = segments.admit(chunk)?;
        if is_admitted {
            self.admitted.fetch_add(1, Ordering::AcqRel);
        }
        Ok(is_admitted)
    }

    pub(super) fn without_memory(&self) -> usize {
        self.without_memory.load(Ordering::Acquire)
    }

    /// Whether all chunks with memory have arrived, of which the caller has received this many, and others wait for memory.
    pub(super) fn lacks_only_memory(&self, received: u64) -> bool {
        self.without_memory() > 0 && self.admitted.load(Ordering::Acquire) == received
    }

    /// Waits until there is memory for a chunk. Meanwhile `attend` polls the copies, because the caller may have to use their
    /// bytes before there is memory. False if the load was cancelled.
    pub(super) fn wait_for_memory(&self, chunk: &Chunk, attend: impl Fn() -> Result<()>) -> Result<bool> {
        if self.admits(chunk)? {
            return Ok(true);
        }
        self.without_memory.fetch_add(1, Ordering::AcqRel);
        let answer = self.poll_memory(chunk, attend);
        self.without_memory.fetch_sub(1, Ordering::AcqRel);
        answer
    }

    fn poll_memory(&self, chunk: &Chunk, attend: impl Fn() -> Result<()>) -> Result<bool> {
        while !self.is_stopped() {
            attend()?;
            std::thread::sleep(MEMORY_POLL_INTERVAL);
            if self.admits(chunk)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Bytes that have been read.
    pub(super) fn read_bytes(&self) -> u64 {
        let by = [&self.cached_bytes, &self.through_bytes, &self.direct_bytes, &self.remote_bytes];
        by.iter().map(|bytes| bytes.load(Ordering::Acquire)).sum()
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends the load with this error, unless it has already failed.
    pub(super) fn fail(&self, error: Error) {
        let _ = self.failure.set(error.to_string());
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.stop();
    }

    /// Ends the load with this text for others, unless it has already failed.
    pub(super) fn give_up(&self, why: &str) {
        let _ = self.failure.set(why.to_owned());
        self.stop();
    }

    /// The text of the error that ended the load.
    pub(super) fn failure(&self) -> Option<String> {
        self.failure.get().cloned()
    }

    /// Why the load ended early. The error itself is returned once.
    pub(super) fn why(&self) -> Error {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or(Error::Cancelled)
    }
}

/// The bytes that were read into a slot.
pub(super) struct LoadPart {
    pub(super) chunk: Chunk,
    /// The chunk that is complete once this is copied: its other parts went before.
    pub(super) arrived: Option<Chunk>,
}

/// The copies out of a part of the ring to each GPU.
pub(super) struct LoadLane {
    /// Slot size of that part.
    pub(super) slot: usize,
    pub(super) copiers: Copiers,
    /// Assigns copies to arenas, one for each copier.
    pub(super) arenas: Arenas,
    /// Receivers of chunks, each with the index of its arena.
    pub(super) arrived: Vec<(usize, Sender<Chunk>)>,
    /// Receiver of all chunks instead, if other processes may need some of their bytes.
    pub(super) passes: Option<Sender<Chunk>>,
}

/// The copiers.
pub(super) enum Copiers {
    /// To the arena of each GPU.
    Arenas(Vec<Box<dyn Copier>>),
    /// To the segments of one GPU.
    Segments(SegmentCopiers),
    /// To the arenas of several processes.
    Ranks(RankCopiers),
}

impl Copiers {
    fn get(&mut self, index: usize) -> Option<&mut Box<dyn Copier>> {
        match self {
            Self::Arenas(copiers) => copiers.get_mut(index),
            Self::Segments(segments) => segments.get(index),
            Self::Ranks(ranks) => ranks.get(index),
        }
    }
}

/// The end of some copies, with the index of their copier.
pub(super) type Marks = Vec<(usize, Mark)>;

impl SlotCopier for LoadLane {
    type Part = LoadPart;
    type End = Marks;

    fn slot_bytes(&self) -> usize {
        self.slot
    }

    fn copy(&mut self, full: &[Full<LoadPart>]) -> Result<Marks> {
        let count = match &mut self.copiers {
            Copiers::Arenas(copiers) => copiers.len(),
            Copiers::Ranks(ranks) => ranks.len(),
            Copiers::Segments(segments) => {
                return segments.copy(self.slot, full.iter().map(|full| (full.slot, &full.part.chunk)));
            }
        };
        let mut rows: Vec<Vec<Rows>> = vec![Vec::new(); count];
        for full in full {
            let start = full.slot * self.slot;
            for copy in &full.part.chunk.copies {
                let (arena, to) = self.arenas.place(copy);
                rows.get_mut(arena).ok_or(Error::Incomplete)?.push(Rows {
                    from: start + copy.slot as usize,
                    to: to as usize,
                    row: copy.row as usize,
                    rows: copy.rows as usize,
                    step: copy.step as usize,
                });
            }
        }
        let mut marks = Vec::with_capacity(count);
        for (arena, rows) in rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let copier = match &mut self.copiers {
                Copiers::Ranks(ranks) => ranks.copier(arena)?,
                copiers => copiers.get(arena),
            };
            if let Some(copier) = copier {
                copier.copy_all(rows)?;
                marks.push((arena, copier.mark()?));
            }
        }
        Ok(marks)
    }

    fn is_over(&mut self, marks: &mut Marks) -> Result<bool> {
        for (index, mark) in marks {
            if let Some(copier) = self.copiers.get(*index)
                && !copier.is_over(*mark)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reports arrived chunks. A receiver may be gone: then the load was cancelled, and the flag is set.
    fn report(&self, part: LoadPart) {
        let Some(chunk) = part.arrived else { return };
        if let Some(passes) = &self.passes {
            let _ = passes.send(chunk);
            return;
        }
        for (arena, arrived) in &self.arrived {
            if let Some(share) = self.arenas.share(*arena, &chunk) {
                let _ = arrived.send(share);
            }
        }
    }
}

/// The threads. Dropping it ends them.
pub(super) struct WorkerPool {
    pub(super) shared: Arc<LoadShared>,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerPool {
    pub(super) fn new(shared: LoadShared) -> Self {
        Self { shared: Arc::new(shared), threads: Vec::new() }
    }

    /// Starts a thread. Its failure ends the load.
    pub(super) fn spawn(
        &mut self,
        name: &str,
        work: impl Fn(&LoadShared) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let shared = self.shared.clone();
        // Its resources are dropped after the error was reported: that may take as long as an unresponsive GPU.
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
    /// Waits for the threads for a limited time. A thread that never gets a response keeps its memory.
    fn drop(&mut self) {
        self.shared.stop();
        let start = Instant::now();
        let mut have_ended = true;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && start.elapsed() < END {
                std::thread::sleep(Duration::from_micros(200));
            }
            have_ended &= thread.is_finished();
            if thread.is_finished() {
                // A panicked thread reports nothing; the missing chunks show it.
                let _ = thread.join();
            }
        }
        self.shared.has_ended.store(have_ended, Ordering::Release);
    }
}
