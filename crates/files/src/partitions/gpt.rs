//! GUID partition tables: two copies, each with a checksum of its header and one of its entries.

use super::{Partition, Table, TableKind, fill, refuse_overlap};
use crate::bytes::{crc32, guid_text, text16, u16_at, u32_at, u64_at};
use crate::{Blocks, Error, Result};

const TABLE: &str = "GPT";
const HEADER_BYTES: usize = 92;
/// Upper limit of the entry array: 256 times the usual size.
const MOST_ENTRY_BYTES: u64 = 4 << 20;

/// Reads a table behind a protective MBR: the primary copy if valid, otherwise the backup.
pub(super) fn read(blocks: &dyn Blocks, lba_sizes: &[u32]) -> Result<Table> {
    let mut why = Vec::new();
    for &lba in lba_sizes {
        match Copy::read(blocks, lba, 1) {
            Ok(first) => return table(blocks, lba, &first, second(blocks, lba, &first)),
            Err(Error::Damaged { why: reason, .. }) => {
                why.push(format!("at blocks of {lba} bytes: {reason}"))
            }
            Err(other) => return Err(other),
        }
    }
    for &lba in lba_sizes {
        let last = (blocks.size() / u64::from(lba)).saturating_sub(1);
        match Copy::read(blocks, lba, last) {
            Ok(backup) => {
                let note =
                    format!("the first copy of the GPT is damaged ({}), the backup is used", why.join("; "));
                return table(blocks, lba, &backup, Some(note));
            }
            Err(Error::Damaged { why: reason, .. }) => why.push(format!("backup at block {last}: {reason}")),
            Err(other) => return Err(other),
        }
    }
    Err(Error::damaged(TABLE, format!("both copies: {}", why.join("; "))))
}

/// What is wrong with the backup, if the primary copy is valid.
fn second(blocks: &dyn Blocks, lba: u32, first: &Copy) -> Option<String> {
    match Copy::read(blocks, lba, first.other) {
        Err(e) => Some(format!("the backup of the GPT cannot be used: {e}")),
        Ok(backup) if backup.entries != first.entries => Some("the two copies of the GPT differ".to_owned()),
        Ok(_) => None,
    }
}

fn table(blocks: &dyn Blocks, lba: u32, copy: &Copy, note: Option<String>) -> Result<Table> {
    let mut partitions = Vec::new();
    for (entry, index) in copy.entries.chunks_exact(copy.entry_bytes).zip(1..) {
        if entry[..16].iter().any(|&b| b != 0) {
            partitions.push(partition(blocks, lba, copy, entry, index)?);
        }
    }
    refuse_overlap(TABLE, &partitions)?;
    Ok(Table { kind: TableKind::Gpt, partitions, notes: note.into_iter().collect() })
}

fn partition(blocks: &dyn Blocks, lba: u32, copy: &Copy, entry: &[u8], index: u32) -> Result<Partition> {
    let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
    let inside = first <= last && first >= copy.usable.0 && last <= copy.usable.1;
    if !inside || last >= blocks.size() / u64::from(lba) {
        return Err(Error::damaged(TABLE, format!("partition {index} is blocks {first} to {last}")));
    }
    let guid = entry[..16].try_into().unwrap_or([0; 16]);
    Ok(Partition {
        index,
        start: first * u64::from(lba),
        len: (last - first + 1) * u64::from(lba),
        kind: guid_text(&guid),
        name: text16((0..36).map(|i| u16_at(entry, 56 + 2 * i))),
    })
}

/// One of the two copies, with verified checksums.
struct Copy {
    other: u64,
    usable: (u64, u64),
    entry_bytes: usize,
    entries: Vec<u8>,
}

impl Copy {
    fn read(blocks: &dyn Blocks, lba: u32, at: u64) -> Result<Self> {
        let size = blocks.size();
        let bytes = u64::from(lba);
        let damaged = |why: String| Error::damaged(TABLE, why);
        if at == 0 || at >= size / bytes {
            return Err(damaged(format!("block {at} is not on the drive")));
        }
        let mut header = vec![0; lba as usize];
        fill(blocks, at * bytes, &mut header)?;
        check_header(&mut header, at).map_err(damaged)?;
        let (start, count, entry_bytes) = (u64_at(&header, 72), u32_at(&header, 80), u32_at(&header, 84));
        let whole = u64::from(count) * u64::from(entry_bytes);
        if entry_bytes < 128 || !entry_bytes.is_power_of_two() || whole > MOST_ENTRY_BYTES {
            return Err(damaged(format!("it has {count} entries of {entry_bytes} bytes")));
        }
        let offset = start.checked_mul(bytes).filter(|o| o.checked_add(whole).is_some_and(|end| end <= size));
        let offset = offset.ok_or_else(|| damaged(format!("its entries start at block {start}")))?;
        let mut entries = vec![0; whole as usize];
        fill(blocks, offset, &mut entries)?;
        if crc32(&entries) != u32_at(&header, 88) {
            return Err(damaged("the checksum of its entries is wrong".to_owned()));
        }
        Ok(Self {
            other: u64_at(&header, 32),
            usable: (u64_at(&header, 40), u64_at(&header, 48)),
            entry_bytes: entry_bytes as usize,
            entries,
        })
    }
}

/// Checks a header, including the block number that it states.
fn check_header(header: &mut [u8], at: u64) -> std::result::Result<(), String> {
    if &header[..8] != b"EFI PART" {
        return Err(format!("block {at} has no signature"));
    }
    let (revision, len) = (u32_at(header, 8), u32_at(header, 12) as usize);
    if revision >> 16 != 1 {
        return Err(format!("its revision is {revision:#x}"));
    }
    if !(HEADER_BYTES..=header.len()).contains(&len) {
        return Err(format!("its header has {len} bytes"));
    }
    let want = u32_at(header, 16);
    header[16..20].fill(0);
    if crc32(&header[..len]) != want {
        return Err("the checksum of its header is wrong".to_owned());
    }
    if u64_at(header, 24) != at {
        return Err(format!("it is at block {at}, but says that it is at {}", u64_at(header, 24)));
    }
    Ok(())
}
