//! Numbers of requests. The target remembers what it answered until it knows that the answer arrived: everything below a number that comes
//! with each request. One request that takes long would hold that up, and with it all others: the client lists the old
//! ones that it still waits for. It also lists those that it has given up, as soon as it has: they must not happen later.

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
    /// Given up, of those that change something or whose answers bring files, and the target does not know. It may come across one
    /// yet, and must not forget what the others brought.
    given_up: BTreeSet<u64>,
}

impl Outstanding {
    pub fn of(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// Below it all are answered or given up, as the target knows, except for the listed ones.
    fn done(&self) -> u64 {
        let first = |ids: &BTreeSet<u64>| ids.range(self.told..).next().copied().unwrap_or(self.next);
        first(&self.ids).min(first(&self.given_up))
    }

    /// Whether the target does not know what it has to.
    fn has_news(&self) -> bool {
        !self.given_up.is_empty() || self.next - self.done() > MOST_UNTOLD
    }

    /// Whether nothing that was given up before this can happen after the answer to a list that was begun since.
    fn is_past(&self, telling: u64) -> bool {
        self.given_up.is_empty() || self.told > telling
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
        if given_up.is_some_and(|request| request.changes() || request.brings()) {
            self.given_up.insert(id);
        }
    }

    /// What the target has to be told now, if anything: below which number, and of which requests. It comes under a number of its own.
    fn begin_telling(&mut self) -> Option<(u64, Request)> {
        if !self.has_news() {
            return None;
        }
        // Each attempt takes a number, so this is none that is to come.
        let below = if self.given_up.is_empty() { self.next - MOST_UNTOLD / 2 } else { self.next };
        self.telling = (self.telling + 1).max(below);
        let below = self.telling;
        let told = |ids: &BTreeSet<u64>| ids.range(..below).copied().collect();
        let list = Request::Outstanding { below, ids: told(&self.ids), unheard: told(&self.given_up) };
        Some((self.take(), list))
    }

    /// The target has answered that.
    fn end_telling(&mut self, list: &Request) {
        if let Request::Outstanding { below, unheard, .. } = list {
            self.told = *below;
            // In their order.
            self.given_up.retain(|id| unheard.binary_search(id).is_err());
        }
    }
}

impl Client {
    /// A number for a request. What changes something waits until nothing that was given up before can come after it.
    pub(super) fn number(
        &self,
        epoch: u64,
        changes: bool,
        until: Instant,
    ) -> std::result::Result<u64, Trouble> {
        let mut all = lock(&self.outstanding);
        let begun = all.telling;
        loop {
            if all.epoch != epoch {
                return Err(Trouble::Gone { perhaps_done: false });
            }
            if Instant::now() >= self.stop.at(until) || self.is_over() {
                return Err(Errno::TIMEDOUT.into());
            }
            if all.next - all.done() < SPAN && (!changes || all.is_past(begun)) {
                let id = all.take();
                if all.has_news() {
                    self.news.notify_one();
                }
                return Ok(id);
            }
            all = self.answered.wait_timeout(all, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells the target which requests are waited for, as soon as it has to know. The next request may be long in coming, and what was
    /// given up must not happen meanwhile. This has a thread of its own, which waits for nothing else.
    pub(super) fn tell_outstanding(&self) {
        while !self.is_over() {
            let all = lock(&self.outstanding);
            if !all.has_news() {
                if !self.is_over() {
                    drop(self.news.wait(all));
                }
                continue;
            }
            let epoch = all.epoch;
            drop(all);
            // A target that does not answer this one may answer the next.
            let until = Instant::now() + self.options.give_up;
            // Without a connection no number is taken: the target takes none that is too far ahead.
            let is_told = self.lane(Some(epoch), false, until).is_ok() && self.tell_once(epoch, until);
            if !is_told {
                std::thread::sleep(TICK);
            }
        }
    }

    /// Whether the target was told.
    fn tell_once(&self, epoch: u64, until: Instant) -> bool {
        let mut all = lock(&self.outstanding);
        let begun = if all.epoch == epoch { all.begin_telling() } else { None };
        drop(all);
        let Some((number, list)) = begun else { return true };
        let told = pack(&list).map_err(|_| Errno::INVAL.into());
        let told = told
            .and_then(|body| self.until_answered((epoch, number, false), (&body, false), None, None, until));
        let is_told = matches!(told, Ok((Reply::Done, _)));
        let mut all = lock(&self.outstanding);
        if all.epoch == epoch {
            all.end(number, None);
            if is_told {
                all.end_telling(&list);
            }
        }
        drop(all);
        self.answered.notify_all();
        is_told
    }

    /// Has the thread that tells the target look whether it is over.
    pub(super) fn wake_teller(&self) {
        drop(lock(&self.outstanding));
        self.news.notify_all();
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
            if given_up.is_some() && all.has_news() {
                self.news.notify_one();
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

    /// What the target has to be told: below which number, what is waited for, and what was given up.
    fn parts(list: &Request) -> (u64, &[u64], &[u64]) {
        match list {
            Request::Outstanding { below, ids, unheard } => (*below, ids, unheard),
            other => panic!("{other:?}"),
        }
    }

    /// The target is told, and answers.
    fn tell(all: &mut Outstanding) -> Request {
        let (number, list) = all.begin_telling().unwrap();
        assert!(parts(&list).0 <= number);
        all.end(number, None);
        all.end_telling(&list);
        list
    }

    #[test]
    fn one_that_takes_long_holds_nothing_up() {
        let mut all = Outstanding::of(1);
        let slow = all.take();
        for _ in 0..10 * SPAN {
            if all.has_news() {
                let list = tell(&mut all);
                assert_eq!((parts(&list).1, parts(&list).2), (&[slow][..], &[][..]));
            }
            let id = all.take();
            assert!(all.next - all.done() < SPAN);
            all.end(id, None);
        }
        assert!(all.done() > 9 * SPAN && !all.has_news());
        // Given up, it could still happen, until the target knows.
        all.end(slow, Some(&CHANGE));
        let begun = all.telling;
        let (number, first) = all.begin_telling().unwrap();
        assert_eq!((parts(&first).1, parts(&first).2), (&[][..], &[slow][..]));
        assert!(!all.is_past(begun), "while it is being told, it does not know");
        // Without an answer it is told again, and what it hears last counts.
        all.end(number, None);
        assert!(all.has_news() && !all.is_past(begun));
        let second = tell(&mut all);
        assert!(parts(&second).0 > parts(&first).0 && parts(&second).2 == [slow]);
        assert!(all.is_past(begun) && !all.has_news());
        // The same while the target is being told that it is waited for.
        let other = all.take();
        for _ in 0..2 * MOST_UNTOLD {
            all.take();
        }
        let (number, list) = all.begin_telling().unwrap();
        assert!(parts(&list).1.contains(&other));
        all.end(other, Some(&CHANGE));
        all.end(number, None);
        all.end_telling(&list);
        assert!(all.has_news() && parts(&tell(&mut all)).2 == [other]);
    }

    #[test]
    fn the_target_is_told_of_a_change_that_is_given_up_though_nothing_else_is_asked_for() {
        let mut all = Outstanding::of(1);
        let (first, change, read) = (all.take(), all.take(), all.take());
        all.end(read, Some(&Request::Space { uid: 0 }));
        assert!(!all.has_news());
        all.end(change, Some(&CHANGE));
        let list = tell(&mut all);
        assert!(parts(&list).0 > read && parts(&list).1 == [first] && parts(&list).2 == [change]);
        assert!(!all.has_news());
    }

    #[test]
    fn a_change_waits_only_for_what_was_given_up_before_it() {
        let mut all = Outstanding::of(1);
        let (one, other) = (all.take(), all.take());
        all.end(one, Some(&CHANGE));
        let begun = all.telling;
        let (number, list) = all.begin_telling().unwrap();
        all.end(other, Some(&CHANGE));
        all.end(number, None);
        all.end_telling(&list);
        assert!(all.is_past(begun) && all.has_news());
        // One that comes now waits for both.
        let begun = all.telling;
        assert!(!all.is_past(begun));
        tell(&mut all);
        assert!(all.is_past(begun) && all.given_up.is_empty());
    }

    #[test]
    fn the_target_keeps_answers_that_bring_files_until_it_knows_that_they_were_not_heard() {
        let mut all = Outstanding::of(1);
        let (slow, opens, reads) = (all.take(), all.take(), all.take());
        let access = OpenMode { read: true, ..OpenMode::default() };
        let by = crate::wire::Caller::ROOT;
        all.end(opens, Some(&Request::Open { node: 1, access, again: false, by }));
        all.end(reads, Some(&Request::Space { uid: 0 }));
        all.end(slow, None);
        // With this, the target would forget its answer.
        assert_eq!(all.done(), opens);
        let (number, list) = all.begin_telling().unwrap();
        assert_eq!(parts(&list).2, [opens]);
        all.end(number, None);
        assert_eq!(all.done(), opens);
        assert_eq!(parts(&tell(&mut all)).2, [opens]);
        assert!(all.done() > opens && !all.has_news());
    }
}
