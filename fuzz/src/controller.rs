//! A controller that completes commands as the fuzzer says: correctly, twice, with foreign identifiers, with any SQHD.
//!
//! As long as it has obeyed the rules itself, it checks that the driver does too.

use arbitrary::Arbitrary;
use onehop_proto::queue::{Address, Memory};
use onehop_proto::{Cqe, Sqe};

use crate::{At, Bed, Door};

/// A completion to post.
#[derive(Arbitrary, Clone, Debug)]
pub struct Post {
    /// How many commands to fetch first.
    fetch: u8,
    /// Which fetched command it completes.
    pick: u8,
    /// Status and phase; the phase only counts if `raw` is set.
    status: u16,
    /// The result.
    result: u32,
    /// Violates the rules.
    forge: Option<Forgery>,
}

/// How a completion violates the rules.
#[derive(Arbitrary, Clone, Debug)]
enum Forgery {
    /// The command is not done yet, and will be completed again.
    Twice,
    /// Any identifier.
    Cid(u16),
    /// Any SQHD.
    Sqhd(u16),
    /// Any entry anywhere in the queue.
    Entry(u16, [u32; 4]),
}

/// The controller's side of a queue pair.
pub struct Controller {
    sq: At,
    cq: At,
    sq_entries: u32,
    cq_entries: u32,
    /// The doorbells.
    tail: u32,
    head: u32,
    /// The next entry to fetch, and the next to post.
    fetched: u32,
    posted: u32,
    phase: bool,
    pending: Vec<u16>,
    honest: bool,
}

impl Controller {
    pub(crate) fn new(sq: At, cq: At, sq_entries: u32, cq_entries: u32) -> Self {
        Self {
            sq,
            cq,
            sq_entries,
            cq_entries,
            tail: 0,
            head: 0,
            fetched: 0,
            posted: 0,
            phase: true,
            pending: Vec::new(),
            honest: true,
        }
    }

    /// Whether it has obeyed the rules so far.
    pub fn is_honest(&self) -> bool {
        self.honest
    }

    /// Commands that were submitted to it and are not completed.
    pub fn owes(&self) -> usize {
        self.pending.len() + ((self.tail + self.sq_entries - self.fetched) % self.sq_entries) as usize
    }

    pub(crate) fn ring(&mut self, door: Door, value: u32) {
        match door {
            Door::Sq => {
                assert!(value < self.sq_entries, "tail {value} of {} entries", self.sq_entries);
                self.tail = value;
            }
            Door::Cq => {
                assert!(value < self.cq_entries, "head {value} of {} entries", self.cq_entries);
                self.head = value;
            }
        }
    }

    pub(crate) fn post(&mut self, bed: &Bed, post: &Post) {
        self.fetch(bed, u32::from(post.fetch));
        let mut cid = None;
        let mut sqhd = self.fetched as u16;
        match &post.forge {
            Some(Forgery::Entry(place, dw)) => {
                self.honest = false;
                return write(bed, self.slot(u32::from(*place) % self.cq_entries), dw);
            }
            Some(Forgery::Cid(forged)) => cid = Some(*forged),
            Some(Forgery::Sqhd(forged)) => sqhd = *forged,
            Some(Forgery::Twice) | None => {}
        }
        if cid.is_none() {
            if self.pending.is_empty() {
                self.fetch(bed, 1);
                sqhd = if post.forge.is_none() { self.fetched as u16 } else { sqhd };
            }
            if self.pending.is_empty() {
                return;
            }
            let pick = usize::from(post.pick) % self.pending.len();
            let twice = matches!(post.forge, Some(Forgery::Twice));
            cid = Some(if twice { self.pending[pick] } else { self.pending.remove(pick) });
        }
        self.honest &= post.forge.is_none();
        let status = onehop_proto::Status(post.status >> 1);
        let cqe = Cqe::new(post.result, sqhd, 1, cid.unwrap_or_default(), status, self.phase);
        let next = (self.posted + 1) % self.cq_entries;
        assert!(!self.honest || next != self.head, "the completion queue is full");
        write(bed, self.slot(self.posted), &cqe.dw);
        self.phase ^= next == 0;
        self.posted = next;
    }

    fn slot(&self, place: u32) -> At {
        self.cq.plus(place * Cqe::BYTES as u32)
    }

    fn fetch(&mut self, bed: &Bed, most: u32) {
        for _ in 0..most {
            if self.fetched == self.tail {
                return;
            }
            let cid = (bed.load(self.sq.plus(self.fetched * Sqe::BYTES as u32)) >> 16) as u16;
            assert!(!self.honest || !self.pending.contains(&cid), "CID {cid:#x} is used twice");
            self.pending.push(cid);
            self.fetched = (self.fetched + 1) % self.sq_entries;
        }
    }
}

/// The last dword, which holds the phase, is written last.
fn write(bed: &Bed, at: At, dw: &[u32; 4]) {
    for (i, value) in dw.iter().enumerate() {
        bed.store(at.plus(i as u32 * 4), *value);
    }
}
