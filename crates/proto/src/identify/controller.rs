//! The controller (CNS 01h), and what the NVM command set adds (CNS 06h).

use crate::regs::Version;
use crate::sgl::Support;
use crate::wire::{Wire, bits, flags, record, wire_newtypes};

/// OACS: optional admin commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Oacs(pub u16);

impl Oacs {
    flags! { u16;
        /// Security Send and Receive.
        security with_security 0;
        /// Format NVM.
        format with_format 1;
        /// Firmware Commit and Download.
        firmware with_firmware 2;
        /// Namespace Management and Attachment.
        namespaces with_namespaces 3;
        /// Device Self-test.
        self_test with_self_test 4;
        /// Directives.
        directives with_directives 5;
        /// NVMe-MI Send and Receive.
        mi with_mi 6;
        /// Virtualization Management.
        virtualization with_virtualization 7;
        /// Doorbell Buffer Config.
        doorbell_buffer with_doorbell_buffer 8;
        /// Get LBA Status.
        lba_status with_lba_status 9;
        /// Command and Feature Lockdown.
        lockdown with_lockdown 10;
    }
}

/// ONCS: optional NVM commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Oncs(pub u16);

impl Oncs {
    flags! { u16;
        /// Compare.
        compare with_compare 0;
        /// Write Uncorrectable.
        write_uncorrectable with_write_uncorrectable 1;
        /// Dataset Management.
        dataset_management with_dataset_management 2;
        /// Write Zeroes.
        write_zeroes with_write_zeroes 3;
        /// Save in Set Features and Select in Get Features.
        save_select with_save_select 4;
        /// Reservations.
        reservations with_reservations 5;
        /// Timestamp.
        timestamp with_timestamp 6;
        /// Verify.
        verify with_verify 7;
        /// Copy.
        copy with_copy 8;
    }
}

/// SQES and CQES: powers of two of the sizes of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct EntrySizes(pub u8);

impl EntrySizes {
    bits! { u8;
        /// The size that is required.
        min with_min 0 4 u8;
        /// The largest size.
        max with_max 4 4 u8;
    }

    /// True if entries of `1 << shift` bytes may be used.
    #[must_use]
    pub const fn allows(self, shift: u8) -> bool {
        self.min() <= shift && shift <= self.max()
    }
}

/// VWC: the volatile write cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Vwc(pub u8);

impl Vwc {
    bits! { u8;
        /// Flush of all namespaces: 2 not supported, 3 supported, 0 not reported.
        flush_all with_flush_all 1 2 u8;
    }
    flags! { u8;
        /// There is a volatile write cache.
        present with_present 0;
    }
}

wire_newtypes! { Oacs Oncs EntrySizes Vwc }

record! {
    /// Identify Controller.
    Controller, ControllerBuilder, 4096;
    /// PCI vendor.
    vid 0 u16;
    /// PCI subsystem vendor.
    ssvid 2 u16;
    /// Recommended arbitration burst, a power of two.
    rab 72 u8;
    /// IEEE identifier of the vendor, low byte first.
    ieee 73 [u8; 3];
    /// Multi-path and sharing: bit 0 ports, bit 1 controllers, bit 2 SR-IOV, bit 3 asymmetric access.
    cmic 76 u8;
    /// Largest transfer as a power of two of CAP.MPSMIN pages; 0 means no limit.
    mdts 77 u8;
    /// Controller identifier.
    cntlid 78 u16;
    /// Version of the specification; 0 before 1.2.
    ver 80 Version;
    /// Time to resume from D3 in microseconds; 0 is not reported.
    rtd3r 84 u32;
    /// Time to enter D3, and to shut down, in microseconds; 0 is not reported.
    rtd3e 88 u32;
    /// Optional asynchronous events.
    oaes 92 u32;
    /// Controller attributes.
    ctratt 96 u32;
    /// Read recovery levels.
    rrls 100 u16;
    /// Controller type: 1 I/O, 2 discovery, 3 administrative; 0 before 1.4.
    cntrltype 111 u8;
    /// FRU identifier.
    fguid 112 [u8; 16];
    /// Retry delay 1 in units of 100 ms.
    crdt1 128 u16;
    /// Retry delay 2 in units of 100 ms.
    crdt2 130 u16;
    /// Retry delay 3 in units of 100 ms.
    crdt3 132 u16;
    /// NVM subsystem report: bit 0 storage device, bit 1 enclosure.
    nvmsr 253 u8;
    /// VPD write cycles.
    vwci 254 u8;
    /// Management endpoints.
    mec 255 u8;
    /// Optional admin commands.
    oacs 256 Oacs;
    /// Aborts at a time, zero-based.
    acl_z 258 u8;
    /// Asynchronous event requests at a time, zero-based.
    aerl_z 259 u8;
    /// Firmware updates: bit 0 slot 1 is read-only, bits 3:1 slots, bit 4 activation without reset.
    frmw 260 u8;
    /// Log page attributes: bit 0 health per namespace, bit 1 effects log, bit 2 offsets, bit 3 telemetry.
    lpa 261 u8;
    /// Entries of the error log, zero-based.
    elpe_z 262 u8;
    /// Power states, zero-based.
    npss_z 263 u8;
    /// Vendor admin commands use the standard format (bit 0).
    avscc 264 u8;
    /// Autonomous power state transitions (bit 0).
    apsta 265 u8;
    /// Warning temperature in kelvins; 0 is not reported.
    wctemp 266 u16;
    /// Critical temperature in kelvins; 0 is not reported.
    cctemp 268 u16;
    /// Longest pause for a firmware activation, in units of 100 ms.
    mtfa 270 u16;
    /// Host memory that the controller would like, in units of 4 KiB.
    hmpre 272 u32;
    /// Host memory that the controller needs at least, in units of 4 KiB.
    hmmin 276 u32;
    /// Bytes of all media.
    tnvmcap 280 u128;
    /// Bytes of media in no namespace.
    unvmcap 296 u128;
    /// Replay protected memory block.
    rpmbs 312 u32;
    /// Time of an extended self-test in minutes.
    edstt 316 u16;
    /// Self-test options.
    dsto 318 u8;
    /// Firmware update granularity in units of 4 KiB; 0 is not reported, FFh any.
    fwug 319 u8;
    /// Keep alive granularity in units of 100 ms; 0 is no keep alive.
    kas 320 u16;
    /// Host controlled thermal management (bit 0).
    hctma 322 u16;
    /// Lowest throttling temperature in kelvins.
    mntmt 324 u16;
    /// Highest throttling temperature in kelvins.
    mxtmt 326 u16;
    /// Sanitize capabilities.
    sanicap 328 u32;
    /// Smallest range of host memory, in units of 4 KiB; 0 is no limit.
    hmminds 332 u32;
    /// Most ranges of host memory; 0 is no limit.
    hmmaxd 336 u16;
    /// Largest NVM set identifier.
    nsetidmax 338 u16;
    /// Largest endurance group identifier.
    endgidmax 340 u16;
    /// Asymmetric access transition time in seconds.
    anatt 342 u8;
    /// Asymmetric access capabilities.
    anacap 343 u8;
    /// Largest asymmetric access group.
    anagrpmax 344 u32;
    /// Asymmetric access groups.
    nanagrpid 348 u32;
    /// Bytes of the persistent event log in units of 64 KiB.
    pels 352 u32;
    /// Domain.
    domainid 356 u16;
    /// Largest endurance group in bytes.
    megcap 368 u128;
    /// Sizes of a submission entry.
    sqes 512 EntrySizes;
    /// Sizes of a completion entry.
    cqes 513 EntrySizes;
    /// Most commands outstanding in one queue; 0 is not reported.
    maxcmd 514 u16;
    /// Largest namespace identifier.
    nn 516 u32;
    /// Optional NVM commands.
    oncs 520 Oncs;
    /// Fused commands: bit 0 compare and write.
    fuses 522 u16;
    /// Format attributes.
    fna 524 u8;
    /// Volatile write cache.
    vwc 525 Vwc;
    /// Blocks written atomically, zero-based.
    awun_z 526 u16;
    /// Blocks written atomically despite power loss, zero-based.
    awupf_z 528 u16;
    /// Vendor I/O commands use the standard format (bit 0).
    icsvscc 530 u8;
    /// Namespace write protection.
    nwpc 531 u8;
    /// Blocks compared and written atomically, zero-based.
    acwu_z 532 u16;
    /// Formats of Copy descriptors.
    cdfs 534 u16;
    /// SGL support.
    sgls 536 Support;
    /// Most namespaces that may be allocated; 0 means NN.
    mnan 540 u32;
    /// Most namespaces attached in the domain.
    maxdna 544 u128;
    /// Most namespaces attached to the controller.
    maxcna 560 u32;
    /// Fabrics: longest command capsule, in units of 16 bytes.
    ioccsz 1792 u32;
    /// Fabrics: where in-capsule data starts behind the command, in units of 16 bytes.
    icdoff 1800 u16;
    @text:
    /// Serial number.
    sn 4 20;
    /// Model number.
    mn 24 40;
    /// Firmware revision.
    fr 64 8;
    /// Name of the subsystem (NQN).
    subnqn 768 256;
}

impl<'a> Controller<'a> {
    /// A power state descriptor, 0 to 31; none past NPSS.
    #[must_use]
    pub fn power_state(&self, i: u8) -> Option<PowerState<'a>> {
        if i > self.npss_z() || i > 31 {
            return None;
        }
        let at = POWER_STATES + i as usize * PowerState::BYTES;
        PowerState::parse(self.bytes().get(at..)?).ok()
    }

    /// How long a status with this CRD asks to wait, in milliseconds.
    #[must_use]
    pub fn retry_delay_ms(&self, crd: u8) -> u32 {
        let units = match crd {
            1 => self.crdt1(),
            2 => self.crdt2(),
            3 => self.crdt3(),
            _ => 0,
        };
        units as u32 * 100
    }

    /// Asynchronous event requests that may be outstanding.
    #[must_use]
    pub fn aer_limit(&self) -> u32 {
        self.aerl_z() as u32 + 1
    }

    /// Aborts that may be outstanding.
    #[must_use]
    pub fn abort_limit(&self) -> u32 {
        self.acl_z() as u32 + 1
    }

    /// True if log pages can be read from an offset on.
    #[must_use]
    pub fn log_offsets(&self) -> bool {
        self.lpa() & 4 != 0
    }
}

/// Where the power state descriptors start.
const POWER_STATES: usize = 2048;

record! {
    /// A power state.
    PowerState, PowerStateBuilder, 32;
    /// Most power, in units that `flags` names.
    mp 0 u16;
    /// Bit 0: the power is in units of 0.1 mW, else 10 mW; bit 1: the state does no I/O.
    flags 3 u8;
    /// Time to enter in microseconds.
    enlat 4 u32;
    /// Time to leave in microseconds.
    exlat 8 u32;
    /// Relative read throughput, 0 best.
    rrt 12 u8;
    /// Relative read latency, 0 best.
    rrl 13 u8;
    /// Relative write throughput, 0 best.
    rwt 14 u8;
    /// Relative write latency, 0 best.
    rwl 15 u8;
    /// Idle power.
    idlp 16 u16;
    /// Scale of the idle power in bits 7:6.
    ips 18 u8;
    /// Active power.
    actp 20 u16;
    /// Active power workload in bits 2:0 and scale in bits 7:6.
    apws 22 u8;
}

impl PowerState<'_> {
    /// Most power in microwatts.
    #[must_use]
    pub fn max_microwatts(&self) -> u64 {
        self.mp() as u64 * if self.flags() & 1 != 0 { 100 } else { 10_000 }
    }

    /// True if the controller does no I/O in this state.
    #[must_use]
    pub fn non_operational(&self) -> bool {
        self.flags() & 2 != 0
    }
}

/// Writes a power state descriptor, 0 to 31, into Identify Controller; nothing past the last.
pub fn put_power_state(bytes: &mut [u8; 4096], i: u8, state: &[u8; 32]) {
    if i < 32 {
        (*state).put(bytes, POWER_STATES + i as usize * 32);
    }
}

record! {
    /// Identify Controller for the NVM command set: limits of commands that MDTS does not cover; 0 means no limit.
    NvmController, NvmControllerBuilder, 4096;
    /// Verify: a power of two of CAP.MPSMIN pages.
    vsl 0 u8;
    /// Write Zeroes: a power of two of CAP.MPSMIN pages.
    wzsl 1 u8;
    /// Write Uncorrectable: a power of two of CAP.MPSMIN pages.
    wusl 2 u8;
    /// Dataset Management: ranges.
    dmrl 3 u8;
    /// Dataset Management: blocks of a range.
    dmrsl 4 u32;
    /// Dataset Management: blocks of all ranges.
    dmsl 8 u64;
}
