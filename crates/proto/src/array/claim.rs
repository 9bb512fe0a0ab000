//! What a miss does under its set's lock: find the page after all, or make room for it.

use super::layout::{NO_PAGE, WAYS, life_note, set, state};
use super::{Backing, PageCache};
use crate::GpuAddr;
use crate::queue::Memory;

/// Set in the lock word while the set is locked; the bits above it are the clock hand.
const LOCKED: u32 = 1;

/// The result of a search in a set.
pub(super) enum Claim {
    /// This slot is the caller's, to read the page into.
    Read(u32),
    /// The dirty page in this slot must be written back first. It is pinned and marked.
    WriteBack(u32),
    /// The page is in this slot already, or is being read into it.
    There(u32),
    /// Another thread has the lock.
    Locked,
    /// Every page is pinned or in use.
    Full,
}

impl<M: Memory<Addr = GpuAddr>, B: Backing<M>> PageCache<M, B> {
    /// Makes room for a page that was not found.
    #[inline(always)]
    pub(super) fn claim(&self, mem: &M, backing: &B, page: u64) -> Claim {
        let first = self.set_of(mem, page) * WAYS;
        let lock = self.set(mem, first).plus(u64::from(set::LOCK));
        let hand = mem.load(lock);
        if hand & LOCKED != 0 || mem.compare_exchange_acquire(lock, hand, hand | LOCKED) != hand {
            return Claim::Locked;
        }
        let (claim, next) = self.claim_alone(mem, backing, page, (first, hand >> 1));
        mem.store_release(lock, next << 1);
        claim
    }

    /// [`Self::claim`] for the holder of the lock, which returns the hand's next place, too.
    #[inline(always)]
    fn claim_alone(&self, mem: &M, backing: &B, page: u64, (first, hand): (u32, u32)) -> (Claim, u32) {
        let mut empty = None;
        let mut way = 0;
        while way < WAYS {
            let slot = first + way;
            let kind = mem.load_acquire(self.state(mem, slot)) & state::KIND;
            let mine = self.tag(mem, slot) == page;
            if mine && (kind == state::LOADING || kind == state::VALID) {
                return (Claim::There(slot), hand);
            }
            if mine && kind == state::FAILED {
                // No other: two ways never have one tag.
                empty = Some((slot, kind));
                break;
            }
            let usable = match kind {
                state::FREE | state::FAILED => true,
                state::LOST => empty.is_none() && self.is_over(mem, backing, slot),
                _ => false,
            };
            if usable && empty.is_none() {
                empty = Some((slot, kind));
            }
            way += 1;
        }
        if let Some((slot, kind)) = empty {
            // Only the holder of the lock claims, so the kind is still the same; pins may come and go.
            mem.fetch_add(self.state(mem, slot), state::LOADING.wrapping_sub(kind));
            self.set_tag(mem, slot, page);
            return (Claim::Read(slot), hand);
        }
        let (slot, next) = self.evict(mem, first, hand);
        if let Some(slot) = slot {
            self.set_tag(mem, slot, page);
            return (Claim::Read(slot), next);
        }
        // Last those that could not be written before: one that never can must not keep the others from making room.
        let mut turn = 0;
        while turn < 2 * WAYS {
            let slot = first + turn % WAYS;
            let is_broken = mem.load(self.state(mem, slot)) & state::BROKEN != 0;
            if is_broken == (turn >= WAYS) && self.begin_write_back(mem, backing, slot, false) {
                return (Claim::WriteBack(slot), next);
            }
            turn += 1;
        }
        (Claim::Full, next)
    }

    /// Claims a clean page without pins: one that was not used since the hand passed, or else any. Returns the hand's next
    /// place, too.
    #[inline(always)]
    fn evict(&self, mem: &M, first: u32, hand: u32) -> (Option<u32>, u32) {
        let mut step = 0;
        while step < 2 * WAYS {
            let way = (hand + step) % WAYS;
            let at = self.state(mem, first + way);
            let seen = mem.load(at);
            if seen & (state::KIND | state::DIRTY | state::PINS) == state::VALID {
                if seen & state::REFERENCED != 0 && step < WAYS {
                    mem.fetch_and_relaxed(at, !state::REFERENCED);
                } else if mem.compare_exchange_acquire(at, seen, state::LOADING) == seen {
                    return (Some(first + way), (way + 1) % WAYS);
                }
            }
            step += 1;
        }
        (None, hand)
    }

    /// Pins a dirty page and marks it as being written back, if it needs that. If it is `wanted`, other pins do not
    /// matter.
    #[inline(always)]
    pub(super) fn begin_write_back(&self, mem: &M, backing: &B, slot: u32, wanted: bool) -> bool {
        let at = self.state(mem, slot);
        let seen = mem.load_acquire(at);
        let idle = seen & (state::KIND | state::DIRTY | state::WRITING) == (state::VALID | state::DIRTY);
        if !idle || seen & state::MOST_PINS != 0 || !wanted && seen & state::PINS != 0 {
            return false;
        }
        let gone = state::DIRTY | state::BROKEN | state::UNSURE;
        if mem.compare_exchange_acquire(at, seen, (seen & !gone | state::WRITING) + 1) != seen {
            return false;
        }
        // Only now can the note be trusted: before, another write-back could end with an unknown outcome and leave the
        // word as it was.
        if seen & state::UNSURE != 0 && !self.is_over(mem, backing, slot) {
            mem.fetch_or(at, seen & gone);
            self.end_writing(mem, slot);
            return false;
        }
        true
    }

    /// Clears the mark of a page that is being written back, and releases its pin. Flags are set before: a page that is
    /// neither dirty nor marked counts as written.
    #[inline(always)]
    pub(super) fn end_writing(&self, mem: &M, slot: u32) {
        mem.fetch_add_release(self.state(mem, slot), (state::WRITING + 1).wrapping_neg());
    }

    /// Whether the backing has released a command of unknown outcome, which a slot's note names.
    #[inline(always)]
    pub(super) fn is_over(&self, mem: &M, backing: &B, slot: u32) -> bool {
        mem.load_acquire(self.word(mem, slot, set::NOTE)) != life_note(backing.life(mem))
    }

    /// Forgets the page in a slot that the backing may still write to.
    #[inline(always)]
    pub(super) fn lose(&self, mem: &M, slot: u32, life: u32) {
        self.set_tag(mem, slot, NO_PAGE);
        // A thread that sees the note no longer sees the page's tag. If it waited for the page, it would take the note for the
        // error of an earlier read.
        mem.store_release(self.word(mem, slot, set::NOTE), life_note(life));
        mem.fetch_add_release(self.state(mem, slot), state::LOST.wrapping_sub(state::LOADING));
    }
}
