//! PCI configuration of functions on bus 0: discovery, BARs, capabilities.

use std::fmt;
use std::sync::Arc;

use crate::Result;
use crate::link::QemuLink;

/// Offset of vendor and device id.
const ID: u8 = 0x00;
/// Offset of the command register; the upper half is the status register, which ignores zeros.
pub(crate) const COMMAND: u8 = 0x04;
/// Offset of revision and class code.
const CLASS: u8 = 0x08;
/// Offset of the header type, in the third byte.
const HEADER: u8 = 0x0c;
/// Offset of BAR0.
const BAR0: u8 = 0x10;
/// Offset of the capabilities pointer.
const CAPABILITIES: u8 = 0x34;

/// Command register: the function decodes its memory BARs.
pub(crate) const MEMORY: u32 = 1 << 1;
/// Command register: the function may access memory.
pub(crate) const BUS_MASTER: u32 = 1 << 2;

/// Class code of an NVMe controller.
const NVME: u32 = 0x01_08_02;
/// Header type: there are functions besides function 0.
const MULTI_FUNCTION: u32 = 1 << 23;
/// Most capabilities that fit into configuration space: a longer list is a loop.
const MOST_CAPABILITIES: usize = 48;

/// A memory BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryBar {
    /// 0 to 5; a 64-bit BAR also takes its successor.
    pub index: u8,
    /// Its length in bytes, a power of two.
    pub size: u64,
    /// Whether it has 64-bit addresses.
    pub wide: bool,
}

/// A function on bus 0.
#[derive(Clone)]
pub(crate) struct PciFunction {
    /// The connection.
    pub link: Arc<QemuLink>,
    /// `device << 3 | function`.
    pub devfn: u8,
}

impl PciFunction {
    /// The NVMe controllers on bus 0.
    pub(crate) fn controllers(link: &Arc<QemuLink>) -> Result<Vec<Self>> {
        let mut found = Vec::new();
        for device in 0..32 {
            let first = Self { link: link.clone(), devfn: device << 3 };
            if !first.present()? {
                continue;
            }
            let functions = if first.read(HEADER)? & MULTI_FUNCTION == 0 { 1 } else { 8 };
            for number in 0..functions {
                let function = Self { devfn: first.devfn | number, ..first.clone() };
                if function.present()? && function.read(CLASS)? >> 8 == NVME {
                    found.push(function);
                }
            }
        }
        Ok(found)
    }

    /// Whether the function exists.
    pub(crate) fn present(&self) -> Result<bool> {
        Ok(self.read(ID)? != u32::MAX)
    }

    /// A word of its configuration space.
    pub(crate) fn read(&self, offset: u8) -> Result<u32> {
        self.link.config_read(self.devfn, offset)
    }

    /// Writes a word of its configuration space.
    pub(crate) fn write(&self, offset: u8, value: u32) -> Result<()> {
        self.link.config_write(self.devfn, offset, value)
    }

    /// Offsets of the six BAR words.
    pub(crate) fn bar_words() -> impl Iterator<Item = u8> {
        (0..6).map(|i| BAR0 + 4 * i)
    }

    /// The size and kind of a memory BAR. Memory decoding must be off, because sizing moves the BAR.
    pub(crate) fn bar(&self, index: u8) -> Result<Option<MemoryBar>> {
        let low_word = BAR0 + 4 * index;
        let low = self.probe(low_word)?;
        // Bit 0 is an I/O BAR; bits 2:1 are 10b for 64 bits.
        if low == 0 || low & 1 != 0 {
            return Ok(None);
        }
        let wide = low >> 1 & 3 == 2;
        let high = if wide { self.probe(low_word + 4)? } else { u32::MAX };
        let mask = u64::from(high) << 32 | u64::from(low & !0xf);
        Ok(Some(MemoryBar { index, size: mask.wrapping_neg(), wide }))
    }

    /// Writes ones to a BAR word and returns what it reads back.
    fn probe(&self, offset: u8) -> Result<u32> {
        let before = self.read(offset)?;
        self.write(offset, u32::MAX)?;
        let stuck = self.read(offset)?;
        self.write(offset, before)?;
        Ok(stuck)
    }

    /// Sets the address of a BAR.
    pub(crate) fn place(&self, bar: MemoryBar, addr: u64) -> Result<()> {
        let word = BAR0 + 4 * bar.index;
        self.write(word, addr as u32)?;
        if bar.wide { self.write(word + 4, (addr >> 32) as u32) } else { Ok(()) }
    }

    /// The offset of a capability.
    pub(crate) fn capability(&self, id: u8) -> Result<Option<u8>> {
        let mut at = self.read(CAPABILITIES)? as u8 & !3;
        for _ in 0..MOST_CAPABILITIES {
            if at == 0 {
                break;
            }
            let head = self.read(at)?;
            if head as u8 == id {
                return Ok(Some(at));
            }
            at = (head >> 8) as u8 & !3;
        }
        Ok(None)
    }
}

impl fmt::Display for PciFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}.{:x}", self.devfn >> 3, self.devfn & 7)
    }
}
