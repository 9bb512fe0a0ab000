//! The rows of a gather that are not in the cache, by as many lanes as commands can be in flight.
//!
//! Each lane takes a run of items that need the same page from the list, requests the page, and takes the next run once
//! all lanes have copied this one. No lane has a pin while it waits, so a cache of one page is enough.

use super::hits::{MOST_LANES, copy_word};
use super::items::Miss;
use super::{ArrayError, Backing, GatherJob, MissList, PageCache, PageRequest, PageStep};
use crate::GpuAddr;
use crate::kernel::Lanes;
use crate::queue::Memory;

/// Local words of each lane, by their number, behind those of its request.
mod word {
    use super::PageRequest;
    /// The slot that it has pinned, plus one.
    pub const PINNED: u32 = PageRequest::WORDS as u32;
    /// What it does: see [`super::lane`].
    pub const DOES: u32 = PINNED + 1;
    /// The page of its run, in two words.
    pub const PAGE: u32 = PINNED + 2;
    /// The first item of its run.
    pub const FIRST: u32 = PINNED + 4;
    /// Items of its run.
    pub const ITEMS: u32 = PINNED + 5;
    pub const COUNT: u32 = PINNED + 6;
}

/// What a lane does.
mod lane {
    /// It takes the next run.
    pub const TAKE: u32 = 0;
    /// It waits for its request.
    pub const WAIT: u32 = 1;
    /// All lanes copy its run.
    pub const COPY: u32 = 2;
    /// There is no run left.
    pub const END: u32 = 3;
}

/// Local words of all lanes.
mod common {
    /// Lanes that have not come to the end.
    pub const ACTIVE: u32 = super::word::COUNT * super::MOST_LANES;
    /// Pins so far.
    pub const PINS: u32 = ACTIVE + 1;
}

/// Words of local memory of a warp.
pub const MISS_WORDS: u32 = (common::PINS + 1).next_multiple_of(4);

/// A warp copies runs from the list until there are none. After the job's limit it starts no more.
#[inline(always)]
pub fn run_misses<W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>>(
    warp: &W,
    mem: &M,
    array: &PageCache<M, B>,
    job: &GatherJob,
    list: MissList,
) {
    let misses = Misses { warp, mem, array, job, list, deadline: mem.now().saturating_add(job.limit) };
    warp.once(|| {
        warp.set_local(common::PINS, 0);
        warp.set_local(common::ACTIVE, warp.lanes());
    });
    warp.each(|lane| {
        misses.set(lane, word::PINNED, 0);
        misses.set(lane, word::DOES, lane::TAKE);
    });
    let mut pins = 0;
    loop {
        warp.each(|lane| misses.turn(lane));
        // What all lanes read here is next written behind another barrier.
        let (pinned, active) = (warp.local(common::PINS), warp.local(common::ACTIVE));
        if pinned != pins {
            misses.copy();
            warp.each(|lane| misses.release(lane));
        } else if active == 0 {
            return;
        } else {
            warp.once(|| mem.pause());
        }
        pins = pinned;
    }
}

struct Misses<'a, W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>> {
    warp: &'a W,
    mem: &'a M,
    array: &'a PageCache<M, B>,
    job: &'a GatherJob,
    list: MissList,
    /// Read by single lanes.
    deadline: u64,
}

impl<W: Lanes, M: Memory<Addr = GpuAddr>, B: Backing<M>> Misses<'_, W, M, B> {
    /// A lane takes a run, or moves its request on.
    #[inline(always)]
    fn turn(&self, lane: u32) {
        match self.get(lane, word::DOES) {
            lane::TAKE => self.take(lane),
            lane::WAIT => self.advance(lane),
            _ => {}
        }
    }

    #[inline(always)]
    fn take(&self, lane: u32) {
        let Some(Miss { page, first, count }) = self.list.take(self.mem) else {
            self.set(lane, word::DOES, lane::END);
            self.warp.add_local(common::ACTIVE, 1u32.wrapping_neg());
            return;
        };
        self.set(lane, word::PAGE, page as u32);
        self.set(lane, word::PAGE + 1, (page >> 32) as u32);
        self.set(lane, word::FIRST, first);
        self.set(lane, word::ITEMS, count);
        if self.mem.now() >= self.deadline {
            return self.end_run(lane, Err(ArrayError::TimedOut));
        }
        self.set(lane, word::DOES, lane::WAIT);
        let byte = page << self.array.page_shift(self.mem);
        self.keep(lane, &PageRequest::new(self.array, self.mem, byte));
        self.advance(lane);
    }

    #[inline(always)]
    fn advance(&self, lane: u32) {
        let mut words = [0; PageRequest::WORDS];
        for (i, word) in (0..).zip(&mut words) {
            *word = self.get(lane, i);
        }
        let mut request = PageRequest::from_words(words);
        match self.array.advance(self.mem, &mut request) {
            PageStep::Pending => self.keep(lane, &request),
            PageStep::Pinned(slot) => {
                self.set(lane, word::PINNED, slot + 1);
                self.set(lane, word::DOES, lane::COPY);
                self.warp.add_local(common::PINS, 1);
            }
            PageStep::Failed(error) => self.end_run(lane, Err(error)),
        }
    }

    /// All lanes copy what any of them has pinned.
    #[inline(always)]
    fn copy(&self) {
        let mut owner = 0;
        while owner < self.warp.lanes() {
            let slot = self.get(owner, word::PINNED);
            if slot != 0 {
                if self.job.is_wide() {
                    self.copy_run::<16>(owner, slot - 1);
                } else {
                    self.copy_run::<4>(owner, slot - 1);
                }
            }
            owner += 1;
        }
    }

    /// All lanes copy the parts of a run's rows that are in its page.
    #[inline(always)]
    fn copy_run<const WIDTH: u32>(&self, owner: u32, slot: u32) {
        let page_shift = self.array.page_shift(self.mem);
        let begin = self.page(owner) << page_shift;
        let end = begin + (1 << page_shift);
        let from = self.array.address(self.mem, slot);
        let (first, items) = (self.get(owner, word::FIRST), self.get(owner, word::ITEMS));
        let each = self.job.row_bytes / WIDTH;
        self.warp.each(|lane| {
            let mut word = u64::from(lane);
            while word < u64::from(items) * u64::from(each) {
                let (item, offset) =
                    ((word / u64::from(each)) as u32, word % u64::from(each) * u64::from(WIDTH));
                let (row, to) = self.job.item(self.mem, first + item);
                let byte = row * u64::from(self.job.stride) + offset;
                if byte >= begin && byte < end {
                    let to = u64::from(to) * u64::from(self.job.row_bytes) + offset;
                    copy_word::<WIDTH, M>(self.mem, from.plus(byte - begin), self.job.out.plus(to));
                }
                word += u64::from(self.warp.lanes());
            }
        });
    }

    /// Releases a lane's pin: its run is copied.
    #[inline(always)]
    fn release(&self, lane: u32) {
        let slot = self.get(lane, word::PINNED);
        if slot != 0 {
            self.set(lane, word::PINNED, 0);
            self.array.unpin(self.mem, slot - 1);
            self.end_run(lane, Ok(()));
        }
    }

    #[inline(always)]
    fn end_run(&self, lane: u32, run: Result<(), ArrayError>) {
        let (first, items) = (self.get(lane, word::FIRST), self.get(lane, word::ITEMS));
        let mut item = 0;
        while item < items {
            self.job.end_part(self.mem, self.job.item(self.mem, first + item).1, run);
            item += 1;
        }
        self.set(lane, word::DOES, lane::TAKE);
    }

    #[inline(always)]
    fn keep(&self, lane: u32, request: &PageRequest) {
        for (i, word) in (0..).zip(request.words()) {
            self.set(lane, i, word);
        }
    }

    #[inline(always)]
    fn page(&self, lane: u32) -> u64 {
        u64::from(self.get(lane, word::PAGE)) | u64::from(self.get(lane, word::PAGE + 1)) << 32
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
