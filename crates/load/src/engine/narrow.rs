//! Rows of a few bytes, such as a rank's columns of a table of U8: the CPU packs them in their slot. A copy engine takes as
//! long for each of them as for some hundred bytes.

use onehop_os::HostMem;

use crate::error::Result;
use crate::plan::Chunk;

/// Rows that are longer go to the copy engine as they are.
const NARROW: u64 = 256;

/// Packs the narrow rows of a chunk that lies at `start` of the ring.
pub(super) fn pack(ring: &HostMem, start: usize, chunk: &mut Chunk) -> Result<()> {
    for copy in chunk.copies.iter_mut().filter(|copy| copy.rows > 1 && copy.row <= NARROW) {
        let (row, step, at) = (copy.row as usize, copy.step as usize, start + copy.slot as usize);
        let span = (copy.rows as usize - 1) * step + row;
        let all = ring.to_vec(at, span).map_err(onehop_gpu::Error::from)?;
        let mut packed = Vec::with_capacity(row * copy.rows as usize);
        all.chunks(step).for_each(|from| packed.extend_from_slice(from.get(..row).unwrap_or_default()));
        ring.write(at, &packed).map_err(onehop_gpu::Error::from)?;
        (copy.row, copy.rows, copy.step) = (packed.len() as u64, 1, packed.len() as u64);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Copy;

    #[test]
    fn narrow_rows_are_packed_where_they_lie() {
        let ring = HostMem::anonymous(4096).unwrap();
        let data: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
        ring.write(0, &data).unwrap();
        let narrow = Copy { slot: 10, to: 0, row: 3, rows: 50, step: 20 };
        let wide = Copy { slot: 1100, to: 150, row: 300, rows: 2, step: 400 };
        let mut chunk = Chunk { index: 0, file: 0, reads: vec![], copies: vec![narrow, wide], direct: None };
        pack(&ring, 100, &mut chunk).unwrap();
        assert_eq!(chunk.copies, [Copy { slot: 10, to: 0, row: 150, rows: 1, step: 150 }, wide]);
        let expected: Vec<u8> = (0..50).flat_map(|i| data[110 + i * 20..][..3].to_vec()).collect();
        assert_eq!(ring.to_vec(110, 150).unwrap(), expected);
    }
}
