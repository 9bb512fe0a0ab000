//! The null controller's fast path: I/O queues whose commands complete at once and move nothing.
//!
//! It measures a driver's own cost, so it does as little as a controller can: on a submission doorbell it reads each
//! new entry's identifier and posts its completion, under a lock of that queue only.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use onehop_os::{HostMem, Words};
use onehop_proto::{Cqe, Sqe, Status};

use crate::config::NullOrder;
use crate::engine::{IoEngine, NewQueue};
use crate::violation::{Book, Rule};

/// One queue pair.
struct NullPair {
    sq: Words,
    cq: Words,
    sq_size: u32,
    cq_size: u32,
    sqid: u16,
    cqid: u16,
    head: u32,
    tail: u32,
    cq_tail: u32,
    phase: bool,
    /// Identifiers of a batch that is completed in reverse.
    batch: Vec<u16>,
}

/// A completion queue without a submission queue.
struct Half {
    mem: HostMem,
    size: u32,
    taken: bool,
}

/// The queues of a queue number's doorbells.
#[derive(Default)]
struct DoorbellSlot {
    pair: Mutex<Option<NullPair>>,
    half: Mutex<Option<Half>>,
    cq_head: AtomicU32,
    /// The completion queue was full: the next head doorbell resumes.
    stalled: AtomicBool,
    /// The submission queue of this completion queue.
    user: AtomicU32,
    commands: AtomicU64,
}

/// The I/O queues of a null controller.
pub(crate) struct Fast {
    slots: Vec<DoorbellSlot>,
    order: NullOrder,
    book: Book,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fast {
    pub(crate) fn new(queues: u16, order: NullOrder, book: Book) -> Self {
        Self { slots: (0..=queues).map(|_| DoorbellSlot::default()).collect(), order, book }
    }

    fn ring_sq(&self, qid: u16, slot: &DoorbellSlot, value: u32) -> bool {
        let mut pair = locked(&slot.pair);
        let Some(pair) = pair.as_mut() else { return false };
        if value >= pair.sq_size {
            self.book.note(Rule::DoorbellValue, Some(qid), format!("tail {value} of {}", pair.sq_size));
            return true;
        }
        pair.tail = value;
        self.pump(pair);
        true
    }

    /// Completes what has been submitted, as far as the completion queue has room.
    fn pump(&self, pair: &mut NullPair) {
        let slot = &self.slots[usize::from(pair.cqid)];
        let cq_head = slot.cq_head.load(Acquire) % pair.cq_size;
        let mut room = pair.cq_size - 1 - (pair.cq_tail + pair.cq_size - cq_head) % pair.cq_size;
        let mut done = 0;
        std::sync::atomic::fence(Acquire);
        while pair.head != pair.tail && room > 0 {
            let Some(cid) = pair.cid_at_head() else { break };
            if self.order == NullOrder::Straight {
                pair.post(cid);
            } else {
                pair.batch.push(cid);
            }
            room -= 1;
            done += 1;
        }
        while let Some(cid) = pair.batch.pop() {
            pair.post(cid);
        }
        slot.commands.fetch_add(done, Relaxed);
        slot.stalled.store(pair.head != pair.tail, Relaxed);
    }
}

impl IoEngine for Fast {
    fn commands(&self) -> u64 {
        self.slots.iter().map(|s| s.commands.load(Relaxed)).sum()
    }

    fn clear(&self) {
        for slot in &self.slots {
            *locked(&slot.pair) = None;
            *locked(&slot.half) = None;
            slot.user.store(0, Relaxed);
        }
    }

    fn create_cq(&self, cq: &NewQueue) -> Result<(), Status> {
        let mem = ring(cq, Cqe::BYTES)?;
        let slot = &self.slots[usize::from(cq.qid)];
        slot.cq_head.store(0, Relaxed);
        slot.stalled.store(false, Relaxed);
        *locked(&slot.half) = Some(Half { mem, size: cq.entries, taken: false });
        Ok(())
    }

    /// Each completion queue serves one submission queue here.
    fn create_sq(&self, sq: &NewQueue, cqid: u16) -> Result<(), Status> {
        let NewQueue { qid, entries, .. } = *sq;
        let mem = ring(sq, Sqe::BYTES)?;
        let cq_slot = &self.slots[usize::from(cqid)];
        let mut half = locked(&cq_slot.half);
        let half = half.as_mut().filter(|h| !h.taken).ok_or(Status::CQ_INVALID.with_dnr())?;
        let (sq, cq) = (words(mem)?, words(half.mem.clone())?);
        half.taken = true;
        cq_slot.user.store(u32::from(qid), Relaxed);
        *locked(&self.slots[usize::from(qid)].pair) = Some(NullPair {
            sq,
            cq,
            sq_size: entries,
            cq_size: half.size,
            sqid: qid,
            cqid,
            head: 0,
            tail: 0,
            cq_tail: 0,
            phase: true,
            batch: Vec::with_capacity(entries as usize),
        });
        Ok(())
    }

    fn delete_sq(&self, qid: u16) {
        if let Some(slot) = self.slots.get(usize::from(qid)) {
            *locked(&slot.pair) = None;
        }
    }

    fn delete_cq(&self, qid: u16) {
        if let Some(slot) = self.slots.get(usize::from(qid)) {
            *locked(&slot.half) = None;
        }
    }

    #[inline]
    fn ring(&self, qid: u16, is_cq: bool, value: u32) -> bool {
        let Some(slot) = self.slots.get(usize::from(qid)).filter(|_| qid != 0) else { return false };
        if !is_cq {
            return self.ring_sq(qid, slot, value);
        }
        let user = slot.user.load(Relaxed);
        slot.cq_head.store(value, Release);
        if slot.stalled.load(Relaxed)
            && let Some(pair) = locked(&self.slots[user as usize].pair).as_mut()
        {
            self.pump(pair);
        }
        user != 0
    }
}

/// The memory of a queue, all of it.
fn ring(queue: &NewQueue, entry: usize) -> Result<HostMem, Status> {
    let mem = queue.memory.clone().filter(|mem| mem.len() >= queue.entries as usize * entry);
    mem.ok_or(Status::DATA_TRANSFER_ERROR)
}

fn words(mem: HostMem) -> Result<Words, Status> {
    Words::new(mem).map_err(|_| Status::DATA_TRANSFER_ERROR)
}

impl NullPair {
    #[inline]
    fn cid_at_head(&mut self) -> Option<u16> {
        let word = self.sq.get(self.head * (Sqe::BYTES / 4) as u32)?.load(Relaxed);
        self.head += 1;
        if self.head == self.sq_size {
            self.head = 0;
        }
        Some((Sqe { dw: [word, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] }).cid())
    }

    #[inline(always)]
    fn post(&mut self, cid: u16) {
        let cqe = Cqe::new(0, self.head as u16, self.sqid, cid, Status::SUCCESS, self.phase);
        let is_stored = self.cq.store_four_release(self.cq_tail * (Cqe::BYTES / 4) as u32, cqe.dw);
        debug_assert!(is_stored, "an entry outside its ring");
        self.cq_tail += 1;
        if self.cq_tail == self.cq_size {
            self.cq_tail = 0;
            self.phase = !self.phase;
        }
    }
}

/// The null controller's own time per command in nanoseconds: the fast path, with batches of `batch` commands on a
/// queue of `entries` entries.
///
/// # Errors
/// When memory for the queues is short.
pub fn ceiling(entries: u32, batch: u32, rounds: u32) -> crate::Result<f64> {
    let entries = entries.clamp(2, 65536);
    let batch = batch.clamp(1, entries - 1);
    let fast = Fast::new(1, NullOrder::Straight, Book::default());
    let sq = HostMem::anonymous(entries as usize * Sqe::BYTES)?;
    let cq = HostMem::anonymous(entries as usize * Cqe::BYTES)?;
    fast.slots[1].user.store(1, Relaxed);
    *locked(&fast.slots[1].pair) = Some(NullPair {
        sq: Words::new(sq)?,
        cq: Words::new(cq)?,
        sq_size: entries,
        cq_size: entries,
        sqid: 1,
        cqid: 1,
        head: 0,
        tail: 0,
        cq_tail: 0,
        phase: true,
        batch: Vec::new(),
    });
    let mut tail = 0;
    let start = Instant::now();
    for _ in 0..rounds {
        tail = (tail + batch) % entries;
        fast.ring(1, false, tail);
        fast.ring(1, true, tail);
    }
    // A command takes a few nanoseconds: a `Duration` of one would be off by a tenth.
    Ok(start.elapsed().as_nanos() as f64 / (f64::from(rounds) * f64::from(batch)).max(1.0))
}
