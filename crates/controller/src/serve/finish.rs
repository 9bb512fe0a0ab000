//! The end of commands: collected during a turn, posted behind one fence.

use onehop_proto::{Cqe, Status};

use super::faults::Effect;
use super::parked::{self, Extra};
use super::{DONES, Server, word};
use crate::layout::{FaultKind, flag};
use crate::warp::{ControllerWarp, distance, wrap};

impl<W: ControllerWarp> Server<'_, W> {
    /// Finishes a command.
    pub(super) fn finish(&self, cid: u32, status: Status, effect: Effect) {
        if effect == Effect::QUIET {
            return;
        }
        let end = cid | u32::from(status.0) << 16;
        if effect.kind() == Some(FaultKind::Reorder) {
            // Those that this turn has already finished come before it in any case.
            let others = u64::from(self.get(word::DONE)) + u64::from(self.value_of(effect).max(1));
            let target = self.long(word::COMPLETIONS) + others;
            let extra = Extra { a: end, b: 0, target };
            if self.park(parked::HOLD, effect, self.delay_of(effect), self.get(word::JOB), extra) {
                return;
            }
        }
        self.list(end, effect);
    }

    /// Adds a completion to this turn's list.
    pub(super) fn list(&self, end: u32, effect: Effect) {
        let count = self.get(word::DONE);
        self.set(DONES + 2 * count, end);
        self.set(DONES + 2 * count + 1, effect.0);
        self.set(word::DONE, count + 1);
    }

    /// Posts this turn's completions.
    pub(super) fn post_all(&self) {
        let count = self.get(word::DONE);
        if count == 0 {
            return;
        }
        // All lanes have stored their data, and a barrier was passed: this fence makes it visible before any
        // completion.
        self.warp.fence();
        let reverse = self.pair.flags & flag::REVERSE != 0;
        for i in 0..count {
            let at = DONES + 2 * if reverse { count - 1 - i } else { i };
            // Completions still to be posted need their room.
            self.set(word::DONE, count - 1 - i);
            self.post(self.get(at), Effect(self.get(at + 1)));
        }
    }

    fn post(&self, end: u32, effect: Effect) {
        let (mut cid, status) = (end & 0xffff, Status((end >> 16) as u16));
        if !status.is_ok() {
            self.add(word::ERRORS, 1);
        }
        match effect.kind() {
            Some(FaultKind::WrongCid) => cid = self.another_cid(cid, false).unwrap_or(cid),
            Some(FaultKind::OtherCid) => {
                let other = self.another_cid(cid, true).or_else(|| self.another_cid(cid, false));
                cid = other.unwrap_or(cid);
            }
            _ if effect == Effect::FOREIGN => {}
            _ => self.set_outstanding(cid, false),
        }
        let lag = if effect.kind() == Some(FaultKind::SqhdLag) { self.value_of(effect) } else { 0 };
        self.put(cid, status, lag, effect);
        if effect.kind() == Some(FaultKind::Dup) && self.has_room() {
            self.put(cid, status, 0, Effect::NONE);
        }
    }

    /// Whether an unreserved completion fits.
    fn has_room(&self) -> bool {
        let entries = self.pair.cq_entries;
        let posted = distance(self.get(word::CQ_HEAD), self.get(word::CQ_TAIL), entries);
        posted + self.get(word::OWED) + self.get(word::DONE) + 1 < entries
    }

    /// Writes a completion queue entry.
    fn put(&self, cid: u32, status: Status, lag: u32, effect: Effect) {
        let (slot, phase) = (self.get(word::CQ_TAIL), self.get(word::PHASE) != 0);
        let sqhd = self.report_head(lag);
        let mut cqe = Cqe::new(0, sqhd, self.pair.sqid as u16, cid as u16, status, phase);
        if effect.kind() == Some(FaultKind::StalePhase) {
            let extra = Extra { a: slot, b: cqe.dw[3], target: u64::MAX };
            if self.park(parked::CORRECT, effect, self.delay_of(effect), self.get(word::JOB), extra) {
                cqe.dw[3] ^= 1 << 16;
            }
        }
        self.warp.store4(self.pair.cq.plus(u64::from(slot) * Cqe::BYTES as u64), cqe.dw);
        self.set(word::CQ_TAIL, wrap(slot + 1, self.pair.cq_entries));
        self.set(word::PHASE, u32::from(phase ^ (slot + 1 == self.pair.cq_entries)));
        self.add(word::COMPLETIONS, 1);
    }

    /// Corrects the last word of an entry.
    pub(super) fn correct_entry(&self, slot: u32, last: u32) {
        self.warp.store_release(self.pair.cq.plus(u64::from(slot) * Cqe::BYTES as u64 + 12), last);
    }

    /// The head to report to the host: `lag` behind, but never behind what was reported before.
    fn report_head(&self, lag: u32) -> u16 {
        let (reported, entries) = (self.get(word::REPORTED), self.pair.sq_entries);
        let known = distance(reported, self.get(word::HEAD), entries);
        let reported = wrap(reported + known.saturating_sub(lag), entries);
        self.set(word::REPORTED, reported);
        reported as u16
    }

    /// The identifier of another outstanding command; or an unused one, far from those that the host will use next.
    fn another_cid(&self, than: u32, outstanding: bool) -> Option<u32> {
        let first = if outstanding { than } else { than ^ 0x8000 };
        let fits = |cid: &u32| *cid != than && *cid != 0xffff && self.is_outstanding(*cid) == outstanding;
        (0..0x1_0000).map(|i| first ^ i).find(fits)
    }
}
