//! Memory that was made reachable for one drive.

use std::sync::Arc;

use onehop_os::{BusRange, DmaMemory, HostMem, Mapped};
use onehop_proto::BusAddr;

use crate::control::Control;
use crate::{Error, Result};

/// Memory that a drive may read and write. Clones are the same memory; it stays allocated and mapped until the last
/// clone is dropped. A command in flight holds one.
#[derive(Clone)]
pub struct Buffer(Arc<BufferInner>);

struct BufferInner {
    // The mapping is dropped before the memory.
    map: Mapped,
    first: Option<BusAddr>,
    bytes: u64,
    /// Which drive can reach it.
    tag: Arc<()>,
    memory: Box<dyn DmaMemory + Send + Sync>,
}

impl Buffer {
    pub(crate) fn new(control: &Control, memory: impl DmaMemory + Send + Sync + 'static) -> Result<Self> {
        let map = control.port.mapper.map(&memory)?;
        let first = map.contiguous().ok();
        let bytes = memory.bytes() as u64;
        Ok(Self(Arc::new(BufferInner {
            map,
            first,
            bytes,
            tag: control.tag.clone(),
            memory: Box::new(memory),
        })))
    }

    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The host memory behind it, if there is any.
    ///
    /// # Errors
    /// When the CPU cannot reach it.
    pub fn host(&self) -> Result<&HostMem> {
        self.0.memory.host().ok_or_else(|| onehop_os::Error::NotReachable.into())
    }

    #[inline]
    pub(crate) fn memory(&self) -> &dyn DmaMemory {
        &*self.0.memory
    }

    /// The bus address of the byte at `offset`, and how many bytes follow it without a gap.
    #[must_use]
    #[inline]
    pub fn at(&self, offset: u64) -> Option<BusRange> {
        match self.0.first {
            Some(first) if offset < self.0.bytes => {
                Some(BusRange { addr: first.plus(offset), len: self.0.bytes - offset })
            }
            Some(_) => None,
            None => self.0.map.at(offset),
        }
    }

    /// Whether this drive can reach it.
    #[inline]
    pub(crate) fn belongs(&self, control: &Control) -> Result<()> {
        if Arc::ptr_eq(&self.0.tag, &control.tag) {
            return Ok(());
        }
        Err(Error::Foreign { what: "buffer", drive: control.port.name.clone() })
    }

    /// Whether these are handles on the same memory.
    #[inline]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// [`Self::at`], for `need` bytes that have to lie in it.
    #[inline(always)]
    pub(crate) fn range(&self, offset: u64, need: u64) -> Result<BusRange> {
        let inner = &*self.0;
        let beyond = || Error::Buffer { have: inner.bytes, offset, need };
        let len = inner.bytes.checked_sub(offset).filter(|len| need <= *len).ok_or_else(beyond)?;
        match inner.first {
            Some(first) => Ok(BusRange { addr: first.plus(offset), len }),
            None => inner.map.at(offset).ok_or_else(beyond),
        }
    }

    #[inline]
    pub(crate) fn check(&self, offset: u64, need: u64) -> Result<()> {
        if offset <= self.0.bytes && need <= self.0.bytes - offset {
            Ok(())
        } else {
            Err(Error::Buffer { have: self.0.bytes, offset, need })
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.0.bytes)
    }
}
