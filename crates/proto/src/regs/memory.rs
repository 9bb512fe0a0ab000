//! Less common registers: reset words, time-outs, the controller's own memory, boot partitions.

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

/// CMBEBS: the elasticity buffer of the controller memory buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cmbebs(pub u32);

impl Cmbebs {
    bits! { u32;
        /// Unit of the size: 0 bytes, 1 KiB, 2 MiB, 3 GiB.
        szu with_szu 0 4 u8;
        /// Size in units.
        sz with_sz 8 24 u32;
    }
    flags! { u32;
        /// Reads do not wait for writes to drain.
        rbb with_rbb 4;
    }
}

/// CMBSWTP: how fast the controller memory buffer can be written for long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cmbswtp(pub u32);

impl Cmbswtp {
    bits! { u32;
        /// Unit of the rate: 0 bytes, 1 KiB, 2 MiB, 3 GiB per second.
        unit with_unit 0 4 u8;
        /// Rate in units.
        rate with_rate 8 24 u32;
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

/// NSSD: writing a word shuts the NVM subsystem down.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Nssd(pub u32);

impl Nssd {
    /// The word for a normal shutdown, "Nrml".
    pub const NORMAL: Self = Self(0x4e72_6d6c);
    /// The word for an abrupt shutdown, "Abpt".
    pub const ABRUPT: Self = Self(0x4162_7074);
}

/// BPINFO: the boot partitions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Bpinfo(pub u32);

impl Bpinfo {
    bits! { u32;
        /// Size of a boot partition in units of 128 KiB.
        bpsz with_bpsz 0 15 u16;
        /// Read status: 0 none yet, 1 in progress, 2 done, 3 failed.
        brs with_brs 24 2 u8;
    }
    flags! { u32;
        /// Which of the two partitions is active.
        abpid with_abpid 31;
    }
}

/// BPRSEL: what to read from a boot partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Bprsel(pub u32);

impl Bprsel {
    bits! { u32;
        /// Bytes to read in units of 4 KiB.
        bprsz with_bprsz 0 10 u16;
        /// Offset in units of 4 KiB.
        bprof with_bprof 10 20 u32;
    }
    flags! { u32;
        /// Which of the two partitions to read.
        bpid with_bpid 31;
    }
}

/// PMRCAP: what the persistent memory region can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Pmrcap(pub u32);

impl Pmrcap {
    bits! { u32;
        /// The BAR that holds it.
        bir with_bir 5 3 u8;
        /// Unit of the time-out: 0 is 500 ms, 1 is minutes.
        pmrtu with_pmrtu 8 2 u8;
        /// Ways to make writes persistent: bit 0 a read of memory, bit 1 a read of PMRSTS.
        pmrwbm with_pmrwbm 10 4 u8;
        /// Longest wait for it to become ready, in units of PMRTU.
        pmrto with_pmrto 16 8 u8;
    }
    flags! { u32;
        /// Data that the controller returns may lie in it.
        rds with_rds 3;
        /// Data that the controller takes may lie in it.
        wds with_wds 4;
        /// The host may give it a bus address of its own.
        cmss with_cmss 24;
    }
}

/// PMRCTL: switches the persistent memory region on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Pmrctl(pub u32);

impl Pmrctl {
    flags! { u32;
        /// Enabled.
        en with_en 0;
    }
}

/// PMRSTS: the status of the persistent memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Pmrsts(pub u32);

impl Pmrsts {
    bits! { u32;
        /// Nonzero if the last access failed.
        err with_err 0 8 u8;
        /// Health: 0 normal, 1 restore failed, 2 read only, 3 unreliable.
        hsts with_hsts 9 3 u8;
    }
    flags! { u32;
        /// Not ready.
        nrdy with_nrdy 8;
        /// The base address is invalid.
        cbai with_cbai 12;
    }
}

/// PMREBS: the elasticity buffer of the persistent memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Pmrebs(pub u32);

impl Pmrebs {
    bits! { u32;
        /// Unit of the size: 0 bytes, 1 KiB, 2 MiB, 3 GiB.
        szu with_szu 0 4 u8;
        /// Size in units.
        sz with_sz 8 24 u32;
    }
    flags! { u32;
        /// Reads do not wait for writes to drain.
        rbb with_rbb 4;
    }
}

/// PMRSWTP: how fast the persistent memory region can be written for long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Pmrswtp(pub u32);

impl Pmrswtp {
    bits! { u32;
        /// Unit of the rate: 0 bytes, 1 KiB, 2 MiB, 3 GiB per second.
        unit with_unit 0 4 u8;
        /// Rate in units.
        rate with_rate 8 24 u32;
    }
}

/// PMRMSCL and PMRMSCU together: the bus address of the persistent memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Pmrmsc(pub u64);

impl Pmrmsc {
    flags! { u64;
        /// The controller takes addresses from CBA on as addresses in the region.
        cmse with_cmse 1;
    }

    /// The bus address under which the controller knows the region; 4 KiB aligned.
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
