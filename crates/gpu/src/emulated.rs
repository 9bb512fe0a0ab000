//! The emulated GPU: one CPU thread per warp, or per GPU thread if threads act independently.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use onehop_os::{Allocations, DmaBuf, DmaMemory, Heap, HostMem, Marks, Memfd, Registers, Udmabuf};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{
    Exit, GROUP_WORDS, Job, LOCAL_WORDS, Metered, PeekNotes, Warp, run_group, run_owner, run_peek,
    run_shared, run_single, scratch_init, share,
};
use onehop_proto::queue::{Memory, Shared};

use crate::arrays::{EmulatedArrays, ReusedMemory};
use crate::blocks::InTurn;
use crate::controllers::emulated::Controllers;
use crate::controllers::{ControllerHost, Hold, Serving};
use crate::copier::{AtOnce, Copier};
use crate::meeting::Meeting;
use crate::ranges::{RangeCopier, RangesAtOnce};
use crate::region::{AddressSpace, DeviceBytes};
use crate::space::{EmulatedThread, HeldSpace, Space};
use crate::{
    ArrayKernels, BlockKernels, Doorbells, Error, Gpu, Instruments, KernelJob, KernelQueue, Launch,
    PeerMemory, Place, Region, Resident, Result, Running, peek,
};

/// Lanes of an emulated warp.
pub const EMULATED_LANES: u32 = 32;

/// Its own memory is allocated in whole device pages: allocations never share one.
const VRAM_UNIT: usize = 64 << 10;

/// Maximum threads of an emulated launch: each is a thread of this machine.
const MAX_THREADS: u32 = 1024;

/// A GPU made of CPU threads. Clones are the same GPU.
#[derive(Clone)]
pub struct Emulated {
    space: Arc<Space>,
    lanes: u32,
    vram: Option<Vram>,
    /// Whether its kernels take times.
    metered: bool,
    /// Whether a forked child gets a copy of its memory.
    is_private: bool,
    /// Its memory that other processes can open.
    pub(crate) shared: Allocations<Arc<Memfd>>,
}

/// Its own memory, and which of it is free.
#[derive(Clone)]
struct Vram {
    mem: HostMem,
    heap: Arc<Mutex<Heap>>,
    /// The exporter of its dma-bufs, if any.
    exporter: Option<Arc<Udmabuf>>,
}

impl Vram {
    fn take(&self, bytes: usize) -> Result<HostMem> {
        let none = || onehop_os::Error::NoMemory { mapper: "the emulated GPU's own memory".into(), bytes };
        let len = bytes.max(1).checked_next_multiple_of(VRAM_UNIT).ok_or_else(none)?;
        let at = lock(&self.heap).take(len).ok_or_else(none)?;
        let heap = self.heap.clone();
        let release = move || lock(&heap).free(at, len);
        let part = self.mem.slice(at..at + len)?.on_last_drop(release);
        part.fill(0, len, 0)?;
        Ok(part)
    }
}

fn lock(heap: &Mutex<Heap>) -> MutexGuard<'_, Heap> {
    heap.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Emulated {
    /// A GPU with an address space of its own.
    #[must_use]
    pub fn new() -> Self {
        Self::with_lanes(EMULATED_LANES)
    }

    /// A GPU whose memory no device reaches: a forked child gets a copy of it, as of other memory of its parent.
    #[must_use]
    pub fn private() -> Self {
        Self { is_private: true, ..Self::new() }
    }

    /// A GPU whose warps have this many lanes.
    #[must_use]
    pub fn with_lanes(lanes: u32) -> Self {
        Self {
            space: Space::new(),
            lanes: lanes.max(1),
            vram: None,
            metered: false,
            is_private: false,
            shared: Allocations::default(),
        }
    }

    /// A GPU with device memory of its own, which a drive reaches over the bus like a real GPU's.
    #[must_use]
    pub fn with_vram(mem: HostMem) -> Self {
        Self::with(mem, None)
    }

    /// A GPU whose memory can be exported as dma-bufs, like a real GPU's.
    #[must_use]
    pub fn with_exported(memory: Udmabuf) -> Self {
        let mem = memory.memory().clone();
        Self::with(mem, Some(Arc::new(memory)))
    }

    fn with(mem: HostMem, exporter: Option<Arc<Udmabuf>>) -> Self {
        let heap = Arc::new(Mutex::new(Heap::new(0, mem.len())));
        Self { vram: Some(Vram { mem, heap, exporter }), ..Self::new() }
    }

    #[cfg(test)]
    pub(crate) fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Keeps other threads from its table of memory as long as the result lives. A thread that forks needs this, or a lock that
    /// another thread had would stay locked in the child.
    #[must_use]
    pub fn hold(&self) -> HeldSpace<'_> {
        self.space.hold()
    }

    /// All of its memory as one region, whose offsets are GPU addresses. Accesses outside its allocations are errors.
    #[must_use]
    pub fn all_memory(&self) -> Region {
        Region::on_device(GpuAddr(0), usize::MAX, Arc::new(AllMemory(self.space.clone())))
    }

    /// Starts a kernel of the caller's: `threads` threads that run `kernel`, each with its view of memory and its
    /// index.
    ///
    /// # Errors
    /// When there are none, or too many.
    pub fn start(
        &self,
        threads: u32,
        kernel: impl Fn(&EmulatedThread, u32) + Send + Sync + 'static,
    ) -> Result<Box<dyn Running>> {
        let mut warp: Arc<Meeting> = Arc::default();
        let view = |index: u32, lanes: u32| {
            if index.is_multiple_of(lanes) {
                warp = Arc::default();
            }
            let (space, warp) = (self.space.clone(), warp.clone());
            move || EmulatedThread::lane(&space, &warp)
        };
        self.start_views(threads, view, kernel)
    }

    /// Starts warps that run `kernel`, each with its view of memory, with `local` words of local memory, and its index.
    pub(crate) fn start_warps(
        &self,
        (warps, local): (u32, u32),
        kernel: impl Fn(&EmulatedThread, u32) + Send + Sync + 'static,
    ) -> Result<Box<dyn Running>> {
        let view = |_, lanes| {
            let space = self.space.clone();
            move || EmulatedThread::warp(&space, lanes, local)
        };
        self.start_views(warps, view, kernel)
    }

    /// Starts threads of this machine; `view` makes each one's view from its index and the number of lanes.
    fn start_views<V: FnOnce() -> EmulatedThread + Send + 'static>(
        &self,
        threads: u32,
        mut view: impl FnMut(u32, u32) -> V,
        kernel: impl Fn(&EmulatedThread, u32) + Send + Sync + 'static,
    ) -> Result<Box<dyn Running>> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(Error::Launch(format!("{threads} threads; the emulated GPU has 1 to {MAX_THREADS}")));
        }
        let (kernel, mut started) = (Arc::new(kernel), LaunchThreads::default());
        for index in 0..threads {
            let (kernel, view) = (kernel.clone(), view(index, self.lanes));
            started.add(move || {
                kernel(&view(), index);
                Exit::Finished
            })?;
        }
        started.start();
        Ok(Box::new(started))
    }
}

/// See [`Emulated::all_memory`].
struct AllMemory(Arc<Space>);

impl AllMemory {
    fn find(&self, at: usize, bytes: usize) -> Result<(HostMem, usize)> {
        let refused = || onehop_os::Error::OutOfRange { offset: at, bytes, len: 0 };
        Ok(self.0.memory_at(at as u64, bytes as u64).ok_or_else(refused)?)
    }
}

impl DeviceBytes for AllMemory {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let (mem, at) = self.find(offset, out.len())?;
        Ok(mem.read(at, out)?)
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        let (mem, at) = self.find(offset, data.len())?;
        Ok(mem.write(at, data)?)
    }

    fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        let (mem, at) = self.find(offset, bytes)?;
        Ok(mem.fill(at, bytes, value)?)
    }

    fn mark(&self, marks: &Marks, limit: Duration) -> Result<()> {
        let (mem, at) = self.find(marks.first as usize, marks.span() as usize)?;
        Ok(mem.mark(&Marks { first: at as u64, ..*marks }, limit)?)
    }

    fn marks_left(&self, marks: &Marks, limit: Duration) -> Result<u64> {
        let (mem, at) = self.find(marks.first as usize, marks.span() as usize)?;
        Ok(mem.marks_left(&Marks { first: at as u64, ..*marks }, limit)?)
    }

    fn dma_buf(&self, _: usize, _: usize) -> Result<DmaBuf> {
        let why = "only a single allocation can be exported".into();
        Err(Error::NotSupported { what: "a dma-buf of all of a GPU's memory".into(), why })
    }

    fn share(&self) -> Result<Option<OwnedFd>> {
        Ok(None)
    }
}

impl Default for Emulated {
    fn default() -> Self {
        Self::new()
    }
}

impl Gpu for Emulated {
    fn name(&self) -> &str {
        "emu"
    }

    fn simulated(&self) -> bool {
        true
    }

    fn own_memory(&self) -> bool {
        self.vram.is_some()
    }

    fn alloc(&self, place: Place, bytes: usize) -> Result<Region> {
        match &self.vram {
            Some(vram) if place == Place::Vram => {
                Ok(self.adopt(place, vram.take(bytes)?)?.exported_by(vram.exporter.clone()))
            }
            _ if self.is_private => self.adopt(place, HostMem::private(bytes)?),
            _ => self.adopt(place, HostMem::anonymous(bytes)?),
        }
    }

    fn free_memory(&self) -> Result<Option<u64>> {
        Ok(self.vram.as_ref().map(|vram| lock(&vram.heap).left() as u64))
    }

    fn adopt(&self, place: Place, mem: HostMem) -> Result<Region> {
        let (addr, unmap) = self.space.map_memory(place, mem.clone());
        Ok(Region::on_host(place, addr, mem, Arc::new(unmap)))
    }

    fn copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>> {
        Ok(Box::new(AtOnce::new(from.clone(), to.clone())))
    }

    fn range_copier(&self, _kernel_below: usize) -> Result<Box<dyn RangeCopier>> {
        Ok(Box::new(RangesAtOnce))
    }

    fn peers(&self) -> Result<&dyn PeerMemory> {
        Ok(self)
    }

    fn block_kernels(&self) -> Result<Box<dyn BlockKernels>> {
        Ok(Box::new(InTurn(self.space.clone())))
    }

    fn array_kernels(&self) -> Result<Box<dyn ArrayKernels>> {
        Ok(Box::new(EmulatedArrays { gpu: self.clone(), array: None, items: ReusedMemory::default() }))
    }

    fn map_registers(&self, regs: Arc<dyn Registers>) -> Result<Doorbells> {
        let bytes = u64::from(regs.size());
        let (base, unmap) = self.space.map_registers(regs);
        Ok(Doorbells::direct((base, bytes), AddressSpace::Model, Arc::new(unmap)))
    }

    fn prepare(&self, launch: &Launch) -> Result<()> {
        let launch = launch.clone();
        let view = EmulatedThread::new(&self.space);
        catch(move || match launch {
            Launch::Owner(queues) => {
                for queue in &queues {
                    scratch_init(&view, queue.control);
                }
                Ok(())
            }
            Launch::Shared(queues, _) => {
                for queue in &queues {
                    shared_queue::<EmulatedThread>(queue)?.initialise(&view);
                }
                Ok(())
            }
        })?
    }

    fn launch(&self, launch: &Launch, job: &KernelJob) -> Result<Box<dyn Running>> {
        let deadline = self.space.now().saturating_add(job.limit);
        let job = *job;
        let mut threads = LaunchThreads::default();
        match launch {
            Launch::Owner(queues) => {
                let of = queues.len() as u32;
                let single = crate::is_single(queues);
                for (index, queue) in queues.iter().copied().enumerate() {
                    let (space, lanes) = (self.space.clone(), self.lanes);
                    let items = share(job.count, index as u32, of);
                    let metered = self.metered;
                    threads.add(move || {
                        let warp = EmulatedThread::warp(&space, lanes, LOCAL_WORDS);
                        if !metered {
                            return owner(&warp, &queue, single, &job.until(deadline), items);
                        }
                        let warp = Metered::begin(warp, job.outcomes, job.count);
                        let exit = owner(&warp, &queue, single, &job.until(deadline), items);
                        warp.report(index as u32);
                        exit
                    })?;
                }
            }
            Launch::Shared(queues, count) => {
                if *count == 0 || *count > MAX_THREADS || queues.is_empty() {
                    return Err(Error::Launch(format!(
                        "{count} threads on {} queues; the emulated GPU has 1 to {MAX_THREADS}, and one queue at least",
                        queues.len()
                    )));
                }
                // Whole warps act as such, as on a GPU; any other number of threads act independently.
                let warps = if count.is_multiple_of(self.lanes) { *count / self.lanes } else { 0 };
                let of = queues.len() as u32;
                for (index, queue) in (0..warps).zip(queues.iter().cycle()) {
                    let queue = *queue;
                    let dealt = (index / of, warps.div_ceil(of));
                    let (space, lanes, metered) = (self.space.clone(), self.lanes, self.metered);
                    let items = share(job.count, index, warps);
                    // Refused here rather than by a thread of the launch.
                    shared_queue::<EmulatedThread>(&queue)?;
                    threads.add(move || {
                        let warp = EmulatedThread::warp(&space, lanes, GROUP_WORDS);
                        if !metered {
                            return group(&warp, &queue, &job.until(deadline), items, dealt);
                        }
                        let warp = Metered::begin(warp, job.outcomes, job.count);
                        let exit = group(&warp, &queue, &job.until(deadline), items, dealt);
                        warp.report(index);
                        exit
                    })?;
                }
                let alone = if warps == 0 { *count } else { 0 };
                for (first, queue) in (0..alone).zip(queues.iter().cycle()) {
                    let shared = shared_queue::<EmulatedThread>(queue)?;
                    let (space, count) = (self.space.clone(), *count);
                    threads.add(move || {
                        run_shared(&EmulatedThread::new(&space), &shared, &job.until(deadline), first, count)
                    })?;
                }
            }
        }
        threads.start();
        Ok(Box::new(threads))
    }

    fn instruments(&self) -> Result<&dyn Instruments> {
        Ok(self)
    }

    fn controllers(&self) -> Result<&dyn ControllerHost> {
        Ok(self)
    }
}

impl Instruments for Emulated {
    fn metered(&self) -> Result<Arc<dyn Gpu>> {
        Ok(Arc::new(Self { metered: true, ..self.clone() }))
    }

    fn peek(&self, registers: &Doorbells, first: u32, count: u32, limit: Duration) -> Result<Vec<u32>> {
        peek::check(count)?;
        let first = registers.words(first, count)?;
        let notes = self.alloc(Place::PinnedHost, PeekNotes::BYTES)?;
        let (at, limit) = (PeekNotes(notes.addr()), KernelJob::nanos(limit));
        let read =
            move |view: &EmulatedThread, _| run_peek(view, |at| view.register(at), (first, count), at, limit);
        self.start(1, read)?.join()?;
        peek::values(&notes)
    }
}

impl ControllerHost for Emulated {
    fn hold(&self, _what: &'static str, _at: GpuAddr, _bytes: u64) -> Result<Hold> {
        Ok(Arc::new(()))
    }

    fn serve(&self, serving: Serving) -> Result<Box<dyn Resident>> {
        Ok(Box::new(Controllers::start(&self.space, self.lanes, &serving)?))
    }
}

/// A warp's part of a launch in owner mode.
fn owner<W: Warp<Addr = GpuAddr, Door = GpuAddr>>(
    warp: &W,
    queue: &KernelQueue,
    single: bool,
    job: &Job<W>,
    (first, end): (u32, u32),
) -> Exit {
    let queue = || queue.owned(queue.sq_door, queue.cq_door);
    let exit = match single {
        true => run_single(warp, queue, job, first, end),
        false => run_owner(warp, queue, job, first, end),
    };
    Exit::from_words(exit).unwrap_or(Exit::TimedOut)
}

/// A warp's part of a launch in shared mode.
fn group<W: Warp<Addr = GpuAddr, Door = GpuAddr>>(
    warp: &W,
    queue: &KernelQueue,
    job: &Job<W>,
    items: (u32, u32),
    dealt: (u32, u32),
) -> Exit {
    let exit = shared_queue(queue)
        .ok()
        .and_then(|queue| Exit::from_words(run_group(warp, &queue, job, items, dealt)));
    exit.unwrap_or(Exit::TimedOut)
}

fn shared_queue<M: Memory<Addr = GpuAddr, Door = GpuAddr>>(queue: &KernelQueue) -> Result<Shared<M>> {
    Shared::new(queue.rings(queue.sq_door, queue.cq_door), queue.control).ok_or_else(|| {
        Error::Launch(format!(
            "a shared queue needs rings of a power of two, not {} and {}",
            queue.sq_entries, queue.cq_entries
        ))
    })
}

/// The threads of a launch. None of them runs before all exist: a launch that cannot be started does nothing.
#[derive(Default)]
struct LaunchThreads {
    list: Vec<JoinHandle<Result<Exit>>>,
    gate: Arc<Gate>,
}

/// Opens once, either to let everyone through or no one.
#[derive(Default)]
struct Gate(Mutex<Option<bool>>, Condvar);

impl Gate {
    fn set(&self, go: bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(go);
        self.1.notify_all();
    }

    /// Whether to continue.
    fn pass(&self) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match *state {
                Some(go) => return go,
                None => state = self.1.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl LaunchThreads {
    fn add(&mut self, f: impl FnOnce() -> Exit + Send + 'static) -> Result<()> {
        let gate = self.gate.clone();
        let body = move || if gate.pass() { catch(f) } else { Ok(Exit::TimedOut) };
        let thread =
            std::thread::Builder::new().name("emulated gpu".into()).stack_size(256 << 10).spawn(body);
        let refuse = |e| Error::Launch(format!("no thread could be started for it: {e}"));
        self.list.push(thread.map_err(refuse)?);
        Ok(())
    }

    fn start(&self) {
        self.gate.set(true);
    }
}

impl Drop for LaunchThreads {
    fn drop(&mut self) {
        // Has no effect on threads that already run.
        if self.gate.0.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            self.gate.set(false);
        }
        // No thread may access memory after this returns.
        for thread in self.list.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Running for LaunchThreads {
    fn is_done(&self) -> bool {
        self.list.iter().all(JoinHandle::is_finished)
    }

    fn join(mut self: Box<Self>) -> Result<Vec<Exit>> {
        // Every thread is joined, even after one has failed: none may access memory after this returns.
        let exits: Vec<_> =
            self.list.drain(..).map(|thread| thread.join().unwrap_or_else(|e| Err(error(e)))).collect();
        exits.into_iter().collect()
    }
}

pub(crate) fn catch<R>(f: impl FnOnce() -> R) -> Result<R> {
    // A fault unwinds from inside the kernel; the memory that it leaves behind is no longer used.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).map_err(error)
}

fn error(payload: Box<dyn Any + Send>) -> Error {
    match payload.downcast::<Error>() {
        Ok(error) => *error,
        Err(other) => {
            let text = other.downcast_ref::<String>().cloned();
            let text = text.or_else(|| other.downcast_ref::<&str>().map(ToString::to_string));
            Error::Panicked(text.unwrap_or_default())
        }
    }
}
