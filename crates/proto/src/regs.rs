//! The controller's registers (BAR0): where they lie and what their bits mean.
//!
//! Every register is a newtype that both sides use: the driver reads fields, the simulator builds values with `with_*`.

use core::fmt;

use crate::wire::{bits, flags};

/// What a 32-bit read gives when the device has left the bus.
pub const GONE32: u32 = u32::MAX;

/// Byte offsets of the registers in BAR0.
pub mod offset {
    /// Controller capabilities, 64 bits.
    pub const CAP: u32 = 0x00;
    /// Version.
    pub const VS: u32 = 0x08;
    /// Interrupt mask set.
    pub const INTMS: u32 = 0x0c;
    /// Interrupt mask clear.
    pub const INTMC: u32 = 0x10;
    /// Controller configuration.
    pub const CC: u32 = 0x14;
    /// Controller status.
    pub const CSTS: u32 = 0x1c;
    /// NVM subsystem reset.
    pub const NSSR: u32 = 0x20;
    /// Admin queue sizes.
    pub const AQA: u32 = 0x24;
    /// Admin submission queue address, 64 bits.
    pub const ASQ: u32 = 0x28;
    /// Admin completion queue address, 64 bits.
    pub const ACQ: u32 = 0x30;
    /// Controller memory buffer location.
    pub const CMBLOC: u32 = 0x38;
    /// Controller memory buffer size.
    pub const CMBSZ: u32 = 0x3c;
    /// Boot partition information.
    pub const BPINFO: u32 = 0x40;
    /// Boot partition read select.
    pub const BPRSEL: u32 = 0x44;
    /// Boot partition memory buffer, 64 bits.
    pub const BPMBL: u32 = 0x48;
    /// Controller memory buffer memory space control, 64 bits.
    pub const CMBMSC: u32 = 0x50;
    /// Controller memory buffer status.
    pub const CMBSTS: u32 = 0x58;
    /// Controller memory buffer elasticity buffer size.
    pub const CMBEBS: u32 = 0x5c;
    /// Controller memory buffer sustained write throughput.
    pub const CMBSWTP: u32 = 0x60;
    /// NVM subsystem shutdown.
    pub const NSSD: u32 = 0x64;
    /// Controller ready time-outs.
    pub const CRTO: u32 = 0x68;
    /// Persistent memory region capabilities.
    pub const PMRCAP: u32 = 0xe00;
    /// Persistent memory region control.
    pub const PMRCTL: u32 = 0xe04;
    /// Persistent memory region status.
    pub const PMRSTS: u32 = 0xe08;
    /// Persistent memory region elasticity buffer size.
    pub const PMREBS: u32 = 0xe0c;
    /// Persistent memory region sustained write throughput.
    pub const PMRSWTP: u32 = 0xe10;
    /// Persistent memory region memory space control, lower half.
    pub const PMRMSCL: u32 = 0xe14;
    /// Persistent memory region memory space control, upper half.
    pub const PMRMSCU: u32 = 0xe18;
    /// The first doorbell.
    pub const DOORBELLS: u32 = 0x1000;
}

/// Where a queue's doorbell lies in BAR0; `u32::MAX`, an offset in no BAR, if it would lie beyond 4 GiB.
#[inline(always)]
#[must_use]
pub const fn doorbell(qid: u16, is_cq: bool, dstrd: u8) -> u32 {
    let index = 2 * qid as u64 + is_cq as u64;
    let at = offset::DOORBELLS as u64 + (index << (2 + (dstrd & 15)));
    if at > u32::MAX as u64 { u32::MAX } else { at as u32 }
}

/// Whose doorbell lies at a BAR0 offset: the queue, and whether it is a completion queue; none between doorbells.
#[inline]
#[must_use]
pub const fn doorbell_of(at: u32, dstrd: u8) -> Option<(u16, bool)> {
    if at < offset::DOORBELLS {
        return None;
    }
    let shift = 2 + (dstrd & 15) as u32;
    let from = at - offset::DOORBELLS;
    let index = from >> shift;
    if index << shift != from || index >> 1 > 0xffff {
        return None;
    }
    Some(((index >> 1) as u16, index & 1 != 0))
}

mod memory;
pub use memory::{Cmbmsc, Cmbsts, Crto, Nssr};

/// CAP: what the controller can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cap(pub u64);

impl Cap {
    bits! { u64;
        /// Largest I/O queue, zero-based.
        mqes_z with_mqes_z 0 16 u16;
        /// Arbitration mechanisms: bit 0 weighted round robin, bit 1 vendor specific.
        ams with_ams 17 2 u8;
        /// Longest wait for CSTS.RDY, in units of 500 ms.
        to with_to 24 8 u8;
        /// Doorbell stride: doorbells lie `4 << dstrd` bytes apart.
        dstrd with_dstrd 32 4 u8;
        /// Command sets: bit 0 NVM, bit 6 chosen by CSI, bit 7 admin only.
        css with_css 37 8 u8;
        /// Controller power scope.
        cps with_cps 46 2 u8;
        /// Smallest page: `4096 << mpsmin`.
        mpsmin with_mpsmin 48 4 u8;
        /// Largest page: `4096 << mpsmax`.
        mpsmax with_mpsmax 52 4 u8;
        /// Controller ready modes: bit 0 with media, bit 1 independent of media.
        crms with_crms 59 2 u8;
    }
    flags! { u64;
        /// Queues must be physically contiguous.
        cqr with_cqr 16;
        /// NVM subsystem reset is supported.
        nssrs with_nssrs 36;
        /// Boot partitions are supported.
        bps with_bps 45;
        /// A persistent memory region is supported.
        pmrs with_pmrs 56;
        /// A controller memory buffer is supported.
        cmbs with_cmbs 57;
        /// NVM subsystem shutdown is supported.
        nsss with_nsss 58;
        /// Controller ready with media is supported.
        crwms with_crwms 59;
        /// Controller ready independent of media is supported.
        crims with_crims 60;
    }

    /// True if the device has left the bus.
    #[inline(always)]
    #[must_use]
    pub const fn gone(self) -> bool {
        self.0 == u64::MAX
    }

    /// Longest wait for CSTS.RDY in milliseconds, according to this register; CRTO may report more.
    #[inline]
    #[must_use]
    pub const fn timeout_ms(self) -> u32 {
        self.to() as u32 * 500
    }
}

/// VS: the version of the specification that the controller follows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct Version(pub u32);

impl Version {
    /// NVMe 1.0.
    pub const V1_0: Self = Self::new(1, 0, 0);
    /// NVMe 1.2.
    pub const V1_2: Self = Self::new(1, 2, 0);
    /// NVMe 1.3.
    pub const V1_3: Self = Self::new(1, 3, 0);
    /// NVMe 1.4.
    pub const V1_4: Self = Self::new(1, 4, 0);
    /// NVMe 2.0.
    pub const V2_0: Self = Self::new(2, 0, 0);
    /// NVMe 2.1.
    pub const V2_1: Self = Self::new(2, 1, 0);

    /// A version from its three numbers.
    #[must_use]
    pub const fn new(major: u16, minor: u8, tertiary: u8) -> Self {
        Self((major as u32) << 16 | (minor as u32) << 8 | tertiary as u32)
    }

    /// The first number.
    #[must_use]
    pub const fn major(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// The second number.
    #[must_use]
    pub const fn minor(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// The third number.
    #[must_use]
    pub const fn tertiary(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major(), self.minor())?;
        if self.tertiary() == 0 { Ok(()) } else { write!(f, ".{}", self.tertiary()) }
    }
}

/// CC: how the host wants the controller to run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cc(pub u32);

impl Cc {
    /// SHN: no shutdown.
    pub const SHN_NONE: u8 = 0;
    /// SHN: normal shutdown.
    pub const SHN_NORMAL: u8 = 1;
    /// SHN: abrupt shutdown.
    pub const SHN_ABRUPT: u8 = 2;
    /// CSS: the NVM command set.
    pub const CSS_NVM: u8 = 0;
    /// CSS: every I/O command set that the controller supports, chosen by CSI.
    pub const CSS_ALL: u8 = 6;
    /// CSS: admin commands only.
    pub const CSS_ADMIN: u8 = 7;

    bits! { u32;
        /// The command set in use.
        css with_css 4 3 u8;
        /// The page size in use: `4096 << mps`.
        mps with_mps 7 4 u8;
        /// The arbitration mechanism in use.
        ams with_ams 11 3 u8;
        /// Shutdown notification.
        shn with_shn 14 2 u8;
        /// Power of two of the bytes of an I/O submission entry.
        iosqes with_iosqes 16 4 u8;
        /// Power of two of the bytes of an I/O completion entry.
        iocqes with_iocqes 20 4 u8;
    }
    flags! { u32;
        /// Enabled.
        en with_en 0;
        /// Ready independent of media.
        crime with_crime 24;
    }

    /// An enabled controller with pages of `1 << page_shift` bytes (12 to 27), 64-byte and 16-byte entries.
    #[must_use]
    pub const fn enabled(page_shift: u32, css: u8) -> Self {
        let mps = page_shift.saturating_sub(12) as u8;
        Self(0).with_en(true).with_css(css).with_mps(mps).with_iosqes(6).with_iocqes(4)
    }

    /// Power of two of the page size in use.
    #[inline(always)]
    #[must_use]
    pub const fn page_shift(self) -> u32 {
        12 + self.mps() as u32
    }
}

/// CSTS: the controller's status.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Csts(pub u32);

impl Csts {
    /// SHST: no shutdown requested.
    pub const SHST_NONE: u8 = 0;
    /// SHST: shutting down.
    pub const SHST_OCCURRING: u8 = 1;
    /// SHST: shut down.
    pub const SHST_COMPLETE: u8 = 2;

    bits! { u32;
        /// Shutdown status.
        shst with_shst 2 2 u8;
    }
    flags! { u32;
        /// Ready.
        rdy with_rdy 0;
        /// Controller fatal status; a reset may clear it.
        cfs with_cfs 1;
        /// An NVM subsystem reset occurred; write one to clear.
        nssro with_nssro 4;
        /// Processing is paused.
        pp with_pp 5;
        /// The shutdown in SHST is one of the whole subsystem.
        st with_st 6;
    }

    /// True if the device has left the bus: every bit reads one.
    #[inline(always)]
    #[must_use]
    pub const fn gone(self) -> bool {
        self.0 == GONE32
    }
}

/// AQA: sizes of the admin queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Aqa(pub u32);

impl Aqa {
    /// Most entries that an admin queue may have.
    pub const MAX_ENTRIES: u32 = 4096;

    bits! { u32;
        /// Entries of the admin submission queue, zero-based.
        asqs_z with_asqs_z 0 12 u16;
        /// Entries of the admin completion queue, zero-based.
        acqs_z with_acqs_z 16 12 u16;
    }
}

/// CMBLOC: where the controller memory buffer lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cmbloc(pub u32);

impl Cmbloc {
    bits! { u32;
        /// The BAR that holds it.
        bir with_bir 0 3 u8;
        /// Its offset in the BAR, in units of CMBSZ.SZU.
        ofst with_ofst 12 20 u32;
    }
    flags! { u32;
        /// A queue in the buffer may be mixed with host memory.
        cqmms with_cqmms 3;
        /// A queue in the buffer may be physically discontiguous.
        cqpds with_cqpds 4;
        /// Data pointers in the buffer may mix buffer and host addresses.
        cdpmls with_cdpmls 5;
        /// Data pointers in the buffer work for commands of any queue.
        cdpcils with_cdpcils 6;
        /// Data and metadata of one command may lie partly in the buffer.
        cdmmms with_cdmmms 7;
        /// Queues in the buffer need only dword alignment.
        cqda with_cqda 8;
    }
}

/// CMBSZ: size and uses of the controller memory buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Cmbsz(pub u32);

impl Cmbsz {
    bits! { u32;
        /// The unit of size and offset: `4096 << (4 * szu)` bytes; 0 to 6 are defined.
        szu with_szu 8 4 u8;
        /// Size in units.
        sz with_sz 12 20 u32;
    }
    flags! { u32;
        /// Submission queues may lie in the buffer.
        sqs with_sqs 0;
        /// Completion queues may lie in the buffer.
        cqs with_cqs 1;
        /// PRP lists and SGL segments may lie in the buffer.
        lists with_lists 2;
        /// Data that the controller returns may lie in the buffer.
        rds with_rds 3;
        /// Data that the controller takes may lie in the buffer.
        wds with_wds 4;
    }

    /// Bytes of a unit; none if the field has an undefined value.
    #[must_use]
    pub const fn unit_bytes(self) -> Option<u64> {
        if self.szu() > 6 { None } else { Some(4096 << (4 * self.szu())) }
    }

    /// Bytes of the buffer; none if the unit has an undefined value.
    #[must_use]
    pub const fn bytes(self) -> Option<u64> {
        match self.unit_bytes() {
            Some(unit) => Some(unit * self.sz() as u64),
            None => None,
        }
    }
}
