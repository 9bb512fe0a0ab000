//! Both queue modes under loom: every interleaving and every order of memory that the C11 model allows, within
//! loom's bounds. Run with `RUSTFLAGS="--cfg loom" cargo test -p onehop-proto --release --test loom`.
#![cfg(loom)]
#![allow(missing_docs)]

#[path = "loom/array.rs"]
mod array;
#[path = "loom/gate.rs"]
mod gate;
#[path = "loom/marks.rs"]
mod marks;

use std::cell::Cell;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;
use onehop_proto::kernel::{Exit, GROUP_WORDS, ItemOutcome, Job, Lanes, Taken, Warp, WorkItem, run_group};
use onehop_proto::queue::{Address, Event, Memory, Owner, Rings, Shared, SharedLayout, Slot};
use onehop_proto::{Cqe, Sqe, Status};

/// A word's number in the model's memory. Entries are stored by their first and eleventh dword alone, completions by
/// the first, third and fourth: loom's state grows with every word.
#[derive(Clone, Copy)]
struct At(u32);

impl Address for At {
    fn plus(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}

const SQ_DOOR: u32 = 0;
const CQ_DOOR: u32 = 4;
const SQ: u32 = 64;

/// Which fences there are.
#[derive(Clone, Copy, PartialEq)]
enum Fences {
    All,
    None,
    /// All but the first of each thread: in a warp that is the fence between its entries and the word that announces them.
    ButTheFirst,
}

struct Model {
    words: Vec<AtomicU32>,
    /// Written beside the submission and the completion doorbell: loom reports two rings that nothing orders. Values that
    /// arrive in another order than they were written in would have the controller take a whole ring for new.
    rung: [UnsafeCell<()>; 2],
    fences: Fences,
}

impl Model {
    fn word(&self, at: u32) -> &AtomicU32 {
        &self.words[at as usize / 4]
    }
}

#[derive(Clone)]
struct Mem {
    model: Arc<Model>,
    inline: Option<Arc<Mutex<Controller>>>,
    lanes: u32,
    local: Vec<Cell<u32>>,
    fenced: Cell<bool>,
}

impl Mem {
    fn new(bytes: u32, fences: Fences) -> Self {
        let words = (0..bytes / 4).map(|_| AtomicU32::new(0)).collect();
        let rung = [UnsafeCell::new(()), UnsafeCell::new(())];
        Self {
            model: Arc::new(Model { words, rung, fences }),
            inline: None,
            lanes: 1,
            local: Vec::new(),
            fenced: Cell::new(false),
        }
    }

    /// A warp of this many lanes, which take turns.
    fn warp(&self, lanes: u32) -> Self {
        Self {
            lanes,
            local: vec![Cell::new(0xdead); GROUP_WORDS as usize],
            fenced: Cell::new(false),
            ..self.clone()
        }
    }

    fn with_inline_controller(self, rings: Rings<Mem>) -> Self {
        Self { inline: Some(Arc::new(Mutex::new(Controller::new(rings)))), ..self }
    }
}

impl Memory for Mem {
    type Addr = At;
    type Door = u32;

    fn load(&self, at: At) -> u32 {
        self.model.word(at.0).load(Ordering::Relaxed)
    }
    fn load_acquire(&self, at: At) -> u32 {
        self.model.word(at.0).load(Ordering::Acquire)
    }
    fn store(&self, at: At, value: u32) {
        self.model.word(at.0).store(value, Ordering::Relaxed);
    }
    fn store_release(&self, at: At, value: u32) {
        self.model.word(at.0).store(value, Ordering::Release);
    }
    fn store_entry(&self, at: At, entry: &[u32; 16]) {
        self.store(at, entry[0]);
        self.store(at.plus(40), entry[10]);
    }
    fn fetch_add(&self, at: At, value: u32) -> u32 {
        self.model.word(at.0).fetch_add(value, Ordering::AcqRel)
    }
    fn fetch_or(&self, at: At, bits: u32) -> u32 {
        self.model.word(at.0).fetch_or(bits, Ordering::AcqRel)
    }
    fn fetch_and(&self, at: At, mask: u32) -> u32 {
        self.model.word(at.0).fetch_and(mask, Ordering::AcqRel)
    }
    fn compare_exchange(&self, at: At, old: u32, new: u32) -> u32 {
        self.model
            .word(at.0)
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|seen| seen)
    }
    fn fetch_or_relaxed(&self, at: At, bits: u32) -> u32 {
        self.model.word(at.0).fetch_or(bits, Ordering::Relaxed)
    }
    fn fetch_and_relaxed(&self, at: At, mask: u32) -> u32 {
        self.model.word(at.0).fetch_and(mask, Ordering::Relaxed)
    }
    fn fetch_and_acquire(&self, at: At, mask: u32) -> u32 {
        self.model.word(at.0).fetch_and(mask, Ordering::Acquire)
    }
    fn compare_exchange_acquire(&self, at: At, old: u32, new: u32) -> u32 {
        self.model
            .word(at.0)
            .compare_exchange(old, new, Ordering::Acquire, Ordering::Acquire)
            .unwrap_or_else(|seen| seen)
    }
    fn compare_exchange_relaxed(&self, at: At, old: u32, new: u32) -> u32 {
        self.model
            .word(at.0)
            .compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed)
            .unwrap_or_else(|seen| seen)
    }
    fn fence(&self) {
        let first = !self.fenced.replace(true);
        match self.model.fences {
            Fences::None => {}
            Fences::ButTheFirst if first => {}
            Fences::ButTheFirst | Fences::All => fence(Ordering::SeqCst),
        }
    }
    fn ring(&self, door: u32, value: u32) {
        self.model.rung[(door / 4) as usize].with_mut(|_| ());
        self.model.word(door).store(value, Ordering::Relaxed);
        if let (SQ_DOOR, Some(controller)) = (door, &self.inline) {
            controller.lock().unwrap().step(self, value);
        }
    }
    fn pause(&self) {
        thread::yield_now();
    }
    fn now(&self) -> u64 {
        0
    }
}

impl Lanes for Mem {
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
        self.local[index as usize].replace(self.local(index).wrapping_add(value))
    }
}

impl Warp for Mem {
    fn take(
        &self,
        limit: u32,
        look: impl FnMut(u32) -> ([u32; 2], bool),
        mut act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken {
        let there: Vec<_> =
            (0..limit).map(look).take_while(|(_, yes)| *yes).map(|(words, _)| words).collect();
        let all_well = (0..).zip(&there).fold(true, |well, (place, words)| well & act(place, *words));
        Taken { count: there.len() as u32, last: there.last().map_or(0, |words| words[0]), all_well }
    }
    fn exchange_local(&self, index: u32, old: u32, new: u32) -> u32 {
        let seen = self.local(index);
        self.local[index as usize].set(if seen == old { new } else { seen });
        seen
    }
    fn fetch(&self, to: u32, from: At) {
        (to..).zip(self.load_constant(from)).for_each(|(i, word)| self.set_local(i, word));
    }
    fn wait_fetches(&self) {}
}

fn rings(sq_entries: u32, cq_entries: u32) -> Rings<Mem> {
    Rings {
        sq: At(SQ),
        cq: At(SQ + sq_entries * 64),
        sq_door: SQ_DOOR,
        cq_door: CQ_DOOR,
        sq_entries,
        cq_entries,
    }
}

fn after(rings: &Rings<Mem>) -> u32 {
    SQ + rings.sq_entries * 64 + rings.cq_entries * 16
}

/// How far a controller has come.
struct Controller {
    rings: Rings<Mem>,
    head: u32,
    done: u32,
}

impl Controller {
    fn new(rings: Rings<Mem>) -> Self {
        Self { rings, head: 0, done: 0 }
    }

    /// Fetches what the doorbell covers and answers with the eleventh dword, last come first served; from 200 on that is
    /// the status too.
    fn step(&mut self, mem: &Mem, tail: u32) {
        fence(Ordering::Acquire);
        let mut batch = Vec::new();
        while self.head != tail {
            let at = self.rings.sq.plus(self.head * 64);
            batch.push((mem.load(at), mem.load(at.plus(40))));
            self.head = (self.head + 1) % self.rings.sq_entries;
        }
        if batch.is_empty() {
            mem.pause();
        }
        for (dw0, tag) in batch.into_iter().rev() {
            assert!(dw0 as u8 == 2 && tag > 100, "a stale or torn entry was fetched: {dw0:#x} {tag}");
            self.post(mem, tag, (dw0 >> 16) as u16);
        }
    }

    fn post(&mut self, mem: &Mem, tag: u32, cid: u16) {
        let entries = self.rings.cq_entries;
        let slot = self.done % entries;
        while (slot + 1) % entries == mem.load(At(CQ_DOOR)) {
            mem.pause();
        }
        let phase = (self.done / entries) % 2 == 0;
        let status = if tag < 200 { Status(0) } else { Status(tag as u16) };
        let cqe = Cqe::new(tag, self.head as u16, 1, cid, status, phase);
        let at = self.rings.cq.plus(slot * 16);
        mem.store(at, cqe.dw[0]);
        mem.store(at.plus(8), cqe.dw[2]);
        mem.store_release(at.plus(12), cqe.dw[3]);
        self.done += 1;
    }
}

/// A controller on a thread of its own, until it has answered this many commands.
fn controller_apart(mem: &Mem, rings: Rings<Mem>, commands: u32) -> thread::JoinHandle<()> {
    let mem = mem.clone();
    thread::spawn(move || {
        let mut controller = Controller::new(rings);
        while controller.done < commands {
            let tail = mem.load(At(SQ_DOOR));
            controller.step(&mem, tail);
        }
    })
}

fn owner_model(fences: Fences, sq_entries: u32, cq_entries: u32, commands: u32) {
    let rings = rings(sq_entries, cq_entries);
    let mem = Mem::new(after(&rings), fences);
    let device = controller_apart(&mem, rings, commands);
    let mut owner = Owner::new(rings, vec![Slot::default(); 8]);
    let (mut next, mut finished) = (0, 0);
    while finished < commands {
        while next < commands
            && owner.stage(&mem, &Sqe::new(2, 1).with_dw(10, 101 + next), 101 + next).is_ok()
        {
            next += 1;
        }
        owner.publish(&mem);
        match owner.poll(&mem) {
            Some(Event::Done { tag, cqe, .. }) => {
                assert_eq!(cqe.result(), tag, "another command's completion");
                finished += 1;
            }
            Some(Event::UnexpectedCompletion(cqe)) => panic!("unexpected completion {cqe:?}"),
            None => mem.pause(),
        }
    }
    assert_eq!(owner.in_flight(), 0);
    device.join().unwrap();
}

/// Two threads submit; a controller looks at the doorbell once, at any moment, and must find every entry that it
/// covers whole.
fn submit_model(fences: Fences) {
    let rings = rings(4, 4);
    let control = At(after(&rings));
    let layout = SharedLayout::new(4, 4).unwrap();
    let mem = Mem::new(control.0 + layout.bytes(), fences);
    let queue = Shared::new(rings, control).unwrap();
    queue.initialise(&mem);
    let user = move |mem: &Mem, tag: u32| {
        queue
            .submit(mem, &Sqe::new(2, 1).with_dw(10, tag), &queue.bounds(1))
            .map(|token| token.cid())
            .unwrap()
    };
    let other = {
        let mem = mem.clone();
        thread::spawn(move || user(&mem, 101))
    };
    let device = {
        let mem = mem.clone();
        thread::spawn(move || {
            let tail = mem.load(At(SQ_DOOR));
            fence(Ordering::Acquire);
            for slot in 0..tail {
                let (dw0, tag) = (mem.load(At(SQ + slot * 64)), mem.load(At(SQ + slot * 64 + 40)));
                assert!(dw0 as u8 == 2 && tag > 100, "a stale or torn entry was fetched: {dw0:#x} {tag}");
            }
        })
    };
    let mine = user(&mem, 102);
    assert_ne!(mine, other.join().unwrap(), "two commands in flight under one CID");
    device.join().unwrap();
    assert_eq!(mem.load(At(SQ_DOOR)), 2);
}

/// Two threads submit and wait; the controller runs within the doorbell write of the one that rings.
fn shared_model(entries: u32, each: u32) {
    let rings = rings(entries, entries);
    let control = At(after(&rings));
    let layout = SharedLayout::new(entries, entries).unwrap();
    let mem = Mem::new(control.0 + layout.bytes(), Fences::All).with_inline_controller(rings);
    let queue = Shared::new(rings, control).unwrap();
    queue.initialise(&mem);
    let user = move |mem: Mem, me: u32| {
        let bounds = queue.bounds(1);
        for i in 0..each {
            let tag = 201 + me * 10 + i;
            let token = queue.submit(&mem, &Sqe::new(2, 1).with_dw(10, tag), &bounds).unwrap();
            let status = queue.wait(&mem, &token, &bounds).unwrap();
            assert_eq!(u32::from(status.0), tag, "another command's completion");
        }
    };
    let other = {
        let mem = mem.clone();
        thread::spawn(move || user(mem, 1))
    };
    user(mem.clone(), 0);
    other.join().unwrap();
    assert_eq!(mem.load(control.plus(layout.unexpected_completions())), 0);
}

/// A queue in shared mode, and a job of reads for warps.
#[derive(Clone, Copy)]
struct Group {
    control: At,
    layout: SharedLayout,
    works: At,
    outcomes: At,
    poison: At,
    count: u32,
}

impl Group {
    fn new(rings: &Rings<Mem>, count: u32) -> Self {
        let control = At(after(rings));
        let layout = SharedLayout::new(rings.sq_entries, rings.cq_entries).unwrap();
        let works = At((control.0 + layout.bytes()).next_multiple_of(16));
        let outcomes = works.plus(count * WorkItem::BYTES);
        let poison = outcomes.plus(count * ItemOutcome::BYTES);
        Self { control, layout, works, outcomes, poison, count }
    }

    fn bytes(&self) -> u32 {
        self.poison.0 + 4
    }

    fn prepare(&self, mem: &Mem, rings: Rings<Mem>) -> Shared<Mem> {
        let queue = Shared::new(rings, self.control).unwrap();
        queue.initialise(mem);
        for i in 0..self.count {
            let work = WorkItem { lba: u64::from(101 + i), prp1: 0, prp2: 0, blocks: 1, control: 2 };
            for (k, word) in work.words().into_iter().enumerate() {
                mem.store(self.works.plus(i * WorkItem::BYTES + k as u32 * 4), word);
            }
        }
        queue
    }

    /// A warp executes its share, of the `index`th of `of`.
    fn run(&self, mem: &Mem, queue: &Shared<Mem>, (index, of): (u32, u32)) {
        let job = Job {
            works: self.works,
            outcomes: self.outcomes,
            count: self.count,
            nsid: 1,
            retries: 0,
            retry_delay: [0; 4],
            stall: u64::MAX,
            deadline: 1,
            poison: self.poison,
        };
        let each = self.count / of;
        let exit = run_group(mem, queue, &job, (index * each, (index + 1) * each), (index, of));
        assert_eq!(Exit::from_words(exit), Some(Exit::Finished));
        for item in index * each..(index + 1) * each {
            let outcome = ItemOutcome::from_word(mem.load(self.outcomes.plus(item * ItemOutcome::BYTES)));
            assert_eq!(outcome, ItemOutcome::Done(Status(0)));
        }
    }
}

/// Two warps execute a job together; the controller runs within the doorbell write of the one that rings.
fn group_model(fences: Fences, entries: u32, lanes: u32, each: u32) {
    let rings = rings(entries, entries);
    let group = Group::new(&rings, 2 * each);
    let mem = Mem::new(group.bytes(), fences).with_inline_controller(rings);
    let queue = group.prepare(&mem, rings);
    let other = {
        let mem = mem.warp(lanes);
        thread::spawn(move || group.run(&mem, &queue, (1, 2)))
    };
    group.run(&mem.warp(lanes), &queue, (0, 2));
    other.join().unwrap();
    assert_eq!(mem.load(group.control.plus(group.layout.unexpected_completions())), 0);
}

/// A warp has a queue to itself, and so rings for what it has just written; the controller is another thread.
fn lone_group_model(fences: Fences, commands: u32) {
    let rings = rings(2, 2);
    let group = Group::new(&rings, commands);
    let mem = Mem::new(group.bytes(), fences);
    let queue = group.prepare(&mem, rings);
    let device = controller_apart(&mem, rings, commands);
    group.run(&mem.warp(1), &queue, (0, 1));
    device.join().unwrap();
}

fn explore(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(f);
}

#[test]
fn owner_one_at_a_time() {
    explore(3, || owner_model(Fences::All, 2, 2, 3));
}

#[test]
fn owner_batches_and_wraps() {
    explore(3, || owner_model(Fences::All, 3, 4, 5));
}

#[test]
#[should_panic(expected = "a stale or torn entry")]
fn owner_without_its_fence_is_caught() {
    explore(3, || owner_model(Fences::None, 2, 2, 3));
}

#[test]
fn shared_submit() {
    explore(2, || submit_model(Fences::All));
}

#[test]
#[should_panic(expected = "a stale or torn entry")]
fn shared_submit_without_its_fence_is_caught() {
    explore(2, || submit_model(Fences::None));
}

#[test]
fn shared_two_threads() {
    explore(2, || shared_model(4, 1));
}

#[test]
fn shared_one_slot_for_two_threads() {
    explore(2, || shared_model(2, 1));
}

#[test]
fn group_of_one() {
    explore(2, || group_model(Fences::All, 4, 1, 1));
}

#[test]
fn group_of_one_that_must_wait_for_a_slot() {
    explore(2, || group_model(Fences::All, 2, 1, 1));
}

#[test]
fn group_of_two() {
    // Two preemptions take a minute, and were gone through too.
    explore(1, || group_model(Fences::All, 4, 2, 2));
}

#[test]
#[should_panic(expected = "a stale or torn entry")]
fn group_without_its_fences_is_caught() {
    explore(2, || group_model(Fences::ButTheFirst, 4, 1, 1));
}

#[test]
fn group_alone() {
    explore(2, || lone_group_model(Fences::All, 2));
}

#[test]
#[should_panic(expected = "a stale or torn entry")]
fn group_alone_without_its_fences_is_caught() {
    explore(2, || lone_group_model(Fences::None, 2));
}
