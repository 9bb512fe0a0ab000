//! GPU memory and GPU launches.
//!
//! 1. [`cuda::Cuda::load`] finds NVIDIA's driver at run time, and [`cuda::Cuda::open`] opens a GPU. [`Emulated`] needs no
//!    hardware.
//! 2. [`Gpu::alloc`] returns a [`Region`], memory that bytes arrive in; [`Region::read`] and [`Region::write`] copy.
//! 3. [`Gpu::copier`] copies rows from a ring of pinned memory, in the background.
//! 4. [`Gpu::launch`] starts a kernel on queues of a drive.
//! 5. [`Running::join`] waits for it, with a deadline.
//!
//! The emulated GPU runs the kernel functions that the device code wraps on CPU threads. Its addresses are its own: a wrong one
//! is an error, never a stray write.
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
mod jobs;
mod meeting;
mod peek;
mod region;
mod relay;
mod space;
mod sums;

pub use arrays::{ArrayJob, ArrayKernels, ArrayRows};
pub use copier::{Copier, Mark, Rows, copy_rate};
pub use emulated::{EMULATED_LANES, Emulated};
pub use error::{Error, Result};
pub use files::{GpuFile, GpuFiles};
pub use jobs::{BlockJob, BlockKernels};
use region::AddressSpace;
pub use region::{Place, Region};
pub use space::EmulatedThread;
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
    /// One warp for each queue; each owns its own.
    Owner(Vec<KernelQueue>),
    /// So many threads, dealt to the queues, each of which they share.
    Shared(Vec<KernelQueue>, u32),
}

/// Whether none of these queues has more than one command in flight: there is a kernel for that.
pub(crate) fn is_single(queues: &[KernelQueue]) -> bool {
    queues.iter().all(|queue| queue.window == 1)
}

/// A launch under way.
pub trait Running: Send {
    /// Whether every thread has ended, or the launch has outlasted its limit by so much that nobody waits for it any more:
    /// [`Running::join`] then is [`Error::Unended`] at once.
    fn is_done(&self) -> bool;
    /// How long it took by the GPU's own clock, once it is done; none where there is no such clock.
    fn took(&self) -> Option<Duration> {
        None
    }
    /// How each warp or thread came out. Waits for the end, which a launch's own bounds bring about.
    ///
    /// # Errors
    /// When a thread touched memory that is not there. [`Error::Unended`] when the launch did not end, or never began: threads
    /// may still use all that it was given.
    fn join(self: Box<Self>) -> Result<Vec<Exit>>;
    /// Leaves a kernel that does not end to itself, with everything that it uses, until the process ends.
    fn abandon(self: Box<Self>) {
        std::mem::forget(self);
    }
}

/// Controllers under way: see [`Gpu::serve`]. Dropping them waits for their end, which their host has to ask for.
pub trait Resident: Send {
    /// Whether one of them has ended, asked to or not.
    fn is_over(&self) -> bool;
    /// Waits for their end, which their host has to ask for.
    ///
    /// # Errors
    /// When the GPU has failed, or they did not end: they may still use all that they were given.
    fn join(self: Box<Self>) -> Result<()>;
}

/// What onehop needs of a GPU.
pub trait Gpu: Send + Sync {
    /// What people call it: a product name, or `emu`.
    fn name(&self) -> &str;
    /// Whether it is a model of a GPU.
    fn simulated(&self) -> bool;
    /// Whether its memory is a device's, which a drive reaches over the bus or not at all. An emulated GPU's usually is
    /// whatever memory of this machine the drive reaches.
    fn own_memory(&self) -> bool {
        !self.simulated()
    }
    /// Loads its kernels, so that a GPU without any is noticed before a queue is made for it.
    ///
    /// # Errors
    /// When there are none for it, or they cannot be loaded.
    fn load_kernels(&self) -> Result<()> {
        Ok(())
    }
    /// The same GPU with kernels that take the times: `onehop_proto::kernel::times` says where they leave them, behind the
    /// outcomes of a job. They are slower, and take them of whole warps only.
    ///
    /// # Errors
    /// When there are none for it, or they cannot be loaded.
    fn metered(&self) -> Result<Arc<dyn Gpu>> {
        let why = format!("{} has no kernels that take them", self.name());
        Err(Error::NotSupported { what: "taking times".into(), why })
    }
    /// New memory, zeroed.
    ///
    /// # Errors
    /// When there is none left.
    fn alloc(&self, place: Place, bytes: usize) -> Result<Region>;
    /// New memory of the GPU, zeroed, for what its kernels believe: what they are to do, and where. No safe call gives a kernel
    /// its address to write to.
    ///
    /// # Errors
    /// When there is none left.
    fn alloc_private(&self, bytes: usize) -> Result<Region> {
        self.alloc(Place::Vram, bytes)
    }
    /// Gives the GPU an address for host memory that somebody else allocated.
    ///
    /// # Errors
    /// When it cannot be registered.
    fn adopt(&self, place: Place, mem: HostMem) -> Result<Region>;
    /// New memory of the GPU, zeroed, to which copies may go on while others are begun.
    ///
    /// # Errors
    /// When there is none left.
    fn arena(&self, bytes: usize) -> Result<Region> {
        self.alloc(Place::Vram, bytes)
    }
    /// The same for whoever is going to write all of it but what is `blank`: only that has to be zeroed. To zero all takes
    /// over a hundredth of the time that copies to it take.
    ///
    /// # Errors
    /// As for [`Gpu::arena`].
    fn arena_to_fill(&self, bytes: usize, blank: &[Range<usize>]) -> Result<Region> {
        let _ = blank;
        self.arena(bytes)
    }
    /// Bytes of GPU memory that are free, where that is known.
    ///
    /// # Errors
    /// When the GPU has failed.
    fn free_memory(&self) -> Result<Option<u64>> {
        Ok(None)
    }
    /// What copies from this host memory to that GPU memory while others are prepared.
    ///
    /// # Errors
    /// When the first is not memory that the CPU reaches, or the GPU has nothing to copy with.
    fn copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>>;
    /// Starts what its maker has to move files' bytes to and from its memory: NVIDIA's cuFile.
    ///
    /// # Errors
    /// When there is none, and why.
    fn files(&self) -> Result<Arc<dyn GpuFiles>> {
        let why = format!("it is for NVIDIA's GPUs, and {} is none", self.name());
        Err(Error::NotSupported { what: "moving bytes by cuFile".into(), why })
    }
    /// Loads the kernels that work on data, samples or any.
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
    /// Has one thread of the GPU read `count` neighbouring registers, 16 at most, from the one at `first` on, of those that
    /// [`Self::map_registers`] mapped: what each of them said. The first that is all ones is the last that was read, as nobody answered
    /// for it; none is begun after `limit`. No route needs this, and where such reads are lost they may take the device's link
    /// down, or the GPU with it: for those who ask what becomes of them.
    ///
    /// # Errors
    /// When there are no such registers, it cannot be started, the GPU fails, or a read neither ends nor fails: then no memory of
    /// this GPU is freed before it does.
    fn peek(&self, registers: &Doorbells, first: u32, count: u32, limit: Duration) -> Result<Vec<u32>> {
        let _ = (registers, first, count, limit);
        let why = format!("{} has no kernel for it", self.name());
        Err(Error::NotSupported { what: "reading registers by the GPU".into(), why })
    }
    /// Prepares the control memory of a queue that was just created.
    ///
    /// # Errors
    /// When the queue's description is not one of its mode.
    fn prepare(&self, launch: &Launch) -> Result<()>;
    /// As long as the result lives, doorbells are passed on as if kernels of ours ran: other people's do.
    fn expect_kernels(&self) -> Box<dyn Send + Sync> {
        Box::new(())
    }
    /// Checks that a kernel which is running sees what another device has written into the GPU's memory when it sees that
    /// device's completion.
    ///
    /// # Errors
    /// When the GPU does not order such writes: the host would have to flush them after each completion.
    fn orders_device_writes(&self) -> Result<()> {
        Ok(())
    }
    /// Starts a kernel.
    ///
    /// # Errors
    /// When it cannot be started.
    fn launch(&self, launch: &Launch, job: &KernelJob) -> Result<Box<dyn Running>>;
    /// Loads the controllers of [`Self::serve`], which takes a while the first time.
    ///
    /// # Errors
    /// When there are none for this GPU, or they cannot be loaded.
    fn load_controllers(&self) -> Result<()> {
        Ok(())
    }
    /// Holds memory that a controller on this GPU is about to be given the address of: it is not freed as long as the result
    /// lives. Where wrong addresses are errors, as on the emulated GPU, there is nothing to hold.
    ///
    /// # Errors
    /// When the range is no memory that the GPU reaches.
    fn hold(&self, what: &'static str, at: GpuAddr, bytes: u64) -> Result<controllers::Hold> {
        let _ = (at, bytes);
        let why = format!("{} gives none to controllers", self.name());
        Err(Error::NotSupported { what: what.into(), why })
    }
    /// Starts controllers that stay, for tests and measurements: a warp for each pair. [`controllers::Pairs::start`] calls it.
    ///
    /// # Errors
    /// When they cannot be started.
    fn serve(&self, serving: controllers::Serving) -> Result<Box<dyn Resident>> {
        drop(serving);
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
    /// Registers that the GPU writes by itself; `hold` undoes the mapping.
    pub(crate) fn direct(
        (base, bytes): (GpuAddr, u64),
        space: AddressSpace,
        hold: Arc<dyn Send + Sync>,
    ) -> Self {
        Self { base, bytes, space, relay: None, hold }
    }

    /// A page that the GPU writes and a CPU thread passes on.
    pub(crate) fn relayed(self, relay: relay::Watched) -> Self {
        Self { relay: Some(relay), ..self }
    }

    /// Memory that stands in for registers.
    #[must_use]
    pub fn of_memory(memory: &Region) -> Self {
        let place = (memory.addr(), memory.len() as u64);
        Self::direct(place, memory.space(), Arc::new(memory.clone()))
    }

    /// The address of so many neighbouring registers.
    pub(crate) fn words(&self, first: u32, count: u32) -> Result<GpuAddr> {
        if !first.is_multiple_of(4) || u64::from(first) + 4 * u64::from(count) > self.bytes {
            let why = format!("{count} registers at {first:#x}, of {} bytes of registers", self.bytes);
            return Err(Error::Launch(why));
        }
        Ok(self.base.plus(u64::from(first)))
    }

    /// The register at an offset in BAR0. Where a thread passes doorbells on, it passes on those that were asked for
    /// here, and no others.
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

    /// Whether a CPU thread passes on what the GPU writes.
    #[must_use]
    pub fn is_relayed(&self) -> bool {
        self.relay.is_some()
    }
}
