//! The superblock: the layout of the volume, checked before anything is computed from it.

use super::FS;
use super::features::{UNDERSTOOD, compat, incompat, incompat_names, ro_compat};
use crate::bytes::{crc32c_raw, text, u16_at, u32_at, u64_at, wide};
use crate::window::Window;
use crate::{Error, Result};

/// Place and length, for every block size.
pub(super) const OFFSET: u64 = 1024;
const BYTES: usize = 1024;
const MAGIC: u16 = 0xEF53;
const VALID: u16 = 1;
const ERRORS: u16 = 2;
const FSCK: &str = "run `e2fsck -f` on it, or mount and unmount it once";

/// The checked contents of the superblock.
#[derive(Debug, Clone)]
pub(super) struct Super {
    /// Bytes per block.
    pub block: u64,
    /// Blocks of the volume.
    pub blocks: u64,
    /// First block of group 0.
    pub first_block: u32,
    pub blocks_per_group: u32,
    pub groups: u32,
    pub inodes: u32,
    pub inodes_per_group: u32,
    pub inode_bytes: usize,
    pub desc_bytes: usize,
    pub first_meta_bg: u32,
    pub backup_groups: [u32; 2],
    pub compat: u32,
    pub incompat: u32,
    pub ro_compat: u32,
    /// Seed of metadata checksums, if there are checksums.
    pub seed: Option<u32>,
    pub uuid: [u8; 16],
    pub label: String,
    /// Bytes that `i_blocks` counts for a block of attributes: a whole cluster.
    pub cluster: u64,
    mmp_block: u64,
}

/// Whether an ext superblock might be here.
pub(crate) fn probe(window: &Window) -> Result<bool> {
    if window.len() < OFFSET + BYTES as u64 {
        return Ok(false);
    }
    let mut magic = [0; 2];
    window.read(OFFSET + 0x38, &mut magic)?;
    Ok(u16::from_le_bytes(magic) == MAGIC)
}

impl Super {
    pub(super) fn read(window: &Window) -> Result<Self> {
        let mut raw = [0; BYTES];
        window.read(OFFSET, &mut raw)?;
        if u16_at(&raw, 0x38) != MAGIC {
            return Err(damaged("its superblock has no magic number"));
        }
        let sb = Self::parse(&raw)?;
        sb.refuse_unclean(&raw)?;
        sb.check_mmp(window)?;
        let bytes = sb.blocks.checked_mul(sb.block);
        if bytes.is_none_or(|b| b > window.len()) {
            return Err(damaged(format!(
                "it has {} blocks of {} bytes, and the partition or image only {} bytes",
                sb.blocks,
                sb.block,
                window.len()
            )));
        }
        Ok(sb)
    }

    fn parse(raw: &[u8; BYTES]) -> Result<Self> {
        // The oldest revision has fixed-size inodes. It should have no features, but Linux honours those that it has.
        let dynamic = u32_at(raw, 0x4C) >= 1;
        let (compat, incompat, ro_compat) = (u32_at(raw, 0x5C), u32_at(raw, 0x60), u32_at(raw, 0x64));
        let seed = checksum_seed(raw, incompat, ro_compat)?;
        let unknown = incompat & !UNDERSTOOD & !incompat::RECOVER;
        if unknown != 0 {
            return Err(Error::unsupported(
                format!("the ext4 feature {}", incompat_names(unknown)),
                "onehop does not know its on-disk format; mount the file system instead",
            ));
        }
        let has = |bit| incompat & bit != 0;
        let (log, log_cluster) = (u32_at(raw, 0x18), u32_at(raw, 0x1C));
        if log > 6 {
            return Err(damaged(format!("its block size is 2^{} bytes", u64::from(log) + 10)));
        }
        let block = 1024_u64 << log;
        let bigalloc = ro_compat & ro_compat::BIGALLOC != 0;
        if bigalloc && !(log..=log + 16).contains(&log_cluster) {
            return Err(damaged(format!("its cluster size is 2^{} bytes", u64::from(log_cluster) + 10)));
        }
        let mut sb = Self {
            block,
            blocks: wide(u32_at(raw, 0x4), if has(incompat::BITS64) { u32_at(raw, 0x150) } else { 0 }),
            first_block: u32_at(raw, 0x14),
            blocks_per_group: u32_at(raw, 0x20),
            groups: 0,
            inodes: u32_at(raw, 0),
            inodes_per_group: u32_at(raw, 0x28),
            inode_bytes: if dynamic { u16_at(raw, 0x58).into() } else { 128 },
            desc_bytes: if has(incompat::BITS64) { u16_at(raw, 0xFE).into() } else { 32 },
            first_meta_bg: if has(incompat::META_BG) { u32_at(raw, 0x104) } else { u32::MAX },
            backup_groups: [u32_at(raw, 0x24C), u32_at(raw, 0x250)],
            compat,
            incompat,
            ro_compat,
            seed,
            uuid: std::array::from_fn(|i| raw[0x68 + i]),
            label: text(&raw[0x78..0x88]),
            cluster: if bigalloc { 1024 << log_cluster } else { block },
            mmp_block: u64_at(raw, 0x168),
        };
        sb.groups = sb.check_geometry(has(incompat::BITS64))?;
        Ok(sb)
    }

    /// The number of groups, if all sizes are consistent.
    fn check_geometry(&self, bits64: bool) -> Result<u32> {
        let inode_ok =
            self.inode_bytes.is_power_of_two() && (128..=self.block as usize).contains(&self.inode_bytes);
        let desc_ok = !bits64 || self.desc_bytes.is_power_of_two() && (64..=1024).contains(&self.desc_bytes);
        let clusters = self.block.saturating_mul(8) * (self.cluster / self.block);
        for (ok, what) in [
            (inode_ok, format!("its inodes have {} bytes", self.inode_bytes)),
            (desc_ok, format!("its group descriptors have {} bytes", self.desc_bytes)),
            (
                (1..=clusters).contains(&u64::from(self.blocks_per_group)),
                format!("its groups have {} blocks", self.blocks_per_group),
            ),
            (
                (1..=self.block * 8).contains(&u64::from(self.inodes_per_group)),
                format!("its groups have {} inodes", self.inodes_per_group),
            ),
            (
                u64::from(self.first_block) < self.blocks && self.first_block <= 1,
                format!("its first block is {} of {}", self.first_block, self.blocks),
            ),
        ] {
            if !ok {
                return Err(damaged(what));
            }
        }
        let groups = (self.blocks - u64::from(self.first_block)).div_ceil(self.blocks_per_group.into());
        let groups = u32::try_from(groups).map_err(|_| damaged(format!("it has {groups} groups")))?;
        if u64::from(self.inodes) > u64::from(groups) * u64::from(self.inodes_per_group) {
            return Err(damaged(format!("it has {} inodes in {groups} groups", self.inodes)));
        }
        Ok(groups)
    }

    fn refuse_unclean(&self, raw: &[u8; BYTES]) -> Result<()> {
        let state = u16_at(raw, 0x3A);
        let dirty = |why: &str| Err(Error::Dirty { what: FS, why: format!("{why}; {FSCK}") });
        if self.incompat & incompat::RECOVER != 0 {
            return dirty(
                "needs_recovery is set, so its journal holds newer metadata (or it is mounted somewhere)",
            );
        }
        if self.compat & compat::HAS_JOURNAL == 0 && state & VALID == 0 {
            return dirty("it has no journal and was not unmounted (or it is mounted somewhere)");
        }
        if state & ERRORS != 0 {
            return dirty("the kernel has found errors in it");
        }
        Ok(())
    }

    /// Multiple mount protection: another host may be writing now.
    fn check_mmp(&self, window: &Window) -> Result<()> {
        const MMP_MAGIC: u32 = 0x004D_4D50;
        const CLEAN: u32 = 0xFF4D_4D50;
        if self.incompat & incompat::MMP == 0 {
            return Ok(());
        }
        let at = self
            .mmp_block
            .checked_mul(self.block)
            .ok_or_else(|| damaged("its MMP block has an invalid number"))?;
        let mut raw = [0; 1024];
        window.read(at, &mut raw)?;
        if u32_at(&raw, 0) != MMP_MAGIC {
            return Err(damaged("its MMP block has no magic number"));
        }
        if let Some(seed) = self.seed
            && crc32c_raw(seed, &raw[..1020]) != u32_at(&raw, 1020)
        {
            return Err(damaged("the checksum of its MMP block is wrong"));
        }
        match u32_at(&raw, 4) {
            CLEAN => Ok(()),
            _ => Err(Error::Dirty {
                what: FS,
                why: format!("MMP says that {} has it mounted; unmount it there", text(&raw[16..80])),
            }),
        }
    }

    /// Whether group `group` begins with a copy of the superblock.
    pub(super) fn group_has_super(&self, group: u32) -> bool {
        if group == 0 {
            return true;
        }
        if self.compat & compat::SPARSE_SUPER2 != 0 {
            return self.backup_groups.contains(&group);
        }
        let power_of =
            |base: u32| std::iter::successors(Some(base), |p| p.checked_mul(base)).any(|p| p == group);
        self.ro_compat & ro_compat::SPARSE_SUPER == 0 || group == 1 || [3, 5, 7].into_iter().any(power_of)
    }
}

/// Checks the superblock's checksum and returns the seed of all metadata checksums.
fn checksum_seed(raw: &[u8; BYTES], incompat: u32, ro_compat: u32) -> Result<Option<u32>> {
    if ro_compat & ro_compat::METADATA_CSUM == 0 {
        return Ok(None);
    }
    if raw[0x175] != 1 {
        return Err(Error::unsupported(
            format!("ext4 checksum type {}", raw[0x175]),
            "only crc32c (1) is supported",
        ));
    }
    if crc32c_raw(!0, &raw[..0x3FC]) != u32_at(raw, 0x3FC) {
        return Err(damaged("the checksum of its superblock is wrong; `e2fsck -b` may find a good copy"));
    }
    let stored = incompat & incompat::CSUM_SEED != 0;
    Ok(Some(if stored { u32_at(raw, 0x270) } else { crc32c_raw(!0, &raw[0x68..0x78]) }))
}

pub(super) fn damaged(why: impl Into<String>) -> Error {
    Error::damaged(FS, why)
}
