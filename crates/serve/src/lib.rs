//! The daemon behind `onehop mount`: it mounts a folder by FUSE, and serves programs that read and write its files by usrbio.
//!
//! 1. [`MountOptions::new`] names a folder of this machine, [`MountOptions::of_target`] one of another machine.
//! 2. [`Daemon::start`] mounts it.
//! 3. [`Daemon::report`] says what was done, and by which routes.
//! 4. [`Daemon::is_over`] is true once it was unmounted.
//! 5. [`Daemon::end`] unmounts it.
//!
//! ```text
//! fs           requests of the kernel: files of the folder, and 3fs-virt with the links of programs
//! table        buffers and rings of programs, their owners, and the end of their programs
//! persons      budgets of users
//! workers      wait at the semaphores of rings, take requests, and do what needs no waiting
//! io           checked requests; routes of their bytes; threads for disks and GPUs
//! socket       GPU memory of programs, which no link can name
//! releases     links that are gone, and their memory
//! predecessor  the mount that was here before, if its daemon was killed
//! stats        counts by route: 3fs-virt/onehop/stats
//! ```
//!
//! Programs may write anything into shared memory at any time. It is copied once and then checked, and accessed by system calls
//! or under a guard. Nothing that a user does reaches another user's data.
#![forbid(unsafe_code)]

mod daemon;
mod error;
mod fs;
mod io;
mod leftovers;
mod locks;
mod memory;
mod opens;
mod persons;
mod predecessor;
mod releases;
mod shm;
mod socket;
mod stats;
mod supplies;
mod table;
mod waits;
mod workers;

pub use daemon::{Daemon, MountOptions, MountSource};
pub use error::{Error, Result};
pub use stats::Stats;

/// The daemon's account of itself, as JSON, below the mount point.
pub const STATS: &str = "3fs-virt/onehop/stats";

/// A lock, whatever became of who had it before: what is behind locks here is whole between any two statements.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The same, to read.
pub(crate) fn read<T>(lock: &std::sync::RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The same, to write.
pub(crate) fn write<T>(lock: &std::sync::RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(std::sync::PoisonError::into_inner)
}
