//! What GPU blocks do with samples: ordinary generic functions over [`Block`]. The emulated GPU calls them on the CPU, the
//! device crate wraps them into kernel entries. Jobs are plain words, laid out alike on both sides, passed by value.

mod check;
mod convert;
mod spectrum;

pub use check::{Check, Checked, check};
pub use convert::{Convert, Totals, convert};
pub use spectrum::{Spectrum, spectrum};

use onehop_proto::GpuAddr;

/// Threads of a block: a power of two.
pub const THREADS: u32 = 256;
/// Blocks of a launch: each leaves its results in a row of its own.
pub const BLOCKS: u32 = 64;
/// Words of local memory of [`convert`] and [`check`].
pub const LOCAL_WORDS: u32 = THREADS * 8;

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
const fn pair(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}

/// Bits of four samples of a buffer, the `group`th four of it.
#[inline(always)]
fn four<B: Block>(block: &B, from: GpuAddr, format: crate::Format, group: u32) -> [u32; 4] {
    match format {
        crate::Format::Ci16 => block.load_four(from.plus(u64::from(group) * 16)),
        crate::Format::Ci12 => {
            let at = from.plus(u64::from(group) * 12);
            format.four([block.load(at), block.load(at.plus(4)), block.load(at.plus(8)), 0])
        }
    }
}

/// A 64-bit sum in two words of local memory.
#[inline(always)]
fn local_sum<B: Block>(block: &B, at: u32) -> u64 {
    u64::from(block.local(at)) | u64::from(block.local(at + 1)) << 32
}

#[inline(always)]
fn set_local_sum<B: Block>(block: &B, at: u32, value: u64) {
    block.set_local(at, value as u32);
    block.set_local(at + 1, (value >> 32) as u32);
}

/// Adds to a 64-bit sum in memory.
#[inline(always)]
fn add_sum<B: Block>(block: &B, at: GpuAddr, value: u64) {
    let old = u64::from(block.load(at)) | u64::from(block.load(at.plus(4))) << 32;
    let new = old.wrapping_add(value);
    block.store(at, new as u32);
    block.store(at.plus(4), (new >> 32) as u32);
}

/// Joins what every thread left in its eight words of local memory into the first thread's, two by two.
#[inline(always)]
fn join<B: Block>(block: &B, mut two: impl FnMut(u32, u32)) {
    let mut half = block.threads() / 2;
    while half > 0 {
        block.each(|thread| {
            if thread < half {
                two(thread * 8, (thread + half) * 8);
            }
        });
        half /= 2;
    }
}
