//! Config space: the header and the lists of capabilities, from the file `config`. Nothing that a device says is believed
//! without a look at where it leads.

use serde::Serialize;

use crate::capability::{Acs, Express, MsiX, Power, Resizable, sriov_functions};

/// The most capabilities of the first list: 48 fit.
const MAX_CAPS: usize = 48;
/// The most of the extended list.
const MAX_EXTENDED: usize = 960;
/// Where the extended list begins.
const EXTENDED: usize = 0x100;

/// What a device's config space says.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Config {
    /// Bytes that could be read: 64 without root, 256 or 4096 with it.
    pub bytes: usize,
    /// The command register.
    pub command: u16,
    /// The kind of header: 0 for a device, 1 for a bridge.
    pub header: u8,
    /// Whether the list of capabilities ran in a circle, or led out of the space.
    pub broken_list: bool,
    /// What PCI Express says.
    pub express: Option<Express>,
    /// MSI-X.
    pub msix: Option<MsiX>,
    /// The power state.
    pub power: Option<Power>,
    /// Access control services, of a port or a function of several.
    pub acs: Option<Acs>,
    /// BARs whose size can be changed.
    pub resizable: Vec<Resizable>,
    /// Whether it can ask for translations (ATS), and does.
    pub ats: Option<bool>,
    /// How many virtual functions it can have.
    pub virtual_functions: Option<u16>,
}

impl Config {
    /// Takes the bytes apart; none where they are no config space, as of a device that has gone.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let space = Space(bytes);
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

    /// Whether the extended list could be read, where there is one.
    #[must_use]
    pub fn has_extended(&self) -> bool {
        self.bytes > EXTENDED
    }

    /// Whether the device may begin transfers.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.command & 4 != 0
    }

    /// Whether the device answers to its memory addresses.
    #[must_use]
    pub fn memory(&self) -> bool {
        self.command & 2 != 0
    }

    fn first_list(&mut self, space: &Space<'_>) {
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

    fn extended_list(&mut self, space: &Space<'_>) {
        let mut at = EXTENDED;
        for _ in 0..MAX_EXTENDED {
            // A device without extended capabilities reads as zeros there, one without the space as ones.
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

/// Bytes of config space, little-endian; what lies beyond them is none.
pub(crate) struct Space<'a>(&'a [u8]);

impl Space<'_> {
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
