//! The litmus experiments under loom: every interleaving and every order of memory that the C11 model allows. With
//! their fence, no execution shows a message that is incomplete; without it, or without the reader's acquire, one does.
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p onehop-controller --release --test loom --target-dir target/loom`.
#![cfg(loom)]
#![allow(missing_docs, clippy::unwrap_used)]

use std::cell::RefCell;

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU32, fence};
use loom::thread;
use onehop_controller::layout::{Litmus, Tally};
use onehop_controller::litmus::{LITMUS_LOCAL_WORDS, complete, consume, fetch, strength, submit};
use onehop_controller::{Exit, Scoped, Wide};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::Lanes;
use onehop_proto::queue::Memory;

/// The memory that the two sides share: messages of four words, the flags, the acknowledgement. Loom's state grows with
/// each.
const PAYLOAD: u64 = 0;
const FLAGS: u64 = 32;
const TAKEN: u64 = 64;
const SHARED: u64 = 68;
/// A side's own memory: the control word, its tally, its description.
const CONTROL: u64 = 128;
const TALLY: u64 = 160;
const SETUP: u64 = 192;

/// One side: a warp of one lane.
struct Side {
    shared: Arc<Vec<AtomicU32>>,
    own: RefCell<Vec<u32>>,
    locals: RefCell<Vec<u32>>,
}

impl Side {
    fn new(shared: &Arc<Vec<AtomicU32>>, setup: &Litmus) -> Self {
        let mut own = vec![0; 128];
        own[SETUP as usize / 4..][..22].copy_from_slice(&setup.words());
        let locals = RefCell::new(vec![0; LITMUS_LOCAL_WORDS as usize]);
        Self { shared: shared.clone(), own: RefCell::new(own), locals }
    }

    fn tally(&self) -> Tally {
        Tally::from_words(self.own.borrow()[TALLY as usize / 4..][..8].first_chunk().unwrap())
    }

    fn word(&self, at: GpuAddr) -> Option<&AtomicU32> {
        self.shared.get(at.0 as usize / 4)
    }
}

impl Memory for Side {
    type Addr = GpuAddr;
    type Door = GpuAddr;

    fn load(&self, at: GpuAddr) -> u32 {
        self.word(at).map_or_else(|| self.own.borrow()[at.0 as usize / 4], |word| word.load(Relaxed))
    }
    fn load_acquire(&self, at: GpuAddr) -> u32 {
        self.word(at).unwrap().load(Acquire)
    }
    fn store(&self, at: GpuAddr, value: u32) {
        match self.word(at) {
            Some(word) => word.store(value, Relaxed),
            None => self.own.borrow_mut()[at.0 as usize / 4] = value,
        }
    }
    fn store_release(&self, at: GpuAddr, value: u32) {
        match self.word(at) {
            Some(word) => word.store(value, Release),
            None => self.store(at, value),
        }
    }
    fn store_entry(&self, at: GpuAddr, entry: &[u32; 16]) {
        self.store4(at, *entry.first_chunk().unwrap());
    }
    fn fetch_add(&self, _: GpuAddr, _: u32) -> u32 {
        unreachable!()
    }
    fn fetch_or(&self, _: GpuAddr, _: u32) -> u32 {
        unreachable!()
    }
    fn fetch_and(&self, _: GpuAddr, _: u32) -> u32 {
        unreachable!()
    }
    fn compare_exchange(&self, _: GpuAddr, _: u32, _: u32) -> u32 {
        unreachable!()
    }
    fn fence(&self) {
        fence(AcqRel);
    }
    fn ring(&self, door: GpuAddr, value: u32) {
        self.store(door, value);
    }
    fn pause(&self) {
        thread::yield_now();
    }
    fn now(&self) -> u64 {
        0
    }
}

impl Wide for Side {
    fn load4(&self, at: GpuAddr) -> [u32; 4] {
        std::array::from_fn(|i| self.load(at.plus(4 * i as u64)))
    }
    fn store4(&self, at: GpuAddr, words: [u32; 4]) {
        // Only the last word of a completion is checked: loom need not try the others.
        let first = if at.0 >= FLAGS { 3 } else { 0 };
        for (i, word) in words.iter().enumerate().skip(first) {
            self.store(at.plus(4 * i as u64), *word);
        }
    }
}

impl Scoped for Side {
    fn fence_gpu(&self) {
        fence(AcqRel);
    }
}

impl Lanes for Side {
    fn lanes(&self) -> u32 {
        1
    }
    fn each(&self, mut f: impl FnMut(u32)) {
        f(0);
    }
    fn once(&self, mut f: impl FnMut()) {
        f();
    }
    fn local(&self, at: u32) -> u32 {
        self.locals.borrow()[at as usize]
    }
    fn set_local(&self, at: u32, value: u32) {
        self.locals.borrow_mut()[at as usize] = value;
    }
    fn add_local(&self, at: u32, value: u32) -> u32 {
        let old = self.local(at);
        self.set_local(at, old + value);
        old
    }
}

type Run = fn(&Side, GpuAddr) -> Exit;

/// Tries every execution of an experiment; each must see only whole messages.
fn every_message_is_whole(writer: Run, reader: Run, messages: u32, fence: u32, relaxed: u32) {
    loom::model(move || {
        let setup = Litmus {
            payload: GpuAddr(PAYLOAD),
            flags: GpuAddr(FLAGS),
            taken: GpuAddr(TAKEN),
            tally: GpuAddr(TALLY),
            control: GpuAddr(CONTROL),
            limit: u64::MAX,
            slots: 1,
            words: 4,
            batch: 1,
            messages,
            fence,
            relaxed,
            ..Litmus::default()
        };
        let shared: Vec<_> = (0..SHARED / 4).map(|_| AtomicU32::new(0)).collect();
        let shared = Arc::new(shared);
        let theirs = shared.clone();
        let thread = thread::spawn(move || writer(&Side::new(&theirs, &setup), GpuAddr(SETUP)));
        let side = Side::new(&shared, &Litmus { checks: 1, ..setup });
        assert_eq!(reader(&side, GpuAddr(SETUP)), Exit::Stopped);
        assert_eq!(thread.join().unwrap(), Exit::Stopped);
        let tally = side.tally();
        assert_eq!((tally.good, tally.messages), (messages, messages), "{tally:?}");
    });
}

#[test]
fn an_entry_comes_before_its_doorbell() {
    every_message_is_whole(submit, fetch, 2, strength::SYSTEM, 0);
}

#[test]
#[should_panic(expected = "good: 0")]
fn an_entry_without_a_fence_may_come_later() {
    every_message_is_whole(submit, fetch, 1, strength::NONE, 0);
}

#[test]
#[should_panic(expected = "good: 0")]
fn a_doorbell_without_acquire_is_no_order() {
    every_message_is_whole(submit, fetch, 1, strength::SYSTEM, 1);
}

#[test]
fn data_come_before_their_completion() {
    every_message_is_whole(complete, consume, 2, strength::SYSTEM, 0);
}

#[test]
#[should_panic(expected = "good: 0")]
fn data_without_a_fence_may_come_later() {
    every_message_is_whole(complete, consume, 1, strength::NONE, 0);
}

#[test]
#[should_panic(expected = "good: 0")]
fn a_phase_without_acquire_is_no_order() {
    every_message_is_whole(complete, consume, 1, strength::SYSTEM, 1);
}
