//! The thread that reads past the page cache: as many reads under way as the ring has room for, and copies behind them.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use onehop_os::{Finished, Reads};

use super::crew::{Job, Lane, Marks, Shared};
use crate::error::{Error, Result};

/// Bytes of a read: what drives take in one command, or near it.
const READ: usize = 1 << 20;
/// What offsets past the page cache are multiples of everywhere.
const BLOCK: usize = 4096;
/// Reads under way at most.
const DEPTH: u32 = 64;
/// How long the thread sleeps before it looks whether the load was given up.
const LOOK: Duration = Duration::from_millis(50);

/// A slot of the ring.
enum Slot {
    Free,
    /// So many reads have not ended.
    Reading(Job, usize),
    Copying(Job, Marks),
}

/// A read that is to be begun, or is under way.
#[derive(Clone, Copy)]
struct Piece {
    slot: usize,
    /// Where in the ring, and in the file.
    to: usize,
    at: u64,
    /// Whole blocks; so many of their bytes the file has.
    bytes: usize,
    valid: usize,
}

struct Disk<'a> {
    shared: &'a Shared,
    lane: &'a mut Lane,
    reads: Reads,
    slots: Vec<Slot>,
    /// The slots whose copies were begun, in that order.
    copying: VecDeque<usize>,
    waiting: VecDeque<Piece>,
    /// What is under way, by the name of its read.
    pieces: Vec<Option<Piece>>,
}

/// Where its chunks come from.
pub(super) enum Supply {
    /// They are all its own.
    All,
    /// Others have not found them in the page cache.
    Found(Receiver<Job>),
}

impl Supply {
    /// The next one, if there is one by now.
    fn now(&self, shared: &Shared) -> Option<Job> {
        match self {
            Self::All => shared.next(),
            Self::Found(found) => found.try_recv().ok(),
        }
    }

    /// The next one; none when there will be none, or the load was given up.
    fn next(&self, shared: &Shared) -> Option<Job> {
        let Self::Found(found) = self else { return shared.next() };
        while !shared.is_stopped() {
            match found.recv_timeout(LOOK) {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        None
    }
}

pub(super) fn run(shared: &Shared, lane: &mut Lane, supply: &Supply) -> Result<()> {
    // Many loads find all in the page cache, and need no more than this of it.
    let Some(first) = supply.next(shared) else { return Ok(()) };
    let reads = Reads::new(lane.ring.clone(), DEPTH).map_err(onehop_gpu::Error::from)?;
    let slots = (0..lane.ring.len() / lane.slot).map(|_| Slot::Free).collect();
    let mut disk = Disk {
        shared,
        lane,
        reads,
        slots,
        copying: VecDeque::new(),
        waiting: VecDeque::new(),
        pieces: vec![None; DEPTH as usize],
    };
    let mut next = Some(first);
    loop {
        if shared.is_stopped() {
            return Ok(());
        }
        while let Some(slot) = disk.slots.iter().position(|slot| matches!(slot, Slot::Free)) {
            let Some(job) = next.take().or_else(|| supply.now(shared)) else { break };
            disk.plan(slot, job);
        }
        disk.begin()?;
        disk.settle(false)?;
        if disk.reads.under_way() > 0 {
            disk.reads.wait(LOOK).map_err(onehop_gpu::Error::from)?;
            disk.collect()?;
        } else if !disk.copying.is_empty() {
            disk.settle(true)?;
        } else if disk.waiting.is_empty() {
            next = supply.next(shared);
            if next.is_none() {
                return Ok(());
            }
        }
    }
}

impl Disk<'_> {
    /// Cuts the reads of a chunk into pieces that wait for their turn.
    fn plan(&mut self, slot: usize, job: Job) {
        let mut count = 0;
        for read in &job.chunk.reads {
            let mut done = 0;
            while done < read.bytes {
                let bytes = (read.bytes - done).min(READ as u64);
                let valid = read.valid.saturating_sub(done).min(bytes) as usize;
                if valid > 0 {
                    self.waiting.push_back(Piece {
                        slot,
                        to: slot * self.lane.slot + (read.slot + done) as usize,
                        at: read.offset + done,
                        bytes: bytes as usize,
                        valid,
                    });
                    count += 1;
                }
                done += bytes;
            }
        }
        self.slots[slot] = Slot::Reading(job, count);
    }

    /// Begins as many reads as there is room for.
    fn begin(&mut self) -> Result<()> {
        while self.reads.room() > 0 {
            let Some(piece) = self.waiting.pop_front() else { break };
            let Some(name) = self.pieces.iter().position(Option::is_none) else {
                self.waiting.push_front(piece);
                break;
            };
            let Some(file) = self.source(&piece).and_then(|source| source.direct.clone()) else {
                return Err(Error::Incomplete);
            };
            self.pieces[name] = Some(piece);
            let begun = self.reads.begin(name as u64, &file, piece.at, piece.to, piece.bytes);
            begun.map_err(onehop_gpu::Error::from)?;
        }
        Ok(self.reads.submit().map_err(onehop_gpu::Error::from)?)
    }

    fn source(&self, piece: &Piece) -> Option<&super::choice::Opened> {
        match self.slots.get(piece.slot) {
            Some(Slot::Reading(job, _)) => self.shared.sources.get(job.chunk.file),
            _ => None,
        }
    }

    /// Takes the reads that have ended; begins the copies of the slots that are full.
    fn collect(&mut self) -> Result<()> {
        while let Some(Finished { name, result }) = self.reads.ended() {
            let Some(piece) = self.pieces.get_mut(name as usize).and_then(Option::take) else { continue };
            self.ended(piece, result)?;
        }
        Ok(())
    }

    fn ended(&mut self, piece: Piece, result: std::io::Result<usize>) -> Result<()> {
        let name = || self.source(&piece).map(|s| (s.name.clone(), s.bytes)).unwrap_or_default();
        let got = match result {
            Ok(got) => got.min(piece.valid),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {
                self.waiting.push_front(piece);
                return Ok(());
            }
            Err(source) => {
                return Err(Error::Read {
                    file: name().0,
                    offset: piece.at,
                    bytes: piece.valid as u64,
                    source,
                });
            }
        };
        if got < piece.valid {
            // What is missing is read again from a block's start. Less than a block is the file's end.
            let whole = got / BLOCK * BLOCK;
            if whole == 0 {
                let (file, length) = name();
                return Err(Error::Ended { file, offset: piece.at, bytes: piece.valid as u64, length });
            }
            self.shared.direct_bytes.fetch_add(whole as u64, Ordering::Relaxed);
            self.waiting.push_front(Piece {
                to: piece.to + whole,
                at: piece.at + whole as u64,
                bytes: piece.bytes - whole,
                valid: piece.valid - whole,
                ..piece
            });
            return Ok(());
        }
        self.shared.direct_bytes.fetch_add(got as u64, Ordering::Relaxed);
        let Some(slot) = self.slots.get_mut(piece.slot) else { return Ok(()) };
        if let Slot::Reading(_, left) = slot {
            *left -= 1;
            if *left > 0 {
                return Ok(());
            }
        }
        if let Slot::Reading(job, _) = std::mem::replace(slot, Slot::Free) {
            let marks = self.lane.copy(std::iter::once((piece.slot, &job)))?;
            self.slots[piece.slot] = Slot::Copying(job, marks);
            self.copying.push_back(piece.slot);
        }
        Ok(())
    }

    /// Gives the slots back whose copies are over; waits for the oldest if asked to.
    fn settle(&mut self, mut wait: bool) -> Result<()> {
        while let Some(slot) = self.copying.front().copied() {
            let Some(Slot::Copying(_, marks)) = self.slots.get(slot) else { break };
            if wait {
                self.lane.wait(marks)?;
            } else if !self.lane.is_over(marks)? {
                break;
            }
            wait = false;
            self.copying.pop_front();
            if let Slot::Copying(job, _) = std::mem::replace(&mut self.slots[slot], Slot::Free) {
                self.lane.tell(job);
            }
        }
        Ok(())
    }
}
