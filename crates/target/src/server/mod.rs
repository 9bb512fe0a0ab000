//! The storage service: serves a folder to clients that have the key.
//!
//! ```text
//! connection  reads requests of one connection, and sends answers
//! session     a client's state across connections
//! perform     executes requests
//! ```
//! A client with the key names the user of each request, and may name any user. A server that runs as root acts as that
//! user, and its kernel checks permissions. Any other server does everything as its own user, and only the client's
//! kernel separates the client's users. A client reaches nothing outside of the folder, whatever it sends, and creates
//! neither devices nor set-id files.

#[cfg(test)]
mod cancelled_tests;
mod connection;
mod perform;
mod session;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::file_writes::WriteRoutes;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::auth::{Key, random};
use crate::buffers::{Buffers, SessionUser};
use crate::shares::{Shares, TakenShare};
use crate::transport::{Acceptor, Link};
use crate::tree::{Folder, FolderRules, WrittenSum, mapping_budget, written_sums};
use crate::turns::{Next, Queue};
use crate::wire::{Join, MAX_BODY, MountId, OpenMode, Request, SessionId, Welcome};
use crate::{Error, Result, lock};
use connection::Connection;
use perform::PendingRequest;
use session::ClientSession;

/// How often waiting threads check whether the server is to end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Threads of a queue. The work of one user of a session holds half of them.
const THREADS: u64 = 64;
/// Further threads, for users who find the others taken, and how many each gets.
const RESERVE: (u64, u64) = (192, 4);
const MAX_THREADS: usize = (THREADS + RESERVE.0) as usize;
/// An idle thread ends after this time.
const IDLE: Duration = Duration::from_secs(10);
/// Handshakes in progress. If there are more, the oldest is dropped: a client with the key needs only a few round
/// trips.
const MAX_HANDSHAKES: usize = 64;
/// How many ended mounts are remembered.
const MAX_ENDED: usize = 4096;

/// Timeouts and limits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The time limit of a handshake.
    pub handshake: Duration,
    /// The time limit for a whole frame, for a client to accept an answer, and for a client's memory to be reached.
    pub stall: Duration,
    /// How long a client may be silent. Clients send pings more often.
    pub silence: Duration,
    /// How long a session without connections is kept.
    pub lease: Duration,
    /// How long connections stay open after the goodbye, for clients to see it.
    pub goodbye_wait: Duration,
    /// Requests in flight on a connection.
    pub credits: u32,
    /// Connections.
    pub connections: usize,
    /// Sessions.
    pub sessions: usize,
    /// Open files of a session.
    pub files: usize,
    /// Transfer buffers of 4 MiB. A user of a session may hold half of them for each direction. Half as many more are
    /// reserved for users who find these taken, one each.
    pub buffers: usize,
    /// Bytes of requests in flight, without data. Users share them like buffers; each user may have at least one
    /// request.
    pub requests: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            silence: Duration::from_secs(60),
            lease: Duration::from_secs(300),
            goodbye_wait: Duration::from_millis(200),
            // More than all threads of a mount have in flight on each of its connections.
            credits: 512,
            connections: 4096,
            sessions: 1024,
            files: 16_384,
            buffers: 128,
            requests: 32 << 20,
        }
    }
}

/// What is served, and to whom.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The folder.
    pub root: PathBuf,
    /// The key that clients need; without one everybody has access.
    pub key: Option<Key>,
    /// Whether all changes are refused.
    pub read_only: bool,
    /// Whether writes are on the disk when they are acknowledged, without a sync.
    pub write_through: bool,
    /// Limits.
    pub limits: Limits,
}

impl ServerOptions {
    /// Serves a folder for reading and writing.
    #[must_use]
    pub fn new(root: &Path, key: Option<Key>) -> Self {
        Self { root: root.to_owned(), key, read_only: false, write_through: false, limits: Limits::default() }
    }
}

/// Counts since the server was started.
#[derive(Default)]
pub(crate) struct ServerStats {
    requests: AtomicU64,
    repeated: AtomicU64,
    read: AtomicU64,
    written: AtomicU64,
    refused: AtomicU64,
    forged: AtomicU64,
    broken: AtomicU64,
}

/// The server's statistics.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ServerReport {
    /// Clients.
    pub sessions: usize,
    /// Their connections.
    pub connections: usize,
    /// Requests.
    pub requests: u64,
    /// Repeated requests, which were answered without being executed again.
    pub repeated: u64,
    /// Bytes read from files.
    pub read_bytes: u64,
    /// Bytes written to files.
    pub written_bytes: u64,
    /// Writes of files, by route.
    pub writes: Vec<WrittenSum>,
    /// Connections that were refused.
    pub refused: u64,
    /// Connections on which a frame was changed in transit.
    pub forged: u64,
    /// Connections that violated the protocol, or stalled.
    pub broken: u64,
}

/// What a request waits for. No request waits behind one of a slower class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// Names of a folder, or attributes of a file.
    Lookup,
    /// Data, or a change of names.
    Other,
    /// A disk, or other requests.
    Disk,
}

/// Queued requests, and the number of threads that execute them.
struct WorkQueue {
    queue: Queue<PendingRequest, SessionUser>,
    threads: AtomicUsize,
}

impl Default for WorkQueue {
    fn default() -> Self {
        let shares = Shares::new(THREADS).with_reserve(RESERVE.0, RESERVE.1);
        Self { queue: Queue::with_shares(shares), threads: AtomicUsize::new(0) }
    }
}

pub(crate) struct ServerShared {
    options: ServerOptions,
    root: OwnedFd,
    boot: [u8; 16],
    /// Descriptors for files that clients know, and for those that they have open, by session.
    nodes: Arc<Shares>,
    /// How files are written.
    writes: Arc<WriteRoutes>,
    files: Arc<Shares>,
    sessions: Mutex<HashMap<SessionId, Arc<ClientSession>>>,
    /// Expired sessions whose files are still to be closed.
    gone: Mutex<Vec<Arc<ClientSession>>>,
    next_session: AtomicU32,
    buffers: Arc<Buffers>,
    /// Bytes of requests: the value of an extended attribute may be long.
    bodies: Arc<Shares<SessionUser>>,
    /// By [`Class`].
    queues: [WorkQueue; 3],
    connections: AtomicUsize,
    handshakes: Mutex<VecDeque<Arc<dyn Link>>>,
    /// Mounts that were succeeded by others.
    ended: Mutex<VecDeque<MountId>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stats: ServerStats,
    over: AtomicBool,
}

impl ServerShared {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// The session that a client resumes, or a new one.
    fn session(&self, join: &Join) -> Result<(Welcome, Arc<ClientSession>)> {
        let refused = |why: &str| Error::Refused { peer: "the target".into(), why: why.into() };
        if self.is_over() {
            return Err(refused("it is shutting down"));
        }
        let mut sessions = lock(&self.sessions);
        if lock(&self.ended).contains(&join.mount) {
            return Err(refused("another mount has taken the place of this one"));
        }
        let known = join.session.and_then(|id| sessions.get(&id).cloned());
        let session = match known {
            Some(session) => session,
            None => {
                let gone = make_room(&mut sessions, self.options.limits.sessions);
                lock(&self.gone).extend(gone.ok_or_else(|| refused("it has too many clients"))?);
                let root = self.root.try_clone().map_err(|e| Error::io("dup of", "the folder", e))?;
                let number = self.next_session.fetch_add(1, Ordering::Relaxed);
                let rules = FolderRules { for_others: true, most_open: usize::MAX };
                let folder = Folder::new(root, rules).map_err(|e| Error::io("statx of", "the folder", e))?;
                let folder = folder.sharing(self.nodes.clone(), self.writes.clone(), number);
                let files = (self.files.clone(), self.options.limits.files);
                let session = Arc::new(ClientSession::new((random()?, join.mount), number, folder, files));
                sessions.insert(session.id, session.clone());
                session
            }
        };
        let limits = &self.options.limits;
        let welcome = Welcome {
            session: session.id,
            boot: self.boot,
            credits: limits.credits,
            lease_ms: limits.lease.as_millis() as u64,
            read_only: self.options.read_only,
        };
        Ok((welcome, session))
    }

    /// Ends the requests of a mount that was killed. Returns whether all of them have ended; if not, it can be called
    /// again.
    fn end_mount(&self, mount: MountId) -> bool {
        let sessions = lock(&self.sessions);
        let theirs: Vec<_> = sessions.values().filter(|one| one.mount == mount).cloned().collect();
        let mut ended = lock(&self.ended);
        if !ended.contains(&mount) {
            ended.push_back(mount);
        }
        if ended.len() > MAX_ENDED {
            ended.pop_front();
        }
        drop((ended, sessions));
        let until = Instant::now() + self.options.limits.stall;
        let over = theirs.iter().filter(|session| !session.end(until)).count() == 0;
        drop(theirs);
        if over {
            let theirs: Vec<_> = lock(&self.sessions).extract_if(|_, one| one.mount == mount).collect();
            lock(&self.gone).extend(theirs.into_iter().map(|(_, session)| session));
        }
        over
    }

    /// The mode for opening a file that a client wants to open.
    fn access(&self, wanted: OpenMode) -> OpenMode {
        OpenMode { data_sync: wanted.data_sync || self.options.write_through, ..wanted }
    }

    /// Counts the bytes of a request for its user; `None` if there is no room. Releases are never refused.
    fn room_for(&self, by: &Connection, request: &Request, bytes: usize) -> Option<TakenShare<SessionUser>> {
        let bytes = if matches!(request, Request::Release { .. }) { 0 } else { bytes as u64 };
        self.bodies.acquire(by.session.user(request), bytes)
    }

    /// Queues a request for a thread that may block.
    fn enqueue(self: &Arc<Self>, work: PendingRequest) {
        let class = work.class();
        let turn = work.connection.session.user(&work.request);
        if self.queue(class).queue.add(turn, work) {
            self.start(class);
        }
    }

    fn queue(&self, class: Class) -> &WorkQueue {
        &self.queues[class as usize]
    }

    /// Starts a thread for one of the queues, up to the limit.
    fn start(self: &Arc<Self>, class: Class) {
        if self.queue(class).threads.fetch_add(1, Ordering::AcqRel) >= MAX_THREADS {
            self.queue(class).threads.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let shared = self.clone();
        let started = self.spawn("target disk", move || {
            let of = shared.queue(class);
            let mut worker = of.queue.worker();
            while let Next::Work(work, _) = worker.next(IDLE) {
                work.run(&shared);
            }
            drop(worker);
            of.threads.fetch_sub(1, Ordering::AcqRel);
        });
        // Other threads do the work, or the next request starts one.
        if !started {
            self.queue(class).threads.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Closes the files of expired sessions on a thread of its own, because that may take long. Without a thread they
    /// stay until there is one.
    fn close_gone(self: &Arc<Self>) {
        if !lock(&self.gone).is_empty() {
            let shared = self.clone();
            self.spawn("target closes", move || {
                let gone = std::mem::take(&mut *lock(&shared.gone));
                drop(gone);
            });
        }
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> bool {
        // The new thread would inherit the user's credentials, and RDMA would not know.
        debug_assert!(
            !onehop_os::identity::has_changed(),
            "a thread that has acted as a user starts another"
        );
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        thread.map(|thread| threads.push(thread)).is_ok()
    }

    fn accepted(self: &Arc<Self>, link: Box<dyn Link>) {
        let full = self.connections.load(Ordering::Acquire) >= self.options.limits.connections;
        if full {
            self.stats.refused.fetch_add(1, Ordering::Relaxed);
            return link.close();
        }
        let link: Arc<dyn Link> = link.into();
        self.begin_handshake(&link);
        self.connections.fetch_add(1, Ordering::AcqRel);
        let shared = self.clone();
        let theirs = link.clone();
        let started = self.spawn("target client", move || {
            match connection::serve(&shared, theirs) {
                Ok(()) => {}
                Err(Error::Refused { .. } | Error::WrongKey { .. }) => {
                    shared.stats.refused.fetch_add(1, Ordering::Relaxed);
                }
                Err(Error::Forged { .. }) => {
                    shared.stats.forged.fetch_add(1, Ordering::Relaxed);
                }
                Err(_) => {
                    shared.stats.broken.fetch_add(1, Ordering::Relaxed);
                }
            }
            shared.connections.fetch_sub(1, Ordering::AcqRel);
        });
        if !started {
            self.connections.fetch_sub(1, Ordering::AcqRel);
            self.end_handshake(&link);
        }
    }

    /// A connection starts its handshake.
    fn begin_handshake(&self, link: &Arc<dyn Link>) {
        let mut handshakes = lock(&self.handshakes);
        handshakes.push_back(link.clone());
        if handshakes.len() > MAX_HANDSHAKES
            && let Some(longest) = handshakes.pop_front()
        {
            self.stats.refused.fetch_add(1, Ordering::Relaxed);
            longest.close();
        }
    }

    /// A handshake has ended.
    fn end_handshake(&self, link: &Arc<dyn Link>) {
        lock(&self.handshakes).retain(|other| !Arc::ptr_eq(other, link));
    }

    fn listen(self: &Arc<Self>, acceptor: &dyn Acceptor) {
        while !self.is_over() {
            match acceptor.accept(POLL_INTERVAL) {
                Ok(Some(link)) => self.accepted(link),
                Ok(None) => {}
                // Out of descriptors, for example: this may pass.
                Err(_) => std::thread::sleep(POLL_INTERVAL),
            }
            let lease = self.options.limits.lease;
            let is_gone = |session: &ClientSession| session.gone_for().is_some_and(|time| time > lease);
            let gone: Vec<_> = lock(&self.sessions).extract_if(|_, session| is_gone(session)).collect();
            lock(&self.gone).extend(gone.into_iter().map(|(_, session)| session));
            self.close_gone();
        }
    }
}

/// A server of a folder.
pub struct Target {
    shared: Arc<ServerShared>,
    listeners: Vec<JoinHandle<()>>,
}

impl Target {
    /// Starts to serve.
    ///
    /// # Errors
    /// When the folder cannot be opened, or no thread can be started.
    pub fn start(options: ServerOptions, acceptors: Vec<Box<dyn Acceptor>>) -> Result<Self> {
        let descriptors = raise_limits();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = options.root.display().to_string();
        let root = openat(CWD, &options.root, flags, Mode::empty());
        let root = root.map_err(|e| Error::io("opening the folder", &path, e))?;
        let most = options.limits.requests;
        let bodies = Shares::new(most).with_reserve(most / 2, MAX_BODY as u64);
        let shared = Arc::new(ServerShared {
            root,
            boot: boot()?,
            writes: Arc::new(WriteRoutes::new(|most| mapping_budget(Shares::new(most)))),
            nodes: Arc::new(Shares::new((descriptors as u64 / 4).clamp(64, 1 << 20))),
            files: Arc::new(Shares::new((descriptors as u64 / 4).clamp(64, 1 << 20))),
            sessions: Mutex::default(),
            gone: Mutex::default(),
            next_session: AtomicU32::new(0),
            buffers: Buffers::new(options.limits.buffers),
            bodies: Arc::new(bodies),
            queues: Default::default(),
            connections: AtomicUsize::new(0),
            handshakes: Mutex::default(),
            ended: Mutex::default(),
            threads: Mutex::default(),
            stats: ServerStats::default(),
            over: AtomicBool::new(false),
            options,
        });
        let mut this = Self { shared: shared.clone(), listeners: Vec::new() };
        for acceptor in acceptors {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name("target accepts".into());
            let thread = thread.spawn(move || shared.listen(&*acceptor));
            this.listeners.push(thread.map_err(|e| Error::io("a thread for", "the target", e))?);
        }
        Ok(this)
    }

    /// The server's statistics.
    #[must_use]
    pub fn report(&self) -> ServerReport {
        let shared = &self.shared;
        let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
        ServerReport {
            sessions: lock(&shared.sessions).len(),
            connections: shared.connections.load(Ordering::Acquire),
            requests: count(&shared.stats.requests),
            repeated: count(&shared.stats.repeated),
            read_bytes: count(&shared.stats.read),
            written_bytes: count(&shared.stats.written),
            writes: written_sums(&shared.writes),
            refused: count(&shared.stats.refused),
            forged: count(&shared.stats.forged),
            broken: count(&shared.stats.broken),
        }
    }

    /// Accepts no more clients, finishes and answers requests, and ends. Returns whether that was done within `limit`.
    pub fn drain(mut self, limit: Duration) -> bool {
        self.shared.over.store(true, Ordering::Release);
        for thread in self.listeners.drain(..) {
            let _ = thread.join();
        }
        let start = Instant::now();
        while self.shared.connections.load(Ordering::Acquire) > 0 {
            if start.elapsed() > limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        self.shared.queues.iter().for_each(|of| of.queue.end());
        for thread in self.listeners.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Makes room for one more session, by removing and returning the one that has been without a connection for longest.
/// Returns `None` if all have connections.
fn make_room(
    sessions: &mut HashMap<SessionId, Arc<ClientSession>>,
    most: usize,
) -> Option<Option<Arc<ClientSession>>> {
    if sessions.len() < most {
        return Some(None);
    }
    let gone = sessions.values().filter_map(|session| Some((session.gone_for()?, session.id)));
    let longest = gone.max_by_key(|(time, _)| *time)?.1;
    Some(sessions.remove(&longest))
}

/// Raises the limit of descriptors: every file that a client knows takes one. Returns the limit.
fn raise_limits() -> usize {
    let now = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
    getrlimit(Resource::Nofile).current.map_or(1 << 22, |most| most as usize)
}

/// The boot ID of this machine: until the next boot, written data is not lost, even if this process is killed.
fn boot() -> Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    // Where it is not available, each run of this process counts as a boot.
    u128::from_str_radix(&digits, 16).map_or_else(|_| random(), |number| Ok(number.to_be_bytes()))
}
