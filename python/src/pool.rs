//! The memory of a bounded stream: segments are cut from it, and released with the last of their tensors.
//!
//! On the CPU it may be used again at once. A GPU may still read it then, for copies that the consumer has begun: there it
//! waits until an event of the consumer's stream, recorded after the death, has come to pass ([`Pool::dead`], [`Pool::fenced`]).
//!
//! A consumer that keeps tensors would wait for ever for the next one. [`Pool::is_stuck`] tells, and the memory grows.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use onehop_gpu::{Gpu, Region};
use onehop_load::engine::{Placement, SegmentMemory};

/// What the start of each segment is a multiple of.
const ALIGN: usize = 512;

/// A part of one of the allocations.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolRange {
    base: usize,
    range: Range<usize>,
}

pub(crate) struct Pool {
    itself: Weak<Pool>,
    /// What allocates more of it; none where the consumer does.
    gpu: Option<Arc<dyn Gpu>>,
    /// Whether what is dead has to be fenced before it is used again.
    fences: bool,
    process: u32,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    /// The allocations.
    bases: Vec<Region>,
    /// What nobody uses, by base and start; neighbours are joined.
    free: Vec<PoolRange>,
    /// What waits for a fence to be recorded, and for those that were.
    dead: Vec<PoolRange>,
    fencing: BTreeMap<u64, Vec<PoolRange>>,
    fences: u64,
    /// Segments that are being filled.
    filling: BTreeMap<usize, Arc<Lease>>,
    /// What a thread waits for.
    wanted: Option<usize>,
    grown: usize,
}

/// A segment, for as long as one of its tensors lives.
pub(crate) struct Lease {
    pool: Arc<Pool>,
    extent: PoolRange,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.give_back(self.extent.clone());
    }
}

impl Pool {
    /// Memory of the CPU: this at first.
    pub(crate) fn of_cpu(gpu: Arc<dyn Gpu>, first: Region) -> Arc<Self> {
        let pool = Self::empty(Some(gpu));
        pool.state().add(first);
        pool
    }

    /// Memory of a GPU that Python has allocated: the consumer brings more of it if need be, and records fences.
    pub(crate) fn of_lent(first: Region) -> Arc<Self> {
        let pool = Self::empty(None);
        pool.add(first);
        pool
    }

    fn empty(gpu: Option<Arc<dyn Gpu>>) -> Arc<Self> {
        let (state, process) = (Mutex::default(), std::process::id());
        Arc::new_cyclic(|itself| Self { itself: itself.clone(), fences: gpu.is_none(), process, gpu, state })
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, extent: PoolRange) {
        if self.process != std::process::id() {
            // Nothing is loaded into it in a child, and another thread may have held the lock at the fork.
            return;
        }
        let mut state = self.state();
        if self.fences {
            state.dead.push(extent);
        } else {
            state.release(extent);
        }
    }

    /// What keeps a segment that is being filled.
    pub(crate) fn lease(&self, segment: usize) -> Option<Arc<Lease>> {
        self.state().filling.get(&segment).cloned()
    }

    /// All tensors of a segment were handed out: from now on those alone keep it.
    pub(crate) fn filled(&self, segment: usize) {
        let lease = self.state().filling.remove(&segment);
        drop(lease);
    }

    /// Nothing is being filled any more.
    pub(crate) fn close(&self) {
        let leases = std::mem::take(&mut self.state().filling);
        drop(leases);
    }

    /// The name of the fence behind which all memory may be used again that is dead by now; none where none was ever dead. The same
    /// name comes again while no more has died, so a consumer that is interrupted loses none.
    pub(crate) fn dead(&self) -> Option<u64> {
        let mut state = self.state();
        if !state.dead.is_empty() {
            let dead = std::mem::take(&mut state.dead);
            state.fences += 1;
            let fence = state.fences;
            state.fencing.insert(fence, dead);
        }
        (state.fences > 0).then_some(state.fences)
    }

    /// That fence has come to pass, and with it those before.
    pub(crate) fn fenced(&self, fence: u64) {
        let mut state = self.state();
        let later = state.fencing.split_off(&(fence + 1));
        for extent in std::mem::replace(&mut state.fencing, later).into_values().flatten() {
            state.release(extent);
        }
    }

    /// Bytes for the next segment, if there will be none without more memory: it is longer than any that there is, or the
    /// consumer keeps all.
    pub(crate) fn is_stuck(&self) -> Option<usize> {
        let state = self.state();
        let wanted = state.wanted?;
        let kept = state.filling.is_empty() && state.dead.is_empty() && state.fencing.is_empty();
        let too_long = state.bases.iter().all(|base| base.len() / ALIGN * ALIGN < wanted);
        // The thread that waits may not have seen yet what is free by now.
        let none = state.free.iter().all(|free| free.range.len() < wanted);
        (none && (kept || too_long)).then_some(wanted)
    }

    /// Adds memory that the consumer has brought.
    pub(crate) fn add(&self, more: Region) {
        self.state().add(more);
    }

    /// Allocates more, where this can.
    pub(crate) fn grow(&self, bytes: usize) -> onehop_gpu::Result<bool> {
        let Some(gpu) = &self.gpu else { return Ok(false) };
        let more = gpu.arena(bytes)?;
        self.state().add(more);
        Ok(true)
    }

    /// How many bytes it has grown by since it was made.
    pub(crate) fn grown(&self) -> usize {
        self.state().grown
    }
}

impl PoolState {
    fn add(&mut self, more: Region) {
        let bytes = more.len() / ALIGN * ALIGN;
        self.grown += if self.bases.is_empty() { 0 } else { bytes };
        self.free.push(PoolRange { base: self.bases.len(), range: 0..bytes });
        self.bases.push(more);
        self.wanted = None;
    }

    fn release(&mut self, mut extent: PoolRange) {
        let is_beside = |free: &PoolRange| {
            free.base == extent.base
                && (free.range.end == extent.range.start || free.range.start == extent.range.end)
        };
        let (beside, rest) = std::mem::take(&mut self.free).into_iter().partition(is_beside);
        self.free = rest;
        let beside: Vec<PoolRange> = beside;
        for free in beside {
            extent.range = extent.range.start.min(free.range.start)..extent.range.end.max(free.range.end);
        }
        self.free.push(extent);
    }

    /// The shortest extent that is long enough.
    fn cut(&mut self, bytes: usize) -> Option<PoolRange> {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let fits = self.free.iter().enumerate().filter(|(_, free)| free.range.len() >= bytes);
        let (index, _) = fits.min_by_key(|(_, free)| (free.range.len(), free.base, free.range.start))?;
        let PoolRange { base, range } = self.free.swap_remove(index);
        let (taken, rest) = (range.start..range.start + bytes, range.start + bytes..range.end);
        if !rest.is_empty() {
            self.free.push(PoolRange { base, range: rest });
        }
        Some(PoolRange { base, range: taken })
    }
}

impl SegmentMemory for Pool {
    fn take(&self, segment: usize, bytes: usize) -> onehop_load::Result<Option<Placement>> {
        let Some(pool) = self.itself.upgrade() else { return Ok(None) };
        let mut state = self.state();
        let Some(extent) = state.cut(bytes) else {
            state.wanted = Some(bytes.max(1).next_multiple_of(ALIGN));
            return Ok(None);
        };
        state.wanted = None;
        let (name, at) = (extent.base, extent.range.start);
        let lease = Arc::new(Lease { pool, extent });
        let Some(memory) = state.bases.get(name).cloned() else {
            // Dropping the lease takes the lock.
            drop(state);
            return Ok(None);
        };
        state.filling.insert(segment, lease);
        Ok(Some(Placement { memory, name, at }))
    }
}
