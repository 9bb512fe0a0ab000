//! Several processes of a machine that load together, each for its own GPU: what more than one of them needs is read
//! once, and passed from GPU to GPU.
//!
//! 1. [`Group::new`] names the group, and this process's rank in it.
//! 2. [`Group::meet`] finds the other ranks for one load, and agrees with them on the files.
//! 3. [`Prepared::for_group`](crate::engine::Prepared::for_group) and
//!    [`RingEngine::start_in_group`](crate::engine::RingEngine::start_in_group) load this rank's share.
//!
//! Ranks meet at Unix sockets in the abstract namespace, which vanish with their process, and take only processes of the
//! same user. Each load is a meeting of its own: one that failed leaves nothing behind for the next.

mod link;
mod terms;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use link::{Kind, RankLink, RankMessage, Received};
use terms::{FileTerms, Terms};

use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::source::Source;

/// Most processes of a group.
const MOST_RANKS: usize = 64;
/// Longest name: an address of a socket has 107 bytes.
const MOST_NAME: usize = 64;
/// How long a rank waits for another unless [`TIMEOUT`] says otherwise.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// The variable that says how many seconds a rank waits for the others.
pub const TIMEOUT: &str = "ONEHOP_GROUP_TIMEOUT";
/// How long it waits before it says for whom.
const NOTICE: Duration = Duration::from_secs(5);
/// How long an address in use is tried again: another thread's load may be about to end.
const IN_USE: Duration = Duration::from_secs(1);
/// Time limit for a process that has connected to say who it is.
const HELLO: Duration = Duration::from_millis(500);
const POLL: Duration = Duration::from_millis(2);
/// How long a rank sleeps while it waits for one message of another.
const TURN: Duration = Duration::from_millis(100);

/// Longest hello.
const LONGEST_HELLO: usize = 64;

/// The last turn of each name and rank in this process.
static TURNS: Mutex<BTreeMap<(String, usize), u64>> = Mutex::new(BTreeMap::new());

/// A group of processes, and this one's rank in it.
#[derive(Clone, Debug)]
pub struct Group {
    name: String,
    rank: usize,
    size: usize,
    timeout: Duration,
}

impl Group {
    /// The process with this rank, from 0 on, of a group of `size`. All of a user's groups that load at the same time
    /// have different names. The environment's [`TIMEOUT`] says how long to wait for the others.
    ///
    /// # Errors
    /// When the numbers make no sense, or the name is empty or too long.
    pub fn new(name: &str, rank: usize, size: usize) -> Result<Self> {
        let refused = |why: String| Error::Group { name: name.escape_debug().to_string(), why };
        if name.is_empty() || name.len() > MOST_NAME || name.contains(['\0', '/']) {
            return Err(refused(format!("a name has 1 to {MOST_NAME} bytes, and no '/'")));
        }
        if rank >= size || !(1..=MOST_RANKS).contains(&size) {
            let why =
                format!("rank {rank} of {size}: ranks count from 0, and 1 to {MOST_RANKS} load together");
            return Err(refused(why));
        }
        let timeout = match std::env::var(TIMEOUT) {
            Err(_) => DEFAULT_TIMEOUT,
            Ok(text) => {
                let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                seconds.ok_or_else(|| refused(format!("{TIMEOUT}={text:?} is not a number of seconds")))?
            }
        };
        Ok(Self { name: name.into(), rank, size, timeout })
    }

    /// The same with another limit of the time that this process waits for the others.
    #[must_use]
    pub fn waiting_for(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// How long this process waits for the others.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of processes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    fn refused(&self, why: impl Into<String>) -> Error {
        Error::Group { name: self.name.clone(), why: why.into() }
    }

    fn address(&self, rank: usize) -> io::Result<SocketAddr> {
        let user = rustix::process::geteuid().as_raw();
        SocketAddr::from_abstract_name(format!("onehop/{user}/{}/{rank}", self.name))
    }

    /// Waits for the other ranks, and agrees with them on the files and who reads what. `files` are the plan's, `cuts` says
    /// which tensors each rank has which part of, the same for all, and `slot` the bytes of a slot that would suit this rank.
    ///
    /// # Errors
    /// When a rank does not come in time, loads something else, or ends; or `go_on` returns false.
    pub fn meet(
        &self,
        plan: &Plan,
        files: &[Box<dyn Source>],
        cuts: &[String],
        slot: usize,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Met> {
        let deadline = Instant::now() + self.timeout;
        self.next_turn();
        let links = self.connect(deadline, go_on, None)?;
        let terms = Terms {
            files: files.iter().map(|file| FileTerms::of(&**file)).collect(),
            cuts: cuts.to_vec(),
            slot: slot as u64,
            block: plan.options.block,
        };
        let sent = terms.to_bytes(plan).map_err(|e| self.refused(format!("the plan cannot be sent: {e}")))?;
        let (group, plans, slot) = (self.clone(), Vec::new(), terms.slot);
        let mut met = Met { group, links, plans, slot, is_started: false };
        // At the same time: plans are longer than what a socket holds.
        let agreed = std::thread::scope(|scope| {
            let links: Vec<&RankLink> = met.links.iter().flatten().collect();
            // Why a rank does not take it, receiving from that rank says.
            let send = move || links.iter().for_each(|link| drop(link.send(Kind::Terms, &sent)));
            let sender = std::thread::Builder::new().name("sends a plan".into()).spawn_scoped(scope, send);
            let agreed = met.agree(plan, &terms, deadline, go_on)?;
            drop(sender.map_err(Error::Thread)?);
            Ok::<_, Error>(agreed)
        });
        let agreed = agreed.map(|(plans, slot)| (met.plans, met.slot) = (plans, slot));
        agreed.inspect_err(|error| drop(met.send_all(Kind::Failed, error.to_string().as_bytes())))?;
        Ok(met)
    }

    /// Tells the other ranks that this one does not come, because its call failed before it could meet them. A thread does
    /// so for as long as they may wait, or until this process meets them after all.
    pub fn decline(&self, why: &str) {
        let (group, why, turn) = (self.clone(), why.to_owned(), self.next_turn());
        let tell = move || {
            let deadline = Instant::now() + group.timeout;
            let go_on = || group.current_turn() == turn;
            drop(group.connect(deadline, &go_on, Some(&why)));
        };
        // Without a thread, they wait for the whole time.
        drop(std::thread::Builder::new().name("declines a group".into()).spawn(tell));
    }

    /// Ends what a thread of this process may still be telling others in the name of this rank.
    fn next_turn(&self) -> u64 {
        let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = turns.entry((self.name.clone(), self.rank)).or_default();
        *turn += 1;
        *turn
    }

    fn current_turn(&self) -> u64 {
        let turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        turns.get(&(self.name.clone(), self.rank)).copied().unwrap_or_default()
    }

    /// A connection to each other rank: the higher ones come, the lower ones are called. Each is told why this one fails,
    /// if it does.
    fn connect(
        &self,
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
        failure: Option<&str>,
    ) -> Result<Vec<Option<RankLink>>> {
        let mut links: Vec<Option<RankLink>> = (0..self.size).map(|_| None).collect();
        let connected = self.connect_all(&mut links, deadline, go_on, failure);
        if let (Err(error), None) = (&connected, failure) {
            for link in links.iter().flatten() {
                let _ = link.send(Kind::Failed, error.to_string().as_bytes());
            }
        }
        connected.map(|()| links)
    }

    fn connect_all(
        &self,
        links: &mut [Option<RankLink>],
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
        failure: Option<&str>,
    ) -> Result<()> {
        let listener = if self.rank + 1 < self.size { Some(self.listen()?) } else { None };
        let begun = Instant::now();
        let mut is_told = false;
        loop {
            for rank in 0..self.rank {
                if let Some(link @ None) = links.get_mut(rank) {
                    *link = self.call(rank, deadline, go_on)?;
                    if let (Some(link), Some(why)) = (link, failure) {
                        let _ = link.send(Kind::Failed, why.as_bytes());
                    }
                }
            }
            while let Some(listener) = &listener
                && let Some(socket) = self.accept(listener)?
            {
                if let (Some(link), Some(why)) = (self.welcome(socket, links)?, failure) {
                    let _ = link.send(Kind::Failed, why.as_bytes());
                }
            }
            let missing: Vec<usize> = (0..self.size)
                .filter(|rank| *rank != self.rank && links.get(*rank).is_some_and(Option::is_none))
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if !go_on() {
                return Err(Error::Cancelled);
            }
            // One that has come may fail while others are waited for.
            for (rank, link) in links.iter().enumerate().filter(|_| failure.is_none()) {
                if let Some(link) = link.as_ref().filter(|link| link.is_over()) {
                    // What it sent before it failed does not matter any more.
                    let why = loop {
                        match link.receive(Duration::ZERO) {
                            Ok(Received::Message(message)) if message.kind == Kind::Failed => {
                                break message.text();
                            }
                            Ok(Received::Message(_)) => {}
                            _ => break "it ended".into(),
                        }
                    };
                    return Err(self.rank_error(rank, link, why));
                }
            }
            if Instant::now() > deadline {
                let why = format!(
                    "rank {} has waited {:?} for {} (of {}); {TIMEOUT} says how many seconds it waits",
                    self.rank,
                    self.timeout,
                    named(&missing),
                    self.size
                );
                return Err(self.refused(why));
            }
            if !is_told && failure.is_none() && begun.elapsed() > NOTICE {
                is_told = true;
                eprintln!(
                    "onehop: rank {} of group {:?} waits for {}, {:?} at most",
                    self.rank,
                    self.name,
                    named(&missing),
                    self.timeout
                );
            }
            std::thread::sleep(POLL);
        }
    }

    fn rank_error(&self, rank: usize, link: &RankLink, why: impl Into<String>) -> Error {
        Error::Rank { group: self.name.clone(), rank, pid: link.pid(), why: why.into() }
    }

    fn listen(&self) -> Result<UnixListener> {
        let begun = Instant::now();
        loop {
            let bound = self.address(self.rank).and_then(|address| UnixListener::bind_addr(&address));
            match bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener)) {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() == ErrorKind::AddrInUse && begun.elapsed() < IN_USE => {
                    std::thread::sleep(POLL);
                }
                Err(error) if error.kind() == ErrorKind::AddrInUse => {
                    let there =
                        self.address(self.rank).and_then(|address| UnixStream::connect_addr(&address));
                    let who = match there.and_then(RankLink::new) {
                        Ok(link) => format!("process {} is", link.pid()),
                        Err(e) if e.kind() == ErrorKind::PermissionDenied => format!("{e}: it is"),
                        Err(_) => "another process is".into(),
                    };
                    return Err(self.refused(format!("{who} rank {} of a group of this name", self.rank)));
                }
                Err(error) => return Err(self.refused(format!("no socket to meet at: {error}"))),
            }
        }
    }

    fn accept(&self, listener: &UnixListener) -> Result<Option<UnixStream>> {
        match listener.accept() {
            Ok((socket, _)) => Ok(Some(socket)),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(e) => Err(self.refused(format!("accepting a rank: {e}"))),
        }
    }

    /// Calls a rank, which may not be there yet.
    fn call(&self, rank: usize, deadline: Instant, go_on: &dyn Fn() -> bool) -> Result<Option<RankLink>> {
        let socket = match self.address(rank).and_then(|address| UnixStream::connect_addr(&address)) {
            Ok(socket) => socket,
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {
                return Ok(None);
            }
            // Its queue of newcomers is full.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(None),
            Err(e) => return Err(self.refused(format!("calling rank {rank}: {e}"))),
        };
        let link = RankLink::new(socket).map_err(|e| self.refused(format!("rank {rank}: {e}")))?;
        if link.send(Kind::Hello, &self.hello()).is_err() {
            return Ok(None);
        }
        while go_on() && Instant::now() < deadline {
            match link.receive(TURN) {
                Ok(Received::Nothing) => {}
                // It was about to close its door.
                Ok(Received::End) => return Ok(None),
                Ok(Received::Message(message)) if message.kind == Kind::Hello => {
                    let hello = Hello::parse(&message.bytes).filter(|hello| hello.rank == rank);
                    let checked = match hello {
                        Some(hello) => self.check_hello(&hello),
                        None => Err("what it says is no hello of this rank".into()),
                    };
                    checked.map_err(|why| self.rank_error(rank, &link, why))?;
                    return Ok(Some(link));
                }
                Ok(Received::Message(message)) => {
                    return Err(self.rank_error(rank, &link, message.text()));
                }
                Err(e) => return Err(self.rank_error(rank, &link, e.to_string())),
            }
        }
        Ok(None)
    }

    /// Takes a process that has connected, if it is one of the ranks that are missing, and returns its connection.
    fn welcome<'a>(
        &self,
        socket: UnixStream,
        links: &'a mut [Option<RankLink>],
    ) -> Result<Option<&'a RankLink>> {
        // Processes of other users are sent away, and those that are no ranks.
        let Ok(link) = RankLink::new(socket) else { return Ok(None) };
        let Ok(Received::Message(message)) = link.receive(HELLO) else { return Ok(None) };
        if message.kind != Kind::Hello {
            return Ok(None);
        }
        let Some(hello) = Hello::parse(&message.bytes) else { return Ok(None) };
        let rank = hello.rank;
        if let Err(why) = self.check_hello(&hello) {
            let _ = link.send(Kind::Refused, why.as_bytes());
            return Err(self.rank_error(rank, &link, why));
        }
        match links.get_mut(rank) {
            Some(free @ None) if rank > self.rank => {
                if link.send(Kind::Hello, &self.hello()).is_ok() {
                    *free = Some(link);
                }
                return Ok(free.as_ref());
            }
            Some(Some(there)) => {
                let why = format!("process {} is rank {rank} of a group of this name", there.pid());
                let _ = link.send(Kind::Refused, why.as_bytes());
            }
            _ => {
                let _ = link.send(Kind::Refused, b"this rank is not called by that one");
            }
        }
        Ok(None)
    }

    fn hello(&self) -> Vec<u8> {
        format!("{} {} {}", env!("CARGO_PKG_VERSION"), self.rank, self.size).into_bytes()
    }

    /// Whether who says hello can be of this group.
    fn check_hello(&self, hello: &Hello<'_>) -> std::result::Result<(), String> {
        let ours = env!("CARGO_PKG_VERSION");
        if hello.version != ours {
            let theirs = hello.version.escape_debug();
            return Err(format!("its onehop {theirs} and {ours} do not load together"));
        }
        if hello.size != self.size {
            let (rank, size) = (hello.rank, hello.size);
            return Err(format!(
                "rank {rank} says that the group has {size} ranks, rank {} {}",
                self.rank, self.size
            ));
        }
        Ok(())
    }
}

/// What a rank says first: version, rank and number of ranks.
struct Hello<'a> {
    version: &'a str,
    rank: usize,
    size: usize,
}

impl<'a> Hello<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= LONGEST_HELLO)?;
        let mut words = text.split(' ');
        let (version, rank, size) = (words.next()?, words.next()?, words.next()?);
        let is_version = !version.is_empty() && words.next().is_none();
        is_version.then_some(Self { version, rank: rank.parse().ok()?, size: size.parse().ok()? })
    }
}

/// "rank 2", or "ranks 1, 2".
fn named(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// The ranks of a group, connected for one load.
pub struct Met {
    pub(crate) group: Group,
    /// By rank; none for this one.
    pub(crate) links: Vec<Option<RankLink>>,
    /// What each rank loads.
    pub(crate) plans: Vec<Plan>,
    /// Bytes of a slot.
    pub(crate) slot: u64,
    /// Whether the load has begun, which tells the others how it goes.
    pub(crate) is_started: bool,
}

impl Drop for Met {
    fn drop(&mut self) {
        if !self.is_started {
            let _ = self.send_all(Kind::Failed, b"it did not start to load");
        }
    }
}

impl Met {
    /// The group.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Time limit for the other ranks' answers.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.group.timeout
    }

    /// The other ranks.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, &RankLink)> {
        self.links.iter().enumerate().filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
    }

    /// Compares this rank's terms with those of the others, and takes their plans.
    fn agree(
        &self,
        plan: &Plan,
        terms: &Terms,
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(Vec<Plan>, u64)> {
        let (mut plans, mut slot) = (Vec::new(), terms.slot);
        for rank in 0..self.group.size {
            if rank == self.group.rank {
                plans.push(plan.clone());
                continue;
            }
            let message = self.receive(rank, &[Kind::Terms], deadline, go_on)?;
            let there = Terms::from_bytes(&message.bytes, terms, &plan.files);
            let (there, plan) = there.map_err(|why| self.error(rank, why))?;
            slot = slot.min(there.slot);
            plans.push(plan);
        }
        Ok((plans, slot))
    }

    pub(crate) fn error(&self, rank: usize, why: impl Into<String>) -> Error {
        let pid = self.links.get(rank).and_then(Option::as_ref).map_or(0, RankLink::pid);
        Error::Rank { group: self.group.name.clone(), rank, pid, why: why.into() }
    }

    /// Sends a message to all other ranks. A rank that is gone is noticed when its next message is awaited.
    pub(crate) fn send_all(&self, kind: Kind, bytes: &[u8]) -> Result<()> {
        for (rank, link) in self.others() {
            match link.send(kind, bytes) {
                Err(e) if !matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    return Err(self.error(rank, e.to_string()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits for one of these messages from a rank.
    pub(crate) fn receive(
        &self,
        rank: usize,
        kinds: &[Kind],
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
    ) -> Result<RankMessage> {
        let link = self.links.get(rank).and_then(Option::as_ref).ok_or(Error::Incomplete)?;
        while Instant::now() < deadline {
            if !go_on() {
                return Err(Error::Cancelled);
            }
            match link.receive(TURN) {
                Ok(Received::Nothing) => {}
                Ok(Received::Message(message)) if kinds.contains(&message.kind) => return Ok(message),
                Ok(Received::Message(message)) if message.kind == Kind::Failed => {
                    return Err(self.error(rank, message.text()));
                }
                Ok(Received::Message(message)) => {
                    return Err(self.error(rank, format!("it sent {:?} out of turn", message.kind)));
                }
                Ok(Received::End) => return Err(self.error(rank, "it ended")),
                Err(e) => return Err(self.error(rank, e.to_string())),
            }
        }
        Err(self.error(rank, format!("it has not answered for {:?}", self.group.timeout)))
    }
}
