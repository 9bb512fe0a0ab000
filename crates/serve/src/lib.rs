//! The daemon behind `onehop mount`: it mounts a folder with FUSE, and serves programs that read and write its files
//! through usrbio rings.
//!
//! 1. [`MountOptions::new`] names a folder of this machine, [`MountOptions::of_target`] one of another machine.
//! 2. [`Daemon::start`] mounts it.
//! 3. [`Daemon::report`] returns counts of transfers by route.
//! 4. [`Daemon::is_over`] is true once it is unmounted.
//! 5. [`Daemon::end`] unmounts it.
//!
//! ```text
//! fs           FUSE requests: files of the folder, and 3fs-virt with the links of programs
//! table        buffers and rings of programs, and their removal when a program ends
//! persons      budgets of users
//! workers      threads that wait for semaphores, take requests from rings, and execute what does not block
//! io           checked requests, their routes, and threads that may block on disks and GPUs
//! socket       registration of GPU memory, which a link cannot name
//! releases     release of memory after its link is removed
//! predecessor  the stale mount of a daemon that was killed
//! stats        counts by route: 3fs-virt/onehop/stats
//! ```
//!
//! Programs may change shared memory at any time. The daemon copies requests before it checks them, and accesses memory
//! through system calls or under a guard. A user cannot affect another user's data.
#![forbid(unsafe_code)]

mod daemon;
mod error;
mod fs;
mod io;
mod leftovers;
mod locks;
mod memory;
mod nameless;
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

/// The daemon's statistics, as JSON, below the mount point.
pub const STATS: &str = "3fs-virt/onehop/stats";

/// Locks a mutex. Poisoning is ignored: the data behind these locks is consistent between any two statements.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Locks for reading, as [`lock`].
pub(crate) fn read<T>(lock: &std::sync::RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Locks for writing, as [`lock`].
pub(crate) fn write<T>(lock: &std::sync::RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(std::sync::PoisonError::into_inner)
}
