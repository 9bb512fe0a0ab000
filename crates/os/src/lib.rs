//! Memory that is shared with devices, the seams of every controller, and system calls that other crates lack.
//!
//! 1. [`HostMem::anonymous`] allocates host memory that a device may write at any moment. It is copied, never borrowed as a
//!    slice.
//! 2. [`Mapper::map`] gives memory a bus address.
//! 3. [`Registers::read32`] and [`Registers::write32`] access a BAR.
//! 4. [`ControllerBackend`] has both for one controller: a real one, QEMU's or a simulated one.
//! 5. [`Deadline::after`] bounds a wait, and [`StopSignal`] ends it early.
//!
//! [`mod@file`] and [`dm_table`] ask the kernel where a file's bytes are. [`Guard`] reads memory that truncating a file
//! may remove.

mod allocations;
mod borrowed;
mod clock;
mod demote;
mod descriptors;
mod dm;
mod error;
mod exit;
pub mod file;
mod file_handle;
mod file_lease;
mod file_mapping;
pub mod file_writes;
mod fork;
mod guard;
pub mod handles;
mod heap;
pub mod hf3fs;
mod huge;
pub mod identity;
pub mod locks;
mod mem;
mod memfd;
mod mmio;
pub mod nvme;
pub mod page_cache;
mod reads;
mod rows;
mod seam;
pub mod secret;
mod sem;
mod socket;
mod starter;
mod stop;
mod udmabuf;
mod words;

pub use allocations::Allocations;
pub use clock::{Deadline, cycles, this_thread};
pub use descriptors::{DescriptorLimit, descriptor_limit, open_descriptors, raise_descriptor_limit};
pub use dm::{DmTarget, dm_table};
pub use error::{Error, Result};
pub use exit::at_exit;
pub use file_handle::{FileHandle, handle_of};
pub use file_lease::FileLease;
pub use file_mapping::FileMapping;
pub use fork::{ForkLocks, HeldInFork, watch_forks, write_to_stderr};
pub use guard::Guard;
pub use heap::Heap;
pub use mem::HostMem;
pub use memfd::Memfd;
pub use mmio::MmioWindow;
pub use reads::{Finished, Reads};
pub use seam::{
    BusRange, ControllerBackend, DmaBuf, DmaMemory, FunctionReset, GpuRange, Interrupt, Mapped, Mapper,
    Marks, Registers, Transport,
};
pub use sem::Semaphore;
pub use starter::ThreadStarter;
pub use stop::StopSignal;
pub use udmabuf::Udmabuf;
pub use words::Words;
