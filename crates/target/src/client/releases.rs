//! Requests whose answers nobody waits for: they close or forget files at the target.
//!
//! While a user's message is in flight, further releases are collected for the next one. Each file is listed once, with
//! its count, and stays until the target has answered. So none is lost, and there are no more entries than files that
//! the target holds for this mount, which the target limits. A target may take long to close one user's files; other
//! users' messages are sent meanwhile.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Client, POLL_INTERVAL, RequestError};
use crate::lock;
use crate::wire::{Request, pack};

/// Files in one message.
const MAX_FILES: usize = 2048;
/// Further threads, one for each user with a message in flight.
const MAX_THREADS: usize = 64;
/// A message is repeated under its number as long as the session lasts: under another number it could be executed
/// twice.
const NO_TIMEOUT: Duration = Duration::from_secs(1 << 30);

/// The releases of one user.
#[derive(Default)]
struct UserReleases {
    files: Vec<u64>,
    /// Node numbers, and how often each is forgotten.
    nodes: BTreeMap<u64, u64>,
    /// Whether a message of this user is in flight or queued.
    is_queued: bool,
}

#[derive(Default)]
struct ReleaseState {
    /// The session that the releases belong to. They end with it.
    epoch: u64,
    of: HashMap<u32, UserReleases>,
    /// Users whose message is to be sent next.
    next: VecDeque<u32>,
    threads: usize,
    idle: usize,
}

/// The releases of all users.
#[derive(Default)]
pub(super) struct Releases {
    state: Mutex<ReleaseState>,
    there: Condvar,
}

impl ReleaseState {
    fn of(&mut self, epoch: u64, uid: u32) -> Option<&mut UserReleases> {
        if epoch > self.epoch {
            (self.epoch, self.of) = (epoch, HashMap::new());
            self.next.clear();
        }
        (epoch == self.epoch).then(|| self.of.entry(uid).or_default())
    }

    /// The next message, its epoch and its user.
    fn take(&mut self) -> Option<(u64, u32, Request)> {
        let uid = self.next.pop_front()?;
        let theirs = self.of.get_mut(&uid)?;
        let rest = theirs.files.len().saturating_sub(MAX_FILES);
        let files = theirs.files.split_off(rest);
        let room = MAX_FILES - files.len();
        let nodes: Vec<_> = std::iter::from_fn(|| theirs.nodes.pop_first()).take(room).collect();
        Some((self.epoch, uid, Request::Release { uid, files, nodes }))
    }

    /// A user's message was answered. Queues the next one, if there are more releases.
    fn sent(&mut self, epoch: u64, uid: u32) {
        if epoch != self.epoch {
            return;
        }
        let Some(theirs) = self.of.get_mut(&uid) else { return };
        if theirs.files.is_empty() && theirs.nodes.is_empty() {
            self.of.remove(&uid);
        } else {
            self.next.push_back(uid);
        }
    }
}

impl Releases {
    /// Closes an open file.
    pub fn close(&self, epoch: u64, uid: u32, file: u64) {
        self.add(epoch, uid, |theirs| theirs.files.push(file));
    }

    /// Forgets a file `times` times.
    pub fn forget(&self, epoch: u64, uid: u32, (node, times): (u64, u64)) {
        self.add(epoch, uid, |theirs| *theirs.nodes.entry(node).or_default() += times);
    }

    fn add(&self, epoch: u64, uid: u32, add: impl FnOnce(&mut UserReleases)) {
        let mut state = lock(&self.state);
        let Some(theirs) = state.of(epoch, uid) else { return };
        add(theirs);
        if !std::mem::replace(&mut theirs.is_queued, true) {
            state.next.push_back(uid);
            drop(state);
            self.there.notify_one();
        }
    }

    /// Wakes the threads, so that they check whether the client has ended.
    pub fn wake(&self) {
        drop(lock(&self.state));
        self.there.notify_all();
    }

    /// Waits for a message. May return `None` without one.
    fn wait(&self, is_over: impl Fn() -> bool) -> Option<(u64, u32, Request)> {
        let mut state = lock(&self.state);
        if state.next.is_empty() && !is_over() {
            state.idle += 1;
            state = self.there.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
        state.take()
    }

    /// Counts a further thread, if none waits for the next message.
    fn may_start(&self) -> bool {
        let mut state = lock(&self.state);
        let may = state.idle == 0 && state.threads < MAX_THREADS;
        state.threads += usize::from(may);
        may
    }
}

impl Client {
    /// Sends releases until the client ends. While this thread waits for an answer, another one waits for the next
    /// message. It may be started from here, because this thread never acts as a user.
    pub(super) fn send_releases(self: &Arc<Self>) {
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        while !self.is_over() {
            let Some((epoch, uid, request)) = self.releases.wait(|| self.is_over()) else { continue };
            if self.releases.may_start() {
                let this = self.clone();
                let thread = std::thread::Builder::new().name("target releases".into());
                // On error the other threads do the work.
                threads.extend(thread.spawn(move || this.send_releases()));
            }
            self.send_until_answered(epoch, &request);
            lock(&self.releases.state).sent(epoch, uid);
        }
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Sends a request until it is answered or the session ends.
    fn send_until_answered(&self, epoch: u64, request: &Request) {
        let Ok(body) = pack(request) else { return };
        let until = Instant::now() + NO_TIMEOUT;
        let timed_out = RequestError::Errno(Errno::TIMEDOUT);
        let Ok(id) = self.number(epoch, false, until) else { return };
        // The target may be gone for longer than other requests wait.
        while self.until_answered((epoch, id, false), (&body, false), None, None, until) == Err(timed_out)
            && !self.is_over()
        {
            self.wait(POLL_INTERVAL);
        }
        self.ended(epoch, id, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_collected_and_sent_once() {
        let releases = Releases::default();
        // Many files are forgotten repeatedly while the target does not answer.
        for turn in 0..3 {
            for node in 0..5000 {
                releases.forget(1, 1000 + (node % 2) as u32, (node, turn + 1));
            }
        }
        for file in 0..5000 {
            releases.close(1, 1000, file);
        }
        releases.close(1, 7, 9999);
        let (mut nodes, mut files, mut users, mut count) = (BTreeMap::new(), Vec::new(), Vec::new(), 0);
        let take = || lock(&releases.state).take();
        while let Some((epoch, uid, Request::Release { uid: of, files: closed, nodes: forgotten })) = take() {
            assert!(epoch == 1 && uid == of && closed.len() + forgotten.len() <= MAX_FILES);
            assert!(pack(&Request::Release { uid, files: closed.clone(), nodes: forgotten.clone() }).is_ok());
            users.push(uid);
            files.extend(closed);
            nodes.extend(forgotten);
            count += 1;
            lock(&releases.state).sent(epoch, uid);
        }
        assert!(count <= 8 && users[..3] == [1000, 1001, 7], "{users:?}");
        files.sort_unstable();
        assert!(files == (0..5000).chain([9999]).collect::<Vec<_>>());
        assert!(nodes == (0..5000).map(|node| (node, 6)).collect());
        assert!(lock(&releases.state).of.is_empty());
    }

    #[test]
    fn each_user_has_one_message_in_flight() {
        let releases = Releases::default();
        releases.close(1, 1000, 1);
        let taken = lock(&releases.state).take();
        assert!(taken.is_some());
        releases.close(1, 1000, 2);
        releases.close(1, 1001, 3);
        assert!(matches!(lock(&releases.state).take(), Some((1, 1001, _))));
        assert!(lock(&releases.state).take().is_none());
        lock(&releases.state).sent(1, 1000);
        assert!(matches!(lock(&releases.state).take(), Some((1, 1000, _))));
        releases.close(2, 1000, 1);
        releases.forget(1, 1000, (8, 1));
        lock(&releases.state).sent(1, 1000);
        let next = lock(&releases.state).take();
        assert!(
            matches!(next, Some((2, 1000, Request::Release { files, nodes, .. })) if files == [1] && nodes.is_empty())
        );
        assert!(lock(&releases.state).take().is_none());
    }
}
