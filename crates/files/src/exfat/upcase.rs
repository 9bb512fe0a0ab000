//! The up-case table, by which a volume defines which names are equal.

use super::damaged;
use crate::Result;

/// Size of a table for all of UTF-16.
const MOST_BYTES: usize = 65536 * 2;
/// In the stored form, this value and a count stand for that many characters without upper case.
const SAME: u16 = 0xFFFF;

/// The upper case of each character that the table covers.
#[derive(Default)]
pub(super) struct Upcase(Vec<u16>);

impl Upcase {
    pub(super) fn parse(raw: &[u8], want: u32) -> Result<Self> {
        let sum = raw.iter().fold(0_u32, |sum, &b| sum.rotate_right(1).wrapping_add(b.into()));
        if sum != want {
            return Err(damaged("the checksum of its up-case table is wrong"));
        }
        if raw.len() > MOST_BYTES || !raw.len().is_multiple_of(2) {
            return Err(damaged(format!("its up-case table has {} bytes", raw.len())));
        }
        let mut table: Vec<u16> = Vec::new();
        let mut units = raw.chunks_exact(2).map(|u| u16::from_le_bytes([u[0], u[1]]));
        while let Some(unit) = units.next() {
            let count = if unit == SAME { units.next() } else { None };
            match count {
                Some(count) => {
                    table.extend((table.len()..table.len() + usize::from(count)).map(|i| i as u16))
                }
                None => table.push(unit),
            }
            if table.len() > MOST_BYTES / 2 {
                return Err(damaged("its up-case table is for more than 65536 characters"));
            }
        }
        Ok(Self(table))
    }

    pub(super) fn of(&self, unit: u16) -> u16 {
        self.0.get(usize::from(unit)).copied().unwrap_or(unit)
    }
}
