//! Shared mode for warps: the lanes of a warp put their commands into a queue that any number of others use as well,
//! and act as one while they do: one atomic takes identifiers for all of them, one their tickets, one lane rings, and
//! whoever drains reads many completions side by side.
//!
//! It is the protocol of [`crate::queue::Shared`], on the same control block; single threads and warps can use a queue at
//! the same time. The orders are the same too, with fences of the whole warp in place of each lane's own acquires and
//! releases.

use super::slots::{moment, set_moment};
use super::{Exit, Job, Outcome, Warp};
use crate::queue::shared::{BUSY, CID, DONE, FREE, STATE, is_after, word};
use crate::queue::{Address, CidSpace, Shared};
use crate::{Sqe, Status};

/// The most lanes of a warp.
const LANES: u32 = 32;

/// Words of local memory.
mod local {
    use super::LANES;

    pub const VERDICT: u32 = 0;
    pub const CODE: u32 = 1;
    pub const COUNT: u32 = 2;
    pub const WORD: u32 = 3;
    pub const MASK: u32 = 4;
    pub const TICKET: u32 = 5;
    pub const BASE: u32 = 6;
    pub const OPEN: u32 = 7;
    pub const KEPT: u32 = 8;
    pub const DEADLINE: u32 = 10;
    pub const ITEM: u32 = 12;
    pub const RETRIES: u32 = ITEM + LANES;
    pub const DUE: u32 = RETRIES + LANES;
    pub const SLOT: u32 = DUE + 2 * LANES;
    pub const ENDED: u32 = SLOT + LANES;
    pub const DW3: u32 = ENDED + LANES;
    pub const RESULT: u32 = DW3 + 4 * LANES;
    pub const WORDS: u32 = RESULT + 4 * LANES;
}

/// Words of local memory that a warp in shared mode needs.
pub const GROUP_WORDS: u32 = local::WORDS;

/// What one lane says to all: go on, wait, or an end.
const GO_ON: u32 = 0;
const WAIT: u32 = 1;
const LATE: u32 = 2;
const POISONED: u32 = 3;

/// Rounds without anything new between two looks at the clock and the poison word, which may lie in host memory.
const ROUNDS: u32 = 16;

/// How often whoever gives up looks whether somebody else is done with handing out completions.
const LAST_LOOKS: u32 = 1000;

struct Group<'a, W: Warp> {
    warp: &'a W,
    queue: &'a Shared<W>,
    job: &'a Job<W>,
    /// Where to look for free identifiers first.
    hint: u32,
}

/// How far the commands of the list have come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Some are not to be tried again yet.
    Due,
    /// They have no places in the queue.
    Reserve,
    /// The doorbell does not cover them yet.
    Publish,
    /// They have not all ended.
    End,
}

/// Carries out the items from `first` up to `end` of a job on a queue that others use as well. The warp has at most 32
/// lanes and [`GROUP_WORDS`] of local memory. Gives the words of an [`Exit`].
#[inline(always)]
pub fn run_group<W: Warp>(
    warp: &W,
    queue: &Shared<W>,
    job: &Job<W>,
    first: u32,
    end: u32,
    hint: u32,
) -> [u32; 2] {
    let mut group = Group { warp, queue, job, hint };
    let (mut next, end) = (first, end.min(job.count));
    let mut listed = 0;
    loop {
        let fresh = end.saturating_sub(next).min(warp.lanes().min(LANES) - listed);
        warp.each(|lane| {
            if lane < fresh {
                let at = listed + lane;
                warp.set_local(local::ITEM + at, next + lane);
                warp.set_local(local::RETRIES + at, u32::MAX);
                warp.set_local(local::DUE + 2 * at, 0);
                warp.set_local(local::DUE + 2 * at + 1, 0);
            }
        });
        next += fresh;
        listed += fresh;
        if listed == 0 {
            return Exit::Finished.words();
        }
        match group.batch(listed) {
            0 => break,
            count => listed = group.settle(listed, count),
        }
    }
    let handed_over = warp.local(local::COUNT);
    group.give_up(listed, handed_over);
    match warp.local(local::VERDICT) {
        POISONED => Exit::Poisoned(warp.local(local::CODE)).words(),
        _ => Exit::TimedOut.words(),
    }
}

impl<W: Warp> Group<'_, W> {
    /// Hands the commands of the list, or as many as there is room for, to the controller and waits until they end. Gives
    /// how many; none if the launch must end, and then [`local::COUNT`] says how many were handed over.
    #[inline(always)]
    fn batch(&mut self, listed: u32) -> u32 {
        let (warp, queue) = (self.warp, self.queue);
        let (mut step, mut over, mut count) = (Step::Due, false, 0);
        let (mut rounds, mut looks) = (0u32, 0u32);
        self.begin(u64::MAX);
        // One loop for all steps, so that draining and looking at the clock are in the code once.
        loop {
            if step == Step::Due && self.is_due(listed) {
                self.begin(self.job.stall);
                step = Step::Reserve;
            }
            if step == Step::Reserve {
                count = self.reserve(listed);
                if count > 0 {
                    self.write(count);
                    step = Step::Publish;
                }
            }
            if step == Step::Publish && self.publish(warp.local(local::TICKET).wrapping_add(count - 1)) {
                step = Step::End;
            }
            if step == Step::End && self.all_ended(count) {
                break;
            }
            let drained = self.drain();
            if drained == GO_ON {
                continue;
            }
            if over {
                // A command that has completed is never given up: whoever stops has looked once more, and if somebody
                // else is handing out completions, has waited for that.
                looks += 1;
                if step != Step::End || looks > LAST_LOOKS || (drained == LATE && !self.all_ended(count)) {
                    self.check();
                    return 0;
                }
            }
            warp.pause();
            rounds = rounds.wrapping_add(1);
            if !over && rounds.is_multiple_of(ROUNDS) {
                over = self.check();
            }
        }
        warp.each(|lane| {
            if lane < count {
                warp.store(queue.slot(warp.local(local::SLOT + lane) as u16).plus(STATE), FREE);
            }
        });
        // The acquire for what the lanes saw in their slots, and the release of the slots.
        warp.fence();
        warp.once(|| {
            let at = queue.at(word::FREE + warp.local(local::WORD) * 4);
            warp.fetch_or_relaxed(at, warp.local(local::MASK));
        });
        count
    }

    /// One lane takes identifiers and tickets for as many commands as it can get at once, up to `wanted`.
    #[inline(always)]
    fn reserve(&mut self, wanted: u32) -> u32 {
        let (warp, queue, hint) = (self.warp, self.queue, self.hint);
        self.hint = hint.wrapping_add(1);
        warp.sync();
        warp.once(|| {
            warp.set_local(local::COUNT, 0);
            let words = queue.layout().free_words();
            let start = hint % words;
            for i in 0..words {
                let index = if start + i >= words { start + i - words } else { start + i };
                let at = queue.at(word::FREE + index * 4);
                let wish = lowest(warp.load(at), wanted);
                let mask = if wish == 0 { 0 } else { wish & warp.fetch_and_acquire(at, !wish) };
                if mask == 0 {
                    continue;
                }
                let (ticket, count) = self.tickets(mask.count_ones());
                let kept = lowest(mask, count);
                if kept != mask {
                    // Nothing was done to their slots.
                    warp.fetch_or_relaxed(at, mask & !kept);
                }
                warp.set_local(local::WORD, index);
                warp.set_local(local::MASK, kept);
                warp.set_local(local::TICKET, ticket);
                warp.set_local(local::COUNT, count);
                break;
            }
        });
        warp.local(local::COUNT)
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

    /// Every lane writes its entry; then, behind the warp's fence, its stamp.
    #[inline(always)]
    fn write(&self, count: u32) {
        let (warp, queue, job) = (self.warp, self.queue, self.job);
        let (word, mask) = (warp.local(local::WORD), warp.local(local::MASK));
        warp.each(|first| {
            let mut bit = first;
            while bit < 32 {
                let (mine, lane) = (mask >> bit & 1 != 0, (mask & ((1 << bit) - 1)).count_ones());
                let id = (word * 32 + bit) as u16;
                bit += warp.lanes();
                if !mine {
                    continue;
                }
                let slot = queue.slot(id);
                let cid = queue.space.next(warp.load(slot.plus(CID)) as u16);
                warp.store(slot.plus(CID), CidSpace::left(cid));
                warp.store(slot.plus(STATE), BUSY);
                let work = job.work(warp, warp.local(local::ITEM + lane));
                let retries = local::RETRIES + lane;
                if warp.local(retries) == u32::MAX {
                    warp.set_local(retries, work.tries());
                }
                let place = queue.sq_slot(warp.local(local::TICKET).wrapping_add(lane));
                let sqe = work.command(job.nsid).with_cid(cid);
                warp.store_entry(queue.rings.sq.plus(place * Sqe::BYTES as u32), &sqe.dw);
                warp.set_local(local::SLOT + lane, u32::from(id));
            }
        });
        warp.fence();
        warp.each(|lane| {
            if lane < count {
                let ticket = warp.local(local::TICKET).wrapping_add(lane);
                warp.store(queue.stamp(queue.sq_slot(ticket)), ticket.wrapping_add(1));
            }
        });
    }

    /// Whether the doorbell covers `last`; rings it for everybody where nobody else does.
    #[inline(always)]
    fn publish(&self, last: u32) -> bool {
        let (warp, queue) = (self.warp, self.queue);
        let lock = queue.at(word::TAIL_LOCK);
        warp.sync();
        warp.once(|| {
            let tail = warp.load(queue.at(word::TAIL));
            let mut verdict = WAIT;
            if is_after(tail, last) {
                verdict = GO_ON;
            } else if warp.load(lock) == 0 && warp.compare_exchange_acquire(lock, 0, 1) == 0 {
                verdict = LATE;
                warp.set_local(local::BASE, warp.load(queue.at(word::TAIL)));
            }
            warp.set_local(local::VERDICT, verdict);
        });
        let verdict = warp.local(local::VERDICT);
        if verdict != LATE {
            return verdict == GO_ON;
        }
        let old = warp.local(local::BASE);
        let most = (warp.lanes() * W::PLACES).min(queue.rings.sq_entries - 1);
        let stamped = warp.take(
            most,
            |place| {
                let ticket = old.wrapping_add(place);
                let stamp = warp.load(queue.stamp(queue.sq_slot(ticket)));
                ([stamp, 0], stamp == ticket.wrapping_add(1))
            },
            |_, _| true,
        );
        let tail = old.wrapping_add(stamped.count);
        if stamped.count > 0 {
            let rung = queue.at(word::DOORBELLS);
            warp.once(|| {
                // The tail stands before the doorbell: whoever takes a completion of these must find it covers SQHD.
                warp.store(queue.at(word::TAIL), tail);
                warp.store(rung, warp.load(rung).wrapping_add(1));
            });
            // The acquire for the stamps, and the release of the entries behind them.
            warp.fence();
            warp.once(|| warp.ring(queue.rings.sq_door, queue.sq_slot(tail)));
        }
        // Behind that fence, or nothing was written and what the last holder left is handed on.
        warp.once(|| _ = warp.fetch_and_relaxed(lock, 0));
        is_after(tail, last)
    }

    /// Hands out the completions that are there: `GO_ON` if there were some, `LATE` if none, `WAIT` if somebody else is
    /// at it.
    #[inline(always)]
    fn drain(&self) -> u32 {
        let (warp, queue) = (self.warp, self.queue);
        let lock = queue.at(word::CQ_LOCK);
        warp.sync();
        warp.once(|| {
            let mine = warp.load(lock) == 0 && warp.compare_exchange_acquire(lock, 0, 1) == 0;
            warp.set_local(local::VERDICT, mine as u32);
            if mine {
                warp.set_local(local::BASE, warp.load(queue.at(word::CQ_HEAD)));
            }
        });
        if warp.local(local::VERDICT) == 0 {
            return WAIT;
        }
        let head = warp.local(local::BASE);
        let most = (warp.lanes().min(LANES) * W::PLACES).min(queue.rings.cq_entries - 1);
        let taken = warp.take(
            most,
            |place| {
                let (at, phase) = queue.cq_slot(head.wrapping_add(place));
                let words = warp.load_pair(at.plus(8));
                (words, words[1] >> 16 & 1 == phase)
            },
            |place, words| {
                warp.set_local(local::DW3 + place, words[1]);
                true
            },
        );
        if taken.count == 0 {
            // Nothing was written; what the last holder left is handed on.
            warp.once(|| _ = warp.fetch_and_relaxed(lock, 0));
            return LATE;
        }
        self.hand_out(head, taken.count, taken.last as u16);
        warp.once(|| warp.store_release(lock, 0));
        GO_ON
    }

    /// Leaves completions that were taken with their commands' slots. Only for the holder of the completion lock.
    #[inline(always)]
    fn hand_out(&self, head: u32, count: u32, sqhd: u16) {
        let (warp, queue) = (self.warp, self.queue);
        // The acquire for the completions, on the lanes that have read them.
        warp.fence();
        warp.each(|lane| {
            let mut place = lane;
            while place < count {
                let (at, _) = queue.cq_slot(head.wrapping_add(place));
                warp.set_local(local::RESULT + place, warp.load(at));
                place += warp.lanes();
            }
        });
        warp.once(|| {
            let next = head.wrapping_add(count);
            warp.store(queue.at(word::CQ_HEAD), next);
            // Behind the fence, that is its release.
            if let Some(head) = queue.fetched(warp, sqhd) {
                warp.store(queue.at(word::SQ_HEAD), head);
            }
            // Rung before the slots are given back: what is in flight never exceeds what the controller can complete.
            warp.ring(queue.rings.cq_door, next & (queue.rings.cq_entries - 1));
        });
        warp.each(|lane| {
            let mut place = lane;
            while place < count {
                queue.settle(warp, warp.local(local::RESULT + place), warp.local(local::DW3 + place));
                place += warp.lanes();
            }
        });
    }

    /// Whether every command of the batch has ended; how is left in local memory.
    #[inline(always)]
    fn all_ended(&self, count: u32) -> bool {
        let (warp, queue) = (self.warp, self.queue);
        let seen = warp.take(
            count,
            |lane| {
                // The fence at the end of the batch is its acquire.
                let state = warp.load(queue.slot(warp.local(local::SLOT + lane) as u16).plus(STATE));
                ([state, 0], state & 3 == DONE)
            },
            |lane, [state, _]| {
                warp.set_local(local::ENDED + lane, state);
                true
            },
        );
        seen.count == count
    }

    /// Writes down how the first `count` commands of the list ended; those to be tried again and those that found no
    /// room stay. Gives how many.
    #[inline(always)]
    fn settle(&self, listed: u32, count: u32) -> u32 {
        let (warp, job) = (self.warp, self.job);
        warp.each(|lane| {
            if lane < count {
                let status = Status((warp.local(local::ENDED + lane) >> 17) as u16);
                let (item, retries) = (warp.local(local::ITEM + lane), warp.local(local::RETRIES + lane));
                if job.again(status, retries) {
                    let due = job.due(warp, status);
                    warp.set_local(local::RETRIES + lane, retries + 1);
                    warp.set_local(local::DUE + 2 * lane, due as u32);
                    warp.set_local(local::DUE + 2 * lane + 1, (due >> 32) as u32);
                } else {
                    Outcome::Done(status).store(warp, job, item, retries);
                    warp.set_local(local::ITEM + lane, u32::MAX);
                }
            }
        });
        warp.once(|| {
            let mut kept = 0;
            for from in 0..listed {
                if warp.local(local::ITEM + from) != u32::MAX {
                    let copy = |to: u32, from: u32| warp.set_local(to, warp.local(from));
                    copy(local::ITEM + kept, local::ITEM + from);
                    copy(local::RETRIES + kept, local::RETRIES + from);
                    copy(local::DUE + kept * 2, local::DUE + from * 2);
                    copy(local::DUE + kept * 2 + 1, local::DUE + from * 2 + 1);
                    kept += 1;
                }
            }
            warp.set_local(local::KEPT, kept);
        });
        warp.local(local::KEPT)
    }

    /// Whether every command of the list may be tried.
    #[inline(always)]
    fn is_due(&self, listed: u32) -> bool {
        let warp = self.warp;
        warp.sync();
        warp.once(|| {
            let mut last = 0;
            for at in 0..listed {
                last = last.max(moment(warp, local::DUE + 2 * at));
            }
            warp.set_local(local::OPEN, (last == 0 || warp.now() >= last) as u32);
            warp.set_local(local::COUNT, 0);
        });
        warp.local(local::OPEN) != 0
    }

    /// From now on a wait may take so long, within the job's deadline.
    #[inline(always)]
    fn begin(&self, nanos: u64) {
        let warp = self.warp;
        warp.sync();
        warp.once(|| {
            set_moment(warp, local::DEADLINE, warp.now().saturating_add(nanos).min(self.job.deadline))
        });
    }

    /// Whether a wait must end, as one lane sees it for all.
    #[inline(always)]
    fn check(&self) -> bool {
        let (warp, poison) = (self.warp, self.job.poison);
        warp.sync();
        warp.once(|| {
            let code = warp.load(poison);
            let late = warp.now() >= moment(warp, local::DEADLINE);
            let verdict = match code {
                0 if !late => GO_ON,
                0 => LATE,
                _ => POISONED,
            };
            warp.set_local(local::VERDICT, verdict);
            warp.set_local(local::CODE, code);
        });
        warp.local(local::VERDICT) != GO_ON
    }

    /// Says of the first `in_doubt` commands of the list that nothing was heard of them, unless they have ended after
    /// all, and of the others how often they were tried.
    #[inline(always)]
    fn give_up(&self, listed: u32, in_doubt: u32) {
        let (warp, queue, job) = (self.warp, self.queue, self.job);
        warp.each(|lane| {
            if lane < listed {
                let (item, retries) = (warp.local(local::ITEM + lane), warp.local(local::RETRIES + lane));
                if lane < in_doubt {
                    let slot = queue.slot(warp.local(local::SLOT + lane) as u16);
                    let state = warp.load_acquire(slot.plus(STATE));
                    let status = Status((state >> 17) as u16);
                    let outcome = if state & 3 == DONE { Outcome::Done(status) } else { Outcome::InDoubt };
                    outcome.store(warp, job, item, retries);
                } else if retries != u32::MAX {
                    Outcome::Pending.store(warp, job, item, retries);
                }
            }
        });
        warp.fence();
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
