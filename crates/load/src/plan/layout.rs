//! Places tensors in the arena, and computes the ranges to read.

use std::cmp::Reverse;

use super::{Error, Landing, Piece, Placed, Plan, PlanOptions, PlannedFile, Range};
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
    fn piece(&self) -> Piece {
        let Part { offset, row, rows, step, .. } = self.part;
        Piece { from: offset, to: 0, row, rows, step }
    }
}

/// Parts that keep their relative distances in the arena.
struct PartRun {
    file: usize,
    wants: std::ops::Range<usize>,
    piece: Piece,
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
            wants.iter().map(|want| placed(want, run.piece.to + (want.part.offset - run.piece.from))),
        );
    }
    let ranges = ranges(&runs, &options);
    let read_bytes = ranges.iter().map(|r| r.read_bytes).sum();
    let pieces = runs.into_iter().map(|run| run.piece).collect();
    Ok(Plan { options, files, tensors, tensor_bytes, gpu_bytes, ranges, pieces, read_bytes, segments })
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
            run.piece.row = want.piece().end() - run.piece.from;
            run.piece.step = run.piece.row;
        } else {
            let (wants, landing) = (i..i + 1, Landing::Shifted { by: 0 });
            runs.push(PartRun { file: want.file, wants, piece: want.piece(), gaps: false, landing });
        }
    }
    runs
}

/// Whether `want` may join a run. A hole before it that is shorter than its alignment costs no more memory than
/// aligning it anew. No run is longer than a segment.
fn joins(run: &PartRun, want: &Want<'_>, options: &PlanOptions) -> bool {
    let align = options.align_of(want.part.bytes());
    let hole = want.part.offset.checked_sub(run.piece.end());
    run.file == want.file
        && run.piece.rows == 1
        && want.part.rows == 1
        && hole.is_some_and(|hole| hole < align)
        && (want.part.offset - run.piece.from).is_multiple_of(align)
        && options.segment.is_none_or(|most| want.piece().end() - run.piece.from <= most)
}

/// Chooses the runs that land directly: the longest ones, as long as there is memory for their gaps.
fn grant_gaps(runs: &mut [PartRun], tensor_bytes: u64, options: &PlanOptions) {
    let cost = 2 * options.block + options.align.max(options.landing);
    let padding = options.align.saturating_mul(runs.len() as u64);
    let mut budget = (tensor_bytes / 100).max(options.slack).saturating_sub(padding);
    let mut longest: Vec<&mut PartRun> = runs.iter_mut().filter(|run| can_land(run, options)).collect();
    longest.sort_by_key(|run| Reverse(run.piece.row));
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
        && run.piece.rows == 1
        && run.piece.from.is_multiple_of(options.align.min(options.landing))
}

/// Places every run, and returns the length of the arena and its segments.
fn place(runs: &mut [PartRun], options: &PlanOptions) -> (u64, Vec<std::ops::Range<u64>>) {
    // The end of the tensors, and the end of what is read with them.
    let (mut kept, mut landed) = (0u64, 0u64);
    let mut segments = Vec::new();
    let mut start = 0;
    for run in runs {
        let Piece { from, row, rows, .. } = run.piece;
        if run.gaps {
            let head = from % options.block;
            let tail = (from + row).next_multiple_of(options.block) - (from + row);
            let to = congruent(landed.max(kept + head), from, options);
            run.landing = Landing::Direct { at: to - head };
            run.piece.to = to;
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
            run.piece.to = to;
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
        let (reads, read_bytes) = reads(&run.piece, options.block);
        let start = run.piece.from / options.block * options.block;
        let end = run.piece.end().next_multiple_of(options.block);
        let (file, landing, pieces) = (run.file, run.landing, i..i + 1);
        let next = Range { file, start, end, read_bytes, reads, landing, pieces };
        match ranges.last_mut() {
            Some(last) if joined(last, &next) => {
                last.read_bytes += next.end.saturating_sub(last.end);
                last.end = last.end.max(next.end);
                last.pieces.end = i + 1;
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

/// The number of reads for a piece, and the bytes that they read.
fn reads(piece: &Piece, block: u64) -> (u64, u64) {
    let blocks = |from: u64| (from / block * block, (from + piece.row).next_multiple_of(block));
    let (start, end) = blocks(piece.from);
    if piece.step - piece.row < block {
        // Rows share blocks.
        return (1, piece.end().next_multiple_of(block) - start);
    }
    if piece.step.is_multiple_of(block) && piece.step > end - start {
        return (piece.rows, piece.rows * (end - start));
    }
    let Some(others) = piece.rows.checked_sub(1) else { return (0, 0) };
    // Where rows lie in blocks repeats itself.
    let period = block / greatest_common_divisor(piece.step, block);
    let of_rows = |rows: u64| {
        (1..=rows).fold((0, 0), |(count, bytes), row| {
            let (_, reached) = blocks(piece.from + (row - 1) * piece.step);
            let (start, end) = blocks(piece.from + row * piece.step);
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
    fn counted(piece: &Piece, block: u64) -> (u64, u64) {
        let (mut count, mut bytes, mut reached) = (0, 0, 0);
        for row in 0..piece.rows {
            let from = piece.from + row * piece.step;
            let (start, end) = (from / block * block, (from + piece.row).next_multiple_of(block));
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
            let piece = Piece { from: below(5 * block), to: 0, row, rows, step };
            if step - row >= block {
                assert_eq!(reads(&piece, block), counted(&piece, block), "{piece:?} in blocks of {block}");
            }
        }
        // A file may claim any length.
        let piece = Piece { from: 8, to: 0, row: 1639, rows: 1 << 47, step: 8195 };
        assert!(reads(&piece, 4096).0 > 1 << 46);
    }
}
