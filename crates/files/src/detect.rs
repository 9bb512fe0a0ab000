//! Which file system begins here, by its magic numbers. The ones that are not read are known by name all the same.

use crate::window::Window;
use crate::{Result, exfat, ext, fat};

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Ext,
    Fat,
    Exfat,
    Other(&'static str),
    Nothing,
}

impl Found {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext => "ext2/3/4",
            Self::Fat => "FAT",
            Self::Exfat => "exFAT",
            Self::Other(name) => name,
            Self::Nothing => "nothing known",
        }
    }
}

/// Offset, magic, name. Containers come first: what lies in them may begin at their own start.
const OTHERS: &[(u64, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "LUKS encryption"),
    (512, b"LABELONE", "LVM physical volume"),
    (0, b"LABELONE", "LVM physical volume"),
    (4096, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    (0, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    (3, b"-FVE-FS-", "BitLocker encryption"),
    (0, b"XFSB", "XFS"),
    (0x1_0040, b"_BHRfS_M", "btrfs"),
    (3, b"NTFS    ", "NTFS"),
    (3, b"ReFS\0\0\0\0", "ReFS"),
    (1024, b"\x10\x20\xf5\xf2", "F2FS"),
    (1024, b"\xe2\xe1\xf5\xe0", "EROFS"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", "bcachefs"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "bcache"),
    (0, b"hsqs", "SquashFS"),
    (32769, b"CD001", "ISO 9660"),
    (32769, b"BEA01", "UDF"),
    (32, b"NXSB", "APFS"),
    (1024, b"H+\0\x04", "HFS+"),
    (1024, b"HX\0\x05", "HFS+"),
    (32768, b"JFS1", "JFS"),
    (65536 + 52, b"ReIsEr", "ReiserFS"),
    (65536, b"\x01\x16\x19\x70", "GFS2"),
    (1024 + 6, b"\x34\x34", "NILFS2"),
    (4086, b"SWAPSPACE2", "Linux swap"),
    (65526, b"SWAPSPACE2", "Linux swap"),
];

/// Where ZFS keeps its first uberblock, and both orders of its magic number.
const UBERBLOCKS: std::ops::Range<u64> = 0x20000..0x40000;
const UBERBLOCK: [&[u8]; 2] = [&[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0], &[0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c]];

pub(crate) fn detect(window: &Window) -> Result<Found> {
    // A file system that is read has more than a magic number to show, so its reader comes first.
    if ext::probe(window)? {
        return Ok(Found::Ext);
    }
    if exfat::probe(window)? {
        return Ok(Found::Exfat);
    }
    for (offset, magic, name) in OTHERS {
        if has(window, *offset, magic)? {
            return Ok(Found::Other(name));
        }
    }
    // Only plausible fields tell a FAT: NTFS and others have the same ones.
    if fat::probe(window)? {
        return Ok(Found::Fat);
    }
    for at in UBERBLOCKS.step_by(1024) {
        if has(window, at, UBERBLOCK[0])? || has(window, at, UBERBLOCK[1])? {
            return Ok(Found::Other("ZFS"));
        }
    }
    Ok(Found::Nothing)
}

pub(crate) fn has(window: &Window, offset: u64, magic: &[u8]) -> Result<bool> {
    if offset + magic.len() as u64 > window.len() {
        return Ok(false);
    }
    let mut bytes = [0; 16];
    let bytes = &mut bytes[..magic.len()];
    window.read(offset, bytes)?;
    Ok(bytes == magic)
}
