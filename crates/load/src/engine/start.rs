//! Starts the threads of a load that uses a ring.

use std::ops::Range;
use std::sync::Arc;

use onehop_os::HostMem;

use super::SLOTS;
use super::direct::{JobSource, ReaderThread, UncachedQueue, slots};
use super::slot_pool::SlotPool;
use super::threads::Filler;
use super::worker_pool::{LoadLane, LoadShared, WorkerPool};
use crate::error::Result;

/// A load whose threads are being started. They need no GPU at first.
pub(super) struct StartingLoad<'a> {
    pub(super) pool: WorkerPool,
    pub(super) ring: &'a HostMem,
    /// Slot size for cached data, and for parts that are read past the cache.
    pub(super) slot: usize,
    pub(super) part: usize,
    /// A real copy engine is best driven from one place; copies by the CPU run in parallel.
    pub(super) real: bool,
}

/// A load whose threads read, and wait for copiers.
pub(super) struct StartedLoad {
    pool: WorkerPool,
    /// Each with its part of the ring and the size of its slots.
    slot_pools: Vec<(Arc<SlotPool>, Range<usize>, usize)>,
}

impl StartedLoad {
    pub(super) fn shared(&self) -> Arc<LoadShared> {
        self.pool.shared.clone()
    }

    /// Gives each part of the ring its copiers.
    pub(super) fn open(self, lane: impl Fn(Range<usize>, usize) -> Result<LoadLane>) -> Result<WorkerPool> {
        for (slots, range, slot) in self.slot_pools {
            slots.open(lane(range, slot)?);
        }
        Ok(self.pool)
    }
}

impl StartingLoad<'_> {
    /// Starts `threads` threads that share the work, and `direct` that read past the page cache.
    pub(super) fn threads(mut self, threads: usize, direct: usize) -> Result<StartedLoad> {
        let (disk, found) = UncachedQueue::new();
        let fillers = self.fillers(threads, (direct > 0).then_some(disk))?;
        let source = if threads == 0 { JobSource::All } else { found };
        let readers = self.readers(threads * SLOTS * self.slot, direct, &source)?;
        let (slot, part) = (self.slot, self.part);
        let fillers = fillers.into_iter().map(|(slots, range)| (slots, range, slot));
        let readers = readers.into_iter().map(|(slots, range)| (slots, range, part));
        Ok(StartedLoad { pool: self.pool, slot_pools: fillers.chain(readers).collect() })
    }

    fn memory(&self, range: Range<usize>) -> Result<HostMem> {
        Ok(self.ring.slice(range).map_err(onehop_gpu::Error::from)?)
    }

    /// Starts the threads that copy from the page cache. Returns their slot pools, each with its part of the ring.
    fn fillers(
        &mut self,
        threads: usize,
        disk: Option<UncachedQueue>,
    ) -> Result<Vec<(Arc<SlotPool>, Range<usize>)>> {
        let fillers = if self.real { threads } else { threads.min(1) };
        let share = fillers * SLOTS * self.slot;
        let starts = (0..threads * SLOTS * self.slot).step_by(share.max(1));
        let slot_pools: Vec<_> =
            starts.map(|start| (Arc::new(SlotPool::new(fillers, SLOTS)), start..start + share)).collect();
        for (slots, range) in &slot_pools {
            for index in 0..fillers {
                let (ring, slots, disk) = (self.memory(range.clone())?, slots.clone(), disk.clone());
                let filler = Filler { index, ring, slot_bytes: self.slot, slots, disk };
                let fill = move |shared: &LoadShared| filler.run(shared);
                self.pool.spawn("reads cached bytes", fill)?;
            }
        }
        Ok(slot_pools)
    }

    /// Starts the threads that read past the page cache, into the last part of the ring. Returns their slot pools, each
    /// with its part of the ring.
    fn readers(
        &mut self,
        first: usize,
        threads: usize,
        source: &JobSource,
    ) -> Result<Vec<(Arc<SlotPool>, Range<usize>)>> {
        let together = if self.real { threads } else { threads.min(1) };
        // Copies by the CPU end when they are submitted, so spare slots would be unused.
        let slots = if self.real { slots(together) } else { together };
        let share = slots * self.part;
        let slot_pools = (0..threads.checked_div(together).unwrap_or(0)).map(|at| first + at * share);
        let slot_pools: Vec<_> =
            slot_pools.map(|start| (Arc::new(SlotPool::new(1, slots)), start..start + share)).collect();
        let all: Arc<[_]> = slot_pools.iter().map(|(slots, _)| slots.clone()).collect();
        for (slots, range) in &slot_pools {
            for _ in 0..together {
                let (ring, slots, source) = (self.memory(range.clone())?, slots.clone(), source.clone());
                let reader = ReaderThread { ring, slot_bytes: self.part, slots, all: all.clone(), source };
                let read = move |shared: &LoadShared| reader.run(shared);
                self.pool.spawn("reads from the disk", read)?;
            }
        }
        Ok(slot_pools)
    }
}
