//! Memory as words whose address was checked once: for rings, where each command would repeat the check.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{Error, HostMem, Result};

/// All aligned 32-bit words of some memory.
pub struct Words {
    first: NonNull<u32>,
    count: usize,
    /// Keeps them mapped.
    _mem: HostMem,
}

// SAFETY: the words stay mapped as long as the memory is held; only references to atomics are handed out, as for the
// memory.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// The words of writable memory that starts at a multiple of eight bytes.
    ///
    /// # Errors
    /// When it is read-only, or starts elsewhere.
    pub fn new(mem: HostMem) -> Result<Self> {
        mem.check_writable_range(0, mem.len())?;
        let misplaced = Error::OutOfRange { offset: 0, bytes: mem.len(), len: mem.len() };
        let first = NonNull::new(mem.host_ptr().cast::<u32>()).filter(|first| first.addr().get() % 8 == 0);
        Ok(Self { first: first.ok_or(misplaced)?, count: mem.len() / 4, _mem: mem })
    }

    /// A word by its index.
    #[inline(always)]
    #[must_use]
    pub fn get(&self, index: u32) -> Option<&AtomicU32> {
        let index = index as usize;
        // SAFETY: in range and aligned; the mapping outlives &self. References to it are only to atomics, as
        // `HostMem`'s are.
        (index < self.count).then(|| unsafe { AtomicU32::from_ptr(self.first.as_ptr().add(index)) })
    }

    /// `N` pairs of words, from an even index on.
    #[inline(always)]
    fn pairs<const N: usize>(&self, index: u32) -> Option<[&AtomicU64; N]> {
        let index = index as usize;
        if index + 2 * N > self.count || !index.is_multiple_of(2) {
            return None;
        }
        // SAFETY: 2 N words from `index` on are in range, and aligned to eight bytes as the first word and an even index
        // are; the mapping outlives &self. References to it are only to atomics, as `HostMem`'s are.
        Some(std::array::from_fn(|i| unsafe {
            AtomicU64::from_ptr(self.first.as_ptr().add(index + 2 * i).cast())
        }))
    }

    /// Stores sixteen words from an even index on, in no particular order; false if they are out of range.
    #[inline(always)]
    #[must_use]
    pub fn store_entry(&self, index: u32, words: &[u32; 16]) -> bool {
        let Some(pairs) = self.pairs::<8>(index) else { return false };
        for (pair, words) in pairs.into_iter().zip(words.as_chunks::<2>().0) {
            pair.store(join(*words), Ordering::Relaxed);
        }
        true
    }

    /// Stores four words from an even index on, the last two after all that was stored before; false if they are out of range.
    #[inline(always)]
    #[must_use]
    pub fn store_four_release(&self, index: u32, [a, b, c, d]: [u32; 4]) -> bool {
        let Some([first, last]) = self.pairs(index) else { return false };
        first.store(join([a, b]), Ordering::Relaxed);
        last.store(join([c, d]), Ordering::Release);
        true
    }

    /// Loads four words from an even index on, the last two before the others and all that is loaded later; none if they
    /// are out of range.
    #[inline(always)]
    #[must_use]
    pub fn load_four_acquire(&self, index: u32) -> Option<[u32; 4]> {
        let [first, last] = self.pairs(index)?;
        let [c, d] = split(last.load(Ordering::Acquire));
        let [a, b] = split(first.load(Ordering::Relaxed));
        Some([a, b, c, d])
    }
}

/// Two neighbouring words as one.
#[inline(always)]
fn join([a, b]: [u32; 2]) -> u64 {
    let [low, high] = if cfg!(target_endian = "little") { [a, b] } else { [b, a] };
    u64::from(low) | u64::from(high) << 32
}

#[inline(always)]
fn split(pair: u64) -> [u32; 2] {
    let [low, high] = [pair as u32, (pair >> 32) as u32];
    if cfg!(target_endian = "little") { [low, high] } else { [high, low] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_memory() {
        let mem = HostMem::anonymous(4096).unwrap().slice(64..192).unwrap();
        let words = Words::new(mem.clone()).unwrap();
        assert!(words.store_entry(16, &std::array::from_fn(|i| i as u32 + 1)));
        assert_eq!(mem.read_words(64).unwrap(), std::array::from_fn(|i| i as u32 + 1));
        // Including one that does not start at a multiple of eight.
        mem.write_words(60, &std::array::from_fn(|i| i as u32 + 3)).unwrap();
        assert_eq!(mem.read_words(60).unwrap(), std::array::from_fn(|i| i as u32 + 3));
        words.get(31).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(mem.word(124).unwrap().load(Ordering::Relaxed), 7);
        assert!(words.get(32).is_none() && words.get(u32::MAX).is_none());
        for index in [1, 17, 18, 32, u32::MAX - 15, u32::MAX] {
            assert!(!words.store_entry(index, &[0; 16]), "{index}");
        }
        assert!(words.store_four_release(28, [1, 2, 3, 4]));
        assert_eq!(words.load_four_acquire(28), Some([1, 2, 3, 4]));
        assert_eq!(mem.read_words(64).unwrap()[12..], [1, 2, 3, 4]);
        for index in [1, 29, 30, 32, u32::MAX - 3, u32::MAX] {
            assert!(!words.store_four_release(index, [0; 4]), "{index}");
            assert_eq!(words.load_four_acquire(index), None, "{index}");
        }
        let unaligned = HostMem::anonymous(4096).unwrap().slice(4..64).unwrap();
        assert!(Words::new(unaligned).is_err());
    }
}
