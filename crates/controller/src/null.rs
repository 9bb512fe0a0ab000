//! The null controller: answers at once, moves nothing. It is the reference for a driver's own speed, so it has to be
//! faster than any driver.
//!
//! A turn: one lane reads the tail doorbell; up to 128 entries are read, four by each lane side by side, or through
//! local words if they are behind a bus ([`null_far`]); each entry's seal is checked; the completions are stored,
//! sixteen bytes each, the last command first if requested.
//!
//! **Order.** The doorbell is read with acquire, followed by a warp barrier and then the entries: what the driver wrote
//! before it rang is read. Another barrier separates the entries from the completions, which report all of them as
//! fetched. Every value was used by then (its seal was checked), so the driver may overwrite the slots. A completion is
//! one 16-byte store and refers to no other memory. The assumption is that it becomes visible whole, as those of NVMe
//! devices do, or at least not its last word first ([`Wide::store4`](crate::Wide::store4)). So a turn needs no fence.
//! Formally, a load (the entry) before a store (the completion) is only ordered by a release, which no GPU needs when
//! the value has been used. [`flag::FENCE`] adds one, to measure its cost.
//!
//! **In flight twice.** A turn completes all that it fetches, so duplicate identifiers are only visible within a turn.
//! With [`flag::CHECK_CIDS`] each lane writes its position into a table under its identifier's low bits, and checks
//! after a barrier whether it is still there.

use onehop_proto::{Cqe, Sqe, Status};

use crate::layout::{Pair, Report, control, flag};
use crate::report::{Exit, NO_COMMAND, note, put};
use crate::warp::{ControllerWarp, Voice, distance, wrap};
use crate::{Rule, seal};

/// Commands of a turn at most.
pub const NULL_BATCH: u32 = 128;
/// Turns between two checks of the control word and the clock.
const POLL_TURNS: u64 = 256;
/// Idle turns after which a turn begins with a pause.
const PATIENCE: u32 = 64;

/// The warp's local words.
mod local {
    /// For [`Voice`](crate::warp::Voice).
    pub const VOICE: u32 = 0;
    /// For each command of a turn its identifier, and above it whether its seal is broken.
    pub const BATCH: u32 = 2;
    /// Positions by identifier.
    pub const TABLE: u32 = BATCH + super::NULL_BATCH;
    pub const TABLE_WORDS: u32 = 1024;
    /// The entries of a turn, if they are behind a bus.
    pub const ENTRIES: u32 = (TABLE + TABLE_WORDS).next_multiple_of(4);
    /// Distance between entries: four words more than their size, or the lanes' reads would conflict in the same banks.
    pub const ENTRY: u32 = 20;
}

/// Local words that [`null`] needs.
pub const NULL_LOCAL_WORDS: u32 = local::TABLE + local::TABLE_WORDS;
/// Local words that [`null_far`] needs.
pub const NULL_FAR_LOCAL_WORDS: u32 = local::ENTRIES + NULL_BATCH * local::ENTRY;

const BROKEN: u32 = 1 << 16;

/// The controller's state; the same on all lanes.
struct Null<'a, W: ControllerWarp, const FAR: bool> {
    warp: &'a W,
    pair: Pair,
    voice: Voice,
    head: u32,
    cq_tail: u32,
    phase: bool,
    /// The host's completion queue head, as last read.
    cq_head: u32,
    /// A wrong doorbell value that was already reported.
    wrong: u32,
    most: u32,
    commands: u64,
    turns: u64,
    idle: u64,
    /// On the leading lane.
    begun: u64,
}

/// The host's request.
enum HostRequest {
    Stop(Exit),
    Rest,
    Run,
}

/// Serves the queue pair that the [`Pair`] at `at` describes, with this warp, until the host stops it or its time is
/// up. Needs [`NULL_LOCAL_WORDS`] local words.
pub fn null<W: ControllerWarp>(warp: &W, at: W::Addr) -> Exit {
    run::<W, false>(warp, at)
}

/// The same for a submission queue behind a bus. Needs [`NULL_FAR_LOCAL_WORDS`] local words.
pub fn null_far<W: ControllerWarp>(warp: &W, at: W::Addr) -> Exit {
    run::<W, true>(warp, at)
}

#[inline(always)]
fn run<W: ControllerWarp, const FAR: bool>(warp: &W, at: W::Addr) -> Exit {
    let begun = warp.now();
    let mut server = Null::<W, FAR>::new(warp, Pair::load(warp, at), begun);
    loop {
        let exit = if server.is_fit() { server.run() } else { Some(Exit::Refused) };
        let exit = exit.or_else(|| server.rest());
        if let Some(exit) = exit {
            server.write_report(exit as u64);
            return exit;
        }
        server.renew(Pair::load(warp, at));
    }
}

impl<'a, W: ControllerWarp, const FAR: bool> Null<'a, W, FAR> {
    #[inline(always)]
    fn new(warp: &'a W, pair: Pair, begun: u64) -> Self {
        let most = NULL_BATCH.min(4 * warp.lanes());
        let most = if pair.batch == 0 { most } else { most.min(pair.batch) };
        Self {
            warp,
            pair,
            voice: Voice::new(local::VOICE),
            head: 0,
            cq_tail: 0,
            phase: true,
            cq_head: 0,
            wrong: NO_COMMAND,
            most,
            commands: 0,
            turns: 0,
            idle: 0,
            begun,
        }
    }

    /// The same controller with new queues.
    #[inline(always)]
    fn renew(&mut self, pair: Pair) {
        let new = Self::new(self.warp, pair, self.begun);
        let voice = core::mem::replace(&mut self.voice, Voice::new(local::VOICE));
        *self = Self { voice, commands: self.commands, turns: self.turns, idle: self.idle, ..new };
    }

    #[inline(always)]
    fn is_fit(&self) -> bool {
        let ring = 2..=65536;
        ring.contains(&self.pair.sq_entries) && ring.contains(&self.pair.cq_entries)
    }

    #[inline(always)]
    fn run(&mut self) -> Option<Exit> {
        let lanes = self.warp.lanes();
        let mut streak = 0u32;
        loop {
            if self.turns.is_multiple_of(POLL_TURNS) {
                match self.poll_control() {
                    HostRequest::Stop(exit) => return Some(exit),
                    HostRequest::Rest => return None,
                    HostRequest::Run => {}
                }
            }
            self.turns += 1;
            let n = self.waiting();
            if n == 0 {
                self.idle += 1;
                streak += 1;
                if streak >= PATIENCE {
                    self.warp.pause();
                }
                continue;
            }
            streak = 0;
            if n <= lanes {
                self.turn::<1>(n);
            } else if n <= 2 * lanes {
                self.turn::<2>(n);
            } else {
                self.turn::<4>(n);
            }
            self.commands += u64::from(n);
        }
    }

    /// How many commands this turn processes.
    #[inline(always)]
    fn waiting(&mut self) -> u32 {
        let (warp, pair) = (self.warp, &self.pair);
        let tail = self.voice.say(warp, || warp.load_acquire(pair.sq_door));
        if pair.flags & flag::FEED != 0 {
            self.cq_head = self.cq_tail;
            return self.most.min(pair.sq_entries - 1).min(pair.cq_entries - 1);
        }
        if tail >= pair.sq_entries {
            self.refuse(Rule::DoorbellValue, tail);
            return 0;
        }
        let wanted = distance(self.head, tail, pair.sq_entries).min(self.most);
        if wanted > 0 && self.room() < wanted {
            self.refresh();
        }
        wanted.min(self.room())
    }

    /// How many completions fit, by the last known head.
    #[inline(always)]
    fn room(&self) -> u32 {
        let entries = self.pair.cq_entries;
        entries - 1 - distance(self.cq_head, self.cq_tail, entries)
    }

    /// Reads the head doorbell, only when room may be lacking, because it is a read of far memory.
    #[inline(always)]
    fn refresh(&mut self) {
        let (warp, pair) = (self.warp, &self.pair);
        let entries = pair.cq_entries;
        let head = self.voice.say(warp, || warp.load_acquire(pair.cq_door));
        if head >= entries {
            self.refuse(Rule::DoorbellValue, head);
        } else if distance(self.cq_head, head, entries) > distance(self.cq_head, self.cq_tail, entries) {
            self.refuse(Rule::CqHeadPastPosted, head);
        } else {
            self.cq_head = head;
        }
    }

    /// Reports an impossible doorbell value, once.
    #[inline(always)]
    fn refuse(&mut self, rule: Rule, value: u32) {
        if self.wrong != value {
            self.wrong = value;
            let (warp, report) = (self.warp, self.pair.report);
            warp.once(|| note(warp, report, rule, NO_COMMAND, u64::from(value)));
        }
    }

    /// Fetches `n` commands, `K` (1, 2 or 4) per lane at most, and completes them.
    #[inline(always)]
    fn turn<const K: u32>(&mut self, n: u32) {
        let (warp, flags) = (self.warp, self.pair.flags);
        let lanes = warp.lanes();
        if FAR {
            self.fetch_far::<K>(n, flags);
        } else {
            self.fetch::<K>(n, flags);
        }
        if flags & flag::FENCE != 0 {
            warp.once(|| warp.fence());
        }
        let sqhd = wrap(self.head + n, self.pair.sq_entries) as u16;
        warp.each(|lane| {
            for k in 0..K {
                let j = lane + k * lanes;
                if j < n {
                    let i = if flags & flag::REVERSE != 0 { n - 1 - j } else { j };
                    self.answer(i, j, sqhd, flags);
                }
            }
        });
        self.head = u32::from(sqhd);
        let end = self.cq_tail + n;
        self.phase ^= end >= self.pair.cq_entries;
        self.cq_tail = wrap(end, self.pair.cq_entries);
    }

    /// Reads and checks `n` entries, whole ones by each lane.
    #[inline(always)]
    fn fetch<const K: u32>(&self, n: u32, flags: u32) {
        let lanes = self.warp.lanes();
        self.warp.each(|lane| {
            // All reads come before the first use, so that they are in flight together. Positions past the end read the
            // last entry again, which costs nothing and saves the branch. Written out: an array that a loop runs over
            // would be in memory.
            let [i0, i1, i2, i3] = [lane, lane + lanes, lane + 2 * lanes, lane + 3 * lanes];
            let e0 = self.read(i0.min(n - 1));
            let e1 = if K > 1 { self.read(i1.min(n - 1)) } else { e0 };
            let e2 = if K > 2 { self.read(i2.min(n - 1)) } else { e0 };
            let e3 = if K > 2 { self.read(i3.min(n - 1)) } else { e0 };
            self.check(i0, n, &e0, flags);
            if K > 1 {
                self.check(i1, n, &e1, flags);
            }
            if K > 2 {
                self.check(i2, n, &e2, flags);
                self.check(i3, n, &e3, flags);
            }
        });
    }

    /// The same through local words, where neighbouring lanes read neighbouring bytes: a bus transfers lines of 128
    /// bytes, and has few reads in flight.
    #[inline(always)]
    fn fetch_far<const K: u32>(&self, n: u32, flags: u32) {
        let lanes = self.warp.lanes();
        self.warp.each(|lane| {
            let [p0, p1, p2, p3] = [0, 4, 8, 12].map(|row| self.quarters(lane + row * lanes, n));
            let r0 = self.read_quarters(p0);
            let r1 = if K > 1 { self.read_quarters(p1) } else { r0 };
            let r2 = if K > 2 { self.read_quarters(p2) } else { r0 };
            let r3 = if K > 2 { self.read_quarters(p3) } else { r0 };
            self.keep(p0, r0);
            if K > 1 {
                self.keep(p1, r1);
            }
            if K > 2 {
                self.keep(p2, r2);
                self.keep(p3, r3);
            }
        });
        self.warp.each(|lane| {
            for k in 0..K {
                let i = lane + k * lanes;
                if i < n {
                    self.check(i, n, &self.kept(i), flags);
                }
            }
        });
    }

    #[inline(always)]
    fn read(&self, i: u32) -> Sqe {
        let at = self.entry_at(i);
        of_quarters(|quarter| self.warp.load4(at.plus(u64::from(quarter) * 16)))
    }

    /// The address of the turn's entry `i`.
    #[inline(always)]
    fn entry_at(&self, i: u32) -> W::Addr {
        let slot = wrap(self.head + i, self.pair.sq_entries);
        self.pair.sq.plus(u64::from(slot) * Sqe::BYTES as u64)
    }

    /// The numbers of four quarters of the turn's `n` entries: this lane's, and those one, two and three rows of lanes
    /// behind. Numbers past the end become the last one.
    #[inline(always)]
    fn quarters(&self, first: u32, n: u32) -> [u32; 4] {
        [0, 1, 2, 3].map(|row| (first + row * self.warp.lanes()).min(4 * n - 1))
    }

    #[inline(always)]
    fn read_quarters(&self, quarters: [u32; 4]) -> [[u32; 4]; 4] {
        quarters.map(|quarter| self.warp.load4(self.entry_at(quarter / 4).plus(u64::from(quarter % 4) * 16)))
    }

    #[inline(always)]
    fn keep(&self, [p0, p1, p2, p3]: [u32; 4], [r0, r1, r2, r3]: [[u32; 4]; 4]) {
        for (quarter, words) in [(p0, r0), (p1, r1), (p2, r2), (p3, r3)] {
            let at = local::ENTRIES + quarter / 4 * local::ENTRY + quarter % 4 * 4;
            self.warp.set_local_four(at, words);
        }
    }

    #[inline(always)]
    fn kept(&self, i: u32) -> Sqe {
        of_quarters(|quarter| self.warp.local_four(local::ENTRIES + i * local::ENTRY + quarter * 4))
    }

    #[inline(always)]
    fn check(&self, i: u32, n: u32, entry: &Sqe, flags: u32) {
        if i >= n {
            return;
        }
        let cid = u32::from(entry.cid());
        let broken = !seal::is_sealed(entry);
        if broken {
            note(self.warp, self.pair.report, Rule::Seal, cid, entry.prp2());
        }
        self.warp.set_local(local::BATCH + i, cid | if broken { BROKEN } else { 0 });
        if flags & flag::CHECK_CIDS != 0 {
            self.warp.set_local(table(cid), cid | i << 16);
        }
    }

    /// Posts the completion of the turn's command `i` as its `j`-th.
    #[inline(always)]
    fn answer(&self, i: u32, j: u32, sqhd: u16, flags: u32) {
        let word = self.warp.local(local::BATCH + i);
        let cid = word & 0xffff;
        let mut status = if word & BROKEN != 0 { Status::INVALID_FIELD.with_dnr() } else { Status::SUCCESS };
        if flags & flag::CHECK_CIDS != 0 && self.is_twice(i, cid) {
            status = Status::CID_CONFLICT.with_dnr();
        }
        let end = self.cq_tail + j;
        let phase = self.phase ^ (end >= self.pair.cq_entries);
        let slot = wrap(end, self.pair.cq_entries);
        let cqe = Cqe::new(0, sqhd, self.pair.sqid as u16, cid as u16, status, phase);
        self.warp.store4(self.pair.cq.plus(u64::from(slot) * Cqe::BYTES as u64), cqe.dw);
    }

    #[inline(always)]
    fn is_twice(&self, i: u32, cid: u32) -> bool {
        let found = self.warp.local(table(cid));
        if found >> 16 == i {
            return false;
        }
        let twice = found & 0xffff == cid;
        if twice {
            note(self.warp, self.pair.report, Rule::CidInUse, cid, u64::from(found >> 16));
        } else {
            let unchecked = core::mem::offset_of!(Report, unchecked) as u64;
            self.warp.fetch_add(self.pair.report.plus(unchecked), 1);
        }
        twice
    }

    /// Reads the host's request, and updates the report.
    #[inline(always)]
    fn poll_control(&mut self) -> HostRequest {
        self.write_report(0);
        let (warp, begun, pair) = (self.warp, self.begun, self.pair);
        let word = self.voice.say(warp, || match warp.load_acquire(pair.control) {
            control::STOP => control::STOP,
            _ if warp.now().wrapping_sub(begun) > pair.limit => u32::MAX,
            other => other,
        });
        match word {
            control::STOP => HostRequest::Stop(Exit::Stopped),
            control::REST => HostRequest::Rest,
            u32::MAX => HostRequest::Stop(Exit::TimedOut),
            _ => HostRequest::Run,
        }
    }

    /// Waits until the host sends `RUN`; returns the exit if it comes first.
    #[inline(always)]
    fn rest(&mut self) -> Option<Exit> {
        let (warp, report) = (self.warp, self.pair.report);
        let resting = report.plus(core::mem::offset_of!(Report, resting) as u64);
        warp.once(|| warp.store_release(resting, 1));
        let exit = loop {
            match self.poll_control() {
                HostRequest::Stop(exit) => break Some(exit),
                HostRequest::Rest => warp.pause(),
                HostRequest::Run => break None,
            }
        };
        warp.once(|| warp.store_release(resting, 0));
        exit
    }

    #[inline(always)]
    fn write_report(&self, exit: u64) {
        use core::mem::offset_of;
        let (warp, at) = (self.warp, self.pair.report);
        warp.once(|| {
            for (offset, value) in [
                (offset_of!(Report, commands), self.commands),
                (offset_of!(Report, completions), self.commands),
                (offset_of!(Report, turns), self.turns),
                (offset_of!(Report, idle), self.idle),
                (offset_of!(Report, elapsed), warp.now().wrapping_sub(self.begun)),
                (offset_of!(Report, sq_head), u64::from(self.head) | u64::from(self.cq_tail) << 32),
            ] {
                put(warp, at, offset, value);
            }
            if exit != 0 {
                warp.store_release(at.plus(offset_of!(Report, exit) as u64), exit as u32);
            }
        });
    }
}

#[inline(always)]
fn of_quarters(quarter: impl Fn(u32) -> [u32; 4]) -> Sqe {
    let [a, b, c, d] = quarter(0);
    let [e, f, g, h] = quarter(1);
    let [i, j, k, l] = quarter(2);
    let [m, n, o, p] = quarter(3);
    Sqe { dw: [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] }
}

#[inline(always)]
const fn table(cid: u32) -> u32 {
    local::TABLE + (cid & (local::TABLE_WORDS - 1))
}
