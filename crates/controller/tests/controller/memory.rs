//! Memory that host and controller share, at addresses that are not pointers; any other address fails the test.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use onehop_controller::{Scoped, Wide};
use onehop_proto::GpuAddr;
use onehop_proto::queue::Memory;

const BASE: u64 = 0x7a00_0000_0000;
/// Between two allocations, so that running past an end is noticed.
const GUARD: u64 = 256;

struct Arena {
    words: Vec<AtomicU32>,
    /// One bit for each word that belongs to an allocation.
    owned: Vec<AtomicU64>,
    used: AtomicU64,
    clock: AtomicU64,
}

/// One CPU's view of the memory. Clones see the same memory; tests advance the clock.
#[derive(Clone)]
pub struct Mem(Arc<Arena>);

impl Mem {
    pub fn new(bytes: u64) -> Self {
        let words = (0..bytes / 4).map(|_| AtomicU32::new(0)).collect();
        let owned = (0..bytes / 4 / 64 + 1).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Arena { words, owned, used: AtomicU64::new(0), clock: AtomicU64::new(0) }))
    }

    /// New memory, zeroed, aligned to a page.
    pub fn alloc(&self, bytes: u64) -> GpuAddr {
        let start = self.0.used.fetch_add((bytes + GUARD).next_multiple_of(4096), Relaxed);
        assert!(start + bytes + GUARD <= self.0.words.len() as u64 * 4, "the arena is too small");
        for word in start / 4..(start + bytes).div_ceil(4) {
            self.0.owned[word as usize / 64].fetch_or(1 << (word % 64), Relaxed);
        }
        GpuAddr(BASE + start)
    }

    fn index(&self, at: GpuAddr, bytes: u64) -> usize {
        assert!(at.0.is_multiple_of(bytes), "{at} is not aligned to {bytes}");
        let word = at.0.wrapping_sub(BASE) / 4;
        for word in word..word + bytes / 4 {
            let bits = self.0.owned.get(word as usize / 64).map_or(0, |bits| bits.load(Relaxed));
            assert!(bits >> (word % 64) & 1 != 0, "{at} is not allocated");
        }
        word as usize
    }

    fn word(&self, at: GpuAddr) -> &AtomicU32 {
        &self.0.words[self.index(at, 4)]
    }

    pub fn put(&self, at: GpuAddr, words: &[u32]) {
        for (i, word) in words.iter().enumerate() {
            self.store(at.plus(4 * i as u64), *word);
        }
    }

    pub fn take<const N: usize>(&self, at: GpuAddr) -> [u32; N] {
        std::array::from_fn(|i| self.load(at.plus(4 * i as u64)))
    }

    pub fn words(&self, at: GpuAddr, bytes: u64) -> Vec<u32> {
        (0..bytes / 4).map(|i| self.load(at.plus(4 * i))).collect()
    }

    pub fn advance(&self, nanos: u64) {
        self.0.clock.fetch_add(nanos, Relaxed);
    }
}

impl Memory for Mem {
    type Addr = GpuAddr;
    type Door = GpuAddr;

    fn load(&self, at: GpuAddr) -> u32 {
        self.word(at).load(Relaxed)
    }
    fn load_acquire(&self, at: GpuAddr) -> u32 {
        self.word(at).load(Acquire)
    }
    fn store(&self, at: GpuAddr, value: u32) {
        self.word(at).store(value, Relaxed);
    }
    fn store_release(&self, at: GpuAddr, value: u32) {
        self.word(at).store(value, Release);
    }
    fn store_entry(&self, at: GpuAddr, entry: &[u32; 16]) {
        let first = self.index(at, 64);
        for (word, value) in self.0.words[first..first + 16].iter().zip(entry) {
            word.store(*value, Relaxed);
        }
    }
    fn fetch_add(&self, at: GpuAddr, value: u32) -> u32 {
        self.word(at).fetch_add(value, AcqRel)
    }
    fn fetch_or(&self, at: GpuAddr, bits: u32) -> u32 {
        self.word(at).fetch_or(bits, AcqRel)
    }
    fn fetch_and(&self, at: GpuAddr, mask: u32) -> u32 {
        self.word(at).fetch_and(mask, AcqRel)
    }
    fn compare_exchange(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        self.word(at).compare_exchange(old, new, AcqRel, Acquire).unwrap_or_else(|seen| seen)
    }
    fn fence(&self) {
        fence(SeqCst);
    }
    fn ring(&self, door: GpuAddr, value: u32) {
        self.store(door, value);
    }
    fn pause(&self) {
        std::thread::yield_now();
    }
    fn now(&self) -> u64 {
        self.0.clock.load(Relaxed)
    }
}

impl Wide for Mem {
    fn load4(&self, at: GpuAddr) -> [u32; 4] {
        let first = self.index(at, 16);
        std::array::from_fn(|i| self.0.words[first + i].load(Relaxed))
    }
    fn store4(&self, at: GpuAddr, words: [u32; 4]) {
        let first = self.index(at, 16);
        for (i, word) in words[..3].iter().enumerate() {
            self.0.words[first + i].store(*word, Relaxed);
        }
        self.0.words[first + 3].store(words[3], Release);
    }
}

impl Scoped for Mem {
    fn fence_gpu(&self) {
        fence(SeqCst);
    }
}

/// Forwards every memory operation to a field.
macro_rules! memory_of {
    ($type:ident.$field:ident, $pause:item) => {
        impl onehop_proto::queue::Memory for $type {
            type Addr = onehop_proto::GpuAddr;
            type Door = onehop_proto::GpuAddr;

            fn load(&self, at: onehop_proto::GpuAddr) -> u32 {
                self.$field.load(at)
            }
            fn load_acquire(&self, at: onehop_proto::GpuAddr) -> u32 {
                self.$field.load_acquire(at)
            }
            fn store(&self, at: onehop_proto::GpuAddr, value: u32) {
                self.$field.store(at, value);
            }
            fn store_release(&self, at: onehop_proto::GpuAddr, value: u32) {
                self.$field.store_release(at, value);
            }
            fn store_entry(&self, at: onehop_proto::GpuAddr, entry: &[u32; 16]) {
                self.$field.store_entry(at, entry);
            }
            fn fetch_add(&self, at: onehop_proto::GpuAddr, value: u32) -> u32 {
                self.$field.fetch_add(at, value)
            }
            fn fetch_or(&self, at: onehop_proto::GpuAddr, bits: u32) -> u32 {
                self.$field.fetch_or(at, bits)
            }
            fn fetch_and(&self, at: onehop_proto::GpuAddr, mask: u32) -> u32 {
                self.$field.fetch_and(at, mask)
            }
            fn compare_exchange(&self, at: onehop_proto::GpuAddr, old: u32, new: u32) -> u32 {
                self.$field.compare_exchange(at, old, new)
            }
            fn fence(&self) {
                self.$field.fence();
            }
            fn ring(&self, door: onehop_proto::GpuAddr, value: u32) {
                self.$field.ring(door, value);
            }
            $pause
            fn now(&self) -> u64 {
                self.$field.now()
            }
        }

        impl onehop_controller::Wide for $type {
            fn load4(&self, at: onehop_proto::GpuAddr) -> [u32; 4] {
                self.$field.load4(at)
            }
            fn store4(&self, at: onehop_proto::GpuAddr, words: [u32; 4]) {
                self.$field.store4(at, words);
            }
        }

        impl onehop_controller::Scoped for $type {
            fn fence_gpu(&self) {
                self.$field.fence_gpu();
            }
        }
    };
}
pub(crate) use memory_of;
