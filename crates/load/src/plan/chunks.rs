//! Cuts a plan into chunks that fit the slots of a ring, in the order of the files.

use super::{Error, Landing, Piece, Plan, Range, segment_of};

/// A read of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Offset in the file, a multiple of the block.
    pub offset: u64,
    /// Number of bytes, a multiple of the block.
    pub bytes: u64,
    /// Bytes of them that the file has: fewer only at its end. A shorter read means that the file has shrunk.
    pub valid: u64,
    /// Offset in the slot.
    pub slot: u64,
}

/// A copy from the slot to the arena: rows at equal distances in the slot, packed in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Offset of the first row in the slot.
    pub slot: u64,
    /// Offset in the arena.
    pub to: u64,
    /// Bytes of a row.
    pub row: u64,
    /// Number of rows.
    pub rows: u64,
    /// Distance between rows in the slot.
    pub step: u64,
}

impl Copy {
    /// Bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.row * self.rows
    }

    /// Merges `next` if it continues this copy.
    fn takes(&mut self, next: &Self) -> bool {
        if next.to != self.to + self.bytes() {
            return false;
        }
        if self.rows == 1 && next.slot == self.slot + self.row {
            self.row += next.row;
            self.step = self.row;
            return true;
        }
        let step = if self.rows == 1 { next.slot - self.slot } else { self.step };
        let fits = next.row == self.row && next.slot == self.slot + self.rows * step;
        if fits {
            self.step = step;
            self.rows += 1;
        }
        fits
    }
}

/// The reads into one slot, and the copies out of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its index, counted from 0.
    pub index: u64,
    /// Index of the file in the plan.
    pub file: usize,
    /// The reads.
    pub reads: Vec<Read>,
    /// The copies.
    pub copies: Vec<Copy>,
    /// Where the one read may go directly in the arena, without a slot, if the plan allows it.
    pub direct: Option<u64>,
}

impl Chunk {
    /// Bytes that are read from the file.
    #[must_use]
    pub fn valid(&self) -> u64 {
        self.reads.iter().map(|r| r.valid).sum()
    }

    /// Bytes of the slot that are used.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.reads.iter().map(|r| r.bytes).sum()
    }

    /// The copies directly from the file, for callers without alignment requirements: offset in the file, offset in the
    /// arena, and length of each range.
    pub fn stretches(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.copies.iter().flat_map(|copy| {
            (0..copy.rows).flat_map(|row| {
                let (start, to) = (copy.slot + row * copy.step, copy.to + row * copy.row);
                let within = start..start + copy.row;
                // Adjacent bytes of the slot may be apart in the file.
                self.reads.iter().filter_map(move |read| {
                    let from = within.start.max(read.slot);
                    let end = within.end.min(read.slot + read.bytes);
                    (from < end)
                        .then(|| (read.offset + from - read.slot, to + from - within.start, end - from))
                })
            })
        })
    }

    /// Splits the chunk for slots of this size, a multiple of the block. The parts have its index.
    pub fn parts(&self, bytes: u64) -> impl Iterator<Item = Self> + '_ {
        (0..self.bytes()).step_by(bytes.max(1) as usize).map(move |start| self.part(start..start + bytes))
    }

    /// The part for these bytes of the slot.
    fn part(&self, within: std::ops::Range<u64>) -> Self {
        let both = |start: u64, bytes: u64| {
            let (from, end) = (start.max(within.start), (start + bytes).min(within.end));
            (from < end).then(|| (from - start, from - within.start, end - from))
        };
        let reads = self.reads.iter().filter_map(|read| {
            let (skipped, slot, bytes) = both(read.slot, read.bytes)?;
            let valid = read.valid.saturating_sub(skipped).min(bytes);
            Some(Read { offset: read.offset + skipped, bytes, valid, slot })
        });
        let mut copies: Vec<Copy> = Vec::new();
        for copy in &self.copies {
            let reaches = |end: u64| end.saturating_sub(copy.slot).div_ceil(copy.step.max(1)).min(copy.rows);
            for row in reaches(within.start).saturating_sub(1)..reaches(within.end) {
                let Some((skipped, slot, bytes)) = both(copy.slot + row * copy.step, copy.row) else {
                    continue;
                };
                let to = copy.to + row * copy.row + skipped;
                let next = Copy { slot, to, row: bytes, rows: 1, step: bytes };
                if !copies.last_mut().is_some_and(|last| last.takes(&next)) {
                    copies.push(next);
                }
            }
        }
        Self { index: self.index, file: self.file, reads: reads.collect(), copies, direct: None }
    }
}

/// The chunks of a plan, created on demand.
#[derive(Clone, Debug)]
pub struct Chunks {
    /// Copied from the plan.
    block: u64,
    lengths: Vec<u64>,
    ranges: Vec<Range>,
    pieces: Vec<Piece>,
    segments: Vec<std::ops::Range<u64>>,
    size: u64,
    next: u64,
    /// Position: range, piece, row, and byte in the row.
    range: usize,
    piece: usize,
    row: u64,
    byte: u64,
}

/// The remaining bytes of a row.
struct RowRemainder {
    from: u64,
    to: u64,
    bytes: u64,
}

impl Chunks {
    pub(super) fn new(plan: &Plan, bytes: u64) -> Result<Self, Error> {
        let block = plan.options.block;
        if bytes < block {
            return Err(Error::Chunk { bytes, block });
        }
        // Small enough that no sum overflows.
        let size = bytes.min(1 << 62) / block * block;
        Ok(Self {
            block,
            lengths: plan.files.iter().map(|file| file.bytes).collect(),
            ranges: plan.ranges.clone(),
            pieces: plan.pieces.clone(),
            segments: plan.segments.clone(),
            size,
            next: 0,
            range: 0,
            piece: 0,
            row: 0,
            byte: 0,
        })
    }

    fn span(&self) -> Option<RowRemainder> {
        let piece = self.pieces.get(self.piece)?;
        let from = piece.from + self.row * piece.step + self.byte;
        let to = piece.to + self.row * piece.row + self.byte;
        Some(RowRemainder { from, to, bytes: piece.row - self.byte })
    }

    /// Advances by `bytes` of the span.
    fn pass(&mut self, bytes: u64) {
        let Some(piece) = self.pieces.get(self.piece) else { return };
        self.byte += bytes;
        if self.byte == piece.row {
            (self.byte, self.row) = (0, self.row + 1);
        }
        if self.row == piece.rows {
            (self.row, self.piece) = (0, self.piece + 1);
            let done = self.ranges.get(self.range).is_none_or(|r| self.piece >= r.pieces.end);
            self.range += usize::from(done);
        }
    }
}

impl Iterator for Chunks {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let &Range { file, start, landing, .. } = self.ranges.get(self.range)?;
        let length = self.lengths.get(file).copied().unwrap_or(0);
        let mut fill = Fill::new(self.block, length, self.size);
        let ring = matches!(landing, Landing::Shifted { .. });
        let began = self.range;
        let mut segment = None;
        while let Some(span) = self.span() {
            let Some(range) = self.ranges.get(self.range) else { break };
            // Only data that goes through a ring anyway may share a slot.
            let shares = ring && range.file == file && matches!(range.landing, Landing::Shifted { .. });
            if self.range != began && !shares {
                break;
            }
            // What goes to one segment does not wait for the memory of another.
            let to = segment_of(&self.segments, span.to);
            if *segment.get_or_insert(to) != to {
                break;
            }
            let taken = fill.take(&span);
            if taken == 0 {
                break;
            }
            self.pass(taken);
        }
        let direct = match (landing, fill.reads.first()) {
            (Landing::Direct { at }, Some(read)) => Some(at + (read.offset - start)),
            _ => None,
        };
        let index = self.next;
        self.next += 1;
        Some(Chunk { index, file, reads: fill.reads, copies: fill.copies, direct })
    }
}

/// A slot being filled.
struct Fill {
    block: u64,
    length: u64,
    left: u64,
    reads: Vec<Read>,
    copies: Vec<Copy>,
}

impl Fill {
    fn new(block: u64, length: u64, size: u64) -> Self {
        Self { block, length, left: size, reads: Vec::new(), copies: Vec::new() }
    }

    /// Adds as much of a span as there is room for, and returns how much.
    fn take(&mut self, span: &RowRemainder) -> u64 {
        let start = span.from / self.block * self.block;
        let (mut read, goes_on) = match self.reads.last() {
            Some(last) if start <= last.offset + last.bytes => (*last, true),
            last => {
                let slot = last.map_or(0, |l| l.slot + l.bytes);
                (Read { offset: start, bytes: 0, valid: 0, slot }, false)
            }
        };
        let reached = read.offset + read.bytes;
        let wanted = (span.from + span.bytes).next_multiple_of(self.block).saturating_sub(reached);
        let more = wanted.min(self.left);
        let end = (reached + more).min(span.from + span.bytes);
        let taken = end.saturating_sub(span.from);
        if taken == 0 {
            return 0;
        }
        self.left -= more;
        read.bytes += more;
        read.valid = read.bytes.min(self.length.saturating_sub(read.offset));
        if goes_on {
            self.reads.pop();
        }
        self.reads.push(read);
        let slot = read.slot + (span.from - read.offset);
        let copy = Copy { slot, to: span.to, row: taken, rows: 1, step: taken };
        if !self.copies.last_mut().is_some_and(|last| last.takes(&copy)) {
            self.copies.push(copy);
        }
        taken
    }
}
