//! Loads into memory that is used again: the arena is divided into segments, each of which gets memory when its first chunk
//! is about to be read and there is some.

use std::ops::Range;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};

use onehop_gpu::{Copier, Gpu, Place, Region, Rows};

use super::start::StartingLoad;
use super::worker_pool::{Copiers, LoadLane, LoadShared, Marks, WorkerPool};
use super::{Account, LoadWork, Prepared, RegisteredRing, RingEngine};
use crate::error::{Error, Result};
use crate::plan::{Chunk, Plan};

/// Gives segments their memory.
pub trait SegmentMemory: Send + Sync {
    /// Memory for a segment of `bytes` bytes, or none for now: then it is called again, many times a second. Segments come in
    /// their order.
    ///
    /// # Errors
    /// When there will never be any. The load ends.
    fn take(&self, segment: usize, bytes: usize) -> Result<Option<Placement>>;
}

/// Where a segment lies.
#[derive(Clone)]
pub struct Placement {
    /// An allocation, of which the segment is a part.
    pub memory: Region,
    /// Its name, different for each allocation.
    pub name: usize,
    /// Where the segment starts in it.
    pub at: usize,
}

/// The segments of a load, of which the first ones have memory.
pub struct Segments {
    /// In the plan's addresses.
    ranges: Vec<Range<u64>>,
    placed: Mutex<Vec<Placement>>,
    memory: Arc<dyn SegmentMemory>,
}

impl Segments {
    pub(super) fn new(plan: &Plan, memory: Arc<dyn SegmentMemory>) -> Self {
        Self { ranges: plan.segments.clone(), placed: Mutex::default(), memory }
    }

    fn find(&self, at: u64) -> Option<(usize, &Range<u64>)> {
        let index = self.ranges.partition_point(|range| range.start <= at).checked_sub(1)?;
        Some((index, self.ranges.get(index)?))
    }

    /// Whether the segment of a chunk has memory. It gets some if there is any.
    pub(super) fn admit(&self, chunk: &Chunk) -> Result<bool> {
        let Some(copy) = chunk.copies.first() else { return Ok(true) };
        let (index, range) = self.find(copy.to).ok_or(Error::Incomplete)?;
        let mut placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        if index != placed.len() {
            return Ok(index < placed.len());
        }
        let bytes = (range.end - range.start) as usize;
        let Some(placement) = self.memory.take(index, bytes)? else { return Ok(false) };
        placed.push(placement);
        Ok(true)
    }

    /// The memory for an address of the plan, and the offset in it.
    fn place(&self, at: u64) -> Result<(Placement, usize)> {
        let (index, range) = self.find(at).ok_or(Error::Incomplete)?;
        let placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        let placement = placed.get(index).cloned().ok_or(Error::Incomplete)?;
        let at = placement.at + (at - range.start) as usize;
        Ok((placement, at))
    }

    /// The memory of a tensor that has arrived.
    ///
    /// # Errors
    /// When its segment has no memory yet, or it does not lie within it.
    pub fn region(&self, at: u64, bytes: u64) -> Result<Region> {
        let (Placement { memory, .. }, at) = self.place(at)?;
        Ok(memory.slice(at..at + bytes as usize)?)
    }
}

impl RingEngine<Arc<Segments>> {
    /// Starts to load a plan in segments, each into memory that `memory` gives it.
    ///
    /// # Errors
    /// When the GPU refuses the ring, or the route is cuFile's, which needs one arena.
    pub fn start_in_segments(
        gpu: &Arc<dyn Gpu>,
        plan: &Plan,
        prepared: Prepared,
        memory: Arc<dyn SegmentMemory>,
    ) -> Result<Self> {
        let Prepared { work, ring, ring_cache, slot, part, threads, direct, .. } = prepared;
        let LoadWork { left, arenas, sources, asked, why_cached, .. } = work;
        let Some(RegisteredRing { memory: ring, known }) = ring else {
            let why = "it takes one arena; leave max_bytes out, or load by another route";
            return Err(Error::NotByCuFile { what: "a load in segments".into(), why: why.into() });
        };
        let account =
            Account { threads, ring_bytes: ring.len() as u64, asked, why_cached, ..Account::default() };
        let segments = Arc::new(Segments::new(plan, memory));
        let mut shared = LoadShared::new(sources, left);
        shared.segments = Some(segments.clone());
        let stays = !gpu.simulated();
        let start = StartingLoad { pool: WorkerPool::new(shared), ring: &ring, slot, part, real: stays };
        let started = start.threads(threads, direct)?;
        let known = known.map_or_else(|| gpu.adopt(Place::PinnedHost, ring.clone()), Ok)?;
        let (sender, arrived) = channel();
        let pool = Arc::new(started.open(|range, slot| {
            let copiers = SegmentCopiers::new(gpu.clone(), known.slice(range)?, segments.clone());
            let (copiers, arrived) = (Copiers::Segments(copiers), vec![(0, sender.clone())]);
            Ok(LoadLane { slot, copiers, arenas: arenas.clone(), arrived, passes: None })
        })?);
        let (arena, ring) = (segments, Some(known));
        Ok(Self { ring, ring_cache, stays, ..Self::of(arena, pool, arrived, account) })
    }
}

/// The copiers out of a part of the ring to the segments' memory: one for each allocation.
pub(super) struct SegmentCopiers {
    gpu: Arc<dyn Gpu>,
    /// The part of the ring.
    ring: Region,
    segments: Arc<Segments>,
    copiers: Vec<(usize, Box<dyn Copier>)>,
}

impl SegmentCopiers {
    pub(super) fn new(gpu: Arc<dyn Gpu>, ring: Region, segments: Arc<Segments>) -> Self {
        Self { gpu, ring, segments, copiers: Vec::new() }
    }

    /// The index of the copier to an allocation.
    fn index(&mut self, placement: &Placement) -> Result<usize> {
        if let Some(index) = self.copiers.iter().position(|(name, _)| *name == placement.name) {
            return Ok(index);
        }
        let copier = self.gpu.copier(&self.ring, &placement.memory)?;
        self.copiers.push((placement.name, copier));
        Ok(self.copiers.len() - 1)
    }

    pub(super) fn get(&mut self, index: usize) -> Option<&mut Box<dyn Copier>> {
        self.copiers.get_mut(index).map(|(_, copier)| copier)
    }

    /// Begins to copy what was read into these slots.
    pub(super) fn copy<'a>(
        &mut self,
        slot_bytes: usize,
        full: impl Iterator<Item = (usize, &'a Chunk)>,
    ) -> Result<Marks> {
        let mut rows: Vec<Vec<Rows>> = Vec::new();
        for (slot, chunk) in full {
            let Some(first) = chunk.copies.first() else { continue };
            let (placement, at) = self.segments.place(first.to)?;
            let index = self.index(&placement)?;
            rows.resize_with(rows.len().max(index + 1), Vec::new);
            let Some(rows) = rows.get_mut(index) else { continue };
            rows.extend(chunk.copies.iter().map(|copy| Rows {
                from: slot * slot_bytes + copy.slot as usize,
                // All copies of a chunk go to one segment.
                to: at + (copy.to - first.to) as usize,
                row: copy.row as usize,
                rows: copy.rows as usize,
                step: copy.step as usize,
            }));
        }
        let mut marks = Marks::new();
        for (index, rows) in rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            if let Some((_, copier)) = self.copiers.get_mut(index) {
                copier.copy_all(rows)?;
                marks.push((index, copier.mark()?));
            }
        }
        Ok(marks)
    }
}
