//! Memory that the device reaches.

use std::io;
use std::os::fd::AsRawFd;

use onehop_os::{DmaBuf, HostMem, Mapped, Run};
use onehop_proto::BusAddr;

use super::refusal;
use super::session::Session;
use super::sys::{self, Kind, Map, Seg};
use crate::pages::{Span, trim};
use crate::{Address, Result};

/// Runs that there is room for at first; the module says how many there are.
const ROOM: usize = 1024;
/// A mapping is tried again where it had another number of runs than the time before.
const TRIES: usize = 4;

/// What the device may do with memory, and how the memory has to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// It may read it.
    pub read: bool,
    /// It may write it.
    pub write: bool,
    /// Each so many bytes have to be one run of addresses, for engines without lists.
    pub chunk: Option<u64>,
    /// The driver that exported it may move it, which stops the device. Without this it is held where it is.
    pub movable: bool,
}

impl Access {
    /// It may do both, and takes what addresses there are.
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

/// Memory that the device reaches until this is dropped. Whoever drops it has seen the end of all commands that use it.
pub struct Mapping {
    runs: Vec<Run>,
    undo: Undo,
}

/// Undoes a mapping; its memory goes after that, and the session after the memory.
struct Undo {
    id: u32,
    session: Session,
    _memory: Option<HostMem>,
}

impl Drop for Undo {
    fn drop(&mut self) {
        // A device that has gone has no mappings any more.
        let _ = sys::unmap(self.session.file(), self.id);
    }
}

impl Mapping {
    pub(super) fn of_host(session: &Session, memory: &HostMem, access: Access) -> Result<Self> {
        let span = Span::of(memory);
        // Pages are host memory's; an exporter has no part in it.
        let access = Access { movable: false, ..access };
        let request = Map { offset: span.start as u64, len: span.len as u64, ..access.request() };
        let mut mapping = Self::new(session, Kind::User, request, Some(memory.clone()))?;
        trim(&mut mapping.runs, span.skip as u64, memory.len() as u64);
        Ok(mapping)
    }

    pub(super) fn of_dma_buf(session: &Session, buffer: &DmaBuf, access: Access) -> Result<Self> {
        let fd = buffer.fd.as_raw_fd();
        let request = Map { fd, offset: buffer.offset, len: buffer.bytes, ..access.request() };
        Self::new(session, Kind::DmaBuf, request, None)
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
        Self::new(session, Kind::Peer, request, None)
    }

    fn new(session: &Session, kind: Kind, request: Map, memory: Option<HostMem>) -> Result<Self> {
        let mut segs = vec![Seg::default(); ROOM];
        let mut failed = io::Error::from_raw_os_error(libc::ENOSPC);
        let mut map = request.clone();
        for _ in 0..TRIES {
            map = request.clone();
            // SAFETY: `Undo` holds a handle on the memory until it has been unmapped; what `HostMem` is may change any time.
            match unsafe { sys::map(session.file(), kind, &mut map, &mut segs) } {
                Ok(()) => {
                    segs.truncate(map.nsegs as usize);
                    let run = |seg: &Seg| Run { addr: BusAddr(seg.addr), len: seg.len };
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
        let bits = || session.info().map_or(64, |info| info.mask_bits);
        let refusal = refusal::map(&failed, kind, &map, bits, || session.info().is_err());
        let call = match kind {
            Kind::User => "OH_MAP_USER",
            Kind::DmaBuf => "OH_MAP_DMABUF",
            Kind::Peer => "OH_MAP_PEER",
        };
        Err(refusal::error(session.address(), call, refusal))
    }

    /// Where the device finds it, in order.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// As all other mappers give it.
    #[must_use]
    pub fn into_mapped(self) -> Mapped {
        Mapped::new(self.runs, Box::new(self.undo))
    }

    /// A part of it, as all other mappers give it.
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
