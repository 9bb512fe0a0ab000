//! The memory of a queue pair for its warp: a descriptor and what it refers to, all in VRAM.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use onehop_controller::layout::{
    KEPT, LOCAL_SPANS, MAX_FAULTS, PARKED_BYTES, REPORT_BYTES, SPAN_BYTES, Violation, control,
};
use onehop_controller::{Fault, Pair, Report};
use onehop_proto::{Cqe, GpuAddr, Sqe};

use super::{Hold, Serving, Table, get, locked, put};
use crate::{Error, Gpu, Place, Region, Resident, Result};

/// Commands of a pair that can wait.
const PARKED: u32 = 64;
/// Words that both sides poll are on cache lines of their own.
const LINE: usize = 128;
const LOST: &str = "controllers did not end, and what they were given is still theirs";
/// How long a warp may take to see what its host wants. A warp polls every few microseconds; this is for a very busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Offsets of the parts of one pair's memory.
#[derive(Clone, Copy)]
struct PairLayout {
    control: usize,
    report: usize,
    faults: usize,
    parked: usize,
    spans: usize,
    bytes: usize,
}

impl PairLayout {
    fn new(spans: u32) -> Self {
        let (control, report) = (0, LINE);
        let faults = report + (REPORT_BYTES as usize).next_multiple_of(LINE);
        let parked = faults + (MAX_FAULTS * Fault::BYTES) as usize;
        let at = parked + (PARKED * PARKED_BYTES) as usize;
        let bytes = (at + (spans * SPAN_BYTES) as usize).next_multiple_of(LINE);
        Self { control, report, faults, parked, spans: at, bytes }
    }
}

/// Where a pair's doorbells are in theirs. An invalid number gives an offset past the memory, where nothing is read or
/// written.
fn sq_door(qid: u16) -> usize {
    usize::from(qid.wrapping_sub(1)) * 2 * LINE
}

fn cq_door(qid: u16) -> usize {
    sq_door(qid) + LINE
}

/// What all pairs of a drive share.
#[derive(Clone)]
pub struct Common {
    /// The memory of the blocks.
    pub namespace: Region,
    /// How many there are.
    pub blocks: u64,
    /// Power of two of the bytes of a block, 9 to 16.
    pub lba_shift: u32,
    /// Bytes of the longest transfer.
    pub max_bytes: u32,
    /// Time after which a controller ends.
    pub limit: Duration,
    /// See [`flag`](onehop_controller::layout::flag).
    pub flags: u32,
}

/// A new pair.
#[derive(Clone, Copy)]
pub struct Begin<'a> {
    /// The submission queue.
    pub sq: GpuAddr,
    /// The completion queue.
    pub cq: GpuAddr,
    /// Entries of the submission queue, 2 to 65 536.
    pub sq_entries: u32,
    /// Entries of the completion queue, likewise.
    pub cq_entries: u32,
    /// The number of the completion queue.
    pub cqid: u16,
    /// Power of two of the bytes of a page, 12 to 27.
    pub page_shift: u32,
    /// Faults to inject, at most eight.
    pub faults: &'a [Fault],
}

/// The memory of all pairs of a drive, by queue number from 1 on. Dropping it stops its controllers.
pub struct Pairs {
    state: Mutex<ResidentState>,
    gpu: Arc<dyn Gpu>,
    descriptors: Region,
    /// Two lines for each pair. Kernels get the addresses of this memory only.
    doorbells: Region,
    rest: Region,
    /// The table of mappings, and its capacity.
    ranges: (Region, u32),
    table: Arc<Mutex<Table>>,
    places: PairLayout,
    common: Common,
    count: u16,
}

#[derive(Default)]
struct ResidentState {
    running: Option<Box<dyn Resident>>,
    /// Controllers may still run: their memory is leaked.
    lost: bool,
    /// The rings of all pairs that were started while these run.
    held: Vec<Hold>,
}

impl Pairs {
    /// Allocates memory for `count` pairs.
    ///
    /// # Errors
    /// When the GPU has none left, or the namespace is shorter than its blocks.
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        common: Common,
        table: &Arc<Mutex<Table>>,
        count: u16,
        page_bytes: u32,
    ) -> Result<Self> {
        let Common { namespace, blocks, lba_shift, max_bytes, .. } = &common;
        let bytes = (9..=16).contains(lba_shift).then(|| blocks.checked_mul(1 << lba_shift)).flatten();
        if bytes.is_none_or(|bytes| bytes > namespace.len() as u64) || count == 0 || page_bytes == 0 {
            let len = namespace.len();
            let why = format!("{count} pairs for {blocks} blocks of 2^{lba_shift} bytes in {len} bytes");
            return Err(Error::Launch(why));
        }
        // Two more extents than pages: neither a transfer nor its list need start on a page.
        let spans = (max_bytes / page_bytes).saturating_add(2).saturating_sub(LOCAL_SPANS);
        let places = PairLayout::new(spans);
        let pairs = usize::from(count);
        let descriptors = gpu.alloc_private(pairs * Pair::BYTES as usize)?;
        let doorbells = gpu.alloc(Place::Vram, pairs * 2 * LINE)?;
        let rest = gpu.alloc_private(pairs * places.bytes)?;
        let (state, gpu, table) = (Mutex::default(), gpu.clone(), table.clone());
        let ranges = {
            let table = locked(&table);
            let (region, room) = table.memory();
            (region.clone(), room)
        };
        Ok(Self { state, gpu, descriptors, doorbells, rest, ranges, table, places, common, count })
    }

    /// The numbers of the pairs.
    pub fn numbers(&self) -> impl Iterator<Item = u16> + use<> {
        1..=self.count
    }

    fn state(&self) -> MutexGuard<'_, ResidentState> {
        locked(&self.state)
    }

    /// The doorbells of a pair: the submission queue's tail, and the completion queue's head of the same number.
    #[must_use]
    pub fn doors(&self, qid: u16) -> [GpuAddr; 2] {
        [sq_door(qid), cq_door(qid)].map(|at| self.doorbells.addr().plus(at as u64))
    }

    /// Starts a controller for each pair, and waits until all are at rest.
    ///
    /// # Errors
    /// When they cannot be started, already run, or did not end the last time; when one does not come to rest.
    pub fn start(&self) -> Result<()> {
        let mut state = self.state();
        if state.lost {
            return Err(Error::Launch(LOST.into()));
        }
        if state.running.is_some() {
            return Err(Error::Launch("these controllers run already".into()));
        }
        state.held.clear();
        self.reset()?;
        // Locked until every warp has read it.
        let mut table = locked(&self.table);
        table.begin_search()?;
        let serving = Serving {
            pairs: self.descriptors.addr(),
            count: self.count.into(),
            limit: self.common.limit,
            memory: self.memory().into(),
        };
        let started = self.gpu.controllers().and_then(|gpu| gpu.serve(serving));
        state.running = Some(started.inspect_err(|error| match error {
            // A kernel may have started.
            error if error.is_under_way() => state.lost = true,
            _ => table.end_search(),
        })?);
        for qid in self.numbers() {
            if !self.wait(qid, 1)? {
                return Err(Error::Launch(format!("the warp of queue {qid} did not start")));
            }
        }
        Ok(())
    }

    /// Whether they were started and not stopped since.
    pub fn are_started(&self) -> bool {
        self.state().running.is_some()
    }

    /// Whether a controller has ended, on request or not.
    pub fn is_over(&self) -> bool {
        self.state().running.as_ref().is_some_and(|running| running.is_over())
    }

    /// All memory that the controllers get.
    fn memory(&self) -> [Region; 5] {
        [&self.descriptors, &self.doorbells, &self.rest, &self.ranges.0, &self.common.namespace]
            .map(Region::clone)
    }

    fn at(&self, qid: u16, place: usize) -> usize {
        // An invalid number gives an offset past the memory, where nothing is read or written.
        usize::from(qid.wrapping_sub(1)) * self.places.bytes + place
    }

    fn addr_of(&self, qid: u16, place: usize) -> GpuAddr {
        self.rest.addr().plus(self.at(qid, place) as u64)
    }

    /// The initial state of every pair: at rest.
    fn reset(&self) -> Result<()> {
        self.rest.fill(0, self.rest.len(), 0)?;
        self.doorbells.fill(0, self.doorbells.len(), 0)?;
        let nothing = GpuAddr(0);
        for qid in self.numbers() {
            let begin = Begin {
                sq: nothing,
                cq: nothing,
                sq_entries: 2,
                cq_entries: 2,
                cqid: qid,
                page_shift: 12,
                faults: &[],
            };
            self.describe(qid, &begin)?;
            self.rest.signal(self.at(qid, self.places.control), control::REST)?;
        }
        Ok(())
    }

    fn describe(&self, qid: u16, begin: &Begin<'_>) -> Result<()> {
        let (common, p) = (&self.common, self.places);
        let pair = Pair {
            sq: begin.sq,
            cq: begin.cq,
            sq_door: self.doors(qid)[0],
            cq_door: self.doors(begin.cqid)[1],
            namespace: common.namespace.addr(),
            blocks: common.blocks,
            ranges: self.ranges.0.addr(),
            faults: self.addr_of(qid, p.faults),
            parked: self.addr_of(qid, p.parked),
            spans: self.addr_of(qid, p.spans),
            report: self.addr_of(qid, p.report),
            control: self.addr_of(qid, p.control),
            limit: common.limit.as_nanos() as u64,
            sq_entries: begin.sq_entries,
            cq_entries: begin.cq_entries,
            sqid: qid.into(),
            nsid: 1,
            lba_shift: common.lba_shift,
            page_shift: begin.page_shift,
            max_bytes: common.max_bytes,
            range_count: self.ranges.1,
            fault_count: begin.faults.len() as u32,
            parked_count: PARKED,
            flags: common.flags,
            span_count: ((p.bytes - p.spans) / SPAN_BYTES as usize) as u32,
            ..Pair::default()
        };
        put(&self.descriptors, usize::from(qid - 1) * Pair::BYTES as usize, &pair.words())
    }

    /// Starts a new pair on a resting warp; false if it does not answer. It reads the whole table first: nothing is
    /// mapped or unmapped meanwhile.
    ///
    /// # Errors
    /// When a ring is not memory that the GPU reaches, or the description is invalid.
    pub fn begin(&self, qid: u16, begin: &Begin<'_>) -> Result<bool> {
        let (entries, of_ours) = (2..=65_536, 1..=self.count);
        let makes_sense = entries.contains(&begin.sq_entries)
            && entries.contains(&begin.cq_entries)
            && of_ours.contains(&qid)
            && of_ours.contains(&begin.cqid)
            && (12..=27).contains(&begin.page_shift)
            && begin.faults.len() <= MAX_FAULTS as usize;
        if !makes_sense {
            return Err(Error::Launch(format!("no controller takes queue {qid} as it is described")));
        }
        let rings = [(begin.sq, begin.sq_entries, Sqe::BYTES), (begin.cq, begin.cq_entries, Cqe::BYTES)];
        // Locked until the warp runs: stopping the controllers meanwhile would release its rings.
        let mut state = self.state();
        for (at, entries, bytes) in rings {
            let held = self.gpu.controllers()?.hold("a ring", at, u64::from(entries) * bytes as u64)?;
            state.held.push(held);
        }
        let _still = locked(&self.table);
        self.describe(qid, begin)?;
        for (i, fault) in begin.faults.iter().enumerate() {
            put(&self.rest, self.fault_at(qid, i), &fault.words())?;
        }
        self.doorbells.signal(sq_door(qid), 0)?;
        self.doorbells.signal(cq_door(begin.cqid), 0)?;
        // The warp clears it once it has read the table.
        let unread = self.at(qid, self.places.report + core::mem::offset_of!(Report, unread));
        self.rest.signal(unread, 1)?;
        self.rest.signal(self.at(qid, self.places.control), control::RUN)?;
        Ok(self.wait(qid, 0)? && self.wait_for(unread, 0)?)
    }

    /// Makes a warp abandon its pair; false if it does not answer. Data of reads that it has completed may arrive
    /// later.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn end(&self, qid: u16) -> Result<bool> {
        self.rest.signal(self.at(qid, self.places.control), control::REST)?;
        self.wait(qid, 1)
    }

    /// Waits until a warp rests, or does not; false on a time-out.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn wait(&self, qid: u16, resting: u32) -> Result<bool> {
        self.wait_for(self.at(qid, self.places.report + core::mem::offset_of!(Report, resting)), resting)
    }

    fn wait_for(&self, at: usize, word: u32) -> Result<bool> {
        let start = Instant::now();
        while self.rest.word(at)? != word {
            if start.elapsed() > PATIENCE {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        Ok(true)
    }

    /// Stops every warp, and waits for that. On failure their memory is leaked.
    ///
    /// # Errors
    /// When the GPU fails, or they do not end, now or in an earlier call.
    pub fn stop(&self) -> Result<()> {
        let mut state = self.state();
        if state.lost {
            return Err(Error::Launch(LOST.into()));
        }
        let Some(running) = state.running.take() else { return Ok(()) };
        let stop = |qid| self.rest.signal(self.at(qid, self.places.control), control::STOP);
        let stopped = self.numbers().try_for_each(stop);
        if let Err(error) = running.join() {
            state.lost = true;
            return Err(error);
        }
        state.held.clear();
        locked(&self.table).end_search();
        stopped
    }

    /// Rings the submission queue's tail doorbell.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn ring_sq(&self, qid: u16, tail: u32) -> Result<()> {
        self.doorbells.signal(sq_door(qid), tail)
    }

    /// Rings the completion queue's head doorbell.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn ring_cq(&self, qid: u16, head: u32) -> Result<()> {
        self.doorbells.signal(cq_door(qid), head)
    }

    /// A fault with the counters that the warp saved.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn fault(&self, qid: u16, index: usize) -> Result<Fault> {
        Ok(Fault::from_words(&get(&self.rest, self.fault_at(qid, index))?))
    }

    fn fault_at(&self, qid: u16, index: usize) -> usize {
        self.at(qid, self.places.faults) + index * Fault::BYTES as usize
    }

    /// The report of a pair.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn report(&self, qid: u16) -> Result<Report> {
        Ok(Report::from_words(&get(&self.rest, self.at(qid, self.places.report))?))
    }

    /// The violations that a warp found, from number `from` on, and how many there are in all.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn violations(&self, qid: u16, from: u32) -> Result<(Vec<Violation>, u32)> {
        let count = self.report(qid)?.violations;
        let at = |i: u32| self.at(qid, self.places.report) + (Report::BYTES + i * Violation::BYTES) as usize;
        let one = |i| Ok(Violation::from_words(&get(&self.rest, at(i))?));
        Ok(((from..count.min(KEPT)).map(one).collect::<Result<_>>()?, count))
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        // No caller to report an error to; what did not end keeps its memory.
        let _ = self.stop();
        let mut state = self.state();
        if state.lost {
            std::mem::forget(std::mem::take(&mut state.held));
            std::mem::forget(self.memory());
        }
    }
}

#[cfg(test)]
#[path = "pairs_tests.rs"]
mod tests;
