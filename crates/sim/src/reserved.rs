//! The reserved bits of each command, which a strict controller checks.

use onehop_controller::fields::{self, Masks, NONE_USED};
use onehop_proto::{Sqe, Status, admin};

use crate::device::ControllerState;
use crate::exec::CommandFailure;
use crate::violation::Rule;

const ALL: u32 = u32::MAX;

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
        admin::opcode::ASYNC_EVENT | admin::opcode::DOORBELL_BUFFER | admin::opcode::KEEP_ALIVE => NONE_USED,
        _ => return None,
    })
}

/// Whether this admin command exists.
pub(crate) const fn is_admin(opcode: u8) -> bool {
    admin_masks(opcode).is_some()
}

impl ControllerState {
    /// Refuses what no command may contain: unknown opcodes, fused operations, reserved bits, PSDT 11b.
    pub(crate) fn check_fields(&mut self, sqid: u16, sqe: &Sqe) -> Result<(), CommandFailure> {
        let opcode = sqe.opcode();
        let masks = if sqid == 0 { admin_masks(opcode) } else { fields::masks(opcode) };
        let Some(masks) = masks else {
            self.breach(Rule::Opcode, Some(sqid), format!("opcode {opcode:#04x} is not supported"));
            return Err(Status::INVALID_OPCODE.with_dnr().into());
        };
        if sqe.psdt() == 3 {
            self.breach(Rule::Psdt, Some(sqid), "PSDT = 11b");
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        let Some(dword) = fields::reserved(sqe, &masks) else { return Ok(()) };
        let wrong = if dword == 0 && !sqe.has_reserved() {
            "FUSE is not 0, and no fused operation is supported".into()
        } else {
            format!("dword {dword} = {:#x} of opcode {opcode:#04x}", sqe.dw[dword as usize])
        };
        self.breach(Rule::ReservedField, Some(sqid), format!("reserved bits are set: {wrong}"));
        Err(Status::INVALID_FIELD.with_dnr().into())
    }
}
