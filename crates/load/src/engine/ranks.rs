//! A load of several processes: this one passes on what others need of what it reads, and gets the rest from them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_gpu::cuda::Ticket;
use onehop_gpu::{Copier, Gpu, Mark, Region, Rows, SharedRegion};
use serde::Serialize;

use super::STALL;
use super::worker_pool::LoadShared;
use crate::error::{Error, Result};
use crate::group::{Kind, Link, Message, Met, Received};
use crate::plan::{Arenas, Chunk, Copy, Share};

/// How long a rank waits for the others after a failure before it gives its arena up: they may still write to it.
const CLOSE: Duration = Duration::from_secs(10);
/// How long a thread sleeps before it looks whether the load goes on.
const POLL: Duration = Duration::from_millis(20);
/// How long the passing thread sleeps while copies are in progress.
const COPY_POLL: Duration = Duration::from_micros(50);
/// Most chunks in one batch of copies.
const BATCH: usize = 32;

/// How a load of several processes went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupAccount {
    /// This process's rank.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// `peer`: bytes were passed from GPU to GPU. `alone`: each process read what it needed.
    pub way: &'static str,
    /// Why not from GPU to GPU, if so.
    pub why_alone: Option<String>,
    /// Bytes that other processes got from this one.
    pub passed_bytes: u64,
    /// Bytes that this one got from others.
    pub received_bytes: u64,
}

/// The other ranks' arenas by rank, or why one of the ranks does not reach another's: all ranks come to the same conclusion.
type ArenasOfRanks = std::result::Result<Vec<Option<Region>>, String>;

/// What the ranks decide while they already read: whether bytes go from GPU to GPU.
#[derive(Default)]
pub(super) struct Decision {
    arenas: OnceLock<ArenasOfRanks>,
    /// The load has ended early, and nothing will be decided.
    is_void: AtomicBool,
}

impl Decision {
    /// Ends all waiting: there will be no decision.
    pub(super) fn void(&self) {
        self.is_void.store(true, Ordering::Release);
    }

    /// Waits until the ranks have decided; none if the load ends before.
    fn wait(&self) -> Option<&ArenasOfRanks> {
        loop {
            if let Some(arenas) = self.arenas.get() {
                return Some(arenas);
            }
            if self.is_void.load(Ordering::Acquire) {
                return None;
            }
            std::thread::sleep(COPY_POLL);
        }
    }
}

/// The chunks that this rank reads: its share, and if no bytes go from GPU to GPU, what others would have read for it.
pub(super) struct RankChunks {
    pub(super) share: Share,
    pub(super) rest: Share,
    pub(super) decision: Arc<Decision>,
}

impl Iterator for RankChunks {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        if let Some(chunk) = self.share.next() {
            return Some(chunk);
        }
        match self.decision.wait() {
            Some(Err(_)) => self.rest.next(),
            _ => None,
        }
    }
}

/// The copiers out of a part of the ring to the ranks' arenas. Those to other ranks' are made when they are needed first.
pub(super) struct RankCopiers {
    gpu: Arc<dyn Gpu>,
    ring: Region,
    rank: usize,
    copiers: Vec<Option<Box<dyn Copier>>>,
    decision: Arc<Decision>,
}

impl RankCopiers {
    pub(super) fn new(
        gpu: Arc<dyn Gpu>,
        ring: Region,
        arena: &Region,
        (rank, size): (usize, usize),
        decision: Arc<Decision>,
    ) -> Result<Self> {
        let own = gpu.copier(&ring, arena)?;
        let mut copiers: Vec<_> = (0..size).map(|_| None).collect();
        if let Some(copier) = copiers.get_mut(rank) {
            *copier = Some(own);
        }
        Ok(Self { gpu, ring, rank, copiers, decision })
    }

    pub(super) fn len(&self) -> usize {
        self.copiers.len()
    }

    /// The copier to a rank's arena; none if its process reads for itself.
    pub(super) fn copier(&mut self, rank: usize) -> Result<Option<&mut Box<dyn Copier>>> {
        let Some(copier) = self.copiers.get_mut(rank) else { return Err(Error::Incomplete) };
        if copier.is_none() && rank != self.rank {
            let arenas = self.decision.wait().ok_or(Error::Cancelled)?;
            let Ok(arenas) = arenas else { return Ok(None) };
            let arena = arenas.get(rank).and_then(Option::as_ref).ok_or(Error::Incomplete)?;
            *copier = Some(self.gpu.peers()?.peer_copier(&self.ring, arena)?);
        }
        Ok(copier.as_mut())
    }

    pub(super) fn get(&mut self, rank: usize) -> Option<&mut Box<dyn Copier>> {
        self.copiers.get_mut(rank)?.as_mut()
    }
}

fn open(
    gpu: &dyn Gpu,
    ticket: &[u8],
    fd: Option<OwnedFd>,
    expected: u64,
) -> std::result::Result<Region, String> {
    let ticket = Ticket::from_bytes(ticket).map_err(|e| e.to_string())?;
    let peers = gpu.peers().map_err(|e| e.to_string())?;
    let region = peers.open_shared(&SharedRegion { ticket, fd }).map_err(|e| e.to_string())?;
    if (region.len() as u64) < expected {
        return Err(format!("it has {} bytes, and its plan takes {expected}", region.len()));
    }
    Ok(region)
}

/// What is known of another rank.
#[derive(Clone, Default)]
struct Peer {
    /// Its arena, or why this rank does not reach it.
    arena: Option<std::result::Result<Region, String>>,
    /// Whether it reaches all arenas, or why not.
    reaches: Option<std::result::Result<(), String>>,
    /// It has passed on all that it reads, and writes to no other arena any more.
    is_done: bool,
    /// It has failed, and writes to no other arena any more.
    is_closed: bool,
    /// Its connection broke.
    has_left: bool,
}

/// The other ranks during a load.
struct Peers {
    met: Met,
    gpu: Arc<dyn Gpu>,
    known: Mutex<Vec<Peer>>,
    changed: Condvar,
    decision: Arc<Decision>,
    passed: AtomicU64,
    received: AtomicU64,
}

impl Peers {
    fn known(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, rank: usize, what: impl FnOnce(&mut Peer)) {
        if let Some(peer) = self.known().get_mut(rank) {
            what(peer);
        }
        self.changed.notify_all();
    }

    fn error(&self, rank: usize, link: &Link, why: impl Into<String>) -> Error {
        let group = self.met.group.name().into();
        Error::Rank { group, rank, pid: link.pid(), why: why.into() }
    }

    /// Shares the arena with the other ranks.
    fn share(&self, arena: &Region) -> Result<()> {
        let shared = self.gpu.peers().and_then(|peers| peers.share(arena));
        for (rank, link) in self.met.others() {
            let sent = match &shared {
                Ok(SharedRegion { ticket, fd }) => {
                    link.send_with(Kind::Arena, &ticket.to_bytes(), fd.as_ref().map(AsFd::as_fd))
                }
                Err(why) => link.send(Kind::NoArena, why.to_string().as_bytes()),
            };
            sent.map_err(|e| self.error(rank, link, e.to_string()))?;
        }
        Ok(())
    }

    /// Opens the arena that a rank shares.
    fn open(&self, rank: usize, message: Message) -> std::result::Result<Region, String> {
        if message.kind == Kind::NoArena {
            return Err(format!("rank {rank} cannot share its GPU memory: {}", message.text()));
        }
        let expected = self.met.plans.get(rank).map_or(0, |plan| plan.gpu_bytes);
        open(&*self.gpu, &message.bytes, message.fd, expected).map_err(|why| {
            format!("rank {} does not reach rank {rank}'s GPU memory: {why}", self.met.group.rank())
        })
    }

    /// Notes whether this rank reaches a rank's arena. Once that is known of all, the others are told.
    fn note_arena(&self, rank: usize, arena: std::result::Result<Region, String>) -> Result<()> {
        let mut known = self.known();
        if let Some(peer) = known.get_mut(rank) {
            peer.arena = Some(arena);
        }
        let others: Vec<usize> = self.met.others().map(|(rank, _)| rank).collect();
        let arenas: Option<Vec<_>> =
            others.iter().map(|rank| known.get(*rank).and_then(|peer| peer.arena.as_ref())).collect();
        if let Some(arenas) = arenas {
            let (kind, text) = match arenas.into_iter().find_map(|arena| arena.as_ref().err()) {
                None => (Kind::Reached, String::new()),
                Some(why) => (Kind::NotReached, why.clone()),
            };
            self.met.send_all(kind, text.as_bytes())?;
        }
        self.decide(&known);
        Ok(())
    }

    fn note_reach(&self, rank: usize, reaches: std::result::Result<(), String>) {
        let mut known = self.known();
        if let Some(peer) = known.get_mut(rank) {
            peer.reaches = Some(reaches);
        }
        self.decide(&known);
    }

    /// Decides once every rank has said which arenas it reaches.
    fn decide(&self, known: &[Peer]) {
        let mut arenas: Vec<Option<Region>> = known.iter().map(|_| None).collect();
        let mut why = None;
        for (rank, _) in self.met.others() {
            let Some(Peer { arena: Some(arena), reaches: Some(reaches), .. }) = known.get(rank) else {
                return;
            };
            match (arena, reaches, arenas.get_mut(rank)) {
                (Ok(arena), Ok(()), Some(slot)) => *slot = Some(arena.clone()),
                (Err(reason), ..) | (_, Err(reason), _) => drop(why.get_or_insert(reason.clone())),
                _ => {}
            }
        }
        let _ = self.decision.arenas.set(why.map_or(Ok(arenas), Err));
    }

    /// Takes what a rank sends until it is done, or gone.
    fn listen(&self, rank: usize, shared: &LoadShared, arrived: &Sender<Chunk>, own: &Own) {
        let Some(Some(link)) = self.met.links.get(rank) else { return };
        loop {
            let message = match link.receive(POLL) {
                Ok(Received::Nothing) => continue,
                Ok(Received::Message(message)) => message,
                Ok(Received::End) => {
                    self.note(rank, |peer| peer.has_left = true);
                    shared.fail(self.error(rank, link, "it ended before the load was over"));
                    return;
                }
                Err(e) => {
                    self.note(rank, |peer| peer.has_left = true);
                    shared.fail(self.error(rank, link, e.to_string()));
                    return;
                }
            };
            match message.kind {
                Kind::Arena | Kind::NoArena => {
                    if let Err(error) = self.note_arena(rank, self.open(rank, message)) {
                        shared.fail(error);
                    }
                }
                Kind::Reached => self.note_reach(rank, Ok(())),
                Kind::NotReached => self.note_reach(rank, Err(message.text())),
                Kind::Arrived => match arrival(&message.bytes, own) {
                    Some(chunk) => {
                        let bytes = chunk.copies.iter().map(Copy::bytes).sum();
                        self.received.fetch_add(bytes, Ordering::AcqRel);
                        // The receiver may be gone: then the load was cancelled.
                        let _ = arrived.send(chunk);
                    }
                    None => shared.fail(self.error(rank, link, "it passed on what nobody needs")),
                },
                Kind::Done => return self.note(rank, |peer| peer.is_done = true),
                Kind::Failed => shared.fail(self.error(rank, link, message.text())),
                Kind::Closed => return self.note(rank, |peer| peer.is_closed = true),
                kind => shared.fail(self.error(rank, link, format!("it sent {kind:?} out of turn"))),
            }
        }
    }
}

/// What this rank can get.
#[derive(Clone, Copy)]
struct Own {
    /// Length of its arena.
    bytes: u64,
    /// More chunks than all ranks together have.
    chunks: u64,
}

/// The message that bytes of a chunk have arrived in a rank's arena.
fn arrived_message(index: u64, ranges: impl Iterator<Item = (u64, u64)>) -> Vec<u8> {
    let numbers = [index].into_iter().chain(ranges.flat_map(|(to, bytes)| [to, bytes]));
    numbers.flat_map(u64::to_le_bytes).collect()
}

/// The chunk of such a message; none if it is invalid.
fn arrival(bytes: &[u8], own: &Own) -> Option<Chunk> {
    let (index, ranges) = bytes.split_first_chunk::<8>()?;
    let index = u64::from_le_bytes(*index);
    if index >= own.chunks || ranges.is_empty() || !ranges.len().is_multiple_of(16) {
        return None;
    }
    let copies = ranges.chunks_exact(16).map(|range| {
        let (to, bytes) = range.split_first_chunk::<8>()?;
        let (to, row) = (u64::from_le_bytes(*to), u64::from_le_bytes(bytes.try_into().ok()?));
        to.checked_add(row).filter(|end| *end <= own.bytes)?;
        Some(Copy { slot: 0, to, row, rows: 1, step: row })
    });
    let copies: Vec<Copy> = copies.collect::<Option<_>>()?;
    Some(Chunk { index, file: 0, reads: Vec::new(), copies, passes: Vec::new(), direct: None })
}

/// Passes on what has arrived in this rank's arena.
struct Passer {
    peers: Arc<Peers>,
    shared: Arc<LoadShared>,
    places: Arenas,
    arena: Region,
    /// To each other rank's arena; empty if each process reads for itself.
    copiers: Vec<Option<Box<dyn Copier>>>,
    /// Chunks whose copies are in progress, oldest first.
    passing: VecDeque<Passing>,
}

/// Chunks whose copies are in progress.
struct Passing {
    chunks: Vec<Chunk>,
    marks: Vec<(usize, Mark)>,
}

impl Passer {
    fn run(&mut self, chunks: &Receiver<Chunk>) {
        if let Err(error) = self.make_copiers().and_then(|()| self.pass_all(chunks)) {
            self.shared.fail(error);
        }
        self.peers.decision.void();
        if self.shared.is_stopped() {
            let why = self.shared.failure().unwrap_or_else(|| "it was cancelled".into());
            let _ = self.peers.met.send_all(Kind::Failed, why.as_bytes());
        }
        if !self.shared.is_stopped()
            && let Err(error) = self.peers.met.send_all(Kind::Done, &[])
        {
            self.shared.fail(error);
        }
        // Waits for copies in progress, of which there are some only after a failure.
        self.copiers.clear();
        self.peers.changed.notify_all();
    }

    /// Makes the copiers once the ranks have decided. There are none if each process reads for itself.
    fn make_copiers(&mut self) -> Result<()> {
        let deadline = self.peers.met.deadline();
        while !self.shared.is_stopped() {
            match self.peers.decision.arenas.get() {
                Some(Ok(arenas)) => {
                    let peers = self.peers.gpu.peers()?;
                    let copier = |to: &Option<Region>| {
                        to.as_ref().map(|to| peers.peer_copier(&self.arena, to)).transpose()
                    };
                    self.copiers = arenas.iter().map(copier).collect::<onehop_gpu::Result<_>>()?;
                    return Ok(());
                }
                Some(Err(_)) => return Ok(()),
                None if Instant::now() > deadline => {
                    let known = self.peers.known();
                    let silent = self.peers.met.others().find(|(rank, _)| {
                        known.get(*rank).is_none_or(|peer| peer.arena.is_none() || peer.reaches.is_none())
                    });
                    let Some((rank, link)) = silent else { return Err(Error::Incomplete) };
                    let why =
                        format!("it has not said for {:?} what it reaches", self.peers.met.group.timeout());
                    return Err(self.peers.error(rank, link, why));
                }
                None => std::thread::sleep(COPY_POLL),
            }
        }
        Ok(())
    }

    /// Passes on chunks until there will be no more.
    fn pass_all(&mut self, chunks: &Receiver<Chunk>) -> Result<()> {
        let mut more = true;
        while (more || !self.passing.is_empty()) && !self.shared.is_stopped() {
            let next = if self.passing.is_empty() {
                chunks.recv_timeout(POLL)
            } else {
                chunks.try_recv().map_err(|e| match e {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                })
            };
            match next {
                Ok(chunk) => {
                    let batch = [chunk].into_iter().chain(chunks.try_iter().take(BATCH - 1)).collect();
                    self.begin(batch)?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    more = false;
                    if !self.passing.is_empty() {
                        std::thread::sleep(COPY_POLL);
                    }
                }
                Err(RecvTimeoutError::Timeout) if !self.passing.is_empty() => std::thread::sleep(COPY_POLL),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.report()?;
        }
        Ok(())
    }

    /// Starts the copies of some chunks.
    fn begin(&mut self, chunks: Vec<Chunk>) -> Result<()> {
        if self.copiers.is_empty() {
            return Ok(());
        }
        let mut rows: Vec<Vec<Rows>> = self.copiers.iter().map(|_| Vec::new()).collect();
        for pass in chunks.iter().flat_map(|chunk| &chunk.passes) {
            let (from, to, row) = (pass.from as usize, pass.to as usize, pass.bytes as usize);
            let list = rows.get_mut(pass.rank).ok_or(Error::Incomplete)?;
            match list.last_mut() {
                Some(last) if (last.from + last.row, last.to + last.row) == (from, to) => last.row += row,
                _ => list.push(Rows { from, to, row, rows: 1, step: row }),
            }
        }
        for list in &mut rows {
            list.iter_mut().for_each(|rows| rows.step = rows.row);
        }
        let mut marks = Vec::new();
        for (rank, (copier, rows)) in self.copiers.iter_mut().zip(&rows).enumerate() {
            if let Some(copier) = copier
                && !rows.is_empty()
            {
                copier.copy_all(rows)?;
                marks.push((rank, copier.mark()?));
            }
        }
        self.passing.push_back(Passing { chunks, marks });
        Ok(())
    }

    /// Tells the others of what has arrived at theirs.
    fn report(&mut self) -> Result<()> {
        while let Some(first) = self.passing.front() {
            for (rank, mark) in &first.marks {
                if let Some(Some(copier)) = self.copiers.get_mut(*rank)
                    && !copier.is_over(*mark)?
                {
                    return Ok(());
                }
            }
            let Some(over) = self.passing.pop_front() else { break };
            for chunk in &over.chunks {
                self.tell(chunk)?;
            }
        }
        Ok(())
    }

    fn tell(&self, chunk: &Chunk) -> Result<()> {
        for (rank, link) in self.peers.met.others() {
            let passed =
                chunk.passes.iter().filter(|pass| pass.rank == rank).map(|pass| (pass.to, pass.bytes));
            let copied = chunk.copies.iter().filter_map(|copy| {
                let (to_rank, to) = self.places.place(copy);
                (to_rank == rank).then(|| (to, copy.bytes()))
            });
            let ranges: Vec<(u64, u64)> = passed.chain(copied).collect();
            if ranges.is_empty() {
                continue;
            }
            let bytes = ranges.iter().map(|(_, bytes)| bytes).sum();
            self.peers.passed.fetch_add(bytes, Ordering::AcqRel);
            let message = arrived_message(chunk.index, ranges.into_iter());
            link.send(Kind::Arrived, &message).map_err(|e| self.peers.error(rank, link, e.to_string()))?;
        }
        Ok(())
    }
}

/// The part of a load that concerns other ranks. Dropping it before it is finished ends their loads too; it is dropped
/// after the threads that write to their arenas.
pub(super) struct GroupLoad {
    peers: Arc<Peers>,
    shared: Arc<LoadShared>,
    passer: Option<JoinHandle<()>>,
    listeners: Vec<JoinHandle<()>>,
    /// Others may write to it as long as they have not said that they do not.
    arena: Region,
    is_finished: bool,
}

/// What a load needs to be one of a group.
pub(super) struct GroupStart {
    pub(super) met: Met,
    pub(super) gpu: Arc<dyn Gpu>,
    pub(super) shared: Arc<LoadShared>,
    pub(super) arena: Region,
    pub(super) places: Arenas,
    pub(super) decision: Arc<Decision>,
    /// Where chunks come from that have arrived in the arena and concern others.
    pub(super) passes: Receiver<Chunk>,
    /// Where chunks go that others have passed on.
    pub(super) arrived: Sender<Chunk>,
}

impl GroupLoad {
    pub(super) fn start(start: GroupStart) -> Result<Self> {
        let GroupStart { met, gpu, shared, arena, places, decision, passes, arrived } = start;
        let block = met.plans.iter().map(|plan| plan.options.block).max().unwrap_or(1).max(1);
        // Each chunk has a block or more of some plan, whose ranges may each end in one that is not full.
        let chunks =
            met.plans.iter().map(|plan| plan.read_bytes / block + 2 * plan.ranges.len() as u64 + 1).sum();
        let own = Own { bytes: arena.len() as u64, chunks };
        let known = Mutex::new(vec![Peer::default(); met.group.size()]);
        let ranks: Vec<usize> = met.others().map(|(rank, _)| rank).collect();
        let (passed, received) = (AtomicU64::new(0), AtomicU64::new(0));
        let peers = Peers { met, gpu, known, changed: Condvar::new(), decision, passed, received };
        let peers = Arc::new(peers);
        let mut this = Self {
            peers: peers.clone(),
            shared: shared.clone(),
            passer: None,
            listeners: Vec::new(),
            arena: arena.clone(),
            is_finished: false,
        };
        peers.share(&arena)?;
        // A group of one has.
        peers.decide(&peers.known());
        for rank in ranks {
            let (peers, shared, arrived) = (peers.clone(), shared.clone(), arrived.clone());
            let listen = move || peers.listen(rank, &shared, &arrived, &own);
            let thread = std::thread::Builder::new().name(format!("listens to rank {rank}")).spawn(listen);
            this.listeners.push(thread.map_err(Error::Thread)?);
        }
        let mut passer =
            Passer { peers, shared, places, arena, copiers: Vec::new(), passing: VecDeque::new() };
        let thread = std::thread::Builder::new().name("passes bytes on".into());
        this.passer = Some(thread.spawn(move || passer.run(&passes)).map_err(Error::Thread)?);
        Ok(this)
    }

    /// How it went so far.
    pub(super) fn account(&self) -> GroupAccount {
        let why_alone = self.peers.decision.arenas.get().and_then(|arenas| arenas.as_ref().err().cloned());
        GroupAccount {
            rank: self.peers.met.group.rank(),
            size: self.peers.met.group.size(),
            way: if why_alone.is_none() { "peer" } else { "alone" },
            why_alone,
            passed_bytes: self.peers.passed.load(Ordering::Acquire),
            received_bytes: self.peers.received.load(Ordering::Acquire),
        }
    }

    /// Waits until every rank has all of its bytes from this one, and this one from them.
    pub(super) fn finish(&mut self) -> Result<()> {
        let (mut start, mut moved) = (Instant::now(), 0);
        loop {
            if self.shared.is_stopped() {
                return Err(self.shared.why());
            }
            let is_passed = self.passer.as_ref().is_none_or(JoinHandle::is_finished);
            let known = self.peers.known();
            let missing =
                self.peers.met.others().any(|(rank, _)| known.get(rank).is_none_or(|peer| !peer.is_done));
            if is_passed && !missing {
                break;
            }
            drop(self.peers.changed.wait_timeout(known, POLL).map(|(known, _)| known));
            let account = self.account();
            let now = account.passed_bytes + account.received_bytes;
            if now != moved {
                (start, moved) = (Instant::now(), now);
            } else if start.elapsed() > STALL {
                return Err(Error::Stalled { waited: STALL });
            }
        }
        self.is_finished = true;
        Ok(())
    }

    /// Ends the load of the others, and waits until they no longer write to the arena.
    fn abort(&mut self) {
        self.shared.stop();
        self.peers.decision.void();
        let start = Instant::now();
        let left = || CLOSE.saturating_sub(start.elapsed());
        let passer = self.passer.take();
        while passer.as_ref().is_some_and(|passer| !passer.is_finished()) && !left().is_zero() {
            std::thread::sleep(POLL);
        }
        // Without a passer, nobody has told them yet.
        if passer.is_none() {
            let _ = self.peers.met.send_all(Kind::Failed, b"it could not start");
        }
        if passer.is_none_or(|passer| passer.is_finished()) {
            let _ = self.peers.met.send_all(Kind::Closed, &[]);
        }
        let mut are_closed = true;
        for (rank, link) in self.peers.met.others() {
            let mut known = self.peers.known();
            let peer = loop {
                let peer = known.get(rank).cloned().unwrap_or_default();
                if peer.is_done || peer.is_closed || peer.has_left || left().is_zero() {
                    break peer;
                }
                let waited = self.peers.changed.wait_timeout(known, POLL);
                known = waited.unwrap_or_else(PoisonError::into_inner).0;
            };
            drop(known);
            are_closed &= peer.is_done || peer.is_closed || (peer.has_left && link.wait_for_end(left()));
        }
        if !are_closed {
            // A rank that does not answer may still write to it.
            std::mem::forget(self.arena.clone());
        }
    }
}

impl Drop for GroupLoad {
    fn drop(&mut self) {
        if !self.is_finished {
            self.abort();
        }
        self.peers.met.others().for_each(|(_, link)| link.shut_down());
        for listener in self.listeners.drain(..) {
            let _ = listener.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_arrivals_are_refused() {
        let own = Own { bytes: 100, chunks: 3 };
        let message = arrived_message(2, [(10, 20), (90, 10)].into_iter());
        let chunk = arrival(&message, &own).unwrap();
        assert_eq!(
            (chunk.index, chunk.copies.len(), chunk.copies[1].to, chunk.copies[1].row),
            (2, 2, 90, 10)
        );
        for bad in [
            arrived_message(3, [(10, 20)].into_iter()),
            arrived_message(2, [].into_iter()),
            arrived_message(2, [(91, 10)].into_iter()),
            arrived_message(2, [(u64::MAX, 10)].into_iter()),
            message[..20].to_vec(),
            Vec::new(),
        ] {
            assert!(arrival(&bad, &own).is_none(), "{bad:?}");
        }
    }
}
