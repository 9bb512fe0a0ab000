//! The seam for others that carry out I/O commands in the core's place: the null controller's fast path, or a controller
//! that works in a GPU's memory. Registers, admin commands, identify data, features and resets stay with the core.

use std::io;
use std::sync::Arc;

use onehop_os::HostMem;
use onehop_proto::identify::Oncs;
use onehop_proto::{BusAddr, Status};

use crate::device::ControllerState;
use crate::exec::CommandFailure;
use crate::violation::Violation;

/// A queue that the driver asked for, after the core's checks.
#[derive(Clone, Debug)]
pub struct NewQueue {
    /// Its number.
    pub qid: u16,
    /// Its entries.
    pub entries: u32,
    /// Where it lies on the bus.
    pub base: BusAddr,
    /// The memory behind that, where it is host memory or the controller's own buffer.
    pub memory: Option<HostMem>,
    /// Power of two of the bytes of a memory page (CC.MPS).
    pub page_shift: u32,
}

/// What can befall the whole controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strike {
    /// It stops with CSTS.CFS set.
    Cfs,
    /// It leaves the bus.
    Gone,
    /// The power fails and comes back.
    PowerLoss,
}

/// The blocks of a namespace that an engine keeps.
pub trait Blocks: Send + Sync {
    /// Reads bytes that lie within it.
    ///
    /// # Errors
    /// When they cannot be reached.
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Writes bytes that lie within it.
    ///
    /// # Errors
    /// When they cannot be reached.
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;
}

/// Carries out the commands of all I/O queues.
///
/// Calls come with the controller's lock held, but for [`IoEngine::ring`] and [`IoEngine::commands`].
pub trait IoEngine: Send + Sync {
    /// A completion queue; it has no submission queue yet.
    ///
    /// # Errors
    /// The status to refuse it with.
    fn create_cq(&self, cq: &NewQueue) -> Result<(), Status>;
    /// A submission queue that completes into an existing completion queue.
    ///
    /// # Errors
    /// The status to refuse it with.
    fn create_sq(&self, sq: &NewQueue, cqid: u16) -> Result<(), Status>;
    /// A submission queue is deleted: its commands are let go before this returns.
    fn delete_sq(&self, qid: u16);
    /// A completion queue without submission queues is deleted.
    fn delete_cq(&self, qid: u16);
    /// All queues are gone: no command is worked on when this returns.
    fn clear(&self);
    /// A doorbell; false if it belongs to no queue of the engine.
    fn ring(&self, qid: u16, is_cq: bool, value: u32) -> bool;
    /// Commands completed so far.
    fn commands(&self) -> u64;
    /// Where it keeps the blocks of the only namespace, if it does.
    fn blocks(&self) -> Option<Arc<dyn Blocks>> {
        None
    }
    /// Which of the optional I/O commands it carries out.
    fn optional_commands(&self, all: Oncs) -> Oncs {
        all
    }
    /// What has befallen the controller since the last call, by a fault of an I/O command.
    fn strike(&self) -> Option<Strike> {
        None
    }
    /// Breaches of rules that were found since the last call.
    fn breaches(&self) -> Vec<Violation> {
        Vec::new()
    }
}

impl ControllerState {
    /// Hands a new completion queue to the engine, if there is one.
    pub(crate) fn lend_cq(
        &self,
        qid: u16,
        base: u64,
        entries: u32,
        bytes: usize,
    ) -> Result<(), CommandFailure> {
        let Some(engine) = &self.engine else { return Ok(()) };
        Ok(engine.create_cq(&self.new_queue(qid, base, entries, bytes))?)
    }

    /// Hands a new submission queue to the engine, if there is one.
    pub(crate) fn lend_sq(
        &self,
        (qid, cqid): (u16, u16),
        base: u64,
        entries: u32,
        bytes: usize,
    ) -> Result<(), CommandFailure> {
        let Some(engine) = &self.engine else { return Ok(()) };
        Ok(engine.create_sq(&self.new_queue(qid, base, entries, bytes), cqid)?)
    }

    fn new_queue(&self, qid: u16, base: u64, entries: u32, bytes: usize) -> NewQueue {
        let memory = self.space.find(base, bytes).ok();
        let memory = memory.and_then(|(segment, at)| segment.host().ok()?.slice(at..at + bytes).ok());
        NewQueue { qid, entries, base: BusAddr(base), memory, page_shift: self.regs.cc.page_shift() }
    }

    /// Suffers what the engine says has befallen the controller.
    pub(crate) fn hear_strike(&mut self) {
        if let Some(strike) = self.engine.as_ref().and_then(|engine| engine.strike()) {
            self.strike(strike);
        }
    }

    /// Writes down the breaches that the engine has found.
    pub(crate) fn hear_breaches(&self) {
        for breach in self.engine.iter().flat_map(|engine| engine.breaches()) {
            self.breach(breach.rule, breach.queue, breach.detail);
        }
    }
}
