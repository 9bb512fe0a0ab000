//! Memory that bytes land in.

use std::sync::Arc;

use onehop_os::{DmaMemory, HostMem};
use onehop_proto::GpuAddr;

use crate::{Error, Result};

/// Where a region's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Place {
    /// In the GPU's own memory.
    Vram,
    /// In host memory that the GPU reaches over the bus.
    PinnedHost,
    /// In a controller's memory buffer.
    Cmb,
}

impl Place {
    /// What reports call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::PinnedHost => "host",
            Self::Cmb => "cmb",
        }
    }
}

/// Memory with a GPU address. Clones are the same memory; it goes when the last of them does.
#[derive(Clone)]
pub struct Region {
    place: Place,
    addr: GpuAddr,
    mem: HostMem,
    _hold: Arc<dyn Send + Sync>,
}

impl Region {
    pub(crate) fn new(place: Place, addr: GpuAddr, mem: HostMem, hold: Arc<dyn Send + Sync>) -> Self {
        Self { place, addr, mem, _hold: hold }
    }

    /// Where its bytes are.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Its address on the GPU.
    #[must_use]
    pub fn addr(&self) -> GpuAddr {
        self.addr
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mem.len()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mem.is_empty()
    }

    /// Copies bytes out of it.
    ///
    /// # Errors
    /// When the range does not lie within it.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.mem.read(offset, out).map_err(Error::Memory)
    }

    /// Copies bytes into it.
    ///
    /// # Errors
    /// When the range does not lie within it.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.mem.write(offset, data).map_err(Error::Memory)
    }

    /// Sets a 32-bit word so that a running kernel sees it.
    ///
    /// # Errors
    /// When it does not lie within the region.
    pub fn signal(&self, offset: usize, value: u32) -> Result<()> {
        self.mem.word(offset)?.store(value, std::sync::atomic::Ordering::Release);
        Ok(())
    }

    /// Reads a 32-bit word that a running kernel may write.
    ///
    /// # Errors
    /// When it does not lie within the region.
    pub fn word(&self, offset: usize) -> Result<u32> {
        Ok(self.mem.word(offset)?.load(std::sync::atomic::Ordering::Acquire))
    }
}

impl DmaMemory for Region {
    fn bytes(&self) -> usize {
        self.mem.len()
    }

    fn host(&self) -> Option<&HostMem> {
        Some(&self.mem)
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes of {} at {:?})", self.len(), self.place.name(), self.addr)
    }
}
