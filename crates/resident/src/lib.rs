//! A simulated drive whose I/O queues are served on the GPU, in its memory, by the model of `onehop-controller`.
//!
//! 1. [`open`] makes the drive from a specification and a GPU.
//! 2. [`ResidentDrive::port`] is its controller, for `onehop_drive::Drive::open`.
//! 3. [`ResidentDrive::sim`] reports the violations that the simulator saw.
//! 4. [`ControllerHost::serve`](onehop_gpu::ControllerHost::serve) runs a warp for each queue pair.
//! 5. [`onehop_gpu::controllers`] keeps queue pairs in the GPU's memory.
//!
//! Registers, admin commands, identify data, features and resets are those of `onehop-sim`, on the CPU. Rings and data
//! may be in VRAM, in host memory or in the controller's buffer; the namespace is in VRAM. On the emulated GPU the
//! warps are CPU threads, and no hardware is needed.
#![forbid(unsafe_code)]

mod drive;
mod engine;
mod error;
mod faults;
mod memory;

pub use drive::{ResidentDrive, open};
pub use error::{Error, Result};
