//! usrbio, the protocol by which programs read and write files of 3FS without system calls, for both sides of it.
//!
//! 1. [`mount::Mount::open`] finds a mount.
//! 2. [`buffer::Buffer::create`] creates memory in `/dev/shm` and publishes it by a symbolic link in `3fs-virt/iovs`.
//! 3. [`buffer::Ring::create`] creates a ring, whose link is a [`Name`] with its parameters.
//! 4. [`buffer::Ring::prepare`] and [`buffer::Ring::submit`] enter requests and post a semaphore of the daemon.
//! 4. [`buffer::Ring::prepare`] and [`buffer::Ring::submit`] enqueue requests and post the daemon's semaphore.
//!
//! The daemon's side of a ring is [`ring::RingServer`]. Buffers in GPU memory, which 3FS does not have, are registered
//! over a socket: [`wire`].
#![forbid(unsafe_code)]

pub mod buffer;
mod error;
pub mod files;
pub mod gpu;
mod id;
pub mod mount;
mod name;
pub mod ring;

pub mod wire;

pub use error::{Error, Result};
pub use id::Id;
pub use name::{Name, Priority, RingName};

/// The folder of shared memory.
pub const SHM: &str = "/dev/shm";
/// The folder of links, below the mount point.
pub const IOVS: &str = "3fs-virt/iovs";
/// The folder that only our daemon has, below the mount point.
pub const ONEHOP_FOLDER: &str = "3fs-virt/onehop";

/// The flags of a ring.
pub mod flag {
    /// Allows reading uncommitted data. Has no effect here.
    pub const ALLOW_READ_UNCOMMITTED: u64 = 1;
    /// Makes reads of holes fail, instead of returning zeros.
    pub const FORBID_READ_HOLES: u64 = 2;
}
