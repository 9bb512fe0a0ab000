//! Which blocks a pass moves, and in which order.

use std::collections::HashSet;

use super::{Cell, Effort, Move};

/// The blocks of a pass, each once: the place of each on the drive or in the file. Block `i` lies at `i` in memory.
pub(crate) struct Order {
    pub(crate) block: u64,
    pub(crate) places: Vec<u64>,
}

impl Order {
    /// Blocks within `bytes`, or why there are none.
    pub(crate) fn new(cell: &Cell, bytes: u64, unit: u64, effort: &Effort) -> Result<Self, String> {
        let block = cell.block;
        if block == 0 || !block.is_multiple_of(unit) {
            return Err(format!("blocks are multiples of {unit} bytes here"));
        }
        let have = bytes / block;
        let least = u64::from(cell.threads.max(1));
        if have < least {
            return Err(format!(
                "there are {have} such blocks in {bytes} bytes, and each of {least} threads needs one"
            ));
        }
        // With fewer blocks, not as many could be in flight.
        let in_flight = u64::from(cell.threads) * u64::from(cell.depth);
        let count = (effort.bytes / block).min(effort.ops).max(least).max(in_flight).min(have);
        let picked = if cell.io.is_random() { anywhere(count, have) } else { (0..count).collect() };
        Ok(Self { block, places: picked.into_iter().map(|index| index * block).collect() })
    }

    /// Bytes of a pass.
    pub(crate) fn bytes(&self) -> u64 {
        self.block * self.places.len() as u64
    }

    /// The moves of one share in pass number `pass`. Each pass moves every block to the next slot of the share, so that
    /// bytes left by an earlier pass are not right for this one.
    pub(crate) fn moves(&self, share: &std::ops::Range<usize>, pass: u64, into: &mut Vec<Move>) {
        into.clear();
        let count = share.len().max(1);
        let turn = (pass % count as u64) as usize;
        into.extend(share.clone().map(|slot| {
            let from = share.start + (slot - share.start + turn) % count;
            Move { at: self.places[from], slot: slot as u64 * self.block }
        }));
    }
}

/// Mixes a number, so that every seed gives another sequence.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `count` different numbers below `have`, the same ones every time: two runs are to be comparable.
fn anywhere(count: u64, have: u64) -> Vec<u64> {
    if count * 2 > have {
        let mut all: Vec<u64> = (0..have).collect();
        for i in 0..count as usize {
            let other = i + (mix(i as u64) % (have - i as u64)) as usize;
            all.swap(i, other);
        }
        all.truncate(count as usize);
        return all;
    }
    let mut seen = HashSet::with_capacity(count as usize);
    (0..).map(|i| mix(i) % have).filter(|index| seen.insert(*index)).take(count as usize).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::results::IoType;
    use std::time::Duration;

    fn order(io: IoType, block: u64, threads: u32, bytes: u64) -> Result<Order, String> {
        let effort = Effort { bytes: 1 << 20, ops: 64, time: Duration::ZERO, repeats: 1 };
        Order::new(&Cell { io, block, depth: 1, threads }, bytes, 512, &effort)
    }

    #[test]
    fn a_pass_has_each_block_once_and_within() {
        for io in [IoType::Read, IoType::RandRead] {
            for (block, bytes) in
                [(512, 1 << 20), (4096, 70 * 4096), (4096, 3 * 4096 + 1), (1 << 20, 1 << 20)]
            {
                let order = order(io, block, 1, bytes).unwrap();
                let different: HashSet<_> = order.places.iter().collect();
                assert_eq!(different.len(), order.places.len());
                assert!(order.places.iter().all(|at| at + block <= bytes && at % block == 0));
                assert!(order.places.len() <= 64 && order.bytes() <= 1 << 20);
            }
        }
        assert!(order(IoType::Read, 100, 1, 1 << 20).is_err_and(|why| why.contains("512")));
        assert!(order(IoType::Read, 1 << 20, 2, 1 << 20).is_err_and(|why| why.contains("2 threads")));
        assert!(order(IoType::Read, 0, 1, 1 << 20).is_err());
    }

    #[test]
    fn every_pass_brings_another_block_to_every_slot() {
        let order = order(IoType::RandRead, 512, 2, 1 << 20).unwrap();
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for share in super::super::shares(order.places.len(), 2) {
            order.moves(&share, 6, &mut first);
            order.moves(&share, 7, &mut second);
            assert!(first.iter().zip(&second).all(|(a, b)| a.slot == b.slot && a.at != b.at));
            let places: HashSet<_> = first.iter().map(|m| m.at).collect();
            assert!(second.iter().all(|m| places.contains(&m.at)));
        }
    }
}
