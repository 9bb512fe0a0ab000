//! A part of a file as block reads: runs of whole blocks, and bytes that need no read.

use std::ops::Range;

use crate::extent::from_offset;
use crate::{Error, Extent, Place, Result};

/// Blocks that are adjacent both on the drive and in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRun {
    /// The first block.
    pub lba: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// Offset in memory of the first block.
    pub at: u64,
}

/// A part of a file, with its places in the destination memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blockwise {
    /// Reads from the drive. The last block of a part may extend beyond it.
    pub runs: Vec<BlockRun>,
    /// Holes and unwritten extents, in whole blocks that are not read: offset in memory and length in bytes.
    pub zeros: Vec<(u64, u64)>,
    /// Bytes to be written after the reads, with their offset in memory: inline data of the file system, and the zeros
    /// of a hole that begins inside a block that is read.
    pub inline: Vec<(u64, Vec<u8>)>,
}

impl Blockwise {
    /// Adds the bytes `part` of a file with these extents. Its first byte, at a multiple of `block`, lands at byte `to`
    /// of the memory, and the rest follows.
    ///
    /// # Errors
    /// When an extent begins inside a block: the drive's blocks are larger than the file system's.
    pub fn add(&mut self, extents: &[Extent], part: Range<u64>, to: u64, block: u64) -> Result<()> {
        for extent in from_offset(extents, part.start).iter().take_while(|e| e.offset < part.end) {
            let first = extent.offset.max(part.start);
            let len = (extent.offset + extent.len).min(part.end).saturating_sub(first);
            let (within, at) = (first - extent.offset, to + (first - part.start));
            match &extent.place {
                _ if len == 0 => {}
                Place::Zeros => {
                    // The hole's first block was read whole; what follows the file's bytes in it is undefined.
                    let begun =
                        ((first - part.start).next_multiple_of(block) - (first - part.start)).min(len);
                    if begun > 0 {
                        self.inline.push((at, vec![0; begun as usize]));
                    }
                    if len > begun {
                        self.zeros.push((at + begun, len - begun));
                    }
                }
                Place::Inline(data) => {
                    let bytes = data.get(within as usize..(within + len) as usize).unwrap_or_default();
                    self.inline.push((at, bytes.to_vec()));
                }
                Place::Drive(start) => {
                    let position = start + within;
                    if !position.is_multiple_of(block) || !(first - part.start).is_multiple_of(block) {
                        return Err(Error::WithinBlock { first, position, block });
                    }
                    self.run(BlockRun { lba: position / block, blocks: len.div_ceil(block), at }, block);
                }
            }
        }
        Ok(())
    }

    /// Adds a run, merged with the last one if it continues it.
    fn run(&mut self, run: BlockRun, block: u64) {
        match self.runs.last_mut() {
            Some(last) if last.lba + last.blocks == run.lba && last.at + last.blocks * block == run.at => {
                last.blocks += run.blocks;
            }
            _ => self.runs.push(run),
        }
    }

    /// Bytes of all holes, without those in [`Self::inline`].
    #[must_use]
    pub fn zero_bytes(&self) -> u64 {
        self.zeros.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of [`Self::inline`].
    #[must_use]
    pub fn inline_bytes(&self) -> u64 {
        self.inline.iter().map(|(_, data)| data.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, len: u64, place: Place) -> Extent {
        Extent { offset, len, place }
    }

    #[test]
    fn parts_become_runs_holes_and_inline_bytes() {
        let extents = [
            extent(0, 8192, Place::Drive(1 << 20)),
            extent(8192, 4096, Place::Zeros),
            extent(12_288, 5000, Place::Drive(4096)),
        ];
        let mut all = Blockwise::default();
        all.add(&extents, 0..17_288, 256, 512).unwrap();
        let runs = [BlockRun { lba: 2048, blocks: 16, at: 256 }, BlockRun { lba: 8, blocks: 10, at: 12_544 }];
        assert_eq!((&all.runs[..], &all.zeros[..]), (&runs[..], &[(8448, 4096)][..]));
        // A run that continues the last one on the drive is merged only if it also does so in memory.
        let mut joined = Blockwise::default();
        joined.add(&extents, 0..4096, 0, 512).unwrap();
        joined.add(&extents, 4096..8192, 4096, 512).unwrap();
        joined.add(&extents, 4096..4608, 9000, 512).unwrap();
        assert_eq!(joined.runs.len(), 2);
        let mut inline = Blockwise::default();
        inline.add(&[extent(0, 60, Place::Inline((0..60).collect()))], 0..30, 7, 512).unwrap();
        assert_eq!((inline.inline_bytes(), inline.inline[0].0), (30, 7));
    }

    /// What a drive and a caller that follows the plan leave in memory that was filled with 5Ah.
    fn landed(parts: &Blockwise, drive: &[u8], block: u64, memory: usize) -> Vec<u8> {
        let mut memory = vec![0x5A; memory];
        for &(at, bytes) in &parts.zeros {
            memory[at as usize..][..bytes as usize].fill(0);
        }
        for run in &parts.runs {
            let (from, bytes) = ((run.lba * block) as usize, (run.blocks * block) as usize);
            memory[run.at as usize..][..bytes].copy_from_slice(&drive[from..][..bytes]);
        }
        for (at, data) in &parts.inline {
            memory[*at as usize..][..data.len()].copy_from_slice(data);
        }
        memory
    }

    #[test]
    fn holes_begin_anywhere_in_a_block() {
        let drive: Vec<u8> = (0..16_384_u32).map(|i| (i % 251) as u8 | 1).collect();
        for block in [512, 4096] {
            for (data, hole) in
                [(2000, 1000), (4096, 5000), (1, 4095), (4095, 1), (5000, 100), (512, 512), (1000, 24)]
            {
                let len = data + hole;
                let extents = [extent(0, data, Place::Drive(4096)), extent(data, hole, Place::Zeros)];
                let mut want = drive[4096..][..data as usize].to_vec();
                want.resize(len as usize, 0);
                // Whole and block by block, to an offset that is not block-aligned.
                let (mut whole, mut by_block) = (Blockwise::default(), Blockwise::default());
                whole.add(&extents, 0..len, 260, block).unwrap();
                for at in (0..len).step_by(block as usize) {
                    by_block.add(&extents, at..(at + block).min(len), 260 + at, block).unwrap();
                }
                for parts in [whole, by_block] {
                    let memory = landed(&parts, &drive, block, 32_768);
                    assert!(memory[260..][..len as usize] == want, "{data} + {hole} in blocks of {block}");
                    assert_eq!(parts.zero_bytes() + parts.inline_bytes(), hole);
                    assert!(memory[..260].iter().all(|&b| b == 0x5A));
                }
            }
        }
        // Neither a hole at the beginning of a list nor one in two parts is special.
        let holes = [extent(0, 100, Place::Zeros), extent(100, 900, Place::Zeros)];
        let mut parts = Blockwise::default();
        parts.add(&holes, 0..1000, 0, 512).unwrap();
        assert!(landed(&parts, &drive, 512, 1000) == [0; 1000]);
        // No drive bytes can follow the hole within that block.
        let back =
            [extent(0, 10, Place::Drive(0)), extent(10, 90, Place::Zeros), extent(100, 9, Place::Drive(100))];
        assert!(Blockwise::default().add(&back, 0..109, 0, 512).is_err());
    }

    #[test]
    fn blocks_that_are_too_large_are_refused() {
        let small = [extent(0, 1024, Place::Drive(1024))];
        let refused = Blockwise::default().add(&small, 0..1024, 0, 4096).unwrap_err();
        assert!(matches!(refused, Error::WithinBlock { position: 1024, block: 4096, .. }));
        let scattered = [extent(0, 1024, Place::Drive(4096)), extent(1024, 1024, Place::Drive(8192))];
        assert!(Blockwise::default().add(&scattered, 0..2048, 0, 4096).is_err());
    }
}
