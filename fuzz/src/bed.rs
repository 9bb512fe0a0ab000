//! Memory for queues: regions with guards between them, and a clock that every read advances.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use onehop_proto::kernel::{LOCAL_WORDS, Lanes, Taken, Warp};
use onehop_proto::queue::{Address, Memory, Rings};
use onehop_proto::{Cqe, Sqe};

use crate::{Controller, Post};

/// An address: a byte offset in the bed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct At(pub u32);

impl Address for At {
    fn plus(self, bytes: u32) -> Self {
        Self(self.0.checked_add(bytes).expect("an address past the end of everything"))
    }
}

/// A doorbell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Door {
    /// The tail of the submission queue.
    Sq,
    /// The head of the completion queue.
    Cq,
}

/// Bytes between two regions, which must not be accessed.
const GUARD: u32 = 256;

/// Memory with a controller. Single-threaded: loom tests what threads do to each other.
pub struct Bed {
    words: Vec<Cell<u32>>,
    regions: Vec<Range<u32>>,
    clock: Cell<u64>,
    local: Vec<Cell<u32>>,
    lanes: u32,
    /// The controller, which accesses the same memory.
    pub controller: RefCell<Controller>,
    /// Completions that the controller posts by itself, the next one last.
    pub script: RefCell<Vec<Post>>,
}

impl Bed {
    /// A bed with a queue pair of these sizes and `extra` regions of these sizes; returns their places.
    pub fn new(sq_entries: u32, cq_entries: u32, extra: &[u32]) -> (Self, Rings<Self>, Vec<At>) {
        let mut regions = Vec::new();
        let mut next = GUARD;
        let mut lay = |bytes: u32| {
            regions.push(next..next + bytes);
            let at = At(next);
            next = (next + bytes).next_multiple_of(GUARD) + GUARD;
            at
        };
        let (sq, cq) = (lay(sq_entries * Sqe::BYTES as u32), lay(cq_entries * Cqe::BYTES as u32));
        let extra = extra.iter().map(|bytes| lay(*bytes)).collect();
        let rings = Rings { sq, cq, sq_door: Door::Sq, cq_door: Door::Cq, sq_entries, cq_entries };
        let bed = Self {
            words: vec![Cell::new(0); next as usize / 4],
            regions,
            clock: Cell::new(0),
            local: (0..LOCAL_WORDS).map(|i| Cell::new(0xdead_0000 | i)).collect(),
            lanes: 4,
            controller: RefCell::new(Controller::new(sq, cq, sq_entries, cq_entries)),
            script: RefCell::default(),
        };
        (bed, rings, extra)
    }

    /// The same bed with warps of this many lanes.
    pub fn with_lanes(mut self, lanes: u32) -> Self {
        self.lanes = lanes;
        self
    }

    /// The word at an address within a region.
    pub fn word(&self, at: At) -> &Cell<u32> {
        assert!(at.0.is_multiple_of(4), "{at:?} is not aligned");
        assert!(self.regions.iter().any(|r| r.contains(&at.0)), "{at:?} lies in no region");
        &self.words[at.0 as usize / 4]
    }

    /// Lets the controller post one completion.
    pub fn post(&self, post: &Post) {
        self.controller.borrow_mut().post(self, post);
    }

    fn play(&self) {
        let next = self.script.borrow_mut().pop();
        if let Some(post) = next {
            self.post(&post);
        }
    }
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
        let word = self.word(at);
        word.replace(word.get().wrapping_add(value))
    }

    fn fetch_or(&self, at: At, bits: u32) -> u32 {
        let word = self.word(at);
        word.replace(word.get() | bits)
    }

    fn fetch_and(&self, at: At, mask: u32) -> u32 {
        let word = self.word(at);
        word.replace(word.get() & mask)
    }

    fn compare_exchange(&self, at: At, old: u32, new: u32) -> u32 {
        let word = self.word(at);
        let seen = word.get();
        if seen == old {
            word.set(new);
        }
        seen
    }

    fn fence(&self) {}

    fn ring(&self, door: Door, value: u32) {
        self.controller.borrow_mut().ring(door, value);
        self.play();
    }

    fn pause(&self) {
        self.clock.set(self.clock.get() + 8);
        self.play();
    }

    fn now(&self) -> u64 {
        self.clock.replace(self.clock.get() + 1)
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
        let word = &self.local[index as usize];
        word.replace(word.get().wrapping_add(value))
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
        let looks: Vec<_> = (0..limit).map(look).collect();
        let there: Vec<_> = looks.into_iter().take_while(|(_, yes)| *yes).map(|(words, _)| words).collect();
        let all_well = (0..).zip(&there).fold(true, |well, (place, words)| well & act(place, *words));
        Taken { count: there.len() as u32, last: there.last().map_or(0, |words| words[0]), all_well }
    }

    fn exchange_local(&self, index: u32, old: u32, new: u32) -> u32 {
        let word = &self.local[index as usize];
        let seen = word.get();
        if seen == old {
            word.set(new);
        }
        seen
    }

    fn fetch(&self, to: u32, from: At) {
        (to..).zip(self.load_constant(from)).for_each(|(i, word)| self.set_local(i, word));
    }

    fn wait_fetches(&self) {}
}
