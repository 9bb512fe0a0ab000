//! The words of NVMe, spoken by everybody here: the host driver, the GPU and the simulator compile this same source.
//!
//! Registers, commands, completions, statuses, identify data, log pages, data pointers, namespace formats, and the
//! queue algorithms. Follows NVM Express Base 2.0 and NVM Command Set 1.0; fields that are zero-based on the wire
//! end in `_z`. No dependencies, no allocation, no `std`.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod addr;
pub mod admin;
pub mod array;
pub mod entry;
pub mod fabrics;
pub mod feature;
pub mod format;
pub mod identify;
pub mod kernel;
pub mod log;
pub mod nvm;
pub mod prp;
pub mod queue;
pub mod regs;
pub mod sgl;
pub mod status;
mod wire;

pub use addr::{BusAddr, GpuAddr};
pub use entry::{Cqe, Sqe};
pub use status::Status;
