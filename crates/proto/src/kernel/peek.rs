//! A GPU thread reads a device's registers: no route needs it, and some platforms lose such reads, so it is done on
//! request only, and as rarely as possible.

use crate::GpuAddr;
use crate::queue::Memory;

/// The most registers of one call.
pub const MOST_PEEKED: u32 = 16;

/// Words that the thread leaves for its host, zeroed before: they show its progress even if a read never ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeekNotes(pub GpuAddr);

impl PeekNotes {
    /// Bytes of all notes.
    pub const BYTES: usize = 8 + 4 * MOST_PEEKED as usize;
    /// Where it stores how many reads it has begun.
    pub const BEGUN: u32 = 0;
    /// Where it stores how many of them have ended.
    pub const ENDED: u32 = 4;
    /// Where the values begin, a word for each register.
    pub const VALUES: u32 = 8;

    const fn at(self, offset: u32) -> GpuAddr {
        self.0.plus(offset as u64)
    }
}

/// Reads neighbouring registers by `read`, one after the other, from `first` on. It stops at the first that is all ones: no
/// device answered, and another read may do harm. None is begun later than `limit` nanoseconds after the start.
#[inline(always)]
pub fn run_peek<M: Memory<Addr = GpuAddr>>(
    mem: &M,
    read: impl Fn(GpuAddr) -> u32,
    (first, count): (GpuAddr, u32),
    notes: PeekNotes,
    limit: u64,
) {
    let deadline = mem.now().saturating_add(limit);
    let mut index = 0;
    while index < count && index < MOST_PEEKED && mem.now() <= deadline {
        mem.store_release(notes.at(PeekNotes::BEGUN), index + 1);
        let value = read(first.plus(index as u64 * 4));
        mem.store(notes.at(PeekNotes::VALUES + index * 4), value);
        index += 1;
        mem.store_release(notes.at(PeekNotes::ENDED), index);
        if value == u32::MAX {
            return;
        }
    }
}
