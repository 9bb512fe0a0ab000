//! The rings of a queue pair in host memory, from the controller's side.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use onehop_os::HostMem;
use onehop_proto::{Cqe, Sqe, Status};

use crate::space::MemorySpace;

/// A ring's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingAt {
    pub(crate) addr: u64,
    pub(crate) entries: u32,
}

/// A pair of rings.
pub(crate) struct RingPair {
    qid: u16,
    sq: (HostMem, usize),
    sq_entries: u32,
    head: u32,
    tail: u32,
    cq: (HostMem, usize),
    cq_entries: u32,
    cq_tail: u32,
    cq_head: u32,
    phase: bool,
    /// Completions that wait for room in the ring.
    waiting: VecDeque<Cqe>,
}

impl RingPair {
    /// The rings at these addresses; `None` if no memory is mapped there.
    pub(crate) fn new(space: &MemorySpace, qid: u16, sq: RingAt, cq: RingAt) -> Option<Self> {
        let find = |ring: RingAt, entry: usize| space.at(ring.addr, u64::from(ring.entries) * entry as u64);
        if sq.entries < 2 || cq.entries < 2 {
            return None;
        }
        Some(Self {
            qid,
            sq: find(sq, Sqe::BYTES)?,
            sq_entries: sq.entries,
            head: 0,
            tail: 0,
            cq: find(cq, Cqe::BYTES)?,
            cq_entries: cq.entries,
            cq_tail: 0,
            cq_head: 0,
            phase: true,
            waiting: VecDeque::new(),
        })
    }

    /// The submission doorbell; false for an impossible value.
    pub(crate) fn set_tail(&mut self, tail: u32) -> bool {
        let is_valid = tail < self.sq_entries;
        if is_valid {
            self.tail = tail;
        }
        is_valid
    }

    /// The completion doorbell; false for an impossible value.
    pub(crate) fn set_cq_head(&mut self, head: u32) -> bool {
        if head >= self.cq_entries {
            return false;
        }
        self.cq_head = head;
        while let Some(cqe) = self.waiting.pop_front() {
            if !self.put(&cqe) {
                self.waiting.push_front(cqe);
                break;
            }
        }
        true
    }

    /// The next entry, which the driver may overwrite from now on.
    pub(crate) fn fetch(&mut self) -> Option<Sqe> {
        if self.head == self.tail {
            return None;
        }
        let at = self.sq.1 + self.head as usize * Sqe::BYTES;
        let dw = self.sq.0.read_words(at).ok()?;
        self.head = (self.head + 1) % self.sq_entries;
        Some(Sqe { dw })
    }

    /// Completes a command.
    pub(crate) fn complete(&mut self, cid: u16, result: [u32; 2], status: Status) {
        let mut cqe = Cqe::new(result[0], 0, self.qid, cid, status, false);
        cqe.dw[1] = result[1];
        if !self.waiting.is_empty() || !self.put(&cqe) {
            self.waiting.push_back(cqe);
        }
    }

    /// Writes a completion; false if there is no room.
    fn put(&mut self, cqe: &Cqe) -> bool {
        let next = (self.cq_tail + 1) % self.cq_entries;
        if next == self.cq_head {
            return false;
        }
        let at = self.cq.1 + self.cq_tail as usize * Cqe::BYTES;
        let mut dw = cqe.dw;
        dw[2] |= self.head;
        dw[3] |= u32::from(self.phase) << 16;
        for (i, dword) in dw.into_iter().enumerate() {
            // The last dword has the phase tag: a reader that sees it also sees the others, and the data.
            let order = if i == 3 { Ordering::Release } else { Ordering::Relaxed };
            if let Ok(word) = self.cq.0.word(at + 4 * i) {
                word.store(dword, order);
            }
        }
        self.cq_tail = next;
        self.phase ^= next == 0;
        true
    }
}

#[cfg(test)]
mod tests {
    use onehop_os::Mapper;

    use super::*;

    #[test]
    fn completions_wait_for_room_and_keep_their_order() {
        let space = MemorySpace::new("t".into());
        let memory = space.alloc(4096).unwrap();
        let map = space.map(&memory).unwrap();
        let at = map.contiguous().unwrap().0;
        let mut ring =
            RingPair::new(&space, 3, RingAt { addr: at, entries: 4 }, RingAt { addr: at + 1024, entries: 4 })
                .unwrap();
        memory.write_words(64, &[7; 16]).unwrap();
        assert!(!ring.set_tail(4) && ring.set_tail(2));
        assert_eq!((ring.fetch().map(|_| ()), ring.fetch().map(|sqe| sqe.dw[3])), (Some(()), Some(7)));
        assert!(ring.fetch().is_none());
        for cid in 1..=6 {
            ring.complete(cid, [cid.into(), 9], Status::SUCCESS);
        }
        let cqe = |i: usize| {
            let dw = memory.read_words(1024 + 16 * (i % 4) / 64 * 64).unwrap();
            Cqe { dw: std::array::from_fn(|d| dw[4 * (i % 4) + d]) }
        };
        let seen = |i| (cqe(i).cid(), cqe(i).phase(), cqe(i).sqhd(), cqe(i).sqid(), cqe(i).dw[1]);
        assert_eq!([seen(0), seen(2)], [(1, true, 2, 3, 9), (3, true, 2, 3, 9)]);
        assert!(!cqe(3).phase());
        assert!(!ring.set_cq_head(4) && ring.set_cq_head(3));
        assert_eq!(
            [seen(3), seen(4), seen(5)],
            [(4, true, 2, 3, 9), (5, false, 2, 3, 9), (6, false, 2, 3, 9)]
        );
        assert!(
            RingPair::new(&space, 1, RingAt { addr: 0, entries: 4 }, RingAt { addr: at, entries: 4 })
                .is_none()
        );
    }
}
