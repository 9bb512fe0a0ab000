//! Directories, read linearly: the inner blocks of hash trees look empty to a linear reader.

use std::ops::ControlFlow;

use super::superblock::damaged;
use super::{Ext, inode::Inode, inode::flag};
use crate::Result;
use crate::bytes::{crc32c_raw, u16_at, u32_at};
use crate::extent::Place;
use crate::volume::FileKind;

const HEAD: usize = 8;
/// The last entry of a block with a checksum: no inode, 12 bytes, no name, this type.
const TAIL: usize = 12;
const TAIL_TYPE: u8 = 0xDE;
/// An inline directory begins with its parent's inode number.
const INLINE_PARENT: usize = 4;

/// A directory entry.
pub(super) struct ExtEntry<'a> {
    pub bytes: &'a [u8],
    pub inode: u32,
    /// The kind, if the directory stores it.
    pub kind: Option<FileKind>,
}

/// Called for each name; `Break` or an error ends the scan.
pub(super) type Visit<'a> = dyn FnMut(ExtEntry<'_>) -> Result<ControlFlow<()>> + 'a;

impl Ext {
    /// Visits all names of a directory but `.` and `..`.
    pub(super) fn scan(&self, dir: &Inode, visit: &mut Visit<'_>) -> Result<()> {
        dir.refuse_encrypted()?;
        if dir.has(flag::INLINE_DATA) {
            return self.scan_inline(dir, visit);
        }
        let block = self.sb.block;
        if !dir.len.is_multiple_of(block) {
            return Err(damaged(format!("directory {} has {} bytes", dir.number, dir.len)));
        }
        let mut bytes = vec![0; block as usize];
        for extent in self.places(dir)? {
            let Place::Drive(at) = extent.place else {
                return Err(damaged(format!(
                    "directory {} has a hole at byte {}",
                    dir.number, extent.offset
                )));
            };
            for i in 0..extent.len / block {
                let number = extent.offset / block + i;
                self.window.read(at - self.window.start() + i * block, &mut bytes)?;
                self.check_block(dir, number, &bytes)?;
                if self.entries(dir, &bytes, visit)?.is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn scan_inline(&self, dir: &Inode, visit: &mut Visit<'_>) -> Result<()> {
        let bytes = self.inline(dir)?;
        // Two lists: entries do not cross from the block area into the attribute.
        let (first, second) = bytes.split_at(bytes.len().min(dir.block_area().len()));
        for list in [first.get(INLINE_PARENT..).unwrap_or_default(), second] {
            if self.entries(dir, list, visit)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    fn entries(&self, dir: &Inode, list: &[u8], visit: &mut Visit<'_>) -> Result<ControlFlow<()>> {
        let mut at = 0;
        while at < list.len() {
            let bad = || damaged(format!("directory {} has a broken entry", dir.number));
            let head = list.get(at..at + HEAD).ok_or_else(bad)?;
            let len = self.record_len(u16_at(head, 4));
            // Without the feature, an entry that holds a checksum may still set the last byte.
            let name_len = usize::from(head[6]);
            let kind = if self.sb.filetype() { kind(head[7]) } else { None };
            if !len.is_multiple_of(4) || len < HEAD + name_len || at + len > list.len() {
                return Err(bad());
            }
            let (inode, bytes) = (u32_at(head, 0), &list[at + HEAD..at + HEAD + name_len]);
            at += len;
            if inode == 0 || bytes == b"." || bytes == b".." {
                continue;
            }
            if bytes.is_empty() || bytes.contains(&0) || bytes.contains(&b'/') {
                return Err(bad());
            }
            if visit(ExtEntry { bytes, inode, kind })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// The length of a whole 64 KiB block does not fit the field.
    fn record_len(&self, raw: u16) -> usize {
        match (self.sb.block, raw) {
            (65536.., 0 | u16::MAX) => self.sb.block as usize,
            _ => raw.into(),
        }
    }

    fn check_block(&self, dir: &Inode, number: u64, block: &[u8]) -> Result<()> {
        let Some(seed) = dir.seed else { return Ok(()) };
        let inner = if dir.has(flag::INDEX) { self.index_at(number, block) } else { None };
        let good = match inner {
            Some(at) => check_index(seed, block, at),
            None => check_leaf(seed, block),
        };
        if good {
            return Ok(());
        }
        Err(damaged(format!("the checksum of block {number} of directory {} is wrong", dir.number)))
    }

    /// Offset of the index in an inner block of a hash tree: behind one empty entry, or in the root behind `.` and
    /// `..`.
    fn index_at(&self, number: u64, block: &[u8]) -> Option<usize> {
        if number == 0 {
            return Some(32);
        }
        (u32_at(block, 0) == 0 && self.record_len(u16_at(block, 4)) == block.len()).then_some(8)
    }
}

fn check_leaf(seed: u32, block: &[u8]) -> bool {
    let (data, tail) = block.split_at(block.len() - TAIL);
    let head = (u32_at(tail, 0), u16_at(tail, 4), tail[6], tail[7]);
    head == (0, TAIL as u16, 0, TAIL_TYPE) && crc32c_raw(seed, data) == u32_at(tail, 8)
}

/// The checksum covers everything up to the last used entry, and is stored behind the last slot.
fn check_index(seed: u32, block: &[u8], at: usize) -> bool {
    let (limit, count) = (usize::from(u16_at(block, at)), usize::from(u16_at(block, at + 2)));
    let tail = at + limit * 8;
    if count > limit || tail + 8 > block.len() {
        return false;
    }
    let crc = crc32c_raw(seed, &block[..at + count * 8]);
    // The tail's first word is included, with zeros in place of the checksum.
    crc32c_raw(crc32c_raw(crc, &block[tail..tail + 4]), &[0; 4]) == u32_at(block, tail + 4)
}

fn kind(raw: u8) -> Option<FileKind> {
    match raw & 0xF {
        1 => Some(FileKind::File),
        2 => Some(FileKind::Directory),
        7 => Some(FileKind::Symlink),
        3..=6 => Some(FileKind::Special),
        _ => None,
    }
}
