//! Threads that read past the page cache: each reads one part of a chunk after another into shared slots. A slot is
//! copied to the GPU during the next read.
//!
//! Slots are small, because the data written by a disk, or by a hypervisor's thread, should stay in the CPU's caches
//! until the GPU has fetched it. Several threads start their reads sooner than one thread that also polls all of them.
//! Some virtual disks complete all reads at once when they run idle, and then wait for the next one: so there are a few
//! more slots than threads, and each reader starts its next read before it waits for its copy. docs/benchmarks.md has
//! measurements.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onehop_os::{Finished, HostMem, Reads};

use super::choice::{Direct, LoadSource};
use super::narrow::pack;
use super::slot_pool::{Full, SlotPool};
use super::worker_pool::{LoadPart, LoadShared};
use crate::error::{Error, Result};
use crate::plan::{Chunk, Read};

/// Default number of threads.
pub(super) const THREADS: usize = 16;
/// Largest slot, and so the largest read: about what drives take in one command.
pub(super) const SLOT: usize = 512 << 10;
/// One in this many threads has a second slot, so that reads can start before any copy.
const SPARE: usize = 8;
/// Most reads in flight per thread: some chunks consist of scattered parts.
const UNDER_WAY: usize = 8;
/// Most queued entries: some MiB of memory, and chunks of many GiB if they are contiguous.
const MOST_ENTRIES: usize = 1 << 18;
/// Interval between checks for cancellation.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between checks of all copies while waiting for a chunk.
const COPY_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Number of slots for this many threads.
pub(super) fn slots(threads: usize) -> usize {
    threads + threads.div_ceil(SPARE)
}

/// The source of chunks.
#[derive(Clone)]
pub(super) enum JobSource {
    /// These threads read all chunks.
    All,
    /// Chunks that other threads did not find in the page cache, and the number of queued entries.
    UncachedQueue(Arc<Mutex<Receiver<Chunk>>>, Arc<AtomicUsize>),
}

/// The queue of chunks that were not in the page cache.
#[derive(Clone)]
pub(super) struct UncachedQueue {
    jobs: Sender<Chunk>,
    entries: Arc<AtomicUsize>,
}

impl UncachedQueue {
    pub(super) fn new() -> (Self, JobSource) {
        let ((jobs, taken), entries) = (channel(), Arc::default());
        let source = JobSource::UncachedQueue(Arc::new(Mutex::new(taken)), Arc::clone(&entries));
        (Self { jobs, entries }, source)
    }

    /// Whether the queue has reached its memory limit.
    pub(super) fn is_full(&self) -> bool {
        self.entries.load(Ordering::Relaxed) > MOST_ENTRIES
    }

    /// Queues a chunk; false if no thread receives it any more.
    pub(super) fn send(&self, chunk: Chunk) -> bool {
        self.entries.fetch_add(entries(&chunk), Ordering::Relaxed);
        self.jobs.send(chunk).is_ok()
    }
}

/// The memory that a queued chunk takes, in entries (reads and copies) of some ten bytes each.
fn entries(chunk: &Chunk) -> usize {
    const ITSELF: usize = 4;
    ITSELF + chunk.reads.len() + chunk.copies.len()
}

/// One of the threads.
pub(super) struct ReaderThread {
    /// The slots, and their allocator.
    pub(super) ring: HostMem,
    pub(super) slot_bytes: usize,
    pub(super) slots: Arc<SlotPool>,
    /// The allocators of all these threads.
    pub(super) all: Arc<[Arc<SlotPool>]>,
    pub(super) source: JobSource,
}

impl ReaderThread {
    pub(super) fn run(&self, shared: &LoadShared) -> Result<()> {
        let mut full = None;
        // io_uring is set up on demand: many loads find everything in the page cache.
        let Some(mut chunk) = self.next(&mut full, shared)? else { return Ok(()) };
        shared.disk_threads.fetch_add(1, Ordering::Relaxed);
        let mut disk = Disk { shared, by: By::new(self.ring.clone(), shared) };
        while self.read(&chunk, &mut disk, &mut full)? {
            match self.next(&mut full, shared)? {
                Some(next) => chunk = next,
                None => break,
            }
        }
        self.hand_in(&mut full)?;
        self.slots.finish(|| shared.is_stopped())
    }

    /// Reads a chunk part by part; not to its end if the load was cancelled. The last part is in `full` then.
    fn read(&self, chunk: &Chunk, disk: &mut Disk<'_>, full: &mut Option<Full<LoadPart>>) -> Result<bool> {
        let mut parts = chunk.parts(self.slot_bytes as u64).peekable();
        while let Some(mut part) = parts.next() {
            let Some(slot) = self.slot(full, disk.shared)? else { return Ok(false) };
            let mut waiting = disk.begin(&part, slot * self.slot_bytes)?;
            self.hand_in(full)?;
            if !disk.end(&part, &mut waiting)? {
                return Ok(false);
            }
            pack(&self.ring, slot * self.slot_bytes, &mut part)?;
            let arrived = parts.peek().is_none().then(|| chunk.clone());
            *full = Some(Full { slot, filler: 0, part: LoadPart { chunk: part, arrived } });
        }
        Ok(true)
    }

    /// The next chunk; none if there are no more, or the load was cancelled.
    fn next(&self, full: &mut Option<Full<LoadPart>>, shared: &LoadShared) -> Result<Option<Chunk>> {
        let (found, waiting) = match &self.source {
            JobSource::All => return self.next_of_all(full, shared),
            JobSource::UncachedQueue(found, waiting) => (found, waiting),
        };
        let taken = |chunk: Chunk| {
            waiting.fetch_sub(entries(&chunk), Ordering::Relaxed);
            Ok(Some(chunk))
        };
        if let Ok(found) = found.try_lock()
            && let Ok(chunk) = found.try_recv()
        {
            return taken(chunk);
        }
        // It is unknown when or whether more chunks come.
        self.hand_in(full)?;
        // Holding the lock while waiting only blocks threads that would wait as well. They cannot poll their copies: this thread
        // polls those of all. The caller may need what they complete before it frees memory for the next chunk.
        let found = found.lock().unwrap_or_else(PoisonError::into_inner);
        while !shared.is_stopped() {
            match found.recv_timeout(COPY_POLL_INTERVAL) {
                Ok(chunk) => return taken(chunk),
                Err(RecvTimeoutError::Timeout) => self.all.iter().try_for_each(|slots| slots.try_attend())?,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(None)
    }

    /// The next chunk, once there is memory for it. The part that was read last is handed in before the wait.
    fn next_of_all(&self, full: &mut Option<Full<LoadPart>>, shared: &LoadShared) -> Result<Option<Chunk>> {
        let Some(chunk) = shared.next() else { return Ok(None) };
        if !shared.admits(&chunk)? {
            self.hand_in(full)?;
            if !shared.wait_for_memory(&chunk, || self.slots.try_attend())? {
                return Ok(None);
            }
        }
        Ok(Some(chunk))
    }

    /// A slot for the next read; none if the load was cancelled. If all are taken, the part that was read last is handed in
    /// before the wait for one.
    fn slot(&self, full: &mut Option<Full<LoadPart>>, shared: &LoadShared) -> Result<Option<usize>> {
        if let Some(slot) = self.slots.free(0)? {
            return Ok(Some(slot));
        }
        self.hand_in(full)?;
        self.slots.slot(0, || shared.is_stopped())
    }

    fn hand_in(&self, full: &mut Option<Full<LoadPart>>) -> Result<()> {
        full.take().map_or(Ok(()), |full| self.slots.hand_in(full))
    }
}

struct Disk<'a> {
    shared: &'a LoadShared,
    by: By,
}

/// How a slot is filled.
enum By {
    /// As many concurrent reads as there is room for.
    Ring(Box<ReadRing>),
    /// Sequential reads: without io_uring, as in many containers.
    Calls(HostMem),
}

struct ReadRing {
    reads: Reads,
    /// Reads in flight, by identifier.
    under_way: [Option<Read>; UNDER_WAY],
}

impl By {
    fn new(slots: HostMem, shared: &LoadShared) -> Self {
        match Reads::new(slots.clone(), UNDER_WAY as u32) {
            Ok(reads) => {
                if let Some(why) = reads.why_unregistered() {
                    shared.why_unregistered.get_or_init(|| why.to_string());
                }
                Self::Ring(Box::new(ReadRing { reads, under_way: [None; UNDER_WAY] }))
            }
            Err(why) => {
                shared.why_calls.get_or_init(|| why.to_string());
                Self::Calls(slots)
            }
        }
    }

    /// Starts as many waiting reads as possible.
    fn begin(&mut self, file: &Arc<File>, waiting: &mut VecDeque<Read>) -> Result<()> {
        let Self::Ring(ring) = self else { return Ok(()) };
        let ReadRing { reads, under_way } = &mut **ring;
        for (name, room) in under_way.iter_mut().enumerate().filter(|(_, room)| room.is_none()) {
            let Some(read) = waiting.pop_front() else { break };
            let (to, bytes) = (read.slot as usize, read.bytes as usize);
            let begun = reads.begin(name as u64, file, read.offset, to, bytes);
            begun.map_err(onehop_gpu::Error::from)?;
            *room = Some(read);
        }
        Ok(reads.submit().map_err(onehop_gpu::Error::from)?)
    }

    /// Completed reads; empty if the poll interval is over, or none is in flight.
    fn ended(&mut self, file: &File, waiting: &mut VecDeque<Read>) -> Result<Vec<(Read, io::Result<usize>)>> {
        let ReadRing { reads, under_way } = match self {
            Self::Ring(ring) => &mut **ring,
            Self::Calls(slots) => {
                let by_call = |read: Read| {
                    (read, slots.read_some(read.slot as usize, read.bytes as usize, file, read.offset))
                };
                return Ok(waiting.pop_front().map(by_call).into_iter().collect());
            }
        };
        reads.wait(CANCEL_POLL_INTERVAL).map_err(onehop_gpu::Error::from)?;
        let mut ended = Vec::new();
        while let Some(Finished { name, result }) = reads.ended() {
            let read = under_way.get_mut(name as usize).and_then(Option::take);
            ended.extend(read.map(|read| (read, result)));
        }
        Ok(ended)
    }

    /// Whether no read is in flight.
    fn is_idle(&self) -> bool {
        match self {
            Self::Ring(ring) => ring.reads.under_way() == 0,
            Self::Calls(_) => true,
        }
    }
}

impl Disk<'_> {
    fn source(&self, part: &Chunk) -> Result<(&LoadSource, &Direct)> {
        let source = self.shared.sources.get(part.file).ok_or(Error::Incomplete)?;
        Ok((source, source.direct.as_ref().ok_or(Error::Incomplete)?))
    }

    /// Starts to read a part to this place in the slots. Returns the reads that could not be started yet.
    fn begin(&mut self, part: &Chunk, to: usize) -> Result<VecDeque<Read>> {
        let valid = part.reads.iter().filter(|read| read.valid > 0);
        let mut waiting = valid.map(|read| Read { slot: to as u64 + read.slot, ..*read }).collect();
        let file = self.source(part)?.1.file.clone();
        self.by.begin(&file, &mut waiting)?;
        Ok(waiting)
    }

    /// Waits until all of it has been read; false if the load was cancelled.
    fn end(&mut self, part: &Chunk, waiting: &mut VecDeque<Read>) -> Result<bool> {
        let file = self.source(part)?.1.file.clone();
        while !self.shared.is_stopped() {
            if waiting.is_empty() && self.by.is_idle() {
                return Ok(true);
            }
            for (read, result) in self.by.ended(&file, waiting)? {
                let (source, Direct { block, .. }) = self.source(part)?;
                waiting.extend(self.left(source, *block, read, result)?);
            }
            self.by.begin(&file, waiting)?;
        }
        Ok(false)
    }

    /// The rest of a completed read, which must be read again.
    fn left(
        &self,
        source: &LoadSource,
        block: u64,
        read: Read,
        result: io::Result<usize>,
    ) -> Result<Option<Read>> {
        let got = match result {
            Ok(got) => read.valid.min(got as u64),
            Err(e) if e.kind() == ErrorKind::Interrupted => return Ok(Some(read)),
            Err(e) => {
                return Err(Error::Read {
                    file: source.name.clone(),
                    offset: read.offset,
                    bytes: read.valid,
                    source: e,
                });
            }
        };
        // The rest is read from the start of a block. Less than a block means the end of the file.
        let whole = if got < read.valid { got / block * block } else { got };
        if whole == 0 {
            return Err(Error::Ended {
                file: source.name.clone(),
                offset: read.offset,
                bytes: read.valid,
                length: source.bytes,
            });
        }
        self.shared.direct_bytes.fetch_add(whole, Ordering::Relaxed);
        Ok((whole < read.valid).then(|| Read {
            slot: read.slot + whole,
            offset: read.offset + whole,
            bytes: read.bytes - whole,
            valid: read.valid - whole,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    #[test]
    fn the_queue_for_the_disk_is_bounded() {
        let (found, source) = UncachedQueue::new();
        let read = Read { offset: 0, bytes: 4096, valid: 4096, slot: 0 };
        let reads = vec![read; MOST_ENTRIES / 4];
        let chunk = || Chunk {
            index: 0,
            file: 0,
            reads: reads.clone(),
            copies: Vec::new(),
            passes: Vec::new(),
            direct: None,
        };
        let mut sent = 0;
        while !found.is_full() {
            assert!(found.send(chunk()));
            sent += 1;
        }
        assert_eq!(sent, 4);
        let slots = Arc::new(SlotPool::new(1, 1));
        let all = Arc::new([slots.clone()]);
        let reader =
            ReaderThread { ring: HostMem::touched(4096).unwrap(), slot_bytes: 4096, slots, all, source };
        let shared = {
            let none = Plan::chunks_of_all(&[], 4096).unwrap();
            LoadShared::new(Vec::new(), Box::new(none))
        };
        for _ in 0..sent {
            assert!(reader.next(&mut None, &shared).unwrap().is_some());
            assert!(!found.is_full());
        }
        drop(reader);
        assert!(!found.send(chunk()), "all receivers are gone");
    }
}
