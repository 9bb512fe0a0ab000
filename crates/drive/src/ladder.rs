//! The time-out ladder: steps from polling once more to a function reset, until the controller no longer uses a
//! command's memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::Transport;
use onehop_proto::admin as words;

use crate::admin::Admin;
use crate::core::AdminState;
use crate::drive::DriveInner;
use crate::queue::QueueCell;
use crate::slots::Token;
use crate::{Error, Recovery, Result};

/// Pauses before each try of a reset, and before queues are created again. After the last try the drive is given up.
pub(crate) const RESET_PAUSES: [Duration; 3] =
    [Duration::ZERO, Duration::from_millis(100), Duration::from_secs(1)];

/// A recovery that was needed.
#[derive(Clone, Debug)]
pub struct Incident {
    /// What went wrong.
    pub cause: String,
    /// The step that fixed it.
    pub recovery: Recovery,
    /// How long it took.
    pub took: Duration,
}

/// Something with queues on the controller, which a reset deletes and creates again.
pub(crate) trait Participant: Send + Sync {
    /// Stops accessing the controller before this returns.
    fn close(&self);
    /// Creates its queues again on a controller that was reset. It stays closed.
    fn recreate(&self, drive: &DriveInner, admin: &mut Admin, recovery: Recovery) -> Result<()>;
    /// All participants' queues were created again: it may access the controller from now on.
    fn open(&self);
    /// The drive is dead: ends everything with this error.
    fn fail(&self, error: &Error);
}

impl DriveInner {
    /// Takes a late command, or a queue with an unexpected completion, away from the controller. The queue's state shows the
    /// result.
    pub(crate) fn recover(&self, cell: &Arc<QueueCell>, token: Token) {
        let start = Instant::now();
        let mut state = self.state();
        if state.dead.is_some() {
            return;
        }
        let (token, unexpected, lacks_data) = {
            let mut slots = cell.lock();
            slots.drain();
            let token = slots.late_concurrent(token).unwrap_or(token);
            // Another thread may have recovered it while this one waited for the lock.
            if slots.unexpected.is_none() && !slots.is_late(token) {
                return;
            }
            let (unexpected, lacks_data) = (slots.unexpected, slots.lacks_data(token));
            slots.doubts.unexpected += u64::from(unexpected.is_some());
            if unexpected.is_none() && !lacks_data {
                slots.doubts.losses += 1;
                slots.repeat_flushes(Recovery::Abort);
            }
            (token, unexpected, lacks_data)
        };
        let cause = match unexpected {
            Some(cid) => format!("a completion for command {cid:#06x}, which was not in flight"),
            None if lacks_data => format!("a read on queue {} that was completed without its data", cell.qid),
            None => format!("a command on queue {} that was not completed", cell.qid),
        };
        match self.run_timeout_ladder(&mut state, cell, token, unexpected.is_some() || lacks_data, &cause) {
            // A reset records its own incident.
            Ok(Recovery::ControllerReset | Recovery::FunctionReset) | Err(_) => {}
            Ok(recovery) => state.incidents.push(Incident { cause, recovery, took: start.elapsed() }),
        }
    }

    /// Checks the controller's status and recovers a controller that failed, without waiting for a command to be late.
    pub(crate) fn check_controller_health(&self, cell: &Arc<QueueCell>) {
        if self.control.status().is_ok_and(|status| !status.cfs()) {
            return;
        }
        let mut state = self.state();
        if state.dead.is_some() || cell.lock().closed.is_some() {
            return;
        }
        // Another thread may have recovered it while this one waited for the lock.
        match self.control.status() {
            Ok(status) if !status.cfs() => {}
            Ok(_) => {
                let cause = match self.control.port.regs.failure() {
                    Some(why) => format!("a controller that was lost: {why}"),
                    None => "a controller that reported a fatal error (CSTS.CFS)".into(),
                };
                // The queues show the result.
                let _ = self.reset(&mut state, &cause);
            }
            Err(error) => {
                self.die(&mut state, error);
            }
        }
    }

    fn run_timeout_ladder(
        &self,
        state: &mut AdminState,
        cell: &Arc<QueueCell>,
        token: Token,
        needs_reset: bool,
        cause: &str,
    ) -> Result<Recovery> {
        let status = match self.control.status() {
            Ok(status) => status,
            Err(error) => return Err(self.die(state, error)),
        };
        // An Abort is useless on a controller that failed, was reset by others, or completes commands that it never
        // got. It is also useless for completed commands: only a reset stops their data.
        if !status.cfs() && status.rdy() && !needs_reset {
            if self.abort(state, cell, token) {
                return Ok(Recovery::Abort);
            }
            if self.recreate(state, cell).is_ok() {
                return Ok(Recovery::QueueDelete);
            }
        }
        self.reset(state, cause)
    }

    /// Asks the controller to abort a command, and waits a moment for its completion.
    fn abort(&self, state: &mut AdminState, cell: &Arc<QueueCell>, token: Token) -> bool {
        let slots = cell.lock();
        // Without an identifier it was completed meanwhile, or never got into the queue.
        let Some(cid) = slots.cid(token) else { return !slots.is_late(token) };
        drop(slots);
        let sqe = words::abort(cell.qid, cid);
        let patience = self.options.abort_wait;
        match state.admin.run_within("abort", &sqe, patience) {
            Ok(cqe) if cqe.result() & 1 == 0 => {}
            _ => return false,
        }
        let start = Instant::now();
        while start.elapsed() < patience {
            let mut slots = cell.lock();
            slots.drain();
            if slots.cid(token) != Some(cid) {
                return true;
            }
            drop(slots);
            std::thread::yield_now();
        }
        false
    }

    /// Deletes a queue pair, which ends its commands, and creates it again.
    fn recreate(&self, state: &mut AdminState, cell: &Arc<QueueCell>) -> Result<()> {
        let mut slots = cell.lock();
        // Commands that completed during the deletion count as completed.
        let gone = self.delete_pair(state, cell.qid, self.options.abort_wait, || {
            slots.drain();
        });
        let back = gone.and_then(|()| {
            slots.restart(Recovery::QueueDelete)?;
            let (sq, cq) = slots.halves();
            self.create_pair(&mut state.admin, cell.qid, sq, cq, Some(self.options.admin_timeout))
        });
        // No doorbell may be rung while the queue does not exist; the reset that follows opens it again.
        if back.is_err() {
            slots.closed.get_or_insert_with(Instant::now);
        }
        back
    }

    /// Resets the controller, or the function if that does not help, and recreates all queues. A reset that fails is
    /// tried again: a single lost admin command must not cost the drive. A request to stop ends it: the drive is then
    /// given up, and disabled when it is dropped.
    pub(crate) fn reset(&self, state: &mut AdminState, cause: &str) -> Result<Recovery> {
        let start = Instant::now();
        let back = self.bring_back(state, Recovery::ControllerReset);
        let is_remote = self.control.transport() == Transport::Messages && self.control.port.reset.is_some();
        let end = if is_remote { self.reconnect(state, back) } else { self.reset_harder(state, back) };
        state.admin.set_due(None);
        let recovery = end.map_err(|error| self.die(state, self.control.or_interrupted(error)))?;
        state.incidents.push(Incident { cause: cause.to_owned(), recovery, took: start.elapsed() });
        Ok(recovery)
    }

    /// Resets the function after each of [`RESET_PAUSES`], until the controller is `back`.
    fn reset_harder(&self, state: &mut AdminState, mut back: Result<()>) -> Result<Recovery> {
        let mut recovery = Recovery::ControllerReset;
        for pause in RESET_PAUSES {
            let is_final = matches!(
                back,
                Ok(()) | Err(Error::Gone { .. } | Error::Changed { .. } | Error::NoQueue { .. })
            );
            if is_final || self.control.stop.is_set() {
                break;
            }
            self.control.stop.sleep(pause);
            match self.reset_function() {
                Ok(()) => recovery = Recovery::FunctionReset,
                Err(error @ (Error::Gone { .. } | Error::Lost { .. })) => return Err(error),
                // If a function reset is impossible or fails, the controller is reset once more.
                Err(_) => {}
            }
            back = self.bring_back(state, recovery);
        }
        back.map(|()| recovery)
    }

    /// Connects again until the controller is `back`. Connecting has its own pauses and its own limit. One of several
    /// addresses may belong to another controller, so each try starts with the next address.
    fn reconnect(&self, state: &mut AdminState, mut back: Result<()>) -> Result<Recovery> {
        let mut recovery = Recovery::ControllerReset;
        while !matches!(back, Ok(()) | Err(Error::NoQueue { .. })) && !self.control.stop.is_set() {
            if let Err(error) = self.reset_function() {
                return Err(with_last_failure(error, back));
            }
            recovery = Recovery::FunctionReset;
            back = self.bring_back(state, recovery);
        }
        back.map(|()| recovery)
    }

    /// The time limit of all admin commands that recover a controller across a network: that of one command, the same
    /// for Identify commands that are repeated, and a twentieth for each namespace and queue. A slow target must not
    /// use up the limit of every command, one after the other.
    fn time_to_bring_back(&self, state: &AdminState) -> Duration {
        let queues = state.in_use.iter().filter(|used| **used).count();
        let parts = (self.namespaces().len() + queues).min(u32::MAX as usize) as u32;
        let limit = self.options.admin_timeout;
        limit.saturating_mul(2).saturating_add((limit / 20).saturating_mul(parts))
    }

    fn bring_back(&self, state: &mut AdminState, recovery: Recovery) -> Result<()> {
        let participants = state.participants.clone();
        participants.iter().for_each(|p| p.close());
        let is_remote = self.control.transport() == Transport::Messages;
        let limit = is_remote.then(|| self.time_to_bring_back(state));
        let identity = self.start(&mut state.admin, limit)?;
        let before = self.identity().serial();
        if identity.serial() != before {
            return Err(Error::Changed { drive: self.name().to_owned(), before, now: identity.serial() });
        }
        let granted = self.configure(state, &identity)?;
        let used = state.in_use.iter().rposition(|used| *used).map_or(0, |index| index as u32 + 1);
        if granted < used {
            return Err(Error::NoQueue { drive: self.name().to_owned(), granted });
        }
        self.compare_namespaces(state)?;
        if state.cmb.is_some() {
            crate::gpu::restore_cmb(self)?;
        }
        participants.iter().try_for_each(|p| p.recreate(self, &mut state.admin, recovery))?;
        // Not earlier: if a creation fails, the controller is reset once more.
        participants.iter().for_each(|p| p.open());
        Ok(())
    }

    /// Gives the drive up: all commands end with an error, and memory that the device may still reach stays allocated.
    fn die(&self, state: &mut AdminState, why: Error) -> Error {
        let error = match why {
            Error::Gone { .. } | Error::Lost { .. } | Error::Interrupted { .. } => why,
            other => Error::Dead { drive: self.name().to_owned(), why: other.to_string() },
        };
        for participant in &state.participants {
            participant.fail(&error);
            self.quarantine.keep(participant.clone());
        }
        state.dead = Some(error.clone());
        error
    }
}

/// The error of a target that cannot be reached any more, with the last failure.
fn with_last_failure(error: Error, back: Result<()>) -> Error {
    match (error, back) {
        (Error::Lost { drive, why }, Err(last)) if !matches!(last, Error::Lost { .. }) => {
            Error::Lost { drive, why: format!("{why}; before that, {last}") }
        }
        (error, _) => error,
    }
}
