//! Places tensors in the arena, and computes the ranges to read.

use std::cmp::Reverse;

use super::{Error, Landing, Placed, Plan, PlanOptions, PlannedFile, Range, StridedExtent};
use crate::formats::TensorInfo;
use crate::select::Part;

/// Sums of larger offsets could overflow.
const MOST: u64 = 1 << 62;

/// The selected part of a tensor.
pub(super) struct Want<'a> {
    pub file: usize,
    pub tensor: &'a TensorInfo,
    pub part: Part,
}

impl Want<'_> {
    /// Its bytes, without a place.
    fn extent(&self) -> StridedExtent {
        let Part { offset, row, rows, step, .. } = self.part;
        StridedExtent { from: offset, to: 0, row, rows, step }
    }
}

/// Parts that keep their relative distances in the arena.
struct PartRun {
    file: usize,
    wants: std::ops::Range<usize>,
    extent: StridedExtent,
    /// Whether it has gaps around it for the bytes that are read with it.
    gaps: bool,
    landing: Landing,
}

/// The plan for `wants`, which are sorted by file and offset.
pub(super) fn plan(
    files: Vec<PlannedFile>,
    wants: Vec<Want<'_>>,
    options: PlanOptions,
) -> Result<Plan, Error> {
    options.check()?;
    let tensor_bytes = wants.iter().try_fold(0u64, |n, w| n.checked_add(w.part.bytes()));
    let longest = files.iter().map(|f| f.bytes).max().unwrap_or(0);
    let tensor_bytes = tensor_bytes.filter(|n| *n < MOST && longest < MOST).ok_or(Error::TooLarge)?;
    // Empty tensors have no place in a file and would only split runs.
    let (filled, empty): (Vec<_>, Vec<_>) = wants.into_iter().partition(|w| w.part.bytes() > 0);
    let mut runs = runs(&filled, &options);
    grant_gaps(&mut runs, tensor_bytes, &options);
    let (gpu_bytes, segments) = place(&mut runs, &options);
    let mut tensors: Vec<_> = empty.iter().map(|want| placed(want, 0)).collect();
    for run in &runs {
        let wants = filled.get(run.wants.clone()).unwrap_or_default();
        tensors.extend(
            wants.iter().map(|want| placed(want, run.extent.to + (want.part.offset - run.extent.from))),
        );
    }
    let ranges = ranges(&runs, &options);
    let read_bytes = ranges.iter().map(|r| r.read_bytes).sum();
    let extents = runs.into_iter().map(|run| run.extent).collect();
    Ok(Plan { options, files, tensors, tensor_bytes, gpu_bytes, ranges, extents, read_bytes, segments })
}

fn placed(want: &Want<'_>, at: u64) -> Placed {
    let TensorInfo { name, dtype, shape, .. } = want.tensor;
    Placed {
        name: name.clone(),
        dtype: *dtype,
        shape: want.part.shape.clone(),
        file: want.file,
        at,
        bytes: want.part.bytes(),
        whole: *shape == want.part.shape,
    }
}

/// Groups parts that can keep their distances.
fn runs(wants: &[Want<'_>], options: &PlanOptions) -> Vec<PartRun> {
    let mut runs: Vec<PartRun> = Vec::new();
    for (i, want) in wants.iter().enumerate() {
        if let Some(run) = runs.last_mut().filter(|run| joins(run, want, options)) {
            run.wants.end = i + 1;
            run.extent.row = want.extent().end() - run.extent.from;
            run.extent.step = run.extent.row;
        } else {
            let (wants, landing) = (i..i + 1, Landing::Shifted { by: 0 });
            runs.push(PartRun { file: want.file, wants, extent: want.extent(), gaps: false, landing });
        }
    }
    runs
}

/// Whether `want` may join a run. A hole before it that is shorter than its alignment costs no more memory than
/// aligning it anew. No run is longer than a segment.
fn joins(run: &PartRun, want: &Want<'_>, options: &PlanOptions) -> bool {
    let align = options.align_of(want.part.bytes());
    let hole = want.part.offset.checked_sub(run.extent.end());
    run.file == want.file
        && run.extent.rows == 1
        && want.part.rows == 1
        && hole.is_some_and(|hole| hole < align)
        && (want.part.offset - run.extent.from).is_multiple_of(align)
        && options.segment.is_none_or(|most| want.extent().end() - run.extent.from <= most)
}

/// Chooses the runs that land directly: the longest ones, as long as there is memory for their gaps.
fn grant_gaps(runs: &mut [PartRun], tensor_bytes: u64, options: &PlanOptions) {
    let cost = 2 * options.block + options.align.max(options.landing);
    let padding = options.align.saturating_mul(runs.len() as u64);
    let mut budget = (tensor_bytes / 100).max(options.slack).saturating_sub(padding);
    let mut longest: Vec<&mut PartRun> = runs.iter_mut().filter(|run| can_land(run, options)).collect();
    longest.sort_by_key(|run| Reverse(run.extent.row));
    for run in longest {
        if budget < cost {
            break;
        }
        budget -= cost;
        run.gaps = true;
    }
}

/// Whether an arena address exists that suits both the run's tensors and whole blocks.
fn can_land(run: &PartRun, options: &PlanOptions) -> bool {
    options.direct
        && options.segment.is_none()
        && run.extent.rows == 1
        && run.extent.from.is_multiple_of(options.align.min(options.landing))
}

/// Places every run, and returns the length of the arena and its segments.
fn place(runs: &mut [PartRun], options: &PlanOptions) -> (u64, Vec<std::ops::Range<u64>>) {
    // The end of the tensors, and the end of what is read with them.
    let (mut kept, mut landed) = (0u64, 0u64);
    let mut segments = Vec::new();
    let mut start = 0;
    for run in runs {
        let StridedExtent { from, row, rows, .. } = run.extent;
        if run.gaps {
            let head = from % options.block;
            let tail = (from + row).next_multiple_of(options.block) - (from + row);
            let to = congruent(landed.max(kept + head), from, options);
            run.landing = Landing::Direct { at: to - head };
            run.extent.to = to;
            kept = to + row;
            landed = kept + tail;
        } else {
            let mut to = landed.next_multiple_of(options.align);
            if options.segment.is_some_and(|most| to + row * rows - start > most) && landed > start {
                segments.push(start..landed);
                // A byte between two segments keeps copies from reaching over their border.
                to = (landed + 1).next_multiple_of(options.align);
                start = to;
            }
            run.landing = Landing::Shifted { by: to.wrapping_sub(from) % options.landing };
            run.extent.to = to;
            kept = to + row * rows;
            landed = kept;
        }
    }
    if options.segment.is_some() && landed > start {
        segments.push(start..landed);
    }
    (landed, segments)
}

/// The first place from `least` on that is aligned for tensors and for whole blocks of the file.
fn congruent(least: u64, from: u64, options: &PlanOptions) -> u64 {
    let modulus = options.align.max(options.landing);
    let residue = if options.landing > options.align { from % modulus } else { 0 };
    least + (modulus + residue - least % modulus) % modulus
}

/// One range per direct run; ranges that go through a ring are joined where their blocks meet.
fn ranges(runs: &[PartRun], options: &PlanOptions) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let (reads, read_bytes) = reads(&run.extent, options.block);
        let start = run.extent.from / options.block * options.block;
        let end = run.extent.end().next_multiple_of(options.block);
        let (file, landing, extents) = (run.file, run.landing, i..i + 1);
        let next = Range { file, start, end, read_bytes, reads, landing, extents };
        match ranges.last_mut() {
            Some(last) if joined(last, &next) => {
                last.read_bytes += next.end.saturating_sub(last.end);
                last.end = last.end.max(next.end);
                last.extents.end = i + 1;
            }
            _ => ranges.push(next),
        }
    }
    ranges
}

/// Whether two ranges are read as one.
fn joined(last: &Range, next: &Range) -> bool {
    let ring = |r: &Range| matches!(r.landing, Landing::Shifted { .. }) && r.reads == 1;
    last.file == next.file && ring(last) && ring(next) && next.start <= last.end
}

/// The number of reads for an extent, and the bytes that they read.
fn reads(extent: &StridedExtent, block: u64) -> (u64, u64) {
    let blocks = |from: u64| (from / block * block, (from + extent.row).next_multiple_of(block));
    let (start, end) = blocks(extent.from);
    if extent.step - extent.row < block {
        // Rows share blocks.
        return (1, extent.end().next_multiple_of(block) - start);
    }
    if extent.step.is_multiple_of(block) && extent.step > end - start {
        return (extent.rows, extent.rows * (end - start));
    }
    let Some(others) = extent.rows.checked_sub(1) else { return (0, 0) };
    // Where rows lie in blocks repeats itself.
    let period = block / greatest_common_divisor(extent.step, block);
    let of_rows = |rows: u64| {
        (1..=rows).fold((0, 0), |(count, bytes), row| {
            let (_, reached) = blocks(extent.from + (row - 1) * extent.step);
            let (start, end) = blocks(extent.from + row * extent.step);
            (count + u64::from(start > reached), bytes + end - start.max(reached))
        })
    };
    let (periods, rest) = (others / period, others % period);
    let (whole, part) = (if periods > 0 { of_rows(period) } else { (0, 0) }, of_rows(rest));
    (1 + periods * whole.0 + part.0, end - start + periods * whole.1 + part.1)
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row by row.
    fn counted(extent: &StridedExtent, block: u64) -> (u64, u64) {
        let (mut count, mut bytes, mut reached) = (0, 0, 0);
        for row in 0..extent.rows {
            let from = extent.from + row * extent.step;
            let (start, end) = (from / block * block, (from + extent.row).next_multiple_of(block));
            count += u64::from(row == 0 || start > reached);
            bytes += end - if row == 0 { start } else { start.max(reached) };
            reached = end;
        }
        (count, bytes)
    }

    #[test]
    fn reads_of_many_rows_are_counted_by_the_period_of_their_places() {
        let mut state = 1_u64;
        let mut below = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % end
        };
        for _ in 0..3000 {
            let block = [1, 8, 12, 512][below(4) as usize];
            let row = 1 + below(3 * block);
            let (rows, step) = (1 + below(4 * block + 3), row + below(4 * block));
            let extent = StridedExtent { from: below(5 * block), to: 0, row, rows, step };
            if step - row >= block {
                assert_eq!(reads(&extent, block), counted(&extent, block), "{extent:?} in blocks of {block}");
            }
        }
        // A file may claim any length.
        let extent = StridedExtent { from: 8, to: 0, row: 1639, rows: 1 << 47, step: 8195 };
        assert!(reads(&extent, 4096).0 > 1 << 46);
    }
}
