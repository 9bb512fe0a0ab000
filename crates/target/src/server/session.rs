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
    /// It is being done; who wants to know, and whether it changes something.
    Running(Arc<Connection>, bool),
    /// It was answered so, and the client has to release something of that.
    Over(Reply, Brought),
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
        // What is being done was written down before it was begun.
        let runs = |state: &RequestState| matches!(state, RequestState::Running(..));
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
            Some(RequestState::Running(who, _)) => {
                *who = from.clone();
                return Admit::Wait;
            }
            Some(RequestState::Over(reply, _)) => return Admit::Answer(reply.clone()),
            None if request.only_looks() => return Admit::Do,
            None => {}
        }
        let abandoned = |(id, state): (&u64, &RequestState)| {
            answers.is_over(*id) && matches!(state, RequestState::Running(_, true))
        };
        if request.changes() && answers.known.iter().any(abandoned) {
            // What its client gave up may still happen: nothing that comes after it may come before it.
            return Admit::Answer(Reply::Failed { errno: Errno::BUSY.raw_os_error() });
        }
        answers.known.insert(id, RequestState::Running(from.clone(), request.changes()));
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

    /// Whether a client has given up what waits for its turn: it must not happen any more.
    pub fn gave_up(&self, id: u64) -> bool {
        lock(&self.answers).is_over(id)
    }

    /// Forgets what came by a connection that has ended, and was not begun; whether nobody has asked for it again meanwhile.
    pub fn leave_aside(&self, id: u64, by: &Arc<Connection>) -> bool {
        let mut answers = lock(&self.answers);
        if matches!(answers.known.get(&id), Some(RequestState::Running(who, _)) if !Arc::ptr_eq(who, by)) {
            return false;
        }
        answers.known.remove(&id);
        true
    }

    /// Keeps an answer; gives who wants to know it, where that is written down. Where its client has given the request up, what the
    /// answer brings is to be released, and nobody is to know it.
    pub fn over(&self, id: u64, request: &Request, reply: &Reply) -> Option<(Arc<Connection>, bool)> {
        let brought = brought(request, reply);
        let mut answers = lock(&self.answers);
        let Some(RequestState::Running(who, _)) = answers.known.remove(&id) else { return None };
        let is_wanted = !answers.is_over(id);
        if is_wanted {
            answers.known.insert(id, RequestState::Over(reply.clone(), brought));
        } else {
            drop(answers);
            self.leave(brought);
        }
        Some((who, is_wanted))
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
        self.shares.put_back(self.number, lock(&self.files).len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::{TcpAcceptor, TcpConnector};
    use crate::transport::{Acceptor, Connector, Link};
    use crate::tree::FolderRules;
    use crate::wire::{Caller, OpenMode};

    const TEST_TIMEOUT: Duration = Duration::from_secs(30);

    fn link() -> (Box<dyn Link>, Box<dyn Link>) {
        let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
        let near = TcpConnector::new(&acceptor.local().unwrap().to_string())
            .unwrap()
            .connect(0, TEST_TIMEOUT)
            .unwrap();
        (acceptor.accept(TEST_TIMEOUT).unwrap().unwrap(), near)
    }

    fn session(shares: &Arc<Shares>, number: u32, most_files: usize) -> ClientSession {
        let folder = std::fs::File::open("/").unwrap().into();
        let folder = Folder::new(folder, FolderRules { for_others: true, most_open: 64 }).unwrap();
        ClientSession::new(([1; 16], [2; 16]), number, folder, (shares.clone(), most_files))
    }

    #[test]
    fn who_has_many_files_open_leaves_as_many_to_the_others_of_a_client() {
        let shares = Arc::new(Shares::new(64));
        let (this, other) = (session(&shares, 0, 1024), session(&shares, 1, 1024));
        let file = Arc::new(Local::new(std::fs::File::open("/dev/null").unwrap()));
        let open = |session: &ClientSession, uid, again| {
            session.add_file(SessionFile { file: file.clone(), uid, syncs: false }, again)
        };
        let many = |session: &ClientSession, uid| {
            std::iter::from_fn(|| open(session, uid, false).ok()).collect::<Vec<_>>()
        };
        // The client itself may have half of what there is.
        let first = many(&this, 1001);
        assert_eq!([first.len(), many(&this, 1002).len(), many(&this, 1003).len()], [16, 8, 4]);
        assert_eq!(open(&this, 1001, false).err(), Some(Errno::MFILE));
        // After a target's restart, they have what they had.
        assert!(open(&this, 1001, true).is_ok());
        assert_eq!(many(&other, 1001).len(), 9);
        for number in first {
            this.close_file(number).unwrap();
        }
        assert_eq!(many(&this, 1001).len(), 7);
        // Root may have the rest, and no more than that.
        assert!(!many(&this, 0).is_empty());
        assert_eq!(open(&this, 0, true).err(), Some(Errno::MFILE));
        drop((this, other));
        assert_eq!(shares.taken(), 0);
        // The same without other clients, up to the limit of each.
        let alone = session(&Arc::new(Shares::new(1 << 20)), 0, 16);
        assert_eq!([1001, 1002, 0].map(|uid| many(&alone, uid).len()), [8, 4, 4]);
    }

    #[test]
    fn what_a_killed_client_sent_is_left_aside_unless_it_was_asked_for_again() {
        let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
        let (links, _others): (Vec<_>, Vec<_>) = (0..2).map(|_| link()).unzip();
        let connections: Vec<_> = links
            .into_iter()
            .map(|link| Connection::new(link.into(), session.clone(), TEST_TIMEOUT))
            .collect();
        let [first, second] = &connections[..] else { unreachable!() };
        let request = Request::Write { file: 1, at: 0, len: 1, from: None };
        let admitted = |id, by| session.admit(id, 0, &request, by);
        assert!(matches!(admitted(0, first), Admit::Do));
        assert!(!first.has_ended());
        first.end();
        assert!(first.has_ended() && session.leave_aside(0, first));
        // Asked for again it is done, since it was not.
        assert!(matches!(admitted(0, second), Admit::Do));
        assert!(!session.leave_aside(0, first));
        // Asked for again before its turn came: its turn counts.
        assert!(matches!(admitted(1, first), Admit::Do));
        assert!(matches!(admitted(1, second), Admit::Wait));
        assert!(!session.leave_aside(1, first));
    }

    #[test]
    fn what_a_client_still_waits_for_is_not_forgotten_with_the_rest() {
        let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
        let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
        let write = Request::Write { file: 1, at: 0, len: 1, from: None };
        let admitted = |id, done| session.admit(id, done, &write, &connection);
        (0..10).for_each(|id| assert!(matches!(admitted(id, 0), Admit::Do)));
        (2..10).for_each(|id| drop(session.over(id, &write, &Reply::Done)));
        // The client has all answers but those to 0 and 1, which are being done, and to 2.
        session.outstanding(SPAN + 5, &[0, 1, 2], &[]).unwrap();
        assert!(matches!(admitted(0, 0), Admit::Wait) && matches!(admitted(2, 0), Admit::Answer(_)));
        assert!(matches!(admitted(3, 0), Admit::Drop) && !session.gave_up(1) && session.gave_up(3));
        assert_eq!(lock(&session.answers).known.len(), 3);
        assert!(matches!(admitted(2 * SPAN, SPAN), Admit::Do));
        assert!(matches!(admitted(2 * SPAN + 5, SPAN), Admit::Breach(_)));
        assert!(session.over(0, &write, &Reply::Done).is_some());
        assert!(matches!(admitted(0, 0), Admit::Answer(_)));
        // One that was overtaken by the next of its kind says nothing.
        session.outstanding(SPAN + 4, &[], &[]).unwrap();
        assert!(matches!(admitted(0, 0), Admit::Answer(_)));
        // It has given the other up: until that is over, nothing may come after it.
        session.outstanding(SPAN + 6, &[], &[]).unwrap();
        assert!(matches!(admitted(0, 0), Admit::Drop));
        let busy = Reply::Failed { errno: Errno::BUSY.raw_os_error() };
        assert!(matches!(admitted(2 * SPAN + 1, 0), Admit::Answer(reply) if reply == busy));
        drop(session.over(1, &write, &Reply::Done));
        assert!(matches!(admitted(2 * SPAN + 1, 0), Admit::Do));
        assert_eq!(session.outstanding(9, &vec![0; 5000], &[]).err(), Some(Errno::INVAL));
    }

    #[test]
    fn what_answers_brought_that_nobody_hears_is_released_together() {
        let session = Arc::new(session(&Arc::new(Shares::new(1 << 20)), 0, 1024));
        let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
        let name = crate::wire::Name::new(b"name").unwrap();
        let lookup = Request::Lookup { parent: ROOT, name, by: Caller::ROOT };
        let access = OpenMode::default();
        let open = Request::Open { node: ROOT, access, again: false, by: Caller::ROOT };
        let attr = session.folder.attr(ROOT, 0).unwrap();
        let file = Arc::new(Local::new(std::fs::File::open("/dev/null").unwrap()));
        let give_up = |id, request: &Request, reply: &Reply| {
            assert!(matches!(session.admit(id, 0, request, &connection), Admit::Do));
            let over = || session.over(id, request, reply).unwrap().1;
            // Some are answered before their client says so, the others after that.
            let was_wanted = id % 4 < 2 && over();
            session.outstanding(id + 1, &[], &[id]).unwrap();
            assert!(was_wanted || !over());
        };
        let mut calls = 0;
        for id in 0..10 {
            let file = SessionFile { file: file.clone(), uid: 0, syncs: false };
            let file = session.add_file(file, false).unwrap();
            give_up(2 * id, &open, &Reply::Opened { file });
            give_up(2 * id + 1, &lookup, &Reply::Attr(crate::wire::Attr { node: 7, ..attr.clone() }));
            calls += usize::from(session.wants_release());
        }
        // Who answers closes nothing, since that may take long.
        let nodes = lock(&session.unheard).nodes.clone();
        assert_eq!((calls, lock(&session.files).len(), nodes), (1, 10, BTreeMap::from([(7, 10)])));
        session.release_unheard();
        assert!(lock(&session.files).is_empty() && !session.wants_release());
        // However fast that goes on, no more than so much waits.
        for id in 20..MOST_UNHEARD as u64 + 30 {
            give_up(id, &lookup, &Reply::Attr(crate::wire::Attr { node: id, ..attr.clone() }));
        }
        assert!(session.wants_release() && !session.wants_release());
        assert_eq!(lock(&session.unheard).nodes.len(), MOST_UNHEARD);
    }

    #[test]
    fn a_list_that_comes_late_brings_back_nothing_that_is_over() {
        let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
        let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
        let write = Request::Write { file: 1, at: 0, len: 1, from: None };
        let admitted = |id, done| session.admit(id, done, &write, &connection);
        (0..6).for_each(|id| assert!(matches!(admitted(id, 0), Admit::Do)));
        (0..6).for_each(|id| drop(session.over(id, &write, &Reply::Done)));
        // The client got the answer to 3 after it had written this, and says so before this arrives.
        assert!(matches!(admitted(7, 6), Admit::Do));
        session.outstanding(5, &[3], &[]).unwrap();
        // What was sent again over another connection may still come by the first.
        assert!(matches!(admitted(3, 0), Admit::Drop), "a write would be done twice");
    }

    #[test]
    fn a_read_that_did_not_reach_the_client_fails_when_it_is_asked_for_again() {
        let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
        let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
        let request = Request::Read { file: 1, at: 0, len: 1, into: None };
        assert!(matches!(session.admit(0, 0, &request, &connection), Admit::Do));
        assert!(matches!(session.admit(0, 0, &request, &connection), Admit::Do));
        let failed = Reply::Failed { errno: Errno::COMM.raw_os_error() };
        session.keep(0, &failed);
        let again = session.admit(0, 0, &request, &connection);
        assert!(matches!(again, Admit::Answer(reply) if format!("{reply:?}") == format!("{failed:?}")));
        // What the client waits for no more is not kept.
        assert!(matches!(session.admit(1, 1, &request, &connection), Admit::Do));
        session.keep(0, &failed);
        assert!(lock(&session.answers).known.is_empty());
    }
}
