//! Which file system begins here, by its magic numbers. The ones that are not read are known by name all the same.

use crate::window::Window;
use crate::{Result, exfat, ext, fat};

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Ext,
    Fat,
    Exfat,
    /// An ext and a FAT in the same place: one of them is what was there before.
    Doubtful,
    Other(&'static str),
    Nothing,
}

impl Found {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext => "ext2/3/4",
            Self::Fat => "FAT",
            Self::Exfat => "exFAT",
            Self::Doubtful => "ext2/3/4 or FAT",
            Self::Other(name) => name,
            Self::Nothing => "nothing known",
        }
    }
}

/// Offset, magic, name.
type Magic = (u64, &'static [u8], &'static str);

/// What holds other volumes. A file system that is seen within is a part of what the container holds, or an old one.
const CONTAINERS: &[Magic] = &[
    (0, b"LUKS\xba\xbe", "LUKS encryption"),
    (512, b"LABELONE", "LVM physical volume"),
    (0, b"LABELONE", "LVM physical volume"),
    (4096, MD, RAID),
    (0, MD, RAID),
    (3, b"-FVE-FS-", "BitLocker encryption"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "bcache"),
];
/// The magic number of Linux RAID; in version 0.90 the major version behind it, and both orders of bytes.
const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
const MD_OLD: &[u8] = b"\xfc\x4e\x2b\xa9\0\0\0\0";
const MD_OLD_SWAPPED: &[u8] = b"\xa9\x2b\x4e\xfc\0\0\0\0";
const IMSM: &[u8] = b"Intel Raid ISM C";
const RAID: &str = "Linux RAID member";
const INTEL: &str = "Intel RAID member";

const OTHERS: &[Magic] = &[
    (0, b"XFSB", "XFS"),
    (0x1_0040, b"_BHRfS_M", "btrfs"),
    (3, b"NTFS    ", "NTFS"),
    (3, b"ReFS\0\0\0\0", "ReFS"),
    (1024, b"\x10\x20\xf5\xf2", "F2FS"),
    (1024, b"\xe2\xe1\xf5\xe0", "EROFS"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", "bcachefs"),
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
    if let Some((_, name)) = container(window)? {
        return Ok(Found::Other(name));
    }
    // A file system that is read has more than a magic number to show, so its reader comes first.
    if ext::probe(window)? {
        return Ok(if fat::probe(window)? { Found::Doubtful } else { Found::Ext });
    }
    if exfat::probe(window)? {
        return Ok(Found::Exfat);
    }
    if let Some((_, name)) = first_of(window, OTHERS)? {
        return Ok(Found::Other(name));
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
    // What formats a drive anew may leave the backup of an exFAT where it is: it counts where nothing else does.
    Ok(if exfat::remains(window)? { Found::Exfat } else { Found::Nothing })
}

/// The container that the window is a member of, and the byte that tells so.
pub(crate) fn container(window: &Window) -> Result<Option<(u64, &'static str)>> {
    let at_start = first_of(window, CONTAINERS)?;
    if at_start.is_some() {
        return Ok(at_start);
    }
    // The others keep what they have to say at the end, and what they hold begins where they begin.
    let (len, sectors) = (window.len(), window.len() / 512);
    let one = (sectors.saturating_sub(16) & !7) * 512;
    // Version 1.0, which says where it is itself.
    if has(window, one, MD)? && has(window, one + 144, &(one / 512).to_le_bytes())? {
        return Ok(Some((one, RAID)));
    }
    // Version 0.90, in the order of bytes of the machine that made it.
    let old = (len & !0xFFFF).saturating_sub(0x10000);
    if has(window, old, MD_OLD)? || has(window, old, MD_OLD_SWAPPED)? {
        return Ok(Some((old, RAID)));
    }
    for sector in [512, 4096] {
        let at = (len / sector).saturating_sub(2) * sector;
        if has(window, at, IMSM)? {
            return Ok(Some((at, INTEL)));
        }
    }
    Ok(None)
}

fn first_of(window: &Window, magics: &[Magic]) -> Result<Option<(u64, &'static str)>> {
    for (offset, magic, name) in magics {
        if has(window, *offset, magic)? {
            return Ok(Some((*offset, name)));
        }
    }
    Ok(None)
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
