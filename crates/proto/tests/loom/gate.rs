//! The gate of an exported queue under loom: the host takes the queue from the controller while a thread uses it. Only the
//! gate is explored; the queue behind it is one thread's alone, and its words are ordinary ones.

use std::sync::atomic::{AtomicU32 as Plain, Ordering::Relaxed};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use onehop_proto::kernel::{Answer, DeviceOp, DeviceQueue, Gate, Handle, signal};
use onehop_proto::queue::{Memory, Rings, Shared};
use onehop_proto::{Cqe, GpuAddr, Status};

use crate::explore;

const SQ: u64 = 0;
const CQ: u64 = 0x80;
const SQ_DOOR: u64 = 0x100;
const CQ_DOOR: u64 = 0x104;
const TABLES: u64 = 0x200;
const HANDLE: u64 = 0x300;
const CONTROL: u64 = 0x400;
const END: u64 = 0x800;
/// From here on words that threads contend for.
const INSIDE: u64 = END;
const SIGNALS: u64 = END + 4;

struct Words {
    plain: Vec<Plain>,
    inside: AtomicU32,
    gate: AtomicU32,
    poison: AtomicU32,
    lost: AtomicU32,
    /// 1 while the controller does not have the queue.
    taken: AtomicU32,
    fenced: bool,
    done: Plain,
}

#[derive(Clone)]
struct Mem(Arc<Words>);

impl Mem {
    fn fought_over(&self, at: GpuAddr) -> Option<&AtomicU32> {
        match at.0 {
            INSIDE => Some(&self.0.inside),
            at if at == SIGNALS + u64::from(signal::POISON) => Some(&self.0.poison),
            at if at == SIGNALS + u64::from(signal::GATE) => Some(&self.0.gate),
            at if at == SIGNALS + u64::from(signal::LOST) => Some(&self.0.lost),
            _ => None,
        }
    }

    fn read(&self, at: GpuAddr, order: Ordering) -> u32 {
        match self.fought_over(at) {
            Some(word) => word.load(order),
            None => self.0.plain[at.0 as usize / 4].load(Relaxed),
        }
    }

    fn write(&self, at: GpuAddr, value: u32, order: Ordering) {
        match self.fought_over(at) {
            Some(word) => word.store(value, order),
            None => self.0.plain[at.0 as usize / 4].store(value, Relaxed),
        }
    }

    fn change(&self, at: GpuAddr, f: impl Fn(u32) -> u32) -> u32 {
        let word = &self.0.plain[at.0 as usize / 4];
        let old = word.load(Relaxed);
        word.store(f(old), Relaxed);
        old
    }

    /// The controller completes what the doorbell covers.
    fn complete(&self, tail: u32) {
        let number = self.0.done.fetch_add(1, Relaxed);
        let (slot, phase) = (number % 2, number / 2 % 2 == 0);
        let cid = (self.read(GpuAddr(SQ + u64::from((tail + 1) % 2) * 64), Ordering::Relaxed) >> 16) as u16;
        let cqe = Cqe::new(0, tail as u16, 1, cid, Status(0), phase);
        for (i, word) in (0..).zip(cqe.dw) {
            self.write(GpuAddr(CQ + u64::from(slot) * 16 + i * 4), word, Ordering::Relaxed);
        }
    }

    /// Creates the queue anew, as the host does when no thread is inside.
    fn create(&self) {
        for at in (SQ..SQ_DOOR).step_by(4) {
            self.write(GpuAddr(at), 0, Ordering::Relaxed);
        }
        self.0.done.store(0, Relaxed);
        Shared::new(rings(), GpuAddr(CONTROL)).unwrap().initialise(self);
    }
}

impl Memory for Mem {
    type Addr = GpuAddr;
    type Door = GpuAddr;

    fn load(&self, at: GpuAddr) -> u32 {
        self.read(at, Ordering::Relaxed)
    }
    fn load_acquire(&self, at: GpuAddr) -> u32 {
        self.read(at, Ordering::Acquire)
    }
    fn store(&self, at: GpuAddr, value: u32) {
        self.write(at, value, Ordering::Relaxed);
    }
    fn store_release(&self, at: GpuAddr, value: u32) {
        self.write(at, value, Ordering::Release);
    }
    fn store_entry(&self, at: GpuAddr, entry: &[u32; 16]) {
        for (i, word) in (0..).zip(entry) {
            self.write(at.plus(i * 4), *word, Ordering::Relaxed);
        }
    }
    fn fetch_add(&self, at: GpuAddr, value: u32) -> u32 {
        match self.fought_over(at) {
            Some(word) => word.fetch_add(value, Ordering::AcqRel),
            None => self.change(at, |old| old.wrapping_add(value)),
        }
    }
    fn fetch_or(&self, at: GpuAddr, bits: u32) -> u32 {
        self.change(at, |old| old | bits)
    }
    fn fetch_and(&self, at: GpuAddr, mask: u32) -> u32 {
        self.change(at, |old| old & mask)
    }
    fn compare_exchange(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        self.change(at, |seen| if seen == old { new } else { seen })
    }
    fn fence(&self) {}
    fn fence_all(&self) {
        if self.0.fenced {
            fence(Ordering::SeqCst);
        }
    }
    fn ring(&self, door: GpuAddr, value: u32) {
        // A read-modify-write sees the last value there is.
        assert_eq!(self.0.taken.fetch_or(0, Ordering::Relaxed), 0, "rung when the queue was taken away");
        if door.0 == SQ_DOOR {
            self.complete(value);
        }
    }
    fn pause(&self) {
        thread::yield_now();
    }
    fn now(&self) -> u64 {
        0
    }
}

fn rings() -> Rings<Mem> {
    let (sq_door, cq_door) = (GpuAddr(SQ_DOOR), GpuAddr(CQ_DOOR));
    Rings { sq: GpuAddr(SQ), cq: GpuAddr(CQ), sq_door, cq_door, sq_entries: 2, cq_entries: 2 }
}

fn model(fenced: bool) {
    let mem = Mem(Arc::new(Words {
        plain: (0..END / 4).map(|_| Plain::new(0)).collect(),
        inside: AtomicU32::new(0),
        gate: AtomicU32::new(Gate::open(1).0),
        poison: AtomicU32::new(0),
        lost: AtomicU32::new(0),
        taken: AtomicU32::new(0),
        fenced,
        done: Plain::new(0),
    }));
    mem.create();
    let handle = Handle {
        sq: SQ,
        cq: CQ,
        sq_door: SQ_DOOR,
        cq_door: CQ_DOOR,
        control: CONTROL,
        sq_entries: 2,
        cq_entries: 2,
        signals: SIGNALS,
        inside: INSIDE,
        pages: TABLES,
        lists: TABLES,
        bytes: 4096,
        blocks: 1,
        nsid: 1,
        block_bytes: 512,
        most_blocks: 1,
        page_shift: 12,
        retries: 1,
        stall: 1,
        limit: 1,
        ..Handle::default()
    };
    for (i, word) in (0..).zip(handle.words()) {
        mem.write(GpuAddr(HANDLE + i * 4), word, Ordering::Relaxed);
    }
    let kernel = {
        let mem = mem.clone();
        thread::spawn(move || {
            let queue = DeviceQueue::open(&mem, GpuAddr(HANDLE)).unwrap();
            assert_eq!(queue.run(&mem, DeviceOp::Read, 0, 1, 0), Answer::Done);
        })
    };
    // What the host does when it takes the queue away and returns it.
    let words = &mem.0;
    words.gate.store(Gate::closed(1).0, Ordering::Release);
    words.poison.store(2, Ordering::Release);
    fence(Ordering::SeqCst);
    while words.inside.load(Ordering::Acquire) != 0 {
        thread::yield_now();
    }
    words.taken.store(1, Ordering::Relaxed);
    words.gate.store(Gate::closed(2).0, Ordering::Release);
    mem.create();
    words.taken.store(0, Ordering::Relaxed);
    words.poison.store(0, Ordering::Release);
    words.gate.store(Gate::open(2).0, Ordering::Release);
    kernel.join().unwrap();
}

#[test]
fn a_queue_is_only_taken_from_nobody() {
    explore(3, || model(true));
}

#[test]
#[should_panic(expected = "rung when the queue was taken away")]
fn a_gate_without_its_fence_is_caught() {
    explore(3, || model(false));
}
