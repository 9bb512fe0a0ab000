//! A test host for one queue pair, and its controller.

use std::sync::Arc;
use std::thread::JoinHandle;

use onehop_controller::layout::{KEPT, PARKED_BYTES, REPORT_BYTES, SPAN_BYTES, control};
use onehop_controller::{BusMapping, Exit, Fault, Pair, Report, Rule, SERVE_LOCAL_WORDS, Violation, serve};
use onehop_proto::queue::Memory;
use onehop_proto::{BusAddr, Cqe, GpuAddr, Sqe, Status, prp};

use crate::memory::Mem;
use crate::warp::{Baton, LaneThreads};

/// Bus addresses of the two mapped ranges.
pub const DATA_BUS: u64 = 0x10_0000_0000;
pub const LIST_BUS: u64 = 0x20_0000_4000;
pub const PAGE: u64 = 4096;

/// Parameters of a rig.
#[derive(Clone)]
pub struct Setup {
    pub pair: Pair,
    pub faults: Vec<Fault>,
    pub lanes: u32,
    /// Pages for data, and for lists.
    pub pages: u64,
    pub list_pages: u64,
}

impl Default for Setup {
    fn default() -> Self {
        let pair = Pair {
            blocks: 512,
            limit: u64::MAX,
            sq_entries: 16,
            cq_entries: 16,
            sqid: 3,
            nsid: 1,
            lba_shift: 9,
            page_shift: 12,
            max_bytes: 256 << 10,
            parked_count: 16,
            span_count: 40,
            ..Pair::default()
        };
        Self { pair, faults: Vec::new(), lanes: 32, pages: 64, list_pages: 4 }
    }
}

/// The memory that host and controller share, before either runs.
pub struct Memories {
    pub mem: Mem,
    pub at: GpuAddr,
    pub pair: Pair,
    pub data: GpuAddr,
    pub lists: GpuAddr,
}

impl Memories {
    pub fn new(setup: &Setup) -> Self {
        let mut pair = setup.pair;
        let namespace = pair.blocks << pair.lba_shift;
        let mem = Mem::new(namespace + (setup.pages + setup.list_pages) * PAGE + (8 << 20));
        let ring = |entries: u32, bytes: usize| mem.alloc(u64::from(entries) * bytes as u64);
        pair.sq = ring(pair.sq_entries, Sqe::BYTES);
        pair.cq = ring(pair.cq_entries, Cqe::BYTES);
        (pair.sq_door, pair.cq_door, pair.control) = (mem.alloc(4), mem.alloc(4), mem.alloc(4));
        pair.namespace = mem.alloc(namespace);
        pair.parked = mem.alloc(u64::from(pair.parked_count * PARKED_BYTES));
        pair.spans = mem.alloc(u64::from(pair.span_count * SPAN_BYTES));
        pair.report = mem.alloc(u64::from(REPORT_BYTES));
        let (data, lists) = (mem.alloc(setup.pages * PAGE), mem.alloc(setup.list_pages * PAGE));
        let ranges = [
            BusMapping { bus: DATA_BUS, bytes: setup.pages * PAGE, target: data },
            BusMapping { bus: LIST_BUS, bytes: setup.list_pages * PAGE, target: lists },
        ];
        pair.ranges = mem.alloc(64);
        pair.range_count = 2;
        for (i, range) in ranges.iter().enumerate() {
            mem.put(pair.ranges.plus(i as u64 * u64::from(BusMapping::BYTES)), &range.words());
        }
        pair.faults = mem.alloc(u64::from(Fault::BYTES) * 8);
        pair.fault_count = setup.faults.len() as u32;
        for (i, fault) in setup.faults.iter().enumerate() {
            mem.put(pair.faults.plus(i as u64 * u64::from(Fault::BYTES)), &fault.words());
        }
        let at = mem.alloc(u64::from(Pair::BYTES));
        mem.put(at, &pair.words());
        Self { mem, at, pair, data, lists }
    }

    pub fn report(&self) -> Report {
        Report::from_words(&self.mem.take(self.pair.report))
    }

    pub fn violations(&self) -> Vec<Violation> {
        let count = self.report().violations.min(KEPT);
        let at = |i| self.pair.report.plus(u64::from(Report::BYTES + i * Violation::BYTES));
        (0..count).map(|i| Violation::from_words(&self.mem.take(at(i)))).collect()
    }

    pub fn broken(&self) -> Vec<Rule> {
        self.violations().iter().map(|v| v.rule().unwrap()).collect()
    }
}

/// A host and a controller that run in turns.
pub struct Rig {
    pub shared: Memories,
    baton: Arc<Baton>,
    thread: Option<JoinHandle<Exit>>,
    tail: u32,
    head: u32,
    phase: bool,
    next_cid: u16,
}

impl Rig {
    pub fn new(setup: &Setup) -> Self {
        Self::with(setup, SERVE_LOCAL_WORDS, serve::<LaneThreads>)
    }

    /// A rig with another controller.
    pub fn with(setup: &Setup, locals: u32, run: fn(&LaneThreads, GpuAddr) -> Exit) -> Self {
        let shared = Memories::new(setup);
        let baton = Arc::new(Baton::default());
        let (mem, at, lanes, theirs) = (shared.mem.clone(), shared.at, setup.lanes, baton.clone());
        let thread = std::thread::spawn(move || {
            theirs.wait();
            let warp = LaneThreads::new(&mem, lanes, locals, Some(theirs.clone()));
            let exit = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&warp, at)));
            theirs.end();
            exit.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        Self { shared, baton, thread: Some(thread), tail: 0, head: 0, phase: true, next_cid: 0 }
    }

    pub fn mem(&self) -> &Mem {
        &self.shared.mem
    }

    /// Writes an entry under a new identifier, without ringing.
    pub fn stage(&mut self, sqe: Sqe) -> u16 {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1) % 4096;
        self.stage_as(sqe, cid);
        cid
    }

    pub fn stage_as(&mut self, sqe: Sqe, cid: u16) {
        let at = self.shared.pair.sq.plus(u64::from(self.tail) * 64);
        self.mem().store_entry(at, &sqe.with_cid(cid).dw);
        self.tail = (self.tail + 1) % self.shared.pair.sq_entries;
    }

    pub fn ring(&self) {
        self.mem().fence();
        self.mem().ring(self.shared.pair.sq_door, self.tail);
    }

    /// Lets the controller run until it finds nothing to do.
    pub fn run(&self) -> bool {
        self.baton.run_controller()
    }

    /// The new completions; the host's head doorbell is rung.
    pub fn completions(&mut self) -> Vec<Cqe> {
        let found = self.take();
        self.mem().ring(self.shared.pair.cq_door, self.head);
        found
    }

    /// The new completions; no doorbell is rung.
    pub fn take(&mut self) -> Vec<Cqe> {
        let mut found = Vec::new();
        loop {
            let at = self.shared.pair.cq.plus(u64::from(self.head) * 16);
            let cqe = Cqe { dw: self.mem().take(at) };
            if cqe.phase() != self.phase {
                return found;
            }
            assert_eq!(cqe.sqid(), 3);
            found.push(cqe);
            self.head += 1;
            if self.head == self.shared.pair.cq_entries {
                self.head = 0;
                self.phase = !self.phase;
            }
        }
    }

    /// Submits one command; returns its status.
    pub fn one(&mut self, sqe: Sqe) -> Status {
        let cid = self.stage(sqe);
        self.ring();
        self.run();
        let [cqe] = self.completions()[..] else { panic!("not one completion") };
        assert_eq!(cqe.cid(), cid);
        cqe.status()
    }

    pub fn advance(&self, nanos: u64) {
        self.mem().advance(nanos);
    }

    /// Stops the controller; returns what it has reported.
    pub fn stop(mut self) -> (Exit, Memories) {
        self.mem().store(self.shared.pair.control, control::STOP);
        let mut turns = 0;
        while self.run() {
            turns += 1;
            assert!(turns < 1000, "it does not stop");
        }
        let exit = self.thread.take().unwrap().join().unwrap();
        let Self { shared, .. } = self;
        (exit, shared)
    }

    /// Makes the controller rest, and gives it new queues.
    pub fn renew(&mut self) {
        self.mem().store(self.shared.pair.control, control::REST);
        for _ in 0..100 {
            self.run();
            if self.shared.report().resting != 0 {
                break;
            }
        }
        assert_eq!(self.shared.report().resting, 1);
        let pair = self.shared.pair;
        self.mem().put(pair.sq, &vec![0; pair.sq_entries as usize * 16]);
        self.mem().put(pair.cq, &vec![0; pair.cq_entries as usize * 4]);
        self.mem().put(pair.sq_door, &[0]);
        self.mem().put(pair.cq_door, &[0]);
        self.mem().put(self.shared.at, &pair.words());
        (self.tail, self.head, self.phase) = (0, 0, true);
        self.mem().store(pair.control, control::RUN);
        self.run();
        assert_eq!(self.shared.report().resting, 0);
    }
}

/// The pointers to pages of the data range, in this order, the first with an offset. The list is written to memory from
/// entry `first_index` of its first page on.
pub fn pointers(shared: &Memories, pages: &[u64], offset: u64, bytes: u64, first_index: u32) -> (u64, u64) {
    let page = |i: u64| BusAddr(DATA_BUS + pages[i as usize] * PAGE + if i == 0 { offset } else { 0 });
    let list = |i: u32| BusAddr(LIST_BUS + u64::from(i) * PAGE);
    let put = |page: u32, index: u32, entry: u64| {
        let at = shared.lists.plus(u64::from(page) * PAGE + u64::from(index) * 8);
        shared.mem.put(at, &[entry as u32, (entry >> 32) as u32]);
    };
    prp::build(12, page, bytes, first_index, list, put).unwrap()
}
