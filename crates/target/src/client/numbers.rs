//! Numbers of requests. The target remembers what it answered until it knows that the answer arrived: everything below a number that comes
//! with each request. One request that takes long would hold that up, and with it all others: the client lists the old
//! ones that it still waits for.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Instant;

use rustix::io::Errno;

use super::{Client, TICK, Trouble};
use crate::lock;
use crate::wire::{Reply, Request, pack};

/// Between the oldest request that is waited for and the newest: fewer than the server allows. Those of which it was told do not count.
const SPAN: u64 = 2048;
/// With more than this, the client lists the older ones to the target.
const MOST_UNTOLD: u64 = SPAN / 2;

/// Requests of an epoch that are waited for.
#[derive(Default)]
pub(super) struct Outstanding {
    epoch: u64,
    next: u64,
    ids: BTreeSet<u64>,
    /// Below it, the target knows which ones are waited for.
    told: u64,
    /// What it was to be told last: what arrives late says less.
    telling: u64,
    /// The newest one that changes something and was given up: the server may come across it yet.
    abandoned: Option<u64>,
    /// Given up, and their answers would have brought files: the target has to be told before it forgets the answers.
    unheard: BTreeSet<u64>,
    /// Whether a listed request that changes something was given up since.
    is_stale: bool,
    /// Whether somebody is telling it.
    is_telling: bool,
}

impl Outstanding {
    pub fn of(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// Below it all are answered or given up, except for the listed ones.
    fn done(&self) -> u64 {
        let first = |ids: &BTreeSet<u64>| ids.range(self.told..).next().copied().unwrap_or(self.next);
        first(&self.ids).min(first(&self.unheard))
    }

    /// Whether the server will learn that it has to leave aside what was given up, by the next request.
    fn is_sure(&self) -> bool {
        !self.is_stale && self.abandoned.is_none_or(|id| id < self.done())
    }

    fn take(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        self.ids.insert(id);
        id
    }

    /// A request is over: answered, or given up.
    fn end(&mut self, id: u64, given_up: Option<&Request>) {
        self.ids.remove(&id);
        if given_up.is_some_and(Request::brings) {
            self.unheard.insert(id);
        }
        if given_up.is_some_and(Request::changes) {
            self.abandoned = self.abandoned.max(Some(id));
            self.is_stale |= id < if self.is_telling { self.telling } else { self.told };
        }
    }

    /// What the target has to be told now, if anything: below which number, and of which requests. A change must not come before
    /// one that was given up, though an older request may take long.
    fn begin_telling(&mut self, changes: bool) -> Option<Request> {
        let waits = (changes && !self.is_sure()) || !self.unheard.is_empty();
        if self.is_telling || (self.next - self.done() <= MOST_UNTOLD && !self.is_stale && !waits) {
            return None;
        }
        (self.is_telling, self.is_stale) = (true, false);
        // Each attempt takes a number, so this is none that is to come.
        let below = if waits { self.next } else { self.next.saturating_sub(MOST_UNTOLD / 2) };
        self.telling = (self.telling + 1).max(below);
        let below = self.telling;
        let told = |ids: &BTreeSet<u64>| ids.range(..below).copied().collect();
        Some(Request::Outstanding { below, ids: told(&self.ids), unheard: told(&self.unheard) })
    }

    /// Somebody has told it, or could not.
    fn end_telling(&mut self, told: Option<&Request>) {
        self.is_telling = false;
        if let Some(Request::Outstanding { unheard, .. }) = told {
            self.told = self.telling;
            self.unheard.retain(|id| !unheard.contains(id));
        } else {
            self.is_stale = true;
        }
    }
}

impl Client {
    /// A number for a request. What changes something waits until nothing that was given up can come after it.
    pub(super) fn number(
        &self,
        epoch: u64,
        changes: bool,
        until: Instant,
    ) -> std::result::Result<u64, Trouble> {
        let mut all = lock(&self.outstanding);
        loop {
            if all.epoch != epoch {
                return Err(Trouble::Gone { perhaps_done: false });
            }
            let is_late = Instant::now() >= self.stop.at(until) || self.is_over();
            if !is_late && let Some(list) = all.begin_telling(changes) {
                let number = all.take();
                drop(all);
                let is_told = self.tell_outstanding(epoch, number, &list, until);
                all = lock(&self.outstanding);
                if !is_told {
                    all = self.answered.wait_timeout(all, TICK).unwrap_or_else(PoisonError::into_inner).0;
                }
                continue;
            }
            if all.next - all.done() < SPAN && (!changes || all.is_sure()) {
                return Ok(all.take());
            }
            if is_late {
                return Err(Errno::TIMEDOUT.into());
            }
            all = self.answered.wait_timeout(all, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the target was told.
    fn tell_outstanding(&self, epoch: u64, number: u64, list: &Request, until: Instant) -> bool {
        let told = pack(list).map_err(|_| Errno::INVAL.into());
        let told = told
            .and_then(|body| self.until_answered((epoch, number, false), (&body, false), None, None, until));
        let is_told = matches!(told, Ok((Reply::Done, _)));
        let mut all = lock(&self.outstanding);
        if all.epoch == epoch {
            all.end(number, None);
            all.end_telling(Some(list).filter(|_| is_told));
        }
        drop(all);
        self.answered.notify_all();
        is_told
    }

    /// Everything below has been answered, as far as the target needs to know.
    pub(super) fn done(&self) -> u64 {
        lock(&self.outstanding).done()
    }

    /// A request is not waited for any more: it was answered, or given up.
    pub(super) fn ended(&self, epoch: u64, id: u64, given_up: Option<&Request>) {
        let mut all = lock(&self.outstanding);
        if all.epoch == epoch {
            all.end(id, given_up);
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

    const LIST: Request = Request::Outstanding { below: 0, ids: Vec::new(), unheard: Vec::new() };

    /// What the target has to be told, where nothing is unheard.
    fn told(all: &mut Outstanding, changes: bool) -> Option<(u64, Vec<u64>)> {
        match all.begin_telling(changes)? {
            Request::Outstanding { below, ids, unheard } if unheard.is_empty() => Some((below, ids)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_that_takes_long_holds_nothing_up() {
        let mut all = Outstanding::of(1);
        let slow = all.take();
        for _ in 0..10 * SPAN {
            if let Some((below, ids)) = told(&mut all, false) {
                assert!(below < all.take());
                all.end(all.next - 1, None);
                assert_eq!((ids, told(&mut all, false)), (vec![slow], None));
                all.end_telling(Some(&LIST));
            }
            let id = all.take();
            assert!(all.next - all.done() < SPAN && all.is_sure());
            all.end(id, None);
        }
        assert!(all.done() > 9 * SPAN);
        // Given up, it could still happen, until the target knows.
        all.end(slow, Some(&CHANGE));
        assert!(!all.is_sure());
        let (first, ids) = told(&mut all, false).unwrap();
        all.take();
        assert_eq!(ids.len(), 0);
        all.end_telling(None);
        assert!(!all.is_sure());
        let (second, _) = told(&mut all, false).unwrap();
        assert!(second > first && second <= all.take());
        all.end_telling(Some(&LIST));
        assert!(all.is_sure());
        // The same while the target is being told that it is waited for.
        let other = all.take();
        for _ in 0..2 * MOST_UNTOLD {
            all.take();
        }
        assert!(told(&mut all, false).is_some_and(|(_, ids)| ids.contains(&other)));
        all.end(other, Some(&CHANGE));
        all.end_telling(Some(&LIST));
        assert!(!all.is_sure());
    }

    #[test]
    fn what_was_given_up_is_past_before_a_change_begins() {
        let mut all = Outstanding::of(1);
        let ids: Vec<_> = (0..3).map(|_| all.take()).collect();
        all.end(ids[1], Some(&CHANGE));
        assert!(!all.is_sure());
        all.end(ids[0], None);
        assert!(all.is_sure() && all.done() == ids[2]);
    }

    #[test]
    fn a_change_does_not_wait_for_an_older_request_that_takes_long() {
        let mut all = Outstanding::of(1);
        let slow = all.take();
        let given_up = all.take();
        all.end(given_up, Some(&CHANGE));
        assert!(!all.is_sure() && told(&mut all, false).is_none());
        let (below, ids) = told(&mut all, true).unwrap();
        assert!(below > given_up && ids == [slow]);
        let number = all.take();
        all.end(number, None);
        all.end_telling(Some(&LIST));
        assert!(all.is_sure() && told(&mut all, true).is_none());
    }

    #[test]
    fn the_target_keeps_answers_that_bring_files_until_it_knows_that_they_were_not_heard() {
        let mut all = Outstanding::of(1);
        let (slow, opens, reads) = (all.take(), all.take(), all.take());
        let access = OpenMode { read: true, ..OpenMode::default() };
        let by = crate::wire::Caller::ROOT;
        all.end(opens, Some(&Request::Open { node: 1, access, again: false, by }));
        all.end(reads, Some(&Request::Space));
        all.end(slow, None);
        // With this, the target would forget its answer.
        assert_eq!(all.done(), opens);
        let list = all.begin_telling(false).unwrap();
        assert!(matches!(&list, Request::Outstanding { unheard, .. } if *unheard == [opens]), "{list:?}");
        all.end_telling(None);
        assert_eq!(all.done(), opens);
        let list = all.begin_telling(false).unwrap();
        assert!(matches!(&list, Request::Outstanding { unheard, .. } if *unheard == [opens]), "{list:?}");
        all.end_telling(Some(&list));
        assert!(all.done() > opens && all.begin_telling(false).is_none());
    }
}
