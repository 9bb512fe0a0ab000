//! Admin commands.

mod features;
mod identify;
mod log;
mod queues;

use onehop_proto::admin::{Abort, DoorbellBuffers, opcode};
use onehop_proto::{Sqe, Status};

use crate::device::ControllerState;
use crate::doorbell::Shadow;
use crate::exec::{CommandFailure, CommandResult, DelayedTask, FetchedCommand};
use crate::violation::Rule;

pub(crate) use identify::LAST_POWER_STATE;
pub use identify::{PCI_DEVICE, PCI_SUBSYSTEM_VENDOR, PCI_VENDOR};

impl ControllerState {
    /// Executes an admin command; `None` if it completes later.
    pub(crate) fn admin(&mut self, command: &FetchedCommand) -> Option<CommandResult> {
        let sqe = &command.sqe;
        if let Err(failure) = self.check_fields(0, sqe) {
            return Some(Err(failure));
        }
        Some(match sqe.opcode() {
            opcode::DELETE_SQ => self.delete_sq(sqe),
            opcode::CREATE_SQ => self.create_sq(sqe),
            opcode::GET_LOG_PAGE => self.get_log_page(sqe),
            opcode::DELETE_CQ => self.delete_cq(sqe),
            opcode::CREATE_CQ => self.create_cq(sqe),
            opcode::IDENTIFY => self.identify(sqe),
            opcode::ABORT => self.abort(command),
            opcode::SET_FEATURES => self.set_features(sqe),
            opcode::GET_FEATURES => self.get_features(sqe),
            opcode::KEEP_ALIVE => {
                self.restart_keep_alive();
                Ok(0)
            }
            opcode::ASYNC_EVENT => return self.async_event(command),
            opcode::DOORBELL_BUFFER => self.doorbell_buffer(sqe),
            _ => Err(Status::INVALID_OPCODE.with_dnr().into()),
        })
    }

    /// Abort: cancels a command that is still waiting, and completes it as aborted.
    fn abort(&mut self, command: &FetchedCommand) -> CommandResult {
        let Abort { sqid, cid } = Abort::from(&command.sqe);
        let outstanding = self.aborts_outstanding();
        if outstanding > usize::from(self.config.acl) + 1 {
            self.breach(Rule::AbortLimit, Some(0), format!("{outstanding} Aborts are outstanding"));
            return Err(Status::ABORT_LIMIT_EXCEEDED.with_dnr().into());
        }
        let ignored = command.effects.as_deref().is_some_and(|e| e.abort_ignored);
        let itself = sqid == 0 && cid == command.sqe.cid();
        if ignored || itself {
            return Ok(1);
        }
        let Some(aborted) = self.cancel(sqid, cid) else { return Ok(1) };
        let aborted = FetchedCommand { effects: None, ..aborted };
        self.complete(&aborted, Err(Status::ABORT_REQUESTED.into()));
        Ok(0)
    }

    /// Aborts fetched and not completed, including the current one.
    fn aborts_outstanding(&self) -> usize {
        let is_abort = |c: &FetchedCommand| c.sqid == 0 && c.sqe.opcode() == opcode::ABORT;
        let later =
            self.timers.values().filter(|t| matches!(t, DelayedTask::Execute(c) if is_abort(c))).count();
        let ready = self.ready.iter().filter(|c| is_abort(c)).count();
        1 + later + ready + self.lost.iter().filter(|c| is_abort(c)).count()
    }

    /// Cancels a command that has not been executed.
    fn cancel(&mut self, sqid: u16, cid: u16) -> Option<FetchedCommand> {
        let fits = |c: &FetchedCommand| c.sqid == sqid && c.sqe.cid() == cid;
        if sqid == 0
            && let Some(request) = self.events.take_request(cid)
        {
            return Some(request);
        }
        if let Some(i) = self.lost.iter().position(fits) {
            return Some(self.lost.swap_remove(i));
        }
        if let Some(i) = self.ready.iter().position(fits) {
            return self.ready.remove(i);
        }
        let key = *self.timers.iter().find(|(_, t)| matches!(t, DelayedTask::Execute(c) if fits(c)))?.0;
        match self.timers.remove(&key) {
            Some(DelayedTask::Execute(command)) => Some(command),
            _ => None,
        }
    }

    /// Doorbell Buffer Config: from now on tails and heads are read from memory.
    fn doorbell_buffer(&mut self, sqe: &Sqe) -> CommandResult {
        if !self.config.dbbuf {
            return Err(Status::INVALID_OPCODE.with_dnr().into());
        }
        let buffers = DoorbellBuffers::from(sqe);
        let page = 1u64 << self.regs.cc.page_shift();
        for addr in [buffers.shadow.0, buffers.event_idx.0] {
            if !addr.is_multiple_of(page) {
                self.breach(Rule::Prp1, Some(0), format!("doorbell buffer at {addr:#x}"));
                return Err(Status::INVALID_FIELD.with_dnr().into());
            }
            if let Err(at) = self.space.find(addr, page as usize) {
                return Err(self.transfer_failed(0, "doorbell buffer", at));
            }
        }
        self.shadow = Some(Shadow { doorbells: buffers.shadow.0, events: buffers.event_idx.0 });
        Ok(0)
    }

    /// Refuses a namespace that does not exist.
    fn check_nsid(&self, nsid: u32) -> Result<(), CommandFailure> {
        let exists = nsid != 0 && nsid as usize <= self.namespaces.len();
        if exists { Ok(()) } else { Err(Status::INVALID_NAMESPACE.with_dnr().into()) }
    }
}
