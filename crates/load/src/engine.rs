//! The engine of `cpu/cached` and `cpu/pinned`: bytes of files through a small ring of pinned host memory into the arena,
//! filling and copying at the same time.
//!
//! What the page cache has, threads copy out of it, each with two slots of the ring and a stream of copies of its own. What
//! only the disk has, one thread reads past the page cache, many reads at once, into slots of its own. A load may have
//! both, side by side: each chunk goes the way that is shorter for it, and the account tells how many bytes went which.
//! The ring stays in the processor's last cache when it is small; that is worth more than more slots.

mod choice;
mod direct;
mod threads;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_gpu::{Copier, Gpu, Mark, Place, Region, Rows};
use onehop_os::{DmaMemory, HostMem};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::plan::{Chunk, Plan};
use crate::source::Source;
use crate::stream::Engine;
use choice::{Choice, Way};

/// Bytes of a slot at most: copies of fewer bytes lose time between them, and more fall out of the caches of the processor
/// that fills them.
const SLOT: usize = 4 << 20;
/// Bytes of a slot at least: a copy of less costs more to begin than to make.
const LEAST_SLOT: usize = 1 << 20;
/// Threads that read out of the page cache at most: as many keep a copy engine of PCIe 5 busy on slow memory too.
const MOST_THREADS: usize = 16;
/// Slots of a thread: one is filled while the other is copied.
const SLOTS: usize = 2;
/// Slots of the thread that reads past the page cache.
const DIRECT_SLOTS: usize = 8;

/// How long no chunk may arrive before a load is given up: disks try for half a minute by themselves.
const STALL: Duration = Duration::from_secs(120);
/// How long the threads of a load that is over may take to end.
const END: Duration = Duration::from_secs(10);

/// How bytes may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Route {
    /// Each chunk the way that is shorter for it.
    #[default]
    Auto,
    /// All by the page cache.
    Cached,
    /// All past it.
    Pinned,
}

/// How a load is to be carried out. The defaults are the fast ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// How bytes may go.
    pub route: Route,
    /// Threads that read; without it as many as there are processors, and sixteen at most.
    pub threads: Option<usize>,
    /// Bytes of a slot; without it what suits the load, and 4 MiB at most.
    pub slot: Option<usize>,
}

/// How many bytes went which way, and what was used for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// Bytes that came out of the page cache.
    pub cached_bytes: u64,
    /// Bytes that came past it, from the disk.
    pub direct_bytes: u64,
    /// Threads that read.
    pub threads: usize,
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Why bytes did not go past the page cache though the disk had them, if that was so.
    pub why_cached: Option<String>,
}

/// What a load will use: decided, and its memory made, before there is a GPU. CUDA takes a fifth of a second to start.
pub struct Prepared {
    chunks: Vec<(Way, Chunk)>,
    sources: Vec<choice::Opened>,
    ring: HostMem,
    slot: usize,
    threads: usize,
    direct: bool,
    why_cached: Option<String>,
}

impl Prepared {
    /// Decides how the chunks of a plan go and makes the ring. `files` are the plan's.
    ///
    /// # Errors
    /// When a route that was asked for cannot be had, or there is no memory.
    pub fn new(plan: &Plan, files: &[Box<dyn Source>], options: &Options) -> Result<Self> {
        let threads = options.threads.unwrap_or(processors().min(MOST_THREADS)).clamp(1, 256);
        let slot = options.slot.unwrap_or_else(|| fitting(plan.read_bytes, threads));
        let block = plan.options.block.max(4096) as usize;
        let slot = slot.next_multiple_of(block);
        let Choice { chunks, sources, why_cached } = choice::choose(plan, files, slot as u64, options.route)?;
        let cached = chunks.iter().filter(|(way, _)| *way == Way::Cached).count();
        let threads = threads.min(cached);
        let direct = chunks.len() > cached;
        let bytes = slot * (threads * SLOTS + if direct { DIRECT_SLOTS } else { 0 });
        let ring = HostMem::touched(bytes.max(4096)).map_err(onehop_gpu::Error::from)?;
        Ok(Self { chunks, sources, ring, slot, threads, direct, why_cached })
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A slot for each thread to fill and one to copy, a few times over.
fn fitting(bytes: u64, threads: usize) -> usize {
    let share = usize::try_from(bytes / (threads * SLOTS * 2).max(1) as u64).unwrap_or(usize::MAX);
    share.clamp(LEAST_SLOT, SLOT)
}

/// What all threads of a load have in common.
struct Shared {
    sources: Vec<choice::Opened>,
    cached: Mutex<VecDeque<Chunk>>,
    stop: AtomicBool,
    cached_bytes: AtomicU64,
    direct_bytes: AtomicU64,
}

impl Shared {
    /// The next chunk that the page cache has; none when the load is over or given up.
    fn next(&self) -> Option<Chunk> {
        if self.is_stopped() {
            return None;
        }
        self.cached.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A part of the ring, and the copies out of it.
struct Lane {
    ring: HostMem,
    slot: usize,
    copier: Box<dyn Copier>,
    arrived: Sender<Result<Chunk>>,
}

impl Lane {
    /// Begins to copy what was read into a slot.
    fn copy(&mut self, slot: usize, chunk: &Chunk) -> Result<Mark> {
        let start = slot * self.slot;
        for copy in &chunk.copies {
            self.copier.copy(&Rows {
                from: start + copy.slot as usize,
                to: copy.to as usize,
                row: copy.row as usize,
                rows: copy.rows as usize,
                step: copy.step as usize,
            })?;
        }
        Ok(self.copier.mark()?)
    }

    /// Whoever waited may have gone: then the load was given up, and they have set the flag.
    fn tell(&self, chunk: Chunk) {
        let _ = self.arrived.send(Ok(chunk));
    }
}

/// A load under way. Dropping it ends it.
pub struct RingEngine {
    arena: Region,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    arrived: Receiver<Result<Chunk>>,
    account: Account,
    ring: Region,
}

impl RingEngine {
    /// Starts to load into a new arena.
    ///
    /// # Errors
    /// When the GPU has no room, or will not have the ring.
    pub fn start(gpu: &dyn Gpu, plan: &Plan, prepared: Prepared) -> Result<Self> {
        let bytes = usize::try_from(plan.gpu_bytes.max(1)).unwrap_or(usize::MAX);
        let arena = gpu.arena(bytes)?;
        let Prepared { chunks, sources, ring, slot, threads, direct, why_cached } = prepared;
        let ring = gpu.adopt(Place::PinnedHost, ring)?;
        let account = Account {
            threads: threads + usize::from(direct),
            ring_bytes: ring.len() as u64,
            why_cached,
            ..Account::default()
        };
        let (by_cache, by_disk): (Vec<_>, Vec<_>) =
            chunks.into_iter().partition(|(way, _)| *way == Way::Cached);
        let chunks = |list: Vec<(Way, Chunk)>| list.into_iter().map(|(_, chunk)| chunk);
        let shared = Arc::new(Shared {
            sources,
            cached: Mutex::new(chunks(by_cache).collect()),
            stop: AtomicBool::new(false),
            cached_bytes: AtomicU64::new(0),
            direct_bytes: AtomicU64::new(0),
        });
        let (sender, arrived) = channel();
        let mut engine = Self { arena, shared, threads: Vec::new(), arrived, account, ring: ring.clone() };
        let mut from = 0;
        let mut lane = |slots: usize| -> Result<Lane> {
            let part = ring.slice(from..from + slots * slot)?;
            from += slots * slot;
            let copier = gpu.copier(&part, &engine.arena)?;
            let memory =
                part.host().cloned().ok_or(onehop_gpu::Error::from(onehop_os::Error::NotReachable))?;
            Ok(Lane { ring: memory, slot, copier, arrived: sender.clone() })
        };
        let mut lanes = (0..threads).map(|_| lane(SLOTS)).collect::<Result<Vec<_>>>()?;
        let disk = if direct { Some(lane(DIRECT_SLOTS)?) } else { None };
        for mut lane in lanes.drain(..) {
            engine.spawn("reads cached bytes", &sender, move |shared| threads::run(shared, &mut lane))?;
        }
        if let Some(mut lane) = disk {
            let by_disk = chunks(by_disk).collect();
            engine.spawn("reads from the disk", &sender, move |shared| {
                direct::run(shared, &mut lane, by_disk)
            })?;
        }
        Ok(engine)
    }

    fn spawn(
        &mut self,
        name: &str,
        arrived: &Sender<Result<Chunk>>,
        work: impl FnOnce(&Shared) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let (shared, arrived) = (self.shared.clone(), arrived.clone());
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            if let Err(error) = work(&shared) {
                shared.stop.store(true, Ordering::Release);
                let _ = arrived.send(Err(error));
            }
        });
        self.threads.push(thread.map_err(Error::Thread)?);
        Ok(())
    }

    /// How many bytes have gone which way so far.
    #[must_use]
    pub fn account(&self) -> Account {
        Account {
            cached_bytes: self.shared.cached_bytes.load(Ordering::Acquire),
            direct_bytes: self.shared.direct_bytes.load(Ordering::Acquire),
            ..self.account.clone()
        }
    }

    /// What the copy engine does by itself, bytes in a second: out of the ring, to other memory of the GPU. For after the
    /// load, of which it is the limit; none where memory is too small to tell.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn copy_rate(&self, gpu: &dyn Gpu) -> Result<Option<f64>> {
        const COPIES: usize = 8;
        let bytes = self.ring.len().min(64 << 20);
        if bytes < LEAST_SLOT || gpu.simulated() {
            return Ok(None);
        }
        let to = gpu.arena(bytes)?;
        let mut copier = gpu.copier(&self.ring, &to)?;
        let mut best = None::<f64>;
        // The first round wakes the link up.
        for _ in 0..3 {
            let start = Instant::now();
            for _ in 0..COPIES {
                copier.copy(&Rows { from: 0, to: 0, row: bytes, rows: 1, step: bytes })?;
            }
            let mark = copier.mark()?;
            copier.wait(mark)?;
            let rate = (COPIES * bytes) as f64 / start.elapsed().as_secs_f64();
            best = Some(best.map_or(rate, |other| other.max(rate)));
        }
        Ok(best)
    }

    /// Has the threads end, and waits for them for a while: one that the disk or the GPU never answers is left alone with
    /// the memory that it holds.
    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
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

impl Engine for RingEngine {
    type Arena = Region;
    type Error = Error;

    fn arrived(&mut self) -> Result<Option<Chunk>> {
        match self.arrived.recv_timeout(STALL) {
            Ok(chunk) => chunk.map(Some),
            // All threads have ended and told everything.
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(Error::Stalled { waited: STALL }),
        }
    }

    fn arena(&self) -> &Region {
        &self.arena
    }

    fn finish(mut self) -> Result<Region> {
        self.end();
        Ok(self.arena.clone())
    }
}

impl Drop for RingEngine {
    fn drop(&mut self) {
        self.end();
    }
}
