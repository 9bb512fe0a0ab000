//! Container signatures: RAID members, encryption, volume managers.
//!
//! The list is that of libblkid's RAID and encryption probes. Most old file systems survive below such a signature, so
//! containers are checked before any file system.

use crate::Result;
use crate::bytes::{u16_at, u32_at};
use crate::detect::{Magic, has};
use crate::window::Window;

/// A signature: its byte in the window, and the container's name.
pub(crate) type Member = (u64, &'static str);

const LVM: &str = "LVM physical volume";
const LUKS: &str = "LUKS encryption";
const BITLOCKER: &str = "BitLocker encryption";
const LINUX: &str = "Linux RAID member";
const INTEL: &str = "Intel RAID member";
const DDF: &str = "DDF RAID member";
const HIGHPOINT: &str = "HighPoint RAID member";
const DRBD: &str = "DRBD backing device";
const ZFS: &str = "ZFS";
const STRATIS: &str = "Stratis pool member";
const FILEVAULT: &str = "FileVault 2 encryption (Core Storage)";

/// Linux RAID's magic number; version 0.90 has the major version behind it, in either byte order.
const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
const MD_OLD: [&[u8]; 2] = [b"\xfc\x4e\x2b\xa9\0\0\0\0", b"\xa9\x2b\x4e\xfc\0\0\0\0"];
const STRATIS_MAGIC: &[u8] = b"!Stra0tis\x86\xff\x02^\x41rh";

/// Signatures at a fixed byte from the start.
const AT_START: &[Magic] = &[
    (0, b"LUKS\xba\xbe", LUKS),
    // An LVM label may be in any of the first four sectors.
    (0, b"LABELONE", LVM),
    (512, b"LABELONE", LVM),
    (1024, b"LABELONE", LVM),
    (1536, b"LABELONE", LVM),
    (0, b"HM\x01\0", LVM),
    (0, b"HM\x02\0", LVM),
    (4096, MD, LINUX),
    (0, MD, LINUX),
    (3, b"-FVE-FS-", BITLOCKER),
    // BitLocker To Go has the boot sector of a FAT; this is its GUID.
    (424, b"\x3b\xd6\x67\x49\x29\x2e\xd8\x4a\x83\x99\xf6\xa3\x39\xe3\xd0\x01", BITLOCKER),
    (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "bcache"),
    (4608 + 32, b"\xf0\x16\x78\x5a", HIGHPOINT),
    (4608 + 32, b"\xfd\x16\x78\x5a", HIGHPOINT),
    (0, b"bluestore block device", "Ceph BlueStore"),
    (0, b"$DRBDmgr=q", "DRBD control volume"),
    (0, b"DRBDdlh*", "DRBD Proxy data log"),
    (0, b"SnAp", "dm-snapshot exception store"),
    (0, b"verity\0\0", "dm-verity hashes"),
    (0, b"integrt\0", "dm-integrity"),
    (0, b"dmvdo001", "VDO"),
    (512 + 4, STRATIS_MAGIC, STRATIS),
    (9 * 512 + 4, STRATIS_MAGIC, STRATIS),
    (32, b"ORCLDISK", "Oracle ASM disk"),
    (1 << 20, b"\x0d\xd0\x01\xc0", "VMFS volume member"),
    (0, b"UBI#", "UBI"),
];

/// Signatures at a number of 512-byte sectors before the end.
const AT_END: &[Magic] = &[
    (1, b"\xde\x11\xde\x11", DDF),
    (1, b"\x11\xde\x11\xde", DDF),
    (257, b"\xde\x11\xde\x11", DDF),
    (257, b"\x11\xde\x11\xde", DDF),
    (1, b"$XIDE$", "LSI MegaRAID member"),
    (2, b"NVIDIA", "NVIDIA RAID member"),
    (11, b"\xf3\x16\x78\x5a", HIGHPOINT),
    (11, b"\xfd\x16\x78\x5a", HIGHPOINT),
];

/// Promise has its signature at one of these sectors before the end.
const PROMISE_SECTORS: [u64; 13] = [63, 255, 256, 16, 399, 591, 675, 735, 911, 974, 991, 951, 3087];
const PROMISE: Magic = (0, b"Promise Technology, Inc.", "Promise RAID member");

/// The second header of LUKS 2, which contains its own offset.
const LUKS_SECOND: &[u8] = b"SKUL\xba\xbe";
const LUKS_PLACES: std::ops::RangeInclusive<u32> = 14..=22;

/// A physical volume of Core Storage. Its magic number is too short to count alone: the version and type of the block, and
/// behind the magic number the kind of checksum, count as well.
const CORE_STORAGE: [(u64, &[u8]); 2] = [(8, b"\x01\0\x10\0"), (88, b"CS\x01\0\0\0")];

/// DRBD has its metadata in the last 4 KiB, with one of these (8, 8 not shut down, 9) at byte 60.
const DRBD_MAGIC: [&[u8]; 3] = [b"\x83\x74\x02\x6b", b"\x83\x74\x02\x6c", b"\x83\x74\x02\x6d"];

const ZFS_LABEL: u64 = 256 << 10;
/// The second half of a label holds its uberblocks, in the byte order of the machine that wrote them.
const UBERBLOCKS: u64 = 128 << 10;
const UBERBLOCK: [[u8; 8]; 2] = [[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c]];
/// A pool has many uberblocks; fewer are leftovers.
const ENOUGH_UBERBLOCKS: usize = 4;
/// Spares and caches may lack uberblocks, but have the label's list of values, which begins with its version.
const ZFS_LIST: u64 = 16 << 10;
const ZFS_LIST_HEAD: &[u8] = b"\x01\x01\0\0\0\0\0\0\0\0\0\x01";
const ZFS_FIRST_NAME: &[u8] = b"\0\0\0\x07version";

/// All container signatures in the window, those at its start first.
pub(crate) fn all(window: &Window) -> Result<Vec<Member>> {
    let mut found = Vec::new();
    for magic in AT_START {
        found.extend(at(window, Some(magic.0), magic)?);
    }
    for magic in AT_END {
        found.extend(at(window, from_end(window, magic.0), magic)?);
    }
    for sector in PROMISE_SECTORS {
        found.extend(at(window, from_end(window, sector), &PROMISE)?);
    }
    found.extend(core_storage(window)?);
    found.extend(luks_second(window)?);
    found.extend(linux(window)?);
    found.extend(intel(window)?);
    found.extend(drbd(window)?);
    found.extend(checked_last_sector(window)?);
    found.extend(zfs(window)?.into_iter().map(|at| (at, ZFS)));
    Ok(found)
}

fn at(window: &Window, offset: Option<u64>, (_, magic, name): &Magic) -> Result<Option<Member>> {
    let Some(offset) = offset else { return Ok(None) };
    Ok(has(window, offset, magic)?.then_some((offset, *name)))
}

/// The byte at which the last `sectors` sectors begin.
fn from_end(window: &Window, sectors: u64) -> Option<u64> {
    Some((window.len() / 512).checked_sub(sectors)? * 512)
}

fn core_storage(window: &Window) -> Result<Option<Member>> {
    for (at, bytes) in CORE_STORAGE {
        if !has(window, at, bytes)? {
            return Ok(None);
        }
    }
    Ok(Some((0, FILEVAULT)))
}

fn luks_second(window: &Window) -> Result<Option<Member>> {
    for at in LUKS_PLACES.map(|bits| 1_u64 << bits) {
        if has(window, at, LUKS_SECOND)? && has(window, at + 256, &at.to_be_bytes())? {
            return Ok(Some((at, LUKS)));
        }
    }
    Ok(None)
}

/// Linux RAID at the end: version 1.0, which contains its own offset, and version 0.90.
fn linux(window: &Window) -> Result<Option<Member>> {
    let one = (window.len() / 512).saturating_sub(16) / 8 * 4096;
    if has(window, one, MD)? && has(window, one + 144, &(one / 512).to_le_bytes())? {
        return Ok(Some((one, LINUX)));
    }
    let old = (window.len() & !0xFFFF).saturating_sub(0x10000);
    for magic in MD_OLD {
        if has(window, old, magic)? {
            return Ok(Some((old, LINUX)));
        }
    }
    Ok(None)
}

/// The signature is in the last block but one, of either block size.
fn intel(window: &Window) -> Result<Option<Member>> {
    for sector in [512, 4096] {
        let at = (window.len() / sector).saturating_sub(2) * sector;
        if has(window, at, b"Intel Raid ISM C")? {
            return Ok(Some((at, INTEL)));
        }
    }
    Ok(None)
}

fn drbd(window: &Window) -> Result<Option<Member>> {
    let len = window.len();
    // DRBD rounds the device down to 4 KiB, libblkid does not.
    for end in [len, len & !4095] {
        let Some(start) = end.checked_sub(4096) else { continue };
        for magic in DRBD_MAGIC {
            if has(window, start + 60, magic)? {
                return Ok(Some((start, DRBD)));
            }
        }
    }
    Ok(None)
}

/// Formats in the last sector whose magic numbers are too short to count without a checksum.
fn checked_last_sector(window: &Window) -> Result<Option<Member>> {
    let Some(start) = from_end(window, 1) else { return Ok(None) };
    let sector = window.vec(start, 512)?;
    let words = |count: usize| {
        sector[..2 * count].chunks_exact(2).fold(0_u16, |sum, word| sum.wrapping_add(u16_at(word, 0)))
    };
    let via = || sector[..50].iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte)) == sector[50];
    let name = if sector.starts_with(b"\x55\xaa") && sector[2] <= 2 && via() {
        "VIA RAID member"
    } else if u32_at(&sector, 0x60) == 0x2F00_0000 && words(0x140 / 2) == 0 {
        "Silicon Image RAID member"
    } else if sector.starts_with(b"JM") && words(64) <= 1 {
        "JMicron RAID member"
    } else if sector.starts_with(b"\x37\xfc\x4d\x1e") && sector[256..].starts_with(b"DPTM") {
        "Adaptec RAID member"
    } else {
        return Ok(None);
    };
    Ok(Some((start, name)))
}

/// The bytes that mark the window as part of a ZFS pool.
fn zfs(window: &Window) -> Result<Vec<u64>> {
    let mut found = uberblocks(window)?;
    if found.len() < ENOUGH_UBERBLOCKS {
        found.clear();
    }
    for list in zfs_labels(window).map(|label| label + ZFS_LIST) {
        if has(window, list, ZFS_LIST_HEAD)? && has(window, list + 20, ZFS_FIRST_NAME)? {
            found.push(list);
        }
    }
    Ok(found)
}

/// The offsets of ZFS uberblocks.
pub(crate) fn uberblocks(window: &Window) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    for start in zfs_labels(window).map(|label| label + UBERBLOCKS) {
        // Bypasses the cache: it is one command, and the data is not needed again.
        let mut half = vec![0; UBERBLOCKS as usize];
        window.read_drive(window.start() + start, &mut half)?;
        let places = half.chunks_exact(1024).zip((start..).step_by(1024));
        found.extend(
            places.filter(|(block, _)| UBERBLOCK.iter().any(|m| block.starts_with(m))).map(|(_, at)| at),
        );
    }
    Ok(found)
}

/// The labels of ZFS, two at each end.
fn zfs_labels(window: &Window) -> impl Iterator<Item = u64> {
    let (len, end) = (window.len(), window.len() / ZFS_LABEL * ZFS_LABEL);
    let labels = [Some(0), Some(ZFS_LABEL), end.checked_sub(2 * ZFS_LABEL), end.checked_sub(ZFS_LABEL)];
    labels.into_iter().flatten().filter(move |label| label + ZFS_LABEL <= len)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Each offset is relative to one of the ends, and may not exist on a short drive.
    #[test]
    fn drives_of_any_length_are_checked() {
        let edges = [4096, 4608, 8191, 65536, 131_071, 262_143, 262_144, 524_288, 1 << 20, (1 << 20) + 1];
        for len in (0..1200).chain(edges) {
            for fill in [0, 0x55, 0xFF] {
                let window = Window::new(Arc::new(vec![fill; len]), 0, len as u64);
                assert_eq!(all(&window).unwrap(), [], "{len} bytes of {fill:#x}");
            }
        }
    }
}
