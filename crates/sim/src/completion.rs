//! Posts completions, and remembers failed commands.

use onehop_proto::{Sqe, Status};

use crate::device::ControllerState;
use crate::exec::{CommandFailure, DelayedTask, FetchedCommand};
use crate::health::ErrorEntry;
use crate::queues::QueuedCompletion;
use crate::violation::Rule;

/// Identifies a retry of a failed command: opcode, namespace, first block, dword 12.
pub(crate) type RetryKey = (u8, u32, u64, u32);

fn retry_key(sqe: &Sqe) -> RetryKey {
    (sqe.opcode(), sqe.nsid(), sqe.qword(10), sqe.dw[12])
}

impl ControllerState {
    /// Posts a completion, or queues it until there is room.
    pub(crate) fn post(&mut self, entry: QueuedCompletion) {
        let Some(cqid) = self.sqs.get(usize::from(entry.sqid)).and_then(Option::as_ref).map(|sq| sq.cq)
        else {
            return;
        };
        let Some(cq) = self.cqs.get_mut(usize::from(cqid)).and_then(Option::as_mut) else { return };
        let stalls = cq.waiting.is_empty() && !cq.has_room();
        cq.waiting.push_back(entry);
        if stalls {
            self.refresh_head(cqid);
            self.note_stall(cqid);
        }
        self.drain_waiting(cqid);
    }

    /// The queue is full: the host has more commands outstanding than it left room for.
    fn note_stall(&mut self, cqid: u16) {
        let Some(cq) = self.cqs.get(usize::from(cqid)).and_then(Option::as_ref) else { return };
        if cq.has_room() {
            return;
        }
        self.counts.rest.cq_stalls += 1;
        let detail = format!("a completion found all {} entries taken (head {})", cq.size - 1, cq.head);
        self.breach(Rule::CqOverrun, Some(cqid), detail);
    }

    /// Posts waiting completions, as far as there is room.
    pub(crate) fn drain_waiting(&mut self, cqid: u16) {
        loop {
            let Some(cq) = self.cqs.get_mut(usize::from(cqid)).and_then(Option::as_mut) else { return };
            if !cq.has_room() || self.gone || self.regs.csts.cfs() {
                return;
            }
            let Some(entry) = cq.waiting.pop_front() else { return };
            let sq = self.sqs.get_mut(usize::from(entry.sqid)).and_then(Option::as_mut);
            let sqhd = sq.map_or(0, |sq| sq.report_head(entry.lag));
            let (vector, generation) = (cq.vector, cq.generation);
            match cq.post(&self.space, &entry, sqhd) {
                Ok((slot, last)) => {
                    self.counts.rest.completions += 1;
                    self.counts.rest.errors += u64::from(!entry.status.is_ok());
                    if let Some(wait) = entry.stale {
                        self.after(wait, DelayedTask::CorrectCompletion { cq: cqid, generation, slot, last });
                    }
                    self.interrupt(vector);
                }
                Err(at) => {
                    self.breach_dma(cqid, "completion queue", at);
                    return self.fatal();
                }
            }
        }
    }

    fn interrupt(&mut self, vector: Option<u16>) {
        let Some(vector) = vector else { return };
        let masked = vector < 32 && self.regs.intms >> vector & 1 != 0;
        if !masked {
            self.counts.rest.interrupts += 1;
            if !self.raised.contains(&vector) {
                self.raised.push(vector);
            }
        }
    }

    /// Records a failure in the error log; returns the status to answer.
    pub(crate) fn note_failure(&mut self, command: &FetchedCommand, failure: CommandFailure) -> Status {
        let (sqid, sqe) = (command.sqid, &command.sqe);
        if failure.status.sct() == onehop_proto::status::sct::MEDIA {
            self.health.media_errors += 1;
        }
        self.health.note_error(ErrorEntry {
            sqid,
            cid: sqe.cid(),
            status: failure.status,
            lba: failure.lba.unwrap_or(0),
            nsid: sqe.nsid(),
        });
        if failure.status.crd() != 0 {
            let units = u64::from(self.config.crdt[usize::from(failure.status.crd()) - 1]);
            let wait = units.saturating_mul(self.config.crdt_unit.as_nanos() as u64);
            let earliest = self.clock.now().saturating_add(wait);
            self.retries.insert(retry_key(sqe), earliest);
        }
        failure.status.with_more()
    }

    /// CRD is only used for hosts that have enabled it.
    pub(crate) fn crd_allowed(&self, command: &FetchedCommand, status: Status) -> Status {
        if command.sqid != 0 && self.features.acre() { status } else { status.with_crd(0) }
    }

    /// Checks that a retry has waited as long as requested.
    pub(crate) fn check_retry(&mut self, sqid: u16, sqe: &Sqe, now: u64) {
        if self.retries.is_empty() || sqid == 0 {
            return;
        }
        if let Some(earliest) = self.retries.remove(&retry_key(sqe))
            && now < earliest
        {
            let detail = format!("retried {} us too early", (earliest - now) / 1000);
            self.breach(Rule::RetryTooSoon, Some(sqid), detail);
        }
    }
}
