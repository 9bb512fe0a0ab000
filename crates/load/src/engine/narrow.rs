//! Rows of a few bytes, such as a rank's columns of a table of U8: the CPU packs them in their slot, because a copy engine
//! takes as long for each of them as for some hundred bytes.

use onehop_os::HostMem;

use crate::error::Result;
use crate::plan::{Chunk, Copy};

/// Rows that are longer go to the copy engine as they are.
const NARROW: u64 = 256;

/// Packs the narrow rows of a chunk that lies at `start` of the ring. Rows among those for another GPU are packed only if
/// all are narrow.
pub(super) fn pack(ring: &HostMem, start: usize, chunk: &mut Chunk) -> Result<()> {
    let is_narrow = |copy: &Copy| copy.rows > 1 && copy.row <= NARROW;
    if !chunk.copies.iter().any(is_narrow) {
        return Ok(());
    }
    chunk.copies.sort_unstable_by_key(source);
    let mut left = &mut chunk.copies[..];
    while !left.is_empty() {
        let mut end = 0;
        let is_among = |copy: &&Copy| {
            let is_among = end == 0 || copy.slot < end;
            end = end.max(source_end(copy));
            is_among
        };
        let count = left.iter().take_while(is_among).count();
        let (group, others) = left.split_at_mut(count);
        if group.iter().all(is_narrow) {
            pack_group(ring, start, group)?;
        }
        left = others;
    }
    Ok(())
}

/// The bytes that a copy reads: equal for GPUs that want the same.
fn source(copy: &Copy) -> (u64, u64, u64, u64) {
    (copy.slot, copy.row, copy.rows, copy.step)
}

fn source_end(copy: &Copy) -> u64 {
    copy.slot + (copy.rows - 1) * copy.step + copy.row
}

/// Packs copies one after the other at the start of the bytes that they read, if there is room for all.
fn pack_group(ring: &HostMem, start: usize, group: &mut [Copy]) -> Result<()> {
    let Some(first) = group.first().map(|copy| copy.slot) else { return Ok(()) };
    let end = group.iter().map(source_end).max().unwrap_or(first);
    let at = start + first as usize;
    let all = ring.to_vec(at, (end - first) as usize).map_err(onehop_gpu::Error::from)?;
    let mut packed = Vec::with_capacity(all.len());
    let mut places = Vec::with_capacity(group.len());
    let mut before = None;
    for copy in &*group {
        if before.replace(source(copy)) != Some(source(copy)) {
            places.push(packed.len() as u64);
            let rows = all.get((copy.slot - first) as usize..).unwrap_or_default().chunks(copy.step as usize);
            let rows = rows.take(copy.rows as usize);
            rows.for_each(|row| packed.extend_from_slice(row.get(..copy.row as usize).unwrap_or_default()));
        } else if let Some(same) = places.last() {
            places.push(*same);
        }
    }
    if packed.len() > all.len() {
        return Ok(());
    }
    ring.write(at, &packed).map_err(onehop_gpu::Error::from)?;
    for (copy, place) in group.iter_mut().zip(places) {
        let bytes = copy.bytes();
        *copy = Copy { slot: first + place, row: bytes, rows: 1, step: bytes, ..*copy };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_rows_are_packed_where_they_lie() {
        let ring = HostMem::anonymous(4096).unwrap();
        let data: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
        ring.write(0, &data).unwrap();
        let narrow = Copy { slot: 10, to: 0, row: 3, rows: 50, step: 20 };
        let wide = Copy { slot: 1100, to: 150, row: 300, rows: 2, step: 400 };
        let mut chunk = Chunk {
            index: 0,
            file: 0,
            reads: vec![],
            copies: vec![narrow, wide],
            passes: Vec::new(),
            direct: None,
        };
        pack(&ring, 100, &mut chunk).unwrap();
        assert_eq!(chunk.copies, [Copy { slot: 10, to: 0, row: 150, rows: 1, step: 150 }, wide]);
        let expected: Vec<u8> = (0..50).flat_map(|i| data[110 + i * 20..][..3].to_vec()).collect();
        assert_eq!(ring.to_vec(110, 150).unwrap(), expected);
    }

    #[test]
    fn rows_for_several_gpus_are_packed_if_all_are_narrow_and_have_room() {
        let ring = HostMem::anonymous(4096).unwrap();
        let data: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
        let rows = |slot, row, to| Copy { slot, to, row, rows: 10, step: 20 };
        let pack_all = |copies: &[Copy]| {
            ring.write(0, &data).unwrap();
            let mut chunk = Chunk {
                index: 0,
                file: 0,
                reads: vec![],
                copies: copies.to_vec(),
                passes: Vec::new(),
                direct: None,
            };
            pack(&ring, 0, &mut chunk).unwrap();
            for copy in copies {
                let moved = chunk.copies.iter().find(|moved| moved.to == copy.to).unwrap();
                let bytes = |from: &Copy, of: &dyn Fn(usize, usize) -> Vec<u8>| {
                    let start = |row| (from.slot + row * from.step) as usize;
                    (0..from.rows).flat_map(|row| of(start(row), from.row as usize)).collect::<Vec<_>>()
                };
                let expected = bytes(copy, &|at, count| data[at..at + count].to_vec());
                assert_eq!(bytes(moved, &|at, count| ring.to_vec(at, count).unwrap()), expected);
            }
            chunk.copies.iter().filter(|copy| copy.rows == 1).count()
        };
        // Halves of the columns; the same columns twice; three that overlap and have no room.
        assert_eq!(pack_all(&[rows(0, 10, 0), rows(10, 10, 1000)]), 2);
        assert_eq!(pack_all(&[rows(0, 18, 0), rows(0, 18, 1000)]), 2);
        assert_eq!(pack_all(&[rows(0, 18, 0), rows(1, 18, 1000), rows(2, 18, 2000)]), 0);
        // Another GPU wants all of it.
        let whole = Copy { slot: 0, to: 1000, row: 200, rows: 1, step: 200 };
        assert_eq!(pack_all(&[rows(0, 10, 0), whole]), 1);
        assert_eq!(pack_all(&[whole, rows(0, 10, 0), rows(200, 10, 2000)]), 2);
    }
}
