//! Inline data: 60 bytes in place of the block map, the rest in an attribute.

use super::superblock::damaged;
use super::{Ext, inode::Inode};
use crate::Result;
use crate::bytes::{u16_at, u32_at};
use crate::volume::FileKind;

const MAGIC: u32 = 0xEA02_0000;
/// `system.` in the table of name prefixes.
const SYSTEM: u8 = 7;
const NAME: &[u8] = b"data";
const ENTRY: usize = 16;

impl Ext {
    /// The stored bytes of an inline file. Up to its size, zeros follow them.
    pub(super) fn inline(&self, inode: &Inode) -> Result<Vec<u8>> {
        let bad = |why: &str| damaged(format!("inode {}: inline data, but {why}", inode.number));
        let mut bytes = inode.block_area().to_vec();
        if inode.len > bytes.len() as u64 {
            let attributes = inode.attributes().ok_or_else(|| bad("no room for attributes"))?;
            bytes.extend_from_slice(system_data(attributes).map_err(bad)?);
        }
        if inode.len > bytes.len() as u64 && inode.kind != FileKind::File {
            return Err(bad("less than its size"));
        }
        bytes.truncate(usize::try_from(inode.len).unwrap_or(usize::MAX));
        Ok(bytes)
    }
}

/// The value of `system.data` among the attributes within an inode.
fn system_data(area: &[u8]) -> std::result::Result<&[u8], &'static str> {
    if area.len() < 4 || u32_at(area, 0) != MAGIC {
        return Err("no attributes");
    }
    let entries = &area[4..];
    let mut at = 0;
    loop {
        let entry = entries.get(at..at + ENTRY).filter(|e| u32_at(e, 0) != 0);
        let entry = entry.ok_or("no attribute system.data")?;
        let name_len = usize::from(entry[0]);
        let name = entries.get(at + ENTRY..at + ENTRY + name_len).ok_or("a name that ends outside")?;
        if entry[1] == SYSTEM && name == NAME {
            if u32_at(entry, 4) != 0 {
                return Err("its attribute lies in another inode");
            }
            let (offset, len) = (usize::from(u16_at(entry, 2)), u32_at(entry, 8) as usize);
            let value = offset.checked_add(len).and_then(|end| entries.get(offset..end));
            return value.ok_or("an attribute that ends outside");
        }
        at += (ENTRY + name_len).next_multiple_of(4);
    }
}
