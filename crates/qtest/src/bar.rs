//! A BAR, reached through the socket.

use std::sync::Arc;

use onehop_os::Registers;

use crate::link::Link;

/// A placed BAR. Reads of QEMU when it is gone, and outside the BAR, give all ones; such writes are lost.
pub(crate) struct Window {
    link: Arc<Link>,
    base: u64,
    size: u32,
}

impl Window {
    /// `size` bytes of registers that start at `base`.
    pub(crate) fn new(link: Arc<Link>, base: u64, size: u32) -> Self {
        Self { link, base, size }
    }

    /// The guest physical address of a word, if it lies within the BAR.
    fn addr(&self, offset: u32) -> Option<u64> {
        (offset.checked_add(4)? <= self.size).then(|| self.base + u64::from(offset))
    }
}

impl Registers for Window {
    fn read32(&self, offset: u32) -> u32 {
        // The link keeps the reason; on the bus, nobody's answer is all ones.
        self.addr(offset).map_or(u32::MAX, |addr| self.link.read32(addr).unwrap_or(u32::MAX))
    }

    fn write32(&self, offset: u32, value: u32) {
        if let Some(addr) = self.addr(offset) {
            // The link keeps the reason; on the bus, a posted write to nobody is lost.
            let _ = self.link.write32(addr, value);
        }
    }

    fn size(&self) -> u32 {
        self.size
    }
}
