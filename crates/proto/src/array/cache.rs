//! An array as a thread sees it: where pages are, and the pins that keep them there.

use core::marker::PhantomData;

use super::layout::{HandleAt, SET_BYTES, WAYS, set, state};
use super::{ArrayError, Backing, PageRequest, PageStep, Pin, PinMut};
use crate::GpuAddr;
use crate::kernel::DeviceQueue;
use crate::queue::{Address, Memory};

/// An array.
pub struct PageCache<M: Memory<Addr = GpuAddr>, B: Backing<M>> {
    pub(super) handle: HandleAt,
    _of: PhantomData<fn(&M) -> B>,
}

/// An array on an exported queue.
pub type DriveArray<M> = PageCache<M, DeviceQueue<M>>;

/// The result of a page lookup.
pub(super) enum Found {
    /// It is in this slot, and has one pin more.
    Pinned(u32),
    /// It is assigned to this slot, but is still being read or has been evicted.
    Elsewhere(u32),
    /// It has too many pins.
    Crowded,
    /// No way of its set has it.
    Nowhere,
}

impl<M: Memory<Addr = GpuAddr>, B: Backing<M>> PageCache<M, B> {
    /// The array whose handle lies at `at`.
    ///
    /// # Errors
    /// When there is none.
    #[inline(always)]
    pub fn open(mem: &M, at: GpuAddr) -> Result<Self, ArrayError> {
        let array = Self::open_for_hits(mem, at)?;
        if array.backing(mem).is_some() { Ok(array) } else { Err(ArrayError::NoArray) }
    }

    /// The same for callers that have no registers to spare: whether there is still a backing shows at the first miss.
    ///
    /// # Errors
    /// When there is no array.
    #[inline(always)]
    pub fn open_for_hits(mem: &M, at: GpuAddr) -> Result<Self, ArrayError> {
        let handle = HandleAt::new(mem, at).ok_or(ArrayError::NoArray)?;
        Ok(Self { handle, _of: PhantomData })
    }

    /// Its backing.
    #[inline(always)]
    pub(super) fn backing(&self, mem: &M) -> Option<B> {
        B::open(mem, GpuAddr(self.handle.queue(mem)))
    }

    /// Bytes of the array.
    #[inline(always)]
    pub fn bytes(&self, mem: &M) -> u64 {
        self.handle.blocks(mem) << self.handle.block_shift(mem)
    }

    /// Bytes of a page, as a power of two.
    #[inline(always)]
    pub fn page_shift(&self, mem: &M) -> u32 {
        self.handle.page_shift(mem)
    }

    /// Nanoseconds that a thread waits for others.
    #[inline(always)]
    pub fn limit(&self, mem: &M) -> u64 {
        self.handle.limit(mem)
    }

    /// Slots of the cache.
    #[inline(always)]
    pub fn slots(&self, mem: &M) -> u32 {
        self.handle.slots(mem)
    }

    /// Pins the page that this byte of the array is in. It is read unless the cache has it.
    ///
    /// # Errors
    /// When the array has no such byte, or the page is not available in time.
    #[inline(always)]
    pub fn pin<'a>(&'a self, mem: &'a M, byte: u64) -> Result<Pin<'a, M, B>, ArrayError> {
        let slot = self.pin_slot(mem, byte)?;
        Ok(Pin::new(self, mem, slot, byte))
    }

    /// Pins the page that this byte of the array is in, to write to it.
    ///
    /// # Errors
    /// As for [`Self::pin`], and when the array was opened for reading only.
    #[inline(always)]
    pub fn pin_mut<'a>(&'a self, mem: &'a M, byte: u64) -> Result<PinMut<'a, M, B>, ArrayError> {
        if !self.is_writable(mem) {
            return Err(ArrayError::ReadOnly);
        }
        let slot = self.pin_slot(mem, byte)?;
        Ok(PinMut::new(self, mem, slot, byte))
    }

    #[inline(always)]
    fn pin_slot(&self, mem: &M, byte: u64) -> Result<u32, ArrayError> {
        let page = byte >> self.page_shift(mem);
        if byte < self.bytes(mem)
            && let Found::Pinned(slot) = self.find(mem, page)
        {
            return Ok(slot);
        }
        self.fetch(mem, byte)
    }

    /// Whether it may be written.
    #[inline(always)]
    pub fn is_writable(&self, mem: &M) -> bool {
        self.handle.writable(mem) != 0
    }

    /// Pins the page that this byte is in for callers that did not find it in the cache, and returns its slot. A function of
    /// its own, because it takes more registers than a hit.
    ///
    /// # Errors
    /// As for [`Self::pin`].
    #[inline(never)]
    pub fn fetch(&self, mem: &M, byte: u64) -> Result<u32, ArrayError> {
        let mut request = PageRequest::new(self, mem, byte);
        loop {
            match self.advance(mem, &mut request) {
                PageStep::Pinned(slot) => return Ok(slot),
                PageStep::Failed(error) => return Err(error),
                PageStep::Pending => mem.pause(),
            }
        }
    }

    /// Where the page in a slot lies, as threads see it.
    #[inline(always)]
    pub fn address(&self, mem: &M, slot: u32) -> GpuAddr {
        GpuAddr(self.handle.data(mem)).plus(u64::from(slot) << self.handle.page_shift(mem))
    }

    /// Pins the page that this byte is in if the cache has it, without waiting: its slot, where the byte lies, and how many
    /// bytes follow to the end of the page or of the array. Reads the handle before the pin only: after it, all would come
    /// from memory again.
    #[inline(always)]
    pub fn locate_cached(&self, mem: &M, byte: u64) -> Option<(u32, GpuAddr, u32)> {
        let (shift, bytes, data) = (self.page_shift(mem), self.bytes(mem), self.handle.data(mem));
        if byte >= bytes {
            return None;
        }
        let Found::Pinned(slot) = self.find(mem, byte >> shift) else { return None };
        let within = byte as u32 & ((1 << shift) - 1);
        let at = GpuAddr(data).plus((u64::from(slot) << shift) + u64::from(within));
        let (room, left) = ((1 << shift) - within, bytes - byte);
        Some((slot, at, if left < u64::from(room) { left as u32 } else { room }))
    }

    /// The same for a slot that the caller has pinned.
    #[inline(always)]
    pub fn locate(&self, mem: &M, byte: u64, slot: u32) -> (u32, GpuAddr, u32) {
        let within = byte as u32 & ((1 << self.page_shift(mem)) - 1);
        let (room, left) = ((1 << self.page_shift(mem)) - within, self.bytes(mem) - byte);
        let at = self.address(mem, slot).plus(u64::from(within));
        (slot, at, if left < u64::from(room) { left as u32 } else { room })
    }

    /// Releases one pin: the caller no longer uses the page.
    #[inline(always)]
    pub fn unpin(&self, mem: &M, slot: u32) {
        mem.fetch_add_release(self.state(mem, slot), 1u32.wrapping_neg());
    }

    /// Releases one pin and marks the page to be written back: the caller has stored to it.
    #[inline(always)]
    pub fn unpin_written(&self, mem: &M, slot: u32) {
        // Before the pin is released: a page without pins that is not dirty may be evicted.
        mem.fetch_or(self.state(mem, slot), state::DIRTY);
        self.unpin(mem, slot);
    }

    /// Looks a page up without a lock, and pins it.
    #[inline(always)]
    pub(super) fn find(&self, mem: &M, page: u64) -> Found {
        let first = self.set_of(mem, page) * WAYS;
        let set = self.set(mem, first);
        let mut alike = 0;
        let mut way = 0;
        while way < WAYS {
            let [a, b, c, d] = mem.load_four(set.plus(u64::from(set::LOW + way * 4)));
            let is = |low: u32| u32::from(low == page as u32);
            alike |= (is(a) | is(b) << 1 | is(c) << 2 | is(d) << 3) << way;
            way += 4;
        }
        while alike != 0 {
            let found = Self::try_pin(mem, set, first, alike.trailing_zeros(), page);
            if !matches!(found, Found::Nowhere) {
                return found;
            }
            alike &= alike - 1;
        }
        Found::Nowhere
    }

    /// Pins a way of a set, whose first slot is `first`, if it holds this page.
    #[inline(always)]
    fn try_pin(mem: &M, set: GpuAddr, first: u32, way: u32, page: u64) -> Found {
        let word = |offset: u32| set.plus(u64::from(offset + way * 4));
        let at = word(set::STATE);
        let old = mem.fetch_add_acquire(at, 1);
        let valid = old & (state::KIND | state::MOST_PINS) == state::VALID;
        let tag = u64::from(mem.load(word(set::LOW))) | u64::from(mem.load(word(set::HIGH))) << 32;
        // A page that is pinned stays where it is, so what the tag says now remains true.
        if tag == page {
            if valid {
                if old & state::REFERENCED == 0 {
                    mem.fetch_or_relaxed(at, state::REFERENCED);
                }
                return Found::Pinned(first + way);
            }
            mem.fetch_add_relaxed(at, 1u32.wrapping_neg());
            let crowded = old & state::KIND == state::VALID;
            return if crowded { Found::Crowded } else { Found::Elsewhere(first + way) };
        }
        mem.fetch_add_relaxed(at, 1u32.wrapping_neg());
        Found::Nowhere
    }

    /// The set of a page.
    #[inline(always)]
    pub(super) fn set_of(&self, mem: &M, page: u64) -> u32 {
        // Neighbouring pages go to sets far apart; the upper half of the product is below the count.
        let hash = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ((hash * u64::from(self.handle.sets(mem))) >> 32) as u32
    }

    /// The page that a slot's tag names. Two words: consistent only for callers that keep them from changing.
    #[inline(always)]
    pub(super) fn tag(&self, mem: &M, slot: u32) -> u64 {
        let low = mem.load(self.word(mem, slot, set::LOW));
        u64::from(low) | u64::from(mem.load(self.word(mem, slot, set::HIGH))) << 32
    }

    #[inline(always)]
    pub(super) fn set_tag(&self, mem: &M, slot: u32, page: u64) {
        mem.store(self.word(mem, slot, set::LOW), page as u32);
        mem.store(self.word(mem, slot, set::HIGH), (page >> 32) as u32);
    }

    #[inline(always)]
    pub(super) fn state(&self, mem: &M, slot: u32) -> GpuAddr {
        self.word(mem, slot, set::STATE)
    }

    /// Where the set of a slot begins.
    #[inline(always)]
    pub(super) fn set(&self, mem: &M, slot: u32) -> GpuAddr {
        GpuAddr(self.handle.directory(mem)).element(slot / WAYS, SET_BYTES)
    }

    #[inline(always)]
    pub(super) fn word(&self, mem: &M, slot: u32, offset: u32) -> GpuAddr {
        self.set(mem, slot).plus(u64::from(offset + slot % WAYS * 4))
    }

    #[inline(always)]
    pub(super) fn count(&self, mem: &M, counter: u32, value: u32) {
        mem.fetch_add_relaxed(GpuAddr(self.handle.counters(mem)).plus(u64::from(counter)), value);
    }

    /// The first block of a page, and how many blocks it has: fewer at the array's end.
    #[inline(always)]
    pub(super) fn blocks_of(&self, mem: &M, page: u64) -> (u64, u32) {
        let shift = self.handle.page_shift(mem) - self.handle.block_shift(mem);
        let first = page << shift;
        let left = self.handle.blocks(mem) - first;
        let whole = 1u64 << shift;
        (self.handle.lba(mem) + first, if left < whole { left } else { whole } as u32)
    }

    /// Where a slot's page is in the data memory of the queue.
    #[inline(always)]
    pub(super) fn offset(&self, mem: &M, slot: u32) -> u64 {
        self.handle.offset(mem) + (u64::from(slot) << self.handle.page_shift(mem))
    }
}
