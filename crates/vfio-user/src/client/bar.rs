//! BAR0 of a served controller: accessed by messages, and as memory if the server offers that.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use onehop_os::{Guard, HostMem, Registers};
use onehop_proto::regs::{GONE32, offset};

use super::connection::{Connection, Reply};
use crate::error::ClientError;
use crate::wire::{RegionInfo, command};

const BAR0: u32 = 0;
const PAGE: u64 = 4096;
/// Room for the answer about a region.
const ROOM: u32 = 4096;
/// Region flag: has capabilities. The sparse mmap capability.
const HAS_CAPABILITIES: u32 = 8;
const SPARSE_MMAP: u16 = 1;

/// A part of the BAR that is mapped into this process.
struct Area {
    range: Range<u64>,
    /// If the server cuts the file short, the rest reads as ones.
    _guard: Guard,
    mem: HostMem,
}

/// The registers.
pub(super) struct Bar0 {
    connection: Arc<Connection>,
    size: u32,
    areas: Vec<Area>,
}

impl Bar0 {
    pub(super) fn open(connection: Arc<Connection>) -> Result<Self, ClientError> {
        let ask = super::words([ROOM, 0, BAR0, 0, 0, 0, 0, 0]);
        let Reply { payload, fds } = connection.request(command::REGION_INFO, &ask, None)?;
        let info = RegionAnswer(&payload);
        let size = u32::try_from(info.u64(16)).unwrap_or(u32::MAX);
        if payload.len() < RegionInfo::BYTES || size <= offset::DOORBELLS {
            let why = format!("its BAR0 has {size} bytes, too few for doorbells");
            return Err(ClientError::Unfit { path: connection.path().into(), why });
        }
        let areas = info.areas().into_iter().filter(|area| area.end <= size.into());
        let areas = map_areas(areas, info.u64(24), fds);
        Ok(Self { connection, size, areas })
    }

    /// The memory behind a register.
    fn word(&self, at: u32) -> Option<&AtomicU32> {
        let at = u64::from(at);
        let area = self.areas.iter().find(|area| area.range.contains(&at))?;
        area.mem.word((at - area.range.start) as usize).ok()
    }
}

/// Maps parts of a region; a part that cannot be mapped is accessed by messages.
fn map_areas(areas: impl Iterator<Item = Range<u64>>, start: u64, fds: Vec<OwnedFd>) -> Vec<Area> {
    // There is a file for each part, or one for all.
    let files: Vec<File> = fds.into_iter().map(File::from).collect();
    let file = |i: usize| files.get(i).or_else(|| files.last());
    let map = |(i, range): (usize, Range<u64>)| {
        let bytes = usize::try_from(range.end - range.start).ok()?;
        let from = start.checked_add(range.start)?;
        let mem = HostMem::of_file_range(file(i)?, from, bytes, true).ok()?;
        let guard = Guard::of_device(&mem).ok()?;
        Some(Area { range, _guard: guard, mem })
    };
    areas.enumerate().filter_map(map).collect()
}

impl Registers for Bar0 {
    fn read32(&self, at: u32) -> u32 {
        if let Some(word) = self.word(at) {
            return word.load(Ordering::Acquire);
        }
        let read = self.connection.read(BAR0, at.into(), 4);
        read.ok().and_then(|raw| raw.try_into().ok()).map_or(GONE32, u32::from_le_bytes)
    }

    fn write32(&self, at: u32, value: u32) {
        match self.word(at) {
            Some(word) => word.store(value, Ordering::Release),
            None => self.connection.post(BAR0, at.into(), &value.to_le_bytes()),
        }
    }

    fn size(&self) -> u32 {
        self.size
    }
}

/// A server's description of a region; missing fields read as 0.
struct RegionAnswer<'a>(&'a [u8]);

impl RegionAnswer<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let field = self.0.get(at..).and_then(<[u8]>::first_chunk);
        field.copied().unwrap_or([0; N])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    /// The mappable parts, in whole pages.
    fn areas(&self) -> Vec<Range<u64>> {
        let mut areas = Vec::new();
        let mut at = if self.u32(4) & HAS_CAPABILITIES == 0 { 0 } else { self.u32(12) as usize };
        // Only forward links are followed, so the list ends.
        while at >= RegionInfo::BYTES && at < self.0.len() {
            let next = self.u32(at + 4) as usize;
            if u16::from_le_bytes(self.bytes(at)) == SPARSE_MMAP {
                let count = (self.u32(at + 8) as usize).min(self.0.len() / 16);
                areas.extend((0..count).map(|i| at + 16 + i * 16).filter_map(|at| self.area(at)));
            }
            at = if next > at { next } else { 0 };
        }
        areas
    }

    fn area(&self, at: usize) -> Option<Range<u64>> {
        let (start, bytes) = (self.u64(at), self.u64(at + 8));
        let whole = start.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE) && bytes != 0;
        start.checked_add(bytes).filter(|_| whole).map(|end| start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(first: u32, rest: &[u64]) -> Vec<u8> {
        let mut raw = super::super::words([ROOM, 0xf, 0, first]);
        raw.extend([0x4000u64, 0].iter().chain(rest).flat_map(|word| word.to_le_bytes()));
        raw
    }

    #[test]
    fn reads_the_parts_that_can_be_mapped() {
        let sparse = u64::from(SPARSE_MMAP) | 1 << 16;
        let raw = info(32, &[sparse, 1, 0x1000, 0x1000]);
        assert_eq!(RegionAnswer(&raw).areas(), std::slice::from_ref(&(0x1000..0x2000)));
        // Behind another capability; the second part is not in whole pages.
        let raw = info(32, &[9 | 48 << 32, 0, sparse, 2, 0x1000, 0x2000, 0x3000, 12]);
        assert_eq!(RegionAnswer(&raw).areas(), std::slice::from_ref(&(0x1000..0x3000)));
    }

    #[test]
    fn a_part_that_the_server_cuts_off_reads_as_ones() {
        let file = rustix::fs::memfd_create("server", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let server = File::from(file.try_clone().unwrap());
        server.set_len(0x3000).unwrap();
        let areas = map_areas(std::iter::once(0x1000..0x3000), 0, vec![file]);
        let word = |at| areas[0].mem.word(at).unwrap();
        word(0x1004).store(5, Ordering::Relaxed);
        server.set_len(0x2000).unwrap();
        assert_eq!((word(0).load(Ordering::Relaxed), word(0x1004).load(Ordering::Relaxed)), (0, GONE32));
    }

    #[test]
    fn nonsense_ends() {
        let sparse = u64::from(SPARSE_MMAP) | 1 << 16;
        for raw in [
            info(32, &[sparse | 32 << 32, u64::from(u32::MAX)]),
            info(u32::MAX, &[]),
            info(16, &[sparse, 1, 0x1000, 0x1000]),
            info(32, &[sparse, 1, u64::MAX - 0xfff, 0x1000]),
            info(32, &[sparse]),
        ] {
            assert_eq!(RegionAnswer(&raw).areas(), [], "{raw:?}");
        }
        assert_eq!(RegionAnswer(&[]).areas(), []);
    }
}
