//! Commands of the NVM command set: constructors for the driver and the GPU, and the same decoded for the simulator.
//!
//! Constructors leave the CID and the data pointer zero.

use crate::Sqe;

/// NVM opcodes.
pub mod opcode {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0c;
}

/// Flags of dword 12, to be or-ed.
pub mod flag {
    /// Limited retry: give up sooner.
    pub const LR: u32 = 1 << 31;
    /// Force unit access: reach the media, past any volatile cache.
    pub const FUA: u32 = 1 << 30;
    /// Deallocate the blocks, if that leaves them zero (Write Zeroes).
    pub const DEAC: u32 = 1 << 25;
    /// Protection: the controller inserts and strips the information.
    pub const PRACT: u32 = 1 << 29;
    /// Protection: check the guard.
    pub const CHECK_GUARD: u32 = 1 << 28;
    /// Protection: check the application tag.
    pub const CHECK_APPTAG: u32 = 1 << 27;
    /// Protection: check the reference tag.
    pub const CHECK_REFTAG: u32 = 1 << 26;
    /// Protection: check the storage tag.
    pub const CHECK_STORAGE_TAG: u32 = 1 << 24;
}

/// Most blocks that one command can name.
pub const MAX_BLOCKS: u32 = 65536;

/// A command on `blocks` (1 to 65536) from `lba` on; none if the count cannot be said.
#[inline(always)]
#[must_use]
pub const fn command(opcode: u8, nsid: u32, lba: u64, blocks: u32, flags: u32) -> Option<Sqe> {
    if blocks.wrapping_sub(1) >= MAX_BLOCKS {
        return None;
    }
    Some(Sqe::new(opcode, nsid).with_qword(10, lba).with_dw(12, (blocks - 1) | flags & 0xffff_0000))
}

/// Read of 1 to 65536 blocks; none for any other count.
#[inline(always)]
#[must_use]
pub const fn read(nsid: u32, lba: u64, blocks: u32) -> Option<Sqe> {
    command(opcode::READ, nsid, lba, blocks, 0)
}

/// Write of 1 to 65536 blocks; none for any other count.
#[inline(always)]
#[must_use]
pub const fn write(nsid: u32, lba: u64, blocks: u32) -> Option<Sqe> {
    command(opcode::WRITE, nsid, lba, blocks, 0)
}

/// Compare of 1 to 65536 blocks; none for any other count.
#[inline]
#[must_use]
pub const fn compare(nsid: u32, lba: u64, blocks: u32) -> Option<Sqe> {
    command(opcode::COMPARE, nsid, lba, blocks, 0)
}

/// Write Zeroes to 1 to 65536 blocks; none for any other count.
#[inline]
#[must_use]
pub const fn write_zeroes(nsid: u32, lba: u64, blocks: u32) -> Option<Sqe> {
    command(opcode::WRITE_ZEROES, nsid, lba, blocks, 0)
}

/// Write Uncorrectable to 1 to 65536 blocks; none for any other count.
#[inline]
#[must_use]
pub const fn write_uncorrectable(nsid: u32, lba: u64, blocks: u32) -> Option<Sqe> {
    command(opcode::WRITE_UNCORRECTABLE, nsid, lba, blocks, 0)
}

/// Verify of 1 to 65536 blocks; none for any other count.
#[inline]
#[must_use]
pub const fn verify(nsid: u32, lba: u64, blocks: u32) -> Option<Sqe> {
    command(opcode::VERIFY, nsid, lba, blocks, 0)
}

/// Flush of a namespace.
#[inline]
#[must_use]
pub const fn flush(nsid: u32) -> Sqe {
    Sqe::new(opcode::FLUSH, nsid)
}

/// The same command with more flags of dword 12.
#[inline(always)]
#[must_use]
pub const fn with_flags(mut sqe: Sqe, flags: u32) -> Sqe {
    sqe.dw[12] |= flags & 0xffff_0000;
    sqe
}

/// The same command with the tags that protection information is checked against or made from.
#[inline]
#[must_use]
pub const fn with_tags(mut sqe: Sqe, reftag: u32, apptag: u16, apptag_mask: u16) -> Sqe {
    sqe.dw[14] = reftag;
    sqe.dw[15] = apptag as u32 | (apptag_mask as u32) << 16;
    sqe
}

/// A decoded command on a range of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rw {
    /// The opcode.
    pub opcode: u8,
    /// The namespace.
    pub nsid: u32,
    /// The first block.
    pub lba: u64,
    /// Blocks, 1 to 65536.
    pub blocks: u32,
    /// Limited retry.
    pub lr: bool,
    /// Force unit access.
    pub fua: bool,
    /// Deallocate (Write Zeroes).
    pub deac: bool,
    /// Protection information is inserted and stripped by the controller.
    pub pract: bool,
    /// What to check: bit 2 guard, bit 1 application tag, bit 0 reference tag.
    pub prchk: u8,
    /// Check the storage tag.
    pub stc: bool,
    /// The reference tag, initial or expected.
    pub reftag: u32,
    /// The application tag.
    pub apptag: u16,
    /// Which bits of the application tag matter.
    pub apptag_mask: u16,
}

impl Rw {
    /// Decodes a command.
    #[inline]
    #[must_use]
    pub const fn decode(sqe: &Sqe) -> Self {
        let dw12 = sqe.dw[12];
        Self {
            opcode: sqe.opcode(),
            nsid: sqe.nsid(),
            lba: sqe.qword(10),
            blocks: (dw12 & 0xffff) + 1,
            lr: dw12 & flag::LR != 0,
            fua: dw12 & flag::FUA != 0,
            deac: dw12 & flag::DEAC != 0,
            pract: dw12 & flag::PRACT != 0,
            prchk: (dw12 >> 26) as u8 & 7,
            stc: dw12 & flag::CHECK_STORAGE_TAG != 0,
            reftag: sqe.dw[14],
            apptag: sqe.dw[15] as u16,
            apptag_mask: (sqe.dw[15] >> 16) as u16,
        }
    }
}

impl From<&Sqe> for Rw {
    fn from(sqe: &Sqe) -> Self {
        Self::decode(sqe)
    }
}

/// Attributes of Dataset Management, to be or-ed.
pub mod dsm {
    /// Optimise for whole reads.
    pub const INTEGRAL_READ: u32 = 1 << 0;
    /// Optimise for whole writes.
    pub const INTEGRAL_WRITE: u32 = 1 << 1;
    /// Deallocate the ranges.
    pub const DEALLOCATE: u32 = 1 << 2;
}

/// Dataset Management of `ranges_z + 1` ranges, which the data pointer leads to.
#[must_use]
pub const fn dataset_management(nsid: u32, ranges_z: u8, attributes: u32) -> Sqe {
    Sqe::new(opcode::DATASET_MANAGEMENT, nsid).with_dw(10, ranges_z as u32).with_dw(11, attributes)
}

/// A Dataset Management command taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatasetManagement {
    /// The namespace.
    pub nsid: u32,
    /// Ranges less one.
    pub ranges_z: u8,
    /// What to do with them: see [`dsm`].
    pub attributes: u32,
}

impl DatasetManagement {
    /// Bytes of the list of ranges.
    #[must_use]
    pub const fn list_bytes(&self) -> u32 {
        (self.ranges_z as u32 + 1) * Range::BYTES as u32
    }
}

impl From<&Sqe> for DatasetManagement {
    fn from(sqe: &Sqe) -> Self {
        Self { nsid: sqe.nsid(), ranges_z: sqe.dw[10] as u8, attributes: sqe.dw[11] & 7 }
    }
}

/// A range of Dataset Management.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Range {
    /// Hints about how the range is used.
    pub context: u32,
    /// Blocks; may be zero.
    pub blocks: u32,
    /// The first block.
    pub lba: u64,
}

impl Range {
    /// Bytes of a range on the wire.
    pub const BYTES: usize = 16;

    /// The range as it travels.
    #[must_use]
    pub const fn encode(&self) -> [u8; 16] {
        let low = self.context as u128 | (self.blocks as u128) << 32;
        (low | (self.lba as u128) << 64).to_le_bytes()
    }

    /// A range from its bytes.
    #[must_use]
    pub const fn decode(bytes: &[u8; 16]) -> Self {
        let all = u128::from_le_bytes(*bytes);
        Self { context: all as u32, blocks: (all >> 32) as u32, lba: (all >> 64) as u64 }
    }
}
