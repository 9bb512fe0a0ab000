//! Owner mode on a warp: a sliding window of commands on one queue pair.
//!
//! Each turn the lanes look at the next completions, one lane each, find the command by its CID and write down how it
//! ended; then they fill the freed window slots with the next items, build the entries side by side, and one lane rings
//! once for all of them. The window's tables lie in scratch memory that is close to the warp.

use super::{Exit, Job, Outcome, Warp};
use crate::Cqe;
use crate::queue::{Address, Bounds, CidSpace, Memory, Ring, RingState, Rings};

/// A queue pair that warps take turns to own.
pub struct OwnerQueue<M: Memory> {
    /// Where the rings lie.
    pub rings: Rings<M>,
    /// Scratch memory of [`scratch_bytes`], prepared by [`scratch_init`].
    pub scratch: M::Addr,
    /// How many commands may be in flight.
    pub window: u32,
}

impl<M: Memory> Clone for OwnerQueue<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for OwnerQueue<M> {}

/// Scratch memory: the ring state that outlives a launch, counters, then the window's slots and its idle list.
mod word {
    pub const TAIL: u32 = 0;
    pub const SQ_HEAD: u32 = 4;
    pub const HEAD: u32 = 8;
    pub const PHASE: u32 = 12;
    pub const IDLE: u32 = 16;
    pub const WAITING: u32 = 20;
    pub const STRAY: u32 = 24;
    pub const PLACED: u32 = 28;
    pub const SLOTS: u32 = 32;
}

const SLOT_BYTES: u32 = 32;
const CID: u32 = 0;
const STATE: u32 = 4;
const ITEM: u32 = 8;
const RETRIES: u32 = 12;
const DUE: u32 = 16;

const FREE: u32 = 0;
const BUSY: u32 = 1;
const WAITING: u32 = 2;

/// A word of [`word::STRAY`] that no CID can be.
const NO_STRAY: u32 = u32::MAX;

/// Bytes of scratch memory for a window.
#[must_use]
pub const fn scratch_bytes(window: u32) -> u32 {
    word::SLOTS + window * (SLOT_BYTES + 4)
}

/// Prepares the scratch memory of a pair that was just created.
pub fn scratch_init<M: Memory>(mem: &M, queue: &OwnerQueue<M>) {
    let space = CidSpace::new(queue.window);
    save(mem, queue.scratch, RingState::NEW);
    for id in 0..queue.window {
        mem.store(queue.scratch.plus(word::SLOTS + id * SLOT_BYTES + CID), space.first(id as u16) as u32);
    }
    mem.fence();
}

fn save<M: Memory>(mem: &M, scratch: M::Addr, state: RingState) {
    mem.store(scratch.plus(word::TAIL), state.tail);
    mem.store(scratch.plus(word::SQ_HEAD), state.sq_head);
    mem.store(scratch.plus(word::HEAD), state.head);
    mem.store(scratch.plus(word::PHASE), state.phase as u32);
}

fn restore<M: Memory>(mem: &M, scratch: M::Addr) -> RingState {
    RingState {
        tail: mem.load(scratch.plus(word::TAIL)),
        sq_head: mem.load(scratch.plus(word::SQ_HEAD)),
        head: mem.load(scratch.plus(word::HEAD)),
        phase: mem.load(scratch.plus(word::PHASE)) != 0,
    }
}

/// What a warp knows while it runs; the same on all lanes.
struct Window<'a, W: Warp> {
    warp: &'a W,
    job: &'a Job<W>,
    space: CidSpace,
    ring: Ring<W>,
    scratch: W::Addr,
    window: u32,
    next: u32,
    stride: u32,
    idle: u32,
    waiting: u32,
    in_flight: u32,
}

/// Carries out the items `first`, `first + stride` … of a job on a queue pair that this warp owns for as long.
pub fn run_owner<W: Warp>(warp: &W, queue: &OwnerQueue<W>, job: &Job<W>, first: u32, stride: u32) -> Exit {
    let window = queue.window.min(queue.rings.capacity());
    let mut run = Window {
        warp,
        job,
        space: CidSpace::new(queue.window),
        ring: Ring::new(queue.rings, restore(warp, queue.scratch)),
        scratch: queue.scratch,
        window,
        next: first,
        stride: stride.max(1),
        idle: window,
        waiting: 0,
        in_flight: 0,
    };
    run.prepare();
    let exit = run.run();
    if exit != Exit::Finished {
        run.give_up();
    }
    run.release();
    let state = run.ring.state();
    warp.once(|| save(warp, queue.scratch, state));
    exit
}

impl<W: Warp> Window<'_, W> {
    fn prepare(&mut self) {
        let (warp, window) = (self.warp, self.window);
        warp.each(|lane| {
            let mut id = lane;
            while id < window {
                warp.store(self.slot(id).plus(STATE), FREE);
                warp.store(self.idle_entry(id), id);
                id += warp.lanes();
            }
        });
        warp.once(|| {
            warp.store(self.at(word::IDLE), window);
            warp.store(self.at(word::WAITING), 0);
            warp.store(self.at(word::STRAY), NO_STRAY);
        });
    }

    fn run(&mut self) -> Exit {
        let bounds = Bounds { deadline: self.job.deadline, poison: self.job.poison };
        let mut quiet_since = None;
        let mut turn = 0u32;
        loop {
            let taken = self.collect();
            let stray = self.warp.load(self.at(word::STRAY));
            if stray != NO_STRAY {
                return Exit::Stray(stray as u16);
            }
            let placed = self.refill();
            if self.in_flight == 0 && self.waiting == 0 && self.next >= self.job.count {
                return Exit::Finished;
            }
            let quiet = taken == 0 && placed == 0;
            turn = turn.wrapping_add(1);
            // Looking up costs a read of far memory: seldom while there is work, each time while there is none.
            if (quiet || turn.is_multiple_of(16))
                && let Err(stop) = bounds.check(self.warp)
            {
                return stop.into();
            }
            if !quiet {
                quiet_since = None;
                continue;
            }
            let now = self.warp.now();
            let since = *quiet_since.get_or_insert(now);
            if self.in_flight > 0 && now.wrapping_sub(since) > self.job.stall {
                return Exit::TimedOut;
            }
            self.warp.pause();
        }
    }

    /// Takes the completions that are there, at most one for each lane.
    fn collect(&mut self) -> u32 {
        let warp = self.warp;
        let limit = self.in_flight.min(warp.lanes());
        let taken =
            if limit == 0 { 0 } else { warp.prefix(|lane| lane < limit && self.ring.ready(warp, lane)) };
        let Some(last) = taken.checked_sub(1).and_then(|i| self.ring.peek(warp, i)) else {
            self.release();
            return 0;
        };
        warp.each(|lane| {
            if lane < taken
                && let Some(cqe) = self.ring.peek(warp, lane)
            {
                self.settle(&cqe);
            }
        });
        self.ring.pass(taken);
        self.ring.fetched(last.sqhd());
        self.in_flight -= taken;
        self.idle = warp.load(self.at(word::IDLE));
        self.waiting = warp.load(self.at(word::WAITING));
        if self.ring.unrung() >= (self.ring.rings().cq_entries / 4).max(1) || taken < limit {
            self.release();
        }
        taken
    }

    /// One lane writes down how a command ended.
    fn settle(&self, cqe: &Cqe) {
        let warp = self.warp;
        let found = self.space.slot(cqe.cid()).filter(|id| {
            let slot = self.slot(u32::from(*id));
            u32::from(*id) < self.window
                && warp.load(slot.plus(STATE)) == BUSY
                && warp.load(slot.plus(CID)) == u32::from(cqe.cid())
        });
        let Some(id) = found else {
            warp.store(self.at(word::STRAY), u32::from(cqe.cid()));
            return;
        };
        let slot = self.slot(u32::from(id));
        let (item, retries) = (warp.load(slot.plus(ITEM)), warp.load(slot.plus(RETRIES)));
        let status = cqe.status();
        if self.job.again(status, retries) {
            let due = self.job.due(warp, status);
            warp.store(slot.plus(DUE), due as u32);
            warp.store(slot.plus(DUE + 4), (due >> 32) as u32);
            warp.store(slot.plus(RETRIES), retries + 1);
            warp.store(slot.plus(STATE), WAITING);
            warp.fetch_add(self.at(word::WAITING), 1);
        } else {
            Outcome::Done(status).store(warp, self.job, item, retries);
            warp.store(slot.plus(STATE), FREE);
            let place = warp.fetch_add(self.at(word::IDLE), 1);
            warp.store(self.idle_entry(place), u32::from(id));
        }
    }

    /// Fills free window slots with the next items and hands them over with one doorbell.
    fn refill(&mut self) -> u32 {
        let warp = self.warp;
        let room = self.ring.room();
        let mut placed = if self.waiting > 0 { self.place_retries(room) } else { 0 };
        let left =
            if self.next < self.job.count { (self.job.count - self.next).div_ceil(self.stride) } else { 0 };
        let fresh = self.idle.min(room - placed).min(left);
        if fresh > 0 {
            let (next, stride, idle) = (self.next, self.stride, self.idle);
            warp.each(|lane| {
                let mut k = lane;
                while k < fresh {
                    let id = warp.load(self.idle_entry(idle - 1 - k));
                    let slot = self.slot(id);
                    warp.store(slot.plus(ITEM), next + k * stride);
                    warp.store(slot.plus(RETRIES), 0);
                    self.start(id, placed + k);
                    k += warp.lanes();
                }
            });
            self.next = next.saturating_add(fresh.saturating_mul(stride));
            self.idle -= fresh;
            warp.once(|| warp.store(self.at(word::IDLE), idle - fresh));
        }
        placed += fresh;
        if placed > 0 {
            self.in_flight += placed;
            // The controller must be able to complete all that is in flight without waiting for a doorbell.
            if self.in_flight + self.ring.unrung() >= self.ring.rings().cq_entries {
                self.release();
            }
            self.ring.advance(placed);
            let (door, tail) = (self.ring.rings().sq_door, self.ring.state().tail);
            warp.once(|| {
                warp.fence();
                warp.ring(door, tail);
            });
        }
        placed
    }

    /// Starts the commands whose time to be tried again has come.
    fn place_retries(&mut self, room: u32) -> u32 {
        let (warp, now) = (self.warp, self.warp.now());
        warp.once(|| warp.store(self.at(word::PLACED), 0));
        warp.each(|lane| {
            let mut id = lane;
            while id < self.window {
                let slot = self.slot(id);
                if warp.load(slot.plus(STATE)) == WAITING {
                    let due =
                        u64::from(warp.load(slot.plus(DUE))) | u64::from(warp.load(slot.plus(DUE + 4))) << 32;
                    if due <= now {
                        let place = warp.fetch_add(self.at(word::PLACED), 1);
                        if place < room {
                            self.start(id, place);
                        }
                    }
                }
                id += warp.lanes();
            }
        });
        let placed = warp.load(self.at(word::PLACED)).min(room);
        self.waiting -= placed;
        let waiting = self.waiting;
        warp.once(|| warp.store(self.at(word::WAITING), waiting));
        placed
    }

    /// One lane writes the entry of a slot's item.
    fn start(&self, id: u32, ahead: u32) {
        let (warp, slot) = (self.warp, self.slot(id));
        let cid = self.space.next(warp.load(slot.plus(CID)) as u16);
        warp.store(slot.plus(CID), u32::from(cid));
        warp.store(slot.plus(STATE), BUSY);
        let sqe = self.job.command(warp, warp.load(slot.plus(ITEM)));
        self.ring.write(warp, ahead, &sqe.with_cid(cid));
    }

    /// Says of every command in flight that nothing was heard of it.
    fn give_up(&mut self) {
        let warp = self.warp;
        warp.each(|lane| {
            let mut id = lane;
            while id < self.window {
                let slot = self.slot(id);
                if warp.load(slot.plus(STATE)) == BUSY {
                    let (item, retries) = (warp.load(slot.plus(ITEM)), warp.load(slot.plus(RETRIES)));
                    Outcome::InDoubt.store(warp, self.job, item, retries);
                }
                id += warp.lanes();
            }
        });
    }

    fn release(&mut self) {
        if self.ring.unrung() > 0 {
            let (warp, door, head) = (self.warp, self.ring.rings().cq_door, self.ring.state().head);
            warp.once(|| warp.ring(door, head));
            self.ring.released();
        }
    }

    #[inline(always)]
    fn at(&self, offset: u32) -> W::Addr {
        self.scratch.plus(offset)
    }

    #[inline(always)]
    fn slot(&self, id: u32) -> W::Addr {
        self.at(word::SLOTS + id * SLOT_BYTES)
    }

    #[inline(always)]
    fn idle_entry(&self, place: u32) -> W::Addr {
        self.at(word::SLOTS + self.window * SLOT_BYTES + place * 4)
    }
}
