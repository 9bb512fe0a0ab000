//! Host memory at addresses that only this crate uses, in place of bus addresses in commands.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use onehop_os::{BusRange, DmaMemory, Error, HostMem, Mapped, Mapper, Result, Transport};
use onehop_proto::BusAddr;

/// The first address. Addresses are never reused, and low ones are skipped, because they look like mistakes.
const FIRST: u64 = 1 << 40;
/// Alignment of memory, with a gap after it.
const STEP: u64 = 64 << 10;

type MemoryBook = RwLock<BTreeMap<u64, HostMem>>;

/// Memory for use in commands.
pub(crate) struct MemorySpace {
    name: String,
    next: AtomicU64,
    book: Arc<MemoryBook>,
}

impl MemorySpace {
    pub(crate) fn new(name: String) -> Self {
        Self { name, next: AtomicU64::new(FIRST), book: Arc::default() }
    }

    /// The memory at an address, and the address's offset in it; `None` unless `bytes` bytes follow.
    pub(crate) fn at(&self, addr: u64, bytes: u64) -> Option<(HostMem, usize)> {
        let book = self.book.read().unwrap_or_else(PoisonError::into_inner);
        let (start, memory) = book.range(..=addr).next_back()?;
        let offset = addr - start;
        let end = offset.checked_add(bytes)?;
        (end <= memory.len() as u64).then(|| (memory.clone(), offset as usize))
    }
}

/// Removes memory when dropped. Commands that use it hold it themselves.
struct BookEntry {
    book: Arc<MemoryBook>,
    at: u64,
}

impl Drop for BookEntry {
    fn drop(&mut self) {
        self.book.write().unwrap_or_else(PoisonError::into_inner).remove(&self.at);
    }
}

impl Mapper for MemorySpace {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, bytes: usize) -> Result<HostMem> {
        HostMem::anonymous(bytes)
    }

    fn map(&self, memory: &dyn DmaMemory) -> Result<Mapped> {
        let host = memory.host().ok_or_else(|| Error::CannotMap {
            mapper: self.name.clone(),
            why: "data from the network is received into host memory; use cpu/pinned, which copies it to the GPU".into(),
        })?;
        let len = host.len() as u64;
        let at = self.next.fetch_add((len + 1).next_multiple_of(STEP), Ordering::Relaxed);
        self.book.write().unwrap_or_else(PoisonError::into_inner).insert(at, host.clone());
        let entry = BookEntry { book: self.book.clone(), at };
        Ok(Mapped::new(vec![BusRange { addr: BusAddr(at), len }], Box::new(entry)))
    }

    fn transport(&self) -> Transport {
        Transport::Messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_to_the_memory_while_it_is_mapped() {
        let space = MemorySpace::new("t".into());
        let memory = space.alloc(8192).unwrap();
        let map = space.map(&memory).unwrap();
        let at = map.contiguous().unwrap().0;
        memory.write(4097, b"x").unwrap();
        let (found, offset) = space.at(at + 4097, 4095).unwrap();
        assert_eq!(found.to_vec(offset, 1).unwrap(), b"x");
        for (addr, bytes) in [(at + 4097, 4096), (at + 8193, 0), (at - 1, 1), (0, 1), (at, u64::MAX)] {
            assert!(space.at(addr, bytes).is_none(), "{addr:#x} {bytes}");
        }
        drop(map);
        assert!(space.at(at, 1).is_none());
    }
}
