//! The engine for calls that come one by one, from many threads, and name GPU memory by its address: what is behind
//! `libcufile.so.0`.
//!
//! A call is cut into chunks. The thread that makes it works through them, and threads of the engine help it where the
//! machine has cores to spare: each fills a slot of one pinned ring that all calls share. Full slots go to the copy engine
//! as those of a load do, so that the copies of many small calls go together.
//! A call completes even without helpers.

mod call;
mod file;
mod lane;
mod rows;
mod short;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};
use onehop_os::HostMem;

use super::slot_pool::{Full, SlotPool};
use super::{MOST_THREADS, cpus, spared};
use call::{Call, CallSource};
pub use call::{CallError, Destination};
use file::{BLOCK, Room};
pub use file::{CallFile, Filled};
use lane::{CallEnd, CallLane, CallPart};
use rows::RowList;
pub use rows::{GatherError, RowFile, RowLayout};
use short::{FailedCopy, OwnCopiers, SHORT_READ};

/// Bytes of a slot, and of a chunk at most.
const SLOT: usize = 1 << 20;
/// Bytes of a chunk at least: a copy of less takes longer to begin than to make.
const LEAST_CHUNK: usize = 256 << 10;
/// The same for rows, which take longer to collect than as many bytes of a file: a third of it, so that four threads share some
/// thousand rows.
const LEAST_ROWS: usize = 96 << 10;
/// Chunks begin at multiples of this in the file, but for the first.
const ALIGN: u64 = 64 << 10;
/// Slots that one GPU may use: for each thread, and at most.
const SLOTS: usize = 4;
const MOST_SLOTS: usize = 64;
/// How long a call may make no progress before it fails: disks try for half a minute by themselves.
const STALL: Duration = Duration::from_secs(120);
/// How long a thread polls its copies before it sleeps: where other threads need its core, and where they do not. A call
/// of one short chunk is over sooner than a sleeping thread wakes up.
const SHORT_SPIN: Duration = Duration::from_micros(20);
const LONG_SPIN: Duration = Duration::from_millis(1);
const SHORT_CALL: usize = 64 << 10;
/// Bytes of a call, for each thread, that fit the private caches of their cores.
const PRIVATE_CACHE: usize = 2 << 20;
/// Of fewer bytes, the copy takes longer to begin than to make.
const LEAST_DEMOTED: usize = 32 << 10;
/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(30);
/// How long a helper polls for another call before it sleeps: longer than a program with one thread takes from the last
/// chunk of a call of some MiB to its next call, the copies included.
const HELPER_SPIN: Duration = Duration::from_micros(250);

/// Bytes that calls have moved, by path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallBytes {
    /// Out of the page cache, which had them.
    pub cached: u64,
    /// Through the page cache, from the disk.
    pub cache_miss: u64,
    /// Past the page cache.
    pub direct: u64,
    /// To files.
    pub written: u64,
}

/// The same while they change.
#[derive(Default)]
struct CallCounters {
    cached: AtomicU64,
    cache_miss: AtomicU64,
    direct: AtomicU64,
    written: AtomicU64,
}

/// The memory of a GPU that calls may name.
#[derive(Clone)]
pub struct Target {
    index: usize,
    gpu: Arc<str>,
    own: Arc<OwnCopiers>,
}

/// See the module. Clones are the same engine.
#[derive(Clone)]
pub struct CallEngine(Arc<CallEngineInner>);

struct CallEngineInner {
    ring: HostMem,
    slots: SlotPool<CallLane>,
    /// Threads that work at the same time, callers among them, before helpers step back.
    threads: usize,
    /// Threads that work on calls of their own, and those that help.
    callers: AtomicUsize,
    helping: AtomicUsize,
    work: Mutex<Work>,
    /// The number of calls in `work`, to be read without its lock.
    open: AtomicUsize,
    more: Condvar,
    counts: CallCounters,
}

#[derive(Default)]
struct Work {
    /// Calls with chunks that no thread has taken.
    calls: VecDeque<Arc<Call>>,
    started: usize,
    asleep: usize,
}

impl CallEngine {
    /// An engine for this machine, with its ring. It has no threads before a call is worth one.
    ///
    /// # Errors
    /// When memory cannot be allocated.
    pub fn new() -> Result<Self, CallError> {
        let threads = spared(cpus()).clamp(1, MOST_THREADS);
        Self::with_threads(threads)
    }

    /// The same for this many threads.
    ///
    /// # Errors
    /// As for [`CallEngine::new`].
    pub fn with_threads(threads: usize) -> Result<Self, CallError> {
        let slots = (threads * SLOTS).clamp(2 * SLOTS, MOST_SLOTS);
        // One GPU alone may use three quarters: as many as the threads need.
        let slots = slots + slots / 3;
        let ring = HostMem::touched(slots * SLOT).map_err(CallError::of_memory)?;
        let pool = SlotPool::shared(slots);
        pool.open(CallLane::default());
        Ok(Self(Arc::new(CallEngineInner {
            ring,
            slots: pool,
            threads,
            callers: AtomicUsize::new(0),
            helping: AtomicUsize::new(0),
            work: Mutex::default(),
            open: AtomicUsize::new(0),
            more: Condvar::new(),
            counts: CallCounters::default(),
        })))
    }

    /// Lets calls name the memory of a GPU: `all` has its addresses for offsets.
    ///
    /// # Errors
    /// When the GPU refuses the ring, or fails.
    pub fn add_gpu(&self, gpu: Arc<dyn Gpu>, all: Region) -> Result<Target, CallError> {
        let ring = gpu.adopt(Place::PinnedHost, self.0.ring.clone())?;
        let copier = gpu.copier(&ring, &all)?;
        let index = self.0.slots.with_lane(|lane| lane.add(copier));
        let index = index.ok_or(CallError::Stalled(Duration::ZERO))?;
        let name = gpu.name().into();
        Ok(Target { index, gpu: name, own: Arc::new(OwnCopiers::new(gpu, ring, all)) })
    }

    /// Reads `bytes` at `at` of a file into GPU memory; fewer if the file ends before.
    ///
    /// # Errors
    /// When the file cannot be read, or the GPU fails. It is then unknown which bytes have been written.
    pub fn read(
        &self,
        file: &Arc<CallFile>,
        at: u64,
        bytes: usize,
        to: Destination,
    ) -> Result<usize, CallError> {
        let bytes = file.within(at, bytes)?;
        self.0.execute(CallSource::File(file.clone()), at, bytes, to)
    }

    /// Writes `bytes` of GPU memory to a file at `at`; fewer if the disk is full.
    ///
    /// # Errors
    /// When nothing could be written, or the GPU fails.
    pub fn write(
        &self,
        file: &Arc<CallFile>,
        at: u64,
        bytes: usize,
        from: Destination,
    ) -> Result<usize, CallError> {
        self.0.execute(CallSource::FileToWrite(file.clone()), at, bytes, from)
    }

    /// Packs rows of a file in GPU memory, in the order of `ids`.
    ///
    /// # Errors
    /// [`GatherError::NoRow`] when the file has no such row, before anything is written; when the file was truncated, or
    /// the GPU fails: it is then unknown which rows have been written.
    pub fn gather(&self, rows: &Arc<RowFile>, ids: Vec<u64>, to: Destination) -> Result<(), GatherError> {
        let list = RowList::new(rows, ids)?;
        let bytes = list.bytes();
        self.0.execute(CallSource::Rows(list), 0, bytes, to)?;
        Ok(())
    }

    /// Reads `bytes` at `at` of a file into host memory at `to`, on this thread and without a GPU. They begin `shift` bytes
    /// behind it where the path allows, elsewhere within [`Self::HOST_BLOCK`]; fewer bytes if the file ends before.
    ///
    /// # Errors
    /// When the file cannot be read, or there is less room in `memory` than twice [`Self::HOST_BLOCK`] more than `bytes`.
    pub fn read_to_host(
        &self,
        file: &CallFile,
        at: u64,
        bytes: usize,
        (memory, to, shift): (&HostMem, usize, usize),
    ) -> Result<Filled, CallError> {
        let bytes = file.within(at, bytes)?;
        if bytes == 0 {
            return Ok(Filled { skip: 0, bytes: 0 });
        }
        file.fill(Room { memory, to, shift, block: BLOCK }, at, bytes, &self.0.counts)
    }

    /// The largest block of a file that is read to host memory past the page cache, and what `to` is a multiple of.
    pub const HOST_BLOCK: usize = BLOCK as usize;

    /// Writes `bytes` of host memory, from `from` on, a multiple of [`Self::HOST_BLOCK`], to a file at `at`, on this thread.
    /// Fewer where the disk is full.
    ///
    /// # Errors
    /// When nothing could be written.
    pub fn write_from_host(
        &self,
        file: &CallFile,
        at: u64,
        bytes: usize,
        (memory, from): (&HostMem, usize),
    ) -> Result<usize, CallError> {
        let written = file.store(memory, from, at, bytes)?;
        self.0.counts.written.fetch_add(written as u64, Ordering::Relaxed);
        Ok(written)
    }

    /// What its calls have moved so far.
    #[must_use]
    pub fn moved(&self) -> CallBytes {
        let CallCounters { cached, cache_miss, direct, written } = &self.0.counts;
        let [cached, cache_miss, direct, written] =
            [cached, cache_miss, direct, written].map(|count| count.load(Ordering::Relaxed));
        CallBytes { cached, cache_miss, direct, written }
    }
}

impl CallEngineInner {
    fn execute(
        self: &Arc<Self>,
        source: CallSource,
        at: u64,
        bytes: usize,
        memory: Destination,
    ) -> Result<usize, CallError> {
        if bytes == 0 {
            return Ok(0);
        }
        let callers = self.callers.fetch_add(1, Ordering::AcqRel) + 1;
        let _caller = CountGuard(&self.callers);
        let free = self.threads.saturating_sub(callers);
        let chunk = match &source {
            CallSource::Rows(list) => (chunk_bytes(bytes, free, LEAST_ROWS) / list.row()).max(1) * list.row(),
            _ => chunk_bytes(bytes, free, LEAST_CHUNK),
        };
        let call = Arc::new(Call::new(source, at, bytes, chunk, memory));
        if call.chunks() > 1 && free > 0 {
            self.ask_for_help(&call);
        }
        while let Some(chunk) = call.take() {
            self.execute_chunk(&call, chunk);
        }
        self.wait(&call)?;
        call.result()
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_for_help(self: &Arc<Self>, call: &Arc<Call>) {
        let mut work = self.work();
        work.calls.push_back(call.clone());
        self.open.store(work.calls.len(), Ordering::Release);
        self.wake_helpers(&mut work, call);
    }

    /// Wakes two helpers at most, or starts one. Each helper wakes others, so that all are awake soon and none spends long
    /// on it.
    fn wake_helpers(self: &Arc<Self>, work: &mut Work, call: &Call) {
        let wanted = call.not_taken().min(2);
        for _ in 0..wanted.min(work.asleep) {
            self.more.notify_one();
        }
        if wanted > work.asleep && work.started + 1 < self.threads {
            self.start_helper(work);
        }
    }

    /// If no thread can be started, the callers do all the work.
    fn start_helper(self: &Arc<Self>, work: &mut Work) {
        let engine = self.clone();
        let help = move || engine.help();
        if std::thread::Builder::new().name("onehop reads".into()).spawn(help).is_ok() {
            work.started += 1;
        }
    }

    /// A helper's loop, which runs as long as the process.
    fn help(self: &Arc<Self>) {
        loop {
            let call = self.next_call();
            self.helping.fetch_add(1, Ordering::AcqRel);
            let _helper = CountGuard(&self.helping);
            while !self.is_crowded()
                && let Some(chunk) = call.take()
            {
                self.execute_chunk(&call, chunk);
            }
        }
    }

    /// Whether callers alone keep the cores busy.
    fn is_crowded(&self) -> bool {
        self.callers.load(Ordering::Relaxed) + self.helping.load(Ordering::Relaxed) > self.threads + 1
    }

    fn next_call(self: &Arc<Self>) -> Arc<Call> {
        let begun = Instant::now();
        while !self.is_half_busy() && begun.elapsed() < HELPER_SPIN {
            // All helpers come at the same time: those that slept for the lock would be woken one after the other.
            let next = if self.open.load(Ordering::Acquire) > 0 { self.work.try_lock().ok() } else { None };
            match next.and_then(|mut work| self.pick(&mut work)) {
                Some(call) => return call,
                None => std::thread::yield_now(),
            }
        }
        let mut work = self.work();
        loop {
            if let Some(call) = self.pick(&mut work) {
                return call;
            }
            work.asleep += 1;
            work = self.more.wait(work).unwrap_or_else(PoisonError::into_inner);
            work.asleep -= 1;
        }
    }

    /// A call that a helper may work on.
    fn pick(self: &Arc<Self>, work: &mut Work) -> Option<Arc<Call>> {
        while work.calls.front().is_some_and(|call| call.not_taken() == 0) {
            work.calls.pop_front();
        }
        self.open.store(work.calls.len(), Ordering::Release);
        let call = work.calls.front().filter(|_| !self.is_crowded())?.clone();
        self.wake_helpers(work, &call);
        Some(call)
    }

    fn execute_chunk(&self, call: &Arc<Call>, chunk: usize) {
        let done = match self.slot(call) {
            Ok(Some(slot)) => match call.file_to_write() {
                Some(file) => self.write_chunk(call, file, chunk, slot),
                None => self.read_chunk(call, chunk, slot),
            },
            Ok(None) => {
                call.skip(chunk);
                return;
            }
            Err(error) => Err(error),
        };
        if let Err(error) = done {
            call.fail(chunk, error);
        }
    }

    /// An empty slot; none if the call has failed meanwhile.
    fn slot(&self, call: &Call) -> Result<Option<usize>, CallError> {
        if call.has_failed() {
            return Ok(None);
        }
        let target = &call.memory.target;
        if let Some(slot) = self.slots.free(target.index)? {
            return Ok(Some(slot));
        }
        let (begun, held) = (Instant::now(), Cell::new(None));
        let is_stopped = || {
            // Do not wait for copies that their own callers have abandoned.
            held.set(self.slots.all_aside(target.index));
            held.get().is_some() || call.has_failed() || begun.elapsed() > STALL
        };
        match self.slots.slot(target.index, is_stopped)? {
            None if call.has_failed() => Ok(None),
            None => Err(held.get().map_or(CallError::Stalled(STALL), |slots| CallError::HeldSlots {
                gpu: target.gpu.to_string(),
                slots,
            })),
            slot => Ok(slot),
        }
    }

    fn read_chunk(&self, call: &Arc<Call>, chunk: usize, slot: usize) -> Result<(), CallError> {
        let (at, bytes) = call.range(chunk);
        let room = Room { memory: &self.ring, to: slot * SLOT, shift: 0, block: ALIGN };
        let filled = call.source.fill(room, at, bytes, &self.counts);
        match filled {
            Ok(filled) if filled.bytes > 0 && !call.has_failed() => {
                if self.is_worth_demoting(call, filled.bytes) {
                    // A hint to the caches.
                    let _ = self.ring.demote(slot * SLOT + filled.skip, filled.bytes);
                }
                if call.bytes < SHORT_READ {
                    return self.copy_alone(call, chunk, slot, filled);
                }
                let part = CallPart { call: call.clone(), chunk, skip: filled.skip, bytes: filled.bytes };
                // If this fails, the slot pool still has the part, and ends the chunk when it reports the part.
                if let Err(error) = self.slots.hand_in(Full { slot, filler: call.memory.target.index, part })
                {
                    call.note(error.into());
                }
                Ok(())
            }
            filled => {
                self.slots.put_back(call.memory.target.index, slot);
                filled.map(|_| call.finish(chunk, 0))
            }
        }
    }

    /// Whether a chunk should be moved out of this core's private caches, where the copy engine reads it at half the speed.
    /// That takes half as long as filling the slot: it is done where cores are idle, and at the end of a call, which waits
    /// for its copies anyway. In long calls, the next chunks displace it.
    fn is_worth_demoting(&self, call: &Call, bytes: usize) -> bool {
        let has_time =
            call.not_taken() == 0 || (call.bytes <= self.threads * PRIVATE_CACHE && !self.is_half_busy());
        has_time && bytes >= LEAST_DEMOTED
    }

    /// Whether callers keep at least half of the threads busy.
    fn is_half_busy(&self) -> bool {
        self.callers.load(Ordering::Relaxed) * 2 > self.threads
    }

    /// Copies a chunk of a short call into GPU memory.
    fn copy_alone(&self, call: &Call, chunk: usize, slot: usize, filled: Filled) -> Result<(), CallError> {
        let target = &call.memory.target;
        if call.is_memory_there() {
            let copied = target.own.copy_in(slot * SLOT + filled.skip, call.place(chunk), filled.bytes);
            copied.map_err(|failed| self.release_slot(call, slot, failed))?;
            self.slots.put_back(target.index, slot);
            call.finish(chunk, filled.bytes);
            return Ok(());
        }
        self.slots.put_back(target.index, slot);
        Err(CallError::Gone)
    }

    fn write_chunk(&self, call: &Call, file: &CallFile, chunk: usize, slot: usize) -> Result<(), CallError> {
        let (at, bytes) = call.range(chunk);
        let from = call.place(chunk);
        // The slot may have come so late that the call was given up.
        if call.has_failed() {
            self.slots.put_back(call.memory.target.index, slot);
            call.skip(chunk);
            return Ok(());
        }
        if !call.is_memory_there() {
            self.slots.put_back(call.memory.target.index, slot);
            return Err(CallError::Gone);
        }
        if let Err(failed) = call.memory.target.own.copy_out(from, slot * SLOT, bytes) {
            return Err(self.release_slot(call, slot, failed));
        }
        let written = call.store(|| file.store(&self.ring, slot * SLOT, at, bytes));
        self.slots.put_back(call.memory.target.index, slot);
        let written = written?;
        self.counts.written.fetch_add(written as u64, Ordering::Relaxed);
        call.finish(chunk, written);
        Ok(())
    }

    /// Returns a slot after a failed copy, as soon as the GPU does not use it any more.
    fn release_slot(&self, call: &Call, slot: usize, FailedCopy(error, copier): FailedCopy) -> CallError {
        let index = call.memory.target.index;
        match copier {
            Some(copier) => self.slots.set_aside(index, slot, CallEnd::Own(copier, None)),
            None => self.slots.put_back(index, slot),
        }
        CallError::Gpu(*error)
    }

    /// Waits for the chunks that others work on, and for the copies.
    fn wait(&self, call: &Call) -> Result<(), CallError> {
        let (mut left, mut since) = (call.left(), Instant::now());
        let spin = if self.is_half_busy() && call.bytes > SHORT_CALL { SHORT_SPIN } else { LONG_SPIN };
        while left > 0 {
            if let Err(error) = self.slots.try_attend() {
                give_up(call);
                return Err(error.into());
            }
            let now = call.left();
            if now != left {
                (left, since) = (now, Instant::now());
                continue;
            }
            match since.elapsed() {
                waited if waited > STALL => {
                    give_up(call);
                    return Err(CallError::Stalled(STALL));
                }
                waited if waited < spin => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
        }
        Ok(())
    }
}

/// Ends a call before its chunks have ended. What the kernel is writing to the file cannot be called back, and would overwrite what
/// the caller writes next: it is waited for, as `pwrite` would.
fn give_up(call: &Call) {
    call.abandon();
    while call.is_storing() {
        std::thread::sleep(NAP);
    }
}

/// Bytes of a chunk: small enough for each of the threads that are free to get two, so that copies begin early.
fn chunk_bytes(bytes: usize, free: usize, least: usize) -> usize {
    if free == 0 {
        return SLOT;
    }
    let unit = least.min(ALIGN as usize);
    (bytes / (2 * (free + 1))).next_multiple_of(unit).clamp(least, SLOT)
}

/// One less when it is dropped.
struct CountGuard<'a>(&'a AtomicUsize);

impl Drop for CountGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
