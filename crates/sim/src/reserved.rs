//! Which bits of which command are reserved: what a strict controller looks at, and what it answers.

use onehop_proto::{Sqe, Status, admin, nvm};

use crate::device::Device;
use crate::exec::Failure;
use crate::violation::Rule;

/// Reserved bits of dwords 10 to 15.
type Masks = [u32; 6];

const ALL: u32 = u32::MAX;
/// Commands that use none of the dwords.
const NONE_USED: Masks = [ALL; 6];

const fn io_masks(opcode: u8) -> Option<Masks> {
    Some(match opcode {
        nvm::opcode::FLUSH => NONE_USED,
        nvm::opcode::READ => [0, 0, 0x02ff_0000, 0xffff_ff00, 0, 0],
        nvm::opcode::WRITE => [0, 0, 0x020f_0000, 0x0000_ff00, 0, 0],
        nvm::opcode::COMPARE | nvm::opcode::VERIFY => [0, 0, 0x02ff_0000, ALL, 0, 0],
        nvm::opcode::WRITE_ZEROES => [0, 0, 0x00ff_0000, ALL, 0, 0],
        nvm::opcode::WRITE_UNCORRECTABLE => [0, 0, 0xff0f_0000, 0x0000_ffff, ALL, ALL],
        nvm::opcode::DATASET_MANAGEMENT => [0xffff_ff00, 0xffff_fff8, ALL, ALL, ALL, ALL],
        _ => return None,
    })
}

const fn admin_masks(opcode: u8) -> Option<Masks> {
    Some(match opcode {
        admin::opcode::IDENTIFY => [0x0000_ff00, 0x00ff_0000, ALL, ALL, 0xffff_ff80, ALL],
        admin::opcode::CREATE_CQ => [0, 0x0000_fffc, ALL, ALL, ALL, ALL],
        admin::opcode::CREATE_SQ => [0, 0x0000_fff8, 0xffff_0000, ALL, ALL, ALL],
        admin::opcode::DELETE_SQ | admin::opcode::DELETE_CQ => [0xffff_0000, ALL, ALL, ALL, ALL, ALL],
        admin::opcode::GET_LOG_PAGE => [0, 0, 0, 0, 0x007f_ff80, ALL],
        admin::opcode::GET_FEATURES => [0xffff_f800, 0, 0, 0, 0xffff_ff80, 0],
        admin::opcode::SET_FEATURES => [0x7fff_ff00, 0, 0, 0, 0, 0],
        admin::opcode::ABORT => [0, ALL, ALL, ALL, ALL, ALL],
        admin::opcode::ASYNC_EVENT | admin::opcode::DOORBELL_BUFFER => NONE_USED,
        _ => return None,
    })
}

impl Device {
    /// Refuses what no command may have: unknown opcodes, fused operations, reserved bits, PSDT 11b.
    pub(crate) fn check_fields(&mut self, sqid: u16, sqe: &Sqe) -> Result<(), Failure> {
        let opcode = sqe.opcode();
        let masks = if sqid == 0 { admin_masks(opcode) } else { io_masks(opcode) };
        let Some(masks) = masks else {
            self.breach(Rule::Opcode, Some(sqid), format!("opcode {opcode:#04x} is not supported"));
            return Err(Status::INVALID_OPCODE.with_dnr().into());
        };
        if sqe.psdt() == 3 {
            self.breach(Rule::Psdt, Some(sqid), "PSDT = 11b");
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        let dwords = sqe.dw[10..].iter().zip(masks).position(|(dword, mask)| dword & mask != 0);
        let wrong = match dwords {
            _ if sqe.has_reserved() => format!("dword 0 = {:#x}", sqe.dw[0]),
            _ if sqe.fuse() != 0 => "FUSE is not 0, and no fused operation is supported".into(),
            _ if sqe.dw[2] | sqe.dw[3] != 0 => format!("dwords 2 and 3 = {:#x} {:#x}", sqe.dw[2], sqe.dw[3]),
            Some(i) => format!("dword {} = {:#x} of opcode {opcode:#04x}", i + 10, sqe.dw[i + 10]),
            None => return Ok(()),
        };
        self.breach(Rule::ReservedField, Some(sqid), format!("reserved bits are set: {wrong}"));
        Err(Status::INVALID_FIELD.with_dnr().into())
    }
}
