//! What the controller asks of the processor that runs it.

use onehop_proto::GpuAddr;
use onehop_proto::kernel::Lanes;
use onehop_proto::queue::Memory;

/// Sixteen bytes at a time, at addresses that are multiples of sixteen.
pub trait Wide: Memory {
    /// Reads four words; orders nothing.
    fn load4(&self, at: Self::Addr) -> [u32; 4];
    /// Writes four words; orders nothing. Whoever sees the last of them sees the others too.
    fn store4(&self, at: Self::Addr, words: [u32; 4]);
}

/// A fence that is weaker than the queues need, for showing what goes wrong with it.
pub trait Scoped: Memory {
    /// Like [`Memory::fence`], but only for who runs on the same GPU.
    fn fence_gpu(&self);
}

/// All that the controller needs.
pub trait ControllerWarp: Lanes + Wide + Memory<Addr = GpuAddr> {}

impl<T: Lanes + Wide + Memory<Addr = GpuAddr>> ControllerWarp for T {}

/// One lane's word for all of them: memory that others change must be read by one lane, or lanes could differ.
///
/// Two local words take turns: a lane that is slow to read the one does not lose it to the next.
pub(crate) struct Voice {
    at: u32,
    turn: u32,
}

impl Voice {
    /// A voice in the local words `at` and `at + 1`.
    pub(crate) const fn new(at: u32) -> Self {
        Self { at, turn: 0 }
    }

    /// What `f` gives on one lane.
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
