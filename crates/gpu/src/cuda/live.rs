//! Live memory by its addresses on the GPU. Kernels are given addresses: each is checked to lie in live memory, which
//! is then held until the kernel ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use onehop_proto::GpuAddr;

use crate::region::AddressSpace;

/// Keeps memory from being freed.
pub(super) type MemoryHold = Arc<dyn Send + Sync>;

/// Memory that a kernel accesses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Touched {
    pub(super) what: &'static str,
    pub(super) at: GpuAddr,
    pub(super) bytes: u64,
}

struct LiveRange {
    end: u64,
    space: AddressSpace,
    memory: Weak<dyn Send + Sync>,
}

#[derive(Default)]
struct LiveRanges {
    /// By first address and age: memory of other code may be registered several times.
    all: BTreeMap<(u64, u64), LiveRange>,
    next: u64,
    /// Number of entries from which those of freed memory are removed.
    full: usize,
}

/// See the module.
#[derive(Default)]
pub(super) struct LiveMemory(Mutex<LiveRanges>);

impl LiveMemory {
    /// Adds memory for as long as it lives.
    pub(super) fn add(&self, at: GpuAddr, bytes: usize, space: AddressSpace, memory: &MemoryHold) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.all.len() >= state.full {
            state.all.retain(|_, known| known.memory.strong_count() > 0);
            state.full = (state.all.len() * 2).max(64);
        }
        let key = (at.0, state.next);
        state.next += 1;
        let end = at.0.saturating_add(bytes as u64);
        state.all.insert(key, LiveRange { end, space, memory: Arc::downgrade(memory) });
    }

    /// Holds live memory that contains the whole range and that a kernel can reach; `None` if there is none. An empty
    /// range is refused: a kernel that accesses nothing there does not get its address.
    pub(super) fn hold(
        &self,
        touched: &Touched,
        reaches: impl Fn(AddressSpace) -> bool,
    ) -> Option<MemoryHold> {
        if touched.bytes == 0 {
            return None;
        }
        let start = touched.at.0;
        let end = start.checked_add(touched.bytes)?;
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.all.range(..=(start, u64::MAX)).rev();
        let mut whole = before.filter(|(_, known)| end <= known.end && reaches(known.space));
        whole.find_map(|(_, known)| known.memory.upgrade())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::region::ContextKey;

    const fn of(device: i32) -> AddressSpace {
        AddressSpace::Context(ContextKey { device, made: None })
    }

    fn touched(at: u64, bytes: u64) -> Touched {
        Touched { what: "memory", at: GpuAddr(at), bytes }
    }

    #[test]
    fn only_memory_that_lives_and_can_be_reached_is_held() {
        let live = LiveMemory::default();
        let memory: Vec<MemoryHold> = (0..3).map(|i| Arc::new(i) as MemoryHold).collect();
        live.add(GpuAddr(4096), 4096, of(0), &memory[0]);
        live.add(GpuAddr(8192), 4096, of(1), &memory[1]);
        live.add(GpuAddr(20_000), 10, AddressSpace::Cuda, &memory[2]);
        let held = |at, bytes| {
            live.hold(&touched(at, bytes), |space| space != of(1))
                .map(|hold| memory.iter().position(|memory| Arc::ptr_eq(memory, &hold)).unwrap())
        };
        assert_eq!([held(4096, 4096), held(5000, 1), held(20_009, 1)], [Some(0), Some(0), Some(2)]);
        for (at, bytes) in [
            (4095, 1),
            (4096, 4097),
            (8191, 2),
            (8192, 1),
            (20_000, 11),
            (20_010, 1),
            (1, u64::MAX),
            (4096, 0),
        ] {
            assert_eq!(held(at, bytes), None, "{bytes} at {at}");
        }
    }

    #[test]
    fn memory_that_is_known_twice_lives_as_long_as_one_of_the_two() {
        let live = LiveMemory::default();
        let (first, second): (MemoryHold, MemoryHold) = (Arc::new(1), Arc::new(2));
        live.add(GpuAddr(4096), 4096, AddressSpace::Cuda, &first);
        live.add(GpuAddr(4096), 8192, AddressSpace::Cuda, &second);
        let held = |bytes| live.hold(&touched(5000, bytes), |_| true).is_some();
        assert!(held(8) && held(5000));
        drop(second);
        assert!(held(8) && !held(5000));
        drop(first);
        assert!(!held(8));
        // Entries of freed memory do not accumulate.
        for at in 0..1000 {
            live.add(GpuAddr(at), 1, AddressSpace::Cuda, &(Arc::new(0) as MemoryHold));
        }
        assert!(live.0.lock().unwrap().all.len() <= 65);
    }
}
