//! The NVMe driver. It drives real PCI devices, QEMU's and the simulator's alike.
//!
//! 1. [`Drive::open`] takes a [`ControllerBackend`](onehop_os::ControllerBackend), resets the controller and identifies it.
//! 2. [`Drive::namespace`] returns a [`Namespace`], and [`Drive::buffer`] memory that the drive reaches.
//! 3. [`Drive::queue`] creates an [`IoQueue`] for a CPU thread; [`IoQueue::read`], [`IoQueue::write`] and [`IoQueue::flush`] use
//!    it.
//! 4. [`Drive::gpu_queues`] creates queue pairs that GPU kernels drive: ours by [`GpuQueues::read`] and [`GpuQueues::write`].
//! 5. [`GpuQueues::export`] exports such a queue to other people's kernels.
//!
//! A command that is not completed in time goes through the time-out ladder: drain, abort, delete the queue, reset the controller,
//! reset the function. Memory of a lost command is reused only when the controller can no longer write it. Every handle stays
//! usable after a reset.
#![forbid(unsafe_code)]

mod admin;
mod buffer;
mod canary;
mod command;
mod control;
mod core;
mod drive;

mod doubts;
mod durability;
mod entry;
mod error;
mod gpu;
mod holds;
mod identity;
mod ladder;
mod options;
mod queue;
mod ring;
mod slots;

pub use buffer::Buffer;
pub use command::{Io, Op};
pub use drive::Drive;
pub use entry::Finished;
pub use error::{Error, Recovery, Result};
pub use gpu::{ExportedQueue, GpuJob, GpuMode, GpuQueues, GpuSetup, Placement};
pub use identity::{Identity, Namespace};
pub use ladder::Incident;
pub use options::Options;
pub use queue::{Batch, IoQueue, Moved};
pub use slots::Token;
