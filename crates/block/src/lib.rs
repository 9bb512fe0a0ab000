//! Kernels that work on data in GPU memory: generic functions over [`Block`]. The emulated GPU calls them on the CPU,
//! the device crate wraps them into kernel entries. Their arguments are plain words of the same layout on both sides,
//! passed by value.
//!
//! This crate has the trait, [`ranges`], which copies many ranges, and [`crc32c`], the checksum of data in GPU memory. To sum a
//! range:
//!
//! 1. [`crc32c::tables`] writes the tables, once per GPU.
//! 2. [`crc32c::GpuRange::job`] makes the kernel's arguments.
//! 3. [`crc32c::sum`] is the kernel.
//! 4. [`crc32c::GpuRange::finish`] makes the checksum from its results.
//!
//! ```
//! use onehop_block::crc32c::{GpuRange, TABLE_WORDS, tables};
//! use onehop_proto::GpuAddr;
//!
//! let mut words = Vec::new();
//! tables(|word| words.push(word));
//! assert_eq!(words.len(), TABLE_WORDS as usize);
//!
//! let range = GpuRange { at: GpuAddr(0x1000), bytes: 3 << 20 };
//! let job = range.job(GpuAddr(0x100_0000), GpuAddr(0x200_0000));
//! // After a launch with `job.words()`, `out` holds a word for each chunk.
//! assert_eq!(job.chunks(), range.chunks());
//! ```
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod crc32c;
pub mod ranges;

use onehop_proto::GpuAddr;

/// Threads of a block: a power of two.
pub const THREADS: u32 = 256;

/// Threads that share local memory and meet at barriers.
///
/// Code between two calls is run by every thread with the same values. Only the closures of [`Self::each`] are per
/// thread; what one of them leaves in local memory is visible to all in the next.
pub trait Block {
    /// Index of this block in the launch.
    fn number(&self) -> u32;
    /// Number of blocks.
    fn count(&self) -> u32;
    /// Number of threads: a power of two, at most [`THREADS`].
    fn threads(&self) -> u32;
    /// Runs `f` on every thread, followed by a barrier.
    fn each(&self, f: impl FnMut(u32));
    /// Reads a word.
    fn load(&self, at: GpuAddr) -> u32;
    /// Reads four words, at an address that is a multiple of 16.
    fn load_four(&self, at: GpuAddr) -> [u32; 4];
    /// Writes a word.
    fn store(&self, at: GpuAddr, value: u32);
    /// Writes four words, at an address that is a multiple of 16.
    fn store_four(&self, at: GpuAddr, words: [u32; 4]);
    /// Waits until what this thread has stored has reached its memory.
    fn settle(&self);
    /// Reads a word of local memory.
    fn local(&self, index: u32) -> u32;
    /// Writes a word of local memory.
    fn set_local(&self, index: u32, value: u32);
}

/// Two words in memory order.
#[must_use]
pub const fn pair(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}
