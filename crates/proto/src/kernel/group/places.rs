//! Identifiers and places in the submission queue for a batch, and the entries in them.

use super::{GROUPS, Group, local};
use crate::Sqe;
use crate::kernel::Warp;
use crate::queue::shared::{CID, STATE, busy, word};
use crate::queue::{Address, CidSpace};

impl<W: Warp> Group<'_, W> {
    /// The word of free identifiers that a group of the batch is taken from.
    #[inline(always)]
    pub(super) fn free_word(&self, start: u32, group: u32) -> u32 {
        let (words, index) = (self.queue.layout().free_words(), start + group);
        if index >= words { index - words } else { index }
    }

    #[inline(always)]
    pub(super) fn free_at(&self, word: u32) -> W::Addr {
        self.queue.at(word::FREE + word * 4)
    }

    #[inline(always)]
    pub(super) fn give_back(&self, start: u32, group: u32, mask: u32) {
        if mask != 0 {
            self.warp.fetch_or_relaxed(self.free_at(self.free_word(start, group)), mask);
        }
    }

    /// Takes identifiers and tickets for as many commands as it can get at once, up to `wanted`.
    #[inline(always)]
    pub(super) fn reserve(&self, wanted: u32) -> u32 {
        let warp = self.warp;
        let words = self.queue.layout().free_words();
        let groups = wanted.div_ceil(32).min(words);
        let start = warp.local(local::HINT) % words;
        warp.sync();
        self.spread(GROUPS, |group| {
            let mut mask = 0;
            if group < groups {
                let word = self.free_word(start, group);
                let at = self.free_at(word);
                let free = warp.load(at) & self.queue.layout().valid(word);
                let wish = lowest(free, wanted - 32 * group);
                mask = if wish == 0 { 0 } else { wish & warp.fetch_and_acquire(at, !wish) };
            }
            warp.set_local(local::MASK + group, mask);
        });
        warp.once(|| {
            let total = (0..GROUPS).map(|group| warp.local(local::MASK + group).count_ones()).sum();
            let (ticket, count) = if total == 0 { (0, 0) } else { self.tickets(total) };
            warp.set_local(local::START, start);
            warp.set_local(local::HINT, start + groups);
            warp.set_local(local::TICKET, ticket);
            warp.set_local(local::COUNT, count);
            if count < total {
                self.keep(start, count);
            }
        });
        warp.local(local::COUNT)
    }

    /// Keeps `count` of the identifiers and frees the others, whose slots are unchanged.
    #[inline(always)]
    fn keep(&self, start: u32, count: u32) {
        let warp = self.warp;
        let mut left = count;
        for group in 0..GROUPS {
            let mask = warp.local(local::MASK + group);
            let kept = lowest(mask, left);
            left -= kept.count_ones();
            warp.set_local(local::MASK + group, kept);
            self.give_back(start, group, mask & !kept);
        }
    }

    /// Neighbouring tickets, as many as SQHD has left room for.
    #[inline(always)]
    fn tickets(&self, wanted: u32) -> (u32, u32) {
        let (warp, next) = (self.warp, self.queue.at(word::TICKET));
        let mut ticket = warp.load(next);
        loop {
            let head = warp.load_acquire(self.queue.at(word::SQ_HEAD));
            let usable = self.queue.rings.sq_entries - 1;
            let taken = ticket.wrapping_sub(head);
            let count = wanted.min(usable.saturating_sub(taken));
            if count == 0 {
                return (ticket, 0);
            }
            match warp.compare_exchange_acquire(next, ticket, ticket.wrapping_add(count)) {
                seen if seen == ticket => return (ticket, count),
                seen => ticket = seen,
            }
        }
    }

    /// Writes the entries.
    #[inline(always)]
    pub(super) fn write(&self, count: u32) {
        let (warp, queue, job) = (self.warp, self.queue, self.job);
        self.name_slots();
        let ticket = warp.local(local::TICKET);
        let slot = |i: u32| queue.slot(warp.local(local::SLOT + i) as u16);
        warp.take(
            count,
            |i| ([warp.load(slot(i).plus(CID)), 0], true),
            |i, [last, _]| {
                warp.set_local(local::LAST + i, last);
                true
            },
        );
        self.spread(count, |i| {
            let cid = queue.space.next(warp.local(local::LAST + i) as u16);
            warp.store(slot(i).plus(CID), CidSpace::left(cid));
            warp.store(slot(i).plus(STATE), busy(cid));
            let item = warp.local(local::ITEM + i);
            warp.begun(item);
            let work = job.work(warp, item);
            let retries = local::RETRIES + i;
            if warp.local(retries) == u32::MAX {
                warp.set_local(retries, work.tries());
            }
            let place = queue.sq_slot(ticket.wrapping_add(i));
            let sqe = work.command(job.nsid).with_cid(cid);
            warp.store_entry(queue.rings.sq.plus(place * Sqe::BYTES as u32), &sqe.dw);
        });
    }

    /// Marks the entries as complete.
    #[inline(always)]
    pub(super) fn stamp(&self, count: u32) {
        let (warp, queue) = (self.warp, self.queue);
        let ticket = warp.local(local::TICKET);
        self.spread(count, |i| {
            let ticket = ticket.wrapping_add(i);
            warp.store(queue.stamp(queue.sq_slot(ticket)), ticket.wrapping_add(1));
        });
    }

    /// Assigns the identifiers that were taken to the commands of the batch.
    #[inline(always)]
    fn name_slots(&self) {
        let warp = self.warp;
        let start = warp.local(local::START);
        warp.each(|lane| {
            let mut before = 0;
            for group in 0..GROUPS {
                let mask = warp.local(local::MASK + group);
                let mut bit = lane;
                while bit < 32 {
                    if mask >> bit & 1 != 0 {
                        let i = before + (mask & ((1 << bit) - 1)).count_ones();
                        warp.set_local(local::SLOT + i, self.free_word(start, group) * 32 + bit);
                    }
                    bit += warp.lanes();
                }
                before += mask.count_ones();
            }
        });
    }
}

/// The lowest `count` bits that are set.
#[inline(always)]
fn lowest(mut mask: u32, count: u32) -> u32 {
    let all = mask;
    if mask.count_ones() <= count {
        return all;
    }
    for _ in 0..count {
        mask &= mask.wrapping_sub(1);
    }
    all & !mask
}
