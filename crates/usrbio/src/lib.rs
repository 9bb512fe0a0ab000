//! usrbio, the way in which programs read and write files of 3FS without system calls: rings in shared memory.
//!
//! A program makes memory in `/dev/shm`, and tells the daemon of a mount about it by a symbolic link in
//! `3fs-virt/iovs`, whose [`Name`] says what it is: a buffer, or a ring. In a [`ring`] it puts what is to be read and written,
//! posts a semaphore of the daemon's, and waits at one of its own. Everything here is that protocol, for both sides of it,
//! as 3FS has it; what is ours alone, buffers in GPU memory that go to the daemon over a socket, is in [`wire`].
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

/// Where shared memory lies.
pub const SHM: &str = "/dev/shm";
/// The folder of a mount in which links are made, below the mount point.
pub const IOVS: &str = "3fs-virt/iovs";
/// The folder of a mount that only our daemon has.
pub const OURS: &str = "3fs-virt/onehop";

/// The flags of a ring.
pub mod flag {
    /// Reads may see what has not been committed. Nothing here is ever uncommitted.
    pub const ALLOW_READ_UNCOMMITTED: u64 = 1;
    /// A read that meets a hole is an error, and no zeroes.
    pub const FORBID_READ_HOLES: u64 = 2;
}
