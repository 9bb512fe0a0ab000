//! Block maps of ext2 and ext3: twelve direct blocks, and trees of one, two and three levels.

use std::collections::HashSet;

use super::superblock::damaged;
use super::{Ext, inode::Inode};
use crate::Result;
use crate::bytes::u32_at;
use crate::extent::Builder;

const DIRECT: usize = 12;

impl Ext {
    /// Passes all blocks of `inode`'s map to `out`.
    pub(super) fn map(&self, inode: &Inode, out: &mut Builder) -> Result<()> {
        let area = inode.block_area();
        let blocks = inode.len.div_ceil(self.sb.block);
        let mut walk = MapWalk { ext: self, inode, out, blocks, seen: HashSet::new() };
        let mut at = 0;
        for slot in 0..DIRECT + 3 {
            let level = slot.saturating_sub(DIRECT - 1) as u32;
            walk.pointer(u32_at(area, 4 * slot), level, at)?;
            at += walk.span(level);
        }
        if blocks > at {
            return Err(damaged(format!(
                "inode {}: {} bytes are more than its map can hold",
                inode.number, inode.len
            )));
        }
        Ok(())
    }
}

struct MapWalk<'a> {
    ext: &'a Ext,
    inode: &'a Inode,
    out: &'a mut Builder,
    /// Blocks of the file.
    blocks: u64,
    /// Blocks of the map itself. Each occurs once, which also bounds the walk.
    seen: HashSet<u32>,
}

impl MapWalk<'_> {
    /// Blocks of the file that a pointer of this level covers.
    fn span(&self, level: u32) -> u64 {
        (self.ext.sb.block / 4).pow(level)
    }

    /// Visits what lies below a pointer, from block `at` of the file on.
    fn pointer(&mut self, block: u32, level: u32, at: u64) -> Result<()> {
        if block == 0 || at >= self.blocks {
            return Ok(());
        }
        let bytes = self.ext.sb.block;
        self.ext.check_blocks(self.inode, block.into(), 1)?;
        if level == 0 {
            return self.out.push(at * bytes, bytes, Some(self.ext.on_drive(block.into())));
        }
        if !self.seen.insert(block) {
            return Err(damaged(format!("inode {}: block {block} is twice in its map", self.inode.number)));
        }
        let pointers = self.ext.block(block.into())?;
        let span = self.span(level - 1);
        for (i, pointer) in pointers.chunks_exact(4).enumerate() {
            self.pointer(u32_at(pointer, 0), level - 1, at + i as u64 * span)?;
        }
        Ok(())
    }
}
