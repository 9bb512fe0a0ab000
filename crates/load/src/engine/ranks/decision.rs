//! What the ranks decide while they already read: whether bytes go from GPU to GPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use onehop_gpu::{Copier, Gpu, Region};

use super::COPY_POLL;
use crate::error::{Error, Result};
use crate::plan::{Chunk, Share};

/// The other ranks' arenas by rank, or why one of the ranks does not reach another's: all ranks come to the same conclusion.
pub(super) type ArenasOfRanks = std::result::Result<Vec<Option<Region>>, String>;

/// What the ranks decide while they already read: whether bytes go from GPU to GPU.
#[derive(Default)]
pub(in crate::engine) struct Decision {
    pub(super) arenas: OnceLock<ArenasOfRanks>,
    /// The load has ended early, and nothing will be decided.
    is_void: AtomicBool,
}

impl Decision {
    /// Ends all waiting: there will be no decision.
    pub(in crate::engine) fn void(&self) {
        self.is_void.store(true, Ordering::Release);
    }

    fn is_void(&self) -> bool {
        self.is_void.load(Ordering::Acquire)
    }

    /// Waits until the ranks have decided; none if the load ends before.
    fn wait(&self) -> Option<&ArenasOfRanks> {
        loop {
            if let Some(arenas) = self.arenas.get() {
                return Some(arenas);
            }
            if self.is_void() {
                return None;
            }
            std::thread::sleep(COPY_POLL);
        }
    }
}

/// The chunks that this rank reads: its share, and if no bytes go from GPU to GPU, what others would have read for it.
pub(in crate::engine) struct RankChunks {
    pub(in crate::engine) share: Share,
    pub(in crate::engine) rest: Share,
    pub(in crate::engine) decision: Arc<Decision>,
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
pub(in crate::engine) struct RankCopiers {
    gpu: Arc<dyn Gpu>,
    ring: Region,
    rank: usize,
    copiers: Vec<Option<Box<dyn Copier>>>,
    decision: Arc<Decision>,
}

impl RankCopiers {
    pub(in crate::engine) fn new(
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

    pub(in crate::engine) fn len(&self) -> usize {
        self.copiers.len()
    }

    /// The copier to a rank's arena; none if its process reads for itself.
    pub(in crate::engine) fn copier(&mut self, rank: usize) -> Result<Option<&mut Box<dyn Copier>>> {
        let Some(copier) = self.copiers.get_mut(rank) else { return Err(Error::Incomplete) };
        // After a failure, others may free their arenas as soon as they hear that nothing more is begun here.
        if rank != self.rank && self.decision.is_void() {
            return Err(Error::Cancelled);
        }
        if copier.is_none() && rank != self.rank {
            let arenas = self.decision.wait().ok_or(Error::Cancelled)?;
            let Ok(arenas) = arenas else { return Ok(None) };
            let arena = arenas.get(rank).and_then(Option::as_ref).ok_or(Error::Incomplete)?;
            *copier = Some(self.gpu.peers()?.peer_copier(&self.ring, arena)?);
        }
        Ok(copier.as_mut())
    }

    pub(in crate::engine) fn get(&mut self, rank: usize) -> Option<&mut Box<dyn Copier>> {
        self.copiers.get_mut(rank)?.as_mut()
    }
}
