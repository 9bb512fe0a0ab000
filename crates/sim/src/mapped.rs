//! Doorbells that the host maps: it writes them as memory, so the controller has to poll for changes.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, fence};

use onehop_os::HostMem;
use onehop_proto::regs::{self, offset};

/// The doorbells' memory, and the last delivered value of each.
pub(crate) struct MappedDoorbells {
    mem: HostMem,
    dstrd: u8,
    /// By queue: the submission queue's, then the completion queue's.
    seen: Vec<[AtomicU32; 2]>,
}

impl MappedDoorbells {
    /// `mem` is BAR0 from the first doorbell on; it is zeroed.
    pub(crate) fn new(mem: HostMem, queues: u16, dstrd: u8) -> onehop_os::Result<Self> {
        let doorbells =
            Self { mem, dstrd, seen: (0..=queues).map(|_| [AtomicU32::new(0), AtomicU32::new(0)]).collect() };
        doorbells.mem.fill(0, doorbells.mem.len(), 0)?;
        // Checks that the last one is within it.
        doorbells.mem.word(doorbells.place(queues, true))?;
        Ok(doorbells)
    }

    /// The offset of a doorbell in the memory.
    fn place(&self, qid: u16, is_cq: bool) -> usize {
        (regs::doorbell(qid, is_cq, self.dstrd) - offset::DOORBELLS) as usize
    }

    fn load(&self, qid: u16, is_cq: bool) -> u32 {
        self.mem.word(self.place(qid, is_cq)).map_or(0, |word| word.load(Relaxed))
    }

    fn seen(&self, qid: u16, is_cq: bool) -> &AtomicU32 {
        &self.seen[usize::from(qid)][usize::from(is_cq)]
    }

    fn queues(&self) -> impl DoubleEndedIterator<Item = u16> + use<> {
        0..self.seen.len() as u16
    }

    /// The new value of a doorbell, if written since the last call.
    fn take(&self, qid: u16, is_cq: bool) -> Option<(u32, u32)> {
        let value = self.load(qid, is_cq);
        let old = self.seen(qid, is_cq).swap(value, Relaxed);
        (old != value).then(|| (regs::doorbell(qid, is_cq, self.dstrd), value))
    }

    /// Whether one was written since the last call of [`Self::changes`].
    pub(crate) fn has_changed(&self) -> bool {
        let differs = |qid, is_cq| self.load(qid, is_cq) != self.seen(qid, is_cq).load(Relaxed);
        self.queues().any(|qid| differs(qid, false) || differs(qid, true))
    }

    /// The writes since the last call, to be delivered in this order: offset in BAR0, and value.
    ///
    /// Writes that preceded a returned one are returned before it, or were earlier: tails are read first, the admin
    /// queue's before all others, and delivered last.
    pub(crate) fn changes(&self) -> Vec<(u32, u32)> {
        let mut tails = Vec::new();
        for qid in self.queues() {
            tails.extend(self.take(qid, false));
            fence(Acquire);
        }
        let mut changes: Vec<_> = self.queues().filter_map(|qid| self.take(qid, true)).collect();
        changes.extend(tails.into_iter().rev());
        changes
    }

    /// A doorbell was written as a register instead.
    pub(crate) fn written(&self, at: u32, value: u32) {
        if let Some((qid, is_cq)) = regs::doorbell_of(at, self.dstrd)
            && usize::from(qid) < self.seen.len()
        {
            self.set(qid, is_cq, value);
        }
    }

    fn set(&self, qid: u16, is_cq: bool, value: u32) {
        self.seen(qid, is_cq).store(value, Relaxed);
        if let Ok(word) = self.mem.word(self.place(qid, is_cq)) {
            word.store(value, Release);
        }
    }

    /// A queue is new: both sides start from 0, or the host's first write could go unnoticed.
    pub(crate) fn restart(&self, qid: u16, is_cq: bool) {
        self.set(qid, is_cq, 0);
    }

    /// All queues were deleted.
    pub(crate) fn clear(&self) {
        for qid in self.queues() {
            self.restart(qid, false);
            self.restart(qid, true);
        }
    }
}
