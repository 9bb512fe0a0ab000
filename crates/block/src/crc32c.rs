//! CRC32C of memory by blocks of threads.
//!
//! The remainder of a sum of polynomials is the sum of the remainders. So a chunk of memory is dealt to a block's
//! threads 16 bytes at a time, row by row, which suits coalesced loads. Each thread keeps the remainder of its own
//! column, as if the others' bytes were zeros, and steps over them with a table; at the end columns are joined
//! pairwise. The result is the *bare* remainder of each chunk, without CRC32C's inversions. The host joins these and
//! makes the checksum ([`GpuRange::finish`]).
//!
//! Leading zeros do not change a bare remainder. So the chunks of a range are counted from its end, and the first may
//! extend beyond its beginning. If a range ends within 16 bytes, the host takes the zeros behind it back out.

use core::mem::{offset_of, size_of};

use onehop_proto::GpuAddr;

use crate::{Block, THREADS, pair};

/// The polynomial, lowest bit first.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// Bytes that a thread processes at a time.
const GRANULE: u32 = 16;
/// Granules that a thread processes of a chunk.
const ROWS: u32 = 64;
/// Bytes of a row of a block's threads.
const ROW: u32 = GRANULE * THREADS;
/// Bytes of a chunk.
pub const CHUNK: u64 = (ROW * ROWS) as u64;

/// Offsets of the tables: the effect of each byte of a granule at the granule's end, of each byte of a remainder one
/// row further on, and of each bit of a remainder after as many granules as are joined.
const STEP: u32 = 16 * 256;
const JOIN: u32 = STEP + 4 * 256;
const JOINS: u32 = THREADS.trailing_zeros();
/// Words of the tables.
pub const TABLE_WORDS: u32 = JOIN + JOINS * 32;
/// Words of local memory of a block: the tables, and a remainder for each thread.
pub const LOCAL_WORDS: u32 = TABLE_WORDS + THREADS;

/// The kernel's arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Sum {
    /// Address of the range's first granule.
    pub first: u64,
    /// Number of granules that it touches.
    pub granules: u64,
    /// [`tables`], aligned to 16.
    pub tables: u64,
    /// A word for each chunk.
    pub out: u64,
    /// Bytes of the first granule that are not in the range.
    pub before: u32,
    /// Bytes of the last granule that are not in the range.
    pub after: u32,
}

const _: () = assert!(size_of::<Sum>() == 40 && offset_of!(Sum, before) == 32);

impl Sum {
    /// The arguments as words.
    #[must_use]
    pub const fn words(&self) -> [u64; 5] {
        let Self { first, granules, tables, out, before, after } = *self;
        [first, granules, tables, out, pair(before, after)]
    }

    /// Number of chunks.
    #[must_use]
    pub const fn chunks(&self) -> u64 {
        self.granules.div_ceil(CHUNK / GRANULE as u64)
    }
}

/// A range of GPU memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuRange {
    /// Its address.
    pub at: GpuAddr,
    /// Its length.
    pub bytes: u64,
}

impl GpuRange {
    /// Number of chunks; zero for an empty range.
    #[must_use]
    pub const fn chunks(&self) -> u64 {
        if self.bytes == 0 { 0 } else { self.job(GpuAddr(0), GpuAddr(0)).chunks() }
    }

    /// The kernel's arguments for it.
    #[must_use]
    pub const fn job(&self, tables: GpuAddr, out: GpuAddr) -> Sum {
        let granule = GRANULE as u64;
        let (before, end) = (self.at.0 % granule, self.at.0 + self.bytes);
        let granules = end.div_ceil(granule) - self.at.0 / granule;
        let after = end.next_multiple_of(granule) - end;
        let (first, tables, out) = (self.at.0 - before, tables.0, out.0);
        Sum { first, granules, tables, out, before: before as u32, after: after as u32 }
    }

    /// Computes the CRC32C from the blocks' results for each chunk.
    #[must_use]
    pub fn finish(&self, chunks: impl IntoIterator<Item = u32>) -> u32 {
        let step = shift(CHUNK);
        let bare = chunks.into_iter().fold(0, |all, chunk| times(all, step) ^ chunk);
        let end = self.at.0 + self.bytes;
        let bare = (end..end.next_multiple_of(u64::from(GRANULE))).fold(bare, |bare, _| without_a_zero(bare));
        bare ^ times(!0, shift(self.bytes)) ^ !0
    }
}

/// The kernel: each block sums whole chunks.
#[inline(always)]
pub fn sum<B: Block>(block: &B, job: &Sum) {
    block.each(|thread| {
        let mut at = thread;
        while at < TABLE_WORDS / 4 {
            let words = block.load_four(GpuAddr(job.tables).plus(u64::from(at) * 16));
            let mut i = 0;
            while i < 4 {
                block.set_local(at * 4 + i, words[i as usize]);
                i += 1;
            }
            at += block.threads();
        }
    });
    let mut chunk = u64::from(block.number());
    while chunk < job.chunks() {
        block.each(|thread| {
            let left = column(block, job, chunk, thread);
            block.set_local(TABLE_WORDS + thread, left);
        });
        let mut join = 0;
        while join < JOINS {
            block.each(|thread| {
                if thread % (2 << join) == 0 {
                    let right = block.local(TABLE_WORDS + thread + (1 << join));
                    let left = moved(block, JOIN + join * 32, block.local(TABLE_WORDS + thread));
                    block.set_local(TABLE_WORDS + thread, left ^ right);
                }
            });
            join += 1;
        }
        block.each(|thread| {
            if thread == 0 {
                block.store(GpuAddr(job.out).plus(chunk * 4), block.local(TABLE_WORDS));
            }
        });
        chunk += u64::from(block.count());
    }
}

/// The bare remainder of one thread's column of a chunk.
#[inline(always)]
fn column<B: Block>(block: &B, job: &Sum, chunk: u64, thread: u32) -> u32 {
    // Granules between the start of the first chunk and that of the range.
    let lead = job.chunks() * (CHUNK / u64::from(GRANULE)) - job.granules;
    let mut at = chunk * (CHUNK / u64::from(GRANULE)) + u64::from(thread);
    let (mut left, mut row) = (0, 0);
    while row < ROWS {
        let next = stepped(block, left);
        left = if at < lead { 0 } else { next ^ granule(block, &taken(block, job, at - lead)) };
        at += u64::from(THREADS);
        row += 1;
    }
    left
}

/// The granule with this number; zeros where it is outside the range.
#[inline(always)]
fn taken<B: Block>(block: &B, job: &Sum, number: u64) -> [u32; 4] {
    let mut words = block.load_four(GpuAddr(job.first).plus(number * u64::from(GRANULE)));
    if number == 0 && job.before > 0 {
        words = masked(words, job.before, GRANULE);
    }
    if number + 1 == job.granules && job.after > 0 {
        words = masked(words, 0, GRANULE - job.after);
    }
    words
}

/// The bytes `from` up to `to` of four words; zeros for the others.
#[inline(always)]
fn masked(words: [u32; 4], from: u32, to: u32) -> [u32; 4] {
    let keep = |word: u32| {
        let low = from.saturating_sub(word * 4).min(4);
        let high = to.saturating_sub(word * 4).min(4);
        (((1u64 << (high * 8)) - 1) & !((1u64 << (low * 8)) - 1)) as u32
    };
    [words[0] & keep(0), words[1] & keep(1), words[2] & keep(2), words[3] & keep(3)]
}

/// The remainder of four words.
#[inline(always)]
fn granule<B: Block>(block: &B, words: &[u32; 4]) -> u32 {
    let [a, b, c, d] = *words;
    bytes(block, 12 * 256, a) ^ bytes(block, 8 * 256, b) ^ bytes(block, 4 * 256, c) ^ bytes(block, 0, d)
}

/// A remainder one row further on.
#[inline(always)]
fn stepped<B: Block>(block: &B, left: u32) -> u32 {
    bytes(block, STEP, left)
}

/// Combines the entries of four tables, starting at `tables`, for the bytes of a word; the last byte uses the first
/// table.
#[inline(always)]
fn bytes<B: Block>(block: &B, tables: u32, word: u32) -> u32 {
    block.local(tables + 3 * 256 + (word & 0xff))
        ^ block.local(tables + 2 * 256 + (word >> 8 & 0xff))
        ^ block.local(tables + 256 + (word >> 16 & 0xff))
        ^ block.local(tables + (word >> 24))
}

/// Applies a table of 32 words, one for each bit, to a remainder.
#[inline(always)]
fn moved<B: Block>(block: &B, table: u32, left: u32) -> u32 {
    let (mut sum, mut bit) = (0, 0);
    while bit < 32 {
        sum ^= block.local(table + bit) & 0u32.wrapping_sub(left >> bit & 1);
        bit += 1;
    }
    sum
}

/// The tables for [`sum`]: [`TABLE_WORDS`] words, each passed to `put` once.
pub fn tables(mut put: impl FnMut(u32)) {
    // The first table is for the last byte of a granule, which has no bytes behind it.
    for behind in 0..GRANULE {
        let further = shift(u64::from(behind) + 1);
        (0..256).for_each(|byte| put(times(byte, further)));
    }
    // Within a remainder, the first byte is stepped the least: a table for each byte, the last byte's first.
    let row = shift(u64::from(ROW));
    for byte in (0..4).rev() {
        (0..256).for_each(|value: u32| put(times(value << (byte * 8), row)));
    }
    for join in 0..JOINS {
        let further = shift(u64::from(GRANULE) << join);
        (0..32).for_each(|bit| put(times(1 << bit, further)));
    }
}

/// The product of two remainders.
const fn times(a: u32, b: u32) -> u32 {
    let (mut product, mut a, mut bit) = (0, a, 1u32 << 31);
    while bit != 0 {
        if b & bit != 0 {
            product ^= a;
        }
        a = with_a_zero_bit(a);
        bit >>= 1;
    }
    product
}

const fn with_a_zero_bit(a: u32) -> u32 {
    a >> 1 ^ (POLYNOMIAL & 0u32.wrapping_sub(a & 1))
}

/// The factor that appends this many bytes of zeros.
const fn shift(bytes: u64) -> u32 {
    // Square and multiply: x^8, x^16, x^32 and so on, selected by the bits of `bytes`.
    let (mut product, mut power, mut left) = (1u32 << 31, 1u32 << 23, bytes);
    while left != 0 {
        if left & 1 != 0 {
            product = times(product, power);
        }
        power = times(power, power);
        left >>= 1;
    }
    product
}

/// A remainder before a byte of zeros was appended.
fn without_a_zero(bare: u32) -> u32 {
    (0..8).fold(bare, |bare, _| if bare >> 31 == 0 { bare << 1 } else { (bare ^ POLYNOMIAL) << 1 | 1 })
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use proptest::prelude::*;

    use super::*;

    /// Memory from address 0 on; runs a block's threads in turn.
    struct BlockModel<'a> {
        memory: &'a [u8],
        tables: &'a [u32],
        out: &'a RefCell<Vec<u32>>,
        number: u32,
        count: u32,
        local: Vec<Cell<u32>>,
    }

    const TABLES: u64 = 1 << 40;

    impl Block for BlockModel<'_> {
        fn number(&self) -> u32 {
            self.number
        }
        fn count(&self) -> u32 {
            self.count
        }
        fn threads(&self) -> u32 {
            THREADS
        }
        fn each(&self, f: impl FnMut(u32)) {
            (0..THREADS).for_each(f);
        }
        fn load(&self, _: GpuAddr) -> u32 {
            unreachable!("sums load four words at a time")
        }
        fn load_four(&self, at: GpuAddr) -> [u32; 4] {
            assert!(at.0.is_multiple_of(16));
            if let Some(at) = at.0.checked_sub(TABLES) {
                return std::array::from_fn(|i| self.tables[at as usize / 4 + i]);
            }
            let words = self.memory[at.0 as usize..at.0 as usize + 16].as_chunks::<4>().0;
            std::array::from_fn(|i| u32::from_le_bytes(words[i]))
        }
        fn store(&self, at: GpuAddr, value: u32) {
            self.out.borrow_mut()[at.0 as usize / 4] = value;
        }
        fn store_four(&self, _: GpuAddr, _: [u32; 4]) {
            unreachable!("sums store single words")
        }
        fn settle(&self) {
            unreachable!("sums wait for no stores")
        }
        fn local(&self, index: u32) -> u32 {
            self.local[index as usize].get()
        }
        fn set_local(&self, index: u32, value: u32) {
            self.local[index as usize].set(value);
        }
    }

    fn by_blocks(memory: &[u8], range: GpuRange, count: u32) -> u32 {
        let mut words = Vec::new();
        tables(|word| words.push(word));
        assert_eq!(words.len(), TABLE_WORDS as usize);
        let job = range.job(GpuAddr(TABLES), GpuAddr(0));
        let out = RefCell::new(vec![0xdead_beef; job.chunks() as usize]);
        for number in 0..count {
            let local = vec![Cell::new(0x5555_5555); LOCAL_WORDS as usize];
            sum(&BlockModel { memory, tables: &words, out: &out, number, count, local }, &job);
        }
        range.finish(out.into_inner())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn checksums_match_another_implementation(
            at in 0_u64..40, bytes in prop_oneof![0_u64..70, 0..CHUNK * 3], count in 1_u32..4, seed: u64
        ) {
            let mut state = seed | 1;
            // Bytes around the range must not count.
            let memory: Vec<u8> = (0..(at + bytes).next_multiple_of(16))
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 56) as u8
                })
                .collect();
            let want = ::crc32c::crc32c(&memory[at as usize..(at + bytes) as usize]);
            prop_assert_eq!(by_blocks(&memory, GpuRange { at: GpuAddr(at), bytes }, count), want);
        }
    }

    #[test]
    fn chunk_boundaries_do_not_matter() {
        let memory: Vec<u8> = (0..2 * CHUNK + 48).map(|i| (i * 7 + i / 251) as u8).collect();
        for (at, bytes) in
            [(0, CHUNK), (0, CHUNK + 1), (15, CHUNK), (16, 2 * CHUNK), (1, 15), (3, 1), (16, 0), (5, 0)]
        {
            let want = ::crc32c::crc32c(&memory[at as usize..(at + bytes) as usize]);
            assert_eq!(
                by_blocks(&memory, GpuRange { at: GpuAddr(at), bytes }, 2),
                want,
                "{bytes} bytes at {at}"
            );
        }
    }
}
