//! The storage service: a folder, for clients that have the key.
//!
//! ```text
//! connection  reads requests of one connection, and answers
//! session     what is kept of a client across connections
//! perform     what was asked for, done
//! ```
//! A client with the key names the user of each request, and any user it likes. A server that is root's acts as that user, and its
//! kernel checks permissions. Any other server does everything as its own user, and only the client's kernel keeps the client's
//! users apart. A client reaches nothing outside of the folder, whatever it sends, and makes no devices and no files that run as
//! their owner.

mod connection;
#[cfg(test)]
mod given_up_tests;
mod perform;
mod session;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::auth::{Key, random};
use crate::buffers::{Buffers, SessionUser};
use crate::shares::{Shares, TakenShare};
use crate::transport::{Acceptor, Link};
use crate::tree::{Folder, FolderRules};
use crate::turns::{Next, Queue};
use crate::wire::{Join, MOST_BODY, MountId, OpenMode, Request, SessionId, Welcome};
use crate::{Error, Result, lock};
use connection::Connection;
use perform::PendingRequest;
use session::ClientSession;

/// How often those that wait look whether the server is to end.
const TICK: Duration = Duration::from_millis(50);
/// Threads of a queue that wait for disks. The work of a session's user holds half of them.
const THREADS: u64 = 64;
/// More of them, for users who come when others have those: so many each.
const RESERVE: (u64, u64) = (192, 4);
const MOST_THREADS: usize = (THREADS + RESERVE.0) as usize;
/// One that had nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);
/// Connections that may be introducing themselves at once. Where there are more, the one that has taken longest goes: who has the key
/// is done within a few round trips.
const MOST_STRANGERS: usize = 64;
/// So many mounts are remembered that others have succeeded.
const MOST_ENDED: usize = 4096;

/// How long things may take, and how many there may be.
#[derive(Clone, Debug)]
pub struct Limits {
    /// A client has shown its key.
    pub handshake: Duration,
    /// A frame is whole; a client takes an answer; there is room for data.
    pub stall: Duration,
    /// A client says something: they say that they are there more often.
    pub silence: Duration,
    /// A session without connections is kept.
    pub lease: Duration,
    /// Clients have to take note of the end.
    pub farewell: Duration,
    /// Requests of a connection at once.
    pub credits: u32,
    /// Connections in all.
    pub connections: usize,
    /// Sessions in all.
    pub sessions: usize,
    /// Open files of a session.
    pub files: usize,
    /// Buffers of 4 MiB for data on its way. A user of a session has half of them at most, for either way. There are half as many
    /// more, for those who come when others have these: one each.
    pub buffers: usize,
    /// Bytes of requests that are under way, besides data. Users share them as they share buffers; each may have one request.
    pub requests: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            silence: Duration::from_secs(60),
            lease: Duration::from_secs(300),
            farewell: Duration::from_millis(200),
            // More than all threads of a mount have under way on each of its connections.
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
    /// Who has it is let in; without one everybody.
    pub key: Option<Key>,
    /// Whether nothing may be changed.
    pub read_only: bool,
    /// Whether writes are on the disk when they are acknowledged, without a sync.
    pub write_through: bool,
    /// Limits.
    pub limits: Limits,
}

impl ServerOptions {
    /// A folder, to be read and written by everybody who has the key.
    #[must_use]
    pub fn new(root: &Path, key: Option<Key>) -> Self {
        Self { root: root.to_owned(), key, read_only: false, write_through: false, limits: Limits::default() }
    }
}

/// What was done since the server began.
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

/// The same, for who asks.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ServerReport {
    /// Clients.
    pub sessions: usize,
    /// Their connections.
    pub connections: usize,
    /// What they asked for.
    pub requests: u64,
    /// Of these, what had been answered before, and was not done again.
    pub repeated: u64,
    /// Bytes of files that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Connections that were not let in.
    pub refused: u64,
    /// Connections on which somebody on the way changed what was sent.
    pub forged: u64,
    /// Connections that broke the rules, or stalled.
    pub broken: u64,
}

/// What requests wait for: none waits behind one of a slower class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// A folder's names, or what is known of a file.
    Look,
    /// Bytes, or a change of names.
    Work,
    /// A disk, for as long as it likes, or other requests.
    Disk,
}

/// Requests that wait for their turn, and how many threads do them.
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
    files: Arc<Shares>,
    sessions: Mutex<HashMap<SessionId, Arc<ClientSession>>>,
    /// Those to which nobody comes back, whose files are still to be closed.
    gone: Mutex<Vec<Arc<ClientSession>>>,
    next_session: AtomicU32,
    buffers: Arc<Buffers>,
    /// Bytes of requests: an extended attribute's value is long.
    bodies: Arc<Shares<SessionUser>>,
    /// By [`Class`].
    queues: [WorkQueue; 3],
    connections: AtomicUsize,
    strangers: Mutex<VecDeque<Arc<dyn Link>>>,
    /// Mounts that others have succeeded.
    ended: Mutex<VecDeque<MountId>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stats: ServerStats,
    over: AtomicBool,
}

impl ServerShared {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// The session that a client wants to go on with, or a new one.
    fn session(&self, join: &Join) -> Result<(Welcome, Arc<ClientSession>)> {
        let refused = |why: &str| Error::Refused { peer: "the target".into(), why: why.into() };
        if self.is_over() {
            return Err(refused("it is about to end"));
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
                lock(&self.gone).extend(gone.ok_or_else(|| refused("it has as many clients as it can"))?);
                let root = self.root.try_clone().map_err(|e| Error::io("dup of", "the folder", e))?;
                let number = self.next_session.fetch_add(1, Ordering::Relaxed);
                let rules = FolderRules { for_others: true, most_open: usize::MAX };
                let folder = Folder::sharing(root, rules, (self.nodes.clone(), number));
                let folder = folder.map_err(|e| Error::io("statx of", "the folder", e))?;
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

    /// Ends what a mount has asked for that was killed; whether all of it is over. Where it is not, it can be tried again.
    fn end_mount(&self, mount: MountId) -> bool {
        let sessions = lock(&self.sessions);
        let theirs: Vec<_> = sessions.values().filter(|one| one.mount == mount).cloned().collect();
        let mut ended = lock(&self.ended);
        if !ended.contains(&mount) {
            ended.push_back(mount);
        }
        if ended.len() > MOST_ENDED {
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

    /// How a file is opened that a client wants to open so.
    fn access(&self, wanted: OpenMode) -> OpenMode {
        OpenMode { data_sync: wanted.data_sync || self.options.write_through, ..wanted }
    }

    /// Counts a request of so many bytes for its user; none where there is no room. What releases files is never refused.
    fn room_for(&self, by: &Connection, request: &Request, bytes: usize) -> Option<TakenShare<SessionUser>> {
        let bytes = if matches!(request, Request::Release { .. }) { 0 } else { bytes as u64 };
        self.bodies.lend(by.session.user(request), bytes)
    }

    /// Has something done by a thread that may wait.
    fn later(self: &Arc<Self>, work: PendingRequest) {
        let class = work.class();
        let turn = work.connection.session.user(&work.request);
        if self.queue(class).queue.add(turn, work) {
            self.start(class);
        }
    }

    fn queue(&self, class: Class) -> &WorkQueue {
        &self.queues[class as usize]
    }

    /// Starts a thread for one of the queues, if it may have one more.
    fn start(self: &Arc<Self>, class: Class) {
        if self.queue(class).threads.fetch_add(1, Ordering::AcqRel) >= MOST_THREADS {
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
        // Others do the work; where there are none it is done when there can be.
        if !started {
            self.queue(class).threads.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Has a thread close the files of sessions that are gone. That may take long, so nobody else does it: where there is no thread,
    /// they stay until there is.
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
        // The new thread would have that user's copy of the credentials, and RDMA would not know.
        debug_assert!(!onehop_os::identity::has_changed(), "a thread that has acted as a user starts one");
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
        self.meet(&link);
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
            self.met(&link);
        }
    }

    /// A connection begins to introduce itself.
    fn meet(&self, link: &Arc<dyn Link>) {
        let mut strangers = lock(&self.strangers);
        strangers.push_back(link.clone());
        if strangers.len() > MOST_STRANGERS
            && let Some(longest) = strangers.pop_front()
        {
            self.stats.refused.fetch_add(1, Ordering::Relaxed);
            longest.close();
        }
    }

    /// It has, or has failed to.
    fn met(&self, link: &Arc<dyn Link>) {
        lock(&self.strangers).retain(|other| !Arc::ptr_eq(other, link));
    }

    fn listen(self: &Arc<Self>, acceptor: &dyn Acceptor) {
        while !self.is_over() {
            match acceptor.accept(TICK) {
                Ok(Some(link)) => self.accepted(link),
                Ok(None) => {}
                // Out of descriptors, say: it may pass.
                Err(_) => std::thread::sleep(TICK),
            }
            let lease = self.options.limits.lease;
            let is_gone = |session: &ClientSession| session.gone_for().is_some_and(|time| time > lease);
            let gone: Vec<_> = lock(&self.sessions).extract_if(|_, session| is_gone(session)).collect();
            lock(&self.gone).extend(gone.into_iter().map(|(_, session)| session));
            self.close_gone();
        }
    }
}

/// A folder that is served.
pub struct Target {
    shared: Arc<ServerShared>,
    listeners: Vec<JoinHandle<()>>,
}

impl Target {
    /// Serves a folder from now on.
    ///
    /// # Errors
    /// When it is no folder, or the system has no more threads.
    pub fn start(options: ServerOptions, acceptors: Vec<Box<dyn Acceptor>>) -> Result<Self> {
        let descriptors = raise_limits();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = options.root.display().to_string();
        let root = openat(CWD, &options.root, flags, Mode::empty());
        let root = root.map_err(|e| Error::io("opening the folder", &path, e))?;
        let most = options.limits.requests;
        let bodies = Shares::new(most).with_reserve(most / 2, MOST_BODY as u64);
        let shared = Arc::new(ServerShared {
            root,
            boot: boot()?,
            nodes: Arc::new(Shares::new((descriptors as u64 / 4).clamp(64, 1 << 20))),
            files: Arc::new(Shares::new((descriptors as u64 / 4).clamp(64, 1 << 20))),
            sessions: Mutex::default(),
            gone: Mutex::default(),
            next_session: AtomicU32::new(0),
            buffers: Buffers::new(options.limits.buffers),
            bodies: Arc::new(bodies),
            queues: Default::default(),
            connections: AtomicUsize::new(0),
            strangers: Mutex::default(),
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

    /// What it has done.
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
            refused: count(&shared.stats.refused),
            forged: count(&shared.stats.forged),
            broken: count(&shared.stats.broken),
        }
    }

    /// Takes no more clients, finishes what was asked for and tells it, and ends; whether that was done within `limit`.
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

/// Sees that there is room for one more session: the one whose client has been gone for longest makes it, and is given. None where
/// all are here.
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

/// Every file that a client knows takes a descriptor; gives how many there may be.
fn raise_limits() -> usize {
    let now = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
    getrlimit(Resource::Nofile).current.map_or(1 << 22, |most| most as usize)
}

/// Which run of this machine it is: until the next, what was written is not lost even if this process is killed.
fn boot() -> Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    // Where that is not told, every run of this process counts as one.
    u128::from_str_radix(&digits, 16).map_or_else(|_| random(), |number| Ok(number.to_be_bytes()))
}
