//! Copies of many ranges between several memories.

use onehop_block::ranges::{ALIGN, entry};
use onehop_os::DmaMemory;

use crate::{Error, Region, Result};

/// Bytes to copy from one memory of a list to another of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyRange {
    /// The number of the memory that is copied from, and the offset in it.
    pub from: (usize, usize),
    /// The same for the memory that is copied to.
    pub to: (usize, usize),
    /// How many bytes.
    pub bytes: usize,
}

impl CopyRange {
    /// Checks that it lies within two of these memories.
    pub(crate) fn check(&self, memories: &[Region]) -> Result<()> {
        if let Some(host) = memories.get(self.to.0).and_then(DmaMemory::host).filter(|_| self.bytes > 0) {
            host.check_writable_range(0, 0)?;
        }
        for (number, offset) in [self.from, self.to] {
            let len = memories.get(number).map_or(0, Region::len);
            if offset > len || self.bytes > len - offset {
                return Err(onehop_os::Error::OutOfRange { offset, bytes: self.bytes, len }.into());
            }
        }
        Ok(())
    }
}

/// Copies ranges in any order. Dropping it waits for all of them.
pub trait RangeCopier: Send {
    /// Starts copies between these memories, which are kept until they have ended.
    ///
    /// # Errors
    /// When a range does not lie within its memories, the GPU does not reach one of them, or it fails. Some of the copies may
    /// have been started.
    fn start(&mut self, memories: &[Region], ranges: &[CopyRange]) -> Result<()>;
    /// Waits until all copies have ended.
    ///
    /// # Errors
    /// When one failed. They have ended unless [`Error::is_under_way`].
    fn wait(&mut self) -> Result<()>;
}

/// Most bytes of an entry of a kernel's list: long ranges are shared among warps.
const MOST_ENTRY: usize = 8 << 10;

/// Ranges that a kernel copies, as entries of its lists, and those that are left to the copy engine.
#[derive(Default)]
pub(crate) struct DividedRanges {
    /// Into GPU memory, or within it.
    pub(crate) into: Vec<[u64; 4]>,
    /// Out to host memory.
    pub(crate) out: Vec<[u64; 4]>,
    pub(crate) rest: Vec<CopyRange>,
}

impl DividedRanges {
    /// A kernel copies ranges of fewer bytes than `below` between memories that it reaches.
    pub(crate) fn new(
        memories: &[Region],
        ranges: &[CopyRange],
        below: usize,
        reaches: impl Fn(&Region) -> bool,
    ) -> Self {
        let reached: Vec<bool> = memories.iter().map(reaches).collect();
        let mut this = Self::default();
        for range in ranges.iter().filter(|range| range.bytes > 0) {
            let place = |(number, offset): (usize, usize)| memories[number].addr().plus(offset as u64);
            let (from, to) = (place(range.from), place(range.to));
            let is_aligned = (from.0 | to.0 | range.bytes as u64).is_multiple_of(ALIGN);
            if range.bytes >= below || !is_aligned || !reached[range.from.0] || !reached[range.to.0] {
                this.rest.push(*range);
                continue;
            }
            let list = if memories[range.to.0].host().is_some() { &mut this.out } else { &mut this.into };
            for at in (0..range.bytes).step_by(MOST_ENTRY) {
                let bytes = MOST_ENTRY.min(range.bytes - at) as u32;
                list.push(entry(from.plus(at as u64), to.plus(at as u64), bytes));
            }
        }
        this
    }
}

/// Copies at once, for memory that the CPU reaches.
pub(crate) struct RangesAtOnce;

/// Bytes copied at a time.
const CHUNK: usize = 64 << 10;

impl RangeCopier for RangesAtOnce {
    fn start(&mut self, memories: &[Region], ranges: &[CopyRange]) -> Result<()> {
        ranges.iter().try_for_each(|range| range.check(memories))?;
        let most = ranges.iter().map(|range| range.bytes).max().unwrap_or(0);
        let mut buffer = vec![0; most.min(CHUNK)];
        for range in ranges {
            let ((from, from_at), (to, to_at)) = (range.from, range.to);
            for at in (0..range.bytes).step_by(CHUNK) {
                let part = &mut buffer[..CHUNK.min(range.bytes - at)];
                memories[from].read(from_at + at, part)?;
                memories[to].write(to_at + at, part)?;
            }
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The error of a GPU that has no such copier.
pub(crate) fn none(name: &str) -> Error {
    let why = format!("{name} has no copies of ranges");
    Error::NotSupported { what: "copying ranges of memory".into(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Emulated, Gpu, Place};

    #[test]
    fn ranges_are_kept_within_bounds() {
        let gpu = Emulated::new();
        let memories = [Place::PinnedHost, Place::Vram, Place::Vram]
            .map(|place| gpu.alloc(place, 200_000).unwrap().slice(0..200_000).unwrap());
        let data: Vec<u8> = (0..200_000_u32).map(|i| ((i * 7) >> 3) as u8).collect();
        memories[0].write(0, &data).unwrap();
        let mut copier = gpu.range_copier(0).unwrap();
        let range = |from, to, bytes| CopyRange { from, to, bytes };
        let ranges =
            [range((0, 3), (1, 5), 150_001), range((0, 0), (2, 199_999), 1), range((0, 9), (2, 0), 0)];
        copier.start(&memories, &ranges).unwrap();
        copier.start(&memories, &[range((1, 5), (2, 0), 4)]).unwrap();
        copier.wait().unwrap();
        let mut found = vec![0; 150_001];
        memories[1].read(5, &mut found).unwrap();
        assert!(found == data[3..150_004]);
        let mut found = [0; 4];
        memories[2].read(0, &mut found).unwrap();
        assert_eq!(found, data[3..7]);
        memories[2].read(199_996, &mut found).unwrap();
        assert_eq!(found, [0, 0, 0, data[0]]);
        for bad in [
            range((0, 0), (3, 0), 1),
            range((0, 199_999), (1, 0), 2),
            range((0, 0), (1, 200_001), 0),
            range((0, usize::MAX), (1, 0), 2),
            range((0, 2), (1, 0), usize::MAX),
        ] {
            assert!(copier.start(&memories, &[bad]).is_err(), "{bad:?}");
        }
    }
}
