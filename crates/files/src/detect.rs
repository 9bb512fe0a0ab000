//! Detects the file system by magic numbers. File systems that onehop cannot read are detected by name, too.

use crate::window::Window;
use crate::{Result, exfat, ext, fat, members};

/// The result of detection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detected {
    Ext,
    Fat,
    Exfat,
    /// Both an ext and a FAT signature: one of them is a leftover.
    Doubtful,
    Other(&'static str),
    Nothing,
}

impl Detected {
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
pub(crate) type Magic = (u64, &'static [u8], &'static str);

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
];

/// At the end of a swap area's first page: what `mkswap` writes, and what a system leaves there that sleeps in it.
const SWAP: [&[u8]; 6] =
    [b"SWAPSPACE2", b"SWAP-SPACE", b"S1SUSPEND\0", b"S2SUSPEND\0", b"ULSUSPEND\0", b"LINHIB0001"];

fn is_swap(window: &Window) -> Result<bool> {
    for page in [4, 8, 16, 32, 64].map(|kib| kib << 10) {
        for signature in SWAP {
            if has(window, page - 10, signature)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

pub(crate) fn detect(window: &Window) -> Result<Detected> {
    if let Some((_, name)) = members::all(window)?.first() {
        return Ok(Detected::Other(name));
    }
    // A supported file system has more than a magic number to check, so its reader comes first.
    if ext::probe(window)? {
        return Ok(if fat::probe(window)? { Detected::Doubtful } else { Detected::Ext });
    }
    if exfat::probe(window)? {
        return Ok(Detected::Exfat);
    }
    if let Some(name) = first_of(window, OTHERS)? {
        return Ok(Detected::Other(name));
    }
    if is_swap(window)? {
        return Ok(Detected::Other("Linux swap"));
    }
    // Only plausible fields identify a FAT: NTFS and others have the same fields.
    if fat::probe(window)? {
        return Ok(Detected::Fat);
    }
    if !members::uberblocks(window)?.is_empty() {
        return Ok(Detected::Other("ZFS"));
    }
    // Formatting a drive may leave the backup of an exFAT in place, so the backup counts only if nothing else is found.
    Ok(if exfat::remains(window)? { Detected::Exfat } else { Detected::Nothing })
}

fn first_of(window: &Window, magics: &[Magic]) -> Result<Option<&'static str>> {
    for (offset, magic, name) in magics {
        if has(window, *offset, magic)? {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

pub(crate) fn has(window: &Window, offset: u64, magic: &[u8]) -> Result<bool> {
    if offset + magic.len() as u64 > window.len() {
        return Ok(false);
    }
    Ok(window.vec(offset, magic.len())? == magic)
}
