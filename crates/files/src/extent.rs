//! Extents: where each byte of a file is, in the file's order, without gaps.

use crate::{Blocks, Error, Result};

/// Adjacent bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Number of bytes; never zero.
    pub len: u64,
    /// Where they are.
    pub place: Place,
}

/// Where the bytes of an extent are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// On the drive, starting at this byte of the *drive* (not of the partition).
    Drive(u64),
    /// A hole or unwritten space: reads as zeros; the drive's content does not count.
    Zeros,
    /// Here: the file system stores them in its metadata.
    Inline(Vec<u8>),
}

/// Collects a file's extents in order; fills holes, merges neighbours, cuts at the end of the file.
pub(crate) struct Builder {
    fs: &'static str,
    len: u64,
    at: u64,
    out: Vec<Extent>,
}

impl Builder {
    /// For a file of `len` bytes.
    pub(crate) fn new(fs: &'static str, len: u64) -> Self {
        Self { fs, len, at: 0, out: Vec::new() }
    }

    /// Adds `len` bytes at byte `offset` of the file: on the drive at `position`, or zeros. Offsets must increase.
    pub(crate) fn push(&mut self, offset: u64, len: u64, position: Option<u64>) -> Result<()> {
        if offset < self.at {
            return Err(Error::damaged(self.fs, format!("two extents hold byte {offset} of a file")));
        }
        self.zeros_until(offset.min(self.len));
        let len = len.min(self.len.saturating_sub(offset));
        if len > 0 {
            self.put(len, position.map_or(Place::Zeros, Place::Drive));
        }
        Ok(())
    }

    /// Sets the file's first bytes to inline data; zeros follow them.
    pub(crate) fn inline(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.put(bytes.len() as u64, Place::Inline(bytes));
        }
    }

    /// The finished list, padded with zeros to the end of the file. Files must not use a byte of the drive twice if
    /// `exclusive`.
    pub(crate) fn finish(mut self, exclusive: bool) -> Result<Vec<Extent>> {
        self.zeros_until(self.len);
        if exclusive {
            self.refuse_overlap()?;
        }
        Ok(self.out)
    }

    fn zeros_until(&mut self, offset: u64) {
        if offset > self.at {
            self.put(offset - self.at, Place::Zeros);
        }
    }

    fn put(&mut self, len: u64, place: Place) {
        match (self.out.last_mut(), &place) {
            (Some(Extent { len: have, place: Place::Zeros, .. }), Place::Zeros) => *have += len,
            (Some(Extent { len: have, place: Place::Drive(at), .. }), Place::Drive(next))
                if *at + *have == *next =>
            {
                *have += len;
            }
            _ => self.out.push(Extent { offset: self.at, len, place }),
        }
        self.at += len;
    }

    fn refuse_overlap(&self) -> Result<()> {
        let place = |e: &Extent| match e.place {
            Place::Drive(at) => Some((at, e.len)),
            _ => None,
        };
        let mut places: Vec<_> = self.out.iter().filter_map(place).collect();
        places.sort_unstable();
        match places.windows(2).find(|w| w[0].0 + w[0].1 > w[1].0) {
            None => Ok(()),
            Some(w) => {
                Err(Error::damaged(self.fs, format!("one file has the drive's byte {} twice", w[1].0)))
            }
        }
    }
}

/// The part of the list from the extent that holds byte `offset` on.
pub(crate) fn from_offset(extents: &[Extent], offset: u64) -> &[Extent] {
    &extents[extents.partition_point(|e| e.offset + e.len <= offset)..]
}

/// Reads a file with these extents from byte `offset` on, until `out` is full or the file ends, and returns the number
/// of bytes read. `drive` reads at a byte of the drive.
pub(crate) fn read(
    extents: &[Extent],
    offset: u64,
    out: &mut [u8],
    drive: impl Fn(u64, &mut [u8]) -> Result<()>,
) -> Result<usize> {
    let mut done = 0;
    for extent in from_offset(extents, offset) {
        if done == out.len() {
            break;
        }
        let within = offset + done as u64 - extent.offset;
        let part = usize::try_from(extent.len - within).unwrap_or(usize::MAX).min(out.len() - done);
        let out = &mut out[done..done + part];
        match &extent.place {
            Place::Drive(at) => drive(at + within, out)?,
            Place::Zeros => out.fill(0),
            // Inline bytes are in memory, so an offset in them fits `usize`.
            Place::Inline(bytes) => out.copy_from_slice(&bytes[within as usize..][..part]),
        }
        done += part;
    }
    Ok(done)
}

/// Reads a file with these extents from byte `offset` on, until `out` is full or the file ends, and returns the number
/// of bytes read.
///
/// # Errors
/// When the drive cannot be read.
pub fn read_extents(drive: &dyn Blocks, extents: &[Extent], offset: u64, out: &mut [u8]) -> Result<usize> {
    read(extents, offset, out, |at, out| {
        let len = out.len();
        drive.read_at(at, out).map_err(|source| Error::Read { offset: at, len, source })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_filled_neighbours_merged_and_the_end_is_cut() {
        let mut b = Builder::new("ext4", 10_000);
        b.push(1000, 1000, Some(5000)).unwrap();
        b.push(2000, 500, Some(6000)).unwrap();
        b.push(2500, 500, None).unwrap();
        b.push(4000, 4000, Some(20_000)).unwrap();
        b.push(9500, 4000, Some(50_000)).unwrap();
        b.push(20_000, 10, Some(90_000)).unwrap();
        let got: Vec<_> = b.finish(true).unwrap().into_iter().map(|e| (e.offset, e.len, e.place)).collect();
        let want = [
            (0, 1000, Place::Zeros),
            (1000, 1500, Place::Drive(5000)),
            (2500, 1500, Place::Zeros),
            (4000, 4000, Place::Drive(20_000)),
            (8000, 1500, Place::Zeros),
            (9500, 500, Place::Drive(50_000)),
        ];
        assert_eq!(got, want);
        assert_eq!(from_offset(&Builder::new("ext4", 7).finish(true).unwrap(), 7), []);
    }

    #[test]
    fn overlaps_are_refused_in_the_file_and_on_the_drive() {
        let mut b = Builder::new("ext4", 10_000);
        b.push(0, 1000, Some(5000)).unwrap();
        assert!(b.push(999, 10, None).is_err());
        b.push(2000, 1000, Some(5999)).unwrap();
        assert!(b.finish(true).unwrap_err().to_string().contains("5999"));
    }
}
