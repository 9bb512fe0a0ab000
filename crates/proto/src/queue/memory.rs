//! The memory operations whose meaning differs between a CPU, a GPU, the emulated GPU and a model checker.

use crate::GpuAddr;

/// An address as one CPU or GPU sees it.
pub trait Address: Copy {
    /// The address `bytes` further on.
    #[must_use]
    fn plus(self, bytes: u32) -> Self;

    /// The address of the element of `bytes` bytes that has this index. Where addresses have more than 32 bits, so has
    /// the product.
    #[must_use]
    #[inline(always)]
    fn element(self, index: u32, bytes: u32) -> Self {
        self.plus(index * bytes)
    }
}

impl Address for GpuAddr {
    #[inline(always)]
    fn plus(self, bytes: u32) -> Self {
        GpuAddr::plus(self, bytes as u64)
    }

    #[inline(always)]
    fn element(self, index: u32, bytes: u32) -> Self {
        GpuAddr::plus(self, index as u64 * bytes as u64)
    }
}

/// The operations of a CPU or GPU on memory that it shares with devices and other CPUs and GPUs.
///
/// An implementation vouches for the addresses it is given: it checks them, or its creator has promised that the queues
/// and tables described to it are real. Orders and visibility are system-wide, devices included.
pub trait Memory {
    /// An address in memory.
    type Addr: Address;
    /// A doorbell.
    type Door: Copy;

    /// Reads a word; orders nothing.
    fn load(&self, at: Self::Addr) -> u32;
    /// Reads a word; nothing after it happens before it.
    fn load_acquire(&self, at: Self::Addr) -> u32;
    /// Writes a word; orders nothing.
    fn store(&self, at: Self::Addr, value: u32);
    /// Writes a word; everything before it is seen before it.
    fn store_release(&self, at: Self::Addr, value: u32);
    /// Writes a submission queue entry; orders nothing.
    fn store_entry(&self, at: Self::Addr, entry: &[u32; 16]);
    /// Reads two words, on an address that is a multiple of eight. The first is not older than the second; beyond
    /// that it orders nothing.
    #[inline(always)]
    fn load_pair(&self, at: Self::Addr) -> [u32; 2] {
        let last = self.load_acquire(at.plus(4));
        [self.load(at), last]
    }
    /// Writes two words, on an address that is a multiple of eight. A reader that sees the first sees the second; beyond that
    /// it orders nothing.
    #[inline(always)]
    fn store_pair(&self, at: Self::Addr, words: [u32; 2]) {
        self.store(at.plus(4), words[1]);
        self.store_release(at, words[0]);
    }
    /// Reads four words that are constant as long as the kernel runs, on an address that is a multiple of 16.
    #[inline(always)]
    fn load_constant(&self, at: Self::Addr) -> [u32; 4] {
        [self.load(at), self.load(at.plus(4)), self.load(at.plus(8)), self.load(at.plus(12))]
    }
    /// Reads four words, on an address that is a multiple of 16; orders nothing.
    #[inline(always)]
    fn load_four(&self, at: Self::Addr) -> [u32; 4] {
        [self.load(at), self.load(at.plus(4)), self.load(at.plus(8)), self.load(at.plus(12))]
    }
    /// Writes four words, on an address that is a multiple of 16; orders nothing.
    #[inline(always)]
    fn store_four(&self, at: Self::Addr, words: [u32; 4]) {
        self.store(at, words[0]);
        self.store(at.plus(4), words[1]);
        self.store(at.plus(8), words[2]);
        self.store(at.plus(12), words[3]);
    }
    /// Reads a completion whose phase is this one, on an address that is a multiple of 16. The phase is in the last word:
    /// nothing else of the completion, and nothing after it, is read before that.
    #[inline(always)]
    fn load_completion(&self, at: Self::Addr, phase: bool) -> Option<[u32; 4]> {
        let last = self.load_acquire(at.plus(12));
        if last >> 16 & 1 != phase as u32 {
            return None;
        }
        Some([self.load(at), self.load(at.plus(4)), self.load(at.plus(8)), last])
    }
    /// Adds to a word and returns the old value; acquires and releases.
    fn fetch_add(&self, at: Self::Addr, value: u32) -> u32;
    /// [`Self::fetch_add`] that acquires and does not release, among the threads of one GPU.
    #[inline(always)]
    fn fetch_add_acquire(&self, at: Self::Addr, value: u32) -> u32 {
        self.fetch_add(at, value)
    }
    /// [`Self::fetch_add`] that releases and does not acquire, among the threads of one GPU.
    #[inline(always)]
    fn fetch_add_release(&self, at: Self::Addr, value: u32) -> u32 {
        self.fetch_add(at, value)
    }
    /// [`Self::fetch_add`] that orders nothing.
    #[inline(always)]
    fn fetch_add_relaxed(&self, at: Self::Addr, value: u32) -> u32 {
        self.fetch_add(at, value)
    }
    /// Sets bits and returns the old value; acquires and releases.
    fn fetch_or(&self, at: Self::Addr, bits: u32) -> u32;
    /// Keeps only the bits of `mask` and returns the old value; acquires and releases.
    fn fetch_and(&self, at: Self::Addr, mask: u32) -> u32;
    /// Writes `new` if the word is `old`, and returns the former value; acquires and releases.
    fn compare_exchange(&self, at: Self::Addr, old: u32, new: u32) -> u32;
    /// [`Self::fetch_or`] that orders nothing: for use between fences.
    #[inline(always)]
    fn fetch_or_relaxed(&self, at: Self::Addr, bits: u32) -> u32 {
        self.fetch_or(at, bits)
    }
    /// [`Self::fetch_and`] that orders nothing. It still continues the last release of the word, which a plain store would
    /// not.
    #[inline(always)]
    fn fetch_and_relaxed(&self, at: Self::Addr, mask: u32) -> u32 {
        self.fetch_and(at, mask)
    }
    /// [`Self::fetch_and`] that acquires and does not release.
    #[inline(always)]
    fn fetch_and_acquire(&self, at: Self::Addr, mask: u32) -> u32 {
        self.fetch_and(at, mask)
    }
    /// [`Self::compare_exchange`] that acquires and does not release.
    #[inline(always)]
    fn compare_exchange_acquire(&self, at: Self::Addr, old: u32, new: u32) -> u32 {
        self.compare_exchange(at, old, new)
    }
    /// [`Self::compare_exchange`] that orders nothing: for use between fences.
    #[inline(always)]
    fn compare_exchange_relaxed(&self, at: Self::Addr, old: u32, new: u32) -> u32 {
        self.compare_exchange(at, old, new)
    }
    /// Does something once for all threads that come here together. `at` identifies the action and the queue: threads with
    /// the same `at` may use any one's `f`. `f` gets their count and does not wait for any of them; each receives its result,
    /// and a number of its own below that count. What any of them did before is before `f`, and `f` is before what they do
    /// after. A thread may be alone.
    #[inline(always)]
    fn combine(&self, _at: Self::Addr, f: impl FnOnce(u32) -> u64) -> (u64, u32) {
        (f(1), 0)
    }
    /// Everything stored before is seen, by devices too, before anything stored after, doorbells included.
    fn fence(&self);
    /// [`Self::fence`] that also orders what was stored before it against what is loaded after it, among all who use it.
    #[inline(always)]
    fn fence_all(&self) {
        self.fence();
    }
    /// Writes a doorbell; orders nothing.
    fn ring(&self, door: Self::Door, value: u32);
    /// Lets others go on for a moment.
    fn pause(&self);
    /// Nanoseconds since a fixed moment.
    fn now(&self) -> u64;
}
