//! Memory for one queue pair, a clock that every look moves on, and a controller that answers within the doorbell.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use onehop_proto::kernel::{ItemOutcome, Job, LOCAL_WORDS, Lanes, OwnerQueue, Taken, Warp, WorkItem};
use onehop_proto::queue::{Address, Memory, NO_CID, Rings};
use onehop_proto::{Cqe, Sqe, Status};

#[derive(Clone, Copy, Debug)]
pub struct At(pub u32);

impl Address for At {
    fn plus(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Door {
    Sq,
    Cq,
}

/// How the controller behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Manner {
    /// Last come, first served.
    Proper,
    /// It completes the last command of each doorbell twice, one right after the other.
    Twice,
    /// It never says that it has fetched anything.
    StuckHead,
    /// It ends every command with this status.
    Ends(Status),
    /// It ends the first command that it fetches with this status, and completes no other.
    EndsOne(Status),
    /// It fetches commands and completes none.
    Silent,
    /// It does not complete what it fetches, and keeps completing other commands as fast as there is room.
    Elsewhere,
}

/// The controller's side.
#[derive(Debug)]
pub struct Controller {
    pub manner: Manner,
    /// All identifiers that it was ever given.
    pub cids: Vec<u16>,
    fetched: u32,
    posted: u32,
    head: u32,
    phase: bool,
    waiting: VecDeque<Cqe>,
    /// The most commands that it had at once.
    pub most: usize,
    /// Commands of others that it has completed.
    others: u32,
}

impl Controller {
    fn new(manner: Manner) -> Self {
        let cids = Vec::new();
        let waiting = VecDeque::new();
        Self { manner, cids, fetched: 0, posted: 0, head: 0, phase: true, waiting, most: 0, others: 0 }
    }
}

pub struct Bed {
    words: Vec<Cell<u32>>,
    local: Vec<Cell<u32>>,
    lanes: u32,
    clock: Cell<u64>,
    pub rings: (u32, u32),
    pub controller: RefCell<Controller>,
    /// Set when the controller has answered this many commands.
    pub poison_after: Cell<usize>,
}

const WORKS: u32 = 1 << 20;
const OUTCOMES: u32 = 2 << 20;
const POISON: u32 = 3 << 20;
pub const CONTROL: u32 = POISON + 64;
const CQ: u32 = 1 << 19;

impl Bed {
    pub fn new(lanes: u32, sq_entries: u32, cq_entries: u32, manner: Manner) -> Self {
        Self {
            words: (0..1 << 20).map(|_| Cell::new(0)).collect(),
            local: (0..LOCAL_WORDS).map(|i| Cell::new(0xdead_0000 | i)).collect(),
            lanes,
            clock: Cell::new(0),
            rings: (sq_entries, cq_entries),
            controller: RefCell::new(Controller::new(manner)),
            poison_after: Cell::new(usize::MAX),
        }
    }

    pub fn rings(&self) -> Rings<Self> {
        let (sq_entries, cq_entries) = self.rings;
        Rings { sq: At(0), cq: At(CQ), sq_door: Door::Sq, cq_door: Door::Cq, sq_entries, cq_entries }
    }

    pub fn queue(&self, window: u32) -> OwnerQueue<Self> {
        OwnerQueue { rings: self.rings(), scratch: At(CONTROL), window }
    }

    /// A job of `count` reads, block `i` each, none of which has been started.
    pub fn job(&self, count: u32) -> Job<Self> {
        for i in 0..count {
            let work = WorkItem { lba: u64::from(i), prp1: 1 << 12, prp2: 0, blocks: 1, control: 2 };
            self.set_work(i, &work);
            self.store_pair(At(OUTCOMES + i * ItemOutcome::BYTES), [ItemOutcome::Pending.word(), 0]);
        }
        Job {
            works: At(WORKS),
            outcomes: At(OUTCOMES),
            count,
            nsid: 1,
            retries: 2,
            retry_delay: [10, 1_000_000, 0, 0],
            stall: 100_000,
            deadline: 1 << 40,
            poison: At(POISON),
        }
    }

    pub fn set_work(&self, item: u32, work: &WorkItem) {
        for (i, word) in work.words().into_iter().enumerate() {
            self.store(At(WORKS + item * WorkItem::BYTES + i as u32 * 4), word);
        }
    }

    pub fn outcome(&self, item: u32) -> (ItemOutcome, u32) {
        let at = At(OUTCOMES + item * ItemOutcome::BYTES);
        (ItemOutcome::from_word(self.load(at)), self.load(at.plus(4)))
    }

    /// The controller starts anew on a queue that was just created.
    pub fn create_again(&self, manner: Manner) {
        (0..CONTROL / 4).filter(|i| *i < WORKS / 4).for_each(|i| self.words[i as usize].set(0));
        let cids = std::mem::take(&mut self.controller.borrow_mut().cids);
        self.controller.replace(Controller { cids, ..Controller::new(manner) });
    }

    pub fn pass_time(&self, nanos: u64) {
        self.clock.set(self.clock.get() + nanos);
    }

    fn fetch(&self, c: &mut Controller, tail: u32) {
        let (mut batch, fresh) = (Vec::new(), c.cids.is_empty());
        while c.fetched != tail {
            let cid = (self.load(At(c.fetched * Sqe::BYTES as u32)) >> 16) as u16;
            c.cids.push(cid);
            c.fetched = (c.fetched + 1) % self.rings.0;
            batch.push(cid);
        }
        if c.manner == Manner::Twice {
            batch.extend(batch.last().copied());
        }
        if c.cids.len() >= self.poison_after.get() {
            self.store(At(POISON), 7);
        }
        let sqhd = if c.manner == Manner::StuckHead { 0 } else { c.fetched as u16 };
        c.most = c.most.max(batch.len() + c.waiting.len());
        let status = match c.manner {
            Manner::Ends(status) | Manner::EndsOne(status) => status,
            _ => Status(0),
        };
        match c.manner {
            Manner::Silent | Manner::Elsewhere => batch.clear(),
            Manner::EndsOne(_) => batch.truncate(usize::from(fresh)),
            _ => {}
        }
        c.waiting.extend(batch.into_iter().rev().map(|cid| Cqe::new(0, sqhd, 1, cid, status, false)));
    }

    /// Posts what there is room for.
    fn post(&self, c: &mut Controller) {
        while (c.posted + 1) % self.rings.1 != c.head {
            if c.manner == Manner::Elsewhere {
                self.pass_time(10);
                c.others += 1;
                assert!(c.others < 10_000_000, "a wait without an end");
                c.waiting.push_back(Cqe::new(0, c.fetched as u16, 1, NO_CID, Status(0), false));
            }
            let Some(cqe) = c.waiting.pop_front() else { return };
            let at = At(CQ + c.posted * Cqe::BYTES as u32);
            for (i, word) in cqe.dw.into_iter().enumerate() {
                self.store(at.plus(i as u32 * 4), if i == 3 { word | (c.phase as u32) << 16 } else { word });
            }
            c.posted = (c.posted + 1) % self.rings.1;
            c.phase ^= c.posted == 0;
        }
    }

    fn word(&self, at: At) -> &Cell<u32> {
        assert!(at.0.is_multiple_of(4));
        &self.words[at.0 as usize / 4]
    }
}

fn modify(word: &Cell<u32>, f: impl FnOnce(u32) -> u32) -> u32 {
    let old = word.get();
    word.set(f(old));
    old
}

impl Memory for Bed {
    type Addr = At;
    type Door = Door;

    fn load(&self, at: At) -> u32 {
        self.word(at).get()
    }
    fn load_acquire(&self, at: At) -> u32 {
        self.load(at)
    }
    fn store(&self, at: At, value: u32) {
        self.word(at).set(value);
    }
    fn store_release(&self, at: At, value: u32) {
        self.store(at, value);
    }
    fn store_entry(&self, at: At, entry: &[u32; 16]) {
        for (i, value) in entry.iter().enumerate() {
            self.store(at.plus(i as u32 * 4), *value);
        }
    }
    fn fetch_add(&self, at: At, value: u32) -> u32 {
        modify(self.word(at), |old| old.wrapping_add(value))
    }
    fn fetch_or(&self, at: At, bits: u32) -> u32 {
        modify(self.word(at), |old| old | bits)
    }
    fn fetch_and(&self, at: At, mask: u32) -> u32 {
        modify(self.word(at), |old| old & mask)
    }
    fn compare_exchange(&self, at: At, old: u32, new: u32) -> u32 {
        modify(self.word(at), |seen| if seen == old { new } else { seen })
    }
    fn fence(&self) {}
    fn ring(&self, door: Door, value: u32) {
        let mut c = self.controller.borrow_mut();
        match door {
            Door::Sq => self.fetch(&mut c, value),
            Door::Cq => c.head = value,
        }
        self.post(&mut c);
    }
    fn pause(&self) {
        self.pass_time(50);
    }
    fn now(&self) -> u64 {
        self.pass_time(1);
        self.clock.get()
    }
}

impl Lanes for Bed {
    fn lanes(&self) -> u32 {
        self.lanes
    }
    fn each(&self, f: impl FnMut(u32)) {
        (0..self.lanes).for_each(f);
    }
    fn once(&self, mut f: impl FnMut()) {
        f();
    }
    fn local(&self, index: u32) -> u32 {
        self.local[index as usize].get()
    }
    fn set_local(&self, index: u32, value: u32) {
        self.local[index as usize].set(value);
    }
    fn add_local(&self, index: u32, value: u32) -> u32 {
        modify(&self.local[index as usize], |old| old.wrapping_add(value))
    }
}

impl Warp for Bed {
    fn take(
        &self,
        limit: u32,
        look: impl FnMut(u32) -> ([u32; 2], bool),
        mut act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken {
        assert!(limit <= self.lanes * Self::PLACES);
        // A GPU looks at all of them.
        let looks: Vec<_> = (0..limit).map(look).collect();
        let there: Vec<_> = looks.into_iter().take_while(|(_, yes)| *yes).map(|(words, _)| words).collect();
        let all_well = (0..).zip(&there).fold(true, |well, (place, words)| well & act(place, *words));
        Taken { count: there.len() as u32, last: there.last().map_or(0, |words| words[0]), all_well }
    }
    fn exchange_local(&self, index: u32, old: u32, new: u32) -> u32 {
        modify(&self.local[index as usize], |seen| if seen == old { new } else { seen })
    }
    fn fetch(&self, to: u32, from: At) {
        assert!(to.is_multiple_of(4) && from.0.is_multiple_of(16));
        (to..).zip(self.load_constant(from)).for_each(|(i, word)| self.set_local(i, word));
    }
    fn wait_fetches(&self) {}
}
