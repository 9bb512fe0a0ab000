//! Pins that end with their scope.

use super::{Backing, PageCache};
use crate::GpuAddr;
use crate::queue::Memory;

/// A page that stays in the cache as long as this lives.
pub struct Pin<'a, M: Memory<Addr = GpuAddr>, B: Backing<M>> {
    array: &'a PageCache<M, B>,
    mem: &'a M,
    slot: u32,
    byte: u64,
}

impl<'a, M: Memory<Addr = GpuAddr>, B: Backing<M>> Pin<'a, M, B> {
    #[inline(always)]
    pub(super) fn new(array: &'a PageCache<M, B>, mem: &'a M, slot: u32, byte: u64) -> Self {
        Self { array, mem, slot, byte }
    }

    /// Where the byte lies that was asked for.
    #[inline(always)]
    #[must_use]
    pub fn address(&self) -> GpuAddr {
        let within = self.byte & ((1 << self.array.page_shift(self.mem)) - 1);
        self.array.address(self.mem, self.slot).plus(within)
    }
}

impl<M: Memory<Addr = GpuAddr>, B: Backing<M>> Drop for Pin<'_, M, B> {
    #[inline(always)]
    fn drop(&mut self) {
        self.array.unpin(self.mem, self.slot);
    }
}

/// A page that stays in the cache as long as this lives, and is written back some time after.
pub struct PinMut<'a, M: Memory<Addr = GpuAddr>, B: Backing<M>> {
    array: &'a PageCache<M, B>,
    mem: &'a M,
    slot: u32,
    byte: u64,
}

impl<'a, M: Memory<Addr = GpuAddr>, B: Backing<M>> PinMut<'a, M, B> {
    #[inline(always)]
    pub(super) fn new(array: &'a PageCache<M, B>, mem: &'a M, slot: u32, byte: u64) -> Self {
        Self { array, mem, slot, byte }
    }

    /// Where the byte lies that was asked for.
    #[inline(always)]
    #[must_use]
    pub fn address(&self) -> GpuAddr {
        let within = self.byte & ((1 << self.array.page_shift(self.mem)) - 1);
        self.array.address(self.mem, self.slot).plus(within)
    }
}

impl<M: Memory<Addr = GpuAddr>, B: Backing<M>> Drop for PinMut<'_, M, B> {
    #[inline(always)]
    fn drop(&mut self) {
        self.array.unpin_written(self.mem, self.slot);
    }
}
