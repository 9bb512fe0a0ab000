//! BARs: bus addresses of a device's memory and registers, from the file `resource`.

use std::fmt;

use serde::Serialize;

use crate::{Error, Result};

/// Rows of `resource` that are BARs; the seventh is the expansion ROM. SR-IOV BARs and bridge windows follow.
const BARS: usize = 7;
const ROM: usize = 6;
/// Upper limit of rows; the file has seventeen rows of 57 bytes.
const MAX_ROWS: usize = 32;

/// The kernel's flags, in the third column.
mod flag {
    pub(super) const IO: u64 = 0x100;
    pub(super) const MEMORY: u64 = 0x200;
    pub(super) const PREFETCH: u64 = 0x2000;
    pub(super) const WIDE: u64 = 0x10_0000;
    pub(super) const UNSET: u64 = 0x2000_0000;
}

/// What is behind a BAR.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BarKind {
    /// Memory.
    Memory,
    /// Ports.
    Io,
    /// The expansion ROM.
    Rom,
}

/// A range of bus addresses that a device decodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Bar {
    /// Its number; 6 is the ROM.
    pub index: usize,
    /// Its first address; meaningless if none is assigned.
    pub start: u64,
    /// Its length, never 0.
    pub size: u64,
    /// What is behind it.
    pub kind: BarKind,
    /// Reads have no side effects, so they may be merged.
    pub prefetchable: bool,
    /// It may be above 4 GiB.
    pub wide: bool,
    /// It has an address.
    pub assigned: bool,
}

impl Bar {
    /// Its last address.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.start.saturating_add(self.size - 1)
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.assigned {
            write!(f, "{:#x}–{:#x}", self.start, self.last())
        } else {
            write!(f, "no address")
        }
    }
}

/// Parses the BARs in a `resource` file; `path` is for errors.
///
/// # Errors
/// When a row is malformed.
pub fn parse_resource(path: &str, text: &str) -> Result<Vec<Bar>> {
    let mut bars = Vec::new();
    for (index, row) in text.lines().take(MAX_ROWS).enumerate() {
        let bad = || Error::garbage(path, row, "row of start, end and flags");
        let numbers: Option<Vec<u64>> = row.split_whitespace().map(hex).collect();
        let Some([start, end, flags]) = numbers.as_deref().and_then(|n| <[u64; 3]>::try_from(n).ok()) else {
            return Err(bad());
        };
        if (start, end, flags) == (0, 0, 0) || index >= BARS {
            continue;
        }
        let size = end.checked_sub(start).and_then(|last| last.checked_add(1)).ok_or_else(bad)?;
        let kind = match flags {
            _ if index == ROM => BarKind::Rom,
            f if f & flag::IO != 0 => BarKind::Io,
            f if f & flag::MEMORY != 0 => BarKind::Memory,
            _ => continue,
        };
        bars.push(Bar {
            index,
            start,
            size,
            kind,
            prefetchable: flags & flag::PREFETCH != 0,
            wide: flags & flag::WIDE != 0,
            assigned: flags & flag::UNSET == 0 && start != 0,
        });
    }
    Ok(bars)
}

/// Parses a hexadecimal number after `0x`.
pub(crate) fn hex(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x").filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_bars() {
        let text = "0x00000000f6000000 0x00000000f6ffffff 0x0000000000040200\n\
                    0x000000d000000000 0x000000d7ffffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x0000000000000000 0x0000000001ffffff 0x000000002014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x000000000000e000 0x000000000000e07f 0x0000000000040101\n\
                    0x00000000f7000000 0x00000000f707ffff 0x0000000000046200\n\
                    0x00000000f8000000 0x00000000f8ffffff 0x0000000000000200\n";
        let bars = parse_resource("resource", text).unwrap();
        assert_eq!(bars.iter().map(|b| b.index).collect::<Vec<_>>(), [0, 1, 3, 5, 6]);
        let big = bars[1];
        assert_eq!((big.size, big.prefetchable, big.wide, big.assigned), (32 << 30, true, true, true));
        assert_eq!((bars[2].assigned, bars[2].size, bars[3].kind), (false, 32 << 20, BarKind::Io));
        assert_eq!((bars[4].kind, big.last()), (BarKind::Rom, 0xd7_ffff_ffff));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in
            ["x", "0x1 0x2", "0x2 0x1 0x200", "0x0 0xffffffffffffffff 0x200", "1 2 3", "0x1 0x2 0x3 0x4"]
        {
            assert!(parse_resource("resource", bad).is_err(), "{bad}");
        }
        assert_eq!(parse_resource("resource", "").unwrap(), []);
    }
}
