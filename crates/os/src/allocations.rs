//! What belongs to allocated memory, found by the memory's address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::HostMem;

struct Allocation<T> {
    bytes: usize,
    what: T,
    /// Distinguishes it from a later one at the same address.
    identity: Arc<()>,
}

type ByAddress<T> = BTreeMap<usize, Allocation<T>>;

/// Live allocations, and something of each. Clones are the same list.
pub struct Allocations<T>(Arc<Mutex<ByAddress<T>>>);

impl<T> Default for Allocations<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Clone for Allocations<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

fn locked<T>(live: &Mutex<ByAddress<T>>) -> MutexGuard<'_, ByAddress<T>> {
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Clone + Send + 'static> Allocations<T> {
    /// Adds memory that was just allocated. It is removed when the last clone of the result is dropped.
    #[must_use]
    pub fn add(&self, memory: HostMem, what: T) -> HostMem {
        let (start, bytes, identity) = (memory.host_ptr() as usize, memory.len(), Arc::new(()));
        let mut live = locked(&self.0);
        // Memory is unmapped before it is removed, and its addresses may be allocated again in between.
        while let Some((&former, at_former)) = live.range(..start + bytes).next_back()
            && former + at_former.bytes > start
        {
            live.remove(&former);
        }
        live.insert(start, Allocation { bytes, what, identity: identity.clone() });
        drop(live);
        let live = self.0.clone();
        memory.on_last_drop(move || {
            let mut live = locked(&live);
            if live.get(&start).is_some_and(|found| Arc::ptr_eq(&found.identity, &identity)) {
                live.remove(&start);
            }
        })
    }

    /// The offset of some memory in its allocation, and what belongs to that; none if no allocation contains all of it.
    #[must_use]
    pub fn find(&self, memory: &HostMem) -> Option<(usize, T)> {
        let start = memory.host_ptr() as usize;
        let live = locked(&self.0);
        let (base, found) = live.range(..=start).next_back()?;
        let offset = start - base;
        (offset + memory.len() <= found.bytes).then(|| (offset, found.what.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_with_its_offset_while_it_lives() {
        let live = Allocations::default();
        let whole = live.add(HostMem::anonymous(8192).unwrap(), 'a');
        let part = whole.slice(4096..8192).unwrap();
        assert_eq!(live.find(&whole), Some((0, 'a')));
        assert_eq!(live.find(&part), Some((4096, 'a')));
        assert_eq!(live.find(&HostMem::anonymous(4096).unwrap()), None);
        drop(whole);
        assert_eq!(live.find(&part), Some((4096, 'a')));
        drop(part);
        assert!(locked(&live.0).is_empty());
    }

    /// Between the unmapping of memory and its removal, its addresses may belong to another allocation.
    #[test]
    fn addresses_that_are_allocated_again_belong_to_the_later_allocation() {
        let pages = HostMem::anonymous(4 * 4096).unwrap();
        let page = |range: std::ops::Range<usize>| pages.slice(range.start * 4096..range.end * 4096).unwrap();
        let live = Allocations::default();
        let before = live.add(page(0..1), 'a');
        let former = [live.add(page(1..2), 'b'), live.add(page(2..3), 'c'), live.add(page(3..4), 'd')];
        let later = live.add(page(1..4), 'e');
        for i in 1..4 {
            assert_eq!(live.find(&page(i..i + 1)), Some(((i - 1) * 4096, 'e')));
        }
        drop(former);
        assert_eq!(live.find(&later), Some((0, 'e')));
        assert_eq!(live.find(&before), Some((0, 'a')));
        let again = live.add(page(1..4), 'f');
        drop(later);
        assert_eq!(live.find(&again), Some((0, 'f')));
    }
}
