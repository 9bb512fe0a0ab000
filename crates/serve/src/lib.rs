//! The daemon behind `onehop mount`: a folder, of this machine or of a target, mounted by FUSE, whose files programs read and write by usrbio.
//!
//! ```text
//! fs        what the kernel asks by FUSE: files of the folder, and 3fs-virt with the links of programs
//! table     buffers and rings that programs told of, whose they are, and when their program is gone
//! persons   for whom it counts what a user takes
//! workers   wait at the semaphores of submissions, take what is in the rings, and do what needs no waiting
//! io        what was asked for, checked; where the bytes come from; what waits for a disk, or goes to a GPU
//! socket    GPU memory of programs, which no link can name
//! predecessor  the mount that was here before, if its daemon was killed
//! stats     what was done, and which way it went: 3fs-virt/onehop/stats
//! ```
//! What programs write into shared memory is theirs to break: it is copied once and checked, it is touched by system calls or
//! under a guard, and nothing that one user does reaches what is another's.
#![forbid(unsafe_code)]

mod daemon;
mod error;
mod fs;
mod io;
mod locks;
mod memory;
mod opens;
mod persons;
mod predecessor;
mod socket;
mod stats;
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
