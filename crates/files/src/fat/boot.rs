//! The boot sector of a FAT: the width of table entries, and the layout of the volume.

use crate::bytes::{u16_at, u32_at};
use crate::clusters::ClusterRun;
use crate::window::Window;
use crate::{Error, Result};

const SECTOR: usize = 512;

/// Bits per table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    W12 = 12,
    W16 = 16,
    W32 = 32,
}

/// The checked contents of the boot sector. Offsets are bytes of the volume.
pub(super) struct Boot {
    pub width: Width,
    /// The active table.
    pub table: u64,
    /// The root directory of FAT12 and FAT16.
    pub root: ClusterRun,
    /// The root directory of FAT32; otherwise 0.
    pub root_cluster: u32,
    pub heap_start: u64,
    pub cluster: u64,
    pub clusters: u32,
    pub serial: u32,
    pub label: String,
    pub dirty: bool,
}

/// Whether this is the boot sector of a FAT. It has no magic number, only fields that must be plausible.
pub(crate) fn probe(window: &Window) -> Result<bool> {
    if window.len() < SECTOR as u64 {
        return Ok(false);
    }
    let mut raw = [0; SECTOR];
    window.read(0, &mut raw)?;
    let (sector, per_cluster) = (u16_at(&raw, 11), raw[13]);
    Ok(u16_at(&raw, 510) == 0xAA55
        && (raw[0] == 0xE9 || raw[0] == 0xEB && raw[2] == 0x90)
        && sector.is_power_of_two()
        && (512..=4096).contains(&sector)
        && per_cluster.is_power_of_two()
        && u16_at(&raw, 14) != 0
        && (1..=4).contains(&raw[16])
        && (raw[21] == 0xF0 || raw[21] >= 0xF8))
}

impl Boot {
    /// Reads what [`probe`] has recognised.
    pub(super) fn read(window: &Window) -> Result<Self> {
        let mut raw = [0; SECTOR];
        window.read(0, &mut raw)?;
        let bad = |why: String| Error::damaged("FAT", why);
        let nonzero = |short: usize, long: usize| match u16_at(&raw, short) {
            0 => u64::from(u32_at(&raw, long)),
            short => u64::from(short),
        };
        let (sector, reserved, tables) =
            (u64::from(u16_at(&raw, 11)), u64::from(u16_at(&raw, 14)), u64::from(raw[16]));
        let (total, table_sectors) = (nonzero(19, 32), nonzero(22, 36));
        let cluster = sector * u64::from(raw[13]);
        if total * sector > window.len() {
            return Err(bad(format!(
                "it has {total} sectors of {sector} bytes, and there are {} bytes",
                window.len()
            )));
        }
        // As in Linux, a FAT without a 16-bit table length is FAT32, however few clusters it has.
        let wide = u16_at(&raw, 22) == 0;
        let root_entries = u64::from(u16_at(&raw, 17));
        // Its root is stored in clusters. Linux would skip the space of these entries, other systems would not.
        if wide && root_entries != 0 {
            return Err(bad(format!(
                "it is a FAT32, and its boot sector has a root of {root_entries} entries"
            )));
        }
        let root_bytes = root_entries * 32;
        let root = ClusterRun { at: (reserved + tables * table_sectors) * sector, len: root_bytes };
        let heap_start = root.at + root_bytes.next_multiple_of(sector);
        let clusters = (total * sector).saturating_sub(heap_start) / cluster;
        let width = match clusters {
            _ if wide => Width::W32,
            ..4085 => Width::W12,
            _ => Width::W16,
        };
        if clusters == 0 || clusters > 0x0FFF_FFF4 {
            return Err(bad(format!("it has {clusters} clusters")));
        }
        if (clusters + 2) * width as u64 > table_sectors * sector * 8 {
            return Err(bad(format!(
                "its table of {table_sectors} sectors is too short for {clusters} clusters"
            )));
        }
        let extended = if wide { 64 } else { 36 };
        let boot = Self {
            width,
            table: (reserved + active_table(&raw, wide, tables).map_err(bad)? * table_sectors) * sector,
            root,
            root_cluster: if wide { u32_at(&raw, 44) } else { 0 },
            heap_start,
            cluster,
            clusters: clusters as u32,
            serial: if raw[extended + 2] & 0xFE == 0x28 { u32_at(&raw, extended + 3) } else { 0 },
            label: label(&raw, extended),
            dirty: raw[extended + 1] & 1 != 0,
        };
        boot.check(&raw)?;
        Ok(boot)
    }

    fn check(&self, raw: &[u8; SECTOR]) -> Result<()> {
        if self.width != Width::W32 {
            return Ok(());
        }
        if u16_at(raw, 42) != 0 {
            return Err(Error::unsupported(
                format!("FAT32 version {:#x}", u16_at(raw, 42)),
                "only version 0 is supported",
            ));
        }
        if self.root_cluster < 2 {
            return Err(Error::damaged(
                "FAT",
                format!("its root directory is at cluster {}", self.root_cluster),
            ));
        }
        Ok(())
    }

    pub(super) fn name(&self) -> &'static str {
        match self.width {
            Width::W12 => "FAT12",
            Width::W16 => "FAT16",
            Width::W32 => "FAT32",
        }
    }
}

/// FAT32 may have tables that are not mirrored; the boot sector then names the active one.
fn active_table(raw: &[u8; SECTOR], wide: bool, tables: u64) -> std::result::Result<u64, String> {
    let flags = if wide { u16_at(raw, 40) } else { 0 };
    match u64::from(flags & 15) {
        _ if flags & 0x80 == 0 => Ok(0),
        table if table < tables => Ok(table),
        table => Err(format!("its table {table} of {tables} is marked active")),
    }
}

fn label(raw: &[u8; SECTOR], extended: usize) -> String {
    let bytes = if raw[extended + 2] == 0x29 { &raw[extended + 7..extended + 18] } else { &[][..] };
    let text = String::from_utf8_lossy(bytes).trim_end().to_owned();
    if text == "NO NAME" { String::new() } else { text }
}
