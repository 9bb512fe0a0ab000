//! Submission and completion queues on the controller's side.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;
use std::sync::{Arc, Weak};

use onehop_proto::{Cqe, Sqe, Status};

use crate::dma::{Segment, Space, Unreachable};

/// A ring's memory: contiguous, or by pages.
pub(crate) struct PagedRing {
    parts: Vec<(u64, Weak<Segment>)>,
    part_bytes: usize,
}

impl PagedRing {
    /// A contiguous ring.
    pub(crate) fn contiguous(base: u64, bytes: usize) -> Self {
        Self { parts: vec![(base, Weak::new())], part_bytes: bytes }
    }

    /// A ring of pages.
    pub(crate) fn paged(pages: Vec<u64>, page: usize) -> Self {
        Self { parts: pages.into_iter().map(|p| (p, Weak::new())).collect(), part_bytes: page }
    }

    /// The memory of an entry; looked up again only when its former mapping is gone.
    fn locate(
        &mut self,
        space: &Space,
        offset: usize,
        bytes: usize,
    ) -> Result<(Arc<Segment>, usize), Unreachable> {
        let lost = Unreachable::PastEnd { addr: offset as u64, bytes };
        let (base, known) = self.parts.get_mut(offset / self.part_bytes).ok_or(lost)?;
        let addr = base.wrapping_add((offset % self.part_bytes) as u64);
        if let Some(segment) = known.upgrade().filter(|_| space.is_master())
            && let Some(at) = segment.offset(addr, bytes)
        {
            return Ok((segment, at));
        }
        let (segment, at) = space.find(addr, bytes)?;
        *known = Arc::downgrade(&segment);
        Ok((segment, at))
    }
}

/// A set of command identifiers.
struct CidSet {
    bits: Box<[u64]>,
    len: u32,
}

impl CidSet {
    fn new() -> Self {
        Self { bits: vec![0; 1024].into(), len: 0 }
    }

    fn insert(&mut self, cid: u16) -> bool {
        let (word, bit) = (&mut self.bits[usize::from(cid >> 6)], 1 << (cid & 63));
        if *word & bit != 0 {
            return false;
        }
        *word |= bit;
        self.len += 1;
        true
    }

    fn remove(&mut self, cid: u16) {
        let (word, bit) = (&mut self.bits[usize::from(cid >> 6)], 1 << (cid & 63));
        self.len -= u32::from(*word & bit != 0);
        *word &= !bit;
    }

    fn contains(&self, cid: u16) -> bool {
        self.bits[usize::from(cid >> 6)] & 1 << (cid & 63) != 0
    }
}

/// A submission queue.
pub(crate) struct Sq {
    /// Its completion queue.
    pub cq: u16,
    /// Entries.
    pub size: u32,
    /// The host's tail, by its last doorbell.
    pub tail: u32,
    /// The next entry to fetch.
    pub head: u32,
    /// The head that was last reported to the host.
    pub reported_head: u32,
    ring: PagedRing,
    outstanding: CidSet,
}

impl Sq {
    pub(crate) fn new(size: u32, cq: u16, ring: PagedRing) -> Self {
        Self { cq, size, tail: 0, head: 0, reported_head: 0, ring, outstanding: CidSet::new() }
    }

    /// Number of entries from `from` to `to`.
    pub(crate) const fn distance(&self, from: u32, to: u32) -> u32 {
        (to + self.size - from) % self.size
    }

    /// Fetches the entry at the head; `None` if there is none.
    pub(crate) fn fetch(&mut self, space: &Space) -> Option<Result<Sqe, Unreachable>> {
        if self.head == self.tail {
            return None;
        }
        let offset = self.head as usize * Sqe::BYTES;
        self.head = (self.head + 1) % self.size;
        Some(self.read(space, offset))
    }

    fn read(&mut self, space: &Space, offset: usize) -> Result<Sqe, Unreachable> {
        let (segment, at) = self.ring.locate(space, offset, Sqe::BYTES)?;
        // The doorbell has been read: everything that the host wrote before it is visible.
        fence(Acquire);
        let mut bytes = [0; Sqe::BYTES];
        let lost = Unreachable::PastEnd { addr: segment.addr, bytes: Sqe::BYTES };
        segment.host().and_then(|mem| mem.read(at, &mut bytes)).map_err(|_| lost)?;
        let mut sqe = Sqe::default();
        for (dword, bytes) in sqe.dw.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *dword = u32::from_le_bytes(*bytes);
        }
        Ok(sqe)
    }

    /// Marks a command as outstanding; false if its identifier is in use.
    pub(crate) fn start(&mut self, cid: u16) -> bool {
        self.outstanding.insert(cid)
    }

    /// A command is no longer outstanding.
    pub(crate) fn finish(&mut self, cid: u16) {
        self.outstanding.remove(cid);
    }

    /// Commands that were fetched and not completed.
    pub(crate) const fn in_flight(&self) -> u32 {
        self.outstanding.len
    }

    /// Another identifier, which is outstanding or not. An unused one is far away from this: hosts soon reuse
    /// neighbours, and would then be blamed for an identifier in use.
    pub(crate) fn another_cid(&self, than: u16, outstanding: bool) -> Option<u16> {
        let first = if outstanding { than } else { than ^ 0x8000 };
        let usable = |cid: &u16| *cid != than && *cid != u16::MAX;
        (0..=u16::MAX)
            .map(|i| first ^ i)
            .filter(usable)
            .find(|cid| self.outstanding.contains(*cid) == outstanding)
    }

    /// The head to report to the host: `lag` behind, but never behind what was reported before.
    pub(crate) fn report_head(&mut self, lag: u16) -> u16 {
        let known = self.distance(self.reported_head, self.head);
        let step = known.saturating_sub(u32::from(lag));
        self.reported_head = (self.reported_head + step) % self.size;
        self.reported_head as u16
    }
}

/// A completion to be posted.
#[derive(Clone, Copy)]
pub(crate) struct QueuedCompletion {
    pub result: u32,
    pub sqid: u16,
    pub cid: u16,
    pub status: Status,
    /// SQHD lags by this.
    pub lag: u16,
    /// Write it with the old phase first, for this many nanoseconds.
    pub stale: Option<u64>,
}

/// A completion queue.
pub(crate) struct Cq {
    /// Entries.
    pub size: u32,
    /// The next slot to post to.
    pub tail: u32,
    /// The host's head, by its last doorbell.
    pub head: u32,
    /// The phase of the next entry.
    pub phase: bool,
    /// The interrupt to raise.
    pub vector: Option<u16>,
    /// Number of submission queues that complete here.
    pub users: u32,
    /// Completions that wait for room.
    pub waiting: VecDeque<QueuedCompletion>,
    /// Distinguishes queues that had the same number.
    pub generation: u64,
    ring: PagedRing,
}

impl Cq {
    pub(crate) fn new(size: u32, vector: Option<u16>, ring: PagedRing, generation: u64) -> Self {
        let waiting = VecDeque::new();
        Self { size, tail: 0, head: 0, phase: true, vector, users: 0, waiting, generation, ring }
    }

    /// Entries posted and not consumed.
    pub(crate) const fn posted(&self) -> u32 {
        (self.tail + self.size - self.head) % self.size
    }

    /// Whether another entry fits.
    pub(crate) const fn has_room(&self) -> bool {
        self.posted() + 1 < self.size
    }

    /// Posts an entry; returns its slot and the final value of its last dword.
    pub(crate) fn post(
        &mut self,
        space: &Space,
        entry: &QueuedCompletion,
        sqhd: u16,
    ) -> Result<(u32, u32), Unreachable> {
        let made = |phase| Cqe::new(entry.result, sqhd, entry.sqid, entry.cid, entry.status, phase);
        let cqe = made(self.phase);
        let slot = self.tail;
        let (segment, at) = self.ring.locate(space, slot as usize * Cqe::BYTES, Cqe::BYTES)?;
        let lost = |_| Unreachable::PastEnd { addr: segment.addr, bytes: Cqe::BYTES };
        for (i, dword) in cqe.dw[..3].iter().enumerate() {
            segment.host().and_then(|mem| mem.word(at + 4 * i)).map_err(lost)?.store(*dword, Relaxed);
        }
        let last = made(self.phase != entry.stale.is_some()).dw[3];
        segment.host().and_then(|mem| mem.word(at + 12)).map_err(lost)?.store(last, Release);
        self.tail += 1;
        if self.tail == self.size {
            self.tail = 0;
            self.phase = !self.phase;
        }
        Ok((slot, cqe.dw[3]))
    }

    /// Corrects the last dword of an entry.
    pub(crate) fn correct_entry(&mut self, space: &Space, slot: u32, last: u32) -> Result<(), Unreachable> {
        let (segment, at) = self.ring.locate(space, slot as usize * Cqe::BYTES, Cqe::BYTES)?;
        let lost = |_| Unreachable::PastEnd { addr: segment.addr, bytes: Cqe::BYTES };
        segment.host().and_then(|mem| mem.word(at + 12)).map_err(lost)?.store(last, Release);
        Ok(())
    }
}
