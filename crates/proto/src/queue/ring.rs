//! The two rings of a pair, as their single owner sees them: where they lie, and the position of each side.

use super::{Address, Memory};
use crate::{Cqe, Sqe};

/// Where a queue pair lies and how large it is.
pub struct Rings<M: Memory> {
    /// The submission queue.
    pub sq: M::Addr,
    /// The completion queue.
    pub cq: M::Addr,
    /// The submission queue's tail doorbell.
    pub sq_door: M::Door,
    /// The completion queue's head doorbell.
    pub cq_door: M::Door,
    /// Entries of the submission queue; one less is usable.
    pub sq_entries: u32,
    /// Entries of the completion queue; one less is usable.
    pub cq_entries: u32,
}

impl<M: Memory> Rings<M> {
    /// How many commands may be in flight: both queues keep one entry free.
    #[inline(always)]
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.sq_entries.min(self.cq_entries).saturating_sub(1)
    }
}

impl<M: Memory> Clone for Rings<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for Rings<M> {}

/// The positions of a pair, which must be kept when its owner pauses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingState {
    /// The next submission slot to be written.
    pub tail: u32,
    /// The first submission slot that the controller has not reported as fetched.
    pub sq_head: u32,
    /// The next completion to be read.
    pub head: u32,
    /// The phase that a new completion carries.
    pub phase: bool,
}

impl RingState {
    /// A pair that was just created on zeroed memory.
    pub const NEW: Self = Self { tail: 0, sq_head: 0, head: 0, phase: true };
}

/// The owner's side of a queue pair.
pub struct Ring<M: Memory> {
    rings: Rings<M>,
    state: RingState,
    unacknowledged: u32,
}

impl<M: Memory> Ring<M> {
    /// The owner's side of `rings`, with the positions of `state`.
    #[inline(always)]
    pub fn new(rings: Rings<M>, state: RingState) -> Self {
        Self { rings, state, unacknowledged: 0 }
    }

    /// Where the rings lie.
    #[inline(always)]
    pub fn rings(&self) -> &Rings<M> {
        &self.rings
    }

    /// The positions of the pair. Completions that were taken but not released are not distinguished: release first.
    #[inline(always)]
    pub fn state(&self) -> RingState {
        self.state
    }

    /// Completions taken that are not yet released to the controller.
    #[inline(always)]
    pub fn unacknowledged(&self) -> u32 {
        self.unacknowledged
    }

    /// How many submission slots are free.
    #[inline(always)]
    pub fn room(&self) -> u32 {
        self.rings.sq_entries - 1 - self.distance(self.state.sq_head, self.state.tail)
    }

    /// Writes an entry `ahead` slots after the tail. The controller does not read it before [`Self::publish`].
    #[inline(always)]
    pub fn write(&self, mem: &M, ahead: u32, sqe: &Sqe) {
        let slot = wrap(self.state.tail + ahead, self.rings.sq_entries);
        mem.store_entry(self.rings.sq.plus(slot * Sqe::BYTES as u32), &sqe.dw);
    }

    /// Publishes the next `count` written entries to the controller with one doorbell.
    #[inline(always)]
    pub fn publish(&mut self, mem: &M, count: u32) {
        self.advance(count);
        mem.fence();
        mem.ring(self.rings.sq_door, self.state.tail);
    }

    /// [`Self::publish`] for the lanes of a warp that do not ring themselves.
    #[inline(always)]
    pub fn advance(&mut self, count: u32) {
        self.state.tail = wrap(self.state.tail + count, self.rings.sq_entries);
    }

    /// The last two words of the completion `ahead` entries after the head, and whether it is there. Without a branch,
    /// so that many can be looked at side by side; orders nothing.
    #[inline(always)]
    pub fn look(&self, mem: &M, ahead: u32) -> ([u32; 2], bool) {
        let (slot, phase) = self.position(ahead);
        let words = mem.load_pair(self.rings.cq.plus(slot * Cqe::BYTES as u32 + 8));
        (words, words[1] >> 16 & 1 == phase as u32)
    }

    /// The completion at the head, if it is there.
    #[inline(always)]
    pub fn peek(&self, mem: &M) -> Option<Cqe> {
        let at = self.rings.cq.plus(self.state.head * Cqe::BYTES as u32);
        mem.load_completion(at, self.state.phase).map(|dw| Cqe { dw })
    }

    /// Consumes `count` completions, the last of which reported `sqhd`. The doorbell is rung when a quarter of the queue has
    /// gathered, or by [`Self::release`].
    #[inline(always)]
    pub fn consume(&mut self, mem: &M, count: u32, sqhd: u16) {
        self.pass(count);
        self.update_sq_head(sqhd);
        if self.unacknowledged * 4 + 3 >= self.rings.cq_entries {
            self.release(mem);
        }
    }

    /// Consumes completions without a doorbell or SQHD.
    #[inline(always)]
    pub fn pass(&mut self, count: u32) {
        self.state.head += count;
        if self.state.head >= self.rings.cq_entries {
            self.state.head -= self.rings.cq_entries;
            self.state.phase = !self.state.phase;
        }
        self.unacknowledged += count;
    }

    /// Records how far the controller has fetched. An impossible value, behind the last one or beyond the tail, is
    /// ignored.
    #[inline(always)]
    pub fn update_sq_head(&mut self, sqhd: u16) {
        let head = sqhd as u32;
        if head < self.rings.sq_entries
            && self.distance(self.state.sq_head, head) <= self.distance(self.state.sq_head, self.state.tail)
        {
            self.state.sq_head = head;
        }
    }

    /// Rings the doorbell for completions that were taken, if there are any that it does not cover.
    #[inline(always)]
    pub fn release(&mut self, mem: &M) {
        if self.unacknowledged > 0 {
            self.unacknowledged = 0;
            mem.ring(self.rings.cq_door, self.state.head);
        }
    }

    /// Records that another lane of the warp has rung the doorbell.
    #[inline(always)]
    pub fn released(&mut self) {
        self.unacknowledged = 0;
    }

    #[inline(always)]
    fn position(&self, ahead: u32) -> (u32, bool) {
        let at = self.state.head + ahead;
        if at >= self.rings.cq_entries {
            (at - self.rings.cq_entries, !self.state.phase)
        } else {
            (at, self.state.phase)
        }
    }

    #[inline(always)]
    fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from { to - from } else { to + self.rings.sq_entries - from }
    }
}

/// `at` in a ring, where `at` is less than one lap too far.
#[inline(always)]
fn wrap(at: u32, entries: u32) -> u32 {
    if at >= entries { at - entries } else { at }
}
