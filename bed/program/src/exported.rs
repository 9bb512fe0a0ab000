//! Memory that another driver exports: a drive is given its dma-buf and not its pages.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use onehop_os::{DmaBuf, DmaMemory, HostMem, Mapped, Mapper};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::report::{Failed, offset_in};

/// The memory, as the CPU and as other drivers see it.
pub(crate) struct Exported {
    buffer: OwnedFd,
    pub(crate) memory: HostMem,
}

impl Exported {
    /// What `kmod-test export` leaves to us: where in a file the memory is, how long, the numbers of a dma-buf and of that file.
    pub(crate) fn receive() -> Result<Self, Failed> {
        let mut told = [0; 24];
        std::io::stdin().read_exact(&mut told)?;
        let half = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| told[at + i]));
        let word = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
        let own = pidfd_open(getpid(), PidfdFlags::empty())?;
        let inherited = |at: usize| pidfd_getfd(&own, half(at) as i32, PidfdGetfdFlags::empty());
        let (buffer, view) = (inherited(16)?, inherited(20)?);
        let memory = HostMem::of_device(view, word(0), usize::try_from(word(8))?)?;
        Ok(Self { buffer, memory })
    }

    /// A mapper that gives the device this memory by its dma-buf, and all other memory as before.
    pub(crate) fn mapper(self, inner: Arc<dyn Mapper>) -> impl Mapper {
        Exporting { inner, exported: self }
    }
}

struct Exporting {
    inner: Arc<dyn Mapper>,
    exported: Exported,
}

impl Mapper for Exporting {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        self.inner.alloc(bytes)
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let at = memory.host().and_then(|host| offset_in(&self.exported.memory, host).ok());
        match at {
            Some(offset) => {
                self.inner.map(&ExportedPart { of: &self.exported, offset, bytes: memory.bytes() })
            }
            None => self.inner.map(memory),
        }
    }
}

/// A part of it, which no CPU instruction reaches, as with a GPU's memory.
struct ExportedPart<'a> {
    of: &'a Exported,
    offset: u64,
    bytes: usize,
}

impl DmaMemory for ExportedPart<'_> {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn host(&self) -> Option<&HostMem> {
        None
    }

    fn dma_buf(&self) -> Option<onehop_os::Result<DmaBuf>> {
        let fd = self.of.buffer.try_clone();
        let fd = fd.map_err(|source| onehop_os::Error::System { call: "dup".into(), source, hint: "" });
        Some(fd.map(|fd| DmaBuf { fd, offset: self.offset, bytes: self.bytes as u64 }))
    }
}
