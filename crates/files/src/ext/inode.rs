//! Inodes: located, verified and decoded.

use super::superblock::damaged;
use super::{Ext, FS};
use crate::bytes::{crc32c_raw, u16_at, u32_at, wide};
use crate::volume::{FileId, FileKind};
use crate::{Error, Result};

/// The root directory.
pub(super) const ROOT: u32 = 2;
/// Lower numbers, but for the root's, are the file system's own: its journal, the blocks for resizing, quotas.
const FIRST: u32 = 11;
const GOOD_OLD_BYTES: usize = 128;
const CHECKSUM_LOW: usize = 0x7C;
const CHECKSUM_HIGH: usize = 0x82;

pub(super) mod flag {
    pub(crate) const ENCRYPTED: u32 = 0x800;
    pub(crate) const INDEX: u32 = 0x1000;
    pub(crate) const EXTENTS: u32 = 0x8_0000;
    pub(crate) const INLINE_DATA: u32 = 0x1000_0000;
    pub(crate) const CASEFOLD: u32 = 0x4000_0000;
}

/// An inode with a valid checksum.
pub(super) struct Inode {
    pub number: u32,
    pub kind: FileKind,
    pub len: u64,
    pub flags: u32,
    /// Seed of the checksums of its blocks, if there are checksums.
    pub seed: Option<u32>,
    raw: Vec<u8>,
}

impl Ext {
    /// Reads inode `number`, which must be in use.
    pub(super) fn inode(&self, number: u32) -> Result<Inode> {
        let sb = &self.sb;
        if number == 0 || number > sb.inodes {
            return Err(damaged(format!("inode {number} of {} was requested", sb.inodes)));
        }
        if number < FIRST && number != ROOT {
            return Err(damaged(format!("inode {number} is the file system's own, but has a name")));
        }
        let (group, index) = ((number - 1) / sb.inodes_per_group, (number - 1) % sb.inodes_per_group);
        let group = self.group(group)?;
        if index >= group.inodes {
            return Err(damaged(format!("inode {number} was never used")));
        }
        let at = group.inode_table * sb.block + u64::from(index) * sb.inode_bytes as u64;
        let raw = self.window.vec(at, sb.inode_bytes)?;
        let seed = sb.seed.map(|seed| {
            let crc = crc32c_raw(seed, &number.to_le_bytes());
            crc32c_raw(crc, &raw[0x64..0x68])
        });
        Inode::parse(number, raw, seed, self.sb.large_dir())
    }
}

impl Inode {
    fn parse(number: u32, raw: Vec<u8>, seed: Option<u32>, large_dir: bool) -> Result<Self> {
        if let Some(seed) = seed {
            check(number, &raw, seed)?;
        }
        let mode = u16_at(&raw, 0);
        let kind = match mode >> 12 {
            0x4 => FileKind::Directory,
            0x8 => FileKind::File,
            0xA => FileKind::Symlink,
            0x1 | 0x2 | 0x6 | 0xC => FileKind::Special,
            _ => return Err(damaged(format!("inode {number} has mode {mode:#o}"))),
        };
        if u16_at(&raw, 0x1A) == 0 {
            return Err(damaged(format!("inode {number} has a name, but was deleted")));
        }
        let high = if kind == FileKind::File || kind == FileKind::Directory && large_dir {
            u32_at(&raw, 0x6C)
        } else {
            0
        };
        let len = wide(u32_at(&raw, 4), high);
        if len > i64::MAX as u64 {
            return Err(damaged(format!("inode {number} has {len} bytes")));
        }
        Ok(Self { number, kind, len, flags: u32_at(&raw, 0x20), seed, raw })
    }

    pub(super) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// The 60 bytes that hold a tree, a map, a short link or inline data.
    pub(super) fn block_area(&self) -> &[u8] {
        &self.raw[0x28..0x64]
    }

    /// Low part of the occupied 512-byte units; enough to distinguish short links from long ones.
    pub(super) fn sectors(&self) -> u64 {
        u32_at(&self.raw, 0x1C).into()
    }

    pub(super) fn has_attribute_block(&self) -> bool {
        u32_at(&self.raw, 0x68) != 0 || u16_at(&self.raw, 0x76) != 0
    }

    /// The attributes within the inode, behind its fields.
    pub(super) fn attributes(&self) -> Option<&[u8]> {
        let extra = usize::from(u16_at(self.raw.get(..GOOD_OLD_BYTES + 2)?, GOOD_OLD_BYTES));
        self.raw.get(GOOD_OLD_BYTES + extra..)
    }

    pub(super) fn id(&self) -> FileId {
        FileId {
            ino: self.number.into(),
            generation: u32_at(&self.raw, 0x64),
            len: self.len,
            mtime: self.time(0x10, 0x88),
            ctime: self.time(0xC, 0x84),
        }
    }

    /// Seconds and nanoseconds. The second word extends the seconds by two bits, if the inode is long enough for it.
    fn time(&self, at: usize, extra_at: usize) -> (i64, u32) {
        let seconds = i64::from(u32_at(&self.raw, at) as i32);
        if !reaches(&self.raw, extra_at + 4) {
            return (seconds, 0);
        }
        let extra = u32_at(&self.raw, extra_at);
        (seconds + (i64::from(extra & 3) << 32), extra >> 2)
    }

    /// Refuses encrypted files. Linux stores the flag of `chattr +c`, but never compresses; volumes with compressed
    /// files are refused by the superblock's features.
    pub(super) fn refuse_encrypted(&self) -> Result<()> {
        if !self.has(flag::ENCRYPTED) {
            return Ok(());
        }
        Err(Error::unsupported(
            format!("an encrypted {FS} {} (inode {})", self.kind.name(), self.number),
            "only the kernel can decrypt it; mount the file system",
        ))
    }
}

/// Whether the fields behind the first 128 bytes extend to byte `end`.
fn reaches(raw: &[u8], end: usize) -> bool {
    raw.len() >= end && GOOD_OLD_BYTES + usize::from(u16_at(raw, GOOD_OLD_BYTES)) >= end
}

fn check(number: u32, raw: &[u8], seed: u32) -> Result<()> {
    let long = reaches(raw, CHECKSUM_HIGH + 2);
    let mut blank = raw.to_vec();
    blank[CHECKSUM_LOW..CHECKSUM_LOW + 2].fill(0);
    let mut want = u32::from(u16_at(raw, CHECKSUM_LOW));
    if long {
        want |= u32::from(u16_at(raw, CHECKSUM_HIGH)) << 16;
        blank[CHECKSUM_HIGH..CHECKSUM_HIGH + 2].fill(0);
    }
    let have = crc32c_raw(seed, &blank);
    if want != if long { have } else { have & 0xFFFF } {
        return Err(damaged(format!("the checksum of inode {number} is wrong")));
    }
    Ok(())
}
