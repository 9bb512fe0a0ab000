//! Partition tables: GPT, MBR with logical partitions, or none.

mod gpt;
mod mbr;

use crate::{Blocks, Error, Result};

/// Block sizes of partition tables, tried if the drive does not report its own.
const LBA_SIZES: [u32; 2] = [512, 4096];

/// How a drive is divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Which kind of table.
    pub kind: TableKind,
    /// The partitions, by number.
    pub partitions: Vec<Partition>,
    /// Anomalies that do not prevent using the table.
    pub notes: Vec<String>,
}

/// The kinds of table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableKind {
    /// GUID partition table.
    Gpt,
    /// MBR, with logical partitions.
    Mbr,
    /// No table: the whole drive is one volume.
    None,
}

/// One partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Its number, as in Linux: from 1, logical ones from 5.
    pub index: u32,
    /// The first byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Its type: a GUID, or a number in hexadecimal.
    pub kind: String,
    /// Its name, if the table has names.
    pub name: String,
}

/// Reads the partition table of a drive.
///
/// # Errors
/// When the drive cannot be read, or the table is damaged (a GPT in both copies).
pub fn read(blocks: &dyn Blocks) -> Result<Table> {
    let given = blocks.lba_bytes();
    let sizes = given.as_ref().map_or(&LBA_SIZES[..], std::slice::from_ref);
    if let Some(size) = sizes.iter().find(|s| !s.is_power_of_two() || !(512..=65536).contains(*s)) {
        return Err(Error::unsupported(
            format!("a block size of {size} bytes"),
            "512 to 65536 are supported",
        ));
    }
    let none = Table { kind: TableKind::None, partitions: Vec::new(), notes: Vec::new() };
    if blocks.size() < 512 {
        return Ok(none);
    }
    let mut sector = [0; 512];
    fill(blocks, 0, &mut sector)?;
    let Some(slots) = mbr::slots(&sector, blocks.size(), sizes[0]) else {
        return Ok(none);
    };
    if slots.iter().any(mbr::MbrSlot::protective) {
        return gpt::read(blocks, sizes);
    }
    mbr::read(blocks, &slots, sizes[0])
}

fn fill(blocks: &dyn Blocks, offset: u64, out: &mut [u8]) -> Result<()> {
    let len = out.len();
    blocks.read_at(offset, out).map_err(|source| Error::Read { offset, len, source })
}

/// Refuses partitions that overlap: every path through them would be ambiguous.
fn refuse_overlap(table: &'static str, partitions: &[Partition]) -> Result<()> {
    let mut sorted: Vec<_> = partitions.iter().collect();
    sorted.sort_by_key(|p| p.start);
    match sorted.windows(2).find(|w| w[0].start + w[0].len > w[1].start) {
        None => Ok(()),
        Some(w) => {
            Err(Error::damaged(table, format!("partitions {} and {} overlap", w[0].index, w[1].index)))
        }
    }
}
