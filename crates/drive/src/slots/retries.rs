//! Which failed commands are tried again, and when.

use std::time::{Duration, Instant};

use onehop_proto::Status;
use onehop_proto::status::sct;

use super::CommandSlots;
use crate::drive::DriveInner;

/// The longest wait before a retry, even if the controller asks for more.
const LONGEST_DELAY: Duration = Duration::from_secs(10);
/// The shortest wait before a retry after a path error.
const PATH_DELAY: Duration = Duration::from_millis(100);

/// Whether a command that ended with this status may be tried again.
pub(crate) fn may_retry(status: Status) -> bool {
    status.may_retry() && !status.is(Status::ANA_PERSISTENT_LOSS)
}

impl CommandSlots {
    /// How long to wait before a command that ended with this status is tried again; `None` if it is not.
    /// [`Options::retries`](crate::Options::retries) states the rule.
    ///
    /// For path errors the time is limited instead of the number: there is no other path, and the state of this one may
    /// be about to change. A host should retry for ANATT at least.
    pub(super) fn retry_delay(&mut self, id: u32, status: Status) -> Option<Duration> {
        if self.retries == 0 || !may_retry(status) {
            return None;
        }
        let delay = self.retry_delay[status.crd() as usize & 3];
        let entry = &mut self.entries[id as usize];
        if status.sct() == sct::PATH {
            let now = Instant::now();
            let due = *entry.path_due.get_or_insert(now + self.path_limit);
            let left = due.saturating_duration_since(now);
            entry.path_retries += u32::from(!left.is_zero());
            return (!left.is_zero()).then_some(delay.max(PATH_DELAY).min(left));
        }
        let may_retry = entry.retries < self.retries;
        entry.retries += u32::from(may_retry);
        may_retry.then_some(delay)
    }
}

/// How long to wait before a retry, by CRD.
pub(crate) fn retry_delays(drive: &DriveInner) -> [Duration; 4] {
    let view = drive.identity().controller();
    std::array::from_fn(|crd| Duration::from_millis(view.retry_delay_ms(crd as u8).into()).min(LONGEST_DELAY))
}

/// How long commands are tried again after path errors: the time that a change of ANA states may take, or that of a command
/// where the controller has no such states.
pub(super) fn path_limit(drive: &DriveInner) -> Duration {
    match drive.identity().controller().anatt() {
        0 => drive.options.timeout.min(super::NEVER),
        seconds => Duration::from_secs(seconds.into()),
    }
}
