//! Brings up an NVMe controller and drives it, wherever it is: real PCI, QEMU, the simulator.
//!
//! [`Drive::open`] takes a [`ControllerBackend`](onehop_os::ControllerBackend), resets the controller and learns who it is. [`Drive::queue`] gives
//! an [`IoQueue`] for a CPU thread; [`Drive::gpu_queues`] gives queue pairs that GPU kernels drive by themselves, ours or,
//! by [`GpuQueues::export`], other people's. A command that is not completed in time climbs the time-out ladder (drain, abort, delete the queue, reset the
//! controller, reset the function); memory of a lost command is not given back before the controller has let go of it,
//! and every handle goes on working after a reset.
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
