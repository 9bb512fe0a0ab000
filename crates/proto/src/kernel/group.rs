//! Shared mode for warps: the lanes of a warp put their commands into a queue that any number of others use as well,
//! and act as one while they do: one atomic takes identifiers for all of them, one their tickets, one lane rings, and a
//! warp that drains reads many completions side by side.
//!
//! It is the protocol of [`crate::queue::Shared`], on the same control block; single threads and warps can use a queue at
//! the same time. The orders are the same too, with fences of the whole warp in place of each lane's own acquires and
//! releases.

mod list;
mod places;

use super::slots::{moment, set_moment};
use super::{Exit, Job, Phase, Warp};
use crate::queue::counters::is_after;
use crate::queue::shared::{DONE, FREE, STATE, was_busy, word};
use crate::queue::{Address, Shared};

/// The most lanes of a warp.
const LANES: u32 = 32;

/// How many words of free identifiers a warp takes from at once, a word for each 32 commands.
const GROUPS: u32 = 4;

/// The most commands that a warp has listed.
const LIST: u32 = 32 * GROUPS;

/// Words of local memory.
mod local {
    use super::{GROUPS, LIST};

    pub const VERDICT: u32 = 0;
    pub const CODE: u32 = 1;
    pub const COUNT: u32 = 2;
    pub const START: u32 = 3;
    pub const TICKET: u32 = 4;
    pub const BASE: u32 = 5;
    pub const OPEN: u32 = 6;
    pub const KEPT: u32 = 7;
    pub const WAITS: u32 = 8;
    pub const HINT: u32 = 9;
    pub const DEADLINE: u32 = 10;
    pub const MOST: u32 = 12;
    pub const ALONE: u32 = 13;
    pub const MASK: u32 = 14;
    pub const ITEM: u32 = MASK + GROUPS;
    pub const RETRIES: u32 = ITEM + LIST;
    pub const DUE: u32 = RETRIES + LIST;
    pub const SLOT: u32 = DUE + 2 * LIST;
    pub const DW3: u32 = SLOT + LIST;
    pub const WORDS: u32 = DW3 + LIST;
    /// How commands ended: read after the last completions were distributed.
    pub const ENDED: u32 = DW3;
    /// The identifiers that the slots had last: read before any completion is.
    pub const LAST: u32 = DW3;
}

/// Words of local memory that a warp in shared mode needs.
pub const GROUP_WORDS: u32 = local::WORDS;

/// One lane's signal to all: go on, wait, or end.
const GO_ON: u32 = 0;
const WAIT: u32 = 1;
const LATE: u32 = 2;
const POISONED: u32 = 3;

/// Rounds between two checks of the clock and the poison word, which may lie in host memory.
const ROUNDS: u32 = 16;

/// How often a warp that stops checks whether another is done with distributing completions.
const LAST_LOOKS: u32 = 1000;

struct Group<'a, W: Warp> {
    warp: &'a W,
    queue: &'a Shared<W>,
    job: &'a Job<W>,
}

/// The progress of the commands of the list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Some are not yet due for their retry.
    Due,
    /// They have no places in the queue.
    Reserve,
    /// The doorbell does not cover them yet.
    Publish,
    /// They have not all ended.
    End,
}

/// Executes the items from `first` up to `end` of a job on a queue that others use as well: the warp is the `index`th of
/// `of` that were assigned to it. It has at most 32 lanes and [`GROUP_WORDS`] of local memory. Returns the words of an
/// [`Exit`].
#[inline(always)]
pub fn run_group<W: Warp>(
    warp: &W,
    queue: &Shared<W>,
    job: &Job<W>,
    (first, end): (u32, u32),
    (index, of): (u32, u32),
) -> [u32; 2] {
    // Its share of the queue, and no less than a command for each lane.
    let lanes = warp.lanes().min(LANES);
    let most = (queue.layout().capacity() / of.max(1)).clamp(lanes, lanes * W::PLACES).min(LIST);
    let group = Group { warp, queue, job };
    let (mut next, end) = (first, end.min(job.count));
    let mut listed = 0;
    warp.once(|| {
        warp.set_local(local::WAITS, 0);
        warp.set_local(local::MOST, most);
        warp.set_local(local::ALONE, (of <= 1) as u32);
        // Where to look for free identifiers first.
        warp.set_local(local::HINT, index.wrapping_mul(most.div_ceil(32)));
    });
    let stopped = || match warp.local(local::VERDICT) {
        POISONED => Exit::Poisoned(warp.local(local::CODE)).words(),
        _ => Exit::TimedOut.words(),
    };
    // A launch that begins late, after the host has abandoned it, rings no doorbell.
    group.begin(u64::MAX);
    if group.check() {
        return stopped();
    }
    loop {
        let fresh = end.saturating_sub(next).min(warp.local(local::MOST) - listed);
        group.spread(fresh, |i| {
            let at = listed + i;
            warp.set_local(local::ITEM + at, next + i);
            warp.set_local(local::RETRIES + at, u32::MAX);
            warp.set_local(local::DUE + 2 * at, 0);
            warp.set_local(local::DUE + 2 * at + 1, 0);
        });
        next += fresh;
        listed += fresh;
        if listed == 0 {
            return Exit::Finished.words();
        }
        match group.batch(listed) {
            0 => break,
            count => {
                listed = group.settle(listed, count);
                warp.spent(Phase::Complete);
            }
        }
    }
    let handed_over = warp.local(local::COUNT);
    group.give_up(listed, handed_over);
    stopped()
}

impl<W: Warp> Group<'_, W> {
    /// Deals `count` numbers to the lanes.
    #[inline(always)]
    fn spread(&self, count: u32, mut f: impl FnMut(u32)) {
        let lanes = self.warp.lanes();
        self.warp.each(|lane| {
            let mut at = lane;
            while at < count {
                f(at);
                at += lanes;
            }
        });
    }

    /// Submits the commands of the list, or as many as there is room for, and waits until they end. Returns how many; none if
    /// the launch must end, and then [`local::COUNT`] says how many were submitted.
    #[inline(always)]
    fn batch(&self, listed: u32) -> u32 {
        let (warp, queue) = (self.warp, self.queue);
        let (mut step, mut stamped, mut over, mut count) = (Step::Due, false, false, 0);
        let (mut rounds, mut looks) = (0u32, 0u32);
        self.begin(u64::MAX);
        // One loop for all steps, so that draining and checking the clock are in the code once.
        loop {
            if step == Step::Due && self.is_due(listed) {
                self.begin(self.job.stall);
                step = Step::Reserve;
            }
            if step == Step::Reserve {
                count = self.reserve(listed);
                if count > 0 {
                    self.write(count);
                    (step, stamped) = (Step::Publish, false);
                }
            }
            if step == Step::Publish && self.publish(count, &mut stamped) {
                step = Step::End;
                warp.spent(Phase::Submit);
            }
            if step == Step::End && self.all_ended(count) {
                break;
            }
            let drained = self.drain(over);
            warp.spent(match (drained, step) {
                (GO_ON, _) => Phase::Complete,
                (_, Step::Reserve | Step::Publish) => Phase::Submit,
                _ => Phase::Idle,
            });
            if over {
                // A completed command is never abandoned: a warp that stops has polled once more and, if another is
                // distributing completions, has waited for that.
                looks += 1;
                if step != Step::End || looks > LAST_LOOKS || (drained == LATE && !self.all_ended(count)) {
                    self.check();
                    return 0;
                }
            }
            if drained != GO_ON {
                warp.pause();
            }
            // Completions of others do not stop the clock.
            rounds = rounds.wrapping_add(1);
            if !over && rounds.is_multiple_of(ROUNDS) {
                over = self.check();
            }
        }
        self.spread(count, |i| {
            warp.store(queue.slot(warp.local(local::SLOT + i) as u16).plus(STATE), FREE);
        });
        // The acquire for what the lanes saw in their slots, and the release of the slots.
        warp.fence();
        let start = warp.local(local::START);
        self.spread(GROUPS, |group| self.give_back(start, group, warp.local(local::MASK + group)));
        count
    }

    /// Whether the doorbell covers the batch of `count` commands; rings it unless another does: for the batch alone if it is
    /// its turn, else, once it is `stamped`, for all.
    #[inline(always)]
    fn publish(&self, count: u32, stamped: &mut bool) -> bool {
        let (warp, queue) = (self.warp, self.queue);
        let lock = queue.at(word::TAIL_LOCK);
        let first = warp.local(local::TICKET);
        let end = first.wrapping_add(count);
        loop {
            warp.sync();
            warp.once(|| {
                // Both are under way at once.
                let (tail, held) = (warp.load(queue.at(word::TAIL)), warp.load(lock));
                let mut verdict = WAIT;
                if is_after(tail, end.wrapping_sub(1)) {
                    verdict = GO_ON;
                } else if (*stamped || tail == first)
                    && held == 0
                    && warp.compare_exchange_acquire(lock, 0, 1) == 0
                {
                    verdict = LATE;
                    // The tail does not pass entries without a stamp: it still stands before them.
                    let base = if *stamped { warp.load(queue.at(word::TAIL)) } else { first };
                    warp.set_local(local::BASE, base);
                }
                warp.set_local(local::VERDICT, verdict);
            });
            match warp.local(local::VERDICT) {
                LATE => break,
                WAIT if !*stamped => {
                    // The release of the entries, for the warp that rings for them.
                    warp.fence();
                    self.stamp(count);
                    *stamped = true;
                }
                verdict => return verdict == GO_ON,
            }
        }
        let old = warp.local(local::BASE);
        let mut tail = end;
        if !*stamped {
            self.stamp(count);
        } else {
            let most = (warp.lanes() * W::PLACES).min(queue.rings.sq_entries - 1);
            let found = warp.take(
                most,
                |place| {
                    let ticket = old.wrapping_add(place);
                    let stamp = warp.load(queue.stamp(queue.sq_slot(ticket)));
                    ([stamp, 0], stamp == ticket.wrapping_add(1))
                },
                |_, _| true,
            );
            tail = old.wrapping_add(found.count);
        }
        if tail != old {
            let rung = queue.at(word::DOORBELLS);
            // The tail is stored before the doorbell: a taker of their completions must find that it covers SQHD.
            warp.once(|| warp.store(queue.at(word::TAIL), tail));
            // The acquire for the stamps, and the release of the entries.
            warp.fence();
            warp.once(|| {
                warp.ring(queue.rings.sq_door, queue.sq_slot(tail));
                warp.store(rung, warp.load(rung).wrapping_add(1));
                // The next holder's doorbell write must not overtake this one, or this one would set the tail back, and
                // the controller would take a whole ring for new.
                warp.store_release(lock, 0);
            });
        } else {
            // Nothing was written; what the last holder left is handed on.
            warp.once(|| _ = warp.fetch_and_relaxed(lock, 0));
        }
        is_after(tail, end.wrapping_sub(1))
    }

    /// Distributes the available completions: `GO_ON` if there were some, `LATE` if none, `WAIT` if another warp is doing it.
    /// A warp that is alone checks whether there are some before it takes the lock, unless it must be sure; of several only
    /// the one with the lock reads the ring, which may be far away.
    #[inline(always)]
    fn drain(&self, sure: bool) -> u32 {
        let (warp, queue) = (self.warp, self.queue);
        let lock = queue.at(word::CQ_LOCK);
        let alone = warp.local(local::ALONE) != 0;
        warp.sync();
        warp.once(|| {
            let mut verdict = LATE;
            let held = warp.load(lock);
            if sure || !alone || self.is_completed(warp.load(queue.at(word::CQ_HEAD))) {
                verdict = WAIT;
                if held == 0 && warp.compare_exchange_acquire(lock, 0, 1) == 0 {
                    verdict = GO_ON;
                    warp.set_local(local::BASE, warp.load(queue.at(word::CQ_HEAD)));
                }
            }
            warp.set_local(local::VERDICT, verdict);
        });
        let verdict = warp.local(local::VERDICT);
        if verdict != GO_ON {
            return verdict;
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

    /// Whether the completion of this number is there.
    #[inline(always)]
    fn is_completed(&self, number: u32) -> bool {
        let (at, phase) = self.queue.cq_slot(number);
        self.warp.load(at.plus(12)) >> 16 & 1 == phase
    }

    /// Stores completions that were taken in their commands' slots. Only for the holder of the completion lock.
    #[inline(always)]
    fn hand_out(&self, head: u32, count: u32, sqhd: u16) {
        let (warp, queue) = (self.warp, self.queue);
        // The acquire for the completions, on the lanes that have read them.
        warp.fence();
        warp.once(|| {
            let next = head.wrapping_add(count);
            warp.store(queue.at(word::CQ_HEAD), next);
            // Behind the fence, that is its release.
            if let Some(head) = queue.update_sq_head(warp, sqhd) {
                warp.store(queue.at(word::SQ_HEAD), head);
            }
            // Rung before the slots are freed: commands in flight never exceed what the controller can complete.
            warp.ring(queue.rings.cq_door, next & (queue.rings.cq_entries - 1));
        });
        const { assert!(W::PLACES <= 4) };
        // All lanes' at once, and only then their results: each is a round trip to memory.
        warp.each(|lane| {
            let places = [0, 1, 2, 3].map(|row| lane + row * warp.lanes());
            let settle = |place| {
                if place < count { queue.try_settle(warp, warp.local(local::DW3 + place)) } else { FREE }
            };
            let seen = [settle(places[0]), settle(places[1]), settle(places[2]), settle(places[3])];
            let mut unexpected = 0;
            for (place, seen) in places.into_iter().zip(seen) {
                let is_unexpected = place < count && !was_busy(warp.local(local::DW3 + place), seen);
                unexpected += u32::from(is_unexpected);
            }
            if unexpected > 0 {
                warp.fetch_add(queue.at(word::UNEXPECTED), unexpected);
            }
        });
    }

    /// Whether every command of the batch has ended; the results are left in local memory.
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

    /// From now on a wait may take this long, within the job's deadline.
    #[inline(always)]
    fn begin(&self, nanos: u64) {
        let warp = self.warp;
        warp.sync();
        warp.once(|| {
            set_moment(warp, local::DEADLINE, warp.now().saturating_add(nanos).min(self.job.deadline));
            warp.set_local(local::COUNT, 0);
            warp.set_local(local::KEPT, 0);
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
}
