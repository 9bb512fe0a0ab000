//! The boot region: eleven sectors, and a twelfth with their checksum; followed by a backup of all twelve.

use super::{FS, damaged};
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::detect::has;
use crate::window::Window;
use crate::{Error, Result};

const SECTORS: u64 = 12;
/// Bytes of the first sector that change while the volume is in use; the checksum omits them.
const VOLATILE: [usize; 3] = [106, 107, 112];

/// The checked contents of the boot sector. Offsets are bytes of the volume.
pub(super) struct Boot {
    /// The active table.
    pub table: u64,
    pub heap_start: u64,
    pub cluster: u64,
    pub clusters: u32,
    /// The root directory's first cluster.
    pub root: u32,
    pub serial: u32,
    flags: u16,
}

/// Whether a valid boot region is here. The backup does not count: it may survive a later format.
pub(crate) fn probe(window: &Window) -> Result<bool> {
    match Boot::region(window, None) {
        Ok(_) | Err(Error::Unsupported { .. }) => Ok(true),
        Err(Error::Damaged { .. }) => Ok(false),
        Err(other) => Err(other),
    }
}

/// Whether an exFAT boot sector is here, or in the place of the backup.
pub(crate) fn remains(window: &Window) -> Result<bool> {
    if has(window, 3, b"EXFAT   ")? {
        return Ok(true);
    }
    // The sector size is unknown then, so all are tried.
    for shift in 9..=12 {
        if has(window, (SECTORS << shift) + 3, b"EXFAT   ")?
            && has(window, (SECTORS << shift) + 108, &[shift])?
        {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Boot {
    /// The boot region; or its backup, with a note.
    pub(super) fn read(window: &Window) -> Result<(Self, Vec<String>)> {
        let first = Self::region(window, None);
        let (boot, mut notes) = match first {
            Ok(boot) => (boot, Vec::new()),
            Err(Error::Damaged { why, .. }) => {
                let backup = (9..=12).find_map(|shift| Self::region(window, Some(shift)).ok());
                let backup = backup.ok_or_else(|| damaged(format!("{why}, and so is its backup")))?;
                (
                    backup,
                    vec![format!(
                        "the boot sector of the exFAT volume is damaged ({why}), the backup is used"
                    )],
                )
            }
            Err(other) => return Err(other),
        };
        if boot.flags & 2 != 0 {
            notes.push("the exFAT volume was not unmounted; `fsck.exfat` repairs it".to_owned());
        }
        if boot.flags & 4 != 0 {
            notes.push("the exFAT volume has had media failures".to_owned());
        }
        Ok((boot, notes))
    }

    /// The first region; or the backup, for sectors of 2^`shift` bytes.
    fn region(window: &Window, shift: Option<u32>) -> Result<Self> {
        let base = shift.map_or(0, |shift| SECTORS << shift);
        let mut raw = [0; 512];
        window.read(base, &mut raw)?;
        let own = u32::from(raw[108]);
        if &raw[3..11] != b"EXFAT   " || u16_at(&raw, 510) != 0xAA55 || raw[11..64].iter().any(|&b| b != 0) {
            return Err(damaged("its boot sector has no signature"));
        }
        if !(9..=12).contains(&own) || shift.is_some_and(|shift| shift != own) {
            return Err(damaged(format!("its sectors have 2^{own} bytes")));
        }
        check(&window.vec(base, (SECTORS << own) as usize)?, 1 << own)?;
        Self::parse(&raw, window.len())
    }

    fn parse(raw: &[u8; 512], room: u64) -> Result<Self> {
        let revision = u16_at(raw, 104);
        if revision >> 8 != 1 {
            return Err(Error::unsupported(
                format!("{FS} {}.{:02}", revision >> 8, revision & 0xFF),
                "only 1.x is supported",
            ));
        }
        let (shift, cluster_shift) = (u32::from(raw[108]), u32::from(raw[109]));
        let (table_start, table_len) = (u64::from(u32_at(raw, 80)), u64::from(u32_at(raw, 84)));
        let (heap, clusters, sectors) = (u64::from(u32_at(raw, 88)), u32_at(raw, 92), u64_at(raw, 72));
        let (flags, tables) = (u16_at(raw, 106), u64::from(raw[110]));
        let active = u64::from(flags & 1);
        let cluster_ok = shift + cluster_shift <= 25;
        let heap_end = heap + (u64::from(clusters) << cluster_shift.min(25));
        for (ok, what) in [
            (cluster_ok, format!("its clusters have 2^{} bytes", shift + cluster_shift)),
            (
                (1..=2).contains(&tables) && active < tables,
                format!("it has {tables} tables, and uses table {active}"),
            ),
            (
                sectors <= room >> shift,
                format!("it has {sectors} sectors of {} bytes, and there are {room} bytes", 1 << shift),
            ),
            (
                clusters > 0 && clusters < 0xFFFF_FFF5 && (u64::from(clusters) + 2) * 4 <= table_len << shift,
                format!("its table of {table_len} sectors is for {clusters} clusters"),
            ),
            (
                table_start >= 2 * SECTORS && table_start + tables * table_len <= heap && heap_end <= sectors,
                format!(
                    "its table at sector {table_start} or its clusters at {heap} overlap or leave the volume"
                ),
            ),
        ] {
            if !ok {
                return Err(damaged(what));
            }
        }
        Ok(Self {
            table: (table_start + active * table_len) << shift,
            heap_start: heap << shift,
            cluster: 1 << (shift + cluster_shift),
            clusters,
            root: u32_at(raw, 96),
            serial: u32_at(raw, 100),
            flags,
        })
    }
}

/// Checks the twelfth sector, which repeats the checksum of the eleven before it.
fn check(region: &[u8], sector: usize) -> Result<()> {
    let (data, sums) = region.split_at(11 * sector);
    let counted = data.iter().enumerate().filter(|(i, _)| !VOLATILE.contains(i));
    let sum = counted.fold(0_u32, |sum, (_, &b)| sum.rotate_right(1).wrapping_add(b.into()));
    if sums.chunks_exact(4).any(|s| u32_at(s, 0) != sum) {
        return Err(damaged("the checksum of its boot region is wrong"));
    }
    Ok(())
}
