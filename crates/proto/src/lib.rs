//! The NVMe protocol: the driver, the GPU kernels and the simulator compile this same source.
//!
//! 1. [`regs`] are the controller's registers.
//! 2. [`admin`] and [`nvm`] make commands, [`Sqe`]; [`prp::build`] and [`sgl`] say where their data is.
//! 3. [`queue::Owner`] submits and completes for one owner, [`queue::Shared`] for any number of threads.
//! 4. [`kernel::run_owner`] and [`kernel::run_shared`] execute a job with them on a GPU.
//! 5. [`identify`], [`log`] and [`feature`] read what a controller says about itself.
//!
//! It follows NVM Express Base 2.0 and NVM Command Set 1.0. Fields that are zero-based on the wire end in `_z`. There are no
//! dependencies, no allocation and no `std`.
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
