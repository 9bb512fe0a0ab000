//! Creating and deleting I/O queues.

use onehop_proto::admin::{CreateCq, CreateSq, deleted_queue};
use onehop_proto::regs::Cmbsz;
use onehop_proto::{Cqe, Sqe, Status};

use crate::device::ControllerState;
use crate::exec::{CommandFailure, CommandResult, DelayedTask, FetchedCommand};
use crate::queues::{Cq, PagedRing, Sq};
use crate::violation::Rule;

impl ControllerState {
    pub(super) fn create_cq(&mut self, sqe: &Sqe) -> CommandResult {
        let ask = CreateCq::from(sqe);
        self.check_new_queue(
            ask.qid,
            ask.size_z,
            self.cqs.get(usize::from(ask.qid)).is_some_and(Option::is_some),
        )?;
        self.check_entry_size("IOCQES", self.regs.cc.iocqes(), Cqe::BYTES)?;
        if ask.interrupt.is_some_and(|vector| vector >= self.config.vectors()) {
            return Err(Status::INVALID_INTERRUPT_VECTOR.with_dnr().into());
        }
        self.check_cmb_use(ask.qid, "a completion queue", ask.base.0, Cmbsz::cqs)?;
        let entries = u32::from(ask.size_z) + 1;
        let ring = self.queue_memory(sqe, ask.base.0, ask.contiguous, entries as usize * Cqe::BYTES)?;
        self.generation += 1;
        self.deleted_cqs.remove(&ask.qid);
        self.restart_doorbell(ask.qid, true);
        self.cqs[usize::from(ask.qid)] = Some(Cq::new(entries, ask.interrupt, ring, self.generation));
        self.create_engine_cq(ask.qid, ask.base.0, entries, entries as usize * Cqe::BYTES)?;
        Ok(0)
    }

    pub(super) fn create_sq(&mut self, sqe: &Sqe) -> CommandResult {
        let ask = CreateSq::from(sqe);
        self.check_new_queue(
            ask.qid,
            ask.size_z,
            self.sqs.get(usize::from(ask.qid)).is_some_and(Option::is_some),
        )?;
        self.check_entry_size("IOSQES", self.regs.cc.iosqes(), Sqe::BYTES)?;
        if ask.cqid == 0 || usize::from(ask.cqid) >= self.cqs.len() {
            return Err(Status::INVALID_QUEUE_ID.with_dnr().into());
        }
        if self.cqs[usize::from(ask.cqid)].is_none() {
            return Err(Status::CQ_INVALID.with_dnr().into());
        }
        if ask.nvmsetid != 0 {
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        self.check_cmb_use(ask.qid, "a submission queue", ask.base.0, Cmbsz::sqs)?;
        let entries = u32::from(ask.size_z) + 1;
        let ring = self.queue_memory(sqe, ask.base.0, ask.contiguous, entries as usize * Sqe::BYTES)?;
        self.create_engine_sq((ask.qid, ask.cqid), ask.base.0, entries, entries as usize * Sqe::BYTES)?;
        self.restart_doorbell(ask.qid, false);
        self.sqs[usize::from(ask.qid)] = Some(Sq::new(entries, ask.cqid, ring));
        if let Some(cq) = self.cqs[usize::from(ask.cqid)].as_mut() {
            cq.users += 1;
        }
        Ok(0)
    }

    fn check_new_queue(&self, qid: u16, size_z: u16, exists: bool) -> Result<(), CommandFailure> {
        if qid == 0 || qid > self.config.queues || exists {
            return Err(Status::INVALID_QUEUE_ID.with_dnr().into());
        }
        if size_z == 0 || size_z > self.config.mqes_z {
            return Err(Status::INVALID_QUEUE_SIZE.with_dnr().into());
        }
        Ok(())
    }

    fn check_entry_size(&self, name: &str, shift: u8, bytes: usize) -> Result<(), CommandFailure> {
        if 1usize << shift == bytes {
            return Ok(());
        }
        self.breach(Rule::EntrySize, Some(0), format!("CC.{name} = {shift} when a queue is created"));
        Err(Status::INVALID_QUEUE_SIZE.with_dnr().into())
    }

    /// The memory of a new queue; all of it must be reachable.
    fn queue_memory(
        &mut self,
        sqe: &Sqe,
        base: u64,
        contiguous: bool,
        bytes: usize,
    ) -> Result<PagedRing, CommandFailure> {
        let page = 1usize << self.regs.cc.page_shift();
        if sqe.psdt() != 0 {
            self.breach(Rule::Psdt, Some(0), "a queue is created with an SGL");
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        if !base.is_multiple_of(page as u64) {
            let detail = format!("a queue at {base:#x} does not lie on a page of {page} bytes");
            self.breach(Rule::QueueMisaligned, Some(0), detail);
            return Err(Status::INVALID_PRP_OFFSET.with_dnr().into());
        }
        if !contiguous && self.config.cqr {
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        if contiguous {
            self.reach(base, bytes)?;
            return Ok(PagedRing::contiguous(base, bytes));
        }
        self.paged_ring(base, bytes, page)
    }

    /// A queue whose base is a list of pages.
    fn paged_ring(&mut self, list: u64, bytes: usize, page: usize) -> Result<PagedRing, CommandFailure> {
        let count = bytes.div_ceil(page);
        let mut pages = Vec::with_capacity(count);
        let (mut list, mut slot, slots) = (list, 0, page / 8);
        while pages.len() < count {
            let mut entry = [0; 8];
            let read = self.space.read(list.wrapping_add(slot as u64 * 8), &mut entry);
            read.map_err(|at| self.transfer_failed(0, "PRP list of a queue", at))?;
            let entry = u64::from_le_bytes(entry);
            if !entry.is_multiple_of(page as u64) {
                self.breach(
                    Rule::PrpList,
                    Some(0),
                    format!("PRP list entry {entry:#x} of a queue has an offset"),
                );
                return Err(Status::INVALID_PRP_OFFSET.with_dnr().into());
            }
            if slot == slots - 1 && pages.len() + 1 < count {
                (list, slot) = (entry, 0);
                continue;
            }
            self.reach(entry, page.min(bytes - pages.len() * page))?;
            pages.push(entry);
            slot += 1;
        }
        Ok(PagedRing::paged(pages, page))
    }

    fn reach(&self, addr: u64, bytes: usize) -> Result<(), CommandFailure> {
        let found = self.space.reach(addr, bytes);
        found.map_err(|at| self.transfer_failed(0, "a queue's memory", at))
    }

    pub(super) fn delete_sq(&mut self, sqe: &Sqe) -> CommandResult {
        let qid = deleted_queue(sqe);
        let sq = self.sqs.get(usize::from(qid)).and_then(Option::as_ref);
        let Some(cqid) = sq.map(|sq| sq.cq).filter(|_| qid != 0) else {
            return Err(Status::INVALID_QUEUE_ID.with_dnr().into());
        };
        for command in self.cancel_all(qid) {
            let aborted = FetchedCommand { effects: None, ..command };
            self.complete(&aborted, Err(Status::ABORTED_SQ_DELETION.into()));
        }
        self.sqs[usize::from(qid)] = None;
        if let Some(cq) = self.cqs.get_mut(usize::from(cqid)).and_then(Option::as_mut) {
            cq.users -= 1;
        }
        if let Some(engine) = &self.engine {
            engine.delete_sq(qid);
        }
        Ok(0)
    }

    /// Cancels every command of a queue. Data of completed reads still arrives: only a reset stops that.
    fn cancel_all(&mut self, qid: u16) -> Vec<FetchedCommand> {
        let mut taken: Vec<FetchedCommand> = self.lost.extract_if(.., |c| c.sqid == qid).collect();
        let (mine, others) = std::mem::take(&mut self.ready).into_iter().partition(|c| c.sqid == qid);
        self.ready = others;
        taken.extend::<std::collections::VecDeque<_>>(mine);
        for (key, task) in std::mem::take(&mut self.timers) {
            match task {
                DelayedTask::Execute(command) if command.sqid == qid => taken.push(command),
                task => {
                    self.timers.insert(key, task);
                }
            }
        }
        let held: Vec<_> = self.held.extract_if(.., |h| h.entry.sqid == qid).collect();
        held.into_iter().for_each(|h| self.finish(h.entry));
        taken
    }

    pub(super) fn delete_cq(&mut self, sqe: &Sqe) -> CommandResult {
        let qid = deleted_queue(sqe);
        let users = self.cqs.get(usize::from(qid)).and_then(Option::as_ref).map(|cq| cq.users);
        match users.filter(|_| qid != 0) {
            None => Err(Status::INVALID_QUEUE_ID.with_dnr().into()),
            Some(0) => {
                self.cqs[usize::from(qid)] = None;
                self.deleted_cqs.insert(qid);
                if let Some(engine) = &self.engine {
                    engine.delete_cq(qid);
                }
                Ok(0)
            }
            Some(users) => {
                let detail = format!("{users} submission queues still complete into queue {qid}");
                self.breach(Rule::QueueOrder, Some(qid), detail);
                Err(Status::INVALID_QUEUE_DELETION.with_dnr().into())
            }
        }
    }
}
