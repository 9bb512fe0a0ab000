//! Mappings: memory that the device can reach.

use std::io;
use std::os::fd::AsRawFd;

use onehop_os::{BusRange, DmaBuf, HostMem, Mapped};
use onehop_proto::BusAddr;

use super::refusal;
use super::session::Session;
use super::sys::{self, Map, MemoryKind, Seg};
use crate::pages::{PageSpan, trim};
use crate::{Address, Result};

/// Initial room for runs; the module returns the actual number.
const ROOM: usize = 1024;
/// Attempts, because the number of runs may change between two calls.
const TRIES: usize = 4;

/// The device's access to memory, and requirements on the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// The device may read.
    pub read: bool,
    /// The device may write.
    pub write: bool,
    /// Chunks of this size must be contiguous on the bus, for engines without scatter lists.
    pub chunk: Option<u64>,
    /// The exporter may move the memory, which stops the device. Otherwise the memory is pinned.
    pub movable: bool,
}

impl Access {
    /// Read and write, any addresses.
    pub const BOTH: Self = Self { read: true, write: true, chunk: None, movable: false };

    fn flags(&self) -> u32 {
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        flag(self.read, sys::MAP_READ)
            | flag(self.write, sys::MAP_WRITE)
            | flag(self.movable, sys::MAP_NOPIN)
            | flag(self.chunk.is_some(), sys::MAP_CHUNKED)
    }

    fn request(&self) -> Map {
        Map { flags: self.flags(), chunk: self.chunk.unwrap_or(0), ..Map::default() }
    }
}

/// Memory that the device can reach until this is dropped. Drop it only after all commands that use it have ended.
pub struct Mapping {
    runs: Vec<BusRange>,
    undo: Undo,
}

/// Undoes a mapping; then the session is released, and then the memory.
struct Undo {
    id: u32,
    session: Session,
    _memory: Option<HostMem>,
}

impl Drop for Undo {
    fn drop(&mut self) {
        // A device that has gone has no mappings.
        let _ = sys::unmap(self.session.file(), self.id);
    }
}

impl Mapping {
    pub(super) fn of_host(session: &Session, memory: &HostMem, access: Access) -> Result<Self> {
        let span = PageSpan::of(memory);
        // Host memory has no exporter.
        let access = Access { movable: false, ..access };
        let request = Map { offset: span.start as u64, len: span.len as u64, ..access.request() };
        let mut mapping = Self::new(session, MemoryKind::User, request, Some(memory.clone()))?;
        trim(&mut mapping.runs, span.skip as u64, memory.len() as u64);
        Ok(mapping)
    }

    pub(super) fn of_dma_buf(session: &Session, buffer: &DmaBuf, access: Access) -> Result<Self> {
        let fd = buffer.fd.as_raw_fd();
        let request = Map { fd, offset: buffer.offset, len: buffer.bytes, ..access.request() };
        Self::new(session, MemoryKind::DmaBuf, request, None)
    }

    pub(super) fn of_peer(
        session: &Session,
        (peer, bar, offset, len): (Address, u8, u64, u64),
        access: Access,
    ) -> Result<Self> {
        let access = Access { movable: false, ..access };
        let request = Map {
            offset,
            len,
            domain: peer.domain,
            bus: peer.bus,
            devfn: peer.device << 3 | peer.function,
            bar: bar.into(),
            ..access.request()
        };
        Self::new(session, MemoryKind::Peer, request, None)
    }

    fn new(session: &Session, kind: MemoryKind, request: Map, memory: Option<HostMem>) -> Result<Self> {
        let mut segs = vec![Seg::default(); ROOM];
        let mut failed = io::Error::from_raw_os_error(libc::ENOSPC);
        let mut map = request.clone();
        for _ in 0..TRIES {
            map = request.clone();
            // SAFETY: `HostMem` is memory that may change at any time, and `Undo` holds a handle on it until it
            // has been unmapped. That fails only if there is no such mapping any more (ENODEV, ENOENT), and the
            // module itself pins the pages of one that there is.
            match unsafe { sys::map(session.file(), kind, &mut map, &mut segs) } {
                Ok(()) => {
                    segs.truncate(map.nsegs as usize);
                    let run = |seg: &Seg| BusRange { addr: BusAddr(seg.addr), len: seg.len };
                    let undo = Undo { id: map.id, session: session.clone(), _memory: memory };
                    return Ok(Self { runs: segs.iter().map(run).collect(), undo });
                }
                Err(error) => failed = error,
            }
            if failed.raw_os_error() != Some(libc::ENOSPC) || map.why != sys::WHY_ROOM {
                break;
            }
            segs = vec![Seg::default(); map.nsegs as usize];
        }
        let refusal = refusal::map(&failed, kind, &map, || session.info().ok());
        let call = match kind {
            MemoryKind::User => "OH_MAP_USER",
            MemoryKind::DmaBuf => "OH_MAP_DMABUF",
            MemoryKind::Peer => "OH_MAP_PEER",
        };
        Err(refusal::error(session.address(), call, refusal))
    }

    /// The bus addresses, in order.
    #[must_use]
    pub fn runs(&self) -> &[BusRange] {
        &self.runs
    }

    /// Converts to the type that all mappers return.
    #[must_use]
    pub fn into_mapped(self) -> Mapped {
        Mapped::new(self.runs, Box::new(self.undo))
    }

    /// A part of it, as the type that all mappers return.
    pub(super) fn part(mut self, skip: u64, bytes: u64) -> Mapped {
        trim(&mut self.runs, skip, bytes);
        self.into_mapped()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_becomes_flags() {
        assert_eq!(Access::BOTH.flags(), 3);
        let access = Access { write: false, chunk: Some(65536), movable: true, ..Access::BOTH };
        let request = access.request();
        assert_eq!((request.flags, request.chunk), (1 | 4 | 8, 65536));
    }
}
