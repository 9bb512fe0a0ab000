//! Ground: memory shared with devices, and the seams behind which every controller stands.
//!
//! [`HostMem`] is host memory that a device may write at any moment; it is read and written by copy, never lent as a
//! slice. [`Registers`] is a BAR, [`Mapper`] gives bus addresses: real PCI, QEMU and the simulator all implement both,
//! so that one driver runs on all of them.

mod clock;
mod error;
mod huge;
mod mem;
mod seam;

pub use clock::{Deadline, cycles};
pub use error::{Error, Result};
pub use mem::HostMem;
pub use seam::{DmaBuf, DmaMemory, FunctionReset, Mapped, Mapper, Marks, MmioWindow, Port, Registers, Run};
