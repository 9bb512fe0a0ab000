//! Admin commands: constructors for the driver, and the same commands decoded for the simulator.
//!
//! Constructors leave the CID zero, and the data pointer too unless it is an argument.

use crate::{BusAddr, Sqe};

/// Admin opcodes.
pub mod opcode {
    /// Delete I/O Submission Queue.
    pub const DELETE_SQ: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_SQ: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_CQ: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_CQ: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT: u8 = 0x0c;
    /// Namespace Management.
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0d;
    /// Firmware Commit.
    pub const FIRMWARE_COMMIT: u8 = 0x10;
    /// Firmware Image Download.
    pub const FIRMWARE_DOWNLOAD: u8 = 0x11;
    /// Device Self-test.
    pub const SELF_TEST: u8 = 0x14;
    /// Namespace Attachment.
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Directive Send.
    pub const DIRECTIVE_SEND: u8 = 0x19;
    /// Directive Receive.
    pub const DIRECTIVE_RECEIVE: u8 = 0x1a;
    /// Virtualization Management.
    pub const VIRTUALIZATION: u8 = 0x1c;
    /// NVMe-MI Send.
    pub const MI_SEND: u8 = 0x1d;
    /// NVMe-MI Receive.
    pub const MI_RECEIVE: u8 = 0x1e;
    /// Capacity Management.
    pub const CAPACITY_MANAGEMENT: u8 = 0x20;
    /// Lockdown.
    pub const LOCKDOWN: u8 = 0x24;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER: u8 = 0x7c;
    /// Format NVM.
    pub const FORMAT: u8 = 0x80;
    /// Security Send.
    pub const SECURITY_SEND: u8 = 0x81;
    /// Security Receive.
    pub const SECURITY_RECEIVE: u8 = 0x82;
    /// Sanitize.
    pub const SANITIZE: u8 = 0x84;
    /// Get LBA Status.
    pub const GET_LBA_STATUS: u8 = 0x86;
}

/// What Identify returns (CNS).
pub mod cns {
    /// A namespace.
    pub const NAMESPACE: u8 = 0x00;
    /// The controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespaces with identifiers above the one given.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Identification descriptors of a namespace.
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    /// A namespace, as its command set describes it.
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// The controller, as a command set describes it.
    pub const CSI_CONTROLLER: u8 = 0x06;
    /// Active namespaces of a command set.
    pub const CSI_ACTIVE: u8 = 0x07;
    /// A namespace, as every command set describes it.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
}

/// Command set identifiers (CSI).
pub mod csi {
    /// NVM.
    pub const NVM: u8 = 0;
    /// Key value.
    pub const KEY_VALUE: u8 = 1;
    /// Zoned.
    pub const ZONED: u8 = 2;
}

/// The namespace identifier that means every namespace.
pub const ALL_NAMESPACES: u32 = u32::MAX;

/// Identify.
#[must_use]
pub const fn identify(cns: u8, nsid: u32, cntid: u16, csi: u8) -> Sqe {
    Sqe::new(opcode::IDENTIFY, nsid)
        .with_dw(10, cns as u32 | (cntid as u32) << 16)
        .with_dw(11, (csi as u32) << 24)
}

/// An Identify command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identify {
    /// What to return.
    pub cns: u8,
    /// The namespace.
    pub nsid: u32,
    /// The controller.
    pub cntid: u16,
    /// The command set.
    pub csi: u8,
    /// An identifier whose meaning depends on `cns`.
    pub cnssid: u16,
}

impl From<&Sqe> for Identify {
    fn from(sqe: &Sqe) -> Self {
        Self {
            cns: sqe.dw[10] as u8,
            nsid: sqe.nsid(),
            cntid: (sqe.dw[10] >> 16) as u16,
            csi: (sqe.dw[11] >> 24) as u8,
            cnssid: sqe.dw[11] as u16,
        }
    }
}

/// Create I/O Completion Queue: `size_z` is the number of entries less one; no interrupt means polling.
///
/// A queue that is not contiguous has the address of a PRP list as its base.
#[must_use]
pub const fn create_cq(
    qid: u16,
    size_z: u16,
    base: BusAddr,
    contiguous: bool,
    interrupt: Option<u16>,
) -> Sqe {
    let (vector, enabled) = match interrupt {
        Some(vector) => (vector, 1),
        None => (0, 0),
    };
    Sqe::new(opcode::CREATE_CQ, 0)
        .with_prps(base.0, 0)
        .with_dw(10, qid as u32 | (size_z as u32) << 16)
        .with_dw(11, contiguous as u32 | enabled << 1 | (vector as u32) << 16)
}

/// A Create I/O Completion Queue command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreateCq {
    /// The queue.
    pub qid: u16,
    /// Entries less one.
    pub size_z: u16,
    /// The ring, or a PRP list if it is not contiguous.
    pub base: BusAddr,
    /// The ring is contiguous.
    pub contiguous: bool,
    /// The interrupt vector; none if interrupts are off.
    pub interrupt: Option<u16>,
}

impl From<&Sqe> for CreateCq {
    fn from(sqe: &Sqe) -> Self {
        Self {
            qid: sqe.dw[10] as u16,
            size_z: (sqe.dw[10] >> 16) as u16,
            base: BusAddr(sqe.prp1()),
            contiguous: sqe.dw[11] & 1 != 0,
            interrupt: if sqe.dw[11] & 2 != 0 { Some((sqe.dw[11] >> 16) as u16) } else { None },
        }
    }
}

/// The priority of a submission queue under weighted round robin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Priority {
    /// Served before the weighted classes; also the value for plain round robin.
    #[default]
    Urgent = 0,
    /// The class with the high weight.
    High = 1,
    /// The class with the medium weight.
    Medium = 2,
    /// The class with the low weight.
    Low = 3,
}

impl Priority {
    /// The priority in the low two bits.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        match bits & 3 {
            0 => Self::Urgent,
            1 => Self::High,
            2 => Self::Medium,
            _ => Self::Low,
        }
    }
}

/// Create I/O Submission Queue that completes into `cqid`: `size_z` is the number of entries less one.
#[must_use]
pub const fn create_sq(
    qid: u16,
    size_z: u16,
    base: BusAddr,
    cqid: u16,
    contiguous: bool,
    priority: Priority,
) -> Sqe {
    Sqe::new(opcode::CREATE_SQ, 0)
        .with_prps(base.0, 0)
        .with_dw(10, qid as u32 | (size_z as u32) << 16)
        .with_dw(11, contiguous as u32 | (priority as u32) << 1 | (cqid as u32) << 16)
}

/// A Create I/O Submission Queue command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreateSq {
    /// The queue.
    pub qid: u16,
    /// Entries less one.
    pub size_z: u16,
    /// The ring, or a PRP list if it is not contiguous.
    pub base: BusAddr,
    /// The completion queue.
    pub cqid: u16,
    /// The ring is contiguous.
    pub contiguous: bool,
    /// Its priority.
    pub priority: Priority,
    /// The NVM set; 0 for none.
    pub nvmsetid: u16,
}

impl From<&Sqe> for CreateSq {
    fn from(sqe: &Sqe) -> Self {
        Self {
            qid: sqe.dw[10] as u16,
            size_z: (sqe.dw[10] >> 16) as u16,
            base: BusAddr(sqe.prp1()),
            cqid: (sqe.dw[11] >> 16) as u16,
            contiguous: sqe.dw[11] & 1 != 0,
            priority: Priority::from_bits(sqe.dw[11] >> 1),
            nvmsetid: sqe.dw[12] as u16,
        }
    }
}

/// Delete I/O Submission Queue.
#[must_use]
pub const fn delete_sq(qid: u16) -> Sqe {
    Sqe::new(opcode::DELETE_SQ, 0).with_dw(10, qid as u32)
}

/// Delete I/O Completion Queue.
#[must_use]
pub const fn delete_cq(qid: u16) -> Sqe {
    Sqe::new(opcode::DELETE_CQ, 0).with_dw(10, qid as u32)
}

/// The queue that a Delete command names.
#[must_use]
pub const fn deleted_queue(sqe: &Sqe) -> u16 {
    sqe.dw[10] as u16
}

/// Which value Get Features asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Select {
    /// The value in use.
    #[default]
    Current = 0,
    /// The factory's value.
    Default = 1,
    /// The value that survives a reset.
    Saved = 2,
    /// What may be done with the feature: bit 0 saveable, bit 1 per namespace, bit 2 changeable.
    Supported = 3,
}

impl Select {
    /// The selector in the low three bits; the upper four values are reserved.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        match bits & 7 {
            0 => Some(Self::Current),
            1 => Some(Self::Default),
            2 => Some(Self::Saved),
            3 => Some(Self::Supported),
            _ => None,
        }
    }
}

/// Get Features.
#[must_use]
pub const fn get_features(fid: u8, select: Select, dw11: u32) -> Sqe {
    Sqe::new(opcode::GET_FEATURES, 0).with_dw(10, fid as u32 | (select as u32) << 8).with_dw(11, dw11)
}

/// Set Features; `save` makes the value survive a reset.
#[must_use]
pub const fn set_features(fid: u8, save: bool, dw11: u32) -> Sqe {
    Sqe::new(opcode::SET_FEATURES, 0).with_dw(10, fid as u32 | (save as u32) << 31).with_dw(11, dw11)
}

/// A Get Features command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetFeatures {
    /// The feature.
    pub fid: u8,
    /// Which value; none if the selector is reserved.
    pub select: Option<Select>,
    /// The namespace, for features that have one value each.
    pub nsid: u32,
    /// Dword 11.
    pub dw11: u32,
}

impl From<&Sqe> for GetFeatures {
    fn from(sqe: &Sqe) -> Self {
        let select = Select::from_bits(sqe.dw[10] >> 8);
        Self { fid: sqe.dw[10] as u8, select, nsid: sqe.nsid(), dw11: sqe.dw[11] }
    }
}

/// A Set Features command taken apart; further dwords stay in the entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetFeatures {
    /// The feature.
    pub fid: u8,
    /// Make the value survive a reset.
    pub save: bool,
    /// The namespace, for features that have one value each.
    pub nsid: u32,
    /// Dword 11.
    pub dw11: u32,
}

impl From<&Sqe> for SetFeatures {
    fn from(sqe: &Sqe) -> Self {
        Self { fid: sqe.dw[10] as u8, save: sqe.dw[10] >> 31 != 0, nsid: sqe.nsid(), dw11: sqe.dw[11] }
    }
}

/// Get Log Page: `bytes` counts up to whole dwords, at least one; `offset` is dword aligned, its low bits are dropped;
/// `rae` keeps the event that the page belongs to.
#[must_use]
pub const fn get_log_page(lid: u8, nsid: u32, bytes: u32, offset: u64, rae: bool, lsp: u8) -> Sqe {
    let dwords_z = bytes.div_ceil(4).saturating_sub(1);
    Sqe::new(opcode::GET_LOG_PAGE, nsid)
        .with_dw(10, lid as u32 | (lsp as u32 & 0x7f) << 8 | (rae as u32) << 15 | dwords_z << 16)
        .with_dw(11, dwords_z >> 16)
        .with_qword(12, offset & !3)
}

/// A Get Log Page command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetLogPage {
    /// The log page.
    pub lid: u8,
    /// The namespace.
    pub nsid: u32,
    /// Bytes wanted; up to 16 GiB, so a controller clamps it.
    pub bytes: u64,
    /// The first byte, or an index if `offset_is_index`.
    pub offset: u64,
    /// Keep the event that the page belongs to.
    pub rae: bool,
    /// A parameter whose meaning depends on `lid`.
    pub lsp: u8,
    /// An identifier whose meaning depends on `lid`.
    pub lsi: u16,
    /// The command set.
    pub csi: u8,
    /// The offset counts entries.
    pub offset_is_index: bool,
}

impl From<&Sqe> for GetLogPage {
    fn from(sqe: &Sqe) -> Self {
        let dwords_z = sqe.dw[10] >> 16 | sqe.dw[11] << 16;
        Self {
            lid: sqe.dw[10] as u8,
            nsid: sqe.nsid(),
            bytes: (dwords_z as u64 + 1) * 4,
            offset: sqe.qword(12),
            rae: sqe.dw[10] >> 15 & 1 != 0,
            lsp: (sqe.dw[10] >> 8) as u8 & 0x7f,
            lsi: (sqe.dw[11] >> 16) as u16,
            csi: (sqe.dw[14] >> 24) as u8,
            offset_is_index: sqe.dw[14] >> 23 & 1 != 0,
        }
    }
}

/// Asynchronous Event Request.
#[must_use]
pub const fn async_event() -> Sqe {
    Sqe::new(opcode::ASYNC_EVENT, 0)
}

/// Abort of one command; bit 0 of the result is 1 if the command was *not* aborted.
#[must_use]
pub const fn abort(sqid: u16, cid: u16) -> Sqe {
    Sqe::new(opcode::ABORT, 0).with_dw(10, sqid as u32 | (cid as u32) << 16)
}

/// An Abort command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort {
    /// The submission queue of the command to abort.
    pub sqid: u16,
    /// Its command identifier.
    pub cid: u16,
}

impl From<&Sqe> for Abort {
    fn from(sqe: &Sqe) -> Self {
        Self { sqid: sqe.dw[10] as u16, cid: (sqe.dw[10] >> 16) as u16 }
    }
}

/// Doorbell Buffer Config: where the controller may look instead of at its doorbells; both page aligned.
#[must_use]
pub const fn doorbell_buffer_config(shadow: BusAddr, event_idx: BusAddr) -> Sqe {
    Sqe::new(opcode::DOORBELL_BUFFER, 0).with_prps(shadow.0, event_idx.0)
}

/// A Doorbell Buffer Config command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DoorbellBuffers {
    /// The shadow doorbells.
    pub shadow: BusAddr,
    /// The event indices.
    pub event_idx: BusAddr,
}

impl From<&Sqe> for DoorbellBuffers {
    fn from(sqe: &Sqe) -> Self {
        Self { shadow: BusAddr(sqe.prp1()), event_idx: BusAddr(sqe.prp2()) }
    }
}

/// Keep Alive.
#[must_use]
pub const fn keep_alive() -> Sqe {
    Sqe::new(opcode::KEEP_ALIVE, 0)
}
