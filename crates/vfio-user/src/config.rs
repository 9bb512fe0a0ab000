//! The configuration space of a function: header, power management, MSI-X or MSI, and PCI Express, with the bits that a
//! host may write.

use crate::model::{FunctionIdentity, Vectors};

/// Its size: that of a PCI Express function, without extended capabilities.
pub const BYTES: usize = 4096;

/// The BAR that holds the MSI-X table and, behind it, the pending bits.
pub(crate) const MSIX_BAR: u8 = 4;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const PM: usize = 0x40;
/// Either MSI-X or MSI is present.
const MSI: usize = 0x50;
const PCIE: usize = 0x60;
const PMCSR: usize = PM + 4;
const MSI_CONTROL: usize = MSI + 2;
const DEVICE_CONTROL: usize = PCIE + 8;

/// Command: memory space, bus master.
const MEMORY: u16 = 1 << 1;
const MASTER: u16 = 1 << 2;
/// Writable bits of Command for a function without I/O ports: also parity, SERR# and INTx disable.
const COMMAND_KEPT: u16 = MEMORY | MASTER | 1 << 6 | 1 << 8 | 1 << 10;
/// Device Control: Initiate Function Level Reset.
const FLR: u16 = 1 << 15;

/// Size of the MSI-X table in whole pages.
pub(crate) fn msix_table_bytes(vectors: u16) -> u64 {
    (u64::from(vectors) * 16).next_multiple_of(4096)
}

/// Size of the MSI-X BAR: the table, and a page of pending bits.
pub(crate) fn msix_bar_bytes(vectors: u16) -> u64 {
    (msix_table_bytes(vectors) + 4096).next_power_of_two()
}

/// The configuration space.
pub struct ConfigSpace {
    bytes: Box<[u8; BYTES]>,
    /// The writable bits.
    kept: Box<[u8; BYTES]>,
    identity: FunctionIdentity,
}

impl ConfigSpace {
    /// The state after power-on.
    #[must_use]
    pub fn new(identity: &FunctionIdentity) -> Self {
        let mut space =
            Self { bytes: Box::new([0; BYTES]), kept: Box::new([0; BYTES]), identity: identity.clone() };
        space.put_header();
        space.put_bars();
        space.put_power_management();
        match identity.vectors {
            Vectors::MsiX(vectors) => space.put_msix(vectors),
            Vectors::Msi => space.put_msi(),
        }
        space.put_express();
        space
    }

    /// Restores the state after power-on.
    pub fn reset(&mut self) {
        *self = Self::new(&self.identity);
    }

    fn put16(&mut self, at: usize, value: u16, kept: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        self.kept[at..at + 2].copy_from_slice(&kept.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32, kept: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self.kept[at..at + 4].copy_from_slice(&kept.to_le_bytes());
    }

    fn put_header(&mut self) {
        let id = self.identity.clone();
        self.put16(0, id.vendor, 0);
        self.put16(2, id.device, 0);
        self.put16(COMMAND, 0, COMMAND_KEPT);
        // Capabilities List.
        self.put16(STATUS, 1 << 4, 0);
        self.put32(8, id.class << 8 | u32::from(id.revision), 0);
        // Cache line size and interrupt line: hosts write them, the function does not use them.
        self.kept[0x0c] = 0xff;
        self.put16(0x2c, id.subsystem_vendor, 0);
        self.put16(0x2e, id.subsystem, 0);
        self.bytes[0x34] = PM as u8;
        self.kept[0x3c] = 0xff;
    }

    fn put_bars(&mut self) {
        let mut bars: Vec<_> = self.identity.bars.iter().map(|bar| (bar.index, bar.bytes)).collect();
        if let Vectors::MsiX(vectors) = self.identity.vectors {
            bars.push((MSIX_BAR, msix_bar_bytes(vectors)));
        }
        for (index, bytes) in bars {
            let (at, kept) = (BARS + usize::from(index) * 4, !(bytes - 1));
            // 64-bit; the lowest bits, which say so, are read-only.
            self.put32(at, 4, kept as u32 & !0xf);
            self.put32(at + 4, 0, (kept >> 32) as u32);
        }
    }

    fn put_power_management(&mut self) {
        self.put16(PM, 0x01 | (MSI as u16) << 8, 0);
        // Version 3, no D1, no D2, no PME; the state survives D3hot (No_Soft_Reset).
        self.put16(PM + 2, 3, 0);
        self.put16(PMCSR, 1 << 3, 3);
    }

    fn put_msix(&mut self, vectors: u16) {
        self.put16(MSI, 0x11 | (PCIE as u16) << 8, 0);
        self.put16(MSI_CONTROL, vectors - 1, 0xc000);
        self.put32(MSI + 4, MSIX_BAR.into(), 0);
        self.put32(MSI + 8, msix_table_bytes(vectors) as u32 | u32::from(MSIX_BAR), 0);
    }

    fn put_msi(&mut self) {
        self.put16(MSI, 0x05 | (PCIE as u16) << 8, 0);
        // One vector, 64-bit addresses; only Enable and the message are writable.
        self.put16(MSI_CONTROL, 1 << 7, 0x71);
        self.put32(MSI + 4, 0, !3);
        self.put32(MSI + 8, 0, u32::MAX);
        self.put16(MSI + 12, 0, u16::MAX);
    }

    fn put_express(&mut self) {
        // Version 2, an endpoint.
        self.put16(PCIE, 0x10, 0);
        self.put16(PCIE + 2, 2, 0);
        // Payloads of 256 bytes, role-based errors, function level reset.
        self.put32(PCIE + 4, 1 | 1 << 15 | u32::from(self.identity.flr) << 28, 0);
        // Relaxed ordering, no snoop, reads of 512 bytes.
        self.put16(DEVICE_CONTROL, 0x2810, 0x7fff);
        // Four lanes at 16 GT/s, both as maximum and at present.
        self.put32(PCIE + 0x0c, 0x44, 0);
        self.put16(PCIE + 0x10, 0, 0x01c3);
        self.put16(PCIE + 0x12, 0x44, 0);
        // Completion timeouts can be disabled; supported speeds; target speed.
        self.put32(PCIE + 0x24, 1 << 4, 0);
        self.put16(PCIE + 0x28, 0, 0x001f);
        self.put32(PCIE + 0x2c, 0x1e, 0);
        self.put16(PCIE + 0x30, 4, 0x000f);
    }

    /// Reads bytes within it.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes[offset..offset + out.len()]);
    }

    /// Writes bytes within it; returns whether a function level reset was requested.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let (state, mut resets) = (self.bytes[PMCSR] & 3, false);
        for (at, byte) in (offset..).zip(data) {
            let kept = self.kept[at];
            self.bytes[at] = self.bytes[at] & !kept | byte & kept;
            resets |= at == DEVICE_CONTROL + 1 && u16::from(*byte) << 8 & FLR != 0;
        }
        let resets = resets && self.identity.flr;
        // D1 and D2 are not supported: the state does not change.
        if matches!(self.bytes[PMCSR] & 3, 1 | 2) {
            self.bytes[PMCSR] = self.bytes[PMCSR] & !3 | state;
        }
        resets
    }

    fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Whether the function is in power state D0.
    pub(crate) fn is_awake(&self) -> bool {
        self.bytes[PMCSR] & 3 == 0
    }

    /// Whether the BARs respond.
    #[must_use]
    pub fn memory_enabled(&self) -> bool {
        self.word(COMMAND) & MEMORY != 0 && self.is_awake()
    }

    /// Whether the function may reach memory.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.word(COMMAND) & MASTER != 0 && self.is_awake()
    }

    /// Whether interrupts are enabled, and whether all are masked (MSI with one vector has no mask bit).
    #[must_use]
    pub fn interrupts(&self) -> (bool, bool) {
        let control = self.word(MSI_CONTROL);
        match self.identity.vectors {
            Vectors::MsiX(_) => (control & 0x8000 != 0, control & 0x4000 != 0),
            Vectors::Msi => (control & 1 != 0, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Bar;

    fn space() -> ConfigSpace {
        space_of(Vectors::MsiX(65), true)
    }

    fn space_of(vectors: Vectors, flr: bool) -> ConfigSpace {
        ConfigSpace::new(&FunctionIdentity {
            vendor: 0x1234,
            device: 0x5678,
            subsystem_vendor: 0x1234,
            subsystem: 1,
            class: 0x01_0802,
            revision: 2,
            vectors,
            flr,
            bars: vec![Bar { index: 0, bytes: 0x4000 }],
        })
    }

    fn dword(space: &ConfigSpace, at: usize) -> u32 {
        let mut raw = [0; 4];
        space.read(at, &mut raw);
        u32::from_le_bytes(raw)
    }

    #[test]
    fn bars_report_their_size() {
        let mut space = space();
        for (bar, bytes) in [(0, 0x4000u64), (4, 0x2000)] {
            let at = BARS + bar * 4;
            space.write(at, &[0xff; 8]);
            let size = u64::from(dword(&space, at)) | u64::from(dword(&space, at + 4)) << 32;
            assert_eq!(!(size & !0xf) + 1, bytes, "BAR {bar}");
            assert_eq!(size & 0xf, 4);
        }
        space.write(BARS + 8, &[0xff; 4]);
        assert_eq!(dword(&space, BARS + 8), 0);
    }

    #[test]
    fn capabilities_form_a_list() {
        let space = space();
        let (mut at, mut found) = (space.bytes[0x34], Vec::new());
        while at != 0 {
            found.push(space.bytes[usize::from(at)]);
            at = space.bytes[usize::from(at) + 1];
        }
        assert_eq!(found, [0x01, 0x11, 0x10]);
        assert_eq!(space.word(MSI_CONTROL), 64);
    }

    #[test]
    fn only_what_may_change_changes() {
        let mut space = space();
        let all: Vec<u8> = (0..BYTES as u32 / 4).flat_map(|_| 0x7fff_fffcu32.to_le_bytes()).collect();
        space.write(0, &all);
        assert_eq!(dword(&space, 0), 0x5678_1234);
        assert_eq!(dword(&space, 0x100), 0);
        space.reset();
        assert!(!space.memory_enabled() && !space.bus_master());
        space.write(COMMAND, &[6, 0]);
        assert!(space.memory_enabled() && space.bus_master());
        space.write(PMCSR, &[1]);
        assert!(space.memory_enabled());
        space.write(PMCSR, &[3]);
        assert!(!space.memory_enabled() && !space.bus_master());
        space.write(PMCSR, &[0]);
        assert!(space.memory_enabled());
        assert!(space.write(DEVICE_CONTROL, &0x8000u16.to_le_bytes()));
        assert_eq!(space.word(DEVICE_CONTROL) & FLR, 0);
        assert!(!space.write(DEVICE_CONTROL, &[0xff]));
        space.write(MSI_CONTROL + 1, &[0xc0]);
        assert_eq!(space.interrupts(), (true, true));
    }

    #[test]
    fn a_function_may_have_msi_and_no_reset() {
        let mut space = space_of(Vectors::Msi, false);
        assert_eq!((dword(&space, BARS + 16), space.bytes[MSI]), (0, 0x05));
        assert_eq!(space.interrupts(), (false, false));
        space.write(MSI_CONTROL, &[0xff, 0xff]);
        assert_eq!((space.word(MSI_CONTROL), space.interrupts()), (0x00f1, (true, false)));
        space.write(MSI + 4, &[0xff; 10]);
        assert_eq!((dword(&space, MSI + 4), dword(&space, MSI + 8)), (0xffff_fffc, u32::MAX));
        assert_eq!(dword(&space, PCIE + 4) & 1 << 28, 0);
        assert!(!space.write(DEVICE_CONTROL, &FLR.to_le_bytes()));
    }
}
