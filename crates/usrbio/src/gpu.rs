//! GPU memory of a program: allocated or adopted, exported to other processes, and imported by them.
//!
//! NVIDIA memory is identified by a [`Ticket`], with the range within the allocation, and by the file descriptor of the
//! allocation if it has one. A dma-buf is added for devices that access the memory directly. For the emulated GPU, a
//! memfd takes their place.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use onehop_gpu::cuda::{Consumer, Cuda, CudaGpu, DeviceKind, Need, Span, Ticket};
use onehop_gpu::{Emulated, Gpu, HeldSpace, Place, Region};
use onehop_os::{DmaBuf, HostMem};
use onehop_proto::GpuAddr;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::{Error, Result};

/// The identifier of the emulated GPU.
const EMULATED: [u8; 16] = *b"onehop emulated.";
const PAGE: usize = 4096;
/// Without these seals, a memfd could be truncated while other processes have it mapped.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);
/// The file system of memfds of ordinary pages.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// The GPUs of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GpuChoice {
    /// Those that CUDA shows.
    #[default]
    Cuda,
    /// Only the emulated one, as number 0.
    Emulated,
    /// No GPUs.
    Off,
}

/// The GPUs of a process, opened when they are first used.
pub struct Gpus {
    mode: GpuChoice,
    cuda: OnceLock<std::result::Result<Cuda, String>>,
    open: Mutex<HashMap<u32, Arc<AnyGpu>>>,
    emulated: OnceLock<Arc<AnyGpu>>,
}

impl Gpus {
    /// Opens no GPU yet.
    #[must_use]
    pub fn new(mode: GpuChoice) -> Self {
        Self { mode, cuda: OnceLock::new(), open: Mutex::default(), emulated: OnceLock::new() }
    }

    /// Whether a forked child may use these. CUDA does not work after a fork, and must be initialized again.
    #[must_use]
    pub fn outlive_a_fork(&self) -> bool {
        self.mode != GpuChoice::Cuda
    }

    /// Locks out other threads from the emulated GPU's allocations while the result lives: see `Files::hold`.
    #[must_use]
    pub fn hold(&self) -> Option<HeldGpus<'_>> {
        if self.mode != GpuChoice::Emulated {
            return None;
        }
        // Initialized here if necessary, so that a child does not find it half initialized.
        match &**self.emulated.get_or_init(Self::new_emulated) {
            AnyGpu::Emulated(gpu) => {
                let made = gpu.made();
                Some(HeldGpus { _space: gpu.gpu.hold(), _made: made })
            }
            AnyGpu::Cuda(_) => None,
        }
    }

    fn new_emulated() -> Arc<AnyGpu> {
        Arc::new(AnyGpu::Emulated(EmulatedGpu::default()))
    }

    /// The number of GPUs.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self.mode {
            GpuChoice::Off => 0,
            GpuChoice::Emulated => 1,
            GpuChoice::Cuda => self.cuda().and_then(|cuda| Ok(cuda.devices()?.len() as u32)).unwrap_or(0),
        }
    }

    fn cuda(&self) -> Result<&Cuda> {
        let loaded = self.cuda.get_or_init(|| {
            Cuda::load().map_err(|error| match error {
                onehop_gpu::Error::NoCuda { why } => why,
                other => other.to_string(),
            })
        });
        loaded.as_ref().map_err(|why| onehop_gpu::Error::NoCuda { why: why.clone() }.into())
    }

    fn emulated(&self) -> Arc<AnyGpu> {
        self.emulated.get_or_init(Self::new_emulated).clone()
    }

    /// The GPU with this number.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(&self, device: i32) -> Result<Arc<AnyGpu>> {
        let none = |why: &str| Error::NoDevice { device, why: why.into() };
        let number = u32::try_from(device).map_err(|_| none("the number must not be negative"))?;
        match self.mode {
            GpuChoice::Off => Err(none("HF3FS_GDR_ENABLED switches GPU buffers off")),
            GpuChoice::Emulated if number == 0 => Ok(self.emulated()),
            GpuChoice::Emulated => Err(none("there is one emulated GPU, number 0")),
            GpuChoice::Cuda => self.open_cuda(number),
        }
    }

    fn open_cuda(&self, number: u32) -> Result<Arc<AnyGpu>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&number) {
            return Ok(device.clone());
        }
        let gpu = self.cuda()?.open(&number.to_string())?;
        let device = Arc::new(AnyGpu::Cuda(gpu));
        open.insert(number, device.clone());
        Ok(device)
    }

    /// Opens memory that another process exports.
    ///
    /// # Errors
    /// When it is not on a GPU of this process, or does not match the offer.
    pub fn accept(&self, offer: &Offer) -> Result<(Arc<AnyGpu>, Region)> {
        if offer.ticket.gpu == EMULATED {
            if self.mode != GpuChoice::Emulated {
                let why =
                    "this process has no emulated GPU (HF3FS_GDR_ENABLED=emulated gives it one, for tests)";
                return Err(Error::NoDevice { device: -1, why: why.into() });
            }
            let device = self.emulated();
            let region = match &*device {
                AnyGpu::Emulated(gpu) => gpu.accept(offer)?,
                AnyGpu::Cuda(_) => return Err(Error::Broken("the emulated GPU is not emulated".into())),
            };
            return Ok((device, region));
        }
        let devices = self.cuda()?.devices()?;
        let known = devices.iter().find(|device| device.uuid == offer.ticket.gpu);
        let number = known.map(|device| device.ordinal).ok_or_else(|| Error::NoDevice {
            device: -1,
            why: "the memory is on a GPU that is not visible to this process (CUDA_VISIBLE_DEVICES)".into(),
        })?;
        let device = self.open_cuda(number)?;
        let region = match &*device {
            AnyGpu::Cuda(gpu) => gpu.import_ipc(&offer.ticket, offer.fd.as_ref())?,
            AnyGpu::Emulated(_) => return Err(Error::Broken("a GPU of CUDA is emulated".into())),
        };
        Ok((device, region))
    }
}

/// See [`Gpus::hold`].
pub struct HeldGpus<'a> {
    _space: HeldSpace<'a>,
    _made: MutexGuard<'a, Vec<GpuAllocation>>,
}

/// A GPU.
pub enum AnyGpu {
    /// NVIDIA's.
    Cuda(CudaGpu),
    /// Emulated by CPU threads.
    Emulated(EmulatedGpu),
}

impl AnyGpu {
    /// The operations common to all GPUs.
    #[must_use]
    pub fn gpu(&self) -> &dyn Gpu {
        match self {
            Self::Cuda(gpu) => gpu,
            Self::Emulated(gpu) => &gpu.gpu,
        }
    }

    /// The same, shared.
    #[must_use]
    pub fn shared(&self) -> Arc<dyn Gpu> {
        match self {
            Self::Cuda(gpu) => Arc::new(gpu.clone()),
            Self::Emulated(gpu) => Arc::new(gpu.gpu.clone()),
        }
    }

    /// The UUID.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        match self {
            Self::Cuda(gpu) => gpu.device().uuid,
            Self::Emulated(_) => EMULATED,
        }
    }

    /// Makes another device's writes to its memory visible to kernels.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub fn sync_remote_writes(&self) -> Result<()> {
        let Self::Cuda(gpu) = self else { return Ok(()) };
        match gpu.capabilities().visibility.needed(Consumer::RunningKernel) {
            Need::Nothing | Need::AcquireOrFence => Ok(()),
            need => Ok(gpu.flush_remote_writes(need)?),
        }
    }
}

/// Memory that is exported to another process.
#[derive(Debug)]
pub struct Offer {
    /// The ticket.
    pub ticket: Ticket,
    /// The descriptor of the allocation, if it is shared by descriptor.
    pub fd: Option<OwnedFd>,
    /// The same memory for devices, if the GPU's driver exports it.
    pub dma_buf: Option<DmaBuf>,
}

impl Offer {
    /// The number of descriptors.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        u64::from(self.fd.is_some()) + u64::from(self.dma_buf.is_some())
    }
}

/// GPU memory of this process.
pub struct SharedGpuMemory {
    device: Arc<AnyGpu>,
    region: Region,
    ticket: Ticket,
    fd: Option<OwnedFd>,
    /// Whether it was allocated here, and is freed on drop.
    own: bool,
}

impl Drop for SharedGpuMemory {
    fn drop(&mut self) {
        if let (AnyGpu::Emulated(gpu), true) = (&*self.device, self.own) {
            gpu.free(self.region.addr());
        }
    }
}

impl SharedGpuMemory {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// When the GPU has too little memory, or cannot share it.
    pub fn create(device: &Arc<AnyGpu>, bytes: usize) -> Result<Self> {
        let region = match &**device {
            AnyGpu::Emulated(gpu) => gpu.alloc(bytes)?,
            AnyGpu::Cuda(gpu) => {
                let kind = if gpu.capabilities().vmm { DeviceKind::Exportable } else { DeviceKind::Plain };
                gpu.alloc_device(kind, bytes)?.slice(0..bytes)?
            }
        };
        let mut this = Self::of(device, region)?;
        this.own = true;
        Ok(this)
    }

    /// Wraps memory that other code allocated: see [`CudaGpu::borrow`].
    ///
    /// # Errors
    /// When it cannot be shared.
    pub fn of(device: &Arc<AnyGpu>, region: Region) -> Result<Self> {
        let (ticket, fd) = match &**device {
            AnyGpu::Emulated(gpu) => gpu.name(&region)?,
            AnyGpu::Cuda(gpu) => {
                let exported = gpu.export_ipc(&region)?;
                (exported.ticket, exported.fd)
            }
        };
        Ok(Self { device: device.clone(), region, ticket, fd, own: false })
    }

    /// Wraps memory of another process that was opened by [`Gpus::accept`].
    #[must_use]
    pub fn imported(device: &Arc<AnyGpu>, region: Region, offer: Offer) -> Self {
        Self { device: device.clone(), region, ticket: offer.ticket, fd: offer.fd, own: false }
    }

    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The GPU.
    #[must_use]
    pub fn device(&self) -> &Arc<AnyGpu> {
        &self.device
    }

    /// Whether the allocation is still the same. An address may be freed and reused.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub fn is_current(&self) -> Result<bool> {
        match &*self.device {
            AnyGpu::Emulated(gpu) => Ok(gpu.is_current(&self.ticket, &self.region)),
            // At a freed address the driver reports an error.
            AnyGpu::Cuda(gpu) => Ok(gpu.ticket_is_current(&self.ticket, &self.region).unwrap_or(false)),
        }
    }

    /// Makes writes by this process's kernels visible to others, or writes by others visible to its kernels.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub fn sync(&self, written_by_us: bool) -> Result<()> {
        let AnyGpu::Cuda(gpu) = &*self.device else { return Ok(()) };
        if written_by_us {
            return Ok(gpu.wait_for_all()?);
        }
        self.device.sync_remote_writes()
    }

    /// Exports it to another process.
    ///
    /// # Errors
    /// When the process has too many files open.
    pub fn offer(&self) -> Result<Offer> {
        let fd = self.fd.as_ref().map(OwnedFd::try_clone).transpose();
        let fd = fd.map_err(|e| Error::file("dup", "GPU memory", e))?;
        let dma_buf = match &*self.device {
            AnyGpu::Cuda(gpu) => gpu.export_dma_buf(&self.region, Span::Pages, false).ok().map(Into::into),
            AnyGpu::Emulated(_) => None,
        };
        Ok(Offer { ticket: self.ticket, fd, dma_buf })
    }
}

/// The emulated GPU, with memory that other processes can open.
#[derive(Default)]
pub struct EmulatedGpu {
    gpu: Emulated,
    made: Mutex<Vec<GpuAllocation>>,
    next: AtomicU64,
}

/// An allocation.
struct GpuAllocation {
    start: GpuAddr,
    region: Region,
    file: File,
    number: u64,
}

impl GpuAllocation {
    fn offset(&self, at: GpuAddr, bytes: usize) -> Option<usize> {
        let offset = at.0.checked_sub(self.start.0)? as usize;
        (offset <= self.region.len() && bytes <= self.region.len() - offset).then_some(offset)
    }
}

impl EmulatedGpu {
    fn made(&self) -> MutexGuard<'_, Vec<GpuAllocation>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// When there is too little memory.
    pub fn alloc(&self, bytes: usize) -> Result<Region> {
        let file = |e: rustix::io::Errno| Error::file("memfd_create", "emulated GPU memory", e);
        let fd = rustix::fs::memfd_create(
            "onehop emulated GPU memory",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        );
        let fd = fd.map_err(file)?;
        let whole =
            bytes.max(1).checked_next_multiple_of(PAGE).ok_or(Error::Argument("too much memory".into()))?;
        rustix::fs::ftruncate(&fd, whole as u64).map_err(file)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(file)?;
        let file = File::from(fd);
        let region = self.gpu.adopt(Place::Vram, HostMem::of_file(&file, whole)?)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let made = GpuAllocation { start: region.addr(), region: region.clone(), file, number };
        self.made().push(made);
        Ok(region.slice(0..bytes)?)
    }

    /// Frees memory by its first address, for programs that have only addresses. Returns whether it was allocated.
    pub fn free(&self, at: GpuAddr) -> bool {
        let mut made = self.made();
        let before = made.len();
        made.retain(|one| one.start != at);
        before != made.len()
    }

    /// The memory at an address, if it was allocated here.
    ///
    /// # Errors
    /// When it is not in an allocation.
    pub fn at(&self, at: GpuAddr, bytes: usize) -> Result<Region> {
        let made = self.made();
        let found = made.iter().find_map(|one| Some((one, one.offset(at, bytes)?)));
        let (one, offset) = found.ok_or_else(|| {
            Error::Argument(format!(
                "the emulated GPU has no allocation that contains {bytes} bytes at {at:?}"
            ))
        })?;
        Ok(one.region.slice(offset..offset + bytes)?)
    }

    fn name(&self, region: &Region) -> Result<(Ticket, Option<OwnedFd>)> {
        let made = self.made();
        let found = made.iter().find_map(|one| Some((one, one.offset(region.addr(), region.len())?)));
        let (one, offset) =
            found.ok_or_else(|| Error::Argument("this memory was not allocated here".into()))?;
        let file = one.file.try_clone().map_err(|e| Error::file("dup", "emulated GPU memory", e))?;
        let ticket = Ticket {
            by_fd: true,
            gpu: EMULATED,
            allocation: one.region.len() as u64,
            offset: offset as u64,
            bytes: region.len() as u64,
            buffer: one.number,
            handle: [0; 64],
        };
        Ok((ticket, Some(file.into())))
    }

    fn is_current(&self, ticket: &Ticket, region: &Region) -> bool {
        let made = self.made();
        made.iter()
            .any(|one| one.number == ticket.buffer && one.offset(region.addr(), region.len()).is_some())
    }

    /// Opens memory that another process created.
    fn accept(&self, offer: &Offer) -> Result<Region> {
        let foreign = |why: &str| Error::Gpu(onehop_gpu::Error::Foreign { why: why.into() });
        let fd = offer.fd.as_ref().ok_or_else(|| foreign("its file descriptor is missing"))?;
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SEALS) {
            return Err(foreign("it can be truncated by its creator: it is not a sealed memfd"));
        }
        // Huge pages that were punched out may be unavailable when they are touched again, which raises SIGBUS.
        if rustix::fs::fstatfs(fd).map(|system| system.f_type).ok() != Some(TMPFS_MAGIC) {
            return Err(foreign("it is a memfd of huge pages, which may be taken away"));
        }
        let ticket = &offer.ticket;
        let fits = |n: u64| usize::try_from(n).map_err(|_| foreign("it exceeds the address space"));
        let (whole, offset, bytes) = (fits(ticket.allocation)?, fits(ticket.offset)?, fits(ticket.bytes)?);
        let file = File::from(fd.try_clone().map_err(|e| Error::file("dup", "emulated GPU memory", e))?);
        if file.metadata().map(|data| data.len()).ok() != Some(ticket.allocation) {
            return Err(foreign("its length differs from the ticket"));
        }
        let region = self.gpu.adopt(Place::Vram, HostMem::of_file(&file, whole)?)?;
        Ok(region.slice(offset..offset + bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shared_with_another_process() {
        let (ours, theirs) = (Gpus::new(GpuChoice::Emulated), Gpus::new(GpuChoice::Off));
        assert_eq!((ours.count(), theirs.count()), (1, 0));
        assert!(ours.open(1).is_err() && ours.open(-1).is_err() && theirs.open(0).is_err());
        let device = ours.open(0).unwrap();
        let memory = SharedGpuMemory::create(&device, 10_000).unwrap();
        assert_eq!(memory.region().len(), 10_000);
        let AnyGpu::Emulated(gpu) = &*device else { panic!("not emulated") };
        let part = gpu.at(memory.region().addr().plus(5000), 1000).unwrap();
        let inner = SharedGpuMemory::of(&device, part).unwrap();
        // A file that any process can create counts as GPU memory only on request.
        for mode in [GpuChoice::Cuda, GpuChoice::Off] {
            assert!(matches!(Gpus::new(mode).accept(&inner.offer().unwrap()), Err(Error::NoDevice { .. })));
        }
        let (_, region) = Gpus::new(GpuChoice::Emulated).accept(&inner.offer().unwrap()).unwrap();
        region.write(1, b"there").unwrap();
        let mut seen = [0; 5];
        memory.region().read(5001, &mut seen).unwrap();
        assert_eq!(&seen, b"there");
        assert!(gpu.at(memory.region().addr().plus(5000), 10_000).is_err());
    }

    #[test]
    fn freed_memory_is_not_mistaken_for_a_later_allocation() {
        let gpus = Gpus::new(GpuChoice::Emulated);
        let device = gpus.open(0).unwrap();
        let AnyGpu::Emulated(gpu) = &*device else { panic!("not emulated") };
        let region = gpu.alloc(4096).unwrap();
        let at = region.addr();
        let memory = SharedGpuMemory::of(&device, region).unwrap();
        assert!(memory.is_current().unwrap());
        assert!(gpu.free(at) && !gpu.free(at));
        assert!(!memory.is_current().unwrap());
        assert!(gpu.at(at, 1).is_err());
    }

    #[test]
    fn invalid_offers_are_refused() {
        let gpus = Gpus::new(GpuChoice::Emulated);
        let memory = SharedGpuMemory::create(&gpus.open(0).unwrap(), 8192).unwrap();
        let offer = |change: fn(&mut Offer)| {
            let mut offer = memory.offer().unwrap();
            change(&mut offer);
            gpus.accept(&offer)
        };
        assert!(offer(|_| ()).is_ok());
        assert!(offer(|o| o.fd = None).is_err());
        assert!(offer(|o| o.ticket.allocation = 4096).is_err());
        assert!(offer(|o| o.ticket.allocation = 1 << 60).is_err());
        assert!(offer(|o| o.ticket.gpu[0] = 0).is_err());
        // A memfd that its creator could truncate.
        let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 8192).unwrap();
        let with = |fd: OwnedFd| {
            let mut other = memory.offer().unwrap();
            other.fd = Some(fd);
            gpus.accept(&other)
        };
        assert!(with(unsealed).is_err());
        // Files that are not memory, memory that is not writable, and seals that allow truncation.
        assert!(with(rustix::pipe::pipe().unwrap().0).is_err());
        assert!(with(File::open("/dev/zero").unwrap().into()).is_err());
        let sealed = |flags, seals| {
            let fd = rustix::fs::memfd_create("sealed", MemfdFlags::ALLOW_SEALING.union(flags)).ok()?;
            rustix::fs::ftruncate(&fd, 8192).ok()?;
            rustix::fs::fcntl_add_seals(&fd, seals).ok()?;
            Some(fd)
        };
        for seals in
            [SealFlags::SHRINK, SealFlags::GROW, SEALS | SealFlags::WRITE, SEALS | SealFlags::FUTURE_WRITE]
        {
            assert!(with(sealed(MemfdFlags::empty(), seals).unwrap()).is_err(), "{seals:?}");
        }
        let whole = sealed(MemfdFlags::empty(), SEALS).unwrap();
        let reading = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&whole));
        assert!(with(File::open(reading).unwrap().into()).is_err());
        assert!(with(whole).is_ok());
        // The machine may have no huge pages.
        if let Ok(huge) = rustix::fs::memfd_create("huge", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB) {
            rustix::fs::ftruncate(&huge, 2 << 20).unwrap();
            rustix::fs::fcntl_add_seals(&huge, SEALS).unwrap();
            let mut other = memory.offer().unwrap();
            (other.fd, other.ticket.allocation) = (Some(huge), 2 << 20);
            let refused = gpus.accept(&other).err().unwrap();
            assert!(refused.to_string().contains("huge pages"), "{refused}");
        }
    }

    /// A program punches out pages of memory that a daemon has opened, and ends. The daemon reads zeros, without a
    /// signal.
    #[test]
    fn punched_out_memory_stays_mapped() {
        let (maker, daemon) = (Gpus::new(GpuChoice::Emulated), Gpus::new(GpuChoice::Emulated));
        let memory = SharedGpuMemory::create(&maker.open(0).unwrap(), 8192).unwrap();
        memory.region().write(0, &[7; 8192]).unwrap();
        let offer = memory.offer().unwrap();
        let (_, region) = daemon.accept(&offer).unwrap();
        let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let fd = offer.fd.as_ref().unwrap();
        rustix::fs::fallocate(fd, hole, 0, 4096).unwrap();
        assert!(rustix::fs::ftruncate(fd, 4096).is_err(), "it can be truncated");
        drop((memory, offer, maker));
        let mut seen = [1; 8192];
        region.read(0, &mut seen).unwrap();
        assert!(seen[..4096].iter().all(|byte| *byte == 0) && seen[4096..].iter().all(|byte| *byte == 7));
        region.write(0, &[9; 8192]).unwrap();
    }
}
