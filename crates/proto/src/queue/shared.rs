//! Shared mode: any thread submits, any waiter drains for all.
//!
//! All state is words in memory. A submitter takes a CID, then a ticket for a submission slot when SQHD has left room,
//! writes its entry and stamps the slot with the ticket. The holder of the tail lock gathers all stamped slots and rings
//! once. A waiter that finds its command unfinished tries the completion lock; its holder distributes every available
//! completion. No lock is held while waiting for the controller.

use super::counters::{is_after, without_lowest};
use super::{Address, Bounds, CidSpace, MAX_SLOTS, Memory, Rings, Stop};
use crate::{Cqe, Sqe, Status};

/// Where each word of a shared queue's control block lies. Contended words are on different lines.
pub(crate) mod word {
    pub const TICKET: u32 = 0x00;
    pub const TAIL: u32 = 0x20;
    pub const TAIL_LOCK: u32 = 0x40;
    pub const SQ_HEAD: u32 = 0x60;
    pub const CQ_HEAD: u32 = 0x80;
    pub const CQ_LOCK: u32 = 0xa0;
    pub const UNEXPECTED: u32 = 0xc0;
    pub const HINT: u32 = 0xe0;
    pub const POISON: u32 = 0x100;
    pub const DOORBELLS: u32 = 0x120;
    pub const FREE: u32 = 0x140;
}

const SLOT_BYTES: u32 = 8;
pub(crate) const STATE: u32 = 0;
pub(crate) const CID: u32 = 4;

pub(crate) const FREE: u32 = 0;
const BUSY: u32 = 1;
pub(crate) const DONE: u32 = 2;

/// The state of a slot while the controller has its command: a completion of another use does not match it.
#[inline(always)]
pub(crate) const fn busy(cid: u16) -> u32 {
    BUSY | (cid as u32) << 16
}

/// The state of a slot whose command this last dword of a completion has ended.
#[inline(always)]
pub(crate) const fn done(dw3: u32) -> u32 {
    dw3 & !0x1_ffff | DONE
}

/// How many completions a drain takes before it rings.
const BATCH: usize = 8;

/// How often a thread that stops checks whether another is done with distributing completions.
const LAST_LOOKS: u32 = 1000;

/// Whether a slot that was in this state had the command of this completion.
#[inline(always)]
pub(crate) const fn was_busy(dw3: u32, state: u32) -> bool {
    state == busy(dw3 as u16)
}

/// The sizes of a shared queue: both rings are powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedLayout {
    sq_shift: u8,
    cq_shift: u8,
}

impl SharedLayout {
    /// The layout for rings of these sizes, if both are powers of two from 2 to 32 768.
    #[must_use]
    pub const fn new(sq_entries: u32, cq_entries: u32) -> Option<Self> {
        if !sq_entries.is_power_of_two() || !cq_entries.is_power_of_two() {
            return None;
        }
        let (sq_shift, cq_shift) = (sq_entries.trailing_zeros() as u8, cq_entries.trailing_zeros() as u8);
        if sq_shift == 0 || cq_shift == 0 || sq_shift > 15 || cq_shift > 15 {
            return None;
        }
        Some(Self { sq_shift, cq_shift })
    }

    /// How many commands may be in flight.
    #[inline(always)]
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        let usable = (1 << if self.sq_shift < self.cq_shift { self.sq_shift } else { self.cq_shift }) - 1;
        if usable > MAX_SLOTS { MAX_SLOTS } else { usable }
    }

    /// Bytes of the control block.
    #[must_use]
    pub const fn bytes(&self) -> u32 {
        self.slots() + self.capacity() * SLOT_BYTES
    }

    /// Where the poison word lies within the control block.
    #[must_use]
    pub const fn poison(&self) -> u32 {
        word::POISON
    }

    /// Where the count of completions that belonged to no command lies within the control block.
    #[must_use]
    pub const fn unexpected_completions(&self) -> u32 {
        word::UNEXPECTED
    }

    /// Where the count of submission doorbells lies within the control block.
    #[must_use]
    pub const fn doorbells(&self) -> u32 {
        word::DOORBELLS
    }

    pub(crate) const fn free_words(&self) -> u32 {
        self.capacity().div_ceil(32)
    }

    /// The bits of a free word that stand for slots: the host may write others, and a bit becomes an address.
    #[inline(always)]
    pub(crate) const fn valid(&self, word: u32) -> u32 {
        let left = self.capacity().saturating_sub(word * 32);
        if left >= 32 { u32::MAX } else { (1 << left) - 1 }
    }

    const fn stamps(&self) -> u32 {
        word::FREE + self.free_words() * 4
    }

    const fn slots(&self) -> u32 {
        (self.stamps() + (4 << self.sq_shift)).next_multiple_of(SLOT_BYTES)
    }
}

/// A command in flight on a shared queue. Its holder must wait for it, or its slot stays busy for ever.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a command whose token is dropped keeps its slot until the queue is reset"]
pub struct Token {
    slot: u16,
    cid: u16,
}

impl Token {
    /// The command's identifier.
    #[inline(always)]
    #[must_use]
    pub fn cid(&self) -> u16 {
        self.cid
    }
}

/// The result of polling for completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drained {
    /// There were some, and they are distributed.
    Some,
    /// There were none.
    None,
    /// Another thread was doing it, or may be.
    Elsewhere,
}

impl Drained {
    #[inline(always)]
    const fn from_word(word: u64) -> Self {
        match word {
            0 => Self::Some,
            1 => Self::None,
            _ => Self::Elsewhere,
        }
    }
}

/// Why a command was not submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubmitError {
    /// It was not submitted and never will be.
    Stopped(Stop),
    /// It is in the queue and may still be submitted: the queue must be reset before its memory is used again.
    OutcomeUnknown(Stop),
}

/// A queue pair for any number of threads, and for warps that act as one.
pub struct Shared<M: Memory> {
    pub(crate) rings: Rings<M>,
    control: M::Addr,
    layout: SharedLayout,
    pub(crate) space: CidSpace,
}

impl<M: Memory> Clone for Shared<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for Shared<M> {}

impl<M: Memory> Shared<M> {
    /// The queue whose control block lies at `control`; none if the rings are not powers of two.
    #[inline(always)]
    pub fn new(rings: Rings<M>, control: M::Addr) -> Option<Self> {
        let layout = SharedLayout::new(rings.sq_entries, rings.cq_entries)?;
        Some(Self { rings, control, layout, space: CidSpace::new(layout.capacity()) })
    }

    /// Writes the control block of a pair that was just created, on memory that was zeroed once, before any thread submits.
    /// Identifiers go on where they were when the queue was deleted.
    pub fn initialise(&self, mem: &M) {
        for at in (0..self.layout.slots()).step_by(4) {
            mem.store(self.at(at), 0);
        }
        for i in 0..self.layout.free_words() {
            mem.store(self.at(word::FREE + i * 4), self.layout.valid(i));
        }
        for id in 0..self.layout.capacity() {
            let (id, slot) = (id as u16, self.slot(id as u16));
            mem.store(slot.plus(STATE), FREE);
            mem.store(slot.plus(CID), self.space.resume(id, mem.load(slot.plus(CID))));
        }
        mem.fence();
    }

    /// The token of a command that was submitted and whose end was not reported, by its identifier.
    #[inline(always)]
    pub(crate) fn token(&self, cid: u16) -> Option<Token> {
        let slot = self.space.slot(cid)?;
        Some(Token { slot, cid })
    }

    /// The sizes.
    pub(crate) fn layout(&self) -> SharedLayout {
        self.layout
    }

    /// The bounds that stop at `deadline` or by this queue's poison word.
    #[inline(always)]
    pub fn bounds(&self, deadline: u64) -> Bounds<M> {
        Bounds { deadline, poison: self.at(word::POISON) }
    }

    /// Submits a command; waits for a free slot within `bounds`.
    ///
    /// # Errors
    /// Whether the command can still happen, and why the wait ended.
    #[inline]
    pub fn submit(&self, mem: &M, sqe: &Sqe, bounds: &Bounds<M>) -> Result<Token, SubmitError> {
        self.submit_within(mem, sqe, bounds, bounds)
    }

    /// [`Self::submit`] that waits for a free slot within `room`, and for all else within `bounds`.
    #[inline(always)]
    pub(crate) fn submit_within(
        &self,
        mem: &M,
        sqe: &Sqe,
        room: &Bounds<M>,
        bounds: &Bounds<M>,
    ) -> Result<Token, SubmitError> {
        let token = self.take_cid(mem, room).map_err(SubmitError::Stopped)?;
        let ticket = match self.take_ticket(mem, room) {
            Ok(ticket) => ticket,
            Err(stop) => {
                self.free(mem, &token);
                return Err(SubmitError::Stopped(stop));
            }
        };
        let place = self.sq_slot(ticket);
        mem.store_entry(self.rings.sq.plus(place * Sqe::BYTES as u32), &sqe.with_cid(token.cid).dw);
        mem.store_release(self.stamp(place), ticket.wrapping_add(1));
        match self.publish(mem, ticket, bounds) {
            Ok(()) => Ok(token),
            Err(stop) => Err(SubmitError::OutcomeUnknown(stop)),
        }
    }

    /// How the command ended, if it has. Its slot is then free and the token spent.
    #[inline]
    pub fn test(&self, mem: &M, token: &Token) -> Option<Status> {
        let slot = self.slot(token.slot);
        let state = mem.load_acquire(slot);
        if state & 3 != DONE {
            return None;
        }
        self.free(mem, token);
        Some(Status((state >> 17) as u16))
    }

    /// Waits for the command within `bounds`, draining for all threads meanwhile.
    ///
    /// # Errors
    /// Why the wait ended. The command is then still in flight and its memory still the controller's.
    #[inline]
    pub fn wait(&self, mem: &M, token: &Token, bounds: &Bounds<M>) -> Result<Status, Stop> {
        let mut over = None;
        let mut looks = 0;
        loop {
            if let Some(status) = self.test(mem, token) {
                return Ok(status);
            }
            let drained = self.hand_out(mem, over.is_some());
            // A completed command is never abandoned: a thread that stops has polled once more and, if another is
            // distributing completions, has waited for that.
            if let Some(stop) = over {
                looks += 1;
                if drained != Drained::Elsewhere || looks > LAST_LOOKS {
                    return self.test(mem, token).ok_or(stop);
                }
            }
            // Completions of others do not stop the clock.
            over = over.or(bounds.check(mem).err());
            if drained != Drained::Some {
                mem.pause();
            }
        }
    }

    /// Distributes the available completions, unless another thread is doing it.
    #[inline]
    pub fn drain(&self, mem: &M) -> Drained {
        self.hand_out(mem, true)
    }

    /// [`Self::drain`]. Callers that need not be `sure` poll without the lock first: one that finds nothing leaves the lock to
    /// others, and cannot report that there is nothing.
    #[inline(always)]
    pub(crate) fn hand_out(&self, mem: &M, sure: bool) -> Drained {
        let look = |_| {
            if sure || self.is_there(mem) { self.drain_alone(mem) as u64 } else { Drained::Elsewhere as u64 }
        };
        Drained::from_word(mem.combine(self.at(word::CQ_LOCK), look).0)
    }

    /// Whether there seems to be a completion.
    #[inline(always)]
    fn is_there(&self, mem: &M) -> bool {
        let (at, phase) = self.cq_slot(mem.load(self.at(word::CQ_HEAD)));
        mem.load(at.plus(12)) >> 16 & 1 == phase
    }

    fn drain_alone(&self, mem: &M) -> Drained {
        let lock = self.at(word::CQ_LOCK);
        if mem.load(lock) != 0 || mem.compare_exchange(lock, 0, 1) != 0 {
            return Drained::Elsewhere;
        }
        let mut drained = Drained::None;
        // All that are there now, but not those that arrive meanwhile.
        for _ in 0..(1 << self.layout.cq_shift >> BATCH.trailing_zeros()).max(1) {
            let taken = self.drain_batch(mem);
            if taken > 0 {
                drained = Drained::Some;
            }
            if taken < BATCH {
                break;
            }
        }
        mem.store_release(lock, 0);
        drained
    }

    /// Distributes one batch and returns its size.
    fn drain_batch(&self, mem: &M) -> usize {
        let head = mem.load(self.at(word::CQ_HEAD));
        let mut taken = [0u32; BATCH];
        let mut count = 0;
        let mut sqhd = 0;
        let limit = (BATCH as u32).min((1 << self.layout.cq_shift) - 1) as usize;
        while count < limit {
            let (at, phase) = self.cq_slot(head.wrapping_add(count as u32));
            let [dw2, dw3] = mem.load_pair(at.plus(8));
            if dw3 >> 16 & 1 != phase {
                break;
            }
            taken[count] = dw3;
            sqhd = dw2 as u16;
            count += 1;
        }
        if count == 0 {
            return 0;
        }
        // This also publishes what the controller did before these.
        mem.fence();
        let next = head.wrapping_add(count as u32);
        mem.store(self.at(word::CQ_HEAD), next);
        if let Some(head) = self.update_sq_head(mem, sqhd) {
            // Behind the fence above: the controller has fetched the entries before it.
            mem.store(self.at(word::SQ_HEAD), head);
        }
        // Rung before the slots are freed: commands in flight never exceed what the controller can complete.
        mem.ring(self.rings.cq_door, next & ((1 << self.layout.cq_shift) - 1));
        for dw3 in taken.iter().take(count) {
            self.settle(mem, *dw3);
        }
        count
    }

    /// Where the completion of this number lies, and the phase that it carries.
    #[inline(always)]
    pub(crate) fn cq_slot(&self, count: u32) -> (M::Addr, u32) {
        let place = count & ((1 << self.layout.cq_shift) - 1);
        (self.rings.cq.plus(place * Cqe::BYTES as u32), !(count >> self.layout.cq_shift) & 1)
    }

    /// Where the submission head moves, as the controller reports; none for impossible values.
    #[inline(always)]
    pub(crate) fn update_sq_head(&self, mem: &M, sqhd: u16) -> Option<u32> {
        let mask = (1u32 << self.layout.sq_shift) - 1;
        if u32::from(sqhd) > mask {
            return None;
        }
        let head = mem.load(self.at(word::SQ_HEAD));
        let tail = mem.load(self.at(word::TAIL));
        let step = u32::from(sqhd).wrapping_sub(head) & mask;
        if step <= tail.wrapping_sub(head) { Some(head.wrapping_add(step)) } else { None }
    }

    /// Stores a completion in its command's slot. Only for the holder of the completion lock.
    #[inline(always)]
    pub(crate) fn settle(&self, mem: &M, dw3: u32) {
        if !was_busy(dw3, self.try_settle(mem, dw3)) {
            mem.fetch_add(self.at(word::UNEXPECTED), 1);
        }
    }

    /// Ends the command of a completion, and returns the argument for [`was_busy`]. In one step: of two lanes that hold
    /// completions of one command, the second finds it ended, or finds the next use of the slot. Behind the fence that
    /// follows the completion.
    #[inline(always)]
    pub(crate) fn try_settle(&self, mem: &M, dw3: u32) -> u32 {
        match self.space.slot(dw3 as u16) {
            Some(id) => mem.compare_exchange_relaxed(self.slot(id), busy(dw3 as u16), done(dw3)),
            None => FREE,
        }
    }

    fn take_cid(&self, mem: &M, bounds: &Bounds<M>) -> Result<Token, Stop> {
        let mut over = None;
        loop {
            let (taken, rank) = mem.combine(self.at(word::FREE), |count| self.take_free(mem, count));
            let (index, bits) = ((taken >> 32) as u32, taken as u32);
            let mine = without_lowest(bits, rank);
            if mine != 0 {
                return Ok(self.begin(mem, (index * 32 + mine.trailing_zeros()) as u16));
            }
            if let Some(stop) = over {
                return Err(stop);
            }
            // Where there were some, others of those who came together have them.
            over = if bits == 0 { self.help(mem, bounds) } else { bounds.check(mem) }.err();
        }
    }

    /// Takes up to `count` slots that are free, all of one word: returns its index and, in the lower half, their bits.
    fn take_free(&self, mem: &M, count: u32) -> u64 {
        let words = self.layout.free_words();
        let start = if words == 1 { 0 } else { mem.fetch_add(self.at(word::HINT), 1) % words };
        for i in 0..words {
            let index = if start + i >= words { start + i - words } else { start + i };
            let at = self.at(word::FREE + index * 4);
            let valid = self.layout.valid(index);
            let mut free = mem.load(at) & valid;
            while free != 0 {
                let want = free & !without_lowest(free, count);
                let seen = mem.fetch_and(at, !want);
                if seen & want != 0 {
                    return u64::from(index) << 32 | u64::from(seen & want);
                }
                free = seen & valid;
            }
        }
        0
    }

    fn begin(&self, mem: &M, id: u16) -> Token {
        let slot = self.slot(id);
        let cid = self.space.next(mem.load(slot.plus(CID)) as u16);
        mem.store(slot.plus(CID), CidSpace::left(cid));
        mem.store_release(slot.plus(STATE), busy(cid));
        Token { slot: id, cid }
    }

    fn free(&self, mem: &M, token: &Token) {
        mem.store(self.slot(token.slot).plus(STATE), FREE);
        mem.fetch_or(self.at(word::FREE + u32::from(token.slot) / 32 * 4), 1 << (token.slot % 32));
    }

    fn take_ticket(&self, mem: &M, bounds: &Bounds<M>) -> Result<u32, Stop> {
        let mut over = None;
        loop {
            let (taken, rank) = mem.combine(self.at(word::TICKET), |count| self.take_tickets(mem, count));
            let (count, first) = ((taken >> 32) as u32, taken as u32);
            if rank < count {
                return Ok(first.wrapping_add(rank));
            }
            if let Some(stop) = over {
                return Err(stop);
            }
            over = if count == 0 { self.help(mem, bounds) } else { bounds.check(mem) }.err();
        }
    }

    /// Takes up to `count` tickets, as far as there is room: returns how many and, in the lower half, the first.
    fn take_tickets(&self, mem: &M, count: u32) -> u64 {
        let usable = (1 << self.layout.sq_shift) - 1;
        let next = self.at(word::TICKET);
        let mut ticket = mem.load(next);
        loop {
            let used = ticket.wrapping_sub(mem.load_acquire(self.at(word::SQ_HEAD)));
            if used >= usable {
                return 0;
            }
            let taken = count.min(usable - used);
            match mem.compare_exchange(next, ticket, ticket.wrapping_add(taken)) {
                seen if seen == ticket => return u64::from(taken) << 32 | u64::from(ticket),
                seen => ticket = seen,
            }
        }
    }

    /// Waits until the doorbell covers `ticket`, ringing it for all unless another thread does.
    fn publish(&self, mem: &M, ticket: u32, bounds: &Bounds<M>) -> Result<(), Stop> {
        let tail = self.at(word::TAIL);
        while !is_after(mem.load_acquire(tail), ticket) {
            let (rung, _) = mem.combine(self.at(word::TAIL_LOCK), |_| self.try_ring(mem));
            if rung != 0 && is_after(rung as u32, ticket) {
                break;
            }
            // Another thread rings, or a ticket before this one is not stamped yet.
            bounds.check(mem)?;
            mem.pause();
        }
        Ok(())
    }

    /// Rings for all unless another thread is doing it: then 0, else 1 and, in the lower half, the tail.
    fn try_ring(&self, mem: &M) -> u64 {
        let lock = self.at(word::TAIL_LOCK);
        if mem.load(lock) != 0 || mem.compare_exchange(lock, 0, 1) != 0 {
            return 0;
        }
        let rung = self.ring_for_all(mem);
        mem.store_release(lock, 0);
        1 << 32 | u64::from(rung)
    }

    /// Rings once for every complete entry after the tail, and returns the new tail. Only for the holder of the tail
    /// lock.
    fn ring_for_all(&self, mem: &M) -> u32 {
        let old = mem.load(self.at(word::TAIL));
        let mut tail = old;
        while mem.load_acquire(self.stamp(self.sq_slot(tail))) == tail.wrapping_add(1) {
            tail = tail.wrapping_add(1);
        }
        if tail != old {
            // The tail is stored before the doorbell: a taker of their completions must find that it covers SQHD.
            mem.store(self.at(word::TAIL), tail);
            mem.fence();
            mem.ring(self.rings.sq_door, self.sq_slot(tail));
            mem.store(self.at(word::DOORBELLS), mem.load(self.at(word::DOORBELLS)).wrapping_add(1));
        }
        tail
    }

    /// Drains for all threads. A thread that must stop polls once more for its own command.
    fn help(&self, mem: &M, bounds: &Bounds<M>) -> Result<(), Stop> {
        let drained = self.hand_out(mem, false);
        bounds.check(mem)?;
        if drained != Drained::Some {
            mem.pause();
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn sq_slot(&self, ticket: u32) -> u32 {
        ticket & ((1 << self.layout.sq_shift) - 1)
    }

    #[inline(always)]
    pub(crate) fn at(&self, offset: u32) -> M::Addr {
        self.control.plus(offset)
    }

    #[inline(always)]
    pub(crate) fn stamp(&self, place: u32) -> M::Addr {
        self.at(self.layout.stamps() + place * 4)
    }

    #[inline(always)]
    pub(crate) fn slot(&self, id: u16) -> M::Addr {
        self.at(self.layout.slots() + u32::from(id) * SLOT_BYTES)
    }
}
