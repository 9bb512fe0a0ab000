//! GPU memory and GPU launches.
//!
//! 1. [`cuda::Cuda::load`] finds NVIDIA's driver at run time, and [`cuda::Cuda::open`] opens a GPU. [`Emulated`] needs
//!    no hardware.
//! 2. [`Gpu::alloc`] returns a [`Region`], memory that bytes arrive in; [`Region::read`] and [`Region::write`] copy.
//! 3. [`Gpu::copier`] copies rows from a ring of pinned memory, in the background.
//! 4. [`Gpu::launch`] starts a kernel on queues of a drive.
//! 5. [`Running::join`] waits for it, with a deadline.
//!
//! The emulated GPU runs the kernel functions that the device code wraps on CPU threads. Its addresses form a separate
//! space: a wrong one is an error, never a write to other memory.
#![deny(unsafe_code)]

mod arrays;
mod blocks;
pub mod controllers;
mod copier;
#[allow(unsafe_code, reason = "the CUDA driver is a C library")]
pub mod cuda;
mod emulated;
mod error;
mod files;
mod instruments;
mod jobs;
mod meeting;
mod peek;
mod peers;
mod ranges;
mod region;
mod relay;
mod space;
mod sums;

pub use arrays::{ArrayJob, ArrayKernels, ArrayRows, ReusedMemory};
pub use controllers::ControllerHost;
pub use copier::{Copier, Mark, Rows, copy_rate};
pub use emulated::{EMULATED_LANES, Emulated};
pub use error::{Error, Result};
pub use files::{GpuFile, GpuFiles};
pub use instruments::Instruments;
pub use jobs::{BlockJob, BlockKernels};
pub use peers::{PeerMemory, SharedRegion};
pub use ranges::{CopyRange, RangeCopier};
use region::AddressSpace;
pub use region::{Place, Region};
pub use space::{EmulatedThread, HeldSpace};
pub use sums::Sums;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use onehop_os::{HostMem, Registers};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::Exit;
pub use onehop_proto::kernel::{KernelJob, KernelQueue};

/// How the threads of a launch use the queues.
#[derive(Clone, Debug)]
pub enum Launch {
    /// One warp per queue.
    Owner(Vec<KernelQueue>),
    /// This many threads, distributed over queues that they share.
    Shared(Vec<KernelQueue>, u32),
}

/// Whether no queue has more than one command in flight: there is a separate kernel for that.
pub(crate) fn is_single(queues: &[KernelQueue]) -> bool {
    queues.iter().all(|queue| queue.window == 1)
}

/// A running launch.
pub trait Running: Send {
    /// Whether every thread has ended, or the launch has outlasted its limit so far that waiting stops:
    /// [`Running::join`] then returns [`Error::Unended`] at once.
    fn is_done(&self) -> bool;
    /// Its time by the GPU's clock, once it is done; `None` without such a clock.
    fn took(&self) -> Option<Duration> {
        None
    }
    /// Waits for the end, which the launch's own limits ensure, and returns the exit of each warp or thread.
    ///
    /// # Errors
    /// When a thread accessed invalid memory. [`Error::Unended`] when the launch did not end, or never started: threads
    /// may still use everything that it was given.
    fn join(self: Box<Self>) -> Result<Vec<Exit>>;
    /// Leaves a kernel that does not end alone, with everything that it uses, until the process ends.
    fn abandon(self: Box<Self>) {
        std::mem::forget(self);
    }
}

/// Running controllers: see [`ControllerHost::serve`]. Dropping them waits for their end, which their host has to request.
pub trait Resident: Send {
    /// Whether one of them has ended, on request or not.
    fn is_over(&self) -> bool;
    /// Waits for their end, which their host has to request.
    ///
    /// # Errors
    /// When the GPU has failed, or they did not end: they may still use everything that they were given.
    fn join(self: Box<Self>) -> Result<()>;
}

/// The operations that onehop needs of a GPU.
pub trait Gpu: Send + Sync {
    /// Its product name, or `emu`.
    fn name(&self) -> &str;
    /// Whether it is emulated.
    fn simulated(&self) -> bool;
    /// Whether its memory is a device's, which drives reach over the bus or not at all. An emulated GPU's memory is
    /// usually memory of this machine that the drive reaches.
    fn own_memory(&self) -> bool {
        !self.simulated()
    }
    /// Loads its kernels, so that a GPU without kernels is noticed before a queue is created for it.
    ///
    /// # Errors
    /// When there are none for it, or they cannot be loaded.
    fn load_kernels(&self) -> Result<()> {
        Ok(())
    }
    /// New memory, zeroed.
    ///
    /// # Errors
    /// When memory is short.
    fn alloc(&self, place: Place, bytes: usize) -> Result<Region>;
    /// New GPU memory, zeroed, for data that its kernels trust: what to do, and where. No safe call gives a kernel its
    /// address to write to.
    ///
    /// # Errors
    /// When memory is short.
    fn alloc_private(&self, bytes: usize) -> Result<Region> {
        self.alloc(Place::Vram, bytes)
    }
    /// Gives the GPU an address for host memory that was allocated elsewhere.
    ///
    /// # Errors
    /// When it cannot be registered.
    fn adopt(&self, place: Place, mem: HostMem) -> Result<Region>;
    /// New GPU memory, zeroed, to which several copies may be in flight.
    ///
    /// # Errors
    /// When memory is short.
    fn arena(&self, bytes: usize) -> Result<Region> {
        self.alloc(Place::Vram, bytes)
    }
    /// The same for a caller that will write all of it except `blank`, so that only that is zeroed. Zeroing everything
    /// takes more than a hundredth of the time of copies to it.
    ///
    /// # Errors
    /// As for [`Gpu::arena`].
    fn arena_to_fill(&self, bytes: usize, blank: &[Range<usize>]) -> Result<Region> {
        let _ = blank;
        self.arena(bytes)
    }
    /// Bytes of free GPU memory, if known.
    ///
    /// # Errors
    /// When the GPU has failed.
    fn free_memory(&self) -> Result<Option<u64>> {
        Ok(None)
    }
    /// A copier from this memory to that. The CPU reaches at least one of them.
    ///
    /// # Errors
    /// When it reaches neither, or the GPU has no copy engine.
    fn copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>>;
    /// A copier of ranges between any memories that its copies reach. Ranges of fewer than `kernel_below` bytes are copied by a
    /// kernel of a few warps where it can: to and from host memory the copy engine is slow with short ranges, and with small
    /// pages. The kernel has to find room on the GPU beside others, which the copy engine does not.
    ///
    /// # Errors
    /// When the GPU has no copy engine.
    fn range_copier(&self, kernel_below: usize) -> Result<Box<dyn RangeCopier>> {
        let _ = kernel_below;
        Err(ranges::none(self.name()))
    }
    /// Memory that it shares with other processes.
    ///
    /// # Errors
    /// When it cannot share any.
    fn peers(&self) -> Result<&dyn PeerMemory> {
        let why = format!("{} has none to share", self.name());
        Err(Error::NotSupported { what: "sharing GPU memory with other processes".into(), why })
    }
    /// Starts the vendor's library that moves bytes between files and GPU memory: NVIDIA's cuFile.
    ///
    /// # Errors
    /// When there is none; the error says why.
    fn files(&self) -> Result<Arc<dyn GpuFiles>> {
        let why = format!("it is for NVIDIA's GPUs, and {} is not one", self.name());
        Err(Error::NotSupported { what: "moving bytes by cuFile".into(), why })
    }
    /// Loads the kernels that work on data, samples or other.
    ///
    /// # Errors
    /// When there are none for it, or they cannot be loaded.
    fn block_kernels(&self) -> Result<Box<dyn BlockKernels>> {
        let why = format!("{} has no kernels for them", self.name());
        Err(Error::NotSupported { what: "working on data".into(), why })
    }
    /// Loads the kernels of arrays.
    ///
    /// # Errors
    /// When there are none for it, or they cannot be loaded.
    fn array_kernels(&self) -> Result<Box<dyn ArrayKernels>> {
        let why = format!("{} has no kernels for them", self.name());
        Err(Error::NotSupported { what: "arrays".into(), why })
    }
    /// Gives the GPU an address for a controller's BAR0; gone when the result is dropped.
    ///
    /// # Errors
    /// When the BAR cannot be registered.
    fn map_registers(&self, regs: Arc<dyn Registers>) -> Result<Doorbells>;
    /// Prepares the control memory of a queue that was just created.
    ///
    /// # Errors
    /// When the queue's description does not match its mode.
    fn prepare(&self, launch: &Launch) -> Result<()>;
    /// While the result lives, doorbells are relayed as if our kernels ran: for kernels of others.
    fn expect_kernels(&self) -> Box<dyn Send + Sync> {
        Box::new(())
    }
    /// Checks that a running kernel of this GPU sees what another device has written into the GPU memory at this
    /// address when it sees that device's completion. The memory may be another GPU's.
    ///
    /// # Errors
    /// When the GPU that owns the memory does not order such writes for this one: the host would have to flush after
    /// each completion. Also when the owner is unknown.
    fn orders_device_writes(&self, at: GpuAddr) -> Result<()> {
        let _ = at;
        Ok(())
    }
    /// Starts a kernel.
    ///
    /// # Errors
    /// When it cannot be started.
    fn launch(&self, launch: &Launch, job: &KernelJob) -> Result<Box<dyn Running>>;
    /// Its kernels for measurements and diagnosis.
    ///
    /// # Errors
    /// When it has none.
    fn instruments(&self) -> Result<&dyn Instruments> {
        let why = format!("{} has no kernels for it", self.name());
        Err(Error::NotSupported { what: "taking times and reading registers".into(), why })
    }
    /// Its resident controllers, for tests and measurements.
    ///
    /// # Errors
    /// When it has none.
    fn controllers(&self) -> Result<&dyn ControllerHost> {
        let why = format!("{} has none", self.name());
        Err(Error::NotSupported { what: "running controllers on the GPU".into(), why })
    }
}

/// A controller's BAR0 in the GPU's address space.
pub struct Doorbells {
    base: GpuAddr,
    bytes: u64,
    space: AddressSpace,
    relay: Option<relay::Watched>,
    hold: Arc<dyn Send + Sync>,
}

impl Doorbells {
    /// Registers that the GPU writes directly; `hold` undoes the mapping.
    pub(crate) fn direct(
        (base, bytes): (GpuAddr, u64),
        space: AddressSpace,
        hold: Arc<dyn Send + Sync>,
    ) -> Self {
        Self { base, bytes, space, relay: None, hold }
    }

    /// A page that the GPU writes and a CPU thread relays.
    pub(crate) fn relayed(self, relay: relay::Watched) -> Self {
        Self { relay: Some(relay), ..self }
    }

    /// Memory that stands in for registers.
    #[must_use]
    pub fn of_memory(memory: &Region) -> Self {
        let place = (memory.addr(), memory.len() as u64);
        Self::direct(place, memory.space(), Arc::new(memory.clone()))
    }

    /// The address of this many adjacent registers.
    pub(crate) fn words(&self, first: u32, count: u32) -> Result<GpuAddr> {
        if !first.is_multiple_of(4) || u64::from(first) + 4 * u64::from(count) > self.bytes {
            let why = format!("{count} registers at {first:#x}, of {} bytes of registers", self.bytes);
            return Err(Error::Launch(why));
        }
        Ok(self.base.plus(u64::from(first)))
    }

    /// The GPU address of the register at an offset in BAR0. A relay only forwards registers that were requested here.
    #[must_use]
    pub fn at(&self, offset: u32) -> GpuAddr {
        if let Some(relay) = &self.relay {
            relay.add(offset);
        }
        self.base.plus(u64::from(offset))
    }

    /// Waits until everything that the GPU has written so far has reached the controller.
    pub fn settle(&self) {
        if let Some(relay) = &self.relay {
            relay.settle();
        }
    }

    /// Whether a CPU thread relays what the GPU writes.
    #[must_use]
    pub fn is_relayed(&self) -> bool {
        self.relay.is_some()
    }
}
