//! How the threads of a load that needs a ring are started.

use std::ops::Range;
use std::sync::Arc;

use onehop_os::HostMem;

use super::SLOTS;
use super::direct::{JobSource, Reader, UncachedQueue, slots};
use super::slot_pool::SlotPool;
use super::threads::Filler;
use super::worker_pool::{Shared, WorkerPool};
use crate::error::Result;

/// A load whose threads are being started. They need no GPU to begin with.
pub(super) struct Start<'a> {
    pub(super) pool: WorkerPool,
    pub(super) ring: &'a HostMem,
    /// Bytes of a slot for what the page cache has, and for the parts that are read past it.
    pub(super) slot: usize,
    pub(super) part: usize,
    /// A copy engine is best kept busy from one place; copies that the CPU makes itself go on side by side.
    pub(super) real: bool,
}

impl Start<'_> {
    fn memory(&self, range: Range<usize>) -> Result<HostMem> {
        Ok(self.ring.slice(range).map_err(onehop_gpu::Error::from)?)
    }

    /// The threads that copy out of the page cache. Gives their desks, each with its part of the ring.
    pub(super) fn fillers(
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
                let fill = move |shared: &Shared| filler.run(shared);
                self.pool.spawn("reads cached bytes", fill)?;
            }
        }
        Ok(slot_pools)
    }

    /// The threads that read past the page cache, into the ring's last part. Gives their desks, each with its part of the ring.
    pub(super) fn readers(
        &mut self,
        first: usize,
        threads: usize,
        source: &JobSource,
    ) -> Result<Vec<(Arc<SlotPool>, Range<usize>)>> {
        let together = if self.real { threads } else { threads.min(1) };
        // Copies by the CPU are over when they have been begun: nobody would use a slot more.
        let slots = if self.real { slots(together) } else { together };
        let share = slots * self.part;
        let slot_pools = (0..threads.checked_div(together).unwrap_or(0)).map(|at| first + at * share);
        let slot_pools: Vec<_> =
            slot_pools.map(|start| (Arc::new(SlotPool::new(1, slots)), start..start + share)).collect();
        for (slots, range) in &slot_pools {
            for _ in 0..together {
                let (ring, slots, source) = (self.memory(range.clone())?, slots.clone(), source.clone());
                let reader = Reader { ring, slot_bytes: self.part, slots, source };
                let read = move |shared: &Shared| reader.run(shared);
                self.pool.spawn("reads from the disk", read)?;
            }
        }
        Ok(slot_pools)
    }
}
