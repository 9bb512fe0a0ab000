//! Translates a caller's request into the submission queue entry.

use onehop_os::BusRange;
use onehop_proto::format::{Format, check_range};
use onehop_proto::sgl::Descriptor;
use onehop_proto::{BusAddr, Sqe, nvm, prp};

use crate::ring::Dma;
use crate::{Buffer, Error, Namespace, Result};

/// What to do with blocks; the numbers are the opcodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Op {
    /// Drive to memory.
    Read = nvm::opcode::READ,
    /// Memory to drive.
    Write = nvm::opcode::WRITE,
    /// Fails unless memory and drive hold the same.
    Compare = nvm::opcode::COMPARE,
    /// Zeroes blocks; moves no data.
    WriteZeroes = nvm::opcode::WRITE_ZEROES,
    /// Makes everything written so far durable; takes no blocks.
    Flush = nvm::opcode::FLUSH,
}

impl Op {
    /// The opcode.
    #[must_use]
    pub const fn opcode(self) -> u8 {
        self as u8
    }

    /// The operation with an opcode of [`Self::opcode`].
    pub(crate) const fn of(opcode: u8) -> Self {
        match opcode {
            nvm::opcode::READ => Self::Read,
            nvm::opcode::WRITE => Self::Write,
            nvm::opcode::COMPARE => Self::Compare,
            nvm::opcode::WRITE_ZEROES => Self::WriteZeroes,
            _ => Self::Flush,
        }
    }

    /// Whether it changes what is on the drive.
    #[must_use]
    pub const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::WriteZeroes)
    }

    /// Whether it moves data.
    #[must_use]
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Compare)
    }

    /// Its name, for messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Compare => "compare",
            Self::WriteZeroes => "write zeroes",
            Self::Flush => "flush",
        }
    }
}

/// One command, as a caller describes it.
#[derive(Clone, Copy, Debug)]
pub struct Io<'a> {
    /// What to do.
    pub op: Op,
    /// The first block.
    pub lba: u64,
    /// How many blocks.
    pub blocks: u32,
    /// Where the data lies, and from which byte on.
    pub data: Option<(&'a Buffer, u64)>,
    /// Where separate metadata lies. Without it, metadata that is read is discarded, zeroes are written, and a Compare
    /// fails where the drive holds anything else. The controller generates protection information in it.
    pub metadata: Option<(&'a Buffer, u64)>,
    /// Force unit access: bypasses the volatile write cache.
    pub fua: bool,
}

impl<'a> Io<'a> {
    /// A command with data.
    #[must_use]
    pub fn new(op: Op, lba: u64, blocks: u32, data: &'a Buffer, offset: u64) -> Self {
        Self { op, lba, blocks, data: Some((data, offset)), metadata: None, fua: false }
    }

    /// A flush.
    #[must_use]
    pub fn flush() -> Self {
        Self { op: Op::Flush, lba: 0, blocks: 0, data: None, metadata: None, fua: false }
    }

    /// Which blocks of the namespace, checked against it.
    #[inline(always)]
    pub(crate) fn block_range(&self, ns: &Namespace) -> Result<BlockRange> {
        if self.op == Op::Flush {
            return Ok(BlockRange::default());
        }
        let range = |source| Error::Range { nsid: ns.nsid, source };
        check_range(ns.blocks, self.lba, self.blocks.into()).map_err(range)?;
        if self.blocks > nvm::MAX_BLOCKS {
            let limit = ns.format.data_bytes(nvm::MAX_BLOCKS.into()).unwrap_or(u64::MAX);
            return Err(Error::TooLong { bytes: u64::MAX, limit });
        }
        let mut range = BlockRange { lba: self.lba, count_and_flags: self.blocks - 1, reftag: 0 };
        if self.fua && self.op.writes() {
            range.count_and_flags |= nvm::flag::FUA;
        }
        if !ns.is_plain && ns.format.pi != 0 {
            range.count_and_flags |= protection(self.op, ns.format.pi);
            // Reference tags count blocks from 0, as type 1 demands it; 32 bits of them.
            range.reftag = self.lba as u32;
        }
        Ok(range)
    }
}

/// Dwords 10 to 14 of a command.
#[derive(Clone, Copy, Default)]
pub(crate) struct BlockRange {
    pub(crate) lba: u64,
    /// The number of blocks, counted from 0, and the flags.
    pub(crate) count_and_flags: u32,
    pub(crate) reftag: u32,
}

/// The PRINFO flags for protection information of a type: the controller generates it on writes and checks it on reads.
/// Tags of types 2 and 3 belong to their writer, and are not checked.
pub(crate) const fn protection(op: Op, kind: u8) -> u32 {
    match (kind, op) {
        (0, _) | (_, Op::Compare | Op::Flush) => 0,
        (1, Op::Read) => nvm::flag::PRACT | nvm::flag::CHECK_GUARD | nvm::flag::CHECK_REFTAG,
        (_, Op::Read) => nvm::flag::PRACT | nvm::flag::CHECK_GUARD,
        (_, Op::Write | Op::WriteZeroes) => nvm::flag::PRACT,
    }
}

pub(crate) fn describe(op: &str, drive: &str, nsid: u32, lba: u64, blocks: impl Into<u64>) -> String {
    if op == "flush" {
        return format!("flush of {drive} namespace {nsid}");
    }
    format!(
        "{op} of {drive} namespace {nsid} blocks {lba} to {}",
        lba.saturating_add(blocks.into()).saturating_sub(1)
    )
}

/// The pages of a command's PRP list, within the list memory of a queue.
pub(crate) struct ListSlot<'a> {
    pub(crate) lists: &'a Dma,
    pub(crate) first_page: u64,
    pub(crate) page_shift: u32,
}

impl ListSlot<'_> {
    fn offset(&self, page: u32) -> u64 {
        (self.first_page + u64::from(page)) << self.page_shift
    }

    fn bus(&self, page: u32) -> BusAddr {
        // A page of the list that is not contiguous on the bus has no address, and is refused.
        let run = self.lists.map.at(self.offset(page)).filter(|run| run.len >> self.page_shift > 0);
        run.map_or(BusAddr(u64::MAX), |run| run.addr)
    }

    fn put(&self, page: u32, index: u32, entry: u64) {
        let at = self.offset(page) + u64::from(index) * 8;
        // The list memory was allocated for the largest transfer; an offset outside it is a defect of this crate.
        let written = self.lists.mem.write(at as usize, &entry.to_le_bytes());
        debug_assert!(written.is_ok(), "a PRP list longer than its memory");
    }
}

/// Pages of PRP list that a transfer of `bytes` may need, at any offset.
pub(crate) fn list_pages(page_shift: u32, bytes: u64) -> u64 {
    prp::layout(page_shift, (1 << page_shift) - 4, bytes.max(1), 0).list_pages
}

/// How data pointers are made for one drive.
#[derive(Clone, Copy)]
pub(crate) struct Pointers {
    pub(crate) page_shift: u32,
    pub(crate) max_transfer: u64,
    pub(crate) sgl: UseSgl,
}

/// When data is described by an SGL descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum UseSgl {
    Never,
    /// Where PRPs would need a list, and the memory is one run.
    LongRuns,
    /// Controllers that get commands by messages support nothing else.
    Always,
}

/// A command's data pointer: two PRPs, or a descriptor.
#[derive(Clone, Copy, Default)]
pub(crate) struct DataPointer {
    pub(crate) halves: [u64; 2],
    /// PSDT.
    pub(crate) kind: u32,
}

impl DataPointer {
    const fn prps(prp1: u64, prp2: u64) -> Self {
        Self { halves: [prp1, prp2], kind: 0 }
    }

    const fn descriptor(at: BusAddr, len: u64) -> Self {
        let (low, high) = Descriptor::Data { at, len: len as u32 }.encode();
        Self { halves: [low, high], kind: 1 }
    }
}

/// The whole command, built from its parts at once. Filling it in step by step would store it and load it again with
/// operands of different sizes, and CPUs do not forward those.
#[inline(always)]
pub(crate) const fn entry(op: Op, nsid: u32, mptr: u64, data: DataPointer, range: BlockRange) -> Sqe {
    let mut sqe = Sqe::new(op.opcode(), nsid)
        .with_mptr(mptr)
        .with_qword(6, data.halves[0])
        .with_qword(8, data.halves[1])
        .with_qword(10, range.lba)
        .with_dw(12, range.count_and_flags)
        .with_dw(14, range.reftag);
    sqe.dw[0] |= data.kind << 14;
    sqe
}

impl Pointers {
    /// The pointer to `bytes` bytes of `buffer`, with a list at `list` if it needs one.
    #[inline(always)]
    pub(crate) fn point<'a>(
        &self,
        (buffer, offset): (&Buffer, u64),
        bytes: u64,
        list: impl FnOnce() -> ListSlot<'a>,
    ) -> Result<DataPointer> {
        let run = buffer.range(offset, bytes)?;
        if bytes > self.max_transfer {
            return Err(Error::TooLong { bytes, limit: self.max_transfer });
        }
        let page = 1u64 << self.page_shift;
        let in_first = page - (run.addr.0 & (page - 1));
        if bytes <= in_first.min(run.len) && run.addr.0 & 3 == 0 && self.sgl != UseSgl::Always {
            return Ok(DataPointer::prps(run.addr.0, 0));
        }
        self.point_to_pages((buffer, offset, run), bytes, &list())
    }

    /// The same where more than one entry, or a descriptor, is needed.
    #[inline(never)]
    fn point_to_pages(
        &self,
        (buffer, offset, run): (&Buffer, u64, BusRange),
        bytes: u64,
        list: &ListSlot<'_>,
    ) -> Result<DataPointer> {
        let descriptor = DataPointer::descriptor(run.addr, bytes);
        if self.sgl == UseSgl::Always {
            if run.len < bytes {
                return Err(Error::Memory("the data of one command is not contiguous on the bus".into()));
            }
            return Ok(descriptor);
        }
        let page = 1u64 << self.page_shift;
        let in_first = page - (run.addr.0 & (page - 1));
        if self.sgl == UseSgl::LongRuns && run.len >= bytes && bytes > in_first + page && run.addr.0 & 3 == 0
        {
            return Ok(descriptor);
        }
        let page_addr = |i: u64| {
            let (at, need) = match i {
                0 => (offset, in_first.min(bytes)),
                _ => {
                    let passed = in_first + (i - 1) * page;
                    (offset + passed, page.min(bytes.saturating_sub(passed)))
                }
            };
            // A page that is not contiguous has no address; one that is not aligned is refused.
            buffer.at(at).filter(|run| run.len >= need).map_or(BusAddr(u64::MAX), |run| run.addr)
        };
        let put = |page, index, entry| list.put(page, index, entry);
        let (prp1, prp2) = prp::build(self.page_shift, page_addr, bytes, 0, |page| list.bus(page), put)?;
        Ok(DataPointer::prps(prp1, prp2))
    }
}

/// Most blocks of one command, by the controller's limit and the width of the field.
pub(crate) fn max_blocks(format: &Format, max_transfer: u64) -> u32 {
    format.blocks_within(max_transfer).clamp(1, 1 << 16) as u32
}
