//! Commands that wait for their time, in memory: late ones, held completions, data that follows its completion,
//! completions to be corrected.

use onehop_proto::{GpuAddr, Sqe};

use super::faults::Effect;
use super::{BATCH, ENTRIES, Server, word};
use crate::layout::{PARKED_BYTES, PARKED_KIND};
use crate::warp::ControllerWarp;

/// Words of a record, after the sixteen of its command.
pub(super) const KIND: u32 = PARKED_KIND / 4;
const DUE: u32 = 17;
const EFFECT: u32 = 19;
const A: u32 = 20;
const B: u32 = 21;
const TARGET: u32 = 22;

const _: () = assert!(4 * (TARGET + 2) == PARKED_BYTES);

/// Kinds of record.
pub(super) const NONE: u32 = 0;
/// A command to be executed.
pub(super) const EXECUTE: u32 = 1;
/// The data of a read that was already completed.
pub(super) const DATA: u32 = 2;
/// A completion: A is identifier and status. It waits for TARGET completions in all, or for its time.
pub(super) const HOLD: u32 = 3;
/// A completion queue entry to be corrected: A is the slot, B its last word.
pub(super) const CORRECT: u32 = 4;

/// Words that a record carries.
#[derive(Clone, Copy, Default)]
pub(super) struct Extra {
    pub a: u32,
    pub b: u32,
    pub target: u64,
}

impl<W: ControllerWarp> Server<'_, W> {
    /// Parks something for `delay` nanoseconds; false if there is no room.
    pub(super) fn park(&self, kind: u32, effect: Effect, delay: u64, job: u32, extra: Extra) -> bool {
        let warp = self.warp;
        let free = (0..self.pair.parked_count).find(|i| warp.load(self.parked_at(*i, KIND)) == NONE);
        let Some(index) = free else {
            self.set(word::CROWDED, self.get(word::CROWDED) + 1);
            return false;
        };
        let due = warp.now().saturating_add(delay);
        for i in 0..16 {
            warp.store(self.parked_at(index, i), self.get(job + i));
        }
        warp.store(self.parked_at(index, KIND), kind);
        self.store_long(self.parked_at(index, DUE), due);
        warp.store(self.parked_at(index, EFFECT), effect.0);
        warp.store(self.parked_at(index, A), extra.a);
        warp.store(self.parked_at(index, B), extra.b);
        self.store_long(self.parked_at(index, TARGET), extra.target);
        self.set(word::PARKED, self.get(word::PARKED) + 1);
        self.set(word::OWED, self.get(word::OWED) + owes(kind));
        self.set(word::HELD, self.get(word::HELD) + u32::from(kind == HOLD));
        self.set_long(word::DUE, self.long(word::DUE).min(due));
        true
    }

    /// Removes and returns the next record that is due; its command's words are copied to the job's place.
    pub(super) fn due(&self) -> Option<(u32, Effect, Extra)> {
        let warp = self.warp;
        if self.get(word::PARKED) == 0 {
            return None;
        }
        let now = warp.now();
        if self.get(word::HELD) == 0 && now < self.long(word::DUE) {
            return None;
        }
        let completions = self.long(word::COMPLETIONS);
        let mut next = u64::MAX;
        for index in 0..self.pair.parked_count {
            let kind = warp.load(self.parked_at(index, KIND));
            if kind == NONE {
                continue;
            }
            let due = self.load_long(self.parked_at(index, DUE));
            let target = self.load_long(self.parked_at(index, TARGET));
            if due <= now || kind == HOLD && target <= completions {
                return Some(self.take_out(index, kind, target));
            }
            next = next.min(due);
        }
        self.set_long(word::DUE, next);
        None
    }

    fn take_out(&self, index: u32, kind: u32, target: u64) -> (u32, Effect, Extra) {
        let warp = self.warp;
        warp.store(self.parked_at(index, KIND), NONE);
        self.set(word::PARKED, self.get(word::PARKED) - 1);
        self.set(word::OWED, self.get(word::OWED) - owes(kind));
        self.set(word::HELD, self.get(word::HELD) - u32::from(kind == HOLD));
        let job = ENTRIES + BATCH * 16;
        for i in 0..16 {
            self.set(job + i, warp.load(self.parked_at(index, i)));
        }
        self.set(word::JOB, job);
        let extra =
            Extra { a: warp.load(self.parked_at(index, A)), b: warp.load(self.parked_at(index, B)), target };
        (kind, Effect(warp.load(self.parked_at(index, EFFECT))), extra)
    }

    /// Abandons everything that waits except data: its reads were completed, and only a reset keeps it from arriving.
    pub(super) fn abandon_all(&self) {
        let mut late = 0;
        for index in 0..self.pair.parked_count {
            let kind = self.parked_at(index, KIND);
            match self.warp.load(kind) {
                DATA => late += 1,
                NONE => {}
                _ => self.warp.store(kind, NONE),
            }
        }
        for at in [word::COUNT, word::NEXT, word::DONE, word::OWED, word::HELD] {
            self.set(at, 0);
        }
        self.set(word::PARKED, late);
    }

    /// The current command.
    pub(super) fn job(&self) -> Sqe {
        let at = self.get(word::JOB);
        let mut sqe = Sqe::default();
        for (i, dword) in sqe.dw.iter_mut().enumerate() {
            *dword = self.get(at + i as u32);
        }
        sqe
    }

    fn load_long(&self, at: GpuAddr) -> u64 {
        u64::from(self.warp.load(at)) | u64::from(self.warp.load(at.plus(4))) << 32
    }

    fn store_long(&self, at: GpuAddr, value: u64) {
        self.warp.store(at, value as u32);
        self.warp.store(at.plus(4), (value >> 32) as u32);
    }
}

/// Whether a kind of record will need a completion queue entry.
fn owes(kind: u32) -> u32 {
    u32::from(matches!(kind, EXECUTE | HOLD))
}
