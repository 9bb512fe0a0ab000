//! Commands one by one: fetched, checked, their data located, passed to the lanes.

use onehop_proto::nvm::opcode;
use onehop_proto::prp::{self, WalkError};
use onehop_proto::{Sqe, Status};

use super::faults::Effect;
use super::parked::{self, Extra};
use super::{CIDS, DONE, ENTRIES, SPANS, Server, task, word};
use crate::Rule;
use crate::fields::{self, CommandKind, CommandRefusal, Limits};
use crate::layout::{FaultKind, LOCAL_SPANS, SPAN_BYTES, flag};
use crate::report::NO_COMMAND;
use crate::space;
use crate::warp::{ControllerWarp, wrap};

impl<W: ControllerWarp> Server<'_, W> {
    /// Continues until the lanes have something to move, or until the turn is over and everything done is posted.
    pub(super) fn think(&self) {
        if self.get(word::MOVING) != 0 {
            self.set(word::MOVING, 0);
            self.moved();
        }
        let count = self.get(word::COUNT);
        if count > 0 && self.get(word::NEXT) == 0 {
            self.set(word::HEAD, wrap(self.get(word::HEAD) + count, self.pair.sq_entries));
        }
        let moving = loop {
            let next = self.get(word::NEXT);
            if self.get(word::DEAD) != 0 {
                break false;
            }
            let moving = if next < count {
                self.set(word::NEXT, next + 1);
                self.take(ENTRIES + next * 16)
            } else if self.get(word::DONE) < DONE - 2 {
                match self.due() {
                    Some((kind, effect, extra)) => self.resume(kind, effect, extra),
                    None => break false,
                }
            } else {
                break false;
            };
            if moving {
                break true;
            }
        };
        if moving {
            self.set(word::MOVING, 1);
        } else {
            self.set(word::TASK, task::NOTHING);
            self.post_all();
        }
    }

    /// Starts a command that was just fetched; true if the lanes have to move its data now.
    fn take(&self, job: u32) -> bool {
        self.set(word::JOB, job);
        let sqe = self.job();
        let ordinal = self.long(word::COMMANDS);
        self.set_long(word::COMMANDS, ordinal + 1);
        let cid = u32::from(sqe.cid());
        if cid == 0xffff {
            self.breach(Rule::CidReserved, cid, 0);
        }
        if self.is_outstanding(cid) {
            self.breach(Rule::CidInUse, cid, u64::from(sqe.dw[0]));
            self.finish(cid, Status::CID_CONFLICT.with_dnr(), Effect::FOREIGN);
            return false;
        }
        self.set_outstanding(cid, true);
        let effect = self.strike(&sqe);
        let wait = if self.pair.flags & flag::DELAY != 0 {
            // Neighbours wait for different times, so that they overtake each other.
            self.pair.delay.saturating_mul((ordinal ^ ordinal >> 2) & 3)
        } else {
            0
        };
        let wait = match effect.kind() {
            Some(FaultKind::Lost) => return false,
            Some(FaultKind::Dead) => {
                self.set(word::DEAD, 1);
                return false;
            }
            Some(FaultKind::Late) => wait.saturating_add(self.delay_of(effect)),
            _ => wait,
        };
        if wait > 0 && self.park(parked::EXECUTE, effect, wait, job, Extra::default()) {
            return false;
        }
        self.execute(&sqe, effect)
    }

    /// Continues with a record that is due; true if the lanes have to move data now.
    fn resume(&self, kind: u32, effect: Effect, extra: Extra) -> bool {
        match kind {
            parked::EXECUTE => self.execute(&self.job(), effect),
            parked::DATA => self.execute(&self.job(), Effect::QUIET),
            parked::HOLD => {
                self.list(extra.a, Effect::NONE);
                false
            }
            _ => {
                self.correct_entry(extra.a, extra.b);
                false
            }
        }
    }

    fn execute(&self, sqe: &Sqe, effect: Effect) -> bool {
        let cid = u32::from(sqe.cid());
        let begun = match self.failure_of(effect) {
            Some(status) => Err(CommandRefusal { status, breach: None }),
            None => self.begin_command(sqe, effect),
        };
        match begun {
            Ok(true) => {
                self.set(word::EFFECT, effect.0);
                return true;
            }
            Ok(false) => self.finish(cid, Status::SUCCESS, effect),
            Err(refusal) => {
                if let Some((rule, detail)) = refusal.breach {
                    self.breach(rule, cid, detail);
                }
                self.finish(cid, refusal.status, effect);
            }
        }
        false
    }

    /// Checks a command and locates its data for the lanes; false if there is nothing to move.
    fn begin_command(&self, sqe: &Sqe, effect: Effect) -> Result<bool, CommandRefusal> {
        let pair = &self.pair;
        let limits = Limits {
            nsid: pair.nsid,
            blocks: pair.blocks,
            lba_shift: pair.lba_shift,
            max_bytes: pair.max_bytes,
        };
        let CommandKind::Blocks { opcode, lba, blocks } = fields::check(sqe, &limits)? else {
            return Ok(false);
        };
        let bytes = u64::from(blocks) << pair.lba_shift;
        let from = if effect.kind() == Some(FaultKind::Garbled) { 0 } else { lba };
        self.set_long(word::PLACE, pair.namespace.plus(from << pair.lba_shift).0);
        self.set(word::UNITS, (bytes / 16) as u32);
        self.set(word::DIFFERENT, 0);
        let (work, counter) = match opcode {
            opcode::READ => (task::TO_HOST, word::READ),
            opcode::WRITE => (task::FROM_HOST, word::WRITTEN),
            opcode::COMPARE => (task::COMPARE, word::READ),
            _ => (task::ZERO, word::WRITTEN),
        };
        if work != task::ZERO {
            self.find_spans(sqe, bytes)?;
        }
        let torn = effect.kind() == Some(FaultKind::Torn);
        if torn
            && self.park(parked::DATA, effect, self.delay_of(effect), self.get(word::JOB), Extra::default())
        {
            return Ok(false);
        }
        self.add(counter, bytes);
        self.set(word::TASK, work);
        Ok(true)
    }

    /// Follows the data pointer and records the extents of the transfer.
    fn find_spans(&self, sqe: &Sqe, bytes: u64) -> Result<(), CommandRefusal> {
        let (warp, pair) = (self.warp, &self.pair);
        let most = LOCAL_SPANS + pair.span_count;
        let walk =
            prp::walk(pair.page_shift, sqe.prp1(), sqe.prp2(), bytes, |at| space::qword(warp, pair, at.0));
        let mut count = 0;
        for step in walk {
            let (bus, len) = step.map_err(refusal)?;
            let at = space::find(warp, pair, bus.0, len).map_err(unreachable)?;
            if count == most {
                // The controller's own room is too small: not a violation by the driver.
                return Err(CommandRefusal { status: Status::INTERNAL_ERROR, breach: None });
            }
            self.put_span(count, at.0, len as u32);
            count += 1;
        }
        self.set(word::SPANS, count);
        Ok(())
    }

    fn put_span(&self, index: u32, at: u64, len: u32) {
        if index < LOCAL_SPANS {
            self.set_long(SPANS + 4 * index, at);
            self.set(SPANS + 4 * index + 2, len);
        } else {
            let to = self.pair.spans.plus(u64::from(index - LOCAL_SPANS) * u64::from(SPAN_BYTES));
            self.warp.store4(to, [at as u32, (at >> 32) as u32, len, 0]);
        }
    }

    /// Completes the current command, whose data the lanes have moved.
    fn moved(&self) {
        let effect = Effect(self.get(word::EFFECT));
        let cid = self.get(self.get(word::JOB)) >> 16;
        let differs = self.get(word::TASK) == task::COMPARE && self.get(word::DIFFERENT) != 0;
        let status = match effect.kind() {
            Some(FaultKind::Garbled) => Status(self.value_of(effect) as u16),
            _ if differs => Status::COMPARE_FAILURE.with_dnr(),
            _ => Status::SUCCESS,
        };
        self.finish(cid, status, effect);
    }

    pub(super) fn is_outstanding(&self, cid: u32) -> bool {
        self.get(CIDS + cid / 32) >> (cid % 32) & 1 != 0
    }

    pub(super) fn set_outstanding(&self, cid: u32, value: bool) {
        let (at, bit) = (CIDS + cid / 32, 1 << (cid % 32));
        let word = self.get(at);
        self.set(at, if value { word | bit } else { word & !bit });
    }
}

fn refusal(error: WalkError<(Rule, u64)>) -> CommandRefusal {
    let (rule, detail) = match error {
        WalkError::Read(at) => return unreachable(at),
        WalkError::Prp1Unaligned(prp) => (Rule::Prp1, prp),
        WalkError::Prp2Offset(prp) | WalkError::ListUnaligned(prp) => (Rule::Prp2, prp),
        WalkError::EntryOffset { entry, .. } | WalkError::ChainOffset { entry, .. } => (Rule::PrpList, entry),
        WalkError::PageShift(shift) => (Rule::PrpList, u64::from(shift)),
    };
    CommandRefusal::breach(rule, detail, error.status())
}

/// An unmapped address: the command may be retried, as on a drive.
fn unreachable((rule, at): (Rule, u64)) -> CommandRefusal {
    CommandRefusal { status: Status::DATA_TRANSFER_ERROR, breach: Some((rule, at)) }
}

const _: () = assert!(NO_COMMAND > 0xffff);
