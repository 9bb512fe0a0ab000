//! Config space: the header and the capability lists, from the file `config`. Every offset that a device gives is
//! checked.

use serde::Serialize;

use crate::capability::{Acs, Express, MsiX, Power, Resizable, sriov_functions};

/// Upper limit of capabilities in the first list: 48 fit.
const MAX_CAPS: usize = 48;
/// Upper limit of the extended list.
const MAX_EXTENDED: usize = 960;
/// Start of the extended list.
const EXTENDED: usize = 0x100;

/// A device's parsed config space.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct DeviceConfig {
    /// Bytes that could be read: 64 without root, 256 or 4096 with it.
    pub bytes: usize,
    /// The command register.
    pub command: u16,
    /// The header type: 0 for a device, 1 for a bridge.
    pub header: u8,
    /// Whether the capability list was circular, or left the config space.
    pub broken_list: bool,
    /// The PCI Express capability.
    pub express: Option<Express>,
    /// MSI-X.
    pub msix: Option<MsiX>,
    /// The power state.
    pub power: Option<Power>,
    /// Access Control Services, of a port or a multifunction device.
    pub acs: Option<Acs>,
    /// BARs with variable size.
    pub resizable: Vec<Resizable>,
    /// Whether address translation (ATS) is enabled; `None` if not supported.
    pub ats: Option<bool>,
    /// The number of virtual functions that it supports.
    pub virtual_functions: Option<u16>,
}

impl DeviceConfig {
    /// Parses config space; `None` if the device does not respond.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let space = ConfigBytes(bytes);
        let id = space.word(0)?;
        if id == u32::MAX || bytes.len() < 64 {
            return None;
        }
        let mut config = Self {
            bytes: bytes.len(),
            command: space.half(4)?,
            header: space.byte(0xe)? & 0x7f,
            ..Self::default()
        };
        config.first_list(&space);
        config.extended_list(&space);
        Some(config)
    }

    /// Whether more than the header could be read.
    #[must_use]
    pub fn has_capabilities(&self) -> bool {
        self.bytes > 64
    }

    /// Whether the extended list could be read, if there is one.
    #[must_use]
    pub fn has_extended(&self) -> bool {
        self.bytes > EXTENDED
    }

    /// Whether the device may begin transfers.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.command & 4 != 0
    }

    /// Whether the device decodes its memory addresses.
    #[must_use]
    pub fn memory(&self) -> bool {
        self.command & 2 != 0
    }

    fn first_list(&mut self, space: &ConfigBytes<'_>) {
        const LISTED: u16 = 0x10;
        if !self.has_capabilities() || space.half(6).is_none_or(|status| status & LISTED == 0) {
            return;
        }
        let mut at = usize::from(space.byte(0x34).unwrap_or(0) & !3);
        for _ in 0..MAX_CAPS {
            if at == 0 {
                return;
            }
            let (Some(id), Some(next)) = (space.byte(at).filter(|_| at >= 0x40), space.byte(at + 1)) else {
                self.broken_list = true;
                return;
            };
            match id {
                0x01 => self.power = Power::parse(space, at),
                0x10 => self.express = Express::parse(space, at),
                0x11 => self.msix = MsiX::parse(space, at),
                _ => {}
            }
            at = usize::from(next & !3);
        }
        self.broken_list |= at != 0;
    }

    fn extended_list(&mut self, space: &ConfigBytes<'_>) {
        let mut at = EXTENDED;
        for _ in 0..MAX_EXTENDED {
            // Without extended capabilities this reads as zeros; without extended config space, as ones.
            let Some(head) = space.word(at).filter(|head| *head != 0 && *head != u32::MAX) else { return };
            match head & 0xffff {
                0x0d => self.acs = Acs::parse(space, at),
                0x0f => self.ats = space.half(at + 6).map(|control| control & 0x8000 != 0),
                0x10 => self.virtual_functions = sriov_functions(space, at),
                0x15 => self.resizable = Resizable::parse(space, at),
                _ => {}
            }
            let next = (head >> 20) as usize & !3;
            if next == 0 {
                return;
            }
            if next < EXTENDED {
                self.broken_list = true;
                return;
            }
            at = next;
        }
        self.broken_list = true;
    }
}

/// Little-endian access to bytes of config space; `None` beyond their end.
pub(crate) struct ConfigBytes<'a>(&'a [u8]);

impl ConfigBytes<'_> {
    pub(crate) fn byte(&self, at: usize) -> Option<u8> {
        self.0.get(at).copied()
    }

    pub(crate) fn half(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes(self.0.get(at..at + 2)?.try_into().ok()?))
    }

    pub(crate) fn word(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.0.get(at..at + 4)?.try_into().ok()?))
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
