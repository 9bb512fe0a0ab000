//! The memory of a bounded stream. Segments are cut from it, and freed with the last of their tensors.
//!
//! On the CPU it may be reused at once. A GPU may still read it for copies that the consumer has begun: it waits for an
//! event that is recorded on the consumer's stream after the tensors are freed ([`Pool::dead`], [`Pool::fenced`]).
//!
//! A consumer that keeps tensors would wait forever for the next one. [`Pool::is_stuck`] detects it; the memory grows.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use onehop_gpu::{Gpu, Region};
use onehop_load::engine::{Placement, SegmentMemory};

/// The alignment of each segment.
const ALIGN: usize = 512;

/// A range of one of the allocations.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolRange {
    base: usize,
    range: Range<usize>,
}

pub(crate) struct Pool {
    itself: Weak<Pool>,
    /// Allocates more of it; none if the consumer does.
    gpu: Option<Arc<dyn Gpu>>,
    /// Whether freed memory must be fenced before reuse.
    fences: bool,
    process: u32,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    /// The allocations.
    bases: Vec<Region>,
    /// Unused ranges; neighbours are joined.
    free: Vec<PoolRange>,
    /// Ranges that wait for a fence to be recorded, and to pass.
    dead: Vec<PoolRange>,
    fencing: BTreeMap<u64, Vec<PoolRange>>,
    fences: u64,
    /// Segments that are being filled.
    filling: BTreeMap<usize, Arc<Lease>>,
    /// The bytes that a thread waits for.
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
        self.pool.recycle(self.extent.clone());
    }
}

impl Pool {
    /// Memory of the CPU, initially `first`.
    pub(crate) fn of_cpu(gpu: Arc<dyn Gpu>, first: Region) -> Arc<Self> {
        let pool = Self::empty(Some(gpu));
        pool.state().add(first);
        pool
    }

    /// GPU memory that Python has allocated. The consumer brings more of it if needed, and records fences.
    pub(crate) fn of_borrowed(first: Region) -> Arc<Self> {
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

    fn recycle(&self, extent: PoolRange) {
        if self.process != std::process::id() {
            // A child loads nothing into it, and another thread may have held the lock at the fork.
            return;
        }
        let mut state = self.state();
        if self.fences {
            state.dead.push(extent);
        } else {
            state.release(extent);
        }
    }

    /// The lease of a segment being filled.
    pub(crate) fn lease(&self, segment: usize) -> Option<Arc<Lease>> {
        self.state().filling.get(&segment).cloned()
    }

    /// All tensors of a segment were handed out: now only they keep it.
    pub(crate) fn filled(&self, segment: usize) {
        let lease = self.state().filling.remove(&segment);
        drop(lease);
    }

    /// No segment is being filled now.
    pub(crate) fn close(&self) {
        let leases = std::mem::take(&mut self.state().filling);
        drop(leases);
    }

    /// The number of the fence after which all memory freed so far may be reused; none if none was ever freed. It is
    /// the same until more is freed, so an interrupted consumer loses none.
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

    /// The GPU has passed that fence, and all before it.
    pub(crate) fn fenced(&self, fence: u64) {
        let mut state = self.state();
        let later = state.fencing.split_off(&(fence + 1));
        for extent in std::mem::replace(&mut state.fencing, later).into_values().flatten() {
            state.release(extent);
        }
    }

    /// The bytes of the next segment, if it needs more memory: it is longer than all allocations, or the consumer keeps
    /// everything.
    pub(crate) fn is_stuck(&self) -> Option<usize> {
        let state = self.state();
        let wanted = state.wanted?;
        let kept = state.filling.is_empty() && state.dead.is_empty() && state.fencing.is_empty();
        let too_long = state.bases.iter().all(|base| base.len() / ALIGN * ALIGN < wanted);
        // The waiting thread may not have seen what is free now.
        let none = state.free.iter().all(|free| free.range.len() < wanted);
        (none && (kept || too_long)).then_some(wanted)
    }

    /// Adds memory from the consumer.
    pub(crate) fn add(&self, more: Region) {
        self.state().add(more);
    }

    /// Allocates more, if this can.
    pub(crate) fn grow(&self, bytes: usize) -> onehop_gpu::Result<bool> {
        let Some(gpu) = &self.gpu else { return Ok(false) };
        let more = gpu.arena(bytes)?;
        self.state().add(more);
        Ok(true)
    }

    /// The bytes that it has grown by.
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
        let is_adjacent = |free: &PoolRange| {
            free.base == extent.base
                && (free.range.end == extent.range.start || free.range.start == extent.range.end)
        };
        let (adjacent, rest) = std::mem::take(&mut self.free).into_iter().partition(is_adjacent);
        self.free = rest;
        let adjacent: Vec<PoolRange> = adjacent;
        for free in adjacent {
            extent.range = extent.range.start.min(free.range.start)..extent.range.end.max(free.range.end);
        }
        self.free.push(extent);
    }

    /// Cuts from the shortest range that fits.
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
