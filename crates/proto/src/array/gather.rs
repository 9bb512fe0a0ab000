//! Rows of an array into a dense buffer, by warps.
//!
//! Each lane wants the page of a row; all lanes copy what any of them has pinned. Nobody has a pin while it waits: what is
//! pinned in one round is copied and unpinned in the same, whatever the other lanes wait for. So a warp has as many
//! commands in flight as it has lanes, and a cache of one page is enough.

use super::cache::Found;
use super::layout::counter;
use super::{ArrayError, Backing, PageCache, PageRequest, PageStep};
use crate::GpuAddr;
use crate::kernel::Lanes;
use crate::queue::Memory;

/// The most lanes of a warp.
const MOST_LANES: u32 = 32;

/// Local words of each lane, by their number.
mod word {
    use super::PageRequest;
    /// The slot that it has pinned, plus one.
    pub const PINNED: u32 = PageRequest::WORDS as u32;
    /// What it does: see [`super::lane`].
    pub const DOES: u32 = PINNED + 1;
    /// Bytes of its row that are copied.
    pub const DONE: u32 = PINNED + 2;
    /// Where the part of the row that it wants begins in its page.
    pub const FROM: u32 = PINNED + 3;
    /// Bytes of that part.
    pub const LENGTH: u32 = PINNED + 4;
    /// Which row of the output it is.
    pub const TO: u32 = PINNED + 5;
    pub const COUNT: u32 = PINNED + 6;
}

/// What a lane does.
mod lane {
    /// It has all that it wants.
    pub const REST: u32 = 0;
    /// It has to look for the next part of its row.
    pub const LOOK: u32 = 1;
    /// It waits for its request.
    pub const WAIT: u32 = 2;
}

/// Local words of all lanes.
mod common {
    /// Lanes that still want something.
    pub const ACTIVE: u32 = super::word::COUNT * super::MOST_LANES;
    /// Pins so far.
    pub const PINS: u32 = ACTIVE + 1;
    /// Pages that were wanted.
    pub const WANTED: u32 = ACTIVE + 2;
    /// Those of them that were there.
    pub const HITS: u32 = ACTIVE + 3;
}

/// Words of local memory of a warp that gathers.
pub const GATHER_WORDS: u32 = common::HITS + 1;

/// A row that is wanted.
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
    /// The output, or what is written: rows without gaps, on a multiple of 4.
    pub out: GpuAddr,
    /// What came of each row of the output: 0, or an [`ArrayError::code`].
    pub answers: GpuAddr,
    /// Rows of the array.
    pub rows: u64,
    /// Nanoseconds after which no item is begun.
    pub limit: u64,
    /// Items.
    pub count: u32,
    /// Bytes of a row that are wanted, a multiple of 4.
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
    const fn is_wide(&self) -> bool {
        (self.row_bytes | self.stride | self.out.0 as u32).is_multiple_of(16)
    }
}

/// A warp gathers the items `first` to `end`.
#[inline(always)]
pub fn run_gather<W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>>(
    warp: &W,
    mem: &M,
    array: &PageCache<M, B>,
    job: &GatherJob,
    (first, end): (u32, u32),
) {
    let gather = Gather { warp, mem, array, job, deadline: mem.now().saturating_add(job.limit) };
    warp.once(|| {
        warp.set_local(common::PINS, 0);
        warp.set_local(common::WANTED, 0);
        warp.set_local(common::HITS, 0);
    });
    let (mut start, mut pins) = (first, 0);
    while start < end {
        pins = gather.chunk(start, end, pins);
        start = start.saturating_add(warp.lanes());
    }
    warp.once(|| {
        array.count(mem, counter::WANTED, warp.local(common::WANTED));
        array.count(mem, counter::HITS, warp.local(common::HITS));
    });
}

struct Gather<'a, W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>> {
    warp: &'a W,
    mem: &'a M,
    array: &'a PageCache<M, B>,
    job: &'a GatherJob,
    /// Looked at by single lanes.
    deadline: u64,
}

impl<W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>> Gather<'_, W, M, B> {
    /// Gathers as many items as the warp has lanes. Takes and gives the number of pins so far.
    #[inline(always)]
    fn chunk(&self, start: u32, end: u32, mut pins: u32) -> u32 {
        self.warp.once(|| self.warp.set_local(common::ACTIVE, 0));
        self.warp.each(|lane| self.begin(lane, start, end));
        loop {
            self.warp.each(|lane| self.seek(lane, start));
            // What all lanes read here is next written behind another barrier.
            let (pinned, active) = (self.warp.local(common::PINS), self.warp.local(common::ACTIVE));
            if pinned != pins {
                self.copy();
                self.warp.each(|lane| self.unpin(lane));
            } else if active == 0 {
                return pins;
            } else {
                self.warp.once(|| self.mem.pause());
            }
            pins = pinned;
        }
    }

    /// A lane's item.
    #[inline(always)]
    fn begin(&self, lane: u32, start: u32, end: u32) {
        self.set(lane, word::PINNED, 0);
        self.set(lane, word::DOES, lane::REST);
        if lane >= end - start {
            return;
        }
        let (row, to) = self.job.item(self.mem, start + lane);
        self.set(lane, word::TO, to);
        self.set(lane, word::DONE, 0);
        if row >= self.job.rows {
            self.answer(lane, ArrayError::Range.code());
        } else if self.mem.now() >= self.deadline {
            self.answer(lane, ArrayError::TimedOut.code());
        } else {
            self.set(lane, word::DOES, lane::LOOK);
            self.warp.add_local(common::ACTIVE, 1);
        }
    }

    /// A lane looks for the next part of its row, as much as is in one page, or moves its request on.
    #[inline(always)]
    fn seek(&self, lane: u32, start: u32) {
        match self.get(lane, word::DOES) {
            lane::LOOK => {}
            lane::WAIT => return self.advance(lane),
            _ => return,
        }
        let done = self.get(lane, word::DONE);
        let byte = self.job.item(self.mem, start + lane).0 * u64::from(self.job.stride) + u64::from(done);
        let page_shift = self.array.page_shift(self.mem);
        let page_bytes = 1u32 << page_shift;
        let from = byte as u32 & (page_bytes - 1);
        let (room, left) = (page_bytes - from, self.job.row_bytes - done);
        self.set(lane, word::FROM, from);
        self.set(lane, word::LENGTH, if room < left { room } else { left });
        self.warp.add_local(common::WANTED, 1);
        match self.array.find(self.mem, byte >> page_shift) {
            Found::Pinned(slot) => {
                self.warp.add_local(common::HITS, 1);
                self.pin(lane, slot);
            }
            _ => self.miss(lane, byte),
        }
    }

    /// A lane's page has to be waited for.
    #[inline(never)]
    fn miss(&self, lane: u32, byte: u64) {
        self.set(lane, word::DOES, lane::WAIT);
        self.keep(lane, &PageRequest::new(self.array, self.mem, byte));
    }

    /// Moves a lane's request on. A function of its own, as is [`Self::miss`]: a request takes more registers than all else,
    /// which is not to have fewer warps for it.
    #[inline(never)]
    fn advance(&self, lane: u32) {
        let mut words = [0; PageRequest::WORDS];
        for (i, word) in (0..).zip(&mut words) {
            *word = self.get(lane, i);
        }
        let mut request = PageRequest::from_words(words);
        match self.array.advance(self.mem, &mut request) {
            PageStep::Pending => self.keep(lane, &request),
            PageStep::Pinned(slot) => self.pin(lane, slot),
            PageStep::Failed(error) => {
                self.answer(lane, error.code());
                self.leave(lane);
            }
        }
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
                let slot = self.get(owner, word::PINNED);
                if slot != 0 && offset < self.get(owner, word::LENGTH) {
                    let within = self.get(owner, word::FROM) + offset;
                    let from = self.array.address(self.mem, slot - 1).plus(u64::from(within));
                    let row = u64::from(self.get(owner, word::TO)) * u64::from(self.job.row_bytes);
                    let to = self.job.out.plus(row + u64::from(self.get(owner, word::DONE) + offset));
                    if WIDTH == 16 {
                        self.mem.store_four(to, self.mem.load_four(from));
                    } else {
                        self.mem.store(to, self.mem.load(from));
                    }
                }
                word += lanes;
            }
        });
    }

    /// Takes a lane's pin back. What is left of its row is next.
    #[inline(always)]
    fn unpin(&self, lane: u32) {
        let slot = self.get(lane, word::PINNED);
        if slot == 0 {
            return;
        }
        self.set(lane, word::PINNED, 0);
        self.array.unpin(self.mem, slot - 1);
        let done = self.get(lane, word::DONE) + self.get(lane, word::LENGTH);
        if done < self.job.row_bytes {
            self.set(lane, word::DONE, done);
            self.set(lane, word::DOES, lane::LOOK);
        } else {
            self.answer(lane, 0);
            self.leave(lane);
        }
    }

    #[inline(always)]
    fn pin(&self, lane: u32, slot: u32) {
        self.set(lane, word::PINNED, slot + 1);
        self.set(lane, word::DOES, lane::REST);
        self.warp.add_local(common::PINS, 1);
    }

    #[inline(always)]
    fn leave(&self, lane: u32) {
        self.set(lane, word::DOES, lane::REST);
        self.warp.add_local(common::ACTIVE, 1u32.wrapping_neg());
    }

    #[inline(always)]
    fn keep(&self, lane: u32, request: &PageRequest) {
        for (i, word) in (0..).zip(request.words()) {
            self.set(lane, i, word);
        }
    }

    #[inline(always)]
    fn answer(&self, lane: u32, code: i32) {
        let at = self.job.answers.plus(u64::from(self.get(lane, word::TO)) * 4);
        self.mem.store(at, code as u32);
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
