//! GPU kernels for samples.

mod check;
mod convert;
mod spectrum;

pub use check::{Check, Checked, check};
pub use convert::{Convert, Totals, convert};
pub use spectrum::{Spectrum, spectrum};

use onehop_block::pair;
pub use onehop_block::{Block, THREADS};
use onehop_proto::GpuAddr;

/// Blocks per launch. Each has its own row for results.
pub const BLOCKS: u32 = 64;
/// Words of local memory of [`convert`] and [`check`].
pub const LOCAL_WORDS: u32 = THREADS * 8;

/// The bits of the `group`th four samples of a buffer.
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

/// Reduces every thread's eight words of local memory into the first thread's, pairwise.
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
