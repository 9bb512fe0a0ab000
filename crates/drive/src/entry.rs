//! One command of a CPU-driven queue, from its submission until its result is taken.

use std::time::{Duration, Instant};

use onehop_proto::Sqe;
use onehop_proto::nvm::{self, Rw};

use crate::canary::Canary;
use crate::command::{Op, describe};
use crate::core::DmaQuarantine;
use crate::holds::{Hold, Holds};
use crate::{Buffer, Error, Result};

/// The result of a command that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Its result dword.
    pub result: u32,
    /// How often it was tried again.
    pub retries: u32,
    /// Whether its data arrived after its completion; noticed only with [`Options::canary`](crate::Options).
    pub late_data: bool,
}

/// A flush that was completed while other commands were in flight. The completion may be that of one of them, under the
/// flush's identifier. If so, that command is never completed, or the flush is completed once more.
pub(crate) struct UnsureFlush {
    pub(crate) finished: Finished,
    /// The commands that have not ended since: which entry, under which identifier.
    pub(crate) concurrent: Vec<(u32, u16)>,
}

/// The state of a command.
pub(crate) enum CommandState {
    Free,
    InFlight(u16),
    /// To be tried again at this time.
    Waiting(Instant),
    /// It waits for room in the submission queue.
    NoRoom,
    /// Completed, but its data is not there yet.
    Settling(Finished),
    /// A flush that was completed beside other commands.
    Unsure(Box<UnsureFlush>),
    Done(std::result::Result<Finished, Box<Error>>),
}

impl CommandState {
    /// Errors are large and rare: boxed, they cost nothing when commands succeed.
    pub(crate) fn failed(error: Error) -> Self {
        Self::Done(Err(Box::new(error)))
    }
}

/// A command and what it holds.
pub(crate) struct CommandEntry {
    pub(crate) state: CommandState,
    pub(crate) life: u32,
    pub(crate) sqe: Sqe,
    /// How often it was tried again, except after path errors.
    pub(crate) retries: u32,
    pub(crate) path_retries: u32,
    /// When retries after path errors end; set by the first of them.
    pub(crate) path_due: Option<Instant>,
    pub(crate) deadline: Instant,
    /// What a flush covers.
    pub(crate) mark: u64,
    /// The data, and separate metadata.
    pub(crate) hold: [Option<Hold>; 2],
    pub(crate) canary: Option<Canary>,
}

impl CommandEntry {
    /// What was asked for.
    pub(crate) fn op(&self) -> Op {
        Op::of(self.sqe.opcode())
    }

    /// How often it was tried again.
    pub(crate) fn tries(&self) -> u32 {
        self.retries + self.path_retries
    }

    #[inline(always)]
    pub(crate) fn is_flush(&self) -> bool {
        self.sqe.opcode() == nvm::opcode::FLUSH
    }

    pub(crate) fn data<'a>(&self, holds: &'a Holds) -> Option<&'a Buffer> {
        self.hold[0].and_then(|hold| holds.get(hold))
    }

    #[inline(always)]
    pub(crate) fn has_data(&self, holds: &Holds) -> bool {
        let Some(canary) = &self.canary else { return true };
        // Only host memory is guarded here, and that can always be read.
        self.data(holds).is_none_or(|buffer| canary.is_gone(buffer, Duration::ZERO).unwrap_or(false))
    }

    /// Keeps its memory until the controller is reset.
    pub(crate) fn keep(&self, holds: &Holds, quarantine: &DmaQuarantine) {
        self.hold
            .iter()
            .flatten()
            .filter_map(|hold| holds.get(*hold))
            .for_each(|buffer| quarantine.keep(buffer.clone()));
    }

    #[inline]
    pub(crate) fn mark_stale(&mut self, holds: &mut Holds) {
        self.hold.iter_mut().filter_map(Option::take).for_each(|hold| holds.release(hold));
    }

    /// Marks the memory of a read anew: an earlier try may have brought a part of the data.
    pub(crate) fn mark_again(&self, holds: &Holds) -> Result<()> {
        match (&self.canary, self.data(holds)) {
            (Some(canary), Some(buffer)) => canary.place(buffer, Duration::ZERO),
            _ => Ok(()),
        }
    }

    /// How long the controller had for its last try, whose limit was `timeout`: a controller that failed did not have
    /// all of it. The time of a reset that began at `reset` does not count.
    pub(crate) fn waited(&self, timeout: Duration, reset: Option<Instant>) -> Duration {
        let end = reset.unwrap_or_else(Instant::now);
        self.deadline.checked_sub(timeout).map_or(timeout, |given| end.saturating_duration_since(given))
    }

    pub(crate) fn describe(&self, drive: &str) -> String {
        let Rw { nsid, lba, blocks, .. } = Rw::decode(&self.sqe);
        describe(self.op().name(), drive, nsid, lba, blocks)
    }
}
