//! Cuts a plan into chunks that fit the slots of a ring, in the order of the files.

use super::{Error, Landing, Plan, Range, StridedExtent, segment_of};

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
        if self.rows == 1 && next.rows == 1 && next.slot == self.slot + self.row {
            self.row += next.row;
            self.step = self.row;
            return true;
        }
        let step = if self.rows == 1 { next.slot - self.slot } else { self.step };
        let fits = next.row == self.row
            && next.slot == self.slot + self.rows * step
            && (next.rows == 1 || next.step == step);
        if fits {
            self.step = step;
            self.rows += next.rows;
        }
        fits
    }
}

/// A copy from the arena to the arena of another process, once the bytes have arrived here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// The rank of that process.
    pub rank: usize,
    /// Offset in this process's arena.
    pub from: u64,
    /// Offset in the other's.
    pub to: u64,
    /// Number of bytes.
    pub bytes: u64,
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
    /// What other processes get out of the arena, in a load of several ranks.
    pub passes: Vec<Pass>,
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
    pub fn file_ranges(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
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
            let before = copies.len();
            let reaches = |end: u64| end.saturating_sub(copy.slot).div_ceil(copy.step.max(1)).min(copy.rows);
            for row in reaches(within.start).saturating_sub(1)..reaches(within.end) {
                let Some((skipped, slot, bytes)) = both(copy.slot + row * copy.step, copy.row) else {
                    continue;
                };
                let to = copy.to + row * copy.row + skipped;
                let next = Copy { slot, to, row: bytes, rows: 1, step: bytes };
                // Copies of different arenas stay apart.
                if !copies.iter_mut().skip(before).next_back().is_some_and(|last| last.takes(&next)) {
                    copies.push(next);
                }
            }
        }
        Self {
            index: self.index,
            file: self.file,
            reads: reads.collect(),
            copies,
            passes: Vec::new(),
            direct: None,
        }
    }
}

/// The chunks of a plan, or of several, created on demand.
///
/// Several plans have the same files, and their arenas follow each other in one range of addresses ([`Arenas`]). What more
/// than one of them needs is read once, with a copy for each.
#[derive(Clone, Debug)]
pub struct Chunks {
    block: u64,
    lengths: Vec<u64>,
    size: u64,
    next: u64,
    /// One for each plan.
    cursors: Vec<Cursor>,
}

/// What is left of a plan.
#[derive(Clone, Debug)]
struct Cursor {
    /// Copied from the plan.
    ranges: Vec<Range>,
    extents: Vec<StridedExtent>,
    segments: Vec<std::ops::Range<u64>>,
    /// Start of its arena.
    start: u64,
    /// Position: range, extent, row, and byte in the row.
    range: usize,
    extent: usize,
    row: u64,
    byte: u64,
}

/// The remaining rows of an extent, or the rest of a row.
struct Rows {
    from: u64,
    to: u64,
    row: u64,
    rows: u64,
    step: u64,
}

impl Cursor {
    fn new(plan: &Plan, start: u64) -> Self {
        let (ranges, extents, segments) = (plan.ranges.clone(), plan.extents.clone(), plan.segments.clone());
        Self { ranges, extents, segments, start, range: 0, extent: 0, row: 0, byte: 0 }
    }

    /// The file of what comes next.
    fn file(&self) -> Option<usize> {
        self.ranges.get(self.range).map(|range| range.file)
    }

    fn rows(&self) -> Option<Rows> {
        let extent = self.extents.get(self.extent)?;
        let from = extent.from + self.row * extent.step + self.byte;
        let to = self.start + extent.to + self.row * extent.row + self.byte;
        let rows = if self.byte == 0 { extent.rows - self.row } else { 1 };
        Some(Rows { from, to, row: extent.row - self.byte, rows, step: extent.step })
    }

    /// Advances by `bytes` of the rows.
    fn pass(&mut self, bytes: u64) {
        let Some(extent) = self.extents.get(self.extent) else { return };
        self.byte += bytes;
        self.row += self.byte / extent.row;
        self.byte %= extent.row;
        if self.row == extent.rows {
            (self.row, self.extent) = (0, self.extent + 1);
            let done = self.ranges.get(self.range).is_none_or(|r| self.extent >= r.extents.end);
            self.range += usize::from(done);
        }
    }
}

impl Chunks {
    pub(super) fn new(plans: &[&Plan], bytes: u64) -> Result<Self, Error> {
        let block = plans.iter().map(|plan| plan.options.block).max().unwrap_or(1);
        if bytes < block {
            return Err(Error::Chunk { bytes, block });
        }
        // Small enough that no sum overflows.
        let size = bytes.min(1 << 62) / block * block;
        let lengths = plans.first().map(|plan| plan.files.iter().map(|file| file.bytes).collect());
        let starts = Arenas::new(plans).starts;
        let cursors = plans.iter().zip(starts).map(|(plan, start)| Cursor::new(plan, start)).collect();
        Ok(Self { block, lengths: lengths.unwrap_or_default(), size, next: 0, cursors })
    }

    /// Takes as much as fits from one plan, whose ranges may land directly.
    fn fill_from_one(cursor: &mut Cursor, fill: &mut Fill) -> Option<u64> {
        let &Range { file, start, landing, .. } = cursor.ranges.get(cursor.range)?;
        let ring = matches!(landing, Landing::Shifted { .. });
        let began = cursor.range;
        let mut segment = None;
        while let Some(rows) = cursor.rows() {
            let Some(range) = cursor.ranges.get(cursor.range) else { break };
            // Only data that goes through a ring anyway may share a slot.
            let shares = ring && range.file == file && matches!(range.landing, Landing::Shifted { .. });
            if cursor.range != began && !shares {
                break;
            }
            // Data for one segment does not wait for the memory of another.
            let to = segment_of(&cursor.segments, rows.to);
            if *segment.get_or_insert(to) != to {
                break;
            }
            let taken = fill.take(0, &rows);
            if taken == 0 {
                break;
            }
            cursor.pass(taken);
        }
        match (landing, fill.reads.first()) {
            (Landing::Direct { at }, Some(read)) => Some(at + (read.offset - start)),
            _ => None,
        }
    }

    /// Takes as much of this file as fits, in order: no read is before the last one.
    fn fill_from_all(cursors: &mut [Cursor], file: usize, fill: &mut Fill) {
        loop {
            if Self::take_columns(cursors, file, fill) {
                continue;
            }
            let next = cursors.iter_mut().enumerate().filter(|(_, cursor)| cursor.file() == Some(file));
            let next = next.filter_map(|(index, cursor)| Some((cursor.rows()?, index, cursor)));
            let Some((rows, index, cursor)) = next.min_by_key(|(rows, ..)| rows.from) else { return };
            let taken = fill.take(index, &rows);
            if taken == 0 {
                return;
            }
            cursor.pass(taken);
        }
    }

    /// Takes rows of which several plans need a part each, such as columns of a matrix, if together these are all bytes but
    /// for gaps shorter than a block: one by one, they would be millions. Returns whether there were any.
    fn take_columns(cursors: &mut [Cursor], file: usize, fill: &mut Fill) -> bool {
        let next = cursors.iter().enumerate().filter(|(_, cursor)| cursor.file() == Some(file));
        let mut next: Vec<(usize, Rows)> =
            next.filter_map(|(index, cursor)| Some((index, cursor.rows()?))).collect();
        next.sort_by_key(|(_, rows)| rows.from);
        let Some((_, first)) = next.first() else { return false };
        let (from, step) = (first.from, first.step);
        let is_column = |rows: &Rows| rows.rows > 1 && rows.step == step && rows.from - from < step;
        let columns = next.iter().take_while(|(_, rows)| is_column(rows)).count();
        let (columns, others) = next.split_at(columns);
        let mut end = from;
        for (_, rows) in columns {
            if rows.from >= end + fill.block {
                return false;
            }
            end = end.max(rows.from + rows.row);
        }
        if columns.len() < 2 || from + step >= end + fill.block {
            return false;
        }
        // Nothing that another plan needs comes before the end of what is taken.
        let limit = others.first().map_or(u64::MAX, |(_, rows)| rows.from);
        let most = columns.iter().map(|(_, rows)| rows.rows).min().unwrap_or(0);
        let count = fill.rows_within(from, end - from, step, most.min(limit.saturating_sub(end) / step + 1));
        if count < 2 {
            return false;
        }
        let end = end + (count - 1) * step;
        for (index, rows) in columns {
            fill.take_all(*index, rows, count, end);
            if let Some(cursor) = cursors.get_mut(*index) {
                cursor.pass(count * rows.row);
            }
        }
        true
    }
}

impl Iterator for Chunks {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let file = self.cursors.iter().filter_map(Cursor::file).min()?;
        let length = self.lengths.get(file).copied().unwrap_or(0);
        let mut fill = Fill::new(self.block, length, self.size, self.cursors.len());
        let direct = match &mut self.cursors[..] {
            [cursor] => Self::fill_from_one(cursor, &mut fill),
            cursors => {
                Self::fill_from_all(cursors, file, &mut fill);
                None
            }
        };
        let index = self.next;
        self.next += 1;
        let (reads, copies) = (fill.reads, fill.copies.concat());
        Some(Chunk { index, file, reads, copies, passes: Vec::new(), direct })
    }
}

/// A slot being filled.
struct Fill {
    block: u64,
    length: u64,
    left: u64,
    reads: Vec<Read>,
    /// Each plan's copies.
    copies: Vec<Vec<Copy>>,
}

impl Fill {
    fn new(block: u64, length: u64, size: u64, plans: usize) -> Self {
        Self { block, length, left: size, reads: Vec::new(), copies: vec![Vec::new(); plans] }
    }

    /// Adds as many rows of a plan as there is room for, or a part of the first, and returns how many bytes.
    fn take(&mut self, plan: usize, rows: &Rows) -> u64 {
        let start = rows.from / self.block * self.block;
        let (mut read, goes_on) = match self.reads.last() {
            Some(last) if start <= last.offset + last.bytes => (*last, true),
            last => {
                let slot = last.map_or(0, |l| l.slot + l.bytes);
                (Read { offset: start, bytes: 0, valid: 0, slot }, false)
            }
        };
        let reached = read.offset + read.bytes;
        let whole = rows.within(reached + self.left, self.block);
        let end = rows.from + whole.saturating_sub(1) * rows.step + rows.row;
        let more = end.next_multiple_of(self.block).saturating_sub(reached).min(self.left);
        let part = (reached + more).min(end).saturating_sub(rows.from);
        if part == 0 {
            return 0;
        }
        self.left -= more;
        read.bytes += more;
        read.valid = read.bytes.min(self.length.saturating_sub(read.offset));
        if goes_on {
            self.reads.pop();
        }
        self.reads.push(read);
        let (slot, to) = (read.slot + (rows.from - read.offset), rows.to);
        let copy = match whole {
            2.. => Copy { slot, to, row: rows.row, rows: whole, step: rows.step },
            _ => Copy { slot, to, row: part, rows: 1, step: part },
        };
        if let Some(copies) = self.copies.get_mut(plan)
            && !copies.last_mut().is_some_and(|last| last.takes(&copy))
        {
            copies.push(copy);
        }
        copy.bytes()
    }
}

impl Fill {
    /// How many rows of this many bytes, from `from` on and at this distance, there is room for, of `most`.
    fn rows_within(&self, from: u64, row: u64, step: u64, most: u64) -> u64 {
        let start = from / self.block * self.block;
        let reached = match self.reads.last() {
            Some(last) if start <= last.offset + last.bytes => last.offset + last.bytes,
            _ => start,
        };
        let Some(room) = (reached + self.left).checked_sub(from + row) else { return 0 };
        most.min(1 + room / step)
    }

    /// Reads all blocks up to `end`, for which there is room, and adds this many rows of a plan.
    fn take_all(&mut self, plan: usize, rows: &Rows, count: u64, end: u64) {
        let start = rows.from / self.block * self.block;
        let mut read = match self.reads.pop() {
            Some(last) if start <= last.offset + last.bytes => last,
            last => {
                let slot = last.map_or(0, |last| last.slot + last.bytes);
                self.reads.extend(last);
                Read { offset: start, bytes: 0, valid: 0, slot }
            }
        };
        let more = end.next_multiple_of(self.block).saturating_sub(read.offset + read.bytes).min(self.left);
        self.left -= more;
        read.bytes += more;
        read.valid = read.bytes.min(self.length.saturating_sub(read.offset));
        self.reads.push(read);
        let slot = read.slot + (rows.from - read.offset);
        let copy = Copy { slot, to: rows.to, row: rows.row, rows: count, step: rows.step };
        if let Some(copies) = self.copies.get_mut(plan)
            && !copies.last_mut().is_some_and(|last| last.takes(&copy))
        {
            copies.push(copy);
        }
    }
}

impl Rows {
    /// How many rows end by there, if their blocks follow each other; else one at most.
    fn within(&self, end: u64, block: u64) -> u64 {
        let Some(room) = end.checked_sub(self.from + self.row) else { return 0 };
        let follow = self.step.saturating_sub(self.row) < block;
        if follow && self.rows > 1 { self.rows.min(1 + room / self.step) } else { 1 }
    }
}

/// The arenas of several plans as one range of addresses, in which they follow each other.
#[derive(Clone, Debug)]
pub struct Arenas {
    starts: Vec<u64>,
}

impl Arenas {
    /// The arenas of these plans.
    #[must_use]
    pub fn new(plans: &[&Plan]) -> Self {
        let starts = plans.iter().scan(0_u64, |end, plan| {
            let start = *end;
            *end = start.saturating_add(plan.gpu_bytes);
            Some(start)
        });
        Self { starts: starts.collect() }
    }

    /// A single one.
    #[cfg(test)]
    pub(crate) fn alone() -> Self {
        Self { starts: vec![0] }
    }

    /// Number of arenas.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// The arena of a copy, and where in it the copy goes.
    #[must_use]
    pub fn place(&self, copy: &Copy) -> (usize, u64) {
        let index = self.starts.partition_point(|start| *start <= copy.to).saturating_sub(1);
        (index, copy.to - self.starts.get(index).copied().unwrap_or(0))
    }

    /// The chunk as the plan of one arena has it; `None` if it has nothing for that.
    #[must_use]
    pub fn share(&self, arena: usize, chunk: &Chunk) -> Option<Chunk> {
        let copies = chunk.copies.iter().filter_map(|copy| {
            let (index, to) = self.place(copy);
            (index == arena).then_some(Copy { to, ..*copy })
        });
        let copies: Vec<Copy> = copies.collect();
        (!copies.is_empty()).then(|| Chunk {
            copies,
            reads: chunk.reads.clone(),
            passes: Vec::new(),
            ..*chunk
        })
    }
}

/// Chunks that are only counted: their lists of reads stay short.
const COUNTED_AT_ONCE: u64 = 64 << 20;

/// Bytes that a load of all these plans reads: what several of them need, once.
#[must_use]
pub fn read_bytes(plans: &[&Plan]) -> u64 {
    match plans {
        [] => 0,
        [first, others @ ..] if others.iter().all(|plan| plan == first) => first.read_bytes,
        _ => {
            let chunks = Chunks::new(plans, COUNTED_AT_ONCE).into_iter().flatten();
            chunks.map(|chunk| chunk.bytes()).sum()
        }
    }
}
