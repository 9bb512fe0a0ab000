//! The operations that the controller needs of its CPU or GPU.

use onehop_proto::GpuAddr;
use onehop_proto::kernel::Lanes;
use onehop_proto::queue::Memory;

/// Sixteen bytes at a time, at addresses that are multiples of sixteen.
pub trait Wide: Memory {
    /// Reads four words; orders nothing.
    fn load4(&self, at: Self::Addr) -> [u32; 4];
    /// Writes four words; orders nothing. A reader that sees the last word sees the others too.
    fn store4(&self, at: Self::Addr, words: [u32; 4]);
}

/// A fence that is weaker than the queues need, to show what goes wrong with it.
pub trait Scoped: Memory {
    /// Like [`Memory::fence`], but only for threads of the same GPU.
    fn fence_gpu(&self);
}

/// All operations that the controller needs.
pub trait ControllerWarp: Lanes + Wide + Memory<Addr = GpuAddr> {}

impl<T: Lanes + Wide + Memory<Addr = GpuAddr>> ControllerWarp for T {}

/// Broadcasts one lane's word to all. Memory that others change must be read by one lane, or lanes could differ.
///
/// Two local words alternate, so that a slow lane still reads the one while the next is written.
pub(crate) struct Voice {
    at: u32,
    turn: u32,
}

impl Voice {
    /// A voice in the local words `at` and `at + 1`.
    pub(crate) const fn new(at: u32) -> Self {
        Self { at, turn: 0 }
    }

    /// Runs `f` on one lane, and returns its word on all.
    #[inline(always)]
    pub(crate) fn say<W: Lanes>(&mut self, warp: &W, mut f: impl FnMut() -> u32) -> u32 {
        self.turn ^= 1;
        let at = self.at + self.turn;
        warp.once(|| warp.set_local(at, f()));
        warp.local(at)
    }
}

/// `at` in a ring, where `at` is less than one lap too far.
#[inline(always)]
pub(crate) const fn wrap(at: u32, entries: u32) -> u32 {
    if at >= entries { at - entries } else { at }
}

/// How many entries lie from `from` to `to`.
#[inline(always)]
pub(crate) const fn distance(from: u32, to: u32, entries: u32) -> u32 {
    if to >= from { to - from } else { to + entries - from }
}
