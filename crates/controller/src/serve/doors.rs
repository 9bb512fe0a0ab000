//! The start of a turn: the host's request, its doorbells, and whether they are plausible.

use onehop_proto::Sqe;

use super::{BATCH, ENTRIES, Server, wish, word};
use crate::Rule;
use crate::layout::control;
use crate::report::{Exit, NO_COMMAND};
use crate::warp::{ControllerWarp, distance, wrap};

/// Turns between two checks of the control word and the clock.
const POLL_TURNS: u64 = 64;

impl<W: ControllerWarp> Server<'_, W> {
    /// Decides how many commands this turn fetches.
    pub(super) fn begin_turn(&self) {
        self.set(word::COUNT, 0);
        self.set(word::NEXT, 0);
        let turns = self.long(word::TURNS);
        self.set_long(word::TURNS, turns + 1);
        let idle = self.get(word::IDLE_STREAK);
        if turns.is_multiple_of(POLL_TURNS) || idle % 16 == 15 {
            self.poll_control();
            self.save_fault_counters();
            if self.get(word::WISH) != wish::NONE {
                return;
            }
        }
        let count = if self.get(word::DEAD) != 0 { 0 } else { self.available() };
        self.set(word::COUNT, count);
        if count == 0 {
            self.add(word::IDLE, 1);
            self.set(word::IDLE_STREAK, idle.wrapping_add(1));
        } else {
            self.set(word::IDLE_STREAK, 0);
        }
    }

    /// Reads the host's request, and updates the report.
    pub(super) fn poll_control(&self) {
        let warp = self.warp;
        self.write_counters();
        let late = warp.now().wrapping_sub(self.long(word::BEGUN)) > self.pair.limit;
        let wanted = match warp.load_acquire(self.pair.control) {
            control::STOP => wish::EXIT + Exit::Stopped as u32,
            _ if late => wish::EXIT + Exit::TimedOut as u32,
            control::REST => wish::REST,
            _ => wish::NONE,
        };
        self.set(word::WISH, wanted);
    }

    /// How many commands there are that can also be completed.
    fn available(&self) -> u32 {
        let (warp, pair) = (self.warp, &self.pair);
        // The tail is read first, with acquire. So everything that the host wrote before it rang is visible below,
        // including the completion queue entries that it released before.
        let tail = warp.load_acquire(pair.sq_door);
        self.ring_cq(warp.load_acquire(pair.cq_door));
        self.ring_sq(tail);
        let waiting = distance(self.get(word::HEAD), self.get(word::TAIL), pair.sq_entries);
        let posted = distance(self.get(word::CQ_HEAD), self.get(word::CQ_TAIL), pair.cq_entries);
        let room = (pair.cq_entries - 1 - posted).saturating_sub(self.get(word::OWED));
        if posted == 0 {
            self.set(word::FULL, 0);
        }
        if waiting > 0 && room == 0 && self.get(word::FULL) == 0 {
            self.set(word::FULL, 1);
            self.breach(Rule::CqOverrun, NO_COMMAND, u64::from(self.get(word::CQ_HEAD)));
        }
        let room = room.saturating_sub(self.get(word::SPARE));
        waiting.min(room).min(BATCH).min(warp.lanes())
    }

    fn ring_sq(&self, tail: u32) {
        let size = self.pair.sq_entries;
        let old = self.get(word::TAIL);
        if tail == old || tail == self.get(word::WRONG_TAIL) {
            return;
        }
        let rule = if tail >= size {
            Rule::DoorbellValue
        } else if distance(self.get(word::REPORTED), old, size) + distance(old, tail, size) >= size {
            Rule::SqOverrun
        } else {
            self.set(word::TAIL, tail);
            self.set(word::WRONG_TAIL, u32::MAX);
            return;
        };
        self.set(word::WRONG_TAIL, tail);
        self.breach(rule, NO_COMMAND, u64::from(tail));
    }

    fn ring_cq(&self, head: u32) {
        let size = self.pair.cq_entries;
        let old = self.get(word::CQ_HEAD);
        if head == old || head == self.get(word::WRONG_HEAD) {
            return;
        }
        let rule = if head >= size {
            Rule::DoorbellValue
        } else if distance(old, head, size) > distance(old, self.get(word::CQ_TAIL), size) {
            Rule::CqHeadPastPosted
        } else {
            self.set(word::CQ_HEAD, head);
            self.set(word::WRONG_HEAD, u32::MAX);
            return;
        };
        self.set(word::WRONG_HEAD, head);
        self.breach(rule, NO_COMMAND, u64::from(head));
    }

    /// Fetches one entry into the local words, on one lane.
    pub(super) fn fetch(&self, lane: u32) {
        let slot = wrap(self.get(word::HEAD) + lane, self.pair.sq_entries);
        let at = self.pair.sq.plus(u64::from(slot) * Sqe::BYTES as u64);
        let to = ENTRIES + lane * 16;
        for quarter in 0..4 {
            let words = self.warp.load4(at.plus(16 * u64::from(quarter)));
            for (i, value) in words.into_iter().enumerate() {
                self.set(to + 4 * quarter + i as u32, value);
            }
        }
    }
}
