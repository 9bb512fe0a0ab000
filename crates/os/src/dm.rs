//! Device mapper tables, which show what sysfs does not about a logical volume.

use std::fs::File;

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use crate::{Error, Result};

const CONTROL: &str = "/dev/mapper/control";
const DATA_BYTES: usize = 16 << 10;
/// Requests the table instead of the state.
const STATUS_TABLE: u32 = 1 << 4;
/// The answer did not fit.
const BUFFER_FULL: u32 = 1 << 8;
const TARGET_BYTES: usize = 40;

/// One row of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmTarget {
    /// The first 512-byte sector.
    pub start: u64,
    /// How many.
    pub sectors: u64,
    /// `linear`, `crypt` …
    pub kind: String,
    /// Its arguments, as `dmsetup table` prints them.
    pub args: String,
}

/// `struct dm_ioctl`.
#[repr(C)]
struct DmIoctl {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event_nr: u32,
    padding: u32,
    dev: u64,
    name: [u8; 128],
    uuid: [u8; 129],
    data: [u8; 7],
}

#[repr(C)]
struct DmRequest {
    head: DmIoctl,
    data: [u8; DATA_BYTES],
}

const TABLE_STATUS: Opcode = opcode::read_write::<DmIoctl>(0xFD, 12);

/// The table of mapped device `major:minor`. Needs root.
///
/// # Errors
/// When the device mapper does not exist or refuses, or the table exceeds 16 KiB.
pub fn dm_table(major: u32, minor: u32) -> Result<Vec<DmTarget>> {
    let control = File::open(CONTROL).map_err(|e| Error::system(format!("opening {CONTROL}"), e))?;
    let head = DmIoctl {
        version: [4, 0, 0],
        data_size: size_of::<DmRequest>() as u32,
        data_start: size_of::<DmIoctl>() as u32,
        target_count: 0,
        open_count: 0,
        flags: STATUS_TABLE,
        event_nr: 0,
        padding: 0,
        dev: u64::from(minor & 0xFF) | u64::from(major) << 8 | u64::from(minor & !0xFF) << 12,
        name: [0; 128],
        uuid: [0; 129],
        data: [0; 7],
    };
    let mut request = Box::new(DmRequest { head, data: [0; DATA_BYTES] });
    // SAFETY: DM_TABLE_STATUS takes this head and writes it and its data, `data_size` bytes in all: that is the
    // size of `DmRequest`, whose fields are integers, for which all bits are valid.
    let done = unsafe { ioctl(&control, Updater::<TABLE_STATUS, DmRequest>::new(&mut request)) };
    done.map_err(|e| Error::system(format!("the device mapper's table of {major}:{minor}"), e))?;
    if request.head.flags & BUFFER_FULL != 0 {
        let what =
            format!("the device mapper's table of {major}:{minor}, which is longer than {DATA_BYTES} bytes,");
        return Err(Error::system(what, std::io::ErrorKind::OutOfMemory));
    }
    parse(&request.data, request.head.target_count).ok_or_else(|| {
        Error::system(
            format!("the device mapper's table of {major}:{minor}"),
            std::io::ErrorKind::InvalidData,
        )
    })
}

/// Rows of 40 bytes, each followed by its arguments and the offset of the next.
fn parse(data: &[u8], count: u32) -> Option<Vec<DmTarget>> {
    let text = |bytes: &[u8]| {
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    };
    let mut at = 0;
    let mut targets = Vec::new();
    for _ in 0..count {
        let row = data.get(at..at + TARGET_BYTES)?;
        let word = |i: usize| row[i..i + 8].try_into().map(u64::from_le_bytes).ok();
        let next = u32::from_le_bytes(row[20..24].try_into().ok()?) as usize;
        let end = if next > at { next.min(data.len()) } else { data.len() };
        let args = text(data.get(at + TARGET_BYTES..end)?);
        targets.push(DmTarget { start: word(0)?, sectors: word(8)?, kind: text(&row[24..40]), args });
        at = next;
    }
    Some(targets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_taken_apart() {
        assert_eq!((TABLE_STATUS, size_of::<DmIoctl>()), (0xC138_FD0C, 312));
        let row = |start: u64, len: u64, next: u32, kind: &str, args: &str| {
            let mut row = [start.to_le_bytes(), len.to_le_bytes()].concat();
            row.extend(0_u32.to_le_bytes());
            row.extend(next.to_le_bytes());
            row.extend(kind.as_bytes());
            row.resize(TARGET_BYTES, 0);
            row.extend(args.as_bytes());
            row.resize(64, 0);
            row
        };
        let data = [row(0, 100, 64, "linear", "259:1 2048"), row(100, 8, 128, "zero", "")].concat();
        let target = |start, sectors, kind: &str, args: &str| DmTarget {
            start,
            sectors,
            kind: kind.to_owned(),
            args: args.to_owned(),
        };
        let want = vec![target(0, 100, "linear", "259:1 2048"), target(100, 8, "zero", "")];
        assert_eq!(parse(&data, 2), Some(want));
        assert_eq!(parse(&data, 3), None);
        assert_eq!(parse(&data[..30], 1), None);
    }
}
