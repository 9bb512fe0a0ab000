//! Directories: sets of 32-byte entries, each set with a checksum.

use super::damaged;
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::clusters::{FatNode, List, check_name, dos_time};
use crate::volume::{FileId, FileKind};
use crate::{Error, Result};

const ENTRY: usize = List::ENTRY;
const IN_USE: u8 = 0x80;
const SECONDARY: u8 = 0x40;
const BENIGN: u8 = 0x20;
const BITMAP: u8 = 0x81;
const UPCASE: u8 = 0x82;
const LABEL: u8 = 0x83;
const FILE: u8 = 0x85;
const STREAM: u8 = 0xC0;
const NAME: u8 = 0xC1;
const NAME_UNITS: usize = 15;
const DIRECTORY: u16 = 0x10;
const MOST_UPCASE: u64 = 128 << 10;

/// The contents of a directory; only the root has more than names.
#[derive(Default)]
pub(super) struct Contents {
    pub named: Vec<ExfatEntry>,
    pub upcase: Option<UpcaseTable>,
    pub label: String,
}

/// A file with its name.
pub(super) struct ExfatEntry {
    pub name: Vec<u16>,
    pub node: FatNode,
}

/// Location of the up-case table.
pub(super) struct UpcaseTable {
    pub first: u32,
    pub len: u64,
    pub checksum: u32,
}

pub(super) fn contents(list: &List) -> Result<Contents> {
    let mut out = Contents::default();
    let mut at = 0;
    while let Some(raw) = list.bytes.get(at..at + ENTRY) {
        let count = match raw[0] {
            0 => break,
            kind if kind & IN_USE == 0 => 0,
            FILE => {
                let set = list.bytes.get(at..at + ENTRY * (1 + usize::from(raw[1])));
                out.named.push(file(set.ok_or_else(|| bad(at, "ends outside of its directory"))?, list, at)?);
                raw[1].into()
            }
            UPCASE => {
                out.upcase = Some(table(raw)?);
                0
            }
            LABEL => {
                let units = (0..usize::from(raw[1]).min(11)).map(|i| u16_at(raw, 2 + 2 * i));
                out.label = String::from_utf16_lossy(&units.collect::<Vec<_>>());
                0
            }
            BITMAP => 0,
            kind if kind & SECONDARY != 0 => return Err(bad(at, "belongs to no file")),
            // A benign entry may be skipped, together with its secondary entries.
            kind if kind & BENIGN != 0 => raw[1].into(),
            kind => {
                return Err(Error::unsupported(
                    format!("a directory entry of type {kind:#x} on exFAT"),
                    "the specification forbids reading the directory without support for it",
                ));
            }
        };
        at += ENTRY * (1 + count);
    }
    Ok(out)
}

fn table(raw: &[u8]) -> Result<UpcaseTable> {
    let len = u64_at(raw, 24);
    if len == 0 || len > MOST_UPCASE {
        return Err(damaged(format!("its up-case table has {len} bytes")));
    }
    Ok(UpcaseTable { first: u32_at(raw, 20), len, checksum: u32_at(raw, 4) })
}

fn bad(at: usize, why: &str) -> Error {
    damaged(format!("the directory entry at byte {at} {why}"))
}

/// Decodes a set: the file, the place of its bytes, and its name in parts.
fn file(set: &[u8], list: &List, at: usize) -> Result<ExfatEntry> {
    let counted = set.iter().enumerate().filter(|(i, _)| !(2..4).contains(i));
    let sum = counted.fold(0_u16, |sum, (_, &b)| sum.rotate_right(1).wrapping_add(b.into()));
    if sum != u16_at(set, 2) {
        return Err(bad(at, "has a wrong checksum"));
    }
    let stream =
        set.get(ENTRY..2 * ENTRY).filter(|s| s[0] == STREAM).ok_or_else(|| bad(at, "has no stream"))?;
    let name = name(&set[2 * ENTRY..], stream[3].into()).ok_or_else(|| bad(at, "has not all of its name"))?;
    check_name(super::FS, &String::from_utf16_lossy(&name))?;
    Ok(ExfatEntry { name, node: node(set, stream, list.position(at), at)? })
}

fn name(rest: &[u8], len: usize) -> Option<Vec<u16>> {
    let mut name = Vec::with_capacity(len);
    for entry in rest.chunks_exact(ENTRY).take_while(|p| p[0] == NAME).take(len.div_ceil(NAME_UNITS)) {
        name.extend((0..NAME_UNITS).map(|i| u16_at(entry, 2 + 2 * i)));
    }
    name.truncate(len);
    (name.len() == len).then_some(name)
}

fn node(file: &[u8], stream: &[u8], position: u64, at: usize) -> Result<FatNode> {
    let kind = if u16_at(file, 4) & DIRECTORY != 0 { FileKind::Directory } else { FileKind::File };
    let (valid, len, first) = (u64_at(stream, 8), u64_at(stream, 24), u32_at(stream, 20));
    let allocated = stream[1] & 1 != 0;
    if valid > len || kind == FileKind::Directory && valid != len || len > 0 && !allocated {
        return Err(bad(at, &format!("has {valid} valid bytes of {len}, first cluster {first}")));
    }
    // A stamp of 32 bits, a count of 10 ms, an offset from UTC in quarters of an hour.
    let stamp = u32_at(file, 12);
    let zone = if file[23] & 0x80 != 0 { i64::from(((file[23] << 1) as i8) >> 1) * 900 } else { 0 };
    let tens = u32::from(file[21]);
    let seconds = dos_time((stamp >> 16) as u16, stamp as u16) + i64::from(tens / 100) - zone;
    let mtime = (seconds, tens % 100 * 10_000_000);
    let id = FileId { ino: position, generation: 0, len, mtime, ctime: mtime };
    Ok(FatNode { kind, id, first, valid, chained: stream[1] & 2 == 0 })
}
