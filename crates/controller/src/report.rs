//! Reports to the host, in memory that it reads.

use onehop_proto::GpuAddr;
use onehop_proto::queue::{Address, Memory};

use crate::Rule;
use crate::layout::{KEPT, Report, Violation};

/// How a controller ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Exit {
    /// The host stopped it.
    Stopped = 1,
    /// Its time was up.
    TimedOut = 2,
    /// The descriptor is invalid.
    Refused = 3,
}

impl Exit {
    /// The exit with this number in a report; none while it runs.
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Stopped,
            2 => Self::TimedOut,
            3 => Self::Refused,
            _ => return None,
        })
    }
}

const VIOLATIONS: u32 = core::mem::offset_of!(Report, violations) as u32;

/// The CID of a violation without a command.
pub(crate) const NO_COMMAND: u32 = u32::MAX;

/// Records a violation, if there is room, and counts it. Any lane may call it.
#[inline(always)]
pub(crate) fn note<M: Memory<Addr = GpuAddr>>(mem: &M, report: GpuAddr, rule: Rule, cid: u32, detail: u64) {
    let count = Address::plus(report, VIOLATIONS);
    // Saturates: a driver that does nothing right must not make the count wrap.
    let index = mem.fetch_add(count, 1);
    if index == u32::MAX {
        mem.store(count, u32::MAX);
    }
    if index < KEPT {
        let at = Address::plus(report, Report::BYTES + index * Violation::BYTES);
        mem.store(Address::plus(at, 4), cid);
        mem.store(Address::plus(at, 8), detail as u32);
        mem.store(Address::plus(at, 12), (detail >> 32) as u32);
        mem.store_release(at, rule as u32);
    }
}

/// Writes a counter of a report.
#[inline(always)]
pub(crate) fn put<M: Memory<Addr = GpuAddr>>(mem: &M, report: GpuAddr, offset: usize, value: u64) {
    mem.store(Address::plus(report, offset as u32), value as u32);
    mem.store(Address::plus(report, offset as u32 + 4), (value >> 32) as u32);
}
