//! Kernels that work on data in GPU memory: ordinary generic functions over [`Block`]. The emulated GPU calls them on the
//! CPU, the device crate wraps them into kernel entries. Jobs are plain words, laid out alike on both sides, passed by value.
//!
//! Here are the blocks themselves, and [`crc32c`], the check sum of whatever lies in GPU memory.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod crc32c;

use onehop_proto::GpuAddr;

/// Threads of a block: a power of two.
pub const THREADS: u32 = 256;

/// Threads that share local memory and meet at barriers.
///
/// Code between two calls is run by every thread with the same values; only the closures of [`Self::each`] see single
/// threads, and what one of them leaves in local memory is seen by all in the next.
pub trait Block {
    /// Which block of the launch this is.
    fn number(&self) -> u32;
    /// How many blocks there are.
    fn count(&self) -> u32;
    /// How many threads: a power of two, at most [`THREADS`].
    fn threads(&self) -> u32;
    /// Runs `f` on every thread, and lets them meet.
    fn each(&self, f: impl FnMut(u32));
    /// Reads a word.
    fn load(&self, at: GpuAddr) -> u32;
    /// Reads four words, on an address that is a multiple of 16.
    fn load_four(&self, at: GpuAddr) -> [u32; 4];
    /// Writes a word.
    fn store(&self, at: GpuAddr, value: u32);
    /// Writes four words, on an address that is a multiple of 16.
    fn store_four(&self, at: GpuAddr, words: [u32; 4]);
    /// Reads a word of local memory.
    fn local(&self, index: u32) -> u32;
    /// Writes a word of local memory.
    fn set_local(&self, index: u32, value: u32);
}

/// Two words as they lie in memory.
#[must_use]
pub const fn pair(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}
