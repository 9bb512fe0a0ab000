//! Reads a model's tensors from a drive into one arena, each to its planned place.

use onehop_drive::{GpuJob, Moved, Namespace, Op};
use onehop_files::Blockwise;
use onehop_gpu::{Copier, Mark, Place, Rows};
use onehop_load::{Model, Plan, landing};
use serde::{Serialize, Serializer};

use crate::engine::{Engine, Memory};
use crate::error::Result;
use crate::progress::Progress;
use crate::volume;

/// Slots for data that cannot land directly: one is read into while the other is copied from.
const SLOTS: usize = 2;
const SLOT: u64 = 4 << 20;

/// How the bytes got into the arena.
#[derive(Clone, Default, Debug, Serialize)]
pub struct Landed {
    /// Bytes that the drive wrote to their final place, in whole blocks.
    pub direct_bytes: u64,
    /// Bytes that the drive wrote to host memory, and that were copied from there.
    pub staged_bytes: u64,
    /// Bytes of holes, which are not read.
    pub hole_bytes: u64,
    /// Bytes that the CPU writes after the reads: inline data of the file system, and the zeros of a hole that begins
    /// within a block.
    pub inline_bytes: u64,
    /// The extents of the drive that went to their places as they are: first block, and how many.
    #[serde(rename = "extent_count", serialize_with = "count")]
    pub extents: Vec<(u64, u64)>,
}

fn count<S: Serializer>(extents: &[(u64, u64)], to: S) -> std::result::Result<S::Ok, S::Error> {
    extents.len().serialize(to)
}

impl Landed {
    /// Adds the numbers of another arena.
    pub(crate) fn add(&mut self, other: &Self) {
        self.direct_bytes += other.direct_bytes;
        self.staged_bytes += other.staged_bytes;
        self.hole_bytes += other.hole_bytes;
        self.inline_bytes += other.inline_bytes;
        self.extents.extend(&other.extents);
    }

    fn take(&mut self, parts: &Blockwise) {
        self.hole_bytes += parts.zero_bytes();
        self.inline_bytes += parts.inline_bytes();
    }
}

/// Fills `arena`, which holds zeros, according to the plan. Returns the bytes read, in whole blocks.
///
/// # Errors
/// When the model's files are not on a drive, the drive or the GPU fails, or the caller cancels.
pub fn fill(
    engine: &Engine,
    ns: &Namespace,
    (model, plan): (&Model, &Plan),
    arena: &Memory,
    progress: &dyn Progress,
) -> Result<(Moved, Landed)> {
    let start = std::time::Instant::now();
    let parts = landing::direct(plan, &model.files)?;
    let jobs = volume::jobs(&parts.runs, 0);
    let mut moved = engine.transfer(Op::Read, ns, &jobs, arena, progress)?;
    let extents = parts.runs.iter().map(|run| (run.lba, run.blocks)).collect();
    let mut landed = Landed { extents, ..Landed::default() };
    if arena.is_reached() {
        landed.direct_bytes = moved.bytes;
    }
    landed.take(&parts);
    for (at, data) in &parts.inline {
        arena.region.write(*at as usize, data)?;
    }
    if plan.direct_bytes() < plan.read_bytes {
        let mut slots = StagingSlots::new(engine, ns, plan, arena)?;
        for staged in landing::staged(plan, &model.files, slots.bytes)? {
            let staged = staged?;
            landed.take(&staged.parts);
            moved.add(&slots.pass(&staged, progress)?);
        }
        slots.finish()?;
    }
    landed.staged_bytes = moved.bytes - landed.direct_bytes;
    moved.took = start.elapsed();
    Ok((moved, landed))
}

/// A small ring of slots in host memory.
struct StagingSlots<'a> {
    engine: &'a Engine,
    ns: &'a Namespace,
    memory: Memory,
    copier: Box<dyn Copier>,
    bytes: u64,
    /// The end of the copies out of each slot.
    copied: [Option<Mark>; SLOTS],
    next: usize,
}

impl<'a> StagingSlots<'a> {
    fn new(engine: &'a Engine, ns: &'a Namespace, plan: &Plan, arena: &Memory) -> Result<Self> {
        let bytes = SLOT.next_multiple_of(plan.options.block);
        let memory = engine.reachable(Place::PinnedHost, bytes * SLOTS as u64)?;
        let copier = engine.gpu().copier(&memory.region, &arena.region)?;
        Ok(Self { engine, ns, memory, copier, bytes, copied: [None; SLOTS], next: 0 })
    }

    /// Reads into the next slot, and starts copying from it.
    fn pass(&mut self, staged: &landing::Staged, progress: &dyn Progress) -> Result<Moved> {
        let slot = self.next;
        self.next = (slot + 1) % SLOTS;
        if let Some(mark) = self.copied[slot].take() {
            self.copier.wait(mark)?;
        }
        let base = slot as u64 * self.bytes;
        let jobs: Vec<GpuJob> = volume::jobs(&staged.parts.runs, base);
        let moved = self.engine.transfer(Op::Read, self.ns, &jobs, &self.memory, progress)?;
        for (at, bytes) in &staged.parts.zeros {
            self.memory.region.fill((base + at) as usize, *bytes as usize, 0)?;
        }
        for (at, data) in &staged.parts.inline {
            self.memory.region.write((base + at) as usize, data)?;
        }
        for copy in &staged.copies {
            self.copier.copy(&Rows {
                from: (base + copy.slot) as usize,
                to: copy.to as usize,
                row: copy.row as usize,
                rows: copy.rows as usize,
                step: copy.step as usize,
            })?;
        }
        self.copied[slot] = Some(self.copier.mark()?);
        Ok(moved)
    }

    fn finish(mut self) -> Result<()> {
        for mark in self.copied.into_iter().flatten() {
            self.copier.wait(mark)?;
        }
        Ok(())
    }
}
