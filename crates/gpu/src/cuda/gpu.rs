//! One NVIDIA GPU.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onehop_os::{DmaMemory, HostMem, Registers};
use onehop_proto::GpuAddr;

use super::arrays::CudaArrays;
use super::blocks::CudaBlocks;
use super::capabilities::{Capabilities, Consumer, Need, owner};
use super::context::{Context, Event};
use super::copier::CudaCopier;
use super::cufile::CuFile;
use super::dmabuf::{self, GpuDmaBuf, Span};
use super::driver::DriverCalls;
use super::host::{self, MappingKind};
use super::ipc::{self, Exported, Ticket};
use super::kernels::{self, KernelCall, Kernels};
use super::launch::{LaunchHold, Launched, RunningLaunch, Used};
use super::live::{MemoryHold, Touched};
use super::memory::{self, DeviceKind, DeviceMemory};
use super::module::Function;
use super::ranges::CudaRanges;
use super::resident::PersistentKernel;
use super::rig::{self, RigCode};
use super::stream::Stream;
use super::{Device, peek, registers};
use crate::controllers::{ControllerHost, Serving};
use crate::copier::AtOnce;
use crate::region::AddressSpace;
use crate::relay::Activity;
use crate::{
    ArrayKernels, BlockKernels, Copier, Doorbells, Error, Gpu, GpuFiles, Instruments, KernelJob, Launch,
    PeerMemory, Place, RangeCopier, Region, Resident, Result, Running, SharedRegion,
};

/// All bytes of a memory of any length.
const ALL: Range<usize> = 0..usize::MAX;
/// Preparing a queue is a short kernel.
const PREPARE: Duration = Duration::from_secs(5);
/// How long to wait for dropped memory before counting free memory.
const SETTLE: Duration = Duration::from_secs(1);
/// Launch memory of at most this size is cached for the next launch: registering host memory costs more than most
/// launches.
const KEPT_BYTES: usize = 256 << 10;
const KEPT: usize = 8;

/// One NVIDIA GPU. Clones are the same GPU.
#[derive(Clone)]
pub struct CudaGpu(pub(super) Arc<CudaGpuInner>);

pub(super) struct CudaGpuInner {
    // Memory goes before the streams, and both before the context.
    kept: Mutex<Vec<Region>>,
    kernels: Mutex<Option<Arc<Kernels>>>,
    range_kernel: Mutex<Option<Function>>,
    pub(super) rig: Mutex<Option<RigCode>>,
    pub(super) copies: Arc<Stream>,
    pub(super) context: Arc<Context>,
    device: Device,
    name: String,
    running: Arc<Activity>,
    other_code: Option<String>,
    /// Its kernels take times.
    metered: bool,
    /// The GPU whose controllers serve this one's queues, if it is another.
    pub(super) servant: Option<CudaGpu>,
}

impl CudaGpu {
    pub(super) fn new(context: Arc<Context>, device: Device, other_code: Option<String>) -> Result<Self> {
        Self::with(context, device, (other_code, false), None, Arc::default())
    }

    fn with(
        context: Arc<Context>,
        device: Device,
        (other_code, metered): (Option<String>, bool),
        servant: Option<CudaGpu>,
        running: Arc<Activity>,
    ) -> Result<Self> {
        let copies = Arc::new(Stream::new(&context)?);
        let name = format!("{} at {}", device.name, device.pci);
        Ok(Self(Arc::new(CudaGpuInner {
            kept: Mutex::default(),
            kernels: Mutex::default(),
            range_kernel: Mutex::default(),
            rig: Mutex::default(),
            copies,
            context,
            device,
            name,
            running,
            other_code,
            metered,
            servant,
        })))
    }

    /// The same GPU, with its queues served by controllers on another one, across the link between them: what
    /// [`ControllerHost::serve`] and [`CudaGpu::start_rig`] start runs there. They reach [`DeviceKind::Plain`] memory of this one,
    /// and host memory.
    ///
    /// # Errors
    /// When the other GPU does not reach this one's memory.
    pub fn served_by(&self, other: &Self) -> Result<Self> {
        if other.0.device.ordinal != self.0.device.ordinal {
            other.0.context.reach(&self.0.context)?;
        }
        let code = (self.0.other_code.clone(), self.0.metered);
        let (context, device) = (self.0.context.clone(), self.0.device.clone());
        Self::with(context, device, code, Some(other.clone()), Arc::default())
    }

    /// The GPU on which controllers run.
    #[must_use]
    pub fn servant(&self) -> &Self {
        self.0.servant.as_ref().unwrap_or(self)
    }

    /// Its identity and properties.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its capabilities.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.0.device.can
    }

    /// New memory of the GPU, zeroed.
    ///
    /// # Errors
    /// When memory is short, or this kind is not supported.
    pub fn alloc_device(&self, kind: DeviceKind, bytes: usize) -> Result<Region> {
        self.device_memory(kind, bytes, &[ALL])
    }

    /// Memory as from [`Self::alloc_device`], zeroed only in these ranges.
    fn device_memory(&self, kind: DeviceKind, bytes: usize, blank: &[Range<usize>]) -> Result<Region> {
        let on = (&self.0.context, &self.0.copies);
        let memory = DeviceMemory::new(on.0, on.1, self.capabilities(), kind, bytes)?;
        memory.zero(blank)?;
        let region = self.0.context.region(GpuAddr(memory.at), memory);
        // The allocation is longer; the region is the requested size in pages, as for every other kind of memory.
        region.slice(0..bytes.max(1).next_multiple_of(4096))
    }

    /// Memory of this GPU that other code in this process has allocated (PyTorch, `cudaMalloc`): `bytes` from `at` on.
    /// `owner` is dropped when neither the result, its clones nor the GPU use it any more: usually by the thread that
    /// drops the last of these, or by one of onehop's if a copy has outlasted its limit.
    ///
    /// # Errors
    /// When there is no allocation, or the range does not lie within it.
    ///
    /// # Safety
    /// The memory is not freed before `owner` is dropped. If the owner does not ensure that, it is not freed while
    /// a call, a kernel or a copier uses the result or a clone of it, and after an error not before
    /// [`Self::wait_for_all`] has succeeded.
    pub unsafe fn borrow(
        &self,
        at: GpuAddr,
        bytes: usize,
        owner: impl Send + Sync + 'static,
    ) -> Result<Region> {
        let memory = DeviceMemory::borrowed(&self.0.context, &self.0.copies, (at.0, bytes), Box::new(owner))?;
        Ok(self.0.context.region(at, memory))
    }

    /// The GPU's memory: free bytes and total.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub fn memory_info(&self) -> Result<(u64, u64)> {
        // Dropped memory counts as free.
        self.0.context.driver.reclaimer.settle(SETTLE);
        let (mut free, mut all) = (0, 0);
        // SAFETY: both results live across the call.
        self.0.context.call("asking for free GPU memory", |driver| unsafe {
            driver.memory_info(&mut free, &mut all)
        })?;
        Ok((free as u64, all as u64))
    }

    /// Exports a region of GPU memory as a dma-buf, with the region's offset in it. With `pcie`, importers use PCIe if
    /// the GPU has a choice; the result says whether they do, and why not.
    ///
    /// # Errors
    /// When the region is host memory, or the driver refuses, with a fix.
    pub fn export_dma_buf(&self, region: &Region, span: Span, pcie: bool) -> Result<GpuDmaBuf> {
        if region.host().is_some() {
            return Err(Error::NotSupported {
                what: "a dma-buf of host memory".into(),
                why: "make it of a memfd by /dev/udmabuf instead".into(),
            });
        }
        self.0.context.check_own("a dma-buf of GPU memory", region)?;
        let export = if pcie { dmabuf::export_pcie } else { dmabuf::export };
        export(&self.0.context, region.addr().0, region.len(), span)
    }

    /// Makes a ticket for a region, for another process.
    ///
    /// # Errors
    /// When the region is host memory, or the driver refuses.
    pub fn export_ipc(&self, region: &Region) -> Result<Exported> {
        self.0.context.check_own("sharing memory with another process", region)?;
        ipc::export(&self.0.context, self.0.device.uuid, region)
    }

    /// Opens the memory of another process's ticket; `fd` is the descriptor that came with it, if any.
    ///
    /// # Errors
    /// When it is not the intended memory, or the driver refuses.
    pub fn import_ipc(&self, ticket: &Ticket, fd: Option<&OwnedFd>) -> Result<Region> {
        let on = (&self.0.context, &self.0.copies);
        ipc::import(on, (self.0.device.uuid, self.capabilities()), ticket, fd)
    }

    /// Whether a ticket of this process still refers to the memory of a region.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub fn ticket_is_current(&self, ticket: &Ticket, region: &Region) -> Result<bool> {
        ipc::is_current(&self.0.context, ticket, region)
    }

    /// Waits for everything that this process has started on the GPU: its writes are in memory then.
    ///
    /// # Errors
    /// When the GPU has failed, or is not idle within a minute.
    pub fn wait_for_all(&self) -> Result<()> {
        memory::wait_for_all(&self.0.context)
    }

    /// Dropped memory that the driver refused to free: how many times, and the last reason. It stays allocated until
    /// the process ends.
    #[must_use]
    pub fn refusals(&self) -> (u64, Option<String>) {
        let refusals = self.0.context.driver.reclaimer.refusals();
        (refusals.count, refusals.last)
    }

    /// Does the host's part before bytes that another device wrote into GPU memory are used: see
    /// [`Visibility::needed`](super::Visibility::needed).
    ///
    /// # Errors
    /// When it is not possible, or the GPU has failed.
    pub fn flush_remote_writes(&self, need: Need) -> Result<()> {
        self.capabilities().visibility.satisfy(&self.0.context, need)
    }

    /// Registers per thread of the kernel for such a launch.
    ///
    /// # Errors
    /// When the kernels cannot be compiled for this GPU.
    pub fn kernel_registers(&self, launch: &Launch) -> Result<u32> {
        self.kernels()?.registers(launch)
    }

    /// # Safety
    /// As for [`Function::launch`](super::module::Function::launch).
    pub(super) unsafe fn start(
        &self,
        what: &str,
        call: &KernelCall<'_>,
        limit: Duration,
        used: Used,
    ) -> Result<RunningLaunch> {
        let stream = Stream::new(&self.0.context)?;
        // SAFETY: the caller's contract is the same.
        unsafe { self.start_on(stream, what, call, limit, used) }
    }

    /// # Safety
    /// As for [`Function::launch`](super::module::Function::launch).
    pub(super) unsafe fn start_on(
        &self,
        stream: Stream,
        what: &str,
        call: &KernelCall<'_>,
        limit: Duration,
        used: Used,
    ) -> Result<RunningLaunch> {
        let (begun, done) = (Event::new(&self.0.context)?, Event::new(&self.0.context)?);
        let (stream, function) = (Arc::new(stream), call.function.clone());
        let awake = self.0.running.kernel();
        begun.record(&stream)?;
        // SAFETY: the caller vouches for the arguments; the result holds the memory until the kernel has ended.
        let launched = unsafe { call.function.launch(&stream, call.shape, &call.args) };
        let held = LaunchHold { stream, function, used, awake };
        RunningLaunch::new(what, (begun, done), (launched, limit), held)
    }

    fn kernels(&self) -> Result<Arc<Kernels>> {
        let mut loaded = self.0.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = &*loaded {
            return Ok(kernels.clone());
        }
        let kernels = Arc::new(Kernels::load(&self.0.context, self.0.other_code.as_deref())?);
        *loaded = Some(kernels.clone());
        Ok(kernels)
    }

    /// Memory for a launch's parameters and exits: pinned, so that neither side needs a copy.
    fn launch_memory(&self, bytes: usize) -> Result<Region> {
        let mut kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|region| region.len() >= bytes) {
            return Ok(kept.swap_remove(at));
        }
        drop(kept);
        let memory = HostMem::touched(bytes.next_multiple_of(16 << 10))?;
        // Its kernels trust its content: no other kernel gets its address.
        self.register(Place::PinnedHost, memory).map(|(region, _)| region)
    }

    /// Registers host memory with the GPU; returns its region, and what keeps it registered.
    fn register(&self, place: Place, mem: HostMem) -> Result<(Region, MemoryHold)> {
        let (context, can) = (&self.0.context, self.capabilities());
        let registered = match host::register(context, can, &mem, MappingKind::Memory) {
            // A BAR is not memory that can be locked; a simulated one is.
            Err(_) if place == Place::Cmb => host::register(context, can, &mem, MappingKind::Io),
            other => other,
        };
        let (registration, at) = registered?;
        let hold: MemoryHold = Arc::new(registration);
        let region = Region::on_host(place, GpuAddr(at), mem, hold.clone()).in_space(AddressSpace::Cuda);
        Ok((region, hold))
    }

    fn write_launch(&self, launch: &Launch, count: usize) -> Result<(Region, kernels::LaunchLayout)> {
        let queues = kernels::queue_bytes(launch);
        let layout = kernels::layout(queues.len(), count);
        let memory = self.launch_memory(layout.bytes)?;
        memory.write(0, queues)?;
        memory.fill(layout.exits, kernels::exit_bytes(count), 0)?;
        Ok((memory, layout))
    }
}

fn keep(inner: &CudaGpuInner, memory: Region) {
    let mut kept = inner.kept.lock().unwrap_or_else(PoisonError::into_inner);
    if memory.len() <= KEPT_BYTES && kept.len() < KEPT {
        kept.push(memory);
    }
}

impl Gpu for CudaGpu {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn simulated(&self) -> bool {
        false
    }

    fn load_kernels(&self) -> Result<()> {
        self.0.copies.marker()?;
        self.kernels().map(|_| ())
    }

    fn orders_device_writes(&self, at: GpuAddr) -> Result<()> {
        let CudaGpuInner { context, device, .. } = &*self.0;
        let (visibility, consumer, of) = match owner(context, at.0)? {
            None => return Ok(()),
            Some(own) if own == context.device => {
                (device.can.visibility, Consumer::RunningKernel, self.name().to_owned())
            }
            Some(other) => {
                let read = |calls: &DriverCalls| Ok(Capabilities::read(calls, device.can.driver, other));
                let can = context.call("asking another GPU what it orders", read)?;
                (can.visibility, Consumer::OtherDevice, format!("GPU {other}, which owns the memory,"))
            }
        };
        match visibility.needed(consumer) {
            Need::Nothing | Need::AcquireOrFence => Ok(()),
            _ => Err(Error::NotSupported {
                what: "waiting in a kernel for what another device writes into GPU memory".into(),
                why: format!("{of} does not order such writes for kernels that run on {}", self.name()),
            }),
        }
    }

    fn alloc(&self, place: Place, bytes: usize) -> Result<Region> {
        match place {
            Place::Vram => self.alloc_device(DeviceKind::Plain, bytes),
            Place::PinnedHost => self.adopt(place, HostMem::touched(bytes)?),
            Place::Cmb => Err(Error::NotSupported {
                what: "allocating a controller's memory".into(),
                why: "it is the controller's: adopt a part of its window".into(),
            }),
        }
    }

    fn alloc_private(&self, bytes: usize) -> Result<Region> {
        let on = (&self.0.context, &self.0.copies);
        let memory = DeviceMemory::new(on.0, on.1, self.capabilities(), DeviceKind::Plain, bytes)?;
        memory.zero(&[ALL])?;
        self.0.context.unlisted(GpuAddr(memory.at), memory).slice(0..bytes.max(1).next_multiple_of(4096))
    }

    fn adopt(&self, place: Place, mem: HostMem) -> Result<Region> {
        if place == Place::Vram {
            return Err(Error::NotSupported {
                what: "taking host memory for GPU memory".into(),
                why: "this GPU has memory of its own; use Place::PinnedHost".into(),
            });
        }
        let (region, hold) = self.register(place, mem)?;
        self.0.context.driver.live.add(region.addr(), region.len(), AddressSpace::Cuda, &hold);
        Ok(region)
    }

    fn arena(&self, bytes: usize) -> Result<Region> {
        self.arena_to_fill(bytes, &[ALL])
    }

    fn arena_to_fill(&self, bytes: usize, blank: &[Range<usize>]) -> Result<Region> {
        // The other kind of memory is synchronous: a copy to it would end before the call returns.
        let kind = if self.capabilities().vmm { DeviceKind::Exportable } else { DeviceKind::Plain };
        self.device_memory(kind, bytes, blank)
    }

    fn copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>> {
        // Between two places in host memory the copy engine has nothing to do.
        let (what, device) = match (from.host(), to.host()) {
            (Some(_), Some(_)) => return Ok(Box::new(AtOnce::new(from.clone(), to.clone()))),
            (Some(_), None) => ("copying to GPU memory", to),
            (None, Some(_)) => ("copying from GPU memory", from),
            (None, None) => {
                let why = "the CPU reaches neither of them".into();
                return Err(Error::NotSupported { what: "copying between two memories".into(), why });
            }
        };
        self.0.context.check_copied(what, device)?;
        Ok(Box::new(CudaCopier::new(&self.0.context, from, to)?))
    }

    fn range_copier(&self, kernel_below: usize) -> Result<Box<dyn RangeCopier>> {
        let context = &self.0.context;
        let mut kernel = None;
        if kernel_below > 0 {
            let mut loaded = self.0.range_kernel.lock().unwrap_or_else(PoisonError::into_inner);
            if loaded.is_none() {
                // Without it, the copy engine copies everything.
                *loaded = CudaRanges::load_kernel(context).ok();
            }
            kernel = loaded.clone().map(|kernel| (kernel, kernel_below));
        }
        Ok(Box::new(CudaRanges::new(context, kernel)?))
    }

    fn peers(&self) -> Result<&dyn PeerMemory> {
        Ok(self)
    }

    fn free_memory(&self) -> Result<Option<u64>> {
        Ok(Some(self.memory_info()?.0))
    }

    fn files(&self) -> Result<Arc<dyn GpuFiles>> {
        Ok(Arc::new(CuFile::load(Some(self.0.context.clone()), None)?))
    }

    fn block_kernels(&self) -> Result<Box<dyn BlockKernels>> {
        Ok(Box::new(CudaBlocks::load(&self.0.context)?))
    }

    fn array_kernels(&self) -> Result<Box<dyn ArrayKernels>> {
        Ok(Box::new(CudaArrays::load(self)?))
    }

    fn map_registers(&self, regs: Arc<dyn Registers>) -> Result<Doorbells> {
        registers::map(&self.0.context, self.capabilities(), &self.0.running, regs)
    }

    fn prepare(&self, launch: &Launch) -> Result<()> {
        kernels::count(launch)?;
        let held = self.0.context.hold(&kernels::prepared(launch)?)?;
        let loaded = self.kernels()?;
        let (memory, _) = self.write_launch(launch, 0)?;
        let call = loaded.prepare(launch, memory.addr().0);
        let used = Used { memory: Some(memory), _held: held };
        // SAFETY: the arguments are those of kernels.rs; the queues' memory is live, and held until the kernel has
        // ended. The kernel only takes identifiers from it.
        let mut work = unsafe { self.start("preparing queues", &call, PREPARE, used) }?;
        if let Some(memory) = work.wait()? {
            keep(&self.0, memory);
        }
        Ok(())
    }

    fn expect_kernels(&self) -> Box<dyn Send + Sync> {
        Box::new(self.0.running.kernel())
    }

    fn launch(&self, launch: &Launch, job: &KernelJob) -> Result<Box<dyn Running>> {
        let count = kernels::count(launch)?;
        let held = self.0.context.hold(&kernels::touched(launch, job, self.0.metered)?)?;
        let loaded = self.kernels()?;
        let (memory, layout) = self.write_launch(launch, count)?;
        let call = loaded.run(launch, job, memory.addr().0, &layout)?;
        let used = Used { memory: Some(memory), _held: held };
        // SAFETY: the arguments are those of kernels.rs; rings, works and outcomes are live, and held until the kernel
        // has ended. The content of control memory is checked by the kernel against the rings before it becomes an
        // address.
        let work = unsafe {
            self.start("a launch of onehop's kernels", &call, Duration::from_nanos(job.limit), used)
        }?;
        let inner = self.0.clone();
        let return_memory = Box::new(move |memory| keep(&inner, memory));
        Ok(Box::new(Launched { work, exits_at: layout.exits, count, return_memory }))
    }

    fn instruments(&self) -> Result<&dyn Instruments> {
        Ok(self)
    }

    fn controllers(&self) -> Result<&dyn ControllerHost> {
        Ok(self)
    }
}

impl Instruments for CudaGpu {
    fn metered(&self) -> Result<Arc<dyn Gpu>> {
        let CudaGpuInner { context, device, servant, running, .. } = &*self.0;
        let code = (Some(onehop_device::METER_PTX.text()), true);
        // Doorbell relays watch its kernels like ours.
        let metered = Self::with(context.clone(), device.clone(), code, servant.clone(), running.clone())?;
        metered.load_kernels()?;
        Ok(Arc::new(metered))
    }

    fn peek(&self, registers: &Doorbells, first: u32, count: u32, limit: Duration) -> Result<Vec<u32>> {
        peek::run(self, registers, (first, count), limit)
    }
}

impl ControllerHost for CudaGpu {
    fn load(&self) -> Result<()> {
        self.0.copies.marker()?;
        self.rig().map(|_| ())
    }

    fn hold(&self, what: &'static str, at: GpuAddr, bytes: u64) -> Result<MemoryHold> {
        let held = self.servant().0.context.hold(&[Touched { what, at, bytes }])?;
        Ok(Arc::new(held))
    }

    fn serve(&self, serving: Serving) -> Result<Box<dyn Resident>> {
        let code = self.rig()?;
        let Serving { pairs, count, limit, memory } = serving;
        let reached = |region| self.servant().0.context.check("running controllers on the GPU", region);
        memory.iter().try_for_each(reached)?;
        let held: Vec<MemoryHold> = memory.into_iter().map(|region| Arc::new(region) as MemoryHold).collect();
        // SAFETY: only `Pairs` makes a `Serving`: its GPU, which is this one or forwards to this one, has held what
        // the descriptors refer to, and `Pairs` keeps that until the result has been dropped. A GPU that forwards
        // this is trusted to forward `hold` as well: the trait says so.
        let start = || unsafe { self.servant().start_list(&code, &rig::SERVE, (pairs, count), limit, held) };
        Ok(Box::new(PersistentKernel::start(&self.0.context.driver, start)?))
    }
}

impl PeerMemory for CudaGpu {
    fn alloc_shared(&self, bytes: usize, blank: &[Range<usize>]) -> Result<Region> {
        self.arena_to_fill(bytes, blank)
    }

    fn share(&self, region: &Region) -> Result<SharedRegion> {
        let Exported { ticket, fd } = self.export_ipc(region)?;
        Ok(SharedRegion { ticket, fd })
    }

    fn open_shared(&self, shared: &SharedRegion) -> Result<Region> {
        let on = (&self.0.context, &self.0.copies);
        ipc::import_of_any(on, (self.0.device.uuid, self.capabilities()), &shared.ticket, shared.fd.as_ref())
    }

    fn peer_copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>> {
        let what = "copying between GPU memory of two processes";
        self.0.context.check_own(what, to)?;
        if from.host().is_none() {
            self.0.context.check_own(what, from)?;
        }
        Ok(Box::new(CudaCopier::new(&self.0.context, from, to)?))
    }
}
