//! A queue pair as its warp finds it: a descriptor and what it names, all in VRAM.

use std::time::{Duration, Instant};

use onehop_controller::layout::{
    KEPT, LOCAL_SPANS, MAX_FAULTS, PARKED_BYTES, PARKED_KIND, REPORT_BYTES, SPAN_BYTES, Violation, control,
};
use onehop_controller::{Fault, Pair, Report};
use onehop_gpu::{Gpu, Place, Region, Result};
use onehop_proto::GpuAddr;

use crate::memory::{get, put};

/// Commands of a pair that can wait for their time.
const PARKED: u32 = 64;
/// Words that both sides poll lie on lines of their own.
const LINE: usize = 128;
/// How long a warp may take to see what its host wants. A warp looks every few microseconds; this is for a machine that
/// is very busy.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the parts of one pair's memory start.
#[derive(Clone, Copy)]
struct Places {
    sq_door: usize,
    cq_door: usize,
    control: usize,
    report: usize,
    faults: usize,
    parked: usize,
    spans: usize,
    bytes: usize,
}

impl Places {
    fn new(spans: u32) -> Self {
        let (sq_door, cq_door, control, report) = (0, LINE, 2 * LINE, 3 * LINE);
        let faults = report + (REPORT_BYTES as usize).next_multiple_of(LINE);
        let parked = faults + (MAX_FAULTS * Fault::BYTES) as usize;
        let at = parked + (PARKED * PARKED_BYTES) as usize;
        let bytes = (at + (spans * SPAN_BYTES) as usize).next_multiple_of(LINE);
        Self { sq_door, cq_door, control, report, faults, parked, spans: at, bytes }
    }
}

/// What all pairs of a drive have in common.
#[derive(Clone, Copy)]
pub(crate) struct Common {
    pub namespace: GpuAddr,
    pub blocks: u64,
    pub lba_shift: u32,
    pub max_bytes: u32,
    pub ranges: GpuAddr,
    pub range_count: u32,
    pub limit: Duration,
}

/// A pair that begins.
pub(crate) struct Begin<'a> {
    pub sq: GpuAddr,
    pub cq: GpuAddr,
    pub sq_entries: u32,
    pub cq_entries: u32,
    pub cqid: u16,
    pub page_shift: u32,
    pub faults: &'a [Fault],
}

/// The memory of all pairs of a drive, by queue number from 1 on.
pub(crate) struct Pairs {
    descriptors: Region,
    rest: Region,
    places: Places,
    common: Common,
    count: u16,
}

impl Pairs {
    pub(crate) fn new(gpu: &dyn Gpu, common: Common, count: u16, page_bytes: u32) -> Result<Self> {
        // Two more pieces than pages: a transfer need not start on a page, and neither need its list.
        let spans = (common.max_bytes / page_bytes + 2).saturating_sub(LOCAL_SPANS);
        let places = Places::new(spans);
        let descriptors = gpu.alloc(Place::Vram, usize::from(count) * Pair::BYTES as usize)?;
        let rest = gpu.alloc(Place::Vram, usize::from(count) * places.bytes)?;
        Ok(Self { descriptors, rest, places, common, count })
    }

    pub(crate) fn addr(&self) -> GpuAddr {
        self.descriptors.addr()
    }

    pub(crate) fn numbers(&self) -> impl Iterator<Item = u16> + use<> {
        1..=self.count
    }

    fn at(&self, qid: u16, place: usize) -> usize {
        usize::from(qid - 1) * self.places.bytes + place
    }

    fn addr_of(&self, qid: u16, place: usize) -> GpuAddr {
        self.rest.addr().plus(self.at(qid, place) as u64)
    }

    /// Every pair as a warp finds it first: at rest.
    pub(crate) fn reset(&self) -> Result<()> {
        self.rest.fill(0, self.rest.len(), 0)?;
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
        let (common, p) = (self.common, self.places);
        let pair = Pair {
            sq: begin.sq,
            cq: begin.cq,
            sq_door: self.addr_of(qid, p.sq_door),
            cq_door: self.addr_of(begin.cqid, p.cq_door),
            namespace: common.namespace,
            blocks: common.blocks,
            ranges: common.ranges,
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
            range_count: common.range_count,
            fault_count: begin.faults.len() as u32,
            parked_count: PARKED,
            span_count: ((p.bytes - p.spans) / SPAN_BYTES as usize) as u32,
            ..Pair::default()
        };
        put(&self.descriptors, usize::from(qid - 1) * Pair::BYTES as usize, &pair.words())
    }

    /// Lets a warp that rests begin with a new pair; false if it does not answer. It looks through all that is mapped first,
    /// which must stand still meanwhile.
    pub(crate) fn begin(&self, qid: u16, begin: &Begin<'_>) -> Result<bool> {
        self.describe(qid, begin)?;
        for (i, fault) in begin.faults.iter().enumerate() {
            put(&self.rest, self.fault_at(qid, i), &fault.words())?;
        }
        self.rest.signal(self.at(qid, self.places.sq_door), 0)?;
        self.rest.signal(self.at(begin.cqid, self.places.cq_door), 0)?;
        // Whoever has looked and is content clears the places for commands that wait.
        let waiting = self.at(qid, self.places.parked) + PARKED_KIND as usize;
        self.rest.signal(waiting, u32::MAX)?;
        self.rest.signal(self.at(qid, self.places.control), control::RUN)?;
        Ok(self.wait(qid, 0)? && self.wait_for(waiting, 0)?)
    }

    /// Has a warp let go of its pair; false if it does not answer.
    pub(crate) fn end(&self, qid: u16) -> Result<bool> {
        self.rest.signal(self.at(qid, self.places.control), control::REST)?;
        self.wait(qid, 1)
    }

    /// Waits until a warp rests, or does not.
    pub(crate) fn wait(&self, qid: u16, resting: u32) -> Result<bool> {
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

    /// Has every warp end.
    pub(crate) fn stop(&self) -> Result<()> {
        self.numbers().try_for_each(|qid| self.rest.signal(self.at(qid, self.places.control), control::STOP))
    }

    /// The submission queue's tail.
    pub(crate) fn ring_sq(&self, qid: u16, tail: u32) -> Result<()> {
        self.rest.signal(self.at(qid, self.places.sq_door), tail)
    }

    /// The completion queue's head.
    pub(crate) fn ring_cq(&self, qid: u16, head: u32) -> Result<()> {
        self.rest.signal(self.at(qid, self.places.cq_door), head)
    }

    /// A fault as the warp left it.
    pub(crate) fn fault(&self, qid: u16, index: usize) -> Result<Fault> {
        Ok(Fault::from_words(&get(&self.rest, self.fault_at(qid, index))?))
    }

    fn fault_at(&self, qid: u16, index: usize) -> usize {
        self.at(qid, self.places.faults) + index * Fault::BYTES as usize
    }

    /// How a pair goes.
    pub(crate) fn report(&self, qid: u16) -> Result<Report> {
        Ok(Report::from_words(&get(&self.rest, self.at(qid, self.places.report))?))
    }

    /// The breaches that a warp found, from number `from` on, and how many there are in all.
    pub(crate) fn violations(&self, qid: u16, from: u32) -> Result<(Vec<Violation>, u32)> {
        let count = self.report(qid)?.violations;
        let at = |i: u32| self.at(qid, self.places.report) + (Report::BYTES + i * Violation::BYTES) as usize;
        let one = |i| Ok(Violation::from_words(&get(&self.rest, at(i))?));
        Ok(((from..count.min(KEPT)).map(one).collect::<Result<_>>()?, count))
    }
}
