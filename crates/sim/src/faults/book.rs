//! Which faults strike which command, and when.

use std::collections::HashMap;
use std::time::Duration;

use onehop_proto::{Sqe, Status};

use super::{Edge, Fault, FaultKind, Order};
use crate::engine::Strike;
use crate::rng::Rng;

const MS: Duration = Duration::from_millis(1);

/// What the book needs to know of a command.
pub(crate) struct Seen<'a> {
    /// Its submission queue.
    pub sqid: u16,
    /// The entry.
    pub sqe: &'a Sqe,
    /// The blocks that it touches: first and count.
    pub blocks: Option<(u64, u64)>,
    /// It returns data of the medium.
    pub reads: bool,
}

impl Seen<'_> {
    /// Identifies a retry of the command.
    fn key(&self) -> RetryKey {
        (self.sqe.opcode(), self.sqe.nsid(), self.sqe.qword(10), self.sqe.dw[12])
    }
}

type RetryKey = (u8, u32, u64, u32);

/// The faults' effects on a command.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Effects {
    /// Executed only after this time.
    pub late: Option<Duration>,
    /// Completed only after this many others, or this time.
    pub hold: Option<(u32, Duration)>,
    /// Never executed.
    pub lost: bool,
    /// Data follows this long after the completion, in this order.
    pub torn: Option<(Duration, Order)>,
    /// Fails with this status.
    pub fail: Option<Status>,
    /// The block that cannot be read.
    pub bad_block: Option<u64>,
    /// Completed under an identifier that is not outstanding.
    pub wrong_cid: bool,
    /// Completed under the identifier of another command that is outstanding.
    pub other_cid: bool,
    /// Completed twice.
    pub dup: bool,
    /// Completed with the old phase for this time.
    pub stale: Option<Duration>,
    /// SQHD lags by this.
    pub lag: u16,
    /// It returns other blocks and fails with this status.
    pub garbled: Option<Status>,
    /// It is an Abort that aborts nothing.
    pub abort_ignored: bool,
    /// A controller-wide event.
    pub strike: Option<Strike>,
}

/// The faults' effects on a change of CC.EN.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct EdgeEffects {
    /// RDY never follows.
    pub stuck: bool,
    /// RDY follows after this time.
    pub delay: Option<Duration>,
}

struct Armed {
    fault: Fault,
    seen: u64,
    fired: u64,
    /// When its clock started; `None` before the controller is ready for the first time.
    since: Option<u64>,
    /// Commands that failed once, and will work now.
    forgiven: HashMap<RetryKey, ()>,
}

impl Armed {
    fn spent(&self) -> bool {
        self.fault.limit().is_some_and(|limit| self.fired >= limit)
    }

    fn due(&self) -> Option<u64> {
        let wait = self.fault.when.after.unwrap_or_default().as_nanos() as u64;
        self.since.map(|since| since.saturating_add(wait))
    }

    /// Counts a match; returns whether the fault strikes.
    fn strikes(&mut self, rng: &mut Rng) -> bool {
        if self.spent() {
            return false;
        }
        self.seen += 1;
        let when = &self.fault.when;
        let hit = when.n.is_none_or(|n| n == self.seen)
            && when.every.is_none_or(|every| self.seen.is_multiple_of(every))
            && when.p.is_none_or(|p| rng.chance(p));
        self.fired += u64::from(hit);
        hit
    }

    fn fits(&self, seen: &Seen<'_>, now: u64) -> bool {
        use FaultKind::{AbortIgnored, Garbled, Media, SlowStart, StuckRdy, Torn};
        let (when, kind) = (&self.fault.when, self.fault.kind);
        let abort = seen.sqid == 0 && seen.sqe.opcode() == onehop_proto::admin::opcode::ABORT;
        let kind_fits = match kind {
            StuckRdy | SlowStart => return false,
            AbortIgnored => return abort,
            Media => seen.reads || !when.ops.is_empty(),
            Torn | Garbled => seen.reads && seen.sqe.opcode() == onehop_proto::nvm::opcode::READ,
            _ => !self.fault.is_timed(),
        };
        let queue = when.q.map_or(seen.sqid != 0, |q| q == seen.sqid);
        let op = when.ops.is_empty() || when.ops.contains(&seen.sqe.opcode());
        let blocks = when.lba.as_ref().is_none_or(|range| overlap(range, seen.blocks).is_some());
        let time = when.after.is_none() || self.due().is_some_and(|due| now >= due);
        kind_fits && queue && op && blocks && time
    }
}

/// The first common block.
fn overlap(range: &std::ops::RangeInclusive<u64>, blocks: Option<(u64, u64)>) -> Option<u64> {
    let (first, count) = blocks?;
    let from = first.max(*range.start());
    (from <= *range.end() && from - first < count).then_some(from)
}

/// All faults of a drive.
pub(crate) struct FaultBook {
    armed: Vec<Armed>,
    rng: Rng,
    fired: u64,
}

impl FaultBook {
    pub(crate) fn new(faults: &[Fault], seed: u64) -> Self {
        let mut book = Self { armed: Vec::new(), rng: Rng::new(seed), fired: 0 };
        faults.iter().for_each(|f| book.arm(f.clone(), None));
        book
    }

    fn arm(&mut self, fault: Fault, since: Option<u64>) {
        self.armed.push(Armed { fault, seen: 0, fired: 0, since, forgiven: HashMap::new() });
    }

    /// Adds a fault; its clock starts now.
    pub(crate) fn inject(&mut self, fault: Fault, now: u64) {
        self.arm(fault, Some(now));
    }

    /// How often any fault struck.
    pub(crate) const fn fired(&self) -> u64 {
        self.fired
    }

    /// The controller is ready: starts the clocks of configured faults.
    pub(crate) fn ready(&mut self, now: u64) {
        for armed in &mut self.armed {
            armed.since.get_or_insert(now);
        }
    }

    /// What happens at a change of CC.EN.
    pub(crate) fn edge(&mut self, edge: Edge) -> EdgeEffects {
        let mut effects = EdgeEffects::default();
        for armed in &mut self.armed {
            let fault = &armed.fault;
            let fits = match fault.kind {
                FaultKind::StuckRdy => fault.when.on.is_none_or(|on| on == edge),
                FaultKind::SlowStart => fault.when.on.unwrap_or(Edge::Enable) == edge,
                _ => false,
            };
            if !fits || !armed.strikes(&mut self.rng) {
                continue;
            }
            self.fired += 1;
            match armed.fault.kind {
                FaultKind::StuckRdy => effects.stuck = true,
                _ => effects.delay = Some(armed.fault.delay_or(100 * MS)),
            }
        }
        effects
    }

    /// When the next timed fault strikes.
    pub(crate) fn next_timed(&self) -> Option<u64> {
        self.armed.iter().filter(|a| a.fault.is_timed() && !a.spent()).filter_map(Armed::due).min()
    }

    /// The timed fault that strikes now.
    pub(crate) fn timed(&mut self, now: u64) -> Option<Strike> {
        let due = |a: &&mut Armed| a.fault.is_timed() && !a.spent() && a.due().is_some_and(|due| now >= due);
        let armed = self.armed.iter_mut().find(due)?;
        armed.fired += 1;
        self.fired += 1;
        strike(armed.fault.kind)
    }

    /// The effects on a command; `None` without any.
    pub(crate) fn command(&mut self, seen: &Seen<'_>, now: u64) -> Option<Box<Effects>> {
        let mut effects: Option<Box<Effects>> = None;
        for armed in &mut self.armed {
            if !armed.fits(seen, now) {
                continue;
            }
            if armed.forgiven.remove(&seen.key()).is_some() || !armed.strikes(&mut self.rng) {
                continue;
            }
            self.fired += 1;
            if armed.fault.kind == FaultKind::FailOnce {
                armed.forgiven.insert(seen.key(), ());
            }
            effects.get_or_insert_default().add(&armed.fault, seen);
        }
        effects
    }
}

fn strike(kind: FaultKind) -> Option<Strike> {
    match kind {
        FaultKind::Cfs => Some(Strike::Cfs),
        FaultKind::Gone => Some(Strike::Gone),
        FaultKind::PowerLoss => Some(Strike::PowerLoss),
        _ => None,
    }
}

impl Effects {
    fn add(&mut self, fault: &Fault, seen: &Seen<'_>) {
        let status = |standard: Status| fault.status.unwrap_or(standard);
        match fault.kind {
            FaultKind::Late => self.late = Some(fault.delay_or(20 * MS)),
            FaultKind::Reorder => self.hold = Some((fault.by.unwrap_or(1), fault.delay_or(50 * MS))),
            FaultKind::Lost => self.lost = true,
            FaultKind::Torn => self.torn = Some((fault.delay_or(MS), fault.order)),
            FaultKind::FailOnce => self.fail = Some(status(Status::INTERNAL_ERROR).with_crd(fault.crd)),
            FaultKind::Garbled => {
                self.garbled = Some(status(Status::INTERNAL_ERROR).with_crd(fault.crd));
            }
            FaultKind::Fail => self.fail = Some(status(Status::INTERNAL_ERROR).with_dnr()),
            FaultKind::WrongCid => self.wrong_cid = true,
            FaultKind::OtherCid => self.other_cid = true,
            FaultKind::Dup => self.dup = true,
            FaultKind::StalePhase => self.stale = Some(fault.delay_or(MS)),
            FaultKind::SqhdLag => self.lag = fault.by.unwrap_or(4).min(u32::from(u16::MAX)) as u16,
            FaultKind::AbortIgnored => self.abort_ignored = true,
            FaultKind::Media => {
                self.fail = Some(status(Status::UNRECOVERED_READ).with_dnr());
                self.bad_block = fault.when.lba.as_ref().and_then(|range| overlap(range, seen.blocks));
            }
            FaultKind::Cfs | FaultKind::Gone | FaultKind::PowerLoss => self.strike = strike(fault.kind),
            FaultKind::StuckRdy | FaultKind::SlowStart => {}
        }
    }
}
