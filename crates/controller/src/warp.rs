//! What the controller asks of the processor that runs it.

use onehop_proto::GpuAddr;
use onehop_proto::queue::Memory;

/// Threads that run in step and serve one queue pair together.
///
/// Code between two calls is run by every lane with the same values; only the closures see single lanes. Nothing that
/// a closure computes outlives it but in memory or in the warp's local words. A call ends with a barrier and begins with
/// none, so a local word that all lanes read after a call is not written in the very next one.
pub trait Warp: Memory {
    /// How many lanes there are.
    fn lanes(&self) -> u32;
    /// Runs `f` on every lane; when it returns, what each lane stored is seen by all of them.
    fn each(&self, f: impl FnMut(u32));
    /// Runs `f` on one lane; when it returns, what it stored is seen by all of them.
    fn once(&self, f: impl FnMut());
    /// Reads a word of the memory that is the warp's own.
    fn local(&self, at: u32) -> u32;
    /// Writes one.
    fn set_local(&self, at: u32, value: u32);
    /// Reads four words; `at` is a multiple of four.
    #[inline(always)]
    fn local4(&self, at: u32) -> [u32; 4] {
        [self.local(at), self.local(at + 1), self.local(at + 2), self.local(at + 3)]
    }
    /// Writes four words; `at` is a multiple of four.
    #[inline(always)]
    fn set_local4(&self, at: u32, [a, b, c, d]: [u32; 4]) {
        self.set_local(at, a);
        self.set_local(at + 1, b);
        self.set_local(at + 2, c);
        self.set_local(at + 3, d);
    }
    /// Adds to one and gives the old value; lanes that add at the same time are all counted.
    fn add_local(&self, at: u32, value: u32) -> u32;
}

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
pub trait Engine: Warp + Wide + Memory<Addr = GpuAddr> {}

impl<T: Warp + Wide + Memory<Addr = GpuAddr>> Engine for T {}

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
    pub(crate) fn say<W: Warp>(&mut self, warp: &W, mut f: impl FnMut() -> u32) -> u32 {
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
