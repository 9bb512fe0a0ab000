//! What a server keeps of a client across its connections: the files that it knows and has open, and answers that may have been
//! lost on their way.

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

/// Between the oldest request that a client waits for and the newest lie at most so many.
pub(crate) const SPAN: u64 = 4096;
/// So many files at most wait to be released because their client gave up a request. An honest one has fewer. Further ones are
/// released at once, however long that takes.
const MOST_UNHEARD: usize = 1 << 16;
/// How often it is looked whether what was begun is over.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// An open file of a client.
#[derive(Clone)]
pub(crate) struct SessionFile {
    pub file: Arc<Local>,
    /// Who opened it.
    pub uid: u32,
    /// Whether a write waits for the disk.
    pub syncs: bool,
}

/// A client.
pub(crate) struct ClientSession {
    pub id: SessionId,
    /// Whose it is.
    pub mount: MountId,
    /// Its turn in the queue.
    pub number: u32,
    pub folder: Folder,
    files: Mutex<HashMap<u64, SessionFile>>,
    /// How many of them each of the client's users has.
    of_users: Shares,
    /// Descriptors for them, which other sessions want too.
    shares: Arc<Shares>,
    most_files: usize,
    next_file: AtomicU64,
    answers: Mutex<Answers>,
    unheard: Mutex<Unheard>,
    /// Connections that it has.
    connections: AtomicUsize,
    /// The same; none where no more are to come.
    all: Mutex<Option<Vec<Weak<Connection>>>>,
    /// Since when it has none.
    left: Mutex<Instant>,
}

/// What is known of requests that are not to be done twice.
#[derive(Default)]
struct Answers {
    /// Everything below has been answered, and the client knows it, but for those that it still waits for.
    done: u64,
    late: BTreeSet<u64>,
    /// Below which number these are all.
    told: u64,
    known: HashMap<u64, RequestState>,
}

impl Answers {
    /// Whether the client does not wait for a request any more.
    fn is_over(&self, id: u64) -> bool {
        id < self.done && !self.late.contains(&id)
    }

    /// Takes note that everything below has been answered.
    fn advance(&mut self, done: u64) {
        self.done = self.done.max(done);
        let mut known = std::mem::take(&mut self.known);
        known.retain(|id, state| !self.is_over(*id) || matches!(state, RequestState::Running(..)));
        self.known = known;
    }
}

enum RequestState {
    /// It waits for its turn, or is being done.
    Running(RunningRequest),
    /// It was answered so, and the client has to release something of that.
    Over(Reply, Brought),
}

struct RunningRequest {
    /// By which connections it was asked for, of those that have not ended.
    askers: Vec<Arc<Connection>>,
    /// Whether it changes something.
    changes: bool,
    /// Whether its turn has come.
    is_begun: bool,
}

impl RunningRequest {
    fn asked_by(&mut self, connection: &Arc<Connection>) {
        self.askers.retain(|one| !one.has_ended() && !Arc::ptr_eq(one, connection));
        self.askers.push(connection.clone());
    }
}

/// What is to become of a request whose turn has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begin {
    /// It is done.
    Do,
    /// Its client has given it up: it must not happen any more.
    GivenUp,
    /// All connections by which it came have ended: a client that lives asks again.
    Left,
}

/// Numbers of an answer that have to be released: of an open file, and of a file.
type Brought = (Option<u64>, Option<u64>);

/// What answers brought that their client has given up. A thread releases it that may wait.
#[derive(Default)]
struct Unheard {
    files: Vec<u64>,
    /// Numbers, and how often each is forgotten.
    nodes: BTreeMap<u64, u64>,
    /// Whether a thread is about to come for it.
    is_queued: bool,
}

/// What is to become of a request.
pub(crate) enum Admit {
    /// It is done.
    Do,
    /// It is answered so.
    Answer(Reply),
    /// It is being done already, and answered when that ends.
    Wait,
    /// It changes something, and a change that the client has given up may still happen.
    Busy,
    /// It was answered long ago.
    Drop,
    /// It breaks the rules.
    Breach(&'static str),
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
            left: Mutex::new(Instant::now()),
        }
    }

    pub fn joined(&self, connection: &Arc<Connection>) {
        self.connections.fetch_add(1, Ordering::AcqRel);
        match &mut *lock(&self.all) {
            Some(all) => {
                all.retain(|one| one.strong_count() > 0);
                all.push(Arc::downgrade(connection));
            }
            None => connection.end(),
        }
    }

    /// Ends all connections, and what was asked for over them: what was not begun is not done any more, and what was begun is
    /// waited for. Whether all of it is over in time.
    pub fn end(&self, until: Instant) -> bool {
        let all = lock(&self.all).take().unwrap_or_default();
        all.iter().filter_map(Weak::upgrade).for_each(|connection| connection.end());
        // What is not begun by now never is.
        let runs = |state: &RequestState| matches!(state, RequestState::Running(one) if one.is_begun);
        while lock(&self.answers).known.values().any(runs) {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(IDLE_POLL_INTERVAL);
        }
        true
    }

    pub fn parted(&self) {
        *lock(&self.left) = Instant::now();
        self.connections.fetch_sub(1, Ordering::AcqRel);
    }

    /// How long it has had no connection; none where it has one.
    pub fn gone_for(&self) -> Option<Duration> {
        (self.connections.load(Ordering::Acquire) == 0).then(|| lock(&self.left).elapsed())
    }

    /// Decides about a request that came in.
    pub fn admit(&self, id: u64, done: u64, request: &Request, from: &Arc<Connection>) -> Admit {
        let mut answers = lock(&self.answers);
        if done > answers.done {
            answers.advance(done);
        }
        if answers.is_over(id) {
            return Admit::Drop;
        }
        if id.saturating_sub(answers.done) >= SPAN {
            return Admit::Breach("a request whose number is too far ahead");
        }
        match answers.known.get_mut(&id) {
            Some(RequestState::Running(one)) => {
                one.asked_by(from);
                return Admit::Wait;
            }
            Some(RequestState::Over(reply, _)) => return Admit::Answer(reply.clone()),
            None if request.only_looks() => return Admit::Do,
            None => {}
        }
        let abandoned = |(id, state): (&u64, &RequestState)| {
            let may_happen = matches!(state, RequestState::Running(one) if one.changes && one.is_begun);
            may_happen && answers.is_over(*id)
        };
        if request.changes() && answers.known.iter().any(abandoned) {
            // What its client gave up may still happen: nothing that comes after it may come before it.
            return Admit::Busy;
        }
        let (askers, changes) = (vec![from.clone()], request.changes());
        answers.known.insert(id, RequestState::Running(RunningRequest { askers, changes, is_begun: false }));
        Admit::Do
    }

    /// Takes note of what a client still waits for, below a number. What the answers brought that it does not hear is to be released.
    ///
    /// # Errors
    /// `EINVAL` when that is more than it may wait for.
    pub fn outstanding(&self, below: u64, ids: &[u64], unheard: &[u64]) -> TreeResult<()> {
        let mut all_brought = Vec::new();
        if ids.len() as u64 > SPAN {
            return Err(Errno::INVAL);
        }
        let mut answers = lock(&self.answers);
        // What arrives behind the next of its kind says less than that.
        if below > answers.told {
            // What is over by now stays so: the list may have been written before its answer came.
            let late = ids.iter().copied().filter(|id| !answers.is_over(*id)).collect();
            (answers.late, answers.told) = (late, below);
            for id in unheard {
                // What is still being done is released when it is over.
                if let Some(RequestState::Over(_, brought)) = answers.known.get_mut(id) {
                    all_brought.push(std::mem::take(brought));
                }
            }
            answers.advance(below);
        }
        drop(answers);
        all_brought.into_iter().for_each(|brought| self.leave(brought));
        Ok(())
    }

    /// Whether a client has given a request up.
    #[cfg(test)]
    pub fn gave_up(&self, id: u64) -> bool {
        lock(&self.answers).is_over(id)
    }

    /// Decides about a request that came by a connection and whose turn has come. What is to be done is begun: what its client gives
    /// up from now on may still happen, and what it gave up before may not.
    pub fn begin(&self, id: u64, request: &Request, by: &Connection) -> Begin {
        let mut answers = lock(&self.answers);
        if answers.is_over(id) {
            return Begin::GivenUp;
        }
        let running = match answers.known.get_mut(&id) {
            Some(RequestState::Running(one)) => Some(one),
            _ => None,
        };
        let is_asked_for = match &running {
            Some(one) => one.askers.iter().any(|one| !one.has_ended()),
            // It is done as often as it comes.
            None => request.only_looks() && !by.has_ended(),
        };
        match running {
            Some(one) if is_asked_for => one.is_begun = true,
            Some(_) => drop(answers.known.remove(&id)),
            None => {}
        }
        if is_asked_for { Begin::Do } else { Begin::Left }
    }

    /// Keeps an answer; gives the connections that asked for it, where that is written down, and whether they are to know it. Where
    /// its client has given the request up they are not, and what the answer brings is to be released.
    pub fn over(&self, id: u64, request: &Request, reply: &Reply) -> Option<(Vec<Arc<Connection>>, bool)> {
        let brought = brought(request, reply);
        let mut answers = lock(&self.answers);
        let Some(RequestState::Running(RunningRequest { askers, .. })) = answers.known.remove(&id) else {
            return None;
        };
        let is_wanted = !answers.is_over(id);
        if is_wanted {
            answers.known.insert(id, RequestState::Over(reply.clone(), brought));
        } else {
            drop(answers);
            self.leave(brought);
        }
        Some((askers, is_wanted))
    }

    /// Leaves something to be released.
    fn leave(&self, (file, node): Brought) {
        if (file, node) == (None, None) {
            return;
        }
        let mut unheard = lock(&self.unheard);
        if unheard.files.len() + unheard.nodes.len() >= MOST_UNHEARD {
            drop(unheard);
            return self.release(file, node.map(|node| (node, 1)));
        }
        unheard.files.extend(file);
        node.into_iter().for_each(|node| *unheard.nodes.entry(node).or_default() += 1);
    }

    /// Whether [`Self::release_unheard`] is to be called, which it says once before that is done. Threads that may act as users start
    /// no others, so who leaves something does not see to that.
    pub fn wants_release(&self) -> bool {
        let mut unheard = lock(&self.unheard);
        let is_empty = unheard.files.is_empty() && unheard.nodes.is_empty();
        !is_empty && !std::mem::replace(&mut unheard.is_queued, true)
    }

    /// Releases what answers brought that the client does not hear.
    pub fn release_unheard(&self) {
        let Unheard { files, nodes, .. } = std::mem::take(&mut *lock(&self.unheard));
        self.release(files, nodes);
    }

    /// Closes and forgets files.
    pub fn release(&self, files: impl IntoIterator<Item = u64>, nodes: impl IntoIterator<Item = (u64, u64)>) {
        for file in files {
            // One that it does not have is not to be closed.
            let _ = self.close_file(file);
        }
        nodes.into_iter().for_each(|(node, times)| drop(self.folder.forget(node, times)));
    }

    /// Keeps an answer to what is usually done again when it is asked for again.
    pub fn keep(&self, id: u64, reply: &Reply) {
        let mut answers = lock(&self.answers);
        if !answers.is_over(id) {
            answers.known.insert(id, RequestState::Over(reply.clone(), Brought::default()));
        }
    }

    pub fn file(&self, number: u64) -> TreeResult<Arc<Local>> {
        self.opened(number).map(|open| open.file)
    }

    /// An open file, and how it was opened.
    pub fn opened(&self, number: u64) -> TreeResult<SessionFile> {
        lock(&self.files).get(&number).cloned().ok_or(Errno::BADF)
    }

    /// Adds an open file. A user may have as many as they leave to the client's other users; root may have all that is left.
    /// Files of a lost session are opened `again` without that limit.
    ///
    /// # Errors
    /// `EMFILE` where the user has that many, or this or other clients have too many.
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

    /// For whom a request counts.
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
fn brought(request: &Request, reply: &Reply) -> Brought {
    let (file, node) = match reply {
        _ if !request.brings() => (None, None),
        Reply::Attr(attr) => (None, Some(attr.node)),
        Reply::Created { attr, file } => (Some(*file), Some(attr.node)),
        Reply::Opened { file } => (Some(*file), None),
        _ => (None, None),
    };
    (file, node.filter(|node| *node != ROOT))
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        let files = std::mem::take(&mut *lock(&self.files));
        let count = files.len() as u64;
        // Closed before they count as closed.
        drop(files);
        self.shares.put_back(self.number, count);
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
