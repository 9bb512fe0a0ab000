//! A client's state across its connections: its known and open files, and answers that may have been lost in transit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::connection::Connection;
use crate::buffers::SessionUser;
use crate::lock;
use crate::shares::Shares;
use crate::tree::{Folder, Local, Tree, TreeResult};
use crate::wire::{MountId, ROOT, Reply, Request, SessionId};

/// The largest distance between the oldest outstanding request of a client and the newest.
pub(crate) const SPAN: u64 = 4096;
/// Files that wait to be released because their client cancelled a request. A correct client has fewer. Further ones
/// are released at once, however long that takes.
const MAX_UNHEARD: usize = 1 << 16;
/// How often running requests are checked when a session ends.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// An open file of a client.
#[derive(Clone)]
pub(crate) struct SessionFile {
    pub file: Arc<Local>,
    /// The user who opened it.
    pub uid: u32,
    /// Whether a write waits for the disk.
    pub syncs: bool,
}

/// The state of a client.
pub(crate) struct ClientSession {
    pub id: SessionId,
    /// The client's mount.
    pub mount: MountId,
    /// The session's number in queues and budgets.
    pub number: u32,
    pub folder: Folder,
    files: Mutex<HashMap<u64, SessionFile>>,
    /// Open files of each user of the client.
    of_users: Shares,
    /// Descriptors for them, shared with other sessions.
    shares: Arc<Shares>,
    most_files: usize,
    next_file: AtomicU64,
    answers: Mutex<Answers>,
    unheard: Mutex<Unheard>,
    /// The number of its connections.
    connections: AtomicUsize,
    /// The connections; `None` once the session has ended.
    all: Mutex<Option<Vec<Weak<Connection>>>>,
    /// Since when it has none.
    disconnected_since: Mutex<Instant>,
}

/// Requests that must not be executed twice, and their answers.
#[derive(Default)]
struct Answers {
    /// Below this number all requests are answered and the client knows it, except for those in `late`.
    done: u64,
    late: BTreeSet<u64>,
    /// The limit of the last report, below which `late` is complete.
    reported_below: u64,
    known: HashMap<u64, RequestState>,
}

impl Answers {
    /// Whether the client does not wait for a request any more.
    fn is_over(&self, id: u64) -> bool {
        id < self.done && !self.late.contains(&id)
    }

    /// Records that all requests below `done` are answered.
    fn advance(&mut self, done: u64) {
        self.done = self.done.max(done);
        let mut known = std::mem::take(&mut self.known);
        known.retain(|id, state| !self.is_over(*id) || matches!(state, RequestState::Running(..)));
        self.known = known;
    }
}

enum RequestState {
    /// Queued or running.
    Running(RunningRequest),
    /// Answered, with what the client has to release.
    Answered(Reply, Acquired),
}

struct RunningRequest {
    /// The open connections that have made the request, the latest last.
    requesters: Vec<Arc<Connection>>,
    /// Whether it changes something.
    changes: bool,
    /// Whether it is running.
    is_started: bool,
}

impl RunningRequest {
    fn add_requester(&mut self, connection: &Arc<Connection>) {
        self.requesters.retain(|one| !one.has_ended() && !Arc::ptr_eq(one, connection));
        self.requesters.push(connection.clone());
    }
}

/// What to do with a request whose turn has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begin {
    /// Execute it.
    Do,
    /// The client has cancelled it: it must not be executed.
    Cancelled,
    /// All connections that made it have ended. A client that is alive repeats it.
    Abandoned,
}

/// The open file and the node in an answer, which the client has to release.
type Acquired = (Option<u64>, Option<u64>);

/// Files in answers to cancelled requests. A thread that may block releases them.
#[derive(Default)]
struct Unheard {
    files: Vec<u64>,
    /// Node numbers, and how often each is forgotten.
    nodes: BTreeMap<u64, u64>,
    /// Whether a release is queued.
    is_queued: bool,
}

/// What to do with a request that has arrived.
pub(crate) enum Admit {
    /// Execute it.
    Do,
    /// Repeat this answer.
    Answer(Reply),
    /// Nothing: it is queued or running, and answered when it ends.
    Wait,
    /// Refuse it: a change that the client has cancelled may still be executed.
    Busy,
    /// Answer that it is cancelled: the client does not wait for it any more.
    Drop,
    /// Close the connection: the request violates the protocol.
    Violation(&'static str),
}

impl ClientSession {
    pub fn new(
        (id, mount): (SessionId, MountId),
        number: u32,
        folder: Folder,
        (shares, most_files): (Arc<Shares>, usize),
    ) -> Self {
        Self {
            id,
            mount,
            number,
            folder,
            files: Mutex::default(),
            of_users: Shares::new(u64::MAX),
            shares,
            most_files,
            next_file: AtomicU64::new(1),
            answers: Mutex::default(),
            unheard: Mutex::default(),
            connections: AtomicUsize::new(0),
            all: Mutex::new(Some(Vec::new())),
            disconnected_since: Mutex::new(Instant::now()),
        }
    }

    pub fn connection_opened(&self, connection: &Arc<Connection>) {
        self.connections.fetch_add(1, Ordering::AcqRel);
        match &mut *lock(&self.all) {
            Some(all) => {
                all.retain(|one| one.strong_count() > 0);
                all.push(Arc::downgrade(connection));
            }
            None => connection.end(),
        }
    }

    /// Ends all connections. Queued requests are not executed any more, and running ones are waited for. Returns
    /// whether all have ended in time.
    pub fn end(&self, until: Instant) -> bool {
        let all = lock(&self.all).take().unwrap_or_default();
        all.iter().filter_map(Weak::upgrade).for_each(|connection| connection.end());
        // From now on, no further request is started.
        let runs = |state: &RequestState| matches!(state, RequestState::Running(one) if one.is_started);
        while lock(&self.answers).known.values().any(runs) {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(IDLE_POLL_INTERVAL);
        }
        true
    }

    pub fn connection_closed(&self) {
        *lock(&self.disconnected_since) = Instant::now();
        self.connections.fetch_sub(1, Ordering::AcqRel);
    }

    /// How long it has had no connection; `None` while it has one.
    pub fn gone_for(&self) -> Option<Duration> {
        (self.connections.load(Ordering::Acquire) == 0).then(|| lock(&self.disconnected_since).elapsed())
    }

    /// Decides about a request that has arrived.
    pub fn admit(&self, id: u64, done: u64, request: &Request, from: &Arc<Connection>) -> Admit {
        let mut answers = lock(&self.answers);
        if done > answers.done {
            answers.advance(done);
        }
        if answers.is_over(id) {
            return Admit::Drop;
        }
        if id.saturating_sub(answers.done) >= SPAN {
            return Admit::Violation("the number of a request is too far ahead");
        }
        match answers.known.get_mut(&id) {
            Some(RequestState::Running(one)) => {
                one.add_requester(from);
                return Admit::Wait;
            }
            Some(RequestState::Answered(reply, _)) => return Admit::Answer(reply.clone()),
            None if request.is_read_only() => return Admit::Do,
            None => {}
        }
        let abandoned = |(id, state): (&u64, &RequestState)| {
            let may_happen = matches!(state, RequestState::Running(one) if one.changes && one.is_started);
            may_happen && answers.is_over(*id)
        };
        if request.changes() && answers.known.iter().any(abandoned) {
            // A cancelled change may still be executed, and must not come after this one.
            return Admit::Busy;
        }
        let (requesters, changes) = (vec![from.clone()], request.changes());
        answers
            .known
            .insert(id, RequestState::Running(RunningRequest { requesters, changes, is_started: false }));
        Admit::Do
    }

    /// Records which requests below a number the client still waits for. Files in answers that it has cancelled are to
    /// be released.
    ///
    /// # Errors
    /// `EINVAL` for more requests than it may wait for.
    pub fn outstanding(&self, below: u64, ids: &[u64], unheard: &[u64]) -> TreeResult<()> {
        let mut all_acquired = Vec::new();
        if ids.len() as u64 > SPAN {
            return Err(Errno::INVAL);
        }
        let mut answers = lock(&self.answers);
        // A report that arrives after a later one is outdated.
        if below > answers.reported_below {
            // Answered requests stay answered: the report may have been written before the answer arrived.
            let late = ids.iter().copied().filter(|id| !answers.is_over(*id)).collect();
            (answers.late, answers.reported_below) = (late, below);
            for id in unheard {
                // Files of a running request are released when it ends.
                if let Some(RequestState::Answered(_, acquired)) = answers.known.get_mut(id) {
                    all_acquired.push(std::mem::take(acquired));
                }
            }
            answers.advance(below);
        }
        drop(answers);
        all_acquired.into_iter().for_each(|acquired| self.defer_release(acquired));
        Ok(())
    }

    /// Whether a client has cancelled a request.
    #[cfg(test)]
    pub fn has_cancelled(&self, id: u64) -> bool {
        lock(&self.answers).is_over(id)
    }

    /// Starts a request whose turn has come, unless it was cancelled. If the client cancels it later, it may still be
    /// executed.
    pub fn begin(&self, id: u64, request: &Request, by: &Connection) -> Begin {
        let mut answers = lock(&self.answers);
        if answers.is_over(id) {
            return Begin::Cancelled;
        }
        let running = match answers.known.get_mut(&id) {
            Some(RequestState::Running(one)) => Some(one),
            _ => None,
        };
        let is_asked_for = match &running {
            Some(one) => one.requesters.iter().any(|one| !one.has_ended()),
            // Requests without side effects are not recorded, and executed as often as they arrive.
            None => request.is_read_only() && !by.has_ended(),
        };
        match running {
            Some(one) if is_asked_for => one.is_started = true,
            Some(_) => drop(answers.known.remove(&id)),
            None => {}
        }
        if is_asked_for { Begin::Do } else { Begin::Abandoned }
    }

    /// Records an answer. Returns the connections that made the request, and whether they are to get the answer. If the
    /// client has cancelled the request they are not, and the files in the answer are released. Returns `None` if the
    /// request is not recorded.
    pub fn finish(&self, id: u64, request: &Request, reply: &Reply) -> Option<(Vec<Arc<Connection>>, bool)> {
        let acquired = acquired(request, reply);
        let mut answers = lock(&self.answers);
        let Some(RequestState::Running(RunningRequest { requesters, .. })) = answers.known.remove(&id) else {
            return None;
        };
        let is_wanted = !answers.is_over(id);
        if is_wanted {
            answers.known.insert(id, RequestState::Answered(reply.clone(), acquired));
        } else {
            drop(answers);
            self.defer_release(acquired);
        }
        Some((requesters, is_wanted))
    }

    /// Queues files of an answer for release.
    fn defer_release(&self, (file, node): Acquired) {
        if (file, node) == (None, None) {
            return;
        }
        let mut unheard = lock(&self.unheard);
        if unheard.files.len() + unheard.nodes.len() >= MAX_UNHEARD {
            drop(unheard);
            return self.release(file, node.map(|node| (node, 1)));
        }
        unheard.files.extend(file);
        node.into_iter().for_each(|node| *unheard.nodes.entry(node).or_default() += 1);
    }

    /// Whether [`Self::release_unheard`] should be queued; true once until that was done. Threads that may act as users
    /// cannot start threads, so the connection's thread does this.
    pub fn wants_release(&self) -> bool {
        let mut unheard = lock(&self.unheard);
        let is_empty = unheard.files.is_empty() && unheard.nodes.is_empty();
        !is_empty && !std::mem::replace(&mut unheard.is_queued, true)
    }

    /// Releases the files of cancelled answers.
    pub fn release_unheard(&self) {
        let Unheard { files, nodes, .. } = std::mem::take(&mut *lock(&self.unheard));
        self.release(files, nodes);
    }

    /// Closes and forgets files.
    pub fn release(&self, files: impl IntoIterator<Item = u64>, nodes: impl IntoIterator<Item = (u64, u64)>) {
        for file in files {
            // The client may not have this file.
            let _ = self.close_file(file);
        }
        nodes.into_iter().for_each(|(node, times)| drop(self.folder.forget(node, times)));
    }

    /// Records an answer to a request that is usually executed again.
    pub fn keep(&self, id: u64, reply: &Reply) {
        let mut answers = lock(&self.answers);
        if !answers.is_over(id) {
            answers.known.insert(id, RequestState::Answered(reply.clone(), Acquired::default()));
        }
    }

    pub fn file(&self, number: u64) -> TreeResult<Arc<Local>> {
        self.opened(number).map(|open| open.file)
    }

    /// An open file, with its mode.
    pub fn opened(&self, number: u64) -> TreeResult<SessionFile> {
        lock(&self.files).get(&number).cloned().ok_or(Errno::BADF)
    }

    /// Adds an open file. A user may have as many as remain for the client's other users; root may have all that
    /// remain. Files of a lost session are reopened (`again`) without that limit.
    ///
    /// # Errors
    /// `EMFILE` if the user has too many, or this or other clients have.
    pub fn add_file(&self, file: SessionFile, again: bool) -> TreeResult<u64> {
        let mut files = lock(&self.files);
        let left = self.most_files.saturating_sub(files.len()) as u64;
        let left = left.min(self.shares.room(self.number));
        let theirs = self.of_users.taken_by(file.uid);
        let may_have = if again || file.uid == 0 { left } else { left.saturating_sub(theirs) };
        if may_have == 0 || !self.shares.take(self.number, 1) {
            return Err(Errno::MFILE);
        }
        let number = self.next_file.fetch_add(1, Ordering::Relaxed);
        self.of_users.count(file.uid, 1);
        files.insert(number, file);
        Ok(number)
    }

    /// The user for whom a request counts.
    pub fn user(&self, request: &Request) -> SessionUser {
        let uid = match request {
            Request::Lookup { by, .. }
            | Request::Change { by, .. }
            | Request::Make { by, .. }
            | Request::Create { by, .. }
            | Request::Remove { by, .. }
            | Request::Rename { by, .. }
            | Request::Link { by, .. }
            | Request::List { by, .. }
            | Request::Xattr { by, .. }
            | Request::Open { by, .. } => by.uid,
            Request::Read { file, .. }
            | Request::Write { file, .. }
            | Request::Append { file, .. }
            | Request::Sync { file, .. }
            | Request::DropSetId { file }
            | Request::Allocate { file, .. }
            | Request::Seek { file, .. } => self.opened(*file).map_or(0, |open| open.uid),
            Request::Release { uid, .. }
            | Request::Attr { uid, .. }
            | Request::ReadLink { uid, .. }
            | Request::SyncFolder { uid, .. }
            | Request::Space { uid } => *uid,
            Request::Outstanding { .. } | Request::Succeed { .. } => 0,
        };
        (self.number, uid)
    }

    pub fn close_file(&self, number: u64) -> TreeResult<()> {
        let file = lock(&self.files).remove(&number).ok_or(Errno::BADF)?;
        self.of_users.put_back(file.uid, 1);
        self.shares.put_back(self.number, 1);
        Ok(())
    }
}

/// What a client has to release of an answer.
fn acquired(request: &Request, reply: &Reply) -> Acquired {
    let (file, node) = match reply {
        _ if !request.returns_files() => (None, None),
        Reply::Attr(attr) => (None, Some(attr.node)),
        Reply::Created { attr, file } => (Some(*file), Some(attr.node)),
        Reply::Opened { file, .. } => (Some(*file), None),
        _ => (None, None),
    };
    (file, node.filter(|node| *node != ROOT))
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        let files = std::mem::take(&mut *lock(&self.files));
        let count = files.len() as u64;
        // Close the files before they are returned to the budget.
        drop(files);
        self.shares.put_back(self.number, count);
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
