//! The seams: a BAR, a source of bus addresses, a function reset.

use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use onehop_proto::{BusAddr, GpuAddr};

use crate::{Error, HostMem, MmioWindow, Result};

/// BAR0 of a controller. Reads of a removed device return all ones; writes to it are lost.
pub trait Registers: Send + Sync {
    /// A 32-bit register read.
    fn read32(&self, offset: u32) -> u32;
    /// A 32-bit register write.
    fn write32(&self, offset: u32, value: u32);
    /// Bytes of the BAR.
    fn size(&self) -> u32;

    /// Memory behind a BAR of the same device, if it can be mapped: a controller memory buffer.
    fn window(&self, bar: u8, offset: u64, bytes: u64) -> Option<HostMem> {
        let _ = (bar, offset, bytes);
        None
    }

    /// The registers as memory, if this process has mapped the BAR. A GPU can write these directly; for all others a
    /// thread has to relay its writes.
    fn mmio(&self) -> Option<MmioWindow> {
        None
    }

    /// The driver polls for completions of the queue with this doorbell, and there are none. If this process does the
    /// controller's work, it may do some now.
    fn idle(&self, doorbell: u32) {
        let _ = doorbell;
    }

    /// Why the controller reports a fatal status or has just refused a queue, if known.
    fn failure(&self) -> Option<String> {
        None
    }

    /// A 64-bit register, read as two halves, low first.
    fn read64(&self, offset: u32) -> u64 {
        let low = self.read32(offset);
        u64::from(low) | u64::from(self.read32(offset + 4)) << 32
    }

    /// A 64-bit register, written as two halves, low first.
    fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }
}

/// Memory of another device, as a kernel driver imports it.
#[derive(Debug)]
pub struct DmaBuf {
    /// The dma-buf.
    pub fd: OwnedFd,
    /// Offset of the memory in it. A dma-buf covers whole pages, and often the whole allocation.
    pub offset: u64,
    /// How long the memory is.
    pub bytes: u64,
}

/// Memory of a GPU, by its addresses in this process, under which the kernel finds it for another device's driver.
#[derive(Clone, Copy, Debug)]
pub struct GpuRange<'memory> {
    addr: GpuAddr,
    bytes: usize,
    memory: PhantomData<&'memory ()>,
}

impl GpuRange<'_> {
    /// `bytes` bytes from `addr` on.
    ///
    /// # Safety
    /// As long as `'memory`, they are a GPU's memory and nothing else.
    #[must_use]
    pub const unsafe fn new(addr: GpuAddr, bytes: usize) -> Self {
        Self { addr, bytes, memory: PhantomData }
    }

    /// Its first byte.
    #[must_use]
    pub const fn addr(&self) -> GpuAddr {
        self.addr
    }

    /// Its length.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Memory for a device, as a [`Mapper`] needs to know it.
pub trait DmaMemory {
    /// Its length in bytes.
    fn bytes(&self) -> usize;
    /// The host memory behind it, if any.
    fn host(&self) -> Option<&HostMem>;
    /// Its GPU address, if it is GPU memory.
    fn gpu_addr(&self) -> Option<GpuAddr> {
        None
    }
    /// All of it, if it is memory that lies on a GPU and has addresses in this process.
    fn gpu_range(&self) -> Option<GpuRange<'_>> {
        None
    }
    /// A new dma-buf of it, if it is device memory whose driver exports it; otherwise `None`.
    ///
    /// # Errors
    /// The inner result: why the driver refused.
    fn dma_buf(&self) -> Option<Result<DmaBuf>> {
        None
    }
    /// Writes a word to all places that a device is about to write, within `limit`.
    ///
    /// # Errors
    /// When they are outside the memory, or it was not written in time. Unless the error says otherwise, nothing more
    /// is written after this returns.
    fn mark(&self, marks: &Marks, limit: Duration) -> Result<()> {
        let _ = limit;
        self.host().ok_or(Error::NotReachable)?.mark(marks)
    }
    /// How many of the places still hold the word, counted within `limit`.
    ///
    /// # Errors
    /// When they are outside the memory, or it was not read in time.
    fn marks_left(&self, marks: &Marks, limit: Duration) -> Result<u64> {
        let _ = limit;
        self.host().ok_or(Error::NotReachable)?.marks_left(marks)
    }
}

/// Consecutive words with the same value: they show which memory a device has not written yet.
///
/// They cover every byte, because a device may write in any order: one written word proves nothing about the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    /// Offset of the first word in bytes: a multiple of eight in memory.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The word.
    pub word: u64,
}

impl Marks {
    /// Bytes of a word.
    pub const BYTES: u64 = 8;

    /// Bytes of all.
    #[must_use]
    pub const fn span(&self) -> u64 {
        self.count.saturating_mul(Self::BYTES)
    }
}

/// A contiguous range of bus addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusRange {
    /// Its start.
    pub addr: BusAddr,
    /// Its length in bytes.
    pub len: u64,
}

/// Memory as one device sees it. Stays mapped until dropped.
pub struct Mapped {
    runs: Vec<BusRange>,
    len: u64,
    _hold: Box<dyn Send + Sync>,
}

impl Mapped {
    /// Bus-contiguous runs that cover the memory in order; `hold` undoes the mapping when it is dropped.
    #[must_use]
    pub fn new(runs: Vec<BusRange>, hold: Box<dyn Send + Sync>) -> Self {
        let len = runs.iter().map(|r| r.len).sum();
        Self { runs, len, _hold: hold }
    }

    /// The bytes covered.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// The runs, in order of offset.
    #[must_use]
    pub fn runs(&self) -> &[BusRange] {
        &self.runs
    }

    /// The bus address of the byte at `offset`, and how many bytes follow it without a gap.
    #[must_use]
    pub fn at(&self, offset: u64) -> Option<BusRange> {
        let mut left = offset;
        for run in &self.runs {
            if left < run.len {
                return Some(BusRange { addr: run.addr.plus(left), len: run.len - left });
            }
            left -= run.len;
        }
        None
    }

    /// The bus address of all memory, if it is one run.
    ///
    /// # Errors
    /// When the memory has several runs.
    pub fn contiguous(&self) -> Result<BusAddr> {
        match self.runs.as_slice() {
            [one] => Ok(one.addr),
            many => Err(Error::CannotMap {
                mapper: "the caller".into(),
                why: format!("one bus-contiguous run is needed, this memory has {}", many.len()),
            }),
        }
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapped").field("runs", &self.runs).finish_non_exhaustive()
    }
}

/// How commands and data reach a controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transport {
    /// The controller reads and writes memory itself.
    #[default]
    Memory,
    /// Network messages carry them. The CPU sends and receives them, commands describe their data by an SGL descriptor,
    /// and the controller may still execute a command that it received after the connection was lost.
    Messages,
}

/// Provides the bus addresses of memory for one device.
pub trait Mapper: Send + Sync {
    /// Its name in reports.
    fn name(&self) -> &str;

    /// How commands and data reach the controller.
    fn transport(&self) -> Transport {
        Transport::Memory
    }

    /// Zeroed, page-aligned host memory that this mapper can map.
    ///
    /// # Errors
    /// When memory is short.
    fn alloc(&self, bytes: usize) -> Result<HostMem>;

    /// Lets the device reach `memory` until the result is dropped.
    ///
    /// # Errors
    /// When the device cannot reach it, with the reason.
    fn map(&self, memory: &dyn DmaMemory) -> Result<Mapped>;
}

/// Resets a function from outside the controller: FLR, or its equivalent.
pub trait FunctionReset: Send + Sync {
    /// Resets it; its registers are as after power-on when this returns.
    ///
    /// # Errors
    /// When it fails.
    fn function_reset(&self) -> Result<()>;
}

/// A device's interrupt.
pub trait Interrupt: Send + Sync {
    /// Waits at most `limit` until it is raised; returns whether it was, now or since the last wait.
    fn wait(&self, limit: Duration) -> bool;
}

/// A controller, as its transport provides it.
#[derive(Clone)]
pub struct ControllerBackend {
    /// BAR0.
    pub regs: Arc<dyn Registers>,
    /// How it reaches memory.
    pub mapper: Arc<dyn Mapper>,
    /// How it is reset from outside, if possible.
    pub reset: Option<Arc<dyn FunctionReset>>,
    /// Its name: `sim:mem:64M`, `0000:0b:00.0`.
    pub name: String,
    /// Whether it is a model of a drive.
    pub simulated: bool,
}
