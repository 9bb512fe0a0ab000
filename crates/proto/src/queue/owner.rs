//! Owner mode: one thread owns the pair.

use super::{CidSpace, MAX_SLOTS, Memory, Ring, RingState, Rings};
use crate::{Cqe, Sqe};

/// Why nothing was staged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// A completion, as its owner sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A command has completed; its slot is free again.
    Done {
        /// The slot.
        slot: u16,
        /// What [`Owner::stage`] was given with the command.
        tag: u32,
        /// The completion.
        cqe: Cqe,
    },
    /// A completion that belongs to no command in flight.
    UnexpectedCompletion(Cqe),
}

/// A command slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Slot {
    tag: u32,
    cid: u16,
    next_free: u16,
    busy: bool,
}

const NONE: u16 = u16::MAX;

/// A queue pair and the commands in flight on it. `T` keeps one [`Slot`] for each.
pub struct Owner<M: Memory, T> {
    ring: Ring<M>,
    space: CidSpace,
    slots: T,
    first_free: u16,
    /// Submission slots that are known to be free: as many as there were when it was last zero, less those staged since.
    room: u32,
    staged: u32,
    in_flight: u32,
}

impl<M: Memory, T: AsMut<[Slot]> + AsRef<[Slot]>> Owner<M, T> {
    /// The owner of a pair that was just created. As many commands may be in flight as `slots` holds, and as the
    /// queues hold.
    pub fn new(rings: Rings<M>, mut slots: T) -> Self {
        let count = (slots.as_ref().len().min(MAX_SLOTS as usize) as u32).min(rings.capacity());
        let space = CidSpace::new(count);
        for (i, slot) in slots.as_mut().iter_mut().take(count as usize).enumerate() {
            slot.cid = space.first(i as u16);
        }
        let ring = Ring::new(rings, RingState::NEW);
        let mut owner = Self { ring, space, slots, first_free: NONE, room: 0, staged: 0, in_flight: 0 };
        owner.renew();
        owner
    }

    /// Starts over on a pair that was created again, on zeroed rings: nothing is in flight. Identifiers go on from
    /// where they were, so that a completion from the pair's earlier life is still recognised.
    pub fn renew(&mut self) {
        let count = self.space.slots() as usize;
        for (i, slot) in self.slots.as_mut().iter_mut().take(count).enumerate() {
            slot.next_free = if i + 1 == count { NONE } else { i as u16 + 1 };
            slot.busy = false;
        }
        self.first_free = if count == 0 { NONE } else { 0 };
        self.ring = Ring::new(*self.ring.rings(), RingState::NEW);
        self.room = 0;
        self.staged = 0;
        self.in_flight = 0;
    }

    /// How many commands may be in flight.
    #[inline]
    pub fn capacity(&self) -> u32 {
        self.space.slots()
    }

    /// How many are, staged ones included.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Staged commands that are not yet published.
    #[inline]
    pub fn staged(&self) -> u32 {
        self.staged
    }

    /// The identifier of the command in a slot, while it is in flight.
    pub fn cid(&self, slot: u16) -> Option<u16> {
        self.slots.as_ref().get(slot as usize).filter(|s| s.busy).map(|s| s.cid)
    }

    /// Puts a command into the submission queue and returns its slot. The controller sees it after
    /// [`Self::publish`]; the caller gets `tag` back with the completion.
    ///
    /// # Errors
    /// [`Full`] when no slot is free, or the controller has not fetched enough.
    #[inline(always)]
    pub fn stage(&mut self, mem: &M, sqe: &Sqe, tag: u32) -> Result<u16, Full> {
        if self.room == 0 {
            self.room = self.ring.room() - self.staged;
            if self.room == 0 {
                return Err(Full);
            }
        }
        let id = self.first_free;
        let Some(slot) = self.slots.as_mut().get_mut(id as usize) else { return Err(Full) };
        self.first_free = slot.next_free;
        slot.cid = self.space.next(slot.cid);
        slot.busy = true;
        slot.tag = tag;
        let cid = slot.cid;
        self.ring.write(mem, self.staged, &sqe.with_cid(cid));
        self.room -= 1;
        self.staged += 1;
        self.in_flight += 1;
        Ok(id)
    }

    /// Publishes all staged commands to the controller with one doorbell.
    #[inline]
    pub fn publish(&mut self, mem: &M) {
        if self.staged == 0 {
            return;
        }
        // The controller must be able to complete all commands in flight without waiting for a doorbell.
        if self.in_flight + self.ring.unacknowledged() >= self.ring.rings().cq_entries {
            self.ring.release(mem);
        }
        self.ring.publish(mem, self.staged);
        self.staged = 0;
    }

    /// Takes the next completion, if there is one.
    #[inline(always)]
    pub fn poll(&mut self, mem: &M) -> Option<Event> {
        let Some(cqe) = self.ring.peek(mem) else {
            self.ring.release(mem);
            return None;
        };
        self.ring.consume(mem, 1, cqe.sqhd());
        Some(self.settle(cqe))
    }

    #[inline(always)]
    fn settle(&mut self, cqe: Cqe) -> Event {
        let Some(id) = self.space.slot(cqe.cid()) else { return Event::UnexpectedCompletion(cqe) };
        let Some(slot) = self.slots.as_mut().get_mut(id as usize) else {
            return Event::UnexpectedCompletion(cqe);
        };
        if !slot.busy || slot.cid != cqe.cid() {
            return Event::UnexpectedCompletion(cqe);
        }
        slot.busy = false;
        slot.next_free = self.first_free;
        self.first_free = id;
        self.in_flight -= 1;
        Event::Done { slot: id, tag: slot.tag, cqe }
    }
}
