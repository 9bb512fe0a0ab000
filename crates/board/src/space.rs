//! The memory that the board can reach.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use onehop_os::HostMem;

use crate::config::P2p;

/// A range of bus addresses.
#[derive(Clone)]
struct MappedRange {
    mem: HostMem,
    /// Whether it is GPU memory, which the machine may treat differently.
    peer: bool,
}

/// Why an access failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Missed {
    /// It is not mapped, or not entirely.
    Unmapped,
    /// Bus mastering is disabled.
    NoMaster,
    /// It exceeds the engine's address bits.
    Mask,
    /// It is read-only.
    ReadOnly,
}

/// The bus as the board sees it.
pub(crate) struct BoardBus {
    ranges: RwLock<BTreeMap<u64, MappedRange>>,
    master: AtomicBool,
    p2p: P2p,
    mask_bits: u8,
}

/// Memory within the board's reach. Dropping it waits for accesses in progress.
pub struct Reached {
    space: Arc<BoardBus>,
    at: Vec<u64>,
}

impl Drop for Reached {
    fn drop(&mut self) {
        let mut ranges = self.space.ranges.write().unwrap_or_else(PoisonError::into_inner);
        for at in &self.at {
            ranges.remove(at);
        }
    }
}

impl BoardBus {
    pub(crate) fn new(p2p: P2p, mask_bits: u8) -> Arc<Self> {
        Arc::new(Self { ranges: RwLock::default(), master: AtomicBool::new(true), p2p, mask_bits })
    }

    pub(crate) fn set_master(&self, on: bool) {
        // Under the lock, so accesses in progress have ended when this returns.
        let _ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        self.master.store(on, Ordering::SeqCst);
    }

    /// Maps ranges at these addresses; `None` if one of them is in use.
    pub(crate) fn add(self: &Arc<Self>, new: Vec<(u64, HostMem)>, peer: bool) -> Option<Reached> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        for (at, mem) in &new {
            let end = at.checked_add(mem.len() as u64)?;
            let before = ranges.range(..end).next_back();
            if mem.is_empty() || before.is_some_and(|(start, range)| start + range.mem.len() as u64 > *at) {
                return None;
            }
        }
        let at = new.iter().map(|(at, _)| *at).collect();
        ranges.extend(new.into_iter().map(|(at, mem)| (at, MappedRange { mem, peer })));
        Some(Reached { space: self.clone(), at })
    }

    /// Number of mapped ranges.
    pub(crate) fn count(&self) -> usize {
        self.ranges.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Calls `work` for each range of an access, in order.
    fn each(
        &self,
        at: u64,
        bytes: usize,
        mut work: impl FnMut(&MappedRange, usize, usize, usize) -> Result<(), Missed>,
    ) -> Result<(), Missed> {
        let last = at.saturating_add(bytes.saturating_sub(1) as u64);
        if last.checked_shr(self.mask_bits.into()).is_some_and(|beyond| beyond != 0) {
            return Err(Missed::Mask);
        }
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        if !self.master.load(Ordering::SeqCst) {
            return Err(Missed::NoMaster);
        }
        let mut done = 0;
        while done < bytes {
            let here = at.checked_add(done as u64).ok_or(Missed::Unmapped)?;
            let (start, range) = ranges.range(..=here).next_back().ok_or(Missed::Unmapped)?;
            let offset = (here - start) as usize;
            let count = range.mem.len().saturating_sub(offset).min(bytes - done);
            if count == 0 {
                return Err(Missed::Unmapped);
            }
            work(range, offset, done, count)?;
            done += count;
        }
        Ok(())
    }

    /// Writes, as posted writes: dropped ones are not noticed.
    pub(crate) fn write(&self, at: u64, data: &[u8]) -> Result<(), Missed> {
        self.each(at, data.len(), |range, offset, done, count| {
            if range.peer && self.p2p == P2p::Dropped {
                return Ok(());
            }
            // The range was checked, so it can only be read-only.
            range.mem.write(offset, &data[done..done + count]).map_err(|_| Missed::ReadOnly)
        })
    }

    /// Writes a word with release ordering.
    pub(crate) fn write_word(&self, at: u64, value: u32) -> Result<(), Missed> {
        self.each(at, 4, |range, offset, _, count| {
            if range.peer && self.p2p == P2p::Dropped {
                return Ok(());
            }
            if !range.mem.is_writable() {
                return Err(Missed::ReadOnly);
            }
            if let (4, Ok(word)) = (count, range.mem.word(offset)) {
                word.store(value, Ordering::Release);
            }
            Ok(())
        })
    }

    /// Reads; dropped reads return ones.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Missed> {
        self.each(at, out.len(), |range, offset, done, count| {
            let part = &mut out[done..done + count];
            if range.peer && matches!(self.p2p, P2p::Dropped | P2p::WritesOnly)
                || range.mem.read(offset, part).is_err()
            {
                part.fill(0xff);
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mapped_memory_is_reached() {
        let space = BoardBus::new(P2p::Works, 32);
        let mem = HostMem::anonymous(8192).unwrap();
        let parts = vec![(0x1000, mem.slice(0..4096).unwrap()), (0x2000, mem.slice(4096..8192).unwrap())];
        let reached = space.add(parts, false).unwrap();
        assert!(space.add(vec![(0x1800, mem.clone())], false).is_none());
        space.write(0x1ffe, &[1, 2, 3, 4]).unwrap();
        assert_eq!(mem.to_vec(4094, 4).unwrap(), [1, 2, 3, 4]);
        assert_eq!(space.write(0x2ffe, &[0; 4]), Err(Missed::Unmapped));
        assert_eq!(space.write(u64::MAX, &[0; 4]), Err(Missed::Mask));
        assert_eq!(BoardBus::new(P2p::Works, 64).write(u64::MAX, &[0; 4]), Err(Missed::Unmapped));
        space.set_master(false);
        assert_eq!(space.read(0x1000, &mut [0]), Err(Missed::NoMaster));
        space.set_master(true);
        drop(reached);
        assert_eq!(space.read(0x1000, &mut [0]), Err(Missed::Unmapped));
        assert_eq!(space.count(), 0);
    }

    #[test]
    fn what_the_machine_drops_is_not_noticed() {
        let mem = HostMem::anonymous(4096).unwrap();
        for (p2p, written, read) in [(P2p::Works, 7, 7), (P2p::WritesOnly, 7, 0xff), (P2p::Dropped, 0, 0xff)]
        {
            mem.fill(0, 4096, 0).unwrap();
            let space = BoardBus::new(p2p, 32);
            let _reached = space.add(vec![(0x1000, mem.clone())], true).unwrap();
            space.write(0x1000, &[7]).unwrap();
            let mut back = [0];
            space.read(0x1000, &mut back).unwrap();
            assert_eq!((mem.to_vec(0, 1).unwrap()[0], back[0]), (written, read), "{p2p:?}");
        }
    }
}
