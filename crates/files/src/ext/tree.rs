//! Extent trees: up to five levels of nodes with sorted entries.

use std::ops::Range;

use super::superblock::damaged;
use super::{Ext, inode::Inode};
use crate::Result;
use crate::bytes::{crc32c_raw, u16_at, u32_at, wide};
use crate::extent::Builder;

const MAGIC: u16 = 0xF30A;
const ENTRY: usize = 12;
const MOST_LEVELS: u16 = 5;
/// A longer extent is allocated but unwritten: its length is the excess, and it reads as zeros.
const LONGEST_WRITTEN: u16 = 32768;

impl Ext {
    /// Passes all extents of `inode`'s tree to `out`.
    pub(super) fn tree(&self, inode: &Inode, out: &mut Builder) -> Result<()> {
        let root = inode.block_area();
        let depth = u16_at(root, 6);
        if depth > MOST_LEVELS {
            return Err(damaged(format!("inode {}: its extent tree has {depth} levels", inode.number)));
        }
        TreeWalk { ext: self, inode, out, next: 0 }.node(root, depth, 0..1 << 32)
    }
}

struct TreeWalk<'a> {
    ext: &'a Ext,
    inode: &'a Inode,
    out: &'a mut Builder,
    /// The first block of the file that no extent has covered yet.
    next: u64,
}

impl TreeWalk<'_> {
    /// Visits a node that may cover blocks `within` of the file.
    fn node(&mut self, node: &[u8], depth: u16, within: Range<u64>) -> Result<()> {
        let count = self.check_header(node, depth)?;
        let entry = |i: usize| &node[ENTRY * (i + 1)..ENTRY * (i + 2)];
        let first = |i: usize| u64::from(u32_at(entry(i), 0));
        for i in 0..count {
            let end = if i + 1 < count { first(i + 1) } else { within.end };
            let range = first(i)..end;
            if range.start < within.start.max(self.next) || range.end <= range.start || range.end > within.end
            {
                return Err(
                    self.bad(format!("entries of its extent tree are not in order at block {}", range.start))
                );
            }
            if depth == 0 {
                self.extent(entry(i), range)?;
            } else {
                self.child(entry(i), depth, range)?;
            }
        }
        Ok(())
    }

    fn extent(&mut self, entry: &[u8], range: Range<u64>) -> Result<()> {
        let raw_len = u16_at(entry, 4);
        let written = raw_len <= LONGEST_WRITTEN;
        let len = u64::from(if written { raw_len } else { raw_len - LONGEST_WRITTEN });
        let physical = wide(u32_at(entry, 8), u16_at(entry, 6).into());
        if len == 0 || range.start + len > range.end {
            return Err(
                self.bad(format!("its extent of {len} blocks at block {} overlaps the next", range.start))
            );
        }
        self.ext.check_blocks(self.inode, physical, len)?;
        self.next = range.start + len;
        let place = written.then(|| self.ext.on_drive(physical));
        let block = self.ext.sb.block;
        self.out.push(range.start * block, len * block, place)
    }

    fn child(&mut self, entry: &[u8], depth: u16, range: Range<u64>) -> Result<()> {
        let block = wide(u32_at(entry, 4), u16_at(entry, 8).into());
        self.ext.check_blocks(self.inode, block, 1)?;
        let node = self.ext.block(block)?;
        let empty = self.check_header(&node, depth - 1)? == 0;
        if empty || u64::from(u32_at(&node, ENTRY)) != range.start {
            return Err(
                self.bad(format!("block {block} of its extent tree does not begin where its parent says"))
            );
        }
        self.check_tail(&node, block)?;
        self.node(&node, depth - 1, range)
    }

    /// The number of entries of a node that is at level `depth`.
    fn check_header(&self, node: &[u8], depth: u16) -> Result<usize> {
        let (magic, count, most) = (u16_at(node, 0), u16_at(node, 2).into(), usize::from(u16_at(node, 4)));
        if magic != MAGIC || u16_at(node, 6) != depth {
            return Err(self
                .bad(format!("a node of its extent tree has magic {magic:#x}, level {}", u16_at(node, 6))));
        }
        let room = (node.len() - ENTRY) / ENTRY;
        if most > room || count > most || count == 0 && depth > 0 {
            return Err(self.bad(format!(
                "a node of its extent tree has {count} entries of {most}, and room for {room}"
            )));
        }
        Ok(count)
    }

    /// Checks the checksum behind the last entry slot.
    fn check_tail(&self, node: &[u8], block: u64) -> Result<()> {
        let Some(seed) = self.inode.seed else { return Ok(()) };
        let at = ENTRY * (1 + usize::from(u16_at(node, 4)));
        if node.len() < at + 4 || crc32c_raw(seed, &node[..at]) != u32_at(node, at) {
            return Err(self.bad(format!("the checksum of block {block} of its extent tree is wrong")));
        }
        Ok(())
    }

    fn bad(&self, why: String) -> crate::Error {
        damaged(format!("inode {}: {why}", self.inode.number))
    }
}
