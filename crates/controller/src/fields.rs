//! What no I/O command may contain: reserved bits, fused operations, unknown opcodes. And which commands this
//! controller executes.

use onehop_proto::format::check_range;
use onehop_proto::nvm::{Rw, opcode};
use onehop_proto::{Sqe, Status, admin};

use crate::Rule;

/// Reserved bits of dwords 10 to 15.
pub type Masks = [u32; 6];

const ALL: u32 = u32::MAX;
/// Commands that use none of the dwords.
pub const NONE_USED: Masks = [ALL; 6];

/// The reserved bits of an NVM command; none if the opcode is not supported.
#[must_use]
pub const fn masks(op: u8) -> Option<Masks> {
    Some(match op {
        opcode::FLUSH => NONE_USED,
        opcode::READ => [0, 0, 0x02ff_0000, 0xffff_ff00, 0, 0],
        opcode::WRITE => [0, 0, 0x020f_0000, 0x0000_ff00, 0, 0],
        opcode::COMPARE | opcode::VERIFY => [0, 0, 0x02ff_0000, ALL, 0, 0],
        opcode::WRITE_ZEROES => [0, 0, 0x00ff_0000, ALL, 0, 0],
        opcode::WRITE_UNCORRECTABLE => [0, 0, 0xff0f_0000, 0x0000_ffff, ALL, ALL],
        opcode::DATASET_MANAGEMENT => [0xffff_ff00, 0xffff_fff8, ALL, ALL, ALL, ALL],
        _ => return None,
    })
}

/// The first dword in which a reserved or fused bit is set.
#[inline]
#[must_use]
pub fn reserved(sqe: &Sqe, masks: &Masks) -> Option<u32> {
    if sqe.has_reserved() || sqe.fuse() != 0 {
        return Some(0);
    }
    let [_, _, two, three, .., a, b, c, d, e, f] = sqe.dw;
    let [ma, mb, mc, md, me, mf] = *masks;
    let checks = [
        (2, two),
        (3, three),
        (10, a & ma),
        (11, b & mb),
        (12, c & mc),
        (13, d & md),
        (14, e & me),
        (15, f & mf),
    ];
    checks.into_iter().find(|(_, wrong)| *wrong != 0).map(|(dword, _)| dword)
}

/// The status of a refused command, and the rule that it breaks, if any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandRefusal {
    /// The status to answer.
    pub status: Status,
    /// The rule, and what is wrong.
    pub breach: Option<(Rule, u64)>,
}

impl CommandRefusal {
    /// A command that breaks a rule.
    #[inline(always)]
    #[must_use]
    pub const fn breach(rule: Rule, detail: u64, status: Status) -> Self {
        Self { status: status.with_dnr(), breach: Some((rule, detail)) }
    }

    #[inline(always)]
    const fn mistake(status: Status) -> Self {
        Self { status: status.with_dnr(), breach: None }
    }
}

/// Limits of a controller.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Its only namespace.
    pub nsid: u32,
    /// The namespace's blocks.
    pub blocks: u64,
    /// Power of two of a block's bytes.
    pub lba_shift: u32,
    /// Bytes of the longest transfer.
    pub max_bytes: u32,
}

/// What a command does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommandKind {
    /// Nothing that moves data.
    Nothing,
    /// Reads, writes, compares or zeroes blocks, as the opcode says.
    Blocks {
        /// The opcode.
        opcode: u8,
        /// The first block.
        lba: u64,
        /// How many, 1 to 65 536.
        blocks: u32,
    },
}

/// Checks a command.
///
/// # Errors
/// The status it is refused with.
#[inline]
pub fn check(sqe: &Sqe, limits: &Limits) -> Result<CommandKind, CommandRefusal> {
    let op = sqe.opcode();
    let dword0 = u64::from(sqe.dw[0]);
    let served =
        matches!(op, opcode::FLUSH | opcode::READ | opcode::WRITE | opcode::COMPARE | opcode::WRITE_ZEROES);
    let Some(masks) = masks(op).filter(|_| served) else {
        return Err(CommandRefusal::breach(Rule::Opcode, dword0, Status::INVALID_OPCODE));
    };
    if let Some(dword) = reserved(sqe, &masks) {
        let value = sqe.dw.get(dword as usize).copied().unwrap_or(0);
        let detail = u64::from(dword) | u64::from(value) << 32;
        return Err(CommandRefusal::breach(Rule::ReservedField, detail, Status::INVALID_FIELD));
    }
    if sqe.psdt() != 0 {
        return Err(CommandRefusal::breach(Rule::Psdt, dword0, Status::INVALID_FIELD));
    }
    if op == opcode::FLUSH && sqe.nsid() == admin::ALL_NAMESPACES {
        return Ok(CommandKind::Nothing);
    }
    if sqe.nsid() != limits.nsid {
        return Err(CommandRefusal::mistake(Status::INVALID_NAMESPACE));
    }
    if op == opcode::FLUSH {
        return Ok(CommandKind::Nothing);
    }
    let rw = Rw::decode(sqe);
    if check_range(limits.blocks, rw.lba, u64::from(rw.blocks)).is_err() {
        return Err(CommandRefusal::mistake(Status::LBA_OUT_OF_RANGE));
    }
    let bytes = u64::from(rw.blocks) << limits.lba_shift;
    if op != opcode::WRITE_ZEROES && bytes > u64::from(limits.max_bytes) {
        return Err(CommandRefusal::breach(Rule::Mdts, bytes, Status::INVALID_FIELD));
    }
    Ok(CommandKind::Blocks { opcode: op, lba: rw.lba, blocks: rw.blocks })
}

#[cfg(test)]
mod tests {
    use super::*;
    use onehop_proto::nvm;

    const LIMITS: Limits = Limits { nsid: 1, blocks: 1000, lba_shift: 9, max_bytes: 65536 };

    fn refused(sqe: Sqe) -> (Status, Option<Rule>) {
        let refusal = check(&sqe, &LIMITS).unwrap_err();
        (refusal.status, refusal.breach.map(|(rule, _)| rule))
    }

    #[test]
    fn valid_commands_are_accepted() {
        let read = nvm::read(1, 992, 8).unwrap();
        assert_eq!(check(&read, &LIMITS), Ok(CommandKind::Blocks { opcode: 2, lba: 992, blocks: 8 }));
        assert_eq!(check(&nvm::flush(1), &LIMITS), Ok(CommandKind::Nothing));
        assert_eq!(check(&nvm::flush(u32::MAX), &LIMITS), Ok(CommandKind::Nothing));
        assert!(check(&nvm::write_zeroes(1, 0, 1000).unwrap(), &LIMITS).is_ok(), "MDTS is for transfers");
    }

    #[test]
    fn what_is_refused_says_why() {
        let read = nvm::read(1, 0, 1).unwrap();
        let field = Status::INVALID_FIELD.with_dnr();
        assert_eq!(refused(read.with_qword(10, 1000)), (Status::LBA_OUT_OF_RANGE.with_dnr(), None));
        assert_eq!(refused(read.with_qword(10, u64::MAX)), (Status::LBA_OUT_OF_RANGE.with_dnr(), None));
        assert_eq!(refused(nvm::read(2, 0, 1).unwrap()), (Status::INVALID_NAMESPACE.with_dnr(), None));
        assert_eq!(refused(nvm::read(1, 0, 129).unwrap()), (field, Some(Rule::Mdts)));
        assert_eq!(refused(read.with_dw(2, 1)), (field, Some(Rule::ReservedField)));
        assert_eq!(refused(read.with_dw(13, 1 << 31)), (field, Some(Rule::ReservedField)));
        assert_eq!(refused(read.with_dw(0, 0x102)), (field, Some(Rule::ReservedField)));
        assert_eq!(refused(read.with_dw(0, 0x4002)), (field, Some(Rule::Psdt)));
        let opcode = Status::INVALID_OPCODE.with_dnr();
        for op in [0x04, 0x09, 0x0c, 0x7f, 0xff] {
            assert_eq!(refused(Sqe::new(op, 1)), (opcode, Some(Rule::Opcode)));
        }
    }
}
