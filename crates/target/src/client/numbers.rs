//! Numbers of requests. The target keeps its answers until it knows that they have arrived: each request carries a
//! number below which all are answered. A slow request would hold that number back, and with it all others, so the
//! client reports the old requests that it still waits for. It also reports cancelled requests, as soon as possible:
//! they must not be executed later.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Instant;

use rustix::io::Errno;

use super::{Client, POLL_INTERVAL, RequestError};
use crate::lock;
use crate::wire::{Reply, Request, pack};

/// The distance between the oldest outstanding request and the newest, less than the server allows. Reported ones do
/// not count.
const SPAN: u64 = 2048;
/// At this distance the client reports the older outstanding requests.
const MAX_UNREPORTED: u64 = SPAN / 2;

/// Outstanding requests of an epoch.
#[derive(Default)]
pub(super) struct Outstanding {
    epoch: u64,
    next: u64,
    ids: BTreeSet<u64>,
    /// Below this number the target knows which requests are outstanding.
    reported: u64,
    /// The limit of the last report that was started. Reports that arrive late have lower ones.
    reporting: u64,
    /// Cancelled requests that the target does not know of, if they change something or their answers return files. The
    /// target may still execute one, and must not forget what their answers returned.
    cancelled: BTreeSet<u64>,
}

impl Outstanding {
    pub fn of(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// Below this number all requests are answered or cancelled and the target knows it, except for the reported ones.
    fn done(&self) -> u64 {
        let first = |ids: &BTreeSet<u64>| ids.range(self.reported..).next().copied().unwrap_or(self.next);
        first(&self.ids).min(first(&self.cancelled))
    }

    /// Whether a report is due.
    fn is_report_due(&self) -> bool {
        !self.cancelled.is_empty() || self.next - self.done() > MAX_UNREPORTED
    }

    /// Whether no request that was cancelled before `reporting` can be executed any more.
    fn is_past(&self, reporting: u64) -> bool {
        self.cancelled.is_empty() || self.reported > reporting
    }

    fn take(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        self.ids.insert(id);
        id
    }

    /// A request was answered or cancelled.
    fn end(&mut self, id: u64, cancelled: Option<&Request>) {
        self.ids.remove(&id);
        if cancelled.is_some_and(|request| request.changes() || request.returns_files()) {
            self.cancelled.insert(id);
        }
    }

    /// The next report, if one is due, under a number of its own.
    fn begin_report(&mut self) -> Option<(u64, Request)> {
        if !self.is_report_due() {
            return None;
        }
        // Each attempt takes a number, so this number is in the past.
        let below = if self.cancelled.is_empty() { self.next - MAX_UNREPORTED / 2 } else { self.next };
        self.reporting = (self.reporting + 1).max(below);
        let below = self.reporting;
        let listed = |ids: &BTreeSet<u64>| ids.range(..below).copied().collect();
        let list = Request::Outstanding { below, ids: listed(&self.ids), unheard: listed(&self.cancelled) };
        Some((self.take(), list))
    }

    /// The target has answered the report.
    fn end_report(&mut self, list: &Request) {
        if let Request::Outstanding { below, unheard, .. } = list {
            self.reported = *below;
            // The list is sorted.
            self.cancelled.retain(|id| unheard.binary_search(id).is_err());
        }
    }
}

impl Client {
    /// A number for a request. Changes wait until no request that was cancelled before can be executed after them.
    pub(super) fn number(
        &self,
        epoch: u64,
        changes: bool,
        until: Instant,
    ) -> std::result::Result<u64, RequestError> {
        let mut all = lock(&self.outstanding);
        let begun = all.reporting;
        loop {
            if all.epoch != epoch {
                return Err(RequestError::SessionLost { may_be_done: false });
            }
            if Instant::now() >= self.stop.at(until) || self.is_over() {
                return Err(Errno::TIMEDOUT.into());
            }
            if all.next - all.done() < SPAN && (!changes || all.is_past(begun)) {
                let id = all.take();
                if all.is_report_due() {
                    self.report_due.notify_one();
                }
                return Ok(id);
            }
            all = self.answered.wait_timeout(all, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Reports outstanding requests as soon as the target has to know them: the next request may come much later, and a
    /// cancelled one must not be executed meanwhile. Runs on a thread of its own.
    pub(super) fn report_outstanding(&self) {
        while !self.is_over() {
            let all = lock(&self.outstanding);
            if !all.is_report_due() {
                if !self.is_over() {
                    drop(self.report_due.wait(all));
                }
                continue;
            }
            let epoch = all.epoch;
            drop(all);
            // If the target does not answer this report, it may answer the next.
            let until = Instant::now() + self.options.give_up;
            // Without a connection no number is taken: the target rejects numbers that are too far ahead.
            let is_answered = self.lane(Some(epoch), false, until).is_ok() && self.send_report(epoch, until);
            if !is_answered {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }

    /// Sends a report. Returns whether the target has answered.
    fn send_report(&self, epoch: u64, until: Instant) -> bool {
        let mut all = lock(&self.outstanding);
        let begun = if all.epoch == epoch { all.begin_report() } else { None };
        drop(all);
        let Some((number, list)) = begun else { return true };
        let sent = pack(&list).map_err(|_| Errno::INVAL.into());
        let sent = sent
            .and_then(|body| self.until_answered((epoch, number, false), (&body, false), None, None, until));
        let is_answered = matches!(sent, Ok((Reply::Done, _)));
        let mut all = lock(&self.outstanding);
        if all.epoch == epoch {
            all.end(number, None);
            if is_answered {
                all.end_report(&list);
            }
        }
        drop(all);
        self.answered.notify_all();
        is_answered
    }

    /// Wakes the reporting thread, so that it checks whether the client has ended.
    pub(super) fn wake_reporter(&self) {
        drop(lock(&self.outstanding));
        self.report_due.notify_all();
    }

    /// The number below which all requests are answered, as far as the target needs to know.
    pub(super) fn done(&self) -> u64 {
        lock(&self.outstanding).done()
    }

    /// A request was answered, or `cancelled` is cancelled.
    pub(super) fn ended(&self, epoch: u64, id: u64, cancelled: Option<&Request>) {
        let mut all = lock(&self.outstanding);
        if all.epoch == epoch {
            all.end(id, cancelled);
            if cancelled.is_some() && all.is_report_due() {
                self.report_due.notify_one();
            }
        }
        drop(all);
        self.answered.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::OpenMode;

    const CHANGE: Request = Request::Write { file: 1, at: 0, len: 1, from: None };

    /// The parts of a report: its limit, the outstanding requests, and the cancelled ones.
    fn parts(list: &Request) -> (u64, &[u64], &[u64]) {
        match list {
            Request::Outstanding { below, ids, unheard } => (*below, ids, unheard),
            other => panic!("{other:?}"),
        }
    }

    /// Sends a report, which the target answers.
    fn report(all: &mut Outstanding) -> Request {
        let (number, list) = all.begin_report().unwrap();
        assert!(parts(&list).0 <= number);
        all.end(number, None);
        all.end_report(&list);
        list
    }

    #[test]
    fn a_slow_request_does_not_hold_up_others() {
        let mut all = Outstanding::of(1);
        let slow = all.take();
        for _ in 0..10 * SPAN {
            if all.is_report_due() {
                let list = report(&mut all);
                assert_eq!((parts(&list).1, parts(&list).2), (&[slow][..], &[][..]));
            }
            let id = all.take();
            assert!(all.next - all.done() < SPAN);
            all.end(id, None);
        }
        assert!(all.done() > 9 * SPAN && !all.is_report_due());
        // A cancelled request may be executed until the target knows.
        all.end(slow, Some(&CHANGE));
        let begun = all.reporting;
        let (number, first) = all.begin_report().unwrap();
        assert_eq!((parts(&first).1, parts(&first).2), (&[][..], &[slow][..]));
        assert!(!all.is_past(begun), "the report is in flight");
        // Without an answer the report is repeated, and the last one counts.
        all.end(number, None);
        assert!(all.is_report_due() && !all.is_past(begun));
        let second = report(&mut all);
        assert!(parts(&second).0 > parts(&first).0 && parts(&second).2 == [slow]);
        assert!(all.is_past(begun) && !all.is_report_due());
        // The same for a request that is cancelled while a report lists it as outstanding.
        let other = all.take();
        for _ in 0..2 * MAX_UNREPORTED {
            all.take();
        }
        let (number, list) = all.begin_report().unwrap();
        assert!(parts(&list).1.contains(&other));
        all.end(other, Some(&CHANGE));
        all.end(number, None);
        all.end_report(&list);
        assert!(all.is_report_due() && parts(&report(&mut all)).2 == [other]);
    }

    #[test]
    fn a_cancelled_change_is_reported_without_further_requests() {
        let mut all = Outstanding::of(1);
        let (first, change, read) = (all.take(), all.take(), all.take());
        all.end(read, Some(&Request::Space { uid: 0 }));
        assert!(!all.is_report_due());
        all.end(change, Some(&CHANGE));
        let list = report(&mut all);
        assert!(parts(&list).0 > read && parts(&list).1 == [first] && parts(&list).2 == [change]);
        assert!(!all.is_report_due());
    }

    #[test]
    fn a_change_waits_only_for_earlier_cancelled_changes() {
        let mut all = Outstanding::of(1);
        let (one, other) = (all.take(), all.take());
        all.end(one, Some(&CHANGE));
        let begun = all.reporting;
        let (number, list) = all.begin_report().unwrap();
        all.end(other, Some(&CHANGE));
        all.end(number, None);
        all.end_report(&list);
        assert!(all.is_past(begun) && all.is_report_due());
        // A change that is started now waits for both.
        let begun = all.reporting;
        assert!(!all.is_past(begun));
        report(&mut all);
        assert!(all.is_past(begun) && all.cancelled.is_empty());
    }

    #[test]
    fn the_target_keeps_answers_that_return_files_until_reported() {
        let mut all = Outstanding::of(1);
        let (slow, opens, reads) = (all.take(), all.take(), all.take());
        let access = OpenMode { read: true, ..OpenMode::default() };
        let by = crate::wire::Caller::ROOT;
        all.end(opens, Some(&Request::Open { node: 1, access, again: false, by }));
        all.end(reads, Some(&Request::Space { uid: 0 }));
        all.end(slow, None);
        // A larger number would make the target forget its answer.
        assert_eq!(all.done(), opens);
        let (number, list) = all.begin_report().unwrap();
        assert_eq!(parts(&list).2, [opens]);
        all.end(number, None);
        assert_eq!(all.done(), opens);
        assert_eq!(parts(&report(&mut all)).2, [opens]);
        assert!(all.done() > opens && !all.is_report_due());
    }
}
