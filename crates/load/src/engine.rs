//! The engine of `cpu/cached` and `cpu/pinned`: file bytes go through a small ring of pinned host memory into the
//! arena, with reads and copies overlapped.
//!
//! Some threads copy data out of the page cache into slots of the ring; full slots go to the copy engine in batches.
//! Data that is not cached is left to other threads, which read past the page cache into small shared slots. A load may
//! use both: each chunk takes the faster path, and [`Account`] counts the bytes of each path. A small ring stays in the
//! CPU's last-level cache, which is worth more than additional slots.
//!
//! If NVIDIA's cuFile is requested, it gets the arena and the files, and chooses its own path.
//!
//! Several GPUs share one ring and its threads ([`RingEngine::start_all`]). What more than one of them needs is read once and
//! copied to each.

mod account;
mod arena;
pub mod calls;
mod choice;
mod direct;
mod fair_chunks;
mod library;
mod narrow;
#[cfg(test)]
mod pause_tests;
mod ranks;
mod ring_cache;
mod segments;
#[cfg(test)]
mod silent_gpu;
mod sizes;
mod slot_pool;
mod slot_shares;
mod start;
mod threads;
mod worker_pool;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};
use onehop_os::{DmaMemory, HostMem};

use crate::error::{Error, Result};
use crate::group::Met;
use crate::plan::{self, Arenas, Chunk, Plan};
use crate::source::Source;
use crate::stream::Engine;
pub use account::Account;
pub use arena::Arena;
use fair_chunks::FairChunks;
use library::Library;
pub use ranks::GroupAccount;
use ranks::GroupLoad;
use ring_cache::RegisteredRing;
pub use ring_cache::RingCache;
pub use segments::{Placement, SegmentMemory, Segments};
use sizes::{cpus, fitting, links, spared};
use start::StartingLoad;
use worker_pool::{ChunkSource, Copiers, LoadLane, LoadShared, WorkerPool};

/// Largest slot: a larger one exceeds the caches of the core that fills it.
const SLOT: usize = 2 << 20;
/// Smallest slot: the setup of a shorter copy costs more than the copy.
const LEAST_SLOT: usize = 1 << 20;
/// Most threads that read from the page cache for a link: enough to saturate a PCIe 5 copy engine even with slow memory.
const MOST_THREADS: usize = 16;
/// Slots per thread: one is filled while the others are copied.
const SLOTS: usize = 3;
/// Size of a read by cuFile: enough for parallelism within cuFile.
const LIBRARY_READ: usize = 16 << 20;
/// Bytes copied to measure the copy engine.
const COPIED: usize = 64 << 20;

/// Time limit for idle threads to end, so that their ring can be kept.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Poll interval of a caller that waits for a chunk.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A load fails if no chunk arrives for this long though one could: disks retry for half a minute on their own.
const STALL: Duration = Duration::from_secs(120);

/// The path of the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Route {
    /// The faster path for each chunk.
    #[default]
    Auto,
    /// All through the page cache.
    Cached,
    /// All past the page cache.
    Pinned,
    /// All by NVIDIA's cuFile, as a baseline, or if only cuFile has a direct path.
    CuFile,
}

/// Options of a load. The defaults are the fast ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// The path of the bytes.
    pub route: Route,
    /// Threads that read from the page cache, and as many past it. The default is all but an eighth of the cores, and
    /// sixteen past the cache; at most sixteen, or as many for each GPU if each gets other bytes. For servers:
    /// connections, by default that most.
    pub threads: Option<usize>,
    /// Size of a slot. The default suits the load, and is at most 2 MiB.
    pub slot: Option<usize>,
}

/// A load whose path is chosen and whose memory is allocated, before a GPU is open. CUDA takes a fifth of a second to
/// start.
pub struct Prepared {
    work: LoadWork,
    bytes: u64,
    /// `None` for cuFile, which has its own.
    ring: Option<RegisteredRing>,
    ring_cache: Option<Arc<RingCache>>,
    /// Slot size for cached data, and for parts that are read past the cache.
    slot: usize,
    part: usize,
    /// Threads that share the work, and threads that read past the page cache.
    threads: usize,
    direct: usize,
    /// Each GPU's memory, if already allocated.
    arenas: Vec<Arena>,
    /// The other processes, if any.
    met: Option<Met>,
}

impl Prepared {
    /// Chooses paths for the chunks of a plan and allocates the ring. `files` are the plan's.
    ///
    /// # Errors
    /// When a requested route is not possible, or there is not enough memory.
    pub fn new(plan: &Plan, files: &[Box<dyn Source>], options: &Options) -> Result<Self> {
        Self::for_all(&[plan], files, options)
    }

    /// Like [`Prepared::new`], with the ring of an earlier load to this GPU; the ring is kept for the next load.
    ///
    /// # Errors
    /// As for [`Prepared::new`].
    pub fn with_ring_cache(
        plan: &Plan,
        files: &[Box<dyn Source>],
        options: &Options,
        ring_cache: Arc<RingCache>,
    ) -> Result<Self> {
        Self::prepare(&[plan], files, options, Some(ring_cache), None)
    }

    /// Like [`Prepared::with_ring_cache`], for this process's share of a load of several.
    ///
    /// # Errors
    /// As for [`Prepared::new`].
    pub fn for_group(
        plan: &Plan,
        files: &[Box<dyn Source>],
        options: &Options,
        ring_cache: Arc<RingCache>,
        met: Met,
    ) -> Result<Self> {
        Self::prepare(&[plan], files, options, Some(ring_cache), Some(met))
    }

    /// Like [`Prepared::new`], for several GPUs with a plan each; all plans have the same files.
    ///
    /// # Errors
    /// As for [`Prepared::new`].
    pub fn for_all(plans: &[&Plan], files: &[Box<dyn Source>], options: &Options) -> Result<Self> {
        Self::prepare(plans, files, options, None, None)
    }

    fn prepare(
        plans: &[&Plan],
        files: &[Box<dyn Source>],
        options: &Options,
        ring_cache: Option<Arc<RingCache>>,
        met: Option<Met>,
    ) -> Result<Self> {
        let to_read = plan::read_bytes(plans);
        let processes = met.as_ref().map_or(1, |met| met.group().size());
        let threads = threads(plans, files, options, to_read, processes);
        let by_library = options.route == Route::CuFile;
        let slot = match options.slot {
            Some(slot) => slot,
            None if by_library => LIBRARY_READ,
            None => fitting(to_read, threads),
        };
        // Ranks divide the same chunks.
        let slot = met.as_ref().map_or(slot, |met| met.slot as usize);
        let block = plans.iter().map(|plan| plan.options.block).max().unwrap_or(0).max(4096) as usize;
        let slot = slot.next_multiple_of(block);
        let work = LoadWork::new(plans, files, slot as u64, to_read, options.route)?;
        let alone = options.route == Route::Pinned;
        let threads = if alone { 0 } else { threads.min(work.chunks) };
        let direct = options.threads.unwrap_or(direct::THREADS).clamp(1, 256).min(work.chunks);
        let direct = if work.sources.iter().any(|source| source.direct.is_some()) { direct } else { 0 };
        let part = slot.div_ceil(slot.div_ceil(direct::SLOT)).next_multiple_of(block);
        let bytes = slot * threads * SLOTS + part * direct::slots(direct);
        let ring = if by_library {
            None
        } else if let Some(ring) = ring_cache.as_ref().and_then(|ring_cache| ring_cache.take(bytes)) {
            Some(ring)
        } else {
            let memory = HostMem::touched(bytes.max(4096)).map_err(onehop_gpu::Error::from)?;
            Some(RegisteredRing { memory, known: None })
        };
        let arenas = Vec::new();
        Ok(Self { work, bytes: to_read, ring, ring_cache, slot, part, threads, direct, arenas, met })
    }

    /// Bytes that will be read.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.bytes
    }

    /// Loads into these arenas, one per GPU, instead of allocating them at the start.
    #[must_use]
    pub fn into_arenas(self, arenas: Vec<Arena>) -> Self {
        Self { arenas, ..self }
    }
}

/// Threads that read, for each of some processes that load at the same time.
fn threads(
    plans: &[&Plan],
    files: &[Box<dyn Source>],
    options: &Options,
    to_read: u64,
    processes: usize,
) -> usize {
    // A thread that waits for a server needs no core.
    let remote = files.iter().any(|file| file.fetch().is_some());
    let most = MOST_THREADS * links(plans, to_read);
    let most = if remote { most } else { (spared(cpus()) / processes).min(most) };
    options.threads.unwrap_or(most).clamp(1, 256)
}

/// Bytes of a slot that would suit this process in a load of several: see [`Group::meet`](crate::group::Group::meet).
#[must_use]
pub fn slot_in_group(plan: &Plan, files: &[Box<dyn Source>], options: &Options, processes: usize) -> usize {
    let to_read = plan.read_bytes;
    let threads = threads(&[plan], files, options, to_read, processes);
    options
        .slot
        .unwrap_or_else(|| fitting(to_read, threads))
        .next_multiple_of(plan.options.block.max(4096) as usize)
}

/// The work of a load, and its resources.
struct LoadWork {
    left: ChunkSource,
    arenas: Arenas,
    /// Lower bound of the number of chunks.
    chunks: usize,
    sources: Vec<choice::LoadSource>,
    asked: bool,
    why_cached: Option<String>,
}

impl LoadWork {
    /// The chunks of all plans, which read `bytes` bytes.
    fn new(plans: &[&Plan], files: &[Box<dyn Source>], slot: u64, bytes: u64, route: Route) -> Result<Self> {
        let block = plans.iter().map(|plan| plan.options.block).min().unwrap_or(0);
        let (sources, why_cached) = choice::open(files, block, route)?;
        let arenas = Arenas::new(plans);
        Ok(Self {
            left: Box::new(FairChunks::new(Plan::chunks_of_all(plans, slot)?, arenas.clone())),
            arenas,
            chunks: usize::try_from(bytes.div_ceil(slot)).unwrap_or(usize::MAX),
            sources,
            asked: route != Route::Auto,
            why_cached,
        })
    }
}

/// Estimate of the files that a load opens besides the model's: each again for up to two paths, those that threads wait
/// on, and CUDA's.
#[must_use]
pub fn descriptors(files: usize) -> u64 {
    const ITSELF: u64 = 128;
    2 * files as u64 + ITSELF
}

/// Stops a load from another thread.
pub struct Stopper(Arc<LoadShared>);

impl Stopper {
    /// Stops the load as soon as operations in progress allow. A waiting caller gets
    /// [`Error::Cancelled`].
    pub fn stop(&self) {
        self.0.stop();
    }
}

/// A load in progress. Dropping it stops it; of several that share a ring, the last one does.
pub struct RingEngine<A = Region> {
    arena: A,
    pool: Arc<WorkerPool>,
    arrived: Receiver<Chunk>,
    /// Chunks that have come out of it.
    received: u64,
    account: Account,
    ring: Option<Region>,
    /// Where the ring is kept afterwards, and whether the GPU will recognise it: each emulated GPU has its own
    /// addresses.
    ring_cache: Option<Arc<RingCache>>,
    stays: bool,
    /// The watcher, and when to call it next.
    look: Option<(Look, Instant)>,
    /// The other processes, if any. It is dropped after the threads.
    group: Option<GroupLoad>,
}

/// Gets the number of bytes read, and returns whether to continue.
type Look = Box<dyn FnMut(u64) -> bool + Send>;

impl RingEngine {
    /// Starts a load into a new arena.
    ///
    /// # Errors
    /// When the GPU's memory is full, or it refuses the ring.
    pub fn start(gpu: &dyn Gpu, plan: &Plan, prepared: Prepared) -> Result<Self> {
        Self::start_all(&[gpu], &[plan], prepared)?.pop().ok_or(Error::Incomplete)
    }

    /// Starts a load into a new arena of each GPU, from one ring. The plans are those of [`Prepared::for_all`].
    ///
    /// # Errors
    /// When a GPU's memory is full, or it refuses the ring.
    pub fn start_all(gpus: &[&dyn Gpu], plans: &[&Plan], prepared: Prepared) -> Result<Vec<Self>> {
        let Prepared { work, ring, ring_cache, slot, part, threads, direct, arenas, .. } = prepared;
        let LoadWork { left, arenas: places, sources, asked, why_cached, .. } = work;
        let shared = LoadShared::new(sources, left);
        let mut arenas = arenas.into_iter();
        let mut room = |gpu: &dyn Gpu, plan: &Plan| {
            arenas.next().map_or_else(|| Arena::new(gpu, plan), Ok)?.region_for(plan)
        };
        let Some(RegisteredRing { memory: ring, mut known }) = ring else {
            let ([gpu], [plan]) = (gpus, plans) else { return Err(library::one_gpu()) };
            let arena = room(*gpu, plan)?;
            let account = Account { threads, asked, why_cached, ..Account::default() };
            return Ok(vec![Self::by_library(*gpu, arena, shared, account)?]);
        };
        let ring_bytes = ring.len() as u64;
        let account = Account { threads, ring_bytes, asked, why_cached, ..Account::default() };
        let (senders, receivers): (Vec<_>, Vec<_>) = gpus.iter().map(|_| channel()).unzip();
        let real = gpus.iter().all(|gpu| !gpu.simulated());
        let start = StartingLoad { pool: WorkerPool::new(shared), ring: &ring, slot, part, real };
        let started = start.threads(threads, direct)?;
        let ends = gpus
            .iter()
            .zip(plans)
            .map(|(gpu, plan)| LoadDestination::new(*gpu, room(*gpu, plan)?, &ring, known.take()));
        let ends = ends.collect::<Result<Vec<_>>>()?;
        let arrived: Vec<_> = senders.into_iter().enumerate().collect();
        let pool = Arc::new(started.open(|range, slot| {
            let copiers =
                ends.iter().map(|end| Ok(end.gpu.copier(&end.ring.slice(range.clone())?, &end.arena)?));
            let copiers = Copiers::Arenas(copiers.collect::<Result<_>>()?);
            Ok(LoadLane { slot, copiers, arenas: places.clone(), arrived: arrived.clone(), passes: None })
        })?);
        drop(arrived);
        let engine = |(LoadDestination { arena, ring, .. }, arrived)| {
            let (pool, account, ring_cache) = (pool.clone(), account.clone(), ring_cache.clone());
            let ring = Some(ring);
            Self { ring, ring_cache, stays: real, ..Self::of(arena, pool, arrived, account) }
        };
        Ok(ends.into_iter().zip(receivers).map(engine).collect())
    }

    /// Starts threads that pass chunks to cuFile.
    fn by_library(gpu: &dyn Gpu, arena: Region, shared: LoadShared, account: Account) -> Result<Self> {
        let library = Arc::new(Library::open(gpu, &arena, &shared.sources)?);
        let why_unregistered = library.why_unregistered();
        let account = Account { cufile_way: Some(library.way()), why_unregistered, ..account };
        let (mut pool, (arrives, arrived)) = (WorkerPool::new(shared), channel());
        for _ in 0..account.threads {
            let (library, arriving) = (library.clone(), arrives.clone());
            pool.spawn("waits for cuFile", move |shared| library::run(shared, &library, &arriving))?;
        }
        let pool = Arc::new(pool);
        Ok(Self::of(arena, pool, arrived, account))
    }
}

impl<A> RingEngine<A> {
    /// An engine without a ring of its own, a watcher or other processes.
    fn of(arena: A, pool: Arc<WorkerPool>, arrived: Receiver<Chunk>, account: Account) -> Self {
        let (ring, ring_cache, look, group) = (None, None, None, None);
        Self { arena, pool, arrived, received: 0, account, ring, ring_cache, stays: false, look, group }
    }

    /// A handle to stop it from another thread.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(self.pool.shared.clone())
    }

    /// Ends the load, of which the other ranks of a group are told why.
    pub fn give_up(&self, why: &str) {
        self.pool.shared.give_up(why);
    }

    /// In a group, waits until every rank has all of its bytes from this one, and this one from them. The account is
    /// complete then.
    ///
    /// # Errors
    /// When another rank fails, or nothing moves for long.
    pub fn wait_for_group(&mut self) -> Result<()> {
        self.group.as_mut().map_or(Ok(()), GroupLoad::finish)
    }

    /// Calls `look` many times per second while a caller waits for chunks. It gets the number of bytes read, for GPUs
    /// that share a ring the total; the load is cancelled when it returns false.
    pub fn watch(&mut self, look: impl FnMut(u64) -> bool + Send + 'static) {
        self.look = Some((Box::new(look), Instant::now()));
    }

    /// Calls the watcher if it is time to, and stops the load if it says so.
    fn goes_on(&mut self) -> bool {
        if self.look.as_ref().is_none_or(|(_, next)| Instant::now() < *next) {
            return true;
        }
        let read = self.account().read_bytes();
        let Some((look, next)) = &mut self.look else { return true };
        *next = Instant::now() + CANCEL_POLL_INTERVAL;
        let goes_on = look(read);
        if !goes_on {
            self.pool.shared.stop();
        }
        goes_on
    }

    /// The next chunk. Time in which the caller's memory is all that a chunk waits for does not count.
    fn arrived_within(&mut self, limit: Duration) -> Result<Option<Chunk>> {
        let (mut start, mut read) = (Instant::now(), self.account().read_bytes());
        loop {
            if !self.goes_on() {
                return Err(Error::Cancelled);
            }
            let shared = &self.pool.shared;
            match self.arrived.recv_timeout(CANCEL_POLL_INTERVAL) {
                Ok(chunk) => {
                    self.received += 1;
                    return Ok(Some(chunk));
                }
                // A reader may continue for as long as the disk takes to respond.
                Err(_) if shared.is_stopped() => return Err(shared.why()),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout)
                    if self.group.as_ref().is_some_and(GroupLoad::are_all_done) =>
                {
                    // What a rank passed on before it was done is here by now.
                    let Ok(chunk) = self.arrived.try_recv() else {
                        return self.group.as_ref().map_or(Ok(None), |group| Err(group.incomplete()));
                    };
                    self.received += 1;
                    return Ok(Some(chunk));
                }
                Err(RecvTimeoutError::Timeout) if shared.lacks_only_memory(self.received) => {
                    start = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) if start.elapsed() > limit => {
                    // Other GPUs may get their bytes first.
                    let before = std::mem::replace(&mut read, self.account().read_bytes());
                    match &self.group {
                        Some(group) if read == before && group.is_silent_since(start) => {
                            return Err(group.stalled());
                        }
                        None if read == before => return Err(Error::Stalled { waited: limit }),
                        _ => {}
                    }
                    start = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Bytes per path so far; for GPUs that share a ring, the total.
    #[must_use]
    pub fn account(&self) -> Account {
        let shared = &self.pool.shared;
        let cached_bytes = shared.cached_bytes.load(Ordering::Acquire);
        let direct_bytes = shared.direct_bytes.load(Ordering::Acquire);
        let remote_bytes = shared.remote_bytes.load(Ordering::Acquire);
        let from_disk = shared.disk_threads.load(Ordering::Acquire);
        let cache_miss_bytes = shared.through_bytes.load(Ordering::Acquire);
        let only_there = from_disk > 0 && cached_bytes + cache_miss_bytes + remote_bytes == 0;
        let registered = self.account.why_unregistered.as_ref();
        Account {
            cached_bytes,
            cache_miss_bytes,
            direct_bytes,
            threads: from_disk + if only_there { 0 } else { self.account.threads },
            cufile_bytes: shared.cufile_bytes.load(Ordering::Acquire),
            remote_bytes,
            retries: shared.retries.load(Ordering::Acquire),
            why_calls: shared.why_calls.get().cloned(),
            why_unregistered: registered.or(shared.why_unregistered.get()).cloned(),
            why_unknown: shared.why_unknown.get().cloned(),
            group: self.group.as_ref().map(GroupLoad::account),
            ..self.account.clone()
        }
    }

    /// Measures the copy engine alone, in bytes per second: out of the ring, or out of other pinned memory if there is
    /// none, to other GPU memory. Call it after the load, of which it is the limit. `None` if the ring is too small, or
    /// the GPU's memory is full.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn copy_rate(&self, gpu: &dyn Gpu) -> Result<Option<f64>> {
        if gpu.simulated() || self.ring.as_ref().is_some_and(|ring| ring.len() < LEAST_SLOT) {
            return Ok(None);
        }
        let from = match &self.ring {
            Some(ring) => ring.slice(0..ring.len().min(COPIED)),
            None => gpu.alloc(Place::PinnedHost, COPIED),
        };
        match from.and_then(|from| onehop_gpu::copy_rate(gpu, &from)) {
            Err(error) if error.is_no_room() => Ok(None),
            rate => Ok(Some(rate?)),
        }
    }
}

/// The destination of a load: one per GPU.
struct LoadDestination<'a> {
    gpu: &'a dyn Gpu,
    arena: Region,
    ring: Region,
}

impl<'a> LoadDestination<'a> {
    /// The arena, and the ring as registered with this GPU.
    fn new(gpu: &'a dyn Gpu, arena: Region, ring: &HostMem, known: Option<Region>) -> Result<Self> {
        let ring = match known {
            Some(known) => known,
            None => gpu.adopt(Place::PinnedHost, ring.clone())?,
        };
        Ok(Self { gpu, arena, ring })
    }
}

impl<A> Engine for RingEngine<A> {
    type Arena = A;
    type Error = Error;

    fn arrived(&mut self) -> Result<Option<Chunk>> {
        self.arrived_within(STALL)
    }

    fn arena(&self) -> &A {
        &self.arena
    }

    fn finish(mut self) -> Result<A> {
        self.wait_for_group()?;
        // The listeners end, and with them the last senders.
        self.group = None;
        if let (Some(ring_cache), Some(ring)) = (self.ring_cache, self.ring)
            && !self.pool.shared.is_stopped()
            // All threads have ended, so the ring is no longer in use.
            && matches!(self.arrived.recv_timeout(EXIT_TIMEOUT), Err(RecvTimeoutError::Disconnected))
            && let Some(memory) = ring.host().cloned()
        {
            ring_cache.put(RegisteredRing { memory, known: self.stays.then_some(ring) });
        }
        Ok(self.arena)
    }
}
