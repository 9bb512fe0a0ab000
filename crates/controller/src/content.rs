//! Blocks whose content follows from their number, and the check of blocks that were read.

use onehop_proto::GpuAddr;

use crate::layout::DataCheck;
use crate::report::{Exit, put};
use crate::warp::ControllerWarp;

/// A word of a block.
#[inline(always)]
#[must_use]
pub const fn content(block: u32, word: u32, seed: u32) -> u32 {
    let x = block.wrapping_add(seed).wrapping_mul(0x9e37_79b1) ^ word.wrapping_mul(0x85eb_ca77);
    (x ^ x >> 15).wrapping_mul(0x2c1b_3c6d)
}

/// The block that item `i` of a job reads. Each block comes once before any repeats, and two in a row are never
/// neighbours.
#[inline(always)]
#[must_use]
pub const fn block_of(item: u32, blocks: u32) -> u32 {
    // Odd, hence coprime to `blocks`, which is a power of two.
    item.wrapping_mul(0x9e37_79b1) & (blocks - 1)
}

/// Compares memory with the blocks that should have been read into it. Needs no local words.
pub fn check<W: ControllerWarp>(warp: &W, at: GpuAddr) -> Exit {
    let check = DataCheck::load(warp, at);
    let quads = check.block_words / 4;
    warp.each(|lane| {
        let mut bad = 0;
        for i in 0..check.count {
            let item = check.first + i;
            let block = block_of(item, check.blocks);
            let from = check.data.plus(u64::from(item) * u64::from(check.block_words) * 4);
            let mut quad = lane;
            while quad < quads {
                let words = warp.load4(from.plus(u64::from(quad) * 16));
                for (word, seen) in (quad * 4..).zip(words) {
                    bad += (seen != content(block, word, check.seed)) as u32;
                }
                quad += warp.lanes();
            }
        }
        if bad > 0 {
            warp.fetch_add(check.result, bad);
        }
    });
    warp.once(|| put(warp, check.result, 8, u64::from(check.count)));
    Exit::Stopped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_read_once_a_round() {
        let mut seen = [0; 4096];
        (0..8192).for_each(|item| seen[block_of(item, 4096) as usize] += 1);
        assert!(seen.iter().all(|count| *count == 2));
        assert_ne!(content(1, 0, 7), content(2, 0, 7));
    }
}
