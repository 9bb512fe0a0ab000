//! Which fault strikes which command.

use onehop_proto::nvm::{Rw, opcode};
use onehop_proto::{Sqe, Status};

use super::{FAULT_WORDS, FAULTS, Server, word};
use crate::layout::{Fault, FaultKind};
use crate::warp::ControllerWarp;

/// A fault's effect on a command: its index in the table, and above it its kind; zero for none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Effect(pub u32);

impl Effect {
    pub(super) const NONE: Self = Self(0);
    /// Data that arrives after its completion: nothing is completed any more.
    pub(super) const QUIET: Self = Self(0xff << 8);
    /// The identifier belongs to another command, and stays outstanding.
    pub(super) const FOREIGN: Self = Self(0xfe << 8);

    pub(super) const fn kind(self) -> Option<FaultKind> {
        FaultKind::from_code(self.0 >> 8)
    }
}

/// Words of a fault.
const KIND: u32 = 0;
const N: u32 = 1;
const EVERY: u32 = 2;
const COUNT: u32 = 3;
const FIRST: u32 = 4;
const LAST: u32 = 6;
const DELAY: u32 = 8;
const VALUE: u32 = 10;
const OPCODES: u32 = 11;
const SEEN: u32 = 12;
const FIRED: u32 = 13;

impl<W: ControllerWarp> Server<'_, W> {
    /// Whether a fault may need room for a second completion.
    pub(super) fn may_complete_twice(&self) -> bool {
        (0..self.pair.fault_count).any(|index| self.fault(index, KIND) == FaultKind::Dup as u32)
    }

    /// The effect on a command that was just fetched.
    pub(super) fn strike(&self, sqe: &Sqe) -> Effect {
        let mut effect = Effect::NONE;
        for index in 0..self.pair.fault_count {
            if self.fits(index, sqe) && self.strikes(index) && effect == Effect::NONE {
                effect = Effect(index | self.fault(index, KIND) << 8);
                self.set(word::FIRED, self.get(word::FIRED) + 1);
            }
        }
        effect
    }

    fn fits(&self, index: u32, sqe: &Sqe) -> bool {
        let op = sqe.opcode();
        let opcodes = self.fault(index, OPCODES);
        let kind = self.fault(index, KIND);
        let of_reads = kind == FaultKind::Torn as u32 || kind == FaultKind::Garbled as u32;
        if opcodes != 0 && (op >= 32 || opcodes >> op & 1 == 0) || of_reads && op != opcode::READ {
            return false;
        }
        let (first, last) = (self.long(at(index, FIRST)), self.long(at(index, LAST)));
        if first == 0 && last == u64::MAX {
            return true;
        }
        let rw = Rw::decode(sqe);
        let ranged = op != opcode::FLUSH;
        ranged && rw.lba <= last && rw.lba.saturating_add(u64::from(rw.blocks)) > first
    }

    fn strikes(&self, index: u32) -> bool {
        let (count, fired) = (self.fault(index, COUNT), self.fault(index, FIRED));
        if count != 0 && fired >= count {
            return false;
        }
        let seen = self.fault(index, SEEN) + 1;
        self.set(at(index, SEEN), seen);
        let (n, every) = (self.fault(index, N), self.fault(index, EVERY));
        let hit = (n == 0 || n == seen) && (every == 0 || seen.is_multiple_of(every));
        if hit {
            self.set(at(index, FIRED), fired + 1);
        }
        hit
    }

    /// The delay of an effect.
    pub(super) fn delay_of(&self, effect: Effect) -> u64 {
        self.long(at(effect.0 & 0xff, DELAY))
    }

    /// The value of an effect.
    pub(super) fn value_of(&self, effect: Effect) -> u32 {
        self.fault(effect.0 & 0xff, VALUE)
    }

    /// The status with which an effect fails a command.
    pub(super) fn failure_of(&self, effect: Effect) -> Option<Status> {
        (effect.kind() == Some(FaultKind::Fail)).then(|| Status(self.value_of(effect) as u16))
    }

    /// Saves each fault's counters, so that a later queue pair can continue from them.
    pub(super) fn save_fault_counters(&self) {
        for index in 0..self.pair.fault_count {
            let to = self.pair.faults.plus(u64::from(index) * u64::from(Fault::BYTES));
            for field in [SEEN, FIRED] {
                self.warp.store(to.plus(4 * u64::from(field)), self.fault(index, field));
            }
        }
    }

    fn fault(&self, index: u32, field: u32) -> u32 {
        self.get(at(index, field))
    }
}

const fn at(index: u32, field: u32) -> u32 {
    FAULTS + index * FAULT_WORDS + field
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Fault, kind) == 4 * KIND as usize && offset_of!(Fault, n) == 4 * N as usize);
    assert!(offset_of!(Fault, every) == 4 * EVERY as usize && offset_of!(Fault, count) == 4 * COUNT as usize);
    assert!(offset_of!(Fault, first) == 4 * FIRST as usize && offset_of!(Fault, last) == 4 * LAST as usize);
    assert!(offset_of!(Fault, delay) == 4 * DELAY as usize && offset_of!(Fault, value) == 4 * VALUE as usize);
    assert!(
        offset_of!(Fault, opcodes) == 4 * OPCODES as usize && offset_of!(Fault, seen) == 4 * SEEN as usize
    );
    assert!(offset_of!(Fault, fired) == 4 * FIRED as usize);
};
