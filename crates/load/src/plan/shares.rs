//! Divides the chunks of several ranks' plans among their processes: what more than one rank needs is read by one of them,
//! which passes it on.

use super::{Arenas, Chunk, Chunks, Copy, Error, Pass, Plan};

/// The chunks that one rank reads, of those of all ranks' plans. Every rank's process comes to the same division.
///
/// A chunk's bytes for the reader go to its own arena, and from there to the others that need the same
/// ([`Chunk::passes`]). What only others need of it goes to their arenas directly ([`Chunk::copies`], at the addresses
/// of [`Arenas`]).
#[derive(Clone, Debug)]
pub struct Share {
    chunks: Chunks,
    arenas: Arenas,
    rank: usize,
    /// Whether this is instead what other ranks read and this one needs.
    of_others: bool,
    /// Bytes that each rank copies out of its ring.
    given: Vec<u64>,
}

impl Share {
    /// What this rank reads, in slots of `bytes` bytes. All plans have the same files.
    ///
    /// # Errors
    /// When a chunk would be smaller than a block.
    pub fn new(plans: &[&Plan], rank: usize, bytes: u64) -> Result<Self, Error> {
        let (arenas, given) = (Arenas::new(plans), vec![0; plans.len()]);
        Ok(Self { chunks: Plan::chunks_of_all(plans, bytes)?, arenas, rank, of_others: false, given })
    }

    /// What other ranks would read that this one needs too, for a rank that gets nothing from them.
    ///
    /// # Errors
    /// As for [`Share::new`].
    pub fn rest(plans: &[&Plan], rank: usize, bytes: u64) -> Result<Self, Error> {
        Ok(Self { of_others: true, ..Self::new(plans, rank, bytes)? })
    }

    /// The rank that reads a chunk: of those that need some of it the one with the least to do.
    fn reader(&self, chunk: &Chunk) -> Option<usize> {
        let needed = chunk.copies.iter().map(|copy| self.arenas.place(copy).0);
        needed.min_by_key(|rank| (self.given.get(*rank).copied(), *rank))
    }

    /// The chunk as its reader copies it.
    fn divided(&self, chunk: &Chunk, reader: usize) -> Chunk {
        let own: Vec<Copy> =
            chunk.copies.iter().filter(|copy| self.arenas.place(copy).0 == reader).copied().collect();
        let (mut copies, mut passes) = (own.clone(), Vec::new());
        let mut rank = None;
        let mut next = 0;
        for copy in &chunk.copies {
            let (needs, to) = self.arenas.place(copy);
            if needs == reader {
                continue;
            }
            if rank != Some(needs) {
                (rank, next) = (Some(needs), 0);
            }
            // Both lists are in the order of the slot.
            while own.get(next).is_some_and(|own| end(own) <= copy.slot) {
                next += 1;
            }
            let mut rest = *copy;
            for own in own.iter().skip(next).take_while(|own| own.slot < end(copy)) {
                let Some(shared) = shared(own, &rest) else { continue };
                if shared.start > rest.slot {
                    copies.push(head(&rest, shared.start));
                }
                let from = self.arenas.place(own).1 + (shared.start - own.slot);
                let bytes = if rest.rows > 1 { rest.bytes() } else { shared.end - shared.start };
                passes.push(Pass { rank: needs, from, to: to + (shared.start - copy.slot), bytes });
                rest = tail(&rest, shared.end);
                if rest.rows == 0 {
                    break;
                }
            }
            if rest.rows > 0 {
                copies.push(rest);
            }
        }
        Chunk { copies, passes, reads: chunk.reads.clone(), ..*chunk }
    }
}

/// The end in the slot.
fn end(copy: &Copy) -> u64 {
    copy.slot + copy.rows.saturating_sub(1) * copy.step + copy.row
}

/// The range of the slot that two copies have in common. Several rows are the same or nothing.
fn shared(own: &Copy, other: &Copy) -> Option<std::ops::Range<u64>> {
    if own.rows > 1 || other.rows > 1 {
        let same = (own.slot, own.row, own.rows, own.step) == (other.slot, other.row, other.rows, other.step);
        return same.then(|| other.slot..end(other));
    }
    let (from, to) = (own.slot.max(other.slot), end(own).min(end(other)));
    (from < to).then_some(from..to)
}

/// The bytes of a single row before this place in the slot.
fn head(copy: &Copy, before: u64) -> Copy {
    let row = before - copy.slot;
    Copy { row, rows: 1, step: row, ..*copy }
}

/// The bytes from this place in the slot on; no rows if there are none.
fn tail(copy: &Copy, from: u64) -> Copy {
    let skipped = from - copy.slot;
    match copy.row.checked_sub(skipped) {
        Some(row @ 1..) if copy.rows == 1 => {
            Copy { slot: from, to: copy.to + skipped, row, rows: 1, step: row }
        }
        _ => Copy { rows: 0, ..*copy },
    }
}

impl Iterator for Share {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        loop {
            let chunk = self.chunks.next()?;
            let Some(reader) = self.reader(&chunk) else { continue };
            let divided = self.divided(&chunk, reader);
            let copied: u64 = divided.copies.iter().map(Copy::bytes).sum();
            if let Some(given) = self.given.get_mut(reader) {
                *given += copied;
            }
            match (reader == self.rank, self.of_others) {
                (true, false) => return Some(divided),
                (false, true) => {
                    let is_own = |copy: &Copy| self.arenas.place(copy).0 == self.rank;
                    let copies: Vec<Copy> =
                        chunk.copies.iter().filter(|copy| is_own(copy)).copied().collect();
                    if !copies.is_empty() {
                        return Some(Chunk { copies, ..chunk });
                    }
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Landing, PlanOptions, PlannedFile, Range, StridedExtent};
    use super::*;

    const FILE: u64 = 1 << 20;

    /// A plan that packs these extents of a file.
    fn plan(wanted: &[(u64, u64, u64, u64)]) -> Plan {
        let mut to = 0;
        let extents: Vec<StridedExtent> = wanted
            .iter()
            .map(|&(from, row, rows, step)| {
                let extent = StridedExtent { from, to, row, rows, step };
                to += row * rows;
                extent
            })
            .collect();
        let ranges = extents.iter().enumerate().map(|(index, extent)| Range {
            file: 0,
            start: extent.from / 4096 * 4096,
            end: extent.end().next_multiple_of(4096),
            read_bytes: (extent.end() - extent.from).next_multiple_of(4096),
            reads: 1,
            landing: Landing::Shifted { by: 0 },
            extents: index..index + 1,
        });
        Plan {
            options: PlanOptions::ring(),
            files: vec![PlannedFile { name: "one".into(), bytes: FILE }],
            tensors: Vec::new(),
            tensor_bytes: to,
            gpu_bytes: to,
            ranges: ranges.collect(),
            extents,
            read_bytes: to.next_multiple_of(4096),
            segments: Vec::new(),
        }
    }

    /// Loads plans as their ranks would; returns how many bytes were read, and copied out of a ring.
    fn load(plans: &[Plan], slot: u64) -> (u64, u64) {
        let file: Vec<u8> = (0..FILE).map(|at| (at % 251) as u8 ^ (at >> 8) as u8).collect();
        let plans: Vec<&Plan> = plans.iter().collect();
        let places = Arenas::new(&plans);
        let mut arenas: Vec<Vec<u8>> = plans.iter().map(|plan| vec![0; plan.gpu_bytes as usize]).collect();
        let (mut read, mut copied, mut seen) = (0, 0, Vec::new());
        for rank in 0..plans.len() {
            for chunk in Share::new(&plans, rank, slot).unwrap() {
                assert!(!seen.contains(&chunk.index));
                seen.push(chunk.index);
                let mut ring = vec![0xEE; slot as usize];
                for part in &chunk.reads {
                    let (at, from, bytes) = (part.slot as usize, part.offset as usize, part.valid as usize);
                    ring[at..at + bytes].copy_from_slice(&file[from..from + bytes]);
                    read += part.valid;
                }
                for copy in &chunk.copies {
                    let (to, at) = places.place(copy);
                    for row in 0..copy.rows {
                        let from = (copy.slot + row * copy.step) as usize;
                        let at = (at + row * copy.row) as usize;
                        let bytes = copy.row as usize;
                        arenas[to][at..at + bytes].copy_from_slice(&ring[from..from + bytes]);
                    }
                    copied += copy.bytes();
                }
                for pass in &chunk.passes {
                    assert_ne!(pass.rank, rank);
                    let (from, to, bytes) = (pass.from as usize, pass.to as usize, pass.bytes as usize);
                    let passed = arenas[rank][from..from + bytes].to_vec();
                    arenas[pass.rank][to..to + bytes].copy_from_slice(&passed);
                }
            }
        }
        for (plan, arena) in plans.iter().zip(&arenas) {
            for extent in &plan.extents {
                for row in 0..extent.rows {
                    let from = (extent.from + row * extent.step) as usize;
                    let to = (extent.to + row * extent.row) as usize;
                    let bytes = extent.row as usize;
                    assert_eq!(arena[to..to + bytes], file[from..from + bytes]);
                }
            }
        }
        (read, copied)
    }

    #[test]
    fn what_all_need_is_read_and_copied_once() {
        let all = plan(&[(0, FILE, 1, FILE)]);
        let (read, copied) = load(&[all.clone(), all.clone(), all], 64 << 10);
        assert_eq!((read, copied), (FILE, FILE));
    }

    #[test]
    fn ranks_read_the_same_amount() {
        let all = plan(&[(0, FILE, 1, FILE)]);
        for rank in 0..4 {
            let plans = [&all, &all, &all, &all];
            let read: u64 = Share::new(&plans, rank, 64 << 10).unwrap().map(|chunk| chunk.valid()).sum();
            assert_eq!(read, FILE / 4);
        }
    }

    #[test]
    fn halves_of_rows_are_read_once_and_go_to_their_ranks() {
        let halves = [plan(&[(0, 4096, 128, 8192)]), plan(&[(4096, 4096, 128, 8192)])];
        let (read, copied) = load(&halves, 64 << 10);
        assert_eq!((read, copied), (FILE, FILE));
    }

    #[test]
    fn columns_are_divided_in_few_steps() {
        // 16 GiB in rows of 8 KiB: one by one these would be two million.
        let columns = |from: u64, row: u64| {
            let mut plan = plan(&[(from, row, 1 << 21, 8192)]);
            plan.files[0].bytes = 16 << 30;
            plan
        };
        let plans = [columns(0, 3000), columns(3000, 3096), columns(6096, 2096)];
        let plans: Vec<&Plan> = plans.iter().collect();
        for rank in 0..3 {
            let chunks: Vec<Chunk> = Share::new(&plans, rank, 2 << 20).unwrap().collect();
            assert!((2700..=2760).contains(&chunks.len()), "{}", chunks.len());
            assert!(chunks.iter().all(|chunk| chunk.reads.len() == 1 && chunk.copies.len() == 3));
        }
    }

    #[test]
    fn parts_that_overlap_arrive_whole() {
        let plans = [plan(&[(100, 50_000, 1, 0), (70_000, 1000, 9, 5000)]), plan(&[(30_000, 60_000, 1, 0)])];
        let (read, copied) = load(&plans, 16 << 10);
        assert!(read < 180_000, "{read}");
        assert!(copied <= 50_000 + 9000 + 60_000, "{copied}");
        // The rank that both ranges have in common passes it on.
        assert!(copied < 50_000 + 9000 + 60_000, "{copied}");
    }

    #[test]
    fn random_plans_arrive_whole() {
        let mut state = 88_172_645_463_325_252_u64;
        let mut below = |limit: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % limit
        };
        for _ in 0..200 {
            let shared: Vec<(u64, u64, u64, u64)> = {
                let (mut at, mut list) = (below(5000), Vec::new());
                while at < FILE - 120_000 {
                    let (row, rows) = (1 + below(6000), if below(2) == 0 { 1 } else { 1 + below(8) });
                    let step = row + below(3000);
                    list.push((at, row, rows, step));
                    at += rows * step + below(40_000);
                }
                list
            };
            let plans: Vec<Plan> = (0..1 + below(4))
                .map(|_| {
                    let mut wanted: Vec<_> = shared.iter().filter(|_| below(3) > 0).copied().collect();
                    for (from, row, rows, _) in &mut wanted {
                        if *rows == 1 && below(2) == 0 {
                            let skip = below(*row);
                            (*from, *row) = (*from + skip, *row - skip);
                        }
                    }
                    wanted.truncate(1 + below(60) as usize);
                    plan(&wanted)
                })
                .collect();
            load(&plans, 4096 * (1 + below(30)));
        }
    }
}
