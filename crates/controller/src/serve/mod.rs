//! The model: a warp that serves one queue pair as a strict drive would.
//!
//! One lane thinks, all lanes move. In each turn the thinking lane reads both doorbells and decides how many commands
//! to fetch, at most one per lane. The lanes fetch them into local words. The thinking lane checks the commands one by
//! one and locates their data; the lanes move it, sixteen bytes each. At the end of the turn, one system fence
//! separates all that was moved from the completions, which the thinking lane posts.
//!
//! The thinking lane's state is in local words: no lane keeps anything from one step to the next. What others may
//! change, including doorbells, PRP lists and commands, is read by that lane alone, once. So lanes never disagree about
//! what to do next.
//!
//! Not checked, because memory does not show it: a doorbell rung twice with one value, or past a whole lap.

mod command;
mod doors;
mod faults;
mod finish;
mod moving;
mod parked;

use core::mem::offset_of;

use onehop_proto::GpuAddr;

use crate::layout::{Fault, LOCAL_SPANS, MAX_FAULTS, Pair, Report};
use crate::report::{Exit, note, put};
use crate::warp::ControllerWarp;
use crate::{Rule, layout::PARKED_BYTES};

/// Maximum commands of a turn.
const BATCH: u32 = 32;
/// Maximum completions of a turn.
const DONE: u32 = 64;

/// Offsets in the local words.
mod word {
    /// Why the loop ends: see [`super::wish`].
    pub const WISH: u32 = 0;
    /// Number of commands that this turn fetches, and the next to be started.
    pub const COUNT: u32 = 1;
    pub const NEXT: u32 = 2;
    /// What the lanes have to do: see [`super::task`].
    pub const TASK: u32 = 3;
    /// Extents of the transfer; its place in the namespace, 64 bits; its length in 16-byte units; whether lanes found a
    /// difference.
    pub const SPANS: u32 = 4;
    pub const PLACE: u32 = 6;
    pub const UNITS: u32 = 8;
    pub const DIFFERENT: u32 = 9;
    /// The current command: where its words are, and its effect.
    pub const JOB: u32 = 10;
    pub const EFFECT: u32 = 11;
    /// Whether lanes are moving its data.
    pub const MOVING: u32 = 12;
    /// The submission queue: the tail and head, and the head that was reported to the host.
    pub const TAIL: u32 = 13;
    pub const HEAD: u32 = 14;
    pub const REPORTED: u32 = 15;
    /// The completion queue: the tail, the phase there, and the head.
    pub const CQ_TAIL: u32 = 16;
    pub const PHASE: u32 = 17;
    pub const CQ_HEAD: u32 = 18;
    /// The last wrong values of the doorbells.
    pub const WRONG_TAIL: u32 = 19;
    pub const WRONG_HEAD: u32 = 20;
    /// Whether the completion queue was full, and has not been empty since.
    pub const FULL: u32 = 21;
    /// Commands that wait; those of them that will need a completion; those that wait for others.
    pub const PARKED: u32 = 22;
    pub const OWED: u32 = 23;
    pub const HELD: u32 = 24;
    /// Completions to be posted at the end of the turn.
    pub const DONE: u32 = 25;
    /// The controller has stopped.
    pub const DEAD: u32 = 26;
    pub const IDLE_STREAK: u32 = 27;
    /// When the next waiting command is due, 64 bits.
    pub const DUE: u32 = 28;
    /// Start time, 64 bits.
    pub const BEGUN: u32 = 30;
    /// Counters, 64 bits each.
    pub const COMMANDS: u32 = 32;
    pub const COMPLETIONS: u32 = 34;
    pub const ERRORS: u32 = 36;
    pub const READ: u32 = 38;
    pub const WRITTEN: u32 = 40;
    pub const TURNS: u32 = 42;
    pub const IDLE: u32 = 44;
    pub const FIRED: u32 = 46;
    pub const CROWDED: u32 = 48;
    /// Completion queue entries that only a second completion may use.
    pub const SPARE: u32 = 49;
    pub const STATE: u32 = 64;
}

const FAULTS: u32 = word::STATE;
const FAULT_WORDS: u32 = Fault::BYTES / 4;
const DONES: u32 = FAULTS + MAX_FAULTS * FAULT_WORDS;
const SPANS: u32 = DONES + DONE * 2;
const ENTRIES: u32 = SPANS + LOCAL_SPANS * 4;
const CIDS: u32 = ENTRIES + (BATCH + 1) * 16;
/// Local words that [`serve`] needs.
pub const SERVE_LOCAL_WORDS: u32 = CIDS + 65536 / 32;

/// What the lanes have to do.
mod task {
    pub const NOTHING: u32 = 0;
    pub const TO_HOST: u32 = 1;
    pub const FROM_HOST: u32 = 2;
    pub const COMPARE: u32 = 3;
    pub const ZERO: u32 = 4;
}

/// Why the loop ends.
mod wish {
    pub const NONE: u32 = 0;
    pub const REST: u32 = 1;
    /// Added to an [`Exit`](crate::Exit).
    pub const EXIT: u32 = 16;
}

/// A warp and what it serves; the same on all lanes, and constant.
struct Server<'a, W: ControllerWarp> {
    warp: &'a W,
    pair: Pair,
}

/// Serves the queue pair that the [`Pair`] at `at` describes, with this warp, until the host stops it or its time is
/// up. Needs [`SERVE_LOCAL_WORDS`] local words.
pub fn serve<W: ControllerWarp>(warp: &W, at: W::Addr) -> Exit {
    let mut server = Server { warp, pair: Pair::load(warp, at) };
    server.begin();
    loop {
        if !server.is_fit() {
            return server.end(Exit::Refused);
        }
        server.prepare();
        let mut exit = server.run();
        if exit.is_none() {
            exit = server.rest();
        }
        match exit {
            Some(exit) => return server.end(exit),
            None => server.pair = Pair::load(warp, at),
        }
    }
}

impl<W: ControllerWarp> Server<'_, W> {
    /// Clears the state that survives a rest.
    fn begin(&self) {
        let (warp, pair) = (self.warp, &self.pair);
        warp.each(|lane| {
            let mut i = lane;
            while i < pair.parked_count {
                warp.store(self.parked_at(i, parked::KIND), parked::NONE);
                i += warp.lanes();
            }
        });
        warp.once(|| {
            for at in 0..word::STATE {
                warp.set_local(at, 0);
            }
            self.set_long(word::BEGUN, warp.now());
        });
    }

    /// Whether the descriptor is valid.
    fn is_fit(&self) -> bool {
        let (p, ring) = (&self.pair, 2..=65536);
        ring.contains(&p.sq_entries)
            && ring.contains(&p.cq_entries)
            && (9..=16).contains(&p.lba_shift)
            && (12..=27).contains(&p.page_shift)
            && p.fault_count <= MAX_FAULTS
            && p.namespace.0.is_multiple_of(16)
            && p.spans.0.is_multiple_of(16)
            && p.max_bytes <= 1 << 30
            && self.has_fit_ranges()
    }

    /// Whether the mapped ranges ascend, do not overlap, and are as aligned as their targets.
    fn has_fit_ranges(&self) -> bool {
        let mut end = 0;
        for i in 0..self.pair.range_count {
            let at = self.pair.ranges.plus(u64::from(i) * u64::from(crate::BusMapping::BYTES));
            let range = crate::BusMapping::load(self.warp, at);
            let past = range.bus.wrapping_add(range.bytes);
            if range.bus < end || past < range.bus || (range.bus ^ range.target.0) & 15 != 0 {
                return false;
            }
            end = past;
        }
        true
    }

    /// Starts with new queues: nothing is in flight, and only data of reads that an earlier pair completed waits.
    fn prepare(&self) {
        let (warp, pair) = (self.warp, &self.pair);
        warp.each(|lane| {
            let mut at = CIDS + lane;
            while at < SERVE_LOCAL_WORDS {
                warp.set_local(at, 0);
                at += warp.lanes();
            }
            let mut i = lane;
            while i < pair.fault_count * FAULT_WORDS {
                warp.set_local(FAULTS + i, warp.load(pair.faults.plus(4 * u64::from(i))));
                i += warp.lanes();
            }
        });
        warp.once(|| {
            let late = self.get(word::PARKED);
            for at in word::WISH..word::DUE {
                self.set(at, 0);
            }
            self.set(word::PARKED, late);
            self.set(word::PHASE, 1);
            self.set(word::WRONG_TAIL, u32::MAX);
            self.set(word::WRONG_HEAD, u32::MAX);
            // Unknown: to be computed.
            self.set_long(word::DUE, 0);
            let spare = self.may_complete_twice() && pair.cq_entries > 2;
            self.set(word::SPARE, u32::from(spare));
            warp.store_release(pair.report.plus(offset_of!(Report, unread) as u64), 0);
        });
    }

    fn run(&self) -> Option<Exit> {
        let warp = self.warp;
        loop {
            warp.once(|| self.begin_turn());
            let (wish, count) = (warp.local(word::WISH), warp.local(word::COUNT));
            if let Some(code) = wish.checked_sub(wish::EXIT) {
                return Some(Exit::from_code(code).unwrap_or(Exit::Stopped));
            }
            if wish == wish::REST {
                return None;
            }
            if count > 0 {
                warp.each(|lane| {
                    if lane < count {
                        self.fetch(lane);
                    }
                });
            }
            loop {
                // Continues to the next command whose data has to be moved, or to the end of the turn.
                warp.once(|| self.think());
                match warp.local(word::TASK) {
                    task::NOTHING => break,
                    work => warp.each(|lane| self.work(work, lane)),
                }
            }
            if count == 0 {
                warp.pause();
            }
        }
    }

    /// Abandons every command, and delivers the data of completed ones, until the host sends `RUN`; returns the exit if
    /// it comes first.
    fn rest(&self) -> Option<Exit> {
        let (warp, report) = (self.warp, self.pair.report);
        let resting = report.plus(offset_of!(Report, resting) as u64);
        warp.once(|| {
            self.abandon_all();
            self.write_counters();
            warp.store_release(resting, 1);
        });
        let exit = loop {
            warp.once(|| self.poll_control());
            let wish = warp.local(word::WISH);
            match wish.checked_sub(wish::EXIT) {
                Some(code) => break Exit::from_code(code),
                None if wish == wish::REST => {}
                None => break None,
            }
            // Also a barrier: a slow lane has read the wish before the next check.
            warp.once(|| self.think());
            match warp.local(word::TASK) {
                task::NOTHING => warp.pause(),
                work => warp.each(|lane| self.work(work, lane)),
            }
        };
        // What the lanes were moving has been moved.
        warp.once(|| {
            self.set(word::MOVING, 0);
            warp.store_release(resting, 0);
        });
        exit
    }

    fn end(&self, exit: Exit) -> Exit {
        let at = self.pair.report.plus(offset_of!(Report, exit) as u64);
        self.warp.once(|| {
            self.write_counters();
            self.warp.store_release(at, exit as u32);
        });
        exit
    }

    /// Updates the report's counters.
    fn write_counters(&self) {
        let (warp, at) = (self.warp, self.pair.report);
        for (offset, counter) in [
            (offset_of!(Report, commands), word::COMMANDS),
            (offset_of!(Report, completions), word::COMPLETIONS),
            (offset_of!(Report, errors), word::ERRORS),
            (offset_of!(Report, bytes_read), word::READ),
            (offset_of!(Report, bytes_written), word::WRITTEN),
            (offset_of!(Report, turns), word::TURNS),
            (offset_of!(Report, idle), word::IDLE),
        ] {
            put(warp, at, offset, self.long(counter));
        }
        let ends = u64::from(self.get(word::HEAD)) | u64::from(self.get(word::CQ_TAIL)) << 32;
        put(warp, at, offset_of!(Report, sq_head), ends);
        put(warp, at, offset_of!(Report, elapsed), warp.now().wrapping_sub(self.long(word::BEGUN)));
        warp.store(at.plus(offset_of!(Report, fired) as u64), self.get(word::FIRED));
        warp.store(at.plus(offset_of!(Report, crowded) as u64), self.get(word::CROWDED));
        warp.store(at.plus(offset_of!(Report, waiting) as u64), self.get(word::PARKED));
    }

    #[inline(never)]
    fn breach(&self, rule: Rule, cid: u32, detail: u64) {
        note(self.warp, self.pair.report, rule, cid, detail);
    }

    fn parked_at(&self, index: u32, word: u32) -> GpuAddr {
        self.pair.parked.plus(u64::from(index) * u64::from(PARKED_BYTES) + 4 * u64::from(word))
    }

    #[inline(always)]
    fn get(&self, at: u32) -> u32 {
        self.warp.local(at)
    }

    #[inline(always)]
    fn set(&self, at: u32, value: u32) {
        self.warp.set_local(at, value);
    }

    fn long(&self, at: u32) -> u64 {
        u64::from(self.get(at)) | u64::from(self.get(at + 1)) << 32
    }

    fn set_long(&self, at: u32, value: u64) {
        self.set(at, value as u32);
        self.set(at + 1, (value >> 32) as u32);
    }

    fn add(&self, at: u32, more: u64) {
        self.set_long(at, self.long(at).wrapping_add(more));
    }
}
