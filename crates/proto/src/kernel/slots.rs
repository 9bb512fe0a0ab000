//! Where an owner's tables lie: those that outlive a launch in the queue's control memory, the others in local memory.

use super::{MAX_WINDOW, Warp};
use crate::queue::{Address, CidSpace, Memory, RingState, Rings};

/// Control memory: the positions in the rings, then the last identifier of each slot.
mod word {
    pub const TAIL: u32 = 0;
    pub const SQ_HEAD: u32 = 4;
    pub const HEAD: u32 = 8;
    pub const PHASE: u32 = 12;
    pub const CIDS: u32 = 16;
}

/// The items that are fetched ahead of their turn, and thus the most that one turn can start.
pub(super) const STAGED: u32 = 128;

/// Single words of local memory.
pub(super) mod local {
    /// The deadline, in two words, as all moments here.
    pub const DEADLINE: u32 = 0;
    /// When the poison word was last checked.
    pub const LOOKED: u32 = 2;
    /// When it was first noticed that nothing moves.
    pub const SINCE: u32 = 4;
    /// The words of an exit for a launch that must end.
    pub const EXIT: u32 = 6;
    /// The CID of a completion that belongs to no command, or [`super::NONE_UNEXPECTED`].
    pub const UNEXPECTED: u32 = 8;
    /// How many slots are idle after a turn in which not every command succeeded.
    pub const IDLE: u32 = 9;
    /// How many commands were due for their retry.
    pub const PLACED: u32 = 10;
    /// The items fetched ahead, eight words each, on a multiple of four words.
    pub const STAGE: u32 = 12;
    /// The slots' tables.
    pub const TABLES: u32 = STAGE + super::STAGED * 8;
}

/// A value of [`local::UNEXPECTED`] that no CID can be.
pub(super) const NONE_UNEXPECTED: u32 = u32::MAX;

/// A place of the idle list without a slot.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// Words from one table to the next: a constant, so that no lane keeps a sum for each table.
const STRIDE: u32 = MAX_WINDOW + 1;
const TABLES: u32 = 6;

/// Bytes of control memory for a window; 16-byte aligned, and zeroed when it is allocated, never again.
#[must_use]
pub const fn scratch_bytes(window: u32) -> u32 {
    word::CIDS + capped(window) * 4
}

/// Words of local memory that a warp needs for any window.
pub const LOCAL_WORDS: u32 = local::TABLES + TABLES * STRIDE;

const _: () = assert!(LOCAL_WORDS * 4 <= 48 << 10, "a block has 48 KiB of shared memory");

const fn capped(window: u32) -> u32 {
    if window > MAX_WINDOW { MAX_WINDOW } else { window }
}

/// Prepares the control memory of a pair that was just created. The identifiers of used slots stay, so that a completion
/// of an earlier epoch of the queue is recognised, too.
pub fn scratch_init<M: Memory>(mem: &M, scratch: M::Addr) {
    save(mem, scratch, RingState::NEW);
    mem.fence();
}

pub(super) fn save<M: Memory>(mem: &M, scratch: M::Addr, state: RingState) {
    mem.store(scratch.plus(word::TAIL), state.tail);
    mem.store(scratch.plus(word::SQ_HEAD), state.sq_head);
    mem.store(scratch.plus(word::HEAD), state.head);
    mem.store(scratch.plus(word::PHASE), state.phase as u32);
}

/// What [`save`] left. None if a place lies beyond its ring: the host can write control memory as well, and a place
/// becomes an address.
#[inline(always)]
pub(super) fn restore<M: Memory>(mem: &M, scratch: M::Addr, rings: &Rings<M>) -> Option<RingState> {
    let state = RingState {
        tail: mem.load(scratch.plus(word::TAIL)),
        sq_head: mem.load(scratch.plus(word::SQ_HEAD)),
        head: mem.load(scratch.plus(word::HEAD)),
        phase: mem.load(scratch.plus(word::PHASE)) != 0,
    };
    let within =
        state.tail < rings.sq_entries && state.sq_head < rings.sq_entries && state.head < rings.cq_entries;
    within.then_some(state)
}

/// [`restore`] for a warp. One lane reads the words, so that all lanes see the same ones.
#[inline(always)]
pub(super) fn restore_all<W: Warp>(warp: &W, scratch: W::Addr, rings: &Rings<W>) -> Option<RingState> {
    // Nothing is staged yet.
    const AT: u32 = local::STAGE;
    warp.once(|| {
        let (within, state) = match restore(warp, scratch, rings) {
            Some(state) => (2, state),
            None => (0, RingState::NEW),
        };
        warp.set_local(AT, state.tail);
        warp.set_local(AT + 1, state.sq_head);
        warp.set_local(AT + 2, state.head);
        warp.set_local(AT + 3, within | state.phase as u32);
    });
    let [tail, sq_head, head, flags] = warp.local_four(AT);
    (flags & 2 != 0).then_some(RingState { tail, sq_head, head, phase: flags & 1 != 0 })
}

/// The identifier of the one slot of a window of one.
#[inline(always)]
pub(super) fn single_cid<M: Memory>(mem: &M, scratch: M::Addr, space: &CidSpace) -> u16 {
    space.resume(0, mem.load(scratch.plus(word::CIDS))) as u16
}

#[inline(always)]
pub(super) fn store_single_cid<M: Memory>(mem: &M, scratch: M::Addr, cid: u16) {
    mem.store(scratch.plus(word::CIDS), CidSpace::left(cid));
}

/// A moment that lies in two words of local memory from `index` on.
#[inline(always)]
pub(super) fn moment<W: Warp>(warp: &W, index: u32) -> u64 {
    u64::from(warp.local(index)) | u64::from(warp.local(index + 1)) << 32
}

#[inline(always)]
pub(super) fn set_moment<W: Warp>(warp: &W, index: u32, moment: u64) {
    warp.set_local(index, moment as u32);
    warp.set_local(index + 1, (moment >> 32) as u32);
}

/// What a slot of the window is doing; with its identifier one word, so that one exchange both checks and claims it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum SlotState {
    Free = 0,
    Busy = 1,
    Waiting = 2,
}

impl SlotState {
    #[inline(always)]
    pub(super) const fn with(self, cid: u16) -> u32 {
        (self as u32) << 16 | cid as u32
    }

    #[inline(always)]
    pub(super) const fn is(self, word: u32) -> bool {
        word >> 16 == self as u32
    }
}

/// The window's slots, in local memory; one table for each property.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub(super) space: CidSpace,
    pub(super) window: u32,
}

impl Slots {
    #[inline(always)]
    pub(super) fn new(window: u32) -> Self {
        Self { space: CidSpace::new(window), window }
    }

    /// State and identifier.
    #[inline(always)]
    pub(super) fn state(&self, id: u32) -> u32 {
        local::TABLES + id
    }

    /// The item in a slot.
    #[inline(always)]
    pub(super) fn item(&self, id: u32) -> u32 {
        local::TABLES + STRIDE + id
    }

    /// How often it was retried.
    #[inline(always)]
    pub(super) fn retries(&self, id: u32) -> u32 {
        local::TABLES + STRIDE * 2 + id
    }

    /// The slots that are free, as a stack.
    #[inline(always)]
    pub(super) fn idle(&self, place: u32) -> u32 {
        local::TABLES + STRIDE * 3 + place
    }

    /// When it is due for its retry, in two words.
    #[inline(always)]
    pub(super) fn due(&self, id: u32) -> [u32; 2] {
        let low = local::TABLES + STRIDE * 4 + id;
        [low, low + STRIDE]
    }

    /// Fills the tables for nothing in flight.
    pub(super) fn load<W: Warp>(&self, warp: &W, scratch: W::Addr) {
        warp.each(|lane| {
            let mut id = lane;
            while id < self.window {
                let left = self.space.resume(id as u16, warp.load(scratch.plus(word::CIDS + id * 4)));
                warp.set_local(self.state(id), SlotState::Free.with(left as u16));
                warp.set_local(self.idle(id), id);
                id += warp.lanes();
            }
        });
    }

    /// Stores the identifiers for the next launch.
    pub(super) fn save<W: Warp>(&self, warp: &W, scratch: W::Addr) {
        warp.each(|lane| {
            let mut id = lane;
            while id < self.window {
                let cid = warp.local(self.state(id)) as u16;
                warp.store(scratch.plus(word::CIDS + id * 4), CidSpace::left(cid));
                id += warp.lanes();
            }
        });
    }
}
