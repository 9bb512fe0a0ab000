//! From what a caller wants to the entry that the controller reads.

use onehop_os::BusRange;
use onehop_proto::format::{Format, check_range};
use onehop_proto::sgl::Descriptor;
use onehop_proto::{BusAddr, Sqe, nvm, prp};

use crate::ring::Dma;
use crate::{Buffer, Error, Namespace, Result};

/// What to do with blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Drive to memory.
    Read,
    /// Memory to drive.
    Write,
    /// Fails unless memory and drive hold the same.
    Compare,
    /// Zeroes blocks; moves no data.
    WriteZeroes,
    /// Makes everything written so far durable; takes no blocks.
    Flush,
}

impl Op {
    /// The opcode.
    #[must_use]
    pub const fn opcode(self) -> u8 {
        match self {
            Self::Read => nvm::opcode::READ,
            Self::Write => nvm::opcode::WRITE,
            Self::Compare => nvm::opcode::COMPARE,
            Self::WriteZeroes => nvm::opcode::WRITE_ZEROES,
            Self::Flush => nvm::opcode::FLUSH,
        }
    }

    /// What an opcode of [`Self::opcode`] stands for.
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

    /// What people call it.
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
    /// Where separate metadata lies. Without it, what is read is thrown away, zeroes are written, and a Compare fails
    /// where the drive holds anything else. Protection information in it is made by the controller.
    pub metadata: Option<(&'a Buffer, u64)>,
    /// Past the volatile write cache.
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

    /// Fills in the command without its data pointer, checked against the namespace. In place, because copies of 64 bytes
    /// would be a part of what a command costs.
    #[inline(always)]
    pub(crate) fn fill(&self, sqe: &mut Sqe, ns: &Namespace) -> Result<()> {
        if self.op == Op::Flush {
            *sqe = nvm::flush(ns.nsid);
            return Ok(());
        }
        let range = |source| Error::Range { nsid: ns.nsid, source };
        check_range(ns.blocks, self.lba, self.blocks.into()).map_err(range)?;
        let fua = if self.fua && self.op.writes() { nvm::flag::FUA } else { 0 };
        let flags = fua | protection(self.op, ns.format.pi);
        let command = nvm::command(self.op.opcode(), ns.nsid, self.lba, self.blocks, flags);
        let too_long =
            || Error::TooLong { bytes: u64::MAX, limit: ns.format.data_bytes(1 << 16).unwrap_or(u64::MAX) };
        let Some(command) = command else { return Err(too_long()) };
        *sqe = command;
        if ns.format.pi != 0 {
            // Reference tags count blocks from 0, as type 1 demands it; 32 bits of them.
            *sqe = nvm::with_tags(*sqe, self.lba as u32, 0, 0);
        }
        Ok(())
    }
}

/// What is asked of the controller about protection information of a type: to make it when blocks are written, to
/// check it when they are read. Tags of types 2 and 3 are their writer's own, and are not checked.
#[inline(always)]
pub(crate) const fn protection(op: Op, kind: u8) -> u32 {
    // Tested first: most namespaces have none.
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
        // A page of the list in several pieces has no address, and is refused.
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

/// Pages of PRP list that a transfer of `bytes` may need, whatever its offset.
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
    /// Controllers that get commands by messages take nothing else.
    Always,
}

impl Pointers {
    /// Points the command to `bytes` bytes of `buffer`.
    #[inline(always)]
    pub(crate) fn point(
        &self,
        sqe: &mut Sqe,
        data: (&Buffer, u64),
        bytes: u64,
        list: &ListSlot<'_>,
    ) -> Result<()> {
        let (buffer, offset) = data;
        buffer.check(offset, bytes)?;
        if bytes > self.max_transfer {
            return Err(Error::TooLong { bytes, limit: self.max_transfer });
        }
        let beyond = || Error::Buffer { have: buffer.bytes(), offset, need: bytes };
        let run = buffer.at(offset).ok_or_else(beyond)?;
        if self.sgl == UseSgl::Always {
            if run.len < bytes {
                return Err(Error::Memory("data of one command is in several pieces of memory".into()));
            }
            *sqe = Descriptor::Data { at: run.addr, len: bytes as u32 }.put_in(*sqe);
            return Ok(());
        }
        let page = 1u64 << self.page_shift;
        let in_first = page - (run.addr.0 & (page - 1));
        if bytes <= in_first && run.len >= bytes && run.addr.0 & 3 == 0 {
            *sqe = sqe.with_prps(run.addr.0, 0);
            return Ok(());
        }
        self.point_to_pages(sqe, (buffer, offset, run), bytes, list)
    }

    /// The same, where it takes more than one entry.
    #[inline(never)]
    fn point_to_pages(
        &self,
        sqe: &mut Sqe,
        (buffer, offset, run): (&Buffer, u64, BusRange),
        bytes: u64,
        list: &ListSlot<'_>,
    ) -> Result<()> {
        let page = 1u64 << self.page_shift;
        let in_first = page - (run.addr.0 & (page - 1));
        if self.sgl == UseSgl::LongRuns && run.len >= bytes && bytes > in_first + page && run.addr.0 & 3 == 0
        {
            *sqe = Descriptor::Data { at: run.addr, len: bytes as u32 }.put_in(*sqe);
            return Ok(());
        }
        let page_addr = |i: u64| {
            let (at, need) = match i {
                0 => (offset, in_first.min(bytes)),
                _ => {
                    let passed = in_first + (i - 1) * page;
                    (offset + passed, page.min(bytes.saturating_sub(passed)))
                }
            };
            // A page whose bytes are not in one piece has no address; one that is not aligned is refused.
            buffer.at(at).filter(|run| run.len >= need).map_or(BusAddr(u64::MAX), |run| run.addr)
        };
        let put = |page, index, entry| list.put(page, index, entry);
        let (prp1, prp2) = prp::build(self.page_shift, page_addr, bytes, 0, |page| list.bus(page), put)?;
        *sqe = sqe.with_prps(prp1, prp2);
        Ok(())
    }
}

/// Most blocks of one command: what the controller moves at once, and what the field holds.
pub(crate) fn max_blocks(format: &Format, max_transfer: u64) -> u32 {
    format.blocks_within(max_transfer).clamp(1, 1 << 16) as u32
}
