//! MBR partition tables: four slots in the first sector, and a chain of sectors for logical partitions.

use std::collections::HashSet;

use super::{Partition, Table, TableKind, fill, refuse_overlap};
use crate::bytes::{u16_at, u32_at};
use crate::{Blocks, Error, Result};

const TABLE: &str = "MBR partition table";
/// The type of a protective entry: the drive has a GPT.
const PROTECTIVE: u8 = 0xEE;
const EXTENDED: [u8; 3] = [0x05, 0x0F, 0x85];
/// Upper limit of logical partitions.
const MOST_LOGICAL: usize = 256;

/// One of the four entries of a sector, in blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct MbrSlot {
    status: u8,
    kind: u8,
    start: u64,
    count: u64,
}

impl MbrSlot {
    /// Whether Linux counts it as a partition. The type does not matter.
    fn used(&self) -> bool {
        self.count != 0
    }

    /// Whether it is a protective entry. Like Linux, this checks type and start, but not the size.
    pub(super) fn protective(&self) -> bool {
        self.kind == PROTECTIVE && (self.used() || self.start == 1)
    }

    fn extended(&self) -> bool {
        EXTENDED.contains(&self.kind)
    }
}

fn entries(sector: &[u8; 512]) -> Option<[MbrSlot; 4]> {
    (u16_at(sector, 510) == 0xAA55).then(|| {
        std::array::from_fn(|i| {
            let at = 446 + 16 * i;
            let (start, count) = (u32_at(sector, at + 8).into(), u32_at(sector, at + 12).into());
            MbrSlot { status: sector[at], kind: sector[at + 4], start, count }
        })
    })
}

/// The slots, if this sector is a table: a FAT's boot sector has the same signature, and code or zeros in place of the
/// entries. Slots of type 0 neither make nor break a table.
pub(super) fn slots(sector: &[u8; 512], size: u64, lba: u32) -> Option<[MbrSlot; 4]> {
    let slots = entries(sector)?;
    let blocks = size / u64::from(lba);
    let typed = |s: &MbrSlot| s.protective() || s.used() && s.kind != 0;
    let sane = |s: &MbrSlot| {
        s.status & 0x7F == 0 && (!typed(s) || s.protective() || (s.start > 0 && s.start < blocks))
    };
    (slots.iter().all(sane) && slots.iter().any(typed)).then_some(slots)
}

pub(super) fn read(blocks: &dyn Blocks, slots: &[MbrSlot; 4], lba: u32) -> Result<Table> {
    let disk = MbrReader { blocks, lba: lba.into() };
    let (mut partitions, mut notes) = (Vec::new(), Vec::new());
    let mut extended = None;
    for (slot, index) in slots.iter().zip(1..).filter(|(s, _)| s.used()) {
        if !slot.extended() {
            partitions.extend(disk.primary(index, slot, &mut notes));
        } else if extended.replace(slot).is_some() {
            return Err(Error::damaged(TABLE, "it has two extended partitions"));
        }
    }
    if let Some(slot) = extended {
        partitions.extend(disk.logical(slot)?);
    }
    refuse_overlap(TABLE, &partitions)?;
    Ok(Table { kind: TableKind::Mbr, partitions, notes })
}

struct MbrReader<'a> {
    blocks: &'a dyn Blocks,
    lba: u64,
}

impl MbrReader<'_> {
    /// A slot of sector 0, cut at the end of the drive as by Linux. Only a slot of type 0 may be outside of the drive
    /// altogether, or begin with the table.
    fn primary(&self, index: u32, slot: &MbrSlot, notes: &mut Vec<String>) -> Option<Partition> {
        let mut part = self.place(index, 0, slot);
        let (size, claim) = (self.blocks.size(), self.claim(&part));
        if slot.start == 0 || part.start >= size {
            notes.push(format!("{claim}, and is ignored"));
            return None;
        }
        if part.len > size - part.start {
            notes.push(format!("{claim}, and is truncated"));
            part.len = size - part.start;
        }
        Some(part)
    }

    /// A slot whose start is relative to block `base`.
    fn partition(&self, index: u32, base: u64, slot: &MbrSlot) -> Result<Partition> {
        let part = self.place(index, base, slot);
        if slot.start == 0 || part.start + part.len > self.blocks.size() {
            return Err(Error::damaged(TABLE, self.claim(&part)));
        }
        Ok(part)
    }

    fn place(&self, index: u32, base: u64, slot: &MbrSlot) -> Partition {
        // 32-bit numbers of blocks of at most 64 KiB do not overflow.
        let (start, len) = ((base + slot.start) * self.lba, slot.count * self.lba);
        Partition { index, start, len, kind: format!("{:02x}", slot.kind), name: String::new() }
    }

    fn claim(&self, part: &Partition) -> String {
        format!("partition {} is {} bytes at {} of {}", part.index, part.len, part.start, self.blocks.size())
    }

    /// The logical partitions. Each sector of the chain has partitions, relative to that sector, and the next sector,
    /// relative to the start of the extended partition. Most have one of each, in this order; like Linux, this checks
    /// all four slots and numbers what it finds.
    fn logical(&self, outer: &MbrSlot) -> Result<Vec<Partition>> {
        let whole = self.partition(0, 0, outer)?;
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        let (mut next, mut count) = (0, outer.count);
        loop {
            let at = outer.start + next;
            if !seen.insert(at) || seen.len() > MOST_LOGICAL {
                return Err(Error::damaged(
                    TABLE,
                    format!("the chain of logical partitions does not end at block {at}"),
                ));
            }
            if next >= outer.count {
                return Err(Error::damaged(
                    TABLE,
                    format!("block {at} of the chain is outside of the extended partition"),
                ));
            }
            let mut sector = [0; 512];
            fill(self.blocks, at * self.lba, &mut sector)?;
            let Some(slots) = entries(&sector) else {
                return Err(Error::damaged(TABLE, format!("block {at} of the chain has no signature")));
            };
            for (slot, i) in slots.iter().zip(0..).filter(|(s, _)| s.used() && !s.extended()) {
                // The third and fourth slots may be garbage, and count only if they could be partitions.
                let end = slot.start + slot.count;
                if i >= 2 && (end > count || next + end > outer.count) {
                    continue;
                }
                let part = self.partition(5 + found.len() as u32, at, slot)?;
                if part.start + part.len > whole.start + whole.len {
                    return Err(Error::damaged(
                        TABLE,
                        format!("partition {} exceeds the extended partition", part.index),
                    ));
                }
                found.push(part);
            }
            let Some(link) = slots.iter().find(|s| s.used() && s.extended()) else {
                return Ok(found);
            };
            (next, count) = (link.start, link.count);
        }
    }
}
