//! The faults of a drive, by name, and when they strike.

mod book;
mod parse;

use std::ops::RangeInclusive;
use std::time::Duration;

use onehop_proto::Status;

pub(crate) use book::{Effects, FaultBook, Seen};

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $kind:ident, $name:literal;)*) => {
        /// A kind of fault.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum FaultKind {
            $($(#[doc = $doc])* $kind,)*
        }

        impl FaultKind {
            /// Every kind.
            pub const ALL: &'static [FaultKind] = &[$(FaultKind::$kind,)*];

            /// Its name in options.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(FaultKind::$kind => $name,)* }
            }

            /// Its effect, in one line.
            #[must_use]
            pub const fn means(self) -> &'static str {
                match self { $(FaultKind::$kind => concat!($($doc),*),)* }
            }
        }
    };
}

kinds! {
    /// The command is executed and completed only after `delay` (20 ms).
    Late, "late";
    /// The completion is held until `by` (1) others were posted, `delay` (50 ms) at most.
    Reorder, "reorder";
    /// The command is never executed nor completed; it can be aborted.
    Lost, "lost";
    /// A read's completion is posted before its data, which follows after `delay` (1 ms), whole or in an `order`.
    Torn, "torn";
    /// The command fails with `status` (0/06), to be retried, after `crd` where the host asked for that; then it works.
    FailOnce, "fail-once";
    /// The command fails with `status` (0/06) and is not to be retried.
    Fail, "fail";
    /// A read brings the first blocks of the namespace instead of its own and fails with `status` (0/06), to be retried.
    Garbled, "garbled";
    /// The completion carries an identifier that is not outstanding; the command itself never completes.
    WrongCid, "wrong-cid";
    /// As wrong-cid, with the identifier of another command that is outstanding, where there is one.
    OtherCid, "other-cid";
    /// The same completion is posted twice.
    Dup, "dup";
    /// The completion is written with the old phase, and put right after `delay` (1 ms).
    StalePhase, "stale-phase";
    /// SQHD in the completion is `by` (4) entries behind, never going back.
    SqhdLag, "sqhd-lag";
    /// The controller stops with CSTS.CFS set.
    Cfs, "cfs";
    /// RDY does not follow EN, `on` enable, disable or both.
    StuckRdy, "stuck-rdy";
    /// The device leaves the bus: every read gives all ones.
    Gone, "gone";
    /// RDY follows EN only after `delay` (100 ms).
    SlowStart, "slow-start";
    /// Blocks in `lba` cannot be read: `status` (2/81).
    Media, "media";
    /// The power fails and comes back: unflushed writes are lost, the controller is as after power-on.
    PowerLoss, "power-loss";
    /// An Abort command leaves its command alone, and says so.
    AbortIgnored, "abort-ignored";
}

/// How the data of a torn read arrives, in words of eight bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// At once.
    #[default]
    Whole,
    /// The last word of every 512 bytes first, the others `delay` later.
    LastFirst,
    /// In random order, a quarter at a time, with `delay` between the quarters.
    Random,
}

/// A change of CC.EN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Edge {
    /// From 0 to 1.
    Enable,
    /// From 1 to 0.
    Disable,
}

/// When a fault strikes: all given conditions must hold.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct When {
    /// At the n-th match, counted from 1.
    pub n: Option<u64>,
    /// At every n-th match.
    pub every: Option<u64>,
    /// With this probability.
    pub p: Option<f64>,
    /// Commands that touch these blocks.
    pub lba: Option<RangeInclusive<u64>>,
    /// Commands of this queue; `None` for those of every I/O queue.
    pub q: Option<u16>,
    /// Commands with one of these opcodes; empty for all.
    pub ops: Vec<u8>,
    /// This long after the fault was injected, or, for configured faults, after the controller was first ready.
    pub after: Option<Duration>,
    /// At this change of CC.EN.
    pub on: Option<Edge>,
}

/// A fault and its moment.
#[derive(Clone, PartialEq, Debug)]
pub struct Fault {
    /// Its effect.
    pub kind: FaultKind,
    /// When.
    pub when: When,
    /// Its duration, if the kind has one.
    pub delay: Option<Duration>,
    /// The status of failures, if the kind fails commands.
    pub status: Option<Status>,
    /// The requested retry delay, 0 to 3.
    pub crd: u8,
    /// Maximum number of strikes.
    pub count: Option<u64>,
    /// Number of others to wait for, or of entries to lag behind.
    pub by: Option<u32>,
    /// How data arrives late.
    pub order: Order,
}

impl Fault {
    /// A fault that strikes whenever it can.
    #[must_use]
    pub fn new(kind: FaultKind) -> Self {
        Self {
            kind,
            when: When::default(),
            delay: None,
            status: None,
            crd: 0,
            count: None,
            by: None,
            order: Order::Whole,
        }
    }

    /// Maximum number of strikes, if limited.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        use FaultKind::{Cfs, FailOnce, Garbled, Gone, PowerLoss};
        let repeated = self.when.every.is_some() || self.when.p.is_some();
        match self.kind {
            Cfs | Gone | PowerLoss | FailOnce | Garbled if !repeated => self.count.or(Some(1)),
            _ => self.count,
        }
    }

    /// Whether it is triggered by the clock and not by a command.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        let w = &self.when;
        matches!(self.kind, FaultKind::Cfs | FaultKind::Gone | FaultKind::PowerLoss)
            && (w.n.is_none() && w.every.is_none() && w.p.is_none())
            && (w.lba.is_none() && w.q.is_none() && w.ops.is_empty())
    }

    fn delay_or(&self, standard: Duration) -> Duration {
        self.delay.unwrap_or(standard)
    }
}
