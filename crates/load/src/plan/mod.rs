//! The plan of a load: where every tensor lies in one range of GPU memory, the arena, and which blocks of which files
//! are read for it.
//!
//! Tensors start at any byte of a file, but drives and `O_DIRECT` return whole blocks. A *run* is a group of tensors
//! that can keep their distances, because these are multiples of the tensors' alignment: it has the same layout in the
//! arena as in the file. So the whole blocks of a run can be moved to their final place, each byte once
//! ([`Landing::Direct`]), if
//! - the distance between arena and file is a multiple of what the mover can address ([`PlanOptions::landing`]), and
//! - the other bytes in the run's first and last block, which are read with it, fall into gaps of the arena.
//!
//! Gaps cost memory, so only some runs get them: the longest, until [`PlanOptions::slack`] is used up. The others are
//! [`Landing::Shifted`]: their blocks are read into a ring, and the tensors' bytes are copied from there. A ring in
//! host memory does this for any of them at no cost (which is how `cpu/pinned` and `cpu/cached` always work); routes
//! that write directly into GPU memory need a small ring there.

mod chunks;
mod error;
mod layout;
mod shares;

use std::ops::Range as Indices;

use onehop_gpu::Gpu;
use serde::{Serialize, Serializer};

pub use chunks::{Arenas, Chunk, Chunks, Copy, Pass, Read, read_bytes};
pub use error::Error;
pub use shares::Share;

use crate::dtype::Dtype;
use crate::model::{Model, Tensor};
use crate::select::{Part, Selection};

/// Options of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlanOptions {
    /// Alignment of tensors that are at least this long. 256 is what DLPack requires of a GPU tensor, and enough for
    /// every vector load and for TMA (128).
    pub align: u64,
    /// Least alignment of shorter tensors, which otherwise have that of the next power of two. This keeps thousands of scalars
    /// (the scales of quantised models) together as in the file, and no load of a tensor is wider than the tensor.
    pub small: u64,
    /// Unit of reads: the drive's logical blocks, or the pages of `O_DIRECT`.
    pub block: u64,
    /// Alignment of the addresses to which a mover can write whole blocks: 8 for an NVMe drive, whose PRPs and SGLs address 32-bit
    /// words, but only whole 64-bit words of a read show whether they have arrived; 512 or 4096 for `O_DIRECT`.
    pub landing: u64,
    /// Whether data may land directly at all. Routes that work through a ring are better without: no gaps, and ranges
    /// are joined across runs.
    pub direct: bool,
    /// Bytes of the arena that gaps may take, in addition to a hundredth of the tensors' bytes; matters for small
    /// models.
    pub slack: u64,
    /// GPU memory that is needed in addition to the arena during the load.
    pub staging: u64,
    /// Bytes of a segment at most, if the arena is divided into segments: each has memory of its own, which may be freed
    /// before the next one is filled. A longer tensor has a segment to itself. Nothing lands directly then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub segment: Option<u64>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            align: 256,
            small: 1,
            block: 4096,
            landing: 8,
            direct: true,
            slack: 256 << 10,
            staging: 0,
            segment: None,
        }
    }
}

impl PlanOptions {
    /// Options for a route that works through a ring in host memory.
    #[must_use]
    pub fn ring() -> Self {
        Self { direct: false, ..Self::default() }
    }

    /// The same, in segments of at most this many bytes.
    #[must_use]
    pub fn in_segments(bytes: u64) -> Self {
        Self { segment: Some(bytes.max(1)), ..Self::ring() }
    }

    /// Alignment of a tensor of this size.
    #[must_use]
    pub fn align_of(&self, bytes: u64) -> u64 {
        if bytes >= self.align {
            self.align
        } else {
            bytes.next_power_of_two().max(self.small).min(self.align)
        }
    }

    fn check(&self) -> Result<(), Error> {
        let powers =
            [("align", self.align), ("small", self.small), ("block", self.block), ("landing", self.landing)];
        for (what, value) in powers {
            if !value.is_power_of_two() || value > MAX_POWER {
                return Err(Error::NoPower { what, value, most: MAX_POWER });
            }
        }
        if self.landing > self.block {
            return Err(Error::Landing { landing: self.landing, block: self.block });
        }
        Ok(())
    }
}

/// Largest alignment and block: a huge page.
const MAX_POWER: u64 = 2 << 20;

/// A file of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedFile {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// A tensor, or a rank's part of one, and its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Placed {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Index of its file in the plan.
    pub file: usize,
    /// Offset in the arena.
    pub at: u64,
    /// Its size.
    pub bytes: u64,
    /// Whether this is the whole tensor of the model.
    pub whole: bool,
}

/// How the blocks of a range get into the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Landing {
    /// All of them unchanged, to the arena from `at` on. Bytes outside of tensors fall into gaps.
    Direct {
        /// Place of the range's first byte.
        at: u64,
    },
    /// Through a ring: only the extents may be written, each `by` bytes (modulo the landing alignment) off the place
    /// where whole blocks could go. `by` is that of the first extent; 0 means that the range has no gaps.
    Shifted {
        /// The distance.
        by: u64,
    },
}

/// Blocks of a file that are read for tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Range {
    /// Index of the file in the plan.
    pub file: usize,
    /// The first byte, a multiple of the block.
    pub start: u64,
    /// The end, a multiple of the block, possibly behind the end of the file.
    pub end: u64,
    /// Bytes that are read, in whole blocks: less than the range if rows are far apart.
    pub read_bytes: u64,
    /// Number of reads, before chunking.
    pub reads: u64,
    /// How the blocks get into the arena.
    pub landing: Landing,
    /// Its extents in the plan.
    #[serde(rename = "pieces", serialize_with = "count")]
    pub extents: Indices<usize>,
}

fn count<S: Serializer>(range: &Indices<usize>, to: S) -> Result<S::Ok, S::Error> {
    range.len().serialize(to)
}

/// Bytes that go from a file to the arena: rows at equal distances in the file, packed in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StridedExtent {
    /// Offset of the first row in the file.
    pub from: u64,
    /// Offset in the arena.
    pub to: u64,
    /// Bytes of a row.
    pub row: u64,
    /// Number of rows.
    pub rows: u64,
    /// Distance between rows in the file.
    pub step: u64,
}

impl StridedExtent {
    fn end(&self) -> u64 {
        self.from + (self.rows - 1) * self.step + self.row
    }
}

/// The plan of a load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Its options.
    pub options: PlanOptions,
    /// The model's files.
    pub files: Vec<PlannedFile>,
    /// The tensors, by file and in the order of their bytes.
    pub tensors: Vec<Placed>,
    /// Total bytes of the tensors.
    pub tensor_bytes: u64,
    /// Bytes of the arena, whose address must be a multiple of [`Plan::arena_align`].
    pub gpu_bytes: u64,
    /// The ranges to read, by file and in the order of their bytes.
    pub ranges: Vec<Range>,
    /// The extents of the ranges.
    #[serde(skip)]
    pub extents: Vec<StridedExtent>,
    /// Bytes to read.
    pub read_bytes: u64,
    /// The segments of the arena, in order; none if it is not divided. Their addresses only number bytes: no memory is as long.
    #[serde(skip)]
    pub segments: Vec<Indices<u64>>,
}

/// Whether a load fits into GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Peak memory: the arena and what is needed in addition.
    pub peak_gpu_bytes: u64,
    /// Free memory.
    pub free_gpu_bytes: u64,
    /// Whether that is enough.
    pub fits: bool,
    /// Missing memory.
    pub missing_bytes: u64,
}

fn segment_of(segments: &[Indices<u64>], at: u64) -> usize {
    segments.partition_point(|segment| segment.start <= at).saturating_sub(1)
}

fn planned(model: &Model) -> Vec<PlannedFile> {
    model.files.iter().map(|f| PlannedFile { name: f.name().into(), bytes: f.bytes() }).collect()
}

impl Plan {
    /// Plans a load of the selected tensors.
    ///
    /// # Errors
    /// When the options contradict each other, a pattern matches no tensor, or a tensor cannot be sliced as requested.
    pub fn new(model: &Model, selection: &Selection, options: PlanOptions) -> Result<Self, Error> {
        let selector = selection.selector();
        selector.check(&model.tensors)?;
        let mut wants = Vec::new();
        for tensor in model.tensors.iter().filter(|t| selector.wants(&t.info)) {
            let part = selector.part(&tensor.info)?;
            wants.push(layout::Want { file: tensor.file, tensor: &tensor.info, part });
        }
        layout::plan(planned(model), wants, options)
    }

    /// Plans a load of a part of one tensor.
    ///
    /// # Errors
    /// When the options contradict each other.
    pub fn of_part(model: &Model, tensor: &Tensor, part: Part, options: PlanOptions) -> Result<Self, Error> {
        let want = layout::Want { file: tensor.file, tensor: &tensor.info, part };
        layout::plan(planned(model), vec![want], options)
    }

    /// Which segment holds this byte of the arena; 0 if it is not divided.
    #[must_use]
    pub fn segment_of(&self, at: u64) -> usize {
        segment_of(&self.segments, at)
    }

    /// Required alignment of the arena's address.
    #[must_use]
    pub fn arena_align(&self) -> u64 {
        self.options.align.max(self.options.landing)
    }

    /// The gaps between tensors in the arena, and the space behind them.
    #[must_use]
    pub fn gaps(&self) -> Vec<Indices<u64>> {
        let mut taken: Vec<_> = self.tensors.iter().map(|t| t.at..t.at + t.bytes).collect();
        taken.sort_unstable_by_key(|range| range.start);
        let (mut gaps, mut end) = (Vec::new(), 0);
        for range in taken {
            if range.start > end {
                gaps.push(end..range.start);
            }
            end = end.max(range.end);
        }
        gaps.push(end..u64::MAX);
        gaps
    }

    /// Whether it fits into this much memory.
    #[must_use]
    pub fn fit(&self, free_gpu_bytes: u64) -> Fit {
        let peak_gpu_bytes = self.gpu_bytes.saturating_add(self.options.staging);
        let missing_bytes = peak_gpu_bytes.saturating_sub(free_gpu_bytes);
        Fit { peak_gpu_bytes, free_gpu_bytes, fits: missing_bytes == 0, missing_bytes }
    }

    /// Whether it fits into the free memory of a GPU; `None` if the GPU does not report it.
    ///
    /// # Errors
    /// When the GPU does not respond.
    pub fn fit_on(&self, gpu: &dyn Gpu) -> onehop_gpu::Result<Option<Fit>> {
        Ok(gpu.free_memory()?.map(|free| self.fit(free)))
    }

    /// Cuts the plan into chunks of at most `bytes` bytes of reading, for the slots of a ring.
    ///
    /// # Errors
    /// When a chunk would be smaller than a block.
    pub fn chunks(&self, bytes: u64) -> Result<Chunks, Error> {
        Chunks::new(&[self], bytes)
    }

    /// The same for several plans of the same files: what more than one of them needs is read once. The copies go to their
    /// arenas as [`Arenas`] counts.
    ///
    /// # Errors
    /// As for [`Plan::chunks`].
    pub fn chunks_of_all(plans: &[&Self], bytes: u64) -> Result<Chunks, Error> {
        Chunks::new(plans, bytes)
    }

    /// Bytes that can land directly.
    #[must_use]
    pub fn direct_bytes(&self) -> u64 {
        let direct = |r: &&Range| matches!(r.landing, Landing::Direct { .. });
        self.ranges.iter().filter(direct).map(|r| r.read_bytes).sum()
    }
}
