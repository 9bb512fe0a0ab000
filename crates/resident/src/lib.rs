//! A drive for tests whose I/O queues are served in a GPU's memory, by the controller model that the GPU itself runs.
//!
//! Registers, admin commands, identify data, features and resets are those of `onehop-sim`, on the CPU. I/O commands are
//! carried out by resident warps ([`Gpu::serve`](onehop_gpu::Gpu::serve)), one for each queue pair, wherever rings and
//! data lie: in VRAM, in host memory, in the controller's buffer; the namespace lies in VRAM. On the emulated GPU the warps
//! are CPU threads, and all of it runs without hardware.
//!
//! From the bottom: `faults` translates; `engine` creates and deletes queue pairs for the simulator, by what
//! [`onehop_gpu::controllers`] keeps in the GPU's memory; `drive` puts the port together.
#![forbid(unsafe_code)]

mod drive;
mod engine;
mod error;
mod faults;
mod memory;

pub use drive::{ResidentDrive, open};
pub use error::{Error, Result};
