//! Copies between memory of the host and of the GPU by a kernel, which reads what to copy from words in memory that the host
//! fills in after it has launched it. A copy engine would have to know all of that when the copy is enqueued.

use super::Seat;

/// What a kernel copies: three words of eight bytes each, the source's address, the destination's and how many bytes.
pub struct PlaceOrder;

impl PlaceOrder {
    /// Where the source's address is.
    pub const SOURCE: u64 = 0;
    /// Where the destination's address is.
    pub const DESTINATION: u64 = 8;
    /// Where the number of bytes is.
    pub const LENGTH: u64 = 16;
    /// Bytes in all.
    pub const BYTES: usize = 24;
}

/// Copies of words whose width both addresses are multiples of.
pub trait Copies {
    /// Copies words of `W` bytes: from `source` to `destination`, and again `step` bytes further, `count` times, at most
    /// four. All are loaded before the first is stored.
    fn copy<const W: u64>(&self, source: u64, destination: u64, step: u64, count: u32);
}

/// One thread's part of a copy: whole words as wide as the two addresses allow, and the bytes before and behind them.
/// The two ranges do not overlap.
#[inline(always)]
pub fn run_place<C: Copies>(copies: &C, [source, destination, bytes]: [u64; 3], seat: Seat) {
    let apart = source ^ destination;
    if apart.is_multiple_of(16) {
        place::<C, 16>(copies, [source, destination, bytes], seat);
    } else if apart.is_multiple_of(4) {
        place::<C, 4>(copies, [source, destination, bytes], seat);
    } else {
        place::<C, 1>(copies, [source, destination, bytes], seat);
    }
}

#[inline(always)]
fn place<C: Copies, const W: u64>(
    copies: &C,
    [source, destination, bytes]: [u64; 3],
    Seat { block, thread }: Seat,
) {
    let threads = block.1 as u64 * thread.1 as u64;
    let own = block.0 as u64 * thread.1 as u64 + thread.0 as u64;
    let head = destination.wrapping_neg() % W;
    let head = if head < bytes { head } else { bytes };
    let words = (bytes - head) / W;
    let tail = bytes - head - words * W;
    let mut edge = own;
    while edge < head + tail {
        let at = if edge < head { edge } else { bytes - tail + (edge - head) };
        copies.copy::<1>(source + at, destination + at, 0, 1);
        edge += threads;
    }
    let mut word = own;
    while word < words {
        let at = head + word * W;
        let left = (words - word).div_ceil(threads);
        let count = if left < 4 { left } else { 4 };
        copies.copy::<W>(source + at, destination + at, threads * W, count as u32);
        word += threads * count;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::vec;
    use std::vec::Vec;

    use super::*;

    /// How often each byte of the destination was written, from which source and by words of which width.
    struct Log(RefCell<Vec<(u64, u64, u64)>>);

    impl Copies for Log {
        fn copy<const W: u64>(&self, source: u64, destination: u64, step: u64, count: u32) {
            assert!((1..=4).contains(&count) && source.is_multiple_of(W) && destination.is_multiple_of(W));
            for word in 0..u64::from(count) {
                self.0.borrow_mut().push((source + word * step, destination + word * step, W));
            }
        }
    }

    fn copied(order: [u64; 3], blocks: u32, threads: u32) -> u64 {
        let log = Log(RefCell::default());
        for (block, thread) in (0..blocks).flat_map(|block| (0..threads).map(move |thread| (block, thread))) {
            run_place(&log, order, Seat { block: (block, blocks), thread: (thread, threads) });
        }
        let [source, destination, bytes] = order;
        let (mut seen, mut widest) = (vec![0; bytes as usize], 0);
        for (from, to, width) in log.0.into_inner() {
            assert_eq!(from.wrapping_sub(source), to.wrapping_sub(destination));
            widest = widest.max(width);
            for byte in to..to + width {
                seen[(byte - destination) as usize] += 1;
            }
        }
        assert!(seen.iter().all(|times| *times == 1), "{order:?}: {seen:?}");
        widest
    }

    #[test]
    fn every_byte_is_copied_once_and_nothing_beside_it() {
        for bytes in (0..70).chain([127, 128, 129, 1000, 4095, 4096, 4097]) {
            for (source, destination) in [(0, 0), (1, 1), (15, 31), (4, 8), (7, 3), (3, 0), (0, 9), (2, 16)] {
                copied([4096 + source, 65536 + destination, bytes], 2, 3);
                copied([4096 + source, 65536 + destination, bytes], 1, 1);
            }
        }
    }

    #[test]
    fn words_are_as_wide_as_the_addresses_allow() {
        assert_eq!(copied([4096 + 5, 65536 + 21, 100], 2, 3), 16);
        assert_eq!(copied([4096 + 4, 65536 + 8, 100], 2, 3), 4);
        assert_eq!(copied([4096 + 4, 65536 + 6, 100], 2, 3), 1);
        assert_eq!(copied([4096, 65536, 0], 2, 3), 0);
    }
}
