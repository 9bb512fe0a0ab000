//! Owner mode on a warp: a sliding window of commands on one queue pair.
//!
//! Each turn the lanes poll the next completions, several each, find the commands by their CIDs and record how they
//! ended; then they fill the freed window slots with the next items and build the entries side by side. One fence
//! and one doorbell serve the whole turn. The window's tables lie in local memory, and items are fetched there ahead
//! of their turn.
//!
//! **Order.** Completions are read by loads that order nothing: an acquire for each would cost more than all else.
//! Every lane executes the turn's fence after them. A load that reads what the controller wrote, followed by a fence in
//! the same thread, is an acquire: everything after the fence, such as the doorbell that frees the entries and every use
//! of the data, comes after what the controller did before it wrote the completion. Until then the kernel only trusts
//! the two words with the phase, which are read at once. Entries are stored by all lanes;
//! the barrier at the end of [`Warp::each`] puts them before the fence of the lane that rings. A turn that takes
//! completions and neither places entries nor rings needs no fence of its own: the next one, or the one at the end of
//! the kernel, covers it.

use super::slots::{
    NO_SLOT, NONE_UNEXPECTED, STAGED, SlotState, Slots, local, moment, restore_all, save, set_moment,
};
use super::{Exit, ItemOutcome, Job, Phase, Warp, WorkItem};
use crate::Status;
use crate::queue::{Address, Memory, Ring, Rings};

/// The largest window: larger ones are cut to it. Their tables fit into a block's shared memory, and their
/// identifiers keep six bits for the lap.
pub const MAX_WINDOW: u32 = 1023;

/// Turns with work between two checks of the clock.
const BUSY_TURNS: u32 = 64;

/// Turns without any between two checks of the clock.
const QUIET_TURNS: u32 = 16;

/// Nanoseconds between two checks of the poison word, which may lie in host memory and then costs as much as a command.
const POISON_EVERY: u64 = 50_000;

/// When the poison word was last checked before a launch: half a clock ago.
const LONG_AGO: u64 = 1 << 63;

/// A queue pair that warps take turns to own.
pub struct OwnerQueue<M: Memory> {
    /// Where the rings lie.
    pub rings: Rings<M>,
    /// Memory of [`super::scratch_bytes`], prepared by [`super::scratch_init`].
    pub scratch: M::Addr,
    /// How many commands may be in flight; the rings and [`MAX_WINDOW`] may allow fewer.
    pub window: u32,
}

impl<M: Memory> Clone for OwnerQueue<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for OwnerQueue<M> {}

/// What a warp knows while it runs; the same on all lanes.
struct Window<'a, W: Warp> {
    warp: &'a W,
    job: &'a Job<W>,
    slots: Slots,
    ring: Ring<W>,
    /// The next item to start, the next to fetch, and the end.
    next: u32,
    staged: u32,
    end: u32,
    /// How many slots are free, and how many wait for a retry.
    idle: u32,
    waiting: u32,
    in_flight: u32,
}

/// The first word of [`local::EXIT`] as long as there is no reason to end.
const GO_ON: u32 = 0;

/// What a turn took from the completion queue.
struct Turn {
    taken: u32,
    /// Whether it could have taken more.
    drained: bool,
    /// Whether one of them belonged to no command: the launch ends.
    has_unexpected: bool,
}

/// Executes the items from `first` up to `end` of a job on a queue pair that this warp owns meanwhile. The warp has
/// [`super::LOCAL_WORDS`] of local memory. `queue` returns the queue whenever it is called, because values needed only at
/// both ends of a launch are not kept in registers. Returns the words of an [`Exit`].
#[inline(always)]
pub fn run_owner<W: Warp>(
    warp: &W,
    queue: impl Fn() -> OwnerQueue<W>,
    job: &Job<W>,
    first: u32,
    end: u32,
) -> [u32; 2] {
    let OwnerQueue { rings, scratch, window } = queue();
    let Some(state) = restore_all(warp, scratch, &rings) else { return Exit::InvalidControl.words() };
    let window = window.min(rings.capacity()).min(MAX_WINDOW);
    let end = end.min(job.count);
    let first = first.min(end);
    let mut run = Window {
        warp,
        job,
        slots: Slots::new(window),
        ring: Ring::new(rings, state),
        next: first,
        staged: first,
        end,
        idle: window,
        waiting: 0,
        in_flight: 0,
    };
    warp.once(|| {
        warp.set_local(local::UNEXPECTED, NONE_UNEXPECTED);
        warp.set_local(local::EXIT, GO_ON);
        set_moment(warp, local::DEADLINE, job.deadline);
        set_moment(warp, local::LOOKED, LONG_AGO);
    });
    run.slots.load(warp, scratch);
    run.stage();
    // A launch that begins late, after the host has abandoned it, rings no doorbell.
    if run.look(0) {
        run.run();
    }
    // Words, and in local memory: values that only an end needs are not kept in registers.
    let exit = [warp.local(local::EXIT), warp.local(local::EXIT + 1)];
    let exit = if exit[0] == GO_ON { Exit::Finished.words() } else { exit };
    if exit != Exit::Finished.words() {
        run.give_up();
    }
    run.hand_over(0, true);
    let scratch = queue().scratch;
    run.slots.save(warp, scratch);
    let state = run.ring.state();
    warp.once(|| save(warp, scratch, state));
    warp.fence();
    exit
}

impl<W: Warp> Window<'_, W> {
    #[inline(always)]
    fn run(&mut self) {
        let (mut turn, mut quiet) = (0u32, 0u32);
        loop {
            let Turn { taken, drained, has_unexpected } = self.collect();
            if has_unexpected {
                return;
            }
            self.warp.spent(if taken > 0 { Phase::Complete } else { Phase::Idle });
            turn = turn.wrapping_add(1);
            let retries = self.waiting > 0 && (taken == 0 || turn.is_multiple_of(8));
            let placed = self.refill(retries);
            self.hand_over(placed, drained);
            self.warp.spent(if placed > 0 { Phase::Submit } else { Phase::Idle });
            if self.in_flight == 0 && self.waiting == 0 && self.next >= self.end {
                return;
            }
            let look;
            if taken > 0 || placed > 0 {
                quiet = 0;
                look = turn.is_multiple_of(BUSY_TURNS);
            } else {
                quiet = quiet.wrapping_add(1);
                look = quiet.is_multiple_of(QUIET_TURNS);
                if quiet > W::SPINS {
                    self.warp.pause();
                }
            }
            if look && !self.look(quiet) {
                return;
            }
        }
    }

    /// Checks the clock and, if it is time, the poison word; on one lane, so that all come to the same end. Nothing has moved
    /// for `quiet` turns. Returns whether to go on.
    #[inline(always)]
    fn look(&mut self, quiet: u32) -> bool {
        let (warp, job) = (self.warp, self.job);
        // Silence is no stall only if all remaining commands wait until they are due, and can be started then.
        let patient = self.in_flight == 0 && self.waiting > 0 && self.ring.room() > 0;
        // No lane may still be reading the result of the last check.
        warp.sync();
        warp.once(|| {
            let now = warp.now();
            if quiet == QUIET_TURNS {
                set_moment(warp, local::SINCE, now);
            }
            let stalled =
                quiet > QUIET_TURNS && !patient && now.wrapping_sub(moment(warp, local::SINCE)) > job.stall;
            let mut exit = [GO_ON, 0];
            if stalled || now >= moment(warp, local::DEADLINE) {
                exit = Exit::TimedOut.words();
            }
            if now.wrapping_sub(moment(warp, local::LOOKED)) >= POISON_EVERY {
                set_moment(warp, local::LOOKED, now);
                let code = warp.load(job.poison);
                if code != 0 {
                    exit = Exit::Poisoned(code).words();
                }
            }
            warp.set_local(local::EXIT, exit[0]);
            warp.set_local(local::EXIT + 1, exit[1]);
        });
        warp.local(local::EXIT) == GO_ON
    }

    /// Takes the completions that are there.
    #[inline(always)]
    fn collect(&mut self) -> Turn {
        let warp = self.warp;
        let most = warp.lanes() * W::PLACES;
        let limit = self.in_flight.min(most);
        if limit == 0 {
            return Turn { taken: 0, drained: true, has_unexpected: false };
        }
        let (ring, idle) = (&self.ring, self.idle);
        let taken = warp.take(
            limit,
            |place| ring.look(warp, place),
            |place, words| {
                let freed = self.settle(words[1]);
                warp.set_local(self.slots.idle(idle + place), freed.unwrap_or(NO_SLOT));
                freed.is_some()
            },
        );
        let mut has_unexpected = false;
        if taken.count > 0 {
            self.ring.pass(taken.count);
            self.ring.update_sq_head(taken.last as u16);
            self.in_flight -= taken.count;
            if taken.all_well {
                self.idle += taken.count;
            } else {
                has_unexpected = self.close_gaps(taken.count);
            }
        }
        Turn { taken: taken.count, drained: taken.count < most, has_unexpected }
    }

    /// One lane records how a command ended, and returns its slot if that is free now.
    #[inline(always)]
    fn settle(&self, dw3: u32) -> Option<u32> {
        let (warp, slots, cid) = (self.warp, &self.slots, dw3 as u16);
        let id = slots.space.slot(cid).map_or(u32::MAX, u32::from);
        if id >= slots.window {
            warp.set_local(local::UNEXPECTED, u32::from(cid));
            return None;
        }
        let (item, retries) = (warp.local(slots.item(id)), warp.local(slots.retries(id)));
        // Checked and claimed in one step: of two lanes that hold completions of one command, one fails.
        let busy = SlotState::Busy.with(cid);
        if warp.exchange_local(slots.state(id), busy, SlotState::Free.with(cid)) != busy {
            warp.set_local(local::UNEXPECTED, u32::from(cid));
            return None;
        }
        let status = Status((dw3 >> 17) as u16);
        if !self.job.again(status, retries) {
            ItemOutcome::Done(status).store(warp, self.job, item, retries);
            warp.ended(item);
            return Some(id);
        }
        let due = self.job.due(warp, status);
        let [low, high] = slots.due(id);
        warp.set_local(low, due as u32);
        warp.set_local(high, (due >> 32) as u32);
        warp.set_local(slots.retries(id), retries + 1);
        warp.set_local(slots.state(id), SlotState::Waiting.with(cid));
        None
    }

    /// After a batch in which not every command freed its slot: closes the gaps in the idle list. Returns whether there was a
    /// completion that belongs to no command.
    #[inline(always)]
    fn close_gaps(&mut self, taken: u32) -> bool {
        let (warp, idle, slots) = (self.warp, self.idle, self.slots);
        warp.once(|| {
            let mut to = idle;
            for from in idle..idle + taken {
                let id = warp.local(slots.idle(from));
                if id != NO_SLOT {
                    warp.set_local(slots.idle(to), id);
                    to += 1;
                }
            }
            warp.set_local(local::IDLE, to);
            let unexpected = warp.local(local::UNEXPECTED);
            if unexpected != NONE_UNEXPECTED {
                let [kind, cid] = Exit::UnexpectedCompletion(unexpected as u16).words();
                warp.set_local(local::EXIT, kind);
                warp.set_local(local::EXIT + 1, cid);
            }
        });
        self.idle = warp.local(local::IDLE);
        self.waiting += idle + taken - self.idle;
        warp.local(local::EXIT) != GO_ON
    }

    /// Fills free window slots with the next items and writes their entries; returns how many.
    #[inline(always)]
    fn refill(&mut self, retries: bool) -> u32 {
        let warp = self.warp;
        let room = self.ring.room();
        let retried = if retries { self.place_retries(room) } else { 0 };
        let fresh = self.idle.min(room - retried).min(self.staged - self.next);
        if fresh == 0 {
            return retried;
        }
        warp.wait_fetches();
        let (next, idle) = (self.next, self.idle);
        warp.each(|lane| {
            let mut k = lane;
            while k < fresh {
                let id = warp.local(self.slots.idle(idle - 1 - k));
                let at = local::STAGE + (next + k) % STAGED * 8;
                let work = WorkItem::from_halves(warp.local_four(at), warp.local_four(at + 4));
                warp.begun(next + k);
                warp.set_local(self.slots.item(id), next + k);
                warp.set_local(self.slots.retries(id), work.tries());
                self.start(id, retried + k, &work);
                k += warp.lanes();
            }
        });
        self.next += fresh;
        self.idle -= fresh;
        retried + fresh
    }

    /// Starts the commands whose retry is due.
    #[inline(always)]
    fn place_retries(&mut self, room: u32) -> u32 {
        let warp = self.warp;
        warp.sync();
        warp.once(|| warp.set_local(local::PLACED, 0));
        warp.each(|lane| {
            let now = warp.now();
            let mut id = lane;
            while id < self.slots.window {
                let [low, high] = self.slots.due(id);
                if SlotState::Waiting.is(warp.local(self.slots.state(id)))
                    && u64::from(warp.local(low)) | u64::from(warp.local(high)) << 32 <= now
                {
                    let place = warp.add_local(local::PLACED, 1);
                    if place < room {
                        let work = self.job.work(warp, warp.local(self.slots.item(id)));
                        self.start(id, place, &work);
                    }
                }
                id += warp.lanes();
            }
        });
        let placed = warp.local(local::PLACED).min(room);
        self.waiting -= placed;
        placed
    }

    /// One lane writes the entry of a slot's item.
    #[inline(always)]
    fn start(&self, id: u32, ahead: u32, work: &WorkItem) {
        let (warp, state) = (self.warp, self.slots.state(id));
        let cid = self.slots.space.next(warp.local(state) as u16);
        warp.set_local(state, SlotState::Busy.with(cid));
        self.ring.write(warp, ahead, &work.command(self.job.nsid).with_cid(cid));
    }

    /// Ends a turn: one fence, then the doorbells that are due.
    #[inline(always)]
    fn hand_over(&mut self, placed: u32, drained: bool) {
        self.in_flight += placed;
        self.ring.advance(placed);
        let (rings, unacknowledged) = (*self.ring.rings(), self.ring.unacknowledged());
        // The controller must be able to complete all commands in flight without waiting for a doorbell.
        let full = self.in_flight + unacknowledged >= rings.cq_entries;
        let release = unacknowledged > 0 && (drained || full || unacknowledged * 4 >= rings.cq_entries);
        if !release && placed == 0 {
            return;
        }
        let (warp, state) = (self.warp, self.ring.state());
        warp.fence();
        warp.once(|| {
            if release && full {
                warp.ring(rings.cq_door, state.head);
            }
            if placed > 0 {
                warp.ring(rings.sq_door, state.tail);
            }
            if release && !full {
                warp.ring(rings.cq_door, state.head);
            }
        });
        if release {
            self.ring.released();
        }
        self.stage();
    }

    /// Begins to fetch items up to as many as one turn can start.
    #[inline(always)]
    fn stage(&mut self) {
        let warp = self.warp;
        let until = self.next + (self.end.saturating_sub(self.next)).min(STAGED);
        let (first, halves) = (self.staged, (until - self.staged) * 2);
        warp.each(|lane| {
            let mut half = lane;
            while half < halves {
                let (item, part) = (first + half / 2, half % 2);
                let from = self.job.works.element(item, WorkItem::BYTES).plus(part * 16);
                warp.fetch(local::STAGE + item % STAGED * 8 + part * 4, from);
                half += warp.lanes();
            }
        });
        self.staged = until;
    }

    /// Records an unknown outcome for every command in flight, and for waiting ones how often they were tried.
    #[inline(always)]
    fn give_up(&mut self) {
        let (warp, slots) = (self.warp, self.slots);
        warp.each(|lane| {
            let mut id = lane;
            while id < slots.window {
                let state = warp.local(slots.state(id));
                let outcome =
                    if SlotState::Busy.is(state) { ItemOutcome::Unknown } else { ItemOutcome::Pending };
                if !SlotState::Free.is(state) {
                    let (item, retries) = (warp.local(slots.item(id)), warp.local(slots.retries(id)));
                    outcome.store(warp, self.job, item, retries);
                }
                id += warp.lanes();
            }
        });
    }
}
