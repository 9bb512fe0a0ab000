//! Where the words of an array lie: its handle, its directory, its counters.

use super::ArrayError;
use crate::GpuAddr;
use crate::kernel::Answer;
use crate::queue::Memory;

/// Ways of a set.
pub const WAYS: u32 = 8;

/// The smallest page.
pub const MIN_PAGE_BYTES: u32 = 512;
/// The largest page.
pub const MAX_PAGE_BYTES: u32 = 64 << 10;

/// Words of a set: four for each way, one for lock and hand, the rest keep sets on multiples of 16 bytes.
const SET_WORDS: u32 = 4 * WAYS + 4;
pub(super) const SET_BYTES: u32 = SET_WORDS * 4;

/// Offsets within a set of the words of its first way; those of the next ways follow.
pub(super) mod set {
    use super::WAYS;
    pub const LOW: u32 = 0;
    pub const HIGH: u32 = 4 * WAYS;
    pub const STATE: u32 = 8 * WAYS;
    pub const NOTE: u32 = 12 * WAYS;
    pub const LOCK: u32 = 16 * WAYS;
}

/// The tag of a way that holds no page.
pub(super) const NO_PAGE: u64 = u64::MAX;

/// A way's state word.
pub(super) mod state {
    const fn kind(number: u32) -> u32 {
        number << 28
    }
    pub const KIND: u32 = kind(15);
    pub const FREE: u32 = kind(0);
    pub const LOADING: u32 = kind(1);
    pub const VALID: u32 = kind(2);
    pub const FAILED: u32 = kind(3);
    pub const LOST: u32 = kind(4);
    pub const UNUSED: u32 = kind(5);

    /// Has stores that the backing does not have.
    pub const DIRTY: u32 = 1 << 27;
    /// Was used since the clock's hand passed.
    pub const REFERENCED: u32 = 1 << 26;
    /// Is being written back.
    pub const WRITING: u32 = 1 << 25;
    /// The last write-back failed: the note says why.
    pub const BROKEN: u32 = 1 << 24;
    /// The last write-back may still happen: the note is the life of the backing in which it may.
    pub const UNSURE: u32 = 1 << 23;

    pub const PINS: u32 = (1 << 23) - 1;
    /// More pins are refused. There is room above for those that are about to be released.
    pub const MOST_PINS: u32 = 1 << 22;
}

/// The note of a command that may still happen in this life of the backing. It is no number of an [`Answer`].
pub(super) const fn life_note(life: u32) -> u32 {
    1 << 31 | life
}

/// Offsets of the counters. They wrap.
pub mod counter {
    /// Pages read.
    pub const READS: u32 = 0;
    /// Pages written back.
    pub const WRITES: u32 = 4;
    /// Reads that failed.
    pub const FAILED_READS: u32 = 8;
    /// Write-backs that failed.
    pub const FAILED_WRITES: u32 = 12;
    /// Pages that gathers requested.
    pub const WANTED: u32 = 16;
    /// Those of them that were in the cache at the first lookup.
    pub const HITS: u32 = 20;
    /// Bytes of all counters.
    pub const BYTES: u32 = 128;
}

/// Sets of a cache of `pages` pages, and how many pages it then has: whole sets, or one that has fewer ways in use.
const fn sets(pages: u32) -> (u32, u32) {
    if pages < WAYS { (1, pages) } else { (pages / WAYS, pages / WAYS * WAYS) }
}

/// Bytes of the directory of a cache of `pages` pages.
#[must_use]
pub const fn directory_bytes(pages: u32) -> u64 {
    sets(pages).0 as u64 * SET_BYTES as u64
}

/// The words of an empty directory for `pages` pages.
pub fn directory_words(pages: u32) -> impl Iterator<Item = u32> {
    let (sets, used) = sets(pages);
    (0..sets).flat_map(move |_| {
        (0..SET_WORDS).map(move |word| match word / WAYS {
            0 | 1 => NO_PAGE as u32,
            2 if word % WAYS >= used => state::UNUSED,
            _ => 0,
        })
    })
}

/// Whether a thread has a pin, or a command under way for a page.
#[must_use]
pub fn is_in_use(directory: &[u32]) -> bool {
    let is_used = |word: &u32| word & state::PINS != 0 || word & state::KIND == state::LOADING;
    let of_set =
        |words: &[u32]| words.iter().skip((set::STATE / 4) as usize).take(WAYS as usize).any(is_used);
    directory.chunks_exact(SET_WORDS as usize).any(of_set)
}

/// The pages of a directory that could not be written back when that was last tried, and why.
pub fn broken_pages(directory: &[u32]) -> impl Iterator<Item = (u64, ArrayError)> + '_ {
    directory.chunks_exact(SET_WORDS as usize).flat_map(|words| {
        (0..WAYS).filter_map(move |way| {
            let word = |offset: u32| words.get((offset / 4 + way) as usize).copied().unwrap_or_default();
            let flags = word(set::STATE);
            if flags & (state::KIND | state::BROKEN) != state::VALID | state::BROKEN {
                return None;
            }
            let error = match flags & state::UNSURE {
                0 => ArrayError::from_code(word(set::NOTE) as i32),
                _ => None,
            };
            let page = u64::from(word(set::LOW)) | u64::from(word(set::HIGH)) << 32;
            Some((page, error.unwrap_or(ArrayError::WriteBack(Answer::OutcomeUnknown))))
        })
    })
}

/// The host's description of an array, in the GPU's memory. It does not change while the array is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArrayHandle {
    /// The handle of the queue that it is read by.
    pub queue: u64,
    /// The directory.
    pub directory: u64,
    /// The cache's first page, as threads see it.
    pub data: u64,
    /// Where that is in the queue's data memory.
    pub offset: u64,
    /// The array's first block.
    pub lba: u64,
    /// Blocks of the array.
    pub blocks: u64,
    /// Nanoseconds that a thread waits for other threads.
    pub limit: u64,
    /// The words of [`counter`].
    pub counters: u64,
    /// Pages of the cache, as given to [`directory_words`].
    pub pages: u32,
    /// Bytes of a page, as a power of two.
    pub page_shift: u32,
    /// Bytes of a block, as a power of two.
    pub block_shift: u32,
    /// 1 if it may be written, else 0.
    pub writable: u32,
}

/// Distinguishes a handle of this layout from other memory.
const MARK: u32 = 0x4f48_0041;

impl ArrayHandle {
    /// Words of a handle in memory.
    pub const WORDS: usize = 24;
    /// Bytes of a handle in memory.
    pub const BYTES: u32 = Self::WORDS as u32 * 4;

    /// The words as they lie in memory, on a multiple of 16.
    #[must_use]
    pub fn words(&self) -> [u32; Self::WORDS] {
        let longs = [
            self.queue,
            self.directory,
            self.data,
            self.offset,
            self.lba,
            self.blocks,
            self.limit,
            self.counters,
        ];
        let (sets, used) = sets(self.pages);
        let mut words = [0; Self::WORDS];
        [words[0], words[1]] = [MARK, Self::BYTES];
        for (i, long) in longs.into_iter().enumerate() {
            [words[2 + 2 * i], words[3 + 2 * i]] = [long as u32, (long >> 32) as u32];
        }
        [words[18], words[19]] = [sets, used];
        [words[20], words[21], words[22]] = [self.page_shift, self.block_shift, self.writable];
        words
    }

    /// The handle of these words; none if they are not those of an array.
    #[must_use]
    pub fn from_words(words: &[u32; Self::WORDS]) -> Option<Self> {
        let long = |i: usize| u64::from(words[2 + 2 * i]) | u64::from(words[3 + 2 * i]) << 32;
        let handle = Self {
            queue: long(0),
            directory: long(1),
            data: long(2),
            offset: long(3),
            lba: long(4),
            blocks: long(5),
            limit: long(6),
            counters: long(7),
            pages: words[19],
            page_shift: words[20],
            block_shift: words[21],
            writable: words[22],
        };
        let shifts = MIN_PAGE_BYTES.trailing_zeros()..=MAX_PAGE_BYTES.trailing_zeros();
        let makes_sense = handle.pages > 0
            && shifts.contains(&handle.page_shift)
            && handle.block_shift <= handle.page_shift
            && handle.words() == *words;
        makes_sense.then_some(handle)
    }
}

/// A handle in memory.
#[derive(Clone, Copy)]
pub(super) struct HandleAt(GpuAddr);

macro_rules! long {
    ($($name:ident = $line:literal, $half:literal;)*) => {
        $(
            #[inline(always)]
            pub(super) fn $name<M: Memory<Addr = GpuAddr>>(&self, mem: &M) -> u64 {
                let [a, b, c, d] = mem.load_constant(self.0.plus($line * 16));
                [a as u64 | (b as u64) << 32, c as u64 | (d as u64) << 32][$half]
            }
        )*
    };
}

macro_rules! short {
    ($($name:ident = $line:literal, $word:literal;)*) => {
        $(
            #[inline(always)]
            pub(super) fn $name<M: Memory<Addr = GpuAddr>>(&self, mem: &M) -> u32 {
                mem.load_constant(self.0.plus($line * 16))[$word]
            }
        )*
    };
}

impl HandleAt {
    /// The handle at `at`; none if there is none.
    #[inline(always)]
    pub(super) fn new<M: Memory<Addr = GpuAddr>>(mem: &M, at: GpuAddr) -> Option<Self> {
        if at.0 == 0 || !at.0.is_multiple_of(16) {
            return None;
        }
        let [mark, bytes, ..] = mem.load_constant(at);
        if mark == MARK && bytes == ArrayHandle::BYTES { Some(Self(at)) } else { None }
    }

    long! {
        queue = 0, 1;
        directory = 1, 0;
        data = 1, 1;
        offset = 2, 0;
        lba = 2, 1;
        blocks = 3, 0;
        limit = 3, 1;
        counters = 4, 0;
    }

    short! {
        sets = 4, 2;
        slots = 4, 3;
        page_shift = 5, 0;
        block_shift = 5, 1;
        writable = 5, 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn a_handle_comes_back_from_its_words() {
        let of =
            |pages| ArrayHandle { queue: 1 << 40, lba: 7, pages, page_shift: 12, ..ArrayHandle::default() };
        for pages in [3, 8, 1 << 20] {
            assert_eq!(ArrayHandle::from_words(&of(pages).words()), Some(of(pages)));
        }
        assert_eq!(ArrayHandle::from_words(&of(0).words()), None);
        for page_shift in [8, 17, 64] {
            assert_eq!(ArrayHandle::from_words(&ArrayHandle { page_shift, ..of(8) }.words()), None);
        }
        // The mark, and sets of a smaller cache than its slots: an address would lie behind the pages.
        for word in [0, 18] {
            let mut words = of(8).words();
            words[word] += 1;
            assert_eq!(ArrayHandle::from_words(&words), None);
        }
    }

    #[test]
    fn a_directory_is_bounded_by_its_cache() {
        for pages in [8, 9, 4096, 1 << 20] {
            let bytes = directory_bytes(pages);
            assert_eq!(bytes, directory_words(pages).count() as u64 * 4);
            assert!(
                bytes * 20 <= u64::from(pages) * u64::from(MIN_PAGE_BYTES),
                "more than 5 % of {pages} pages"
            );
        }
        let words: Vec<u32> = directory_words(3).collect();
        assert_eq!(words.len(), 36);
        assert_eq!(
            words[16..24],
            [0, 0, 0, state::UNUSED, state::UNUSED, state::UNUSED, state::UNUSED, state::UNUSED]
        );
        assert!(directory_words(17).all(|word| word != state::UNUSED));
    }
}
