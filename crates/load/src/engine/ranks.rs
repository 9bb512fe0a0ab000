//! A load of several processes: this one passes on what others need of what it reads, and gets the rest from them.

mod decision;
mod passer;
mod peers;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};
use serde::Serialize;

use super::start::StartingLoad;
use super::worker_pool::{Copiers, LoadLane, LoadShared, WorkerPool};
use super::{Account, Arena, LoadWork, Prepared, RegisteredRing, RingEngine, STALL};
use crate::error::{Error, Result};
use crate::group::{Kind, Met};
use crate::plan::{Arenas, Chunk, Plan, Share};
pub(super) use decision::RankCopiers;
use decision::{Decision, RankChunks};
use passer::Passer;
use peers::{Own, Peer, Peers};

/// How long a rank waits for the others after a failure before it gives its arena up: they may still write to it.
const CLOSE: Duration = Duration::from_secs(5);
/// How long a thread sleeps before it looks whether the load goes on.
const POLL: Duration = Duration::from_millis(20);
/// How long a thread sleeps while copies, or a decision, are about to end.
const COPY_POLL: Duration = Duration::from_micros(50);

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

impl RingEngine {
    /// Starts this process's share of a load of several, into a new arena or that of [`Prepared::into_arenas`]. If one of
    /// the processes does not reach another's GPU memory, each reads all that it needs.
    ///
    /// # Errors
    /// As for [`RingEngine::start`]. When another process fails.
    pub fn start_in_group(gpu: &Arc<dyn Gpu>, plan: &Plan, mut prepared: Prepared) -> Result<Self> {
        let Some(met) = prepared.met.take() else { return Self::start(&**gpu, plan, prepared) };
        let Prepared { work, ring, ring_cache, slot, part, threads, direct, mut arenas, .. } = prepared;
        let arena = arenas.pop().map_or_else(|| Arena::shared(&**gpu, plan), Ok)?.region_for(plan)?;
        let Some(RegisteredRing { memory: ring, known }) = ring else {
            let why = "it passes nothing on; leave the group out, or load by another route";
            return Err(Error::NotByCuFile { what: "a load of several processes".into(), why: why.into() });
        };
        let plans: Vec<&Plan> = met.plans.iter().collect();
        let (rank, size, places) = (met.group().rank(), met.group().size(), Arenas::new(&plans));
        let decision = Arc::<Decision>::default();
        let left = RankChunks {
            share: Share::new(&plans, rank, slot as u64)?,
            rest: Share::rest(&plans, rank, slot as u64)?,
            decision: decision.clone(),
        };
        let LoadWork { sources, asked, why_cached, .. } = work;
        let ring_bytes = ring.len() as u64;
        let account = Account { threads, ring_bytes, asked, why_cached, ..Account::default() };
        let stays = !gpu.simulated();
        let shared = LoadShared::new(sources, Box::new(left));
        let start = StartingLoad { pool: WorkerPool::new(shared), ring: &ring, slot, part, real: stays };
        let started = start.threads(threads, direct)?;
        let ((sender, arrived), (passes, passed)) = (channel(), channel());
        let group = GroupLoad::start(GroupStart {
            met,
            gpu: gpu.clone(),
            shared: started.shared(),
            arena: arena.clone(),
            places: places.clone(),
            decision: decision.clone(),
            passes: passed,
            arrived: sender.clone(),
        });
        let group = Some(group.inspect_err(|_| decision.void())?);
        let known = known.map_or_else(|| gpu.adopt(Place::PinnedHost, ring.clone()), Ok)?;
        let pool = Arc::new(started.open(|range, slot| {
            let ring = known.slice(range)?;
            let copiers = RankCopiers::new(gpu.clone(), ring, &arena, (rank, size), decision.clone())?;
            let (copiers, arenas) = (Copiers::Ranks(copiers), places.clone());
            let (arrived, passes) = (vec![(rank, sender.clone())], Some(passes.clone()));
            Ok(LoadLane { slot, copiers, arenas, arrived, passes })
        })?);
        let ring = Some(known);
        Ok(Self { ring, ring_cache, stays, group, ..Self::of(arena, pool, arrived, account) })
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
struct GroupStart {
    met: Met,
    gpu: Arc<dyn Gpu>,
    shared: Arc<LoadShared>,
    arena: Region,
    places: Arenas,
    decision: Arc<Decision>,
    /// Where chunks come from that have arrived in the arena and concern others.
    passes: Receiver<Chunk>,
    /// Where chunks go that others have passed on.
    arrived: Sender<Chunk>,
}

impl GroupLoad {
    fn start(start: GroupStart) -> Result<Self> {
        let GroupStart { mut met, gpu, shared, arena, places, decision, passes, arrived } = start;
        met.is_started = true;
        let block = met.plans.iter().map(|plan| plan.options.block).max().unwrap_or(1).max(1);
        // Each chunk has a block or more of some plan, whose ranges may each end in one that is not full.
        let chunks =
            met.plans.iter().map(|plan| plan.read_bytes / block + 2 * plan.ranges.len() as u64 + 1).sum();
        let own = Own { bytes: arena.len() as u64, chunks };
        let known = Mutex::new(vec![Peer::default(); met.group.size()]);
        let ranks: Vec<usize> = met.others().map(|(rank, _)| rank).collect();
        let (passed, received) = (AtomicU64::new(0), AtomicU64::new(0));
        let (heard, has_failed) = (Mutex::new(Instant::now()), AtomicBool::new(false));
        let changed = Condvar::new();
        let peers = Peers { met, gpu, known, changed, decision, passed, received, heard, has_failed };
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
        let mut passer = Passer {
            peers,
            shared,
            places,
            arena,
            copiers: Vec::new(),
            arrived,
            passing: VecDeque::new(),
            alive: (Instant::now(), 0),
        };
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

    /// The error of a load for which nothing has arrived for [`STALL`].
    pub(super) fn stalled(&self) -> Error {
        self.given_up(
            self.peers.short_of(&format!("nothing has come of it for {STALL:?}, and it is not done")),
        )
    }

    /// Ends the load with an error, which the other ranks get as well.
    fn given_up(&self, error: Error) -> Error {
        self.shared.give_up(&error.to_string());
        error
    }

    /// The error of a load that lacks bytes though every rank is done.
    pub(super) fn incomplete(&self) -> Error {
        self.given_up(self.peers.short_of("it has passed on less than this rank needs"))
    }

    /// Waits until every rank has all of its bytes from this one, and this one from them.
    pub(super) fn finish(&mut self) -> Result<()> {
        let start = Instant::now();
        while !self.are_all_done() {
            if self.shared.is_stopped() {
                return Err(self.shared.why());
            }
            if self.is_silent_since(start) {
                return Err(self.stalled());
            }
            let known = self.peers.known();
            drop(self.peers.changed.wait_timeout(known, POLL).map(|(known, _)| known));
        }
        self.is_finished = true;
        Ok(())
    }

    /// Whether this rank has passed on everything, and all others have too.
    pub(super) fn are_all_done(&self) -> bool {
        let known = self.peers.known();
        let is_done = |rank: usize| known.get(rank).is_some_and(|peer| peer.is_done);
        self.passer.as_ref().is_none_or(JoinHandle::is_finished)
            && self.peers.met.others().all(|(rank, _)| is_done(rank))
    }

    /// Whether no rank was heard of for [`STALL`], which is also how long this one has waited. While the ranks have not
    /// decided, they have a limit of their own.
    pub(super) fn is_silent_since(&self, start: Instant) -> bool {
        let last = (*self.peers.heard()).max(start);
        self.peers.decision.arenas.get().is_some() && last.elapsed() > STALL
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
        self.peers.fail(&self.shared.failure().unwrap_or_else(|| "it was cancelled".into()));
        // A thread that waits for a disk may come back later, and must not find an arena that is gone.
        let has_ended = self.shared.has_ended.load(Ordering::Acquire);
        if has_ended && passer.is_none_or(|passer| passer.is_finished()) {
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
