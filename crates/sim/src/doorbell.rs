//! Doorbells and shadow doorbells: the host's heads and tails, and whether they are plausible.

use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::sync::atomic::fence;

use onehop_proto::regs::{self, Cc};

use crate::aer::AerEvent;
use crate::device::{ControllerState, Phase};
use crate::violation::Rule;

/// The host's shadow doorbells and the event indices.
#[derive(Clone, Copy)]
pub(crate) struct Shadow {
    pub doorbells: u64,
    pub events: u64,
}

impl ControllerState {
    /// A write at or beyond the first doorbell.
    pub(crate) fn ring(&mut self, at: u32, value: u32) {
        let Some((qid, is_cq)) = regs::doorbell_of(at, self.config.dstrd) else {
            let detail = format!("{value:#x} was written to {at:#x}, between doorbells");
            self.breach(Rule::DoorbellUnknownQueue, None, detail);
            self.raise(AerEvent::DoorbellRegister);
            return;
        };
        let rings = &mut self.counts.rest;
        *(if is_cq { &mut rings.cq_doorbells } else { &mut rings.sq_doorbells }) += 1;
        if !self.may_ring(qid, is_cq, value) {
            return;
        }
        let shadowed = self.shadow.is_some() && qid != 0;
        let value = if shadowed { self.shadowed(qid, is_cq, value) } else { value };
        if is_cq {
            self.ring_cq(qid, value, shadowed);
        } else {
            self.ring_sq(qid, value, shadowed);
            if shadowed && self.tail_of(qid) == Some(value) {
                self.watch_shadow(qid);
            }
        }
        if self.shadow.is_some() && qid == 0 {
            // The admin queues are always rung directly; their shadows follow, as hosts expect.
            self.put_shadow(qid, is_cq, false, value);
            self.put_shadow(qid, is_cq, true, value);
        }
    }

    /// Whether doorbells are allowed in the present state.
    fn may_ring(&self, qid: u16, is_cq: bool, value: u32) -> bool {
        let (rule, state) = if self.regs.cc.shn() != Cc::SHN_NONE {
            (Rule::DoorbellAfterShutdown, "after CC.SHN was set")
        } else if self.phase != Phase::Ready {
            (Rule::DoorbellNotReady, "while CSTS.RDY was 0")
        } else {
            return true;
        };
        let what = if is_cq { "head" } else { "tail" };
        self.breach(rule, Some(qid), format!("{what} {value} of queue {qid} was written {state}"));
        false
    }

    fn bad_ring(&mut self, rule: Rule, qid: u16, detail: String) {
        self.breach(rule, Some(qid), detail);
        let unknown = rule == Rule::DoorbellUnknownQueue;
        self.health.note_doorbell(qid);
        self.raise(if unknown { AerEvent::DoorbellRegister } else { AerEvent::DoorbellValue });
    }

    fn ring_sq(&mut self, qid: u16, value: u32, shadowed: bool) {
        let Some(sq) = self.sqs.get_mut(usize::from(qid)).and_then(Option::as_mut) else {
            let detail = format!("tail {value} was written for a submission queue that does not exist");
            return self.bad_ring(Rule::DoorbellUnknownQueue, qid, detail);
        };
        if value >= sq.size {
            let detail = format!("tail {value} in a submission queue of {} entries", sq.size);
            return self.bad_ring(Rule::DoorbellValue, qid, detail);
        }
        if value == sq.tail {
            if shadowed {
                return;
            }
            let detail = format!("tail {value} was written again");
            return self.bad_ring(Rule::DoorbellSame, qid, detail);
        }
        let used = sq.distance(sq.reported_head, sq.tail);
        let added = sq.distance(sq.tail, value);
        if used + added >= sq.size {
            let detail = format!(
                "tail went from {} to {value}, but the host knows of head {} only ({} entries)",
                sq.tail, sq.reported_head, sq.size
            );
            return self.bad_ring(Rule::SqOverrun, qid, detail);
        }
        sq.tail = value;
        self.fetch(qid);
    }

    fn ring_cq(&mut self, qid: u16, value: u32, shadowed: bool) {
        let Some(cq) = self.cqs.get_mut(usize::from(qid)).and_then(Option::as_mut) else {
            let state = if self.deleted_cqs.contains(&qid) { "has been deleted" } else { "does not exist" };
            let detail = format!("head {value} was written for a completion queue that {state}");
            return self.bad_ring(Rule::DoorbellUnknownQueue, qid, detail);
        };
        if value >= cq.size {
            let detail = format!("head {value} in a completion queue of {} entries", cq.size);
            return self.bad_ring(Rule::DoorbellValue, qid, detail);
        }
        if value == cq.head {
            if shadowed {
                return;
            }
            let detail = format!("head {value} was written again");
            return self.bad_ring(Rule::DoorbellSame, qid, detail);
        }
        let taken = (value + cq.size - cq.head) % cq.size;
        if taken > cq.posted() {
            let detail = format!(
                "head went from {} to {value}, but only {} entries were posted",
                cq.head,
                cq.posted()
            );
            return self.bad_ring(Rule::CqHeadPastPosted, qid, detail);
        }
        cq.head = value;
        self.drain_waiting(qid);
    }

    /// The value that applies: the shadow's, if there is one.
    fn shadowed(&mut self, qid: u16, is_cq: bool, value: u32) -> u32 {
        let Some(shadow) = self.get_shadow(qid, is_cq) else { return value };
        let old = if is_cq {
            self.cqs.get(usize::from(qid)).and_then(Option::as_ref).map(|q| q.head)
        } else {
            self.sqs.get(usize::from(qid)).and_then(Option::as_ref).map(|q| q.tail)
        };
        if shadow != value && old == Some(shadow) {
            let detail = format!("the doorbell got {value}, but its shadow still says {shadow}");
            self.breach(Rule::ShadowDoorbell, Some(qid), detail);
        }
        shadow
    }

    fn shadow_address(&self, qid: u16, is_cq: bool, event: bool) -> Option<u64> {
        let shadow = self.shadow?;
        let offset = regs::doorbell(qid, is_cq, self.config.dstrd) - regs::offset::DOORBELLS;
        Some(u64::from(offset).wrapping_add(if event { shadow.events } else { shadow.doorbells }))
    }

    fn get_shadow(&mut self, qid: u16, is_cq: bool) -> Option<u32> {
        let addr = self.shadow_address(qid, is_cq, false)?;
        match self.space.find(addr, 4) {
            Ok((segment, at)) => segment.host().ok()?.word(at).ok().map(|word| word.load(Acquire)),
            Err(gone) => {
                self.breach_dma(qid, "shadow doorbell", gone);
                None
            }
        }
    }

    fn put_shadow(&mut self, qid: u16, is_cq: bool, event: bool, value: u32) {
        let Some(addr) = self.shadow_address(qid, is_cq, event) else { return };
        match self.space.find(addr, 4) {
            Ok((segment, at)) => {
                if let Ok(word) = segment.host().and_then(|mem| mem.word(at)) {
                    word.store(value, Release);
                }
            }
            Err(gone) => self.breach_dma(qid, "shadow doorbell", gone),
        }
    }

    fn tail_of(&self, qid: u16) -> Option<u32> {
        self.sqs.get(usize::from(qid)).and_then(Option::as_ref).map(|sq| sq.tail)
    }

    /// Requests a doorbell at the next change of a tail, and checks whether it changed meanwhile.
    fn watch_shadow(&mut self, qid: u16) {
        while let Some(old) = self.tail_of(qid) {
            self.put_shadow(qid, false, true, old);
            fence(SeqCst);
            match self.get_shadow(qid, false) {
                Some(value) if value != old => self.ring_sq(qid, value, true),
                _ => return,
            }
            if self.tail_of(qid) == Some(old) {
                return;
            }
        }
    }

    /// Reads the shadow of a head when room is needed, and requests a doorbell when it changes.
    pub(crate) fn refresh_head(&mut self, qid: u16) {
        if self.shadow.is_none() || qid == 0 {
            return;
        }
        let Some(head) = self.cqs.get(usize::from(qid)).and_then(Option::as_ref).map(|q| q.head) else {
            return;
        };
        self.put_shadow(qid, true, true, head);
        fence(SeqCst);
        if let Some(value) = self.get_shadow(qid, true)
            && value != head
        {
            self.ring_cq(qid, value, true);
        }
    }
}
