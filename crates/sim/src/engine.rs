//! The seam for executing I/O commands outside the core: the null controller's fast path, or a controller in a GPU's
//! memory. Registers, admin commands, identify data, features and resets stay with the core.

use std::io;
use std::sync::Arc;

use onehop_os::HostMem;
use onehop_proto::identify::Oncs;
use onehop_proto::{BusAddr, Status};

use crate::device::ControllerState;
use crate::exec::CommandFailure;
use crate::violation::Violation;

/// A queue requested by the driver, after the core's checks.
#[derive(Clone, Debug)]
pub struct NewQueue {
    /// Its number.
    pub qid: u16,
    /// Its entries.
    pub entries: u32,
    /// Its bus address.
    pub base: BusAddr,
    /// The memory behind that, if it is host memory or the controller's own buffer.
    pub memory: Option<HostMem>,
    /// Power of two of the bytes of a memory page (CC.MPS).
    pub page_shift: u32,
}

/// An event that affects the whole controller.
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

/// Executes the commands of all I/O queues.
///
/// The controller's lock is held in all calls except [`IoEngine::ring`] and [`IoEngine::commands`].
pub trait IoEngine: Send + Sync {
    /// Creates a completion queue; it has no submission queue yet.
    ///
    /// # Errors
    /// The status to refuse it with.
    fn create_cq(&self, cq: &NewQueue) -> Result<(), Status>;
    /// Creates a submission queue for an existing completion queue.
    ///
    /// # Errors
    /// The status to refuse it with.
    fn create_sq(&self, sq: &NewQueue, cqid: u16) -> Result<(), Status>;
    /// Deletes a submission queue: its commands are abandoned before this returns.
    fn delete_sq(&self, qid: u16);
    /// Deletes a completion queue without submission queues.
    fn delete_cq(&self, qid: u16);
    /// Removes all queues: no command is in progress when this returns.
    fn clear(&self);
    /// Rings a doorbell; false if it belongs to no queue of the engine.
    fn ring(&self, qid: u16, is_cq: bool, value: u32) -> bool;
    /// Commands completed so far.
    fn commands(&self) -> u64;
    /// The blocks of the only namespace, if the engine stores them.
    fn blocks(&self) -> Option<Arc<dyn Blocks>> {
        None
    }
    /// The optional I/O commands that it supports.
    fn optional_commands(&self, all: Oncs) -> Oncs {
        all
    }
    /// The controller-wide event caused by a fault of an I/O command since the last call.
    fn strike(&self) -> Option<Strike> {
        None
    }
    /// Violations since the last call.
    fn breaches(&self) -> Vec<Violation> {
        Vec::new()
    }
}

impl ControllerState {
    /// Passes a new completion queue to the engine, if there is one.
    pub(crate) fn create_engine_cq(
        &self,
        qid: u16,
        base: u64,
        entries: u32,
        bytes: usize,
    ) -> Result<(), CommandFailure> {
        let Some(engine) = &self.engine else { return Ok(()) };
        Ok(engine.create_cq(&self.new_queue(qid, base, entries, bytes))?)
    }

    /// Passes a new submission queue to the engine, if there is one.
    pub(crate) fn create_engine_sq(
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

    /// Applies the engine's controller-wide event.
    pub(crate) fn apply_engine_strike(&mut self) {
        if let Some(strike) = self.engine.as_ref().and_then(|engine| engine.strike()) {
            self.strike(strike);
        }
    }

    /// Records the engine's violations.
    pub(crate) fn record_engine_breaches(&self) {
        for breach in self.engine.iter().flat_map(|engine| engine.breaches()) {
            self.breach(breach.rule, breach.queue, breach.detail);
        }
    }
}
