//! The other ranks during a load: what they share, reach and pass on.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use onehop_gpu::cuda::Ticket;
use onehop_gpu::{Gpu, Region, SharedRegion};

use super::super::worker_pool::LoadShared;
use super::POLL;
use super::decision::Decision;
use crate::error::{Error, Result};
use crate::group::{Kind, Met, RankLink, RankMessage, Received};
use crate::plan::{Chunk, Copy};

/// What is known of another rank.
#[derive(Clone, Default)]
pub(super) struct Peer {
    /// Its arena, or why this rank does not reach it.
    pub(super) arena: Option<std::result::Result<Region, String>>,
    /// Whether it reaches all arenas, or why not.
    pub(super) reaches: Option<std::result::Result<(), String>>,
    /// It has passed on all that it reads, and writes to no other arena any more.
    pub(super) is_done: bool,
    /// It has failed, and writes to no other arena any more.
    pub(super) is_closed: bool,
    /// Its connection broke.
    pub(super) has_left: bool,
}

/// The other ranks during a load.
pub(super) struct Peers {
    pub(super) met: Met,
    pub(super) gpu: Arc<dyn Gpu>,
    pub(super) known: Mutex<Vec<Peer>>,
    pub(super) changed: Condvar,
    pub(super) decision: Arc<Decision>,
    pub(super) passed: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) heard: Mutex<Instant>,
    pub(super) has_failed: AtomicBool,
}

impl Peers {
    /// When a rank was last heard of.
    pub(super) fn heard(&self) -> MutexGuard<'_, Instant> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the others once why this rank fails.
    pub(super) fn fail(&self, why: &str) {
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            let _ = self.met.send_all(Kind::Failed, why.as_bytes());
        }
    }

    pub(super) fn known(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, rank: usize, what: impl FnOnce(&mut Peer)) {
        if let Some(peer) = self.known().get_mut(rank) {
            what(peer);
        }
        self.changed.notify_all();
    }

    pub(super) fn error(&self, rank: usize, link: &RankLink, why: impl Into<String>) -> Error {
        let group = self.met.group.name().into();
        Error::Rank { group, rank, pid: link.pid(), why: why.into() }
    }

    /// Shares the arena with the other ranks.
    pub(super) fn share(&self, arena: &Region) -> Result<()> {
        let shared = self.gpu.peers().and_then(|peers| peers.share(arena));
        for (rank, link) in self.met.others() {
            let sent = match &shared {
                Ok(SharedRegion { ticket, fd }) => {
                    link.send_with(Kind::Arena, &ticket.to_bytes(), fd.as_ref().map(AsFd::as_fd))
                }
                Err(why) => link.send(Kind::NoArena, why.to_string().as_bytes()),
            };
            match sent {
                // Why it closed its end, who listens to it finds out.
                Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
                sent => sent.map_err(|e| self.error(rank, link, e.to_string()))?,
            }
        }
        Ok(())
    }

    /// Opens the arena that a rank shares.
    fn open(&self, rank: usize, message: RankMessage) -> std::result::Result<Region, String> {
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
        let arenas = self.met.others().map(|(rank, _)| known.get(rank).and_then(|peer| peer.arena.as_ref()));
        let arenas: Option<Vec<_>> = arenas.collect();
        let why = arenas.map(|arenas| arenas.into_iter().find_map(|arena| arena.as_ref().err().cloned()));
        self.decide(&known);
        drop(known);
        match why {
            None => Ok(()),
            Some(None) => self.met.send_all(Kind::Reached, &[]),
            Some(Some(why)) => self.met.send_all(Kind::NotReached, why.as_bytes()),
        }
    }

    fn note_reach(&self, rank: usize, reaches: std::result::Result<(), String>) {
        let mut known = self.known();
        if let Some(peer) = known.get_mut(rank) {
            peer.reaches = Some(reaches);
        }
        self.decide(&known);
    }

    /// Decides once every rank has said which arenas it reaches.
    pub(super) fn decide(&self, known: &[Peer]) {
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

    /// The error of a load that gets nothing more from the others: `why` says so of the first that is not done.
    pub(super) fn short_of(&self, why: &str) -> Error {
        let known = self.known();
        let is_done = |rank: usize| known.get(rank).is_some_and(|peer| peer.is_done);
        let first = self.met.others().map(|(rank, _)| rank).find(|rank| !is_done(*rank));
        match first.or_else(|| self.met.others().map(|(rank, _)| rank).next()) {
            Some(rank) => self.met.error(rank, why),
            None => Error::Incomplete,
        }
    }

    /// Takes what a rank sends until it is done, or gone.
    pub(super) fn listen(&self, rank: usize, shared: &LoadShared, arrived: &Sender<Chunk>, own: &Own) {
        let Some(Some(link)) = self.met.links.get(rank) else { return };
        loop {
            let message = match link.receive(POLL) {
                Ok(Received::Nothing) => continue,
                Ok(Received::Message(message)) => message,
                Ok(Received::End) => {
                    let is_done = self.known().get(rank).is_some_and(|peer| peer.is_done);
                    self.note(rank, |peer| peer.has_left = true);
                    if !is_done {
                        shared.fail(self.error(rank, link, "it ended before the load was over"));
                    }
                    return;
                }
                Err(e) => {
                    self.note(rank, |peer| peer.has_left = true);
                    shared.fail(self.error(rank, link, e.to_string()));
                    return;
                }
            };
            *self.heard() = Instant::now();
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
                Kind::Alive => {}
                // It may still fail while others are not done.
                Kind::Done => self.note(rank, |peer| peer.is_done = true),
                Kind::Failed => shared.fail(self.error(rank, link, message.text())),
                Kind::Closed => return self.note(rank, |peer| peer.is_closed = true),
                kind => shared.fail(self.error(rank, link, format!("it sent {kind:?} out of turn"))),
            }
        }
    }
}

/// What this rank can get.
#[derive(Clone, Copy)]
pub(super) struct Own {
    /// Length of its arena.
    pub(super) bytes: u64,
    /// More chunks than all ranks together have.
    pub(super) chunks: u64,
}

/// The message that bytes of a chunk have arrived in a rank's arena.
pub(super) fn arrived_message(index: u64, ranges: impl Iterator<Item = (u64, u64)>) -> Vec<u8> {
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
        to.checked_add(row).filter(|end| row > 0 && *end <= own.bytes)?;
        Some(Copy { slot: 0, to, row, rows: 1, step: row })
    });
    let copies: Vec<Copy> = copies.collect::<Option<_>>()?;
    Some(Chunk { index, file: 0, reads: Vec::new(), copies, passes: Vec::new(), direct: None })
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
            arrived_message(2, [(10, 0)].into_iter()),
            arrived_message(2, [(91, 10)].into_iter()),
            arrived_message(2, [(u64::MAX, 10)].into_iter()),
            message[..20].to_vec(),
            Vec::new(),
        ] {
            assert!(arrival(&bad, &own).is_none(), "{bad:?}");
        }
    }
}
