//! The rows of a gather that are in the cache, by many warps that never wait.
//!
//! Each lane looks for the page of a row. All lanes copy what any of them has pinned, and unpin it in the same round.
//! Misses go on a list for [`super::run_misses`].

use super::cache::Found;
use super::items::Miss;
use super::layout::{NO_PAGE, counter};
use super::{ArrayError, Backing, GatherJob, MissList, PageCache};
use crate::GpuAddr;
use crate::kernel::Lanes;
use crate::queue::Memory;

/// The most lanes of a warp.
pub(super) const MOST_LANES: u32 = 32;

/// Local words of each lane, by their number, behind the four of each lane that say what it copies and where to.
mod word {
    /// Bytes that all lanes copy for it; none if it has no pin.
    pub const LENGTH: u32 = 4;
    /// The slot that it has pinned.
    pub const SLOT: u32 = 5;
    /// The page that it has not found, in two words.
    pub const PAGE: u32 = 6;
    /// Bytes of its row that are behind it.
    pub const DONE: u32 = 8;
    /// Bytes of the part of the row that it looks for.
    pub const PART: u32 = 9;
    /// Parts of the row that it did not find.
    pub const MISSED: u32 = 10;
    /// Which row of the output it is.
    pub const TO: u32 = 11;
    pub const COUNT: u32 = 12;
}

/// Local words of all lanes.
mod common {
    /// Lanes that are not done.
    pub const ACTIVE: u32 = super::word::COUNT * super::MOST_LANES;
    /// Pins so far.
    pub const PINS: u32 = ACTIVE + 1;
    /// Pages that were not there, so far.
    pub const MISSES: u32 = ACTIVE + 2;
}

/// Words of local memory of a warp.
pub const HIT_WORDS: u32 = (common::MISSES + 1).next_multiple_of(4);

/// A warp copies what is in the cache of the items `first` to `end`, and lists the rest.
#[inline(always)]
pub fn run_hits<W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>>(
    warp: &W,
    mem: &M,
    array: &PageCache<M, B>,
    job: &GatherJob,
    misses: MissList,
    (first, end): (u32, u32),
) {
    let hits = Hits { warp, mem, array, job, misses };
    warp.once(|| {
        warp.set_local(common::PINS, 0);
        warp.set_local(common::MISSES, 0);
    });
    let (mut start, mut so_far) = (first, (0, 0));
    while start < end {
        so_far = hits.chunk(start, end, so_far);
        start = start.saturating_add(warp.lanes());
    }
    let (pins, missed) = so_far;
    warp.once(|| {
        array.count(mem, counter::WANTED, pins + missed);
        array.count(mem, counter::HITS, pins);
    });
}

struct Hits<'a, W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>> {
    warp: &'a W,
    mem: &'a M,
    array: &'a PageCache<M, B>,
    job: &'a GatherJob,
    misses: MissList,
}

impl<W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>> Hits<'_, W, M, B> {
    /// As many items as the warp has lanes. Takes and returns the numbers of pins and misses so far.
    #[inline(always)]
    fn chunk(&self, start: u32, end: u32, (mut pins, mut missed): (u32, u32)) -> (u32, u32) {
        let items = (end - start).min(self.warp.lanes());
        // All lanes have read how the chunk before ended.
        self.warp.sync();
        self.warp.once(|| self.warp.set_local(common::ACTIVE, items));
        self.warp.each(|lane| self.begin(lane, start, end));
        loop {
            self.warp.each(|lane| self.seek(lane, start));
            // What all lanes read here is next written behind another barrier.
            let (now_pinned, now_missed) = (self.warp.local(common::PINS), self.warp.local(common::MISSES));
            if now_missed != missed {
                self.warp.each(|lane| self.list(lane, start));
            }
            if now_pinned != pins {
                self.copy();
            }
            (pins, missed) = (now_pinned, now_missed);
            self.warp.each(|lane| self.end_part(lane));
            if self.warp.local(common::ACTIVE) == 0 {
                return (pins, missed);
            }
        }
    }

    /// A lane's item.
    #[inline(always)]
    fn begin(&self, lane: u32, start: u32, end: u32) {
        self.set(lane, word::MISSED, 0);
        self.set(lane, word::DONE, self.job.row_bytes);
        if lane < end - start {
            let (row, to) = self.job.item(self.mem, start + lane);
            self.set(lane, word::TO, to);
            if row < self.job.rows {
                self.set(lane, word::DONE, 0);
            } else {
                self.job.answer(self.mem, to, ArrayError::Range.code());
                self.warp.add_local(common::ACTIVE, 1u32.wrapping_neg());
            }
        }
    }

    /// A lane looks for the next part of its row, as much as is in one page.
    #[inline(always)]
    fn seek(&self, lane: u32, start: u32) {
        self.set(lane, word::LENGTH, 0);
        self.set_page(lane, NO_PAGE);
        let done = self.get(lane, word::DONE);
        if done >= self.job.row_bytes {
            return;
        }
        let byte = self.job.item(self.mem, start + lane).0 * u64::from(self.job.stride) + u64::from(done);
        let page_shift = self.array.page_shift(self.mem);
        let page_bytes = 1u32 << page_shift;
        let within = byte as u32 & (page_bytes - 1);
        let (room, left) = (page_bytes - within, self.job.row_bytes - done);
        let part = if room < left { room } else { left };
        self.set(lane, word::PART, part);
        let Found::Pinned(slot) = self.array.find(self.mem, byte >> page_shift) else {
            self.set_page(lane, byte >> page_shift);
            self.set(lane, word::MISSED, self.get(lane, word::MISSED) + 1);
            self.warp.add_local(common::MISSES, 1);
            return;
        };
        let from = self.array.address(self.mem, slot).plus(u64::from(within)).0;
        let row = u64::from(self.get(lane, word::TO)) * u64::from(self.job.row_bytes);
        let to = self.job.out.plus(row + u64::from(done)).0;
        let places = [from as u32, (from >> 32) as u32, to as u32, (to >> 32) as u32];
        self.warp.set_local_four(lane * 4, places);
        self.set(lane, word::LENGTH, part);
        self.set(lane, word::SLOT, slot);
        self.warp.add_local(common::PINS, 1);
    }

    /// The first lane of each run that misses the same page lists it for all of them.
    #[inline(always)]
    fn list(&self, lane: u32, start: u32) {
        let page = self.page(lane);
        if page == NO_PAGE || lane > 0 && self.page(lane - 1) == page {
            return;
        }
        let mut end = lane + 1;
        while end < self.warp.lanes() && self.page(end) == page {
            end += 1;
        }
        self.misses.append(self.mem, &Miss { page, first: start + lane, count: end - lane });
    }

    /// All lanes copy what any of them has pinned.
    #[inline(always)]
    fn copy(&self) {
        if self.job.is_wide() {
            self.copy_words::<16>();
        } else {
            self.copy_words::<4>();
        }
    }

    #[inline(always)]
    fn copy_words<const WIDTH: u32>(&self) {
        let each = self.job.row_bytes / WIDTH;
        let lanes = self.warp.lanes();
        self.warp.each(|lane| {
            let mut word = lane;
            while word < each * lanes {
                let (owner, offset) = (word / each, word % each * WIDTH);
                if offset < self.get(owner, word::LENGTH) {
                    let [from, from_high, to, to_high] = self.warp.local_four(owner * 4);
                    let at = |low: u32, high: u32| {
                        GpuAddr(u64::from(low) | u64::from(high) << 32).plus(u64::from(offset))
                    };
                    copy_word::<WIDTH, M>(self.mem, at(from, from_high), at(to, to_high));
                }
                word += lanes;
            }
        });
    }

    /// A lane is done with a part of its row: it was copied, or listed.
    #[inline(always)]
    fn end_part(&self, lane: u32) {
        let done = self.get(lane, word::DONE);
        if done >= self.job.row_bytes {
            return;
        }
        if self.get(lane, word::LENGTH) != 0 {
            self.array.unpin(self.mem, self.get(lane, word::SLOT));
        }
        let done = done + self.get(lane, word::PART);
        self.set(lane, word::DONE, done);
        if done >= self.job.row_bytes {
            let to = self.get(lane, word::TO);
            match self.get(lane, word::MISSED) {
                0 => self.job.answer(self.mem, to, 0),
                parts => self.job.wait_for_parts(self.mem, to, parts),
            }
            self.warp.add_local(common::ACTIVE, 1u32.wrapping_neg());
        }
    }

    #[inline(always)]
    fn page(&self, lane: u32) -> u64 {
        u64::from(self.get(lane, word::PAGE)) | u64::from(self.get(lane, word::PAGE + 1)) << 32
    }

    #[inline(always)]
    fn set_page(&self, lane: u32, page: u64) {
        self.set(lane, word::PAGE, page as u32);
        self.set(lane, word::PAGE + 1, (page >> 32) as u32);
    }

    #[inline(always)]
    fn get(&self, lane: u32, word: u32) -> u32 {
        self.warp.local(word * MOST_LANES + lane)
    }

    #[inline(always)]
    fn set(&self, lane: u32, word: u32, value: u32) {
        self.warp.set_local(word * MOST_LANES + lane, value);
    }
}

/// Copies 4 or 16 bytes.
#[inline(always)]
pub(super) fn copy_word<const WIDTH: u32, M: Memory<Addr = GpuAddr>>(mem: &M, from: GpuAddr, to: GpuAddr) {
    if WIDTH == 16 {
        mem.store_four(to, mem.load_four(from));
    } else {
        mem.store(to, mem.load(from));
    }
}
