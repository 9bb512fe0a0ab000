//! Passes on what has arrived in this rank's arena.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use onehop_gpu::{Copier, Mark, Region, Rows};

use super::super::worker_pool::LoadShared;
use super::peers::{Peers, arrived_message};
use super::{COPY_POLL, POLL};
use crate::error::{Error, Result};
use crate::group::Kind;
use crate::plan::{Arenas, Chunk};

/// How often a rank says that it is at work.
const ALIVE: Duration = Duration::from_secs(1);
/// Most chunks in one batch of copies.
const BATCH: usize = 32;

/// The thread that does it.
pub(super) struct Passer {
    pub(super) peers: Arc<Peers>,
    pub(super) shared: Arc<LoadShared>,
    pub(super) places: Arenas,
    pub(super) arena: Region,
    /// To each other rank's arena; empty if each process reads for itself.
    pub(super) copiers: Vec<Option<Box<dyn Copier>>>,
    /// Where this rank's own bytes go once they are passed on: who gets a tensor may write to it.
    pub(super) arrived: Sender<Chunk>,
    /// Chunks whose copies are in progress, oldest first.
    pub(super) passing: VecDeque<Passing>,
    /// When this rank last said that it is at work, and how many bytes had moved by then.
    pub(super) alive: (Instant, u64),
}

/// Chunks whose copies are in progress.
pub(super) struct Passing {
    chunks: Vec<Chunk>,
    marks: Vec<(usize, Mark)>,
}

impl Passer {
    pub(super) fn run(&mut self, chunks: &Receiver<Chunk>) {
        if let Err(error) = self.make_copiers().and_then(|()| self.pass_all(chunks)) {
            self.shared.fail(error);
        }
        self.peers.decision.void();
        if self.shared.is_stopped() {
            self.peers.fail(&self.shared.failure().unwrap_or_else(|| "it was cancelled".into()));
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
            self.say_alive()?;
        }
        Ok(())
    }

    /// Tells the others once a second that this rank is at work, if it is.
    fn say_alive(&mut self) -> Result<()> {
        let moved = self.shared.read_bytes()
            + self.peers.passed.load(Ordering::Acquire)
            + self.peers.received.load(Ordering::Acquire);
        let (said, before) = self.alive;
        if moved != before && said.elapsed() > ALIVE {
            self.alive = (Instant::now(), moved);
            self.peers.met.send_all(Kind::Alive, &[])?;
        }
        Ok(())
    }

    /// Starts the copies of some chunks.
    fn begin(&mut self, chunks: Vec<Chunk>) -> Result<()> {
        let mut rows: Vec<Vec<Rows>> = self.copiers.iter().map(|_| Vec::new()).collect();
        let passes = chunks.iter().flat_map(|chunk| &chunk.passes).filter(|_| !self.copiers.is_empty());
        for pass in passes {
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
        if let Some(own) = self.places.share(self.peers.met.group.rank(), chunk) {
            // The receiver may be gone: then the load was cancelled.
            let _ = self.arrived.send(own);
        }
        if self.copiers.is_empty() {
            return Ok(());
        }
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
            match link.send(Kind::Arrived, &message) {
                // Why it closed its end, who listens to it finds out.
                Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
                sent => sent.map_err(|e| self.peers.error(rank, link, e.to_string()))?,
            }
        }
        Ok(())
    }
}
