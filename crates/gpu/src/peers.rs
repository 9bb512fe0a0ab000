//! GPU memory that several processes of a machine share, and copies between them.

use std::ops::Range;
use std::os::fd::OwnedFd;

use onehop_os::{DmaMemory, Memfd};

use crate::cuda::Ticket;
use crate::{Copier, Emulated, Error, Gpu, Place, Region, Result};

/// The emulated GPU's identifier in tickets.
const EMULATED: [u8; 16] = *b"onehop emulated ";

/// What another process needs to open GPU memory. The memory must outlive its use there.
#[derive(Debug)]
pub struct SharedRegion {
    /// Which memory.
    pub ticket: Ticket,
    /// The descriptor that goes with it, if any.
    pub fd: Option<OwnedFd>,
}

/// A GPU whose memory other processes of this machine can open: see [`Gpu::peers`](crate::Gpu::peers).
pub trait PeerMemory {
    /// New memory to share, for a caller that will write all of it except `blank`, which is zeroed. Other memory of the GPU
    /// can usually be shared as well.
    ///
    /// # Errors
    /// When memory is short.
    fn alloc_shared(&self, bytes: usize, blank: &[Range<usize>]) -> Result<Region>;
    /// Makes memory known to another process.
    ///
    /// # Errors
    /// When the driver refuses, or it is no GPU memory that can be shared.
    fn share(&self, region: &Region) -> Result<SharedRegion>;
    /// Opens memory of another process, on this GPU or on another one that this one reaches. Only copiers reach it.
    ///
    /// # Errors
    /// When it is not the intended memory, this GPU does not reach it, or the driver refuses.
    fn open_shared(&self, shared: &SharedRegion) -> Result<Region>;
    /// A copier to another process's GPU memory, from memory of this GPU or from host memory.
    ///
    /// # Errors
    /// When one of them is not memory that this GPU reaches.
    fn peer_copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>>;
}

/// Memory of an emulated GPU is shared by a memfd.
impl PeerMemory for Emulated {
    fn alloc_shared(&self, bytes: usize, _: &[Range<usize>]) -> Result<Region> {
        let file = Memfd::new("onehop emulated GPU memory", bytes)?;
        self.adopt(Place::Vram, self.shared.add(file.map()?, file.into()))
    }

    fn share(&self, region: &Region) -> Result<SharedRegion> {
        let found = region.host().and_then(|memory| self.shared.find(memory));
        let Some((offset, file)) = found else {
            let why = "it was not allocated to be shared".into();
            return Err(Error::NotSupported { what: "sharing emulated GPU memory".into(), why });
        };
        let ticket = Ticket {
            by_fd: true,
            gpu: EMULATED,
            allocation: file.bytes() as u64,
            offset: offset as u64,
            bytes: region.len() as u64,
            buffer: 0,
            handle: [0; 64],
        };
        Ok(SharedRegion { ticket, fd: Some(file.duplicate()?) })
    }

    fn open_shared(&self, shared: &SharedRegion) -> Result<Region> {
        let foreign = |why: &str| Error::Foreign { why: why.into() };
        let Ticket { gpu, offset, bytes, .. } = shared.ticket;
        let (true, Some(fd)) = (gpu == EMULATED, &shared.fd) else {
            return Err(foreign("it is not an emulated GPU's"));
        };
        let fd = fd.try_clone().map_err(|e| foreign(&format!("its descriptor cannot be copied: {e}")))?;
        let whole = Memfd::of_other(fd)?.map()?;
        let end = offset.checked_add(bytes).filter(|end| *end <= whole.len() as u64);
        let end = end.ok_or_else(|| foreign("the ticket's memory does not lie within its file"))?;
        self.adopt(Place::Vram, whole.slice(offset as usize..end as usize)?)
    }

    fn peer_copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>> {
        self.copier(from, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_the_same_memory() {
        let (mine, others) = (Emulated::new(), Emulated::new());
        let memory = mine.alloc_shared(10_000, &[]).unwrap();
        memory.write(0, &[7; 10_000]).unwrap();
        let part = memory.slice(5000..9000).unwrap();
        let opened = others.open_shared(&mine.share(&part).unwrap()).unwrap();
        assert_eq!(opened.len(), 4000);
        let mut got = [0; 4000];
        opened.read(0, &mut got).unwrap();
        assert_eq!(got, [7; 4000]);
        opened.write(1, b"theirs").unwrap();
        let mut got = [0; 8];
        memory.read(5000, &mut got).unwrap();
        assert_eq!(&got, b"\x07theirs\x07");
    }

    #[test]
    fn other_memory_and_forged_tickets_are_refused() {
        let gpu = Emulated::new();
        assert!(gpu.share(&gpu.alloc(Place::Vram, 4096).unwrap()).is_err());
        let shared = gpu.share(&gpu.alloc_shared(4096, &[]).unwrap()).unwrap();
        let with = |ticket, fd| gpu.open_shared(&SharedRegion { ticket, fd }).unwrap_err().to_string();
        let fd = || Some(shared.fd.as_ref().unwrap().try_clone().unwrap());
        let beyond = Ticket { offset: 4096, bytes: 1, ..shared.ticket };
        assert!(with(beyond, fd()).contains("within"));
        assert!(with(Ticket { gpu: [1; 16], ..shared.ticket }, fd()).contains("emulated"));
        assert!(with(shared.ticket, None).contains("emulated"));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(with(shared.ticket, Some(null.into())).contains("truncated"));
    }
}
