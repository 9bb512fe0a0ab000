//! Less common registers: the word of a subsystem reset, time-outs, the controller's own memory.

use crate::BusAddr;
use crate::wire::{bits, flags};

/// CMBMSC: how the host reaches the controller memory buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cmbmsc(pub u64);

impl Cmbmsc {
    flags! { u64;
        /// CMBLOC and CMBSZ are valid.
        cre with_cre 0;
        /// The controller takes addresses from CBA on as addresses in its buffer.
        cmse with_cmse 1;
    }

    /// The bus address under which the controller knows its own buffer; 4 KiB aligned.
    #[must_use]
    pub const fn cba(self) -> BusAddr {
        BusAddr(self.0 & !0xfff)
    }

    /// The same value with another base address; its low 12 bits are dropped.
    #[must_use]
    pub const fn with_cba(self, cba: BusAddr) -> Self {
        Self(self.0 & 0xfff | cba.0 & !0xfff)
    }
}

/// CMBSTS: whether the base address was accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cmbsts(pub u32);

impl Cmbsts {
    flags! { u32;
        /// The base address is invalid.
        cbai with_cbai 0;
    }
}

/// CRTO: how long to wait for the controller, in units of 500 ms.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Crto(pub u32);

impl Crto {
    bits! { u32;
        /// Longest wait until the media is ready.
        crwmt with_crwmt 0 16 u16;
        /// Longest wait until the controller is ready without its media.
        crimt with_crimt 16 16 u16;
    }

    /// Longest wait until the media is ready, in milliseconds.
    #[must_use]
    pub const fn media_ms(self) -> u32 {
        self.crwmt() as u32 * 500
    }

    /// Longest wait until the controller is ready without its media, in milliseconds.
    #[must_use]
    pub const fn independent_ms(self) -> u32 {
        self.crimt() as u32 * 500
    }
}

/// NSSR: writing the word resets the NVM subsystem.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Nssr(pub u32);

impl Nssr {
    /// The word, "NVMe".
    pub const NVME: Self = Self(0x4e56_4d65);
}
