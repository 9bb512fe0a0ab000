//! Directory entries: a short name each, preceded by the parts of its long name in reverse order.

use crate::bytes::{text16, u16_at, u32_at};
use crate::clusters::{FatNode, List, check_name, dos_time, upper};
use crate::volume::{FileId, FileKind};
use crate::{Error, Result};

const ENTRY: usize = List::ENTRY;
const LONG: u8 = 0x0F;
const LABEL: u8 = 0x08;
const DIRECTORY: u8 = 0x10;
const REMOVED: u8 = 0xE5;
const LAST_PART: u8 = 0x40;
const MOST_PARTS: u8 = 20;

/// The upper half of code page 437, the default encoding of short names.
const CP437: &str = "ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u{a0}";

/// A file with its names.
pub(super) struct FatEntry {
    /// The long name, if it has one.
    pub name: String,
    short: String,
    pub node: FatNode,
}

impl FatEntry {
    /// Whether `name` matches this file, in any case.
    fn is(&self, name: &str) -> bool {
        let same = |own: &str| own.chars().map(upper).eq(name.chars().map(upper));
        same(&self.name) || same(&self.short)
    }
}

/// Finds the file for a name: an exact match, otherwise in another case. The directory's writer may have folded fewer
/// letters than onehop does, so two files may match.
pub(super) fn find(fs: &'static str, files: &[FatEntry], name: &str) -> Result<Option<FatNode>> {
    let ways: [fn(&FatEntry, &str) -> bool; 3] =
        [|f, name| f.name == name, |f, name| f.short == name, FatEntry::is];
    for is in ways {
        let mut found = files.iter().filter(|f| is(f, name));
        match (found.next(), found.next()) {
            (None, _) => {}
            (Some(file), None) => return Ok(Some(file.node)),
            (Some(file), Some(other)) => {
                return Err(Error::unsupported(
                    format!("`{name}` as the name of two files on {fs}"),
                    format!("the directory has `{}` and `{}`: write the exact name", file.name, other.name),
                ));
            }
        }
    }
    Ok(None)
}

/// All entries of a directory but `.` and `..`.
pub(super) fn entries(fs: &'static str, list: &List, wide_clusters: bool) -> Result<Vec<FatEntry>> {
    let mut found = Vec::new();
    let mut long = Long::default();
    for (i, raw) in list.bytes.chunks_exact(ENTRY).enumerate() {
        let attributes = raw[11];
        match raw[0] {
            0 => break,
            REMOVED => long = Long::default(),
            _ if attributes & 0x3F == LONG => long.add(raw),
            _ if attributes & LABEL != 0 => long = Long::default(),
            _ => {
                let name = std::mem::take(&mut long).name(raw);
                if &raw[..11] == b".          " || &raw[..11] == b"..         " {
                    continue;
                }
                let short = short(raw);
                let name = name.unwrap_or_else(|| short.clone());
                check_name(fs, &name)?;
                let node = node(raw, list.position(i * ENTRY), wide_clusters);
                found.push(FatEntry { name, short, node });
            }
        }
    }
    Ok(found)
}

fn node(raw: &[u8], position: u64, wide_clusters: bool) -> FatNode {
    let kind = if raw[11] & DIRECTORY != 0 { FileKind::Directory } else { FileKind::File };
    let len = if kind == FileKind::Directory { 0 } else { u32_at(raw, 28).into() };
    let mtime = (dos_time(u16_at(raw, 24), u16_at(raw, 22)), 0);
    let high = if wide_clusters { u16_at(raw, 20) } else { 0 };
    FatNode {
        kind,
        id: FileId { ino: position, generation: 0, len, mtime, ctime: mtime },
        first: u32::from(u16_at(raw, 26)) | u32::from(high) << 16,
        valid: len,
        chained: true,
    }
}

/// Eight characters, a dot, three characters; two bits say which half is in lower case.
fn short(raw: &[u8]) -> String {
    let part = |bytes: &[u8], lower: bool| -> String {
        let end = bytes.iter().rposition(|&b| b != b' ').map_or(0, |last| last + 1);
        let one = |&b: &u8| match b {
            128.. => CP437.chars().nth(usize::from(b) - 128).unwrap_or(char::REPLACEMENT_CHARACTER),
            _ if lower => char::from(b.to_ascii_lowercase()),
            _ => char::from(b),
        };
        bytes[..end].iter().map(one).collect()
    };
    let mut base: [u8; 8] = std::array::from_fn(|i| raw[i]);
    if base[0] == 0x05 {
        base[0] = REMOVED;
    }
    let (base, extension) = (part(&base, raw[12] & 0x08 != 0), part(&raw[8..11], raw[12] & 0x10 != 0));
    if extension.is_empty() { base } else { format!("{base}.{extension}") }
}

/// The parts of a long name seen so far.
#[derive(Default)]
struct Long {
    /// In stored order: the last part first.
    parts: Vec<[u16; 13]>,
    next: u8,
    checksum: u8,
}

impl Long {
    fn add(&mut self, raw: &[u8]) {
        let number = raw[0] & !LAST_PART;
        if raw[0] & LAST_PART != 0 && (1..=MOST_PARTS).contains(&number) {
            *self = Self { parts: Vec::new(), next: number, checksum: raw[13] };
        }
        if number == 0 || number != self.next || raw[13] != self.checksum {
            // An incomplete long name is ignored in favour of the short one.
            *self = Self::default();
            return;
        }
        self.next -= 1;
        let offset = |i: usize| match i {
            0..5 => 1 + 2 * i,
            5..11 => 14 + 2 * (i - 5),
            _ => 28 + 2 * (i - 11),
        };
        self.parts.push(std::array::from_fn(|i| u16_at(raw, offset(i))));
    }

    /// The name, if all parts were there and belong to this short name.
    fn name(self, raw: &[u8]) -> Option<String> {
        let sum = raw[..11].iter().fold(0_u8, |sum, &b| sum.rotate_right(1).wrapping_add(b));
        if self.parts.is_empty() || self.next != 0 || sum != self.checksum {
            return None;
        }
        Some(text16(self.parts.iter().rev().flatten().copied()))
    }
}
