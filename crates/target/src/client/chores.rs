//! Requests that nobody waits for: files are closed or forgotten at the target.
//!
//! What comes while a user's last message is under way goes with their next. A file is in there once, however often it is known, and
//! stays until the target has been told: nothing is left out, and there is no more of it than what the target holds for this mount, which
//! is limited there. The target may take long to close a user's files; others' go on meanwhile.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Client, TICK, Trouble};
use crate::lock;
use crate::wire::{Request, pack};

/// Files in a message.
const MOST_TOLD: usize = 2048;
/// Threads at most besides the first: users whose messages are under way at once.
const MOST_THREADS: usize = 64;
/// A message is waited for as long as its session lasts: sent again under another number, it could be carried out twice.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// What is to be told for a user.
#[derive(Default)]
struct UserChores {
    files: Vec<u64>,
    /// Numbers, and how often each is forgotten.
    nodes: BTreeMap<u64, u64>,
    /// Whether a message of theirs is under way, or waits for a thread.
    is_queued: bool,
}

#[derive(Default)]
struct ChoresState {
    /// What was known in another epoch went with it.
    epoch: u64,
    of: HashMap<u32, UserChores>,
    /// Users whose message is to be sent next.
    next: VecDeque<u32>,
    threads: usize,
    idle: usize,
}

/// All of it.
#[derive(Default)]
pub(super) struct Chores {
    state: Mutex<ChoresState>,
    there: Condvar,
}

impl ChoresState {
    fn of(&mut self, epoch: u64, uid: u32) -> Option<&mut UserChores> {
        if epoch > self.epoch {
            (self.epoch, self.of) = (epoch, HashMap::new());
            self.next.clear();
        }
        (epoch == self.epoch).then(|| self.of.entry(uid).or_default())
    }

    /// The next message, and for whom it is.
    fn take(&mut self) -> Option<(u64, u32, Request)> {
        let uid = self.next.pop_front()?;
        let theirs = self.of.get_mut(&uid)?;
        let rest = theirs.files.len().saturating_sub(MOST_TOLD);
        let files = theirs.files.split_off(rest);
        let room = MOST_TOLD - files.len();
        let nodes: Vec<_> = std::iter::from_fn(|| theirs.nodes.pop_first()).take(room).collect();
        Some((self.epoch, uid, Request::Release { uid, files, nodes }))
    }

    /// A user's message was told. Whether there is more to tell for them.
    fn told(&mut self, epoch: u64, uid: u32) {
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

impl Chores {
    /// An open file is closed.
    pub fn close(&self, epoch: u64, uid: u32, file: u64) {
        self.add(epoch, uid, |theirs| theirs.files.push(file));
    }

    /// A file is forgotten so many times.
    pub fn forget(&self, epoch: u64, uid: u32, (node, times): (u64, u64)) {
        self.add(epoch, uid, |theirs| *theirs.nodes.entry(node).or_default() += times);
    }

    fn add(&self, epoch: u64, uid: u32, add: impl FnOnce(&mut UserChores)) {
        let mut state = lock(&self.state);
        let Some(theirs) = state.of(epoch, uid) else { return };
        add(theirs);
        if !std::mem::replace(&mut theirs.is_queued, true) {
            state.next.push_back(uid);
            drop(state);
            self.there.notify_one();
        }
    }

    /// Has those who wait for messages look whether it is over.
    pub fn wake(&self) {
        drop(lock(&self.state));
        self.there.notify_all();
    }

    /// Waits for a message; there may be none yet.
    fn wait(&self, is_over: impl Fn() -> bool) -> Option<(u64, u32, Request)> {
        let mut state = lock(&self.state);
        if state.next.is_empty() && !is_over() {
            state.idle += 1;
            state = self.there.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
        state.take()
    }

    /// Counts one more thread, where none waits for the next message.
    fn may_start(&self) -> bool {
        let mut state = lock(&self.state);
        let may = state.idle == 0 && state.threads < MOST_THREADS;
        state.threads += usize::from(may);
        may
    }
}

impl Client {
    /// Tells what nobody waits for, until it is over. While this waits for an answer, another thread waits for the next message; it may
    /// be started here, as this one never acts as a user.
    pub(super) fn tell_chores(self: &Arc<Self>) {
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        while !self.is_over() {
            let Some((epoch, uid, request)) = self.chores.wait(|| self.is_over()) else { continue };
            if self.chores.may_start() {
                let this = self.clone();
                let thread = std::thread::Builder::new().name("target chores".into());
                // Without it, the others do the work.
                threads.extend(thread.spawn(move || this.tell_chores()));
            }
            self.tell(epoch, &request);
            lock(&self.chores.state).told(epoch, uid);
        }
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Tells something for as long as the session lasts.
    fn tell(&self, epoch: u64, request: &Request) {
        let Ok(body) = pack(request) else { return };
        let until = Instant::now() + FOREVER;
        let timed_out = Trouble::Errno(Errno::TIMEDOUT);
        let Ok(id) = self.number(epoch, false, until) else { return };
        // The target may be gone for longer than others wait for it.
        while self.until_answered((epoch, id, false), (&body, false), None, None, until) == Err(timed_out)
            && !self.is_over()
        {
            self.wait(TICK);
        }
        self.ended(epoch, id, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_told_once_and_as_much_as_was_known() {
        let chores = Chores::default();
        // Many are forgotten again and again while the target does not listen.
        for turn in 0..3 {
            for node in 0..5000 {
                chores.forget(1, 1000 + (node % 2) as u32, (node, turn + 1));
            }
        }
        for file in 0..5000 {
            chores.close(1, 1000, file);
        }
        chores.close(1, 7, 9999);
        let (mut nodes, mut files, mut users, mut count) = (BTreeMap::new(), Vec::new(), Vec::new(), 0);
        let take = || lock(&chores.state).take();
        while let Some((epoch, uid, Request::Release { uid: of, files: closed, nodes: forgotten })) = take() {
            assert!(epoch == 1 && uid == of && closed.len() + forgotten.len() <= MOST_TOLD);
            assert!(pack(&Request::Release { uid, files: closed.clone(), nodes: forgotten.clone() }).is_ok());
            users.push(uid);
            files.extend(closed);
            nodes.extend(forgotten);
            count += 1;
            lock(&chores.state).told(epoch, uid);
        }
        assert!(count <= 8 && users[..3] == [1000, 1001, 7], "{users:?}");
        files.sort_unstable();
        assert!(files == (0..5000).chain([9999]).collect::<Vec<_>>());
        assert!(nodes == (0..5000).map(|node| (node, 6)).collect());
        assert!(lock(&chores.state).of.is_empty());
    }

    #[test]
    fn a_user_has_one_message_under_way_and_a_lost_session_none() {
        let chores = Chores::default();
        chores.close(1, 1000, 1);
        let taken = lock(&chores.state).take();
        assert!(taken.is_some());
        chores.close(1, 1000, 2);
        chores.close(1, 1001, 3);
        assert!(matches!(lock(&chores.state).take(), Some((1, 1001, _))));
        assert!(lock(&chores.state).take().is_none());
        lock(&chores.state).told(1, 1000);
        assert!(matches!(lock(&chores.state).take(), Some((1, 1000, _))));
        chores.close(2, 1000, 1);
        chores.forget(1, 1000, (8, 1));
        lock(&chores.state).told(1, 1000);
        let next = lock(&chores.state).take();
        assert!(
            matches!(next, Some((2, 1000, Request::Release { files, nodes, .. })) if files == [1] && nodes.is_empty())
        );
        assert!(lock(&chores.state).take().is_none());
    }
}
