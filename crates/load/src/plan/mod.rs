//! The plan of a load: where every tensor comes to lie in one piece of GPU memory, the arena, and which blocks of which
//! files are read for it.
//!
//! Tensors start at any byte of a file; drives and `O_DIRECT` give whole blocks. A *run* is a stretch of tensors that
//! can keep their distances, because these are multiples of the tensors' alignment: in the arena it lies as in the
//! file. So the whole blocks of a run can be moved to where they belong, each byte once ([`Landing::Direct`]), if
//!
//! - the distance between arena and file is a multiple of what the mover can address ([`Options::landing`]), and
//! - the bytes beside the run in its first and last block, which are read with it, fall into gaps of the arena.
//!
//! Gaps cost memory, so only so many runs get them: the longest, until [`Options::slack`] is spent. The others are
//! [`Landing::Shifted`]: their blocks go to a ring first, and the bytes alone from there to their places. A ring in
//! host memory does this for any of them at no cost (it is how `cpu/pinned` and `cpu/cached` always work); routes that
//! write straight into GPU memory need a small ring there.

mod chunks;
mod error;
mod layout;

use std::ops::Range as Indices;

use onehop_gpu::Gpu;
use serde::{Serialize, Serializer};

pub use chunks::{Chunk, Chunks, Copy, Read};
pub use error::Error;

use crate::dtype::Dtype;
use crate::model::{Model, Tensor};
use crate::select::{Part, Selection};

/// How a plan is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Options {
    /// What the address of every tensor is a multiple of that is as long. 256 is what DLPack asks of a GPU tensor, and
    /// enough for every vector load and for TMA (128).
    pub align: u64,
    /// The same for shorter tensors, if the power of two that holds them is not more. So thousands of scalars (the
    /// scales of quantised models) stay together as they are in the file, and no load of a tensor is wider than it is.
    pub small: u64,
    /// What is read in: the drive's logical blocks, or the pages of `O_DIRECT`.
    pub block: u64,
    /// What the address must be a multiple of at which a mover may put whole blocks: 4 for an NVMe drive (PRPs and
    /// SGLs address 32-bit words), 512 or 4096 for `O_DIRECT`.
    pub landing: u64,
    /// Whether anything is to land directly at all. Routes that work through a ring do better without: no gaps, and
    /// ranges that are joined across runs.
    pub direct: bool,
    /// Bytes of the arena that gaps may take, beyond a hundredth of the tensors' own: what counts for small models.
    pub slack: u64,
    /// GPU memory that is needed beside the arena while it is filled.
    pub staging: u64,
    /// Bytes of a segment at most, if the arena is divided into such: each has memory of its own, and may be gone before the
    /// next one is filled. A tensor that is longer has a segment to itself. Nothing lands directly then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub segment: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            align: 256,
            small: 1,
            block: 4096,
            landing: 4,
            direct: true,
            slack: 256 << 10,
            staging: 0,
            segment: None,
        }
    }
}

impl Options {
    /// For a route that works through a ring in host memory.
    #[must_use]
    pub fn ring() -> Self {
        Self { direct: false, ..Self::default() }
    }

    /// The same, in segments of at most so many bytes.
    #[must_use]
    pub fn in_segments(bytes: u64) -> Self {
        Self { segment: Some(bytes.max(1)), ..Self::ring() }
    }

    /// What the address of a tensor of so many bytes is a multiple of.
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

/// The largest alignment and block: a huge page.
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
    /// What its elements are.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Which of the plan's files it comes out of.
    pub file: usize,
    /// Where it starts in the arena.
    pub at: u64,
    /// How many bytes it has.
    pub bytes: u64,
    /// Whether this is all of the model's tensor.
    pub whole: bool,
}

/// How the blocks of a range may come to the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Landing {
    /// All of them as they are, to the arena from `at` on. What is read beside the tensors falls into gaps.
    Direct {
        /// Where the range's first byte goes.
        at: u64,
    },
    /// Through a ring: only the pieces may be written, each `by` bytes (modulo the landing alignment) off the place
    /// where whole blocks could go. `by` is that of the first piece; 0 says that it was given no gaps.
    Shifted {
        /// How far off.
        by: u64,
    },
}

/// Blocks of a file that are read for tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Range {
    /// Which of the plan's files.
    pub file: usize,
    /// The first byte, a multiple of the block.
    pub start: u64,
    /// The end, a multiple of the block, perhaps beyond that of the file.
    pub end: u64,
    /// Bytes that are read, in whole blocks: fewer than lie between start and end where rows lie far apart.
    pub read_bytes: u64,
    /// How many reads that takes, before anything is cut into chunks.
    pub reads: u64,
    /// How they come to the arena.
    pub landing: Landing,
    /// Which of the plan's pieces they hold.
    #[serde(serialize_with = "count")]
    pub pieces: Indices<usize>,
}

fn count<S: Serializer>(range: &Indices<usize>, to: S) -> Result<S::Ok, S::Error> {
    range.len().serialize(to)
}

/// Bytes that go from a file to the arena: rows at equal distances in the file, packed in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Piece {
    /// Where the first row starts in the file.
    pub from: u64,
    /// Where it goes in the arena.
    pub to: u64,
    /// Bytes of a row.
    pub row: u64,
    /// How many rows.
    pub rows: u64,
    /// From row to row in the file.
    pub step: u64,
}

impl Piece {
    fn end(&self) -> u64 {
        self.from + (self.rows - 1) * self.step + self.row
    }
}

/// What a load will do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// How it was made.
    pub options: Options,
    /// The files, as the model has them.
    pub files: Vec<PlannedFile>,
    /// The tensors: those of each file in the order of their bytes.
    pub tensors: Vec<Placed>,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of the arena. Its address must be a multiple of [`Plan::arena_align`].
    pub gpu_bytes: u64,
    /// What is read, file by file and in the order of the bytes.
    pub ranges: Vec<Range>,
    /// What the ranges hold.
    #[serde(skip)]
    pub pieces: Vec<Piece>,
    /// Bytes that are read.
    pub read_bytes: u64,
    /// The segments of the arena, in order; none where it is one. Their addresses are only a way to count: no memory is as long.
    #[serde(skip)]
    pub segments: Vec<Indices<u64>>,
}

/// Whether a load fits into GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// The most that is taken at any moment: the arena and what is needed beside it.
    pub peak_gpu_bytes: u64,
    /// What there is.
    pub free_gpu_bytes: u64,
    /// Whether that is enough.
    pub fits: bool,
    /// What is missing.
    pub missing_bytes: u64,
}

fn segment_of(segments: &[Indices<u64>], at: u64) -> usize {
    segments.partition_point(|segment| segment.start <= at).saturating_sub(1)
}

fn planned(model: &Model) -> Vec<PlannedFile> {
    model.files.iter().map(|f| PlannedFile { name: f.name().into(), bytes: f.bytes() }).collect()
}

impl Plan {
    /// The plan for what is selected of a model.
    ///
    /// # Errors
    /// When the options contradict each other, a pattern matches no tensor, or a tensor cannot be cut as asked.
    pub fn new(model: &Model, selection: &Selection, options: Options) -> Result<Self, Error> {
        let selector = selection.selector()?;
        selector.check(&model.tensors)?;
        let mut wants = Vec::new();
        for tensor in model.tensors.iter().filter(|t| selector.wants(&t.info)) {
            let part = selector.part(&tensor.info)?;
            wants.push(layout::Want { file: tensor.file, tensor: &tensor.info, part });
        }
        layout::plan(planned(model), wants, options)
    }

    /// The plan for a part of one tensor.
    ///
    /// # Errors
    /// When the options contradict each other.
    pub fn of_part(model: &Model, tensor: &Tensor, part: Part, options: Options) -> Result<Self, Error> {
        let want = layout::Want { file: tensor.file, tensor: &tensor.info, part };
        layout::plan(planned(model), vec![want], options)
    }

    /// Which segment holds this byte of the arena; 0 where the arena is one.
    #[must_use]
    pub fn segment_of(&self, at: u64) -> usize {
        segment_of(&self.segments, at)
    }

    /// What the arena's address must be a multiple of.
    #[must_use]
    pub fn arena_align(&self) -> u64 {
        self.options.align.max(self.options.landing)
    }

    /// What the tensors leave free in the arena, and all behind it.
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

    /// Whether it fits into so much memory.
    #[must_use]
    pub fn fit(&self, free_gpu_bytes: u64) -> Fit {
        let peak_gpu_bytes = self.gpu_bytes.saturating_add(self.options.staging);
        let missing_bytes = peak_gpu_bytes.saturating_sub(free_gpu_bytes);
        Fit { peak_gpu_bytes, free_gpu_bytes, fits: missing_bytes == 0, missing_bytes }
    }

    /// Whether it fits into the memory that a GPU has left; none for a GPU that does not say.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn fit_on(&self, gpu: &dyn Gpu) -> onehop_gpu::Result<Option<Fit>> {
        Ok(gpu.free_memory()?.map(|free| self.fit(free)))
    }

    /// The plan in pieces of at most `bytes` bytes of reading, for the slots of a ring.
    ///
    /// # Errors
    /// When not even a block fits.
    pub fn chunks(&self, bytes: u64) -> Result<Chunks, Error> {
        Chunks::new(self, bytes)
    }

    /// Bytes that can land directly.
    #[must_use]
    pub fn direct_bytes(&self) -> u64 {
        let direct = |r: &&Range| matches!(r.landing, Landing::Direct { .. });
        self.ranges.iter().filter(direct).map(|r| r.read_bytes).sum()
    }
}
