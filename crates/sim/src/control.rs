//! Enable, disable, shut down: requests through CC, and how CSTS follows.

use onehop_proto::Status;
use onehop_proto::regs::{Cc, Csts};

use crate::device::{ControllerState, Phase};
use crate::engine::Strike;
use crate::faults::Edge;
use crate::health::ErrorEntry;
use crate::queues::{Cq, PagedRing, Sq};
use crate::violation::Rule;

/// A time that never comes.
const NEVER: u64 = u64::MAX;

impl ControllerState {
    /// Handles a write of CC.
    pub(crate) fn change_cc(&mut self, asked: Cc) {
        let old = self.regs.cc;
        let mut new = asked;
        if old.en() && asked.en() {
            new = self.keep_fixed_fields(old, asked);
        }
        self.regs.cc = new;
        match (old.en(), new.en()) {
            (false, true) => self.enable(),
            (true, false) => self.disable(),
            _ => {}
        }
        if new.shn() != Cc::SHN_NONE && old.shn() == Cc::SHN_NONE {
            self.shut_down();
        }
    }

    /// Some fields of CC must not change while the controller is enabled.
    fn keep_fixed_fields(&self, old: Cc, asked: Cc) -> Cc {
        let mut new = asked.with_css(old.css()).with_mps(old.mps()).with_ams(old.ams());
        if new != asked {
            let detail = format!("CC went from {:#x} to {:#x} while EN is 1", old.0, asked.0);
            self.breach(Rule::ConfigWhileEnabled, None, detail);
        }
        let sizes = (asked.iosqes(), asked.iocqes()) != (old.iosqes(), old.iocqes());
        let io_queues = self.cqs.iter().skip(1).any(Option::is_some);
        if sizes && io_queues {
            self.breach(Rule::ConfigWhileEnabled, None, "IOSQES or IOCQES changed while I/O queues exist");
            new = new.with_iosqes(old.iosqes()).with_iocqes(old.iocqes());
        }
        new
    }

    fn enable(&mut self) {
        if let Phase::Stopping(_) = self.phase {
            self.breach(Rule::EnableSequence, None, "EN went to 1 while RDY was still 1");
            self.controller_reset();
        }
        if let Err((rule, detail)) = self.check_enable() {
            self.breach(rule, None, detail);
            self.fatal();
            return;
        }
        let effects = self.faults.edge(Edge::Enable);
        self.enabled_at = self.clock.now();
        self.phase = Phase::Starting(self.edge_due(effects.stuck, effects.delay));
        self.tick();
    }

    fn disable(&mut self) {
        let waited = self.clock.now().saturating_sub(self.enabled_at);
        let gave_up = u128::from(waited) >= self.config.longest_ready().as_nanos();
        if let Phase::Starting(_) = self.phase
            && !self.regs.csts.cfs()
            && !gave_up
        {
            self.breach(Rule::EnableSequence, None, "EN went to 0 before RDY had become 1");
        }
        let was_ready = self.regs.csts.rdy();
        let effects = self.faults.edge(Edge::Disable);
        let due = self.edge_due(effects.stuck, effects.delay);
        if was_ready && due > self.clock.now() {
            self.phase = Phase::Stopping(due);
        } else {
            self.controller_reset();
        }
    }

    fn edge_due(&self, stuck: bool, delay: Option<std::time::Duration>) -> u64 {
        let delay = delay.unwrap_or(self.config.ready).as_nanos() as u64;
        if stuck { NEVER } else { self.clock.now().saturating_add(delay) }
    }

    /// Checks the conditions when EN goes to 1.
    fn check_enable(&self) -> Result<(), (Rule, String)> {
        let (r, cap) = (&self.regs, self.regs.cap);
        if r.cc.mps() < cap.mpsmin() || r.cc.mps() > cap.mpsmax() {
            let detail = format!("CC.MPS = {} is outside {} to {}", r.cc.mps(), cap.mpsmin(), cap.mpsmax());
            return Err((Rule::PageSize, detail));
        }
        if r.cc.css() != Cc::CSS_NVM || r.cc.ams() != 0 {
            let detail = format!("CC.CSS = {}, CC.AMS = {}", r.cc.css(), r.cc.ams());
            return Err((Rule::CommandSet, detail));
        }
        let page = 1u64 << r.cc.page_shift();
        for (name, base, size_z) in [("ASQ", r.asq, r.aqa.asqs_z()), ("ACQ", r.acq, r.aqa.acqs_z())] {
            if !base.is_multiple_of(page) {
                return Err((Rule::AdminQueue, format!("{name} = {base:#x} is not aligned to {page} bytes")));
            }
            if size_z == 0 {
                return Err((Rule::AdminQueue, format!("{name} has one entry, two are the least")));
            }
        }
        Ok(())
    }

    /// Advances to the present time: RDY, shutdown, timed faults.
    pub(crate) fn tick(&mut self) {
        let now = self.clock.now();
        match self.phase {
            Phase::Starting(due) if due <= now && !self.regs.csts.cfs() => self.become_ready(now),
            Phase::Stopping(due) if due <= now => self.controller_reset(),
            _ => {}
        }
        if self.shutdown.is_some_and(|due| due <= now) {
            self.shutdown = None;
            self.flush_all();
            self.regs.csts = self.regs.csts.with_shst(Csts::SHST_COMPLETE);
        }
        if self.silent_at.is_some_and(|due| due <= now) {
            self.end_silence();
        }
        while let Some(strike) = self.faults.timed(now) {
            self.strike(strike);
        }
        self.apply_engine_strike();
    }

    /// When `tick` next has an effect.
    pub(crate) fn next_tick(&self) -> Option<u64> {
        let phase = match self.phase {
            Phase::Starting(due) | Phase::Stopping(due) if due != NEVER && !self.regs.csts.cfs() => Some(due),
            _ => None,
        };
        [phase, self.shutdown, self.silent_at, self.faults.next_timed()].into_iter().flatten().min()
    }

    fn become_ready(&mut self, now: u64) {
        let aqa = self.regs.aqa;
        let (sq, cq) = (u32::from(aqa.asqs_z()) + 1, u32::from(aqa.acqs_z()) + 1);
        let ring = |base, entries: u32, bytes| PagedRing::contiguous(base, entries as usize * bytes);
        let sq_ring = ring(self.regs.asq, sq, onehop_proto::Sqe::BYTES);
        let cq_ring = ring(self.regs.acq, cq, onehop_proto::Cqe::BYTES);
        self.generation += 1;
        self.sqs[0] = Some(Sq::new(sq, 0, sq_ring));
        self.cqs[0] = Some(Cq::new(cq, Some(0), cq_ring, self.generation));
        self.restart_doorbell(0, false);
        self.restart_doorbell(0, true);
        self.phase = Phase::Ready;
        self.regs.csts = self.regs.csts.with_rdy(true);
        self.faults.ready(now);
    }

    /// Restarts the keep-alive timer, on a command or a new timeout.
    pub(crate) fn restart_keep_alive(&mut self) {
        let now = self.clock.now();
        self.silent_at = self.features.keep_alive().map(|time| now.saturating_add(time.as_nanos() as u64));
    }

    /// The keep-alive timeout has expired: the controller stops, until it is reset.
    fn end_silence(&mut self) {
        self.silent_at = None;
        if self.runs() {
            let status = Status::KEEP_ALIVE_EXPIRED;
            // No command is the cause.
            self.health.note_error(ErrorEntry { sqid: u16::MAX, cid: u16::MAX, status, lba: 0, nsid: 0 });
            self.fatal();
        }
    }

    fn shut_down(&mut self) {
        let due = self.clock.now().saturating_add(self.config.ready.as_nanos() as u64);
        self.regs.csts = self.regs.csts.with_shst(Csts::SHST_OCCURRING);
        self.shutdown = Some(due);
        self.tick();
    }

    /// Applies an event to the whole controller.
    pub(crate) fn strike(&mut self, strike: Strike) {
        match strike {
            Strike::Cfs => self.fatal(),
            Strike::Gone => {
                self.gone = true;
                // A removed device works on nothing, and waits for nothing.
                if let Some(engine) = &self.engine {
                    engine.clear();
                }
            }
            Strike::PowerLoss => self.power_loss(),
        }
    }
}
