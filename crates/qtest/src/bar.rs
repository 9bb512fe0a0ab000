//! A BAR, accessed through the socket.

use std::sync::Arc;

use onehop_os::Registers;

use crate::link::QemuLink;

/// A placed BAR. If QEMU is gone, or outside of the BAR, reads return ones and writes are lost.
pub(crate) struct BarWindow {
    link: Arc<QemuLink>,
    base: u64,
    size: u32,
}

impl BarWindow {
    /// `size` bytes of registers that start at `base`.
    pub(crate) fn new(link: Arc<QemuLink>, base: u64, size: u32) -> Self {
        Self { link, base, size }
    }

    /// The guest physical address of a word, if it is within the BAR.
    fn addr(&self, offset: u32) -> Option<u64> {
        (offset.checked_add(4)? <= self.size).then(|| self.base + u64::from(offset))
    }
}

impl Registers for BarWindow {
    fn read32(&self, offset: u32) -> u32 {
        // The link keeps the reason; an unanswered read on the bus returns ones.
        self.addr(offset).map_or(u32::MAX, |addr| self.link.read32(addr).unwrap_or(u32::MAX))
    }

    fn write32(&self, offset: u32, value: u32) {
        if let Some(addr) = self.addr(offset) {
            // The link keeps the reason; an unanswered posted write on the bus is lost.
            let _ = self.link.write32(addr, value);
        }
    }

    fn size(&self) -> u32 {
        self.size
    }
}
