//! Group descriptors: the location of each group's inodes.

use super::Ext;
use super::features::{incompat, ro_compat};
use super::superblock::{OFFSET, damaged};
use crate::Result;
use crate::bytes::{crc16, crc32c_raw, u16_at, u32_at, wide};

const INODE_UNINIT: u16 = 1;
const CHECKSUM: usize = 0x1E;

/// The fields of a group descriptor that the reader needs.
pub(super) struct InodeGroup {
    /// First block of the inode table.
    pub inode_table: u64,
    /// Initialised inodes at the start of the table.
    pub inodes: u32,
}

impl Ext {
    pub(super) fn group(&self, number: u32) -> Result<InodeGroup> {
        let sb = &self.sb;
        if number >= sb.groups {
            return Err(damaged(format!("group {number} of {} was requested", sb.groups)));
        }
        let per_block = (sb.block as usize / sb.desc_bytes) as u32;
        let block = self.descriptor_block(number / per_block, per_block);
        let at = block * sb.block + u64::from(number % per_block) * sb.desc_bytes as u64;
        let raw = self.window.vec(at, sb.desc_bytes)?;
        self.check_descriptor(number, &raw)?;
        let long = raw.len() >= 64;
        let inode_table = wide(u32_at(&raw, 8), if long { u32_at(&raw, 0x28) } else { 0 });
        let table_blocks = (u64::from(sb.inodes_per_group) * sb.inode_bytes as u64).div_ceil(sb.block);
        if inode_table <= sb.first_block.into()
            || inode_table.checked_add(table_blocks).is_none_or(|end| end > sb.blocks)
        {
            return Err(damaged(format!("the inodes of group {number} are at block {inode_table}")));
        }
        let unused =
            u32::from(u16_at(&raw, 0x1C)) | if long { u32::from(u16_at(&raw, 0x32)) << 16 } else { 0 };
        let counted = sb.ro_compat & (ro_compat::GDT_CSUM | ro_compat::METADATA_CSUM) != 0;
        let inodes = match counted {
            false => sb.inodes_per_group,
            true if u16_at(&raw, 0x12) & INODE_UNINIT != 0 => 0,
            true => sb.inodes_per_group.saturating_sub(unused),
        };
        Ok(InodeGroup { inode_table, inodes })
    }

    /// The block that holds block `index` of the descriptors.
    fn descriptor_block(&self, index: u32, per_block: u32) -> u64 {
        let sb = &self.sb;
        if sb.incompat & incompat::META_BG == 0 || index < sb.first_meta_bg {
            return OFFSET / sb.block + 1 + u64::from(index);
        }
        // Each metagroup has its own descriptors, in its first group, behind the superblock copy if there is one.
        let group = index * per_block;
        let mut skip = u64::from(sb.group_has_super(group));
        if sb.block == 1024 && index == 0 && sb.first_block == 0 {
            skip += 1;
        }
        u64::from(sb.first_block) + u64::from(group) * u64::from(sb.blocks_per_group) + skip
    }

    fn check_descriptor(&self, number: u32, raw: &[u8]) -> Result<()> {
        let sb = &self.sb;
        let want = u16_at(raw, CHECKSUM);
        let have = if let Some(seed) = sb.seed {
            let crc = crc32c_raw(crc32c_raw(seed, &number.to_le_bytes()), &raw[..CHECKSUM]);
            crc32c_raw(crc32c_raw(crc, &[0; 2]), &raw[CHECKSUM + 2..]) as u16
        } else if sb.ro_compat & ro_compat::GDT_CSUM != 0 {
            let crc = crc16(crc16(!0, &sb.uuid), &number.to_le_bytes());
            crc16(crc16(crc, &raw[..CHECKSUM]), &raw[CHECKSUM + 2..])
        } else {
            return Ok(());
        };
        if have != want {
            return Err(damaged(format!("the checksum of group {number}'s descriptor is wrong")));
        }
        Ok(())
    }
}
