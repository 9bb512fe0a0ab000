//! Rows to move, and the result of each.

use super::ArrayError;
use crate::GpuAddr;
use crate::queue::Memory;

/// A requested row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct GatherItem {
    /// The row of the array.
    pub row: u64,
    /// The row of the output.
    pub to: u32,
    /// Nothing.
    pub pad: u32,
}

impl GatherItem {
    /// Bytes of an item.
    pub const BYTES: u32 = 16;

    /// The words as they lie in memory, on a multiple of 16.
    #[must_use]
    pub const fn words(&self) -> [u32; 4] {
        [self.row as u32, (self.row >> 32) as u32, self.to, self.pad]
    }
}

/// Rows to be read or written. Addresses are the GPU's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct GatherJob {
    /// The items, [`GatherItem`]. Those whose rows are neighbours are best neighbours too.
    pub items: GpuAddr,
    /// The output, or the bytes to write: rows without gaps, on a multiple of 4.
    pub out: GpuAddr,
    /// The result of each row of the output: 0, or an [`ArrayError::code`].
    pub answers: GpuAddr,
    /// Rows of the array.
    pub rows: u64,
    /// Nanoseconds after which no part of an item is begun.
    pub limit: u64,
    /// Items.
    pub count: u32,
    /// Bytes of a row that are moved, a multiple of 4.
    pub row_bytes: u32,
    /// Bytes from one row of the array to the next, a multiple of 4.
    pub stride: u32,
    /// Nothing.
    pub pad: u32,
}

impl GatherJob {
    /// The job as words of eight bytes, for a kernel's parameter.
    #[must_use]
    pub fn words(&self) -> [u64; 7] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        [
            self.items.0,
            self.out.0,
            self.answers.0,
            self.rows,
            self.limit,
            pair(self.count, self.row_bytes),
            pair(self.stride, self.pad),
        ]
    }

    /// Where an item lies.
    #[inline(always)]
    fn item_at(&self, item: u32) -> GpuAddr {
        self.items.plus(u64::from(item) * u64::from(GatherItem::BYTES))
    }

    /// The rows of an item: the array's and the output's.
    #[inline(always)]
    pub(super) fn item<M: Memory<Addr = GpuAddr>>(&self, mem: &M, item: u32) -> (u64, u32) {
        let [low, high, to, _] = mem.load_constant(self.item_at(item));
        (u64::from(low) | u64::from(high) << 32, to)
    }

    /// Whether rows can be copied 16 bytes at a time.
    #[inline(always)]
    pub(super) const fn is_wide(&self) -> bool {
        (self.row_bytes | self.stride | self.out.0 as u32).is_multiple_of(16)
    }

    /// Stores the result of a row of the output: 0, or an [`ArrayError::code`].
    #[inline(always)]
    pub(super) fn answer<M: Memory<Addr = GpuAddr>>(&self, mem: &M, to: u32, code: i32) {
        mem.store(self.answer_at(to), code as u32);
    }

    /// A row waits for this many of its parts.
    #[inline(always)]
    pub(super) fn wait_for_parts<M: Memory<Addr = GpuAddr>>(&self, mem: &M, to: u32, parts: u32) {
        mem.store(self.answer_at(to), WAITS | parts);
    }

    /// One part of a waiting row has arrived or failed. The row is done with the last one, unless one failed.
    #[inline(always)]
    pub(super) fn end_part<M: Memory<Addr = GpuAddr>>(&self, mem: &M, to: u32, part: Result<(), ArrayError>) {
        let at = self.answer_at(to);
        let mut seen = mem.load(at);
        // A row that has failed keeps its first error.
        while seen & WAITS_MASK == WAITS {
            let next = match part {
                Err(error) => error.code() as u32,
                Ok(()) if seen == WAITS | 1 => 0,
                Ok(()) => seen - 1,
            };
            match mem.compare_exchange(at, seen, next) {
                old if old == seen => return,
                old => seen = old,
            }
        }
    }

    #[inline(always)]
    fn answer_at(&self, to: u32) -> GpuAddr {
        self.answers.plus(u64::from(to) * 4)
    }
}

/// The answer of a row that waits for parts, with their number in the lower half. No error has such a code.
const WAITS: u32 = 0x8000_0000;
const WAITS_MASK: u32 = 0xffff_0000;

/// Runs of items for pages that the cache did not have, in memory: [`crate::array::run_hits`] leaves them for
/// [`crate::array::run_misses`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissList(pub GpuAddr);

/// Items that follow each other and need the same page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Miss {
    pub page: u64,
    pub first: u32,
    pub count: u32,
}

impl MissList {
    /// How many there are. Zero at first.
    const COUNT: u64 = 0;
    /// How many are taken. Zero at first, and on a line of its own, because many threads contend for it.
    const TAKEN: u64 = 64;
    const ENTRIES: u64 = 128;
    const ENTRY_BYTES: u64 = 16;
    /// Bytes at the beginning that must be zero.
    pub const ZEROED: usize = Self::ENTRIES as usize;

    /// Bytes of a list for `items` items of `bytes` bytes, on a multiple of 16.
    #[must_use]
    pub const fn bytes(items: u32, row_bytes: u32) -> u64 {
        // A row that begins at the end of a page.
        let parts = row_bytes.div_ceil(super::MIN_PAGE_BYTES) as u64 + 1;
        Self::ENTRIES + items as u64 * parts * Self::ENTRY_BYTES
    }

    /// Appends a run.
    #[inline(always)]
    pub(super) fn append<M: Memory<Addr = GpuAddr>>(&self, mem: &M, miss: &Miss) {
        let place = next(mem, self.0.plus(Self::COUNT));
        let words = [miss.page as u32, (miss.page >> 32) as u32, miss.first, miss.count];
        mem.store_four(self.0.plus(Self::ENTRIES + u64::from(place) * Self::ENTRY_BYTES), words);
    }

    /// Takes a run for the caller alone; none if all are taken. Nothing is appended any more.
    #[inline(always)]
    pub(super) fn take<M: Memory<Addr = GpuAddr>>(&self, mem: &M) -> Option<Miss> {
        let place = next(mem, self.0.plus(Self::TAKEN));
        if place >= mem.load(self.0.plus(Self::COUNT)) {
            return None;
        }
        let [low, high, first, count] =
            mem.load_four(self.0.plus(Self::ENTRIES + u64::from(place) * Self::ENTRY_BYTES));
        Some(Miss { page: u64::from(low) | u64::from(high) << 32, first, count })
    }
}

/// A different number for each caller.
#[inline(always)]
fn next<M: Memory<Addr = GpuAddr>>(mem: &M, at: GpuAddr) -> u32 {
    let (first, rank) = mem.combine(at, |count| u64::from(mem.fetch_add_relaxed(at, count)));
    first as u32 + rank
}
