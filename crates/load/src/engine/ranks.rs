//! A load of several processes: this one passes on what others need of what it reads, and gets the rest from them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_gpu::cuda::Ticket;
use onehop_gpu::{Copier, Gpu, Mark, Region, Rows, SharedRegion};
use serde::Serialize;

use super::STALL;
use super::worker_pool::LoadShared;
use crate::error::{Error, Result};
use crate::group::{Kind, Link, Met, Received};
use crate::plan::{Arenas, Chunk, Copy};

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

/// Shares the arena with the other ranks and opens theirs. Returns them by rank, or why one of the ranks does not reach
/// another's: all ranks come to the same conclusion.
pub(super) fn exchange(
    met: &Met,
    gpu: &dyn Gpu,
    arena: &Region,
    go_on: &dyn Fn() -> bool,
) -> Result<Result<Vec<Option<Region>>, String>> {
    let deadline = met.deadline();
    let shared = gpu.peers().and_then(|peers| peers.share(arena));
    for (rank, link) in met.others() {
        let sent = match &shared {
            Ok(SharedRegion { ticket, fd }) => {
                link.send_with(Kind::Arena, &ticket.to_bytes(), fd.as_ref().map(AsFd::as_fd))
            }
            Err(why) => link.send(Kind::NoArena, why.to_string().as_bytes()),
        };
        sent.map_err(|e| met.fail(rank, e.to_string()))?;
    }
    let mut opened: Vec<Option<Region>> = (0..met.group.size()).map(|_| None).collect();
    let mut why = None;
    for (rank, _) in met.others() {
        let message = met.receive(rank, &[Kind::Arena, Kind::NoArena], deadline, go_on)?;
        let region = if message.kind == Kind::NoArena {
            Err(format!("rank {rank} cannot share its GPU memory: {}", message.text()))
        } else {
            let expected = met.plans.get(rank).map_or(0, |plan| plan.gpu_bytes);
            open(gpu, &message.bytes, message.fd, expected).map_err(|why| {
                format!("rank {} does not reach rank {rank}'s GPU memory: {why}", met.group.rank())
            })
        };
        match region {
            Ok(region) => opened.get_mut(rank).into_iter().for_each(|slot| *slot = Some(region.clone())),
            Err(reason) => drop(why.get_or_insert(reason)),
        }
    }
    let (kind, text) = match &why {
        None => (Kind::Reached, ""),
        Some(why) => (Kind::NotReached, &**why),
    };
    met.send_all(kind, text.as_bytes())?;
    for (rank, _) in met.others() {
        let message = met.receive(rank, &[Kind::Reached, Kind::NotReached], deadline, go_on)?;
        if message.kind == Kind::NotReached {
            why.get_or_insert_with(|| message.text());
        }
    }
    Ok(why.map_or(Ok(opened), Err))
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
#[derive(Clone, Copy, Default)]
struct Peer {
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
    known: Mutex<Vec<Peer>>,
    changed: Condvar,
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
    /// To each other rank's arena.
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
        if let Err(error) = self.pass_all(chunks) {
            self.shared.fail(error);
        }
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
pub(super) struct GroupStart<'a> {
    pub(super) met: Met,
    pub(super) gpu: &'a dyn Gpu,
    pub(super) shared: Arc<LoadShared>,
    pub(super) arena: Region,
    /// The other ranks' arenas.
    pub(super) opened: &'a [Option<Region>],
    pub(super) places: Arenas,
    /// Where chunks come from that have arrived in the arena and concern others.
    pub(super) passes: Receiver<Chunk>,
    /// Where chunks go that others have passed on.
    pub(super) arrived: Sender<Chunk>,
}

impl GroupLoad {
    pub(super) fn start(start: GroupStart<'_>) -> Result<Self> {
        let GroupStart { met, gpu, shared, arena, opened, places, passes, arrived } = start;
        let copiers = opened.iter().map(|to| {
            let copier = to.as_ref().map(|to| gpu.peers()?.peer_copier(&arena, to));
            copier.transpose()
        });
        let copiers = copiers.collect::<onehop_gpu::Result<Vec<_>>>()?;
        let block = met.plans.iter().map(|plan| plan.options.block).max().unwrap_or(1).max(1);
        // Each chunk has a block or more of some plan, whose ranges may each end in one that is not full.
        let chunks =
            met.plans.iter().map(|plan| plan.read_bytes / block + 2 * plan.ranges.len() as u64 + 1).sum();
        let own = Own { bytes: arena.len() as u64, chunks };
        let known = Mutex::new(vec![Peer::default(); met.group.size()]);
        let ranks: Vec<usize> = met.others().map(|(rank, _)| rank).collect();
        let (passed, received) = (AtomicU64::new(0), AtomicU64::new(0));
        let peers = Arc::new(Peers { met, known, changed: Condvar::new(), passed, received });
        let mut this = Self {
            peers: peers.clone(),
            shared: shared.clone(),
            passer: None,
            listeners: Vec::new(),
            arena,
            is_finished: false,
        };
        for rank in ranks {
            let (peers, shared, arrived) = (peers.clone(), shared.clone(), arrived.clone());
            let listen = move || peers.listen(rank, &shared, &arrived, &own);
            let thread = std::thread::Builder::new().name(format!("listens to rank {rank}")).spawn(listen);
            this.listeners.push(thread.map_err(Error::Thread)?);
        }
        let mut passer = Passer { peers, shared, places, copiers, passing: VecDeque::new() };
        let thread = std::thread::Builder::new().name("passes bytes on".into());
        this.passer = Some(thread.spawn(move || passer.run(&passes)).map_err(Error::Thread)?);
        Ok(this)
    }

    /// How it went so far.
    pub(super) fn account(&self) -> GroupAccount {
        GroupAccount {
            rank: self.peers.met.group.rank(),
            size: self.peers.met.group.size(),
            way: "peer",
            why_alone: None,
            passed_bytes: self.peers.passed.load(Ordering::Acquire),
            received_bytes: self.peers.received.load(Ordering::Acquire),
        }
    }

    /// Waits until every rank has all of its bytes from this one, and this one from them.
    pub(super) fn finish(mut self) -> Result<()> {
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
                let peer = known.get(rank).copied().unwrap_or_default();
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
