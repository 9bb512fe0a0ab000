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

use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
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
const HELLO: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(2);
/// How long a rank sleeps while it waits for one message of another.
const TURN: Duration = Duration::from_millis(100);

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
        let links = self.connect(deadline, go_on)?;
        let terms = Terms {
            files: files.iter().map(|file| FileTerms::of(&**file)).collect(),
            cuts: cuts.to_vec(),
            slot: slot as u64,
            block: plan.options.block,
        };
        let sent = terms.to_bytes(plan).map_err(|e| self.refused(format!("the plan cannot be sent: {e}")))?;
        let mut met = Met { group: self.clone(), links, plans: Vec::new(), slot: terms.slot };
        met.send_all(Kind::Terms, &sent)?;
        for rank in 0..self.size {
            if rank == self.rank {
                met.plans.push(plan.clone());
                continue;
            }
            let message = met.receive(rank, &[Kind::Terms], deadline, go_on)?;
            let there = Terms::from_bytes(&message.bytes, &terms, &plan.files);
            let (there, plan) = there.map_err(|why| met.fail(rank, why))?;
            met.slot = met.slot.min(there.slot);
            met.plans.push(plan);
        }
        Ok(met)
    }

    /// A connection to each other rank: the higher ones come, the lower ones are called.
    fn connect(&self, deadline: Instant, go_on: &dyn Fn() -> bool) -> Result<Vec<Option<RankLink>>> {
        let mut links: Vec<Option<RankLink>> = (0..self.size).map(|_| None).collect();
        let listener = if self.rank + 1 < self.size { Some(self.listen()?) } else { None };
        let begun = Instant::now();
        let mut is_told = false;
        loop {
            for rank in 0..self.rank {
                if let Some(link @ None) = links.get_mut(rank) {
                    *link = self.call(rank, deadline, go_on)?;
                }
            }
            while let Some(listener) = &listener
                && let Some(socket) = self.accept(listener)?
            {
                self.welcome(socket, &mut links)?;
            }
            let missing: Vec<usize> = (0..self.size)
                .filter(|rank| *rank != self.rank && links.get(*rank).is_some_and(Option::is_none))
                .collect();
            if missing.is_empty() {
                return Ok(links);
            }
            if !go_on() {
                return Err(Error::Cancelled);
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
            if !is_told && begun.elapsed() > NOTICE {
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
                    let why = format!("another process is rank {} of a group of this name", self.rank);
                    return Err(self.refused(why));
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
                    self.check_hello(&message.bytes, Some(rank)).map_err(|why| self.refused(why))?;
                    return Ok(Some(link));
                }
                Ok(Received::Message(message)) => {
                    return Err(self.refused(format!("rank {rank}: {}", message.text())));
                }
                Err(e) => return Err(self.refused(format!("rank {rank}: {e}"))),
            }
        }
        Ok(None)
    }

    /// Takes a process that has connected, if it is one of the ranks that are missing.
    fn welcome(&self, socket: UnixStream, links: &mut [Option<RankLink>]) -> Result<()> {
        // Processes of other users are sent away.
        let Ok(link) = RankLink::new(socket) else { return Ok(()) };
        let Ok(Received::Message(message)) = link.receive(HELLO) else { return Ok(()) };
        let rank = match self.check_hello(&message.bytes, None) {
            Ok(rank) if message.kind == Kind::Hello => rank,
            Ok(_) => return Ok(()),
            Err(why) => {
                let _ = link.send(Kind::Refused, why.as_bytes());
                return Err(self.refused(why));
            }
        };
        match links.get_mut(rank) {
            Some(free @ None) if rank > self.rank => {
                if link.send(Kind::Hello, &self.hello()).is_ok() {
                    *free = Some(link);
                }
            }
            Some(Some(there)) => {
                let why = format!("process {} is rank {rank} of a group of this name", there.pid());
                let _ = link.send(Kind::Refused, why.as_bytes());
            }
            _ => {
                let _ = link.send(Kind::Refused, b"this rank is not called by that one");
            }
        }
        Ok(())
    }

    fn hello(&self) -> Vec<u8> {
        format!("{} {} {}", env!("CARGO_PKG_VERSION"), self.rank, self.size).into_bytes()
    }

    /// The rank of who says hello, which is this one if any was called.
    fn check_hello(&self, bytes: &[u8], called: Option<usize>) -> std::result::Result<usize, String> {
        let text = String::from_utf8_lossy(bytes);
        let mut words = text.split(' ');
        let mut next = || words.next().unwrap_or_default();
        let (version, rank, size) = (next(), next(), next());
        if version != env!("CARGO_PKG_VERSION") {
            let ours = env!("CARGO_PKG_VERSION");
            return Err(format!(
                "onehop {} there and {ours} here do not load together",
                version.escape_debug()
            ));
        }
        let (Ok(rank), Ok(size)) = (rank.parse::<usize>(), size.parse::<usize>()) else {
            return Err("what it says is no rank".into());
        };
        if size != self.size {
            return Err(format!(
                "rank {rank} says that the group has {size} ranks, rank {} {}",
                self.rank, self.size
            ));
        }
        if called.is_some_and(|called| called != rank) {
            return Err(format!("rank {rank} answers a call"));
        }
        Ok(rank)
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

    /// Tells the others that this rank fails because of another one.
    pub(crate) fn fail(&self, rank: usize, why: impl Into<String>) -> Error {
        let why = why.into();
        let told = format!("it disagrees with rank {rank}: {why}");
        let _ = self.send_all(Kind::Failed, told.as_bytes());
        self.error(rank, why)
    }

    fn error(&self, rank: usize, why: impl Into<String>) -> Error {
        let pid = self.links.get(rank).and_then(Option::as_ref).map_or(0, RankLink::pid);
        Error::Rank { group: self.group.name.clone(), rank, pid, why: why.into() }
    }

    /// Sends a message to all other ranks. A rank that is gone is noticed by whoever waits for it.
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
                let _ = self.send_all(Kind::Failed, b"it was cancelled");
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
