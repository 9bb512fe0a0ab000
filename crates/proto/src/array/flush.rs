//! Writing back dirty pages.

use super::layout::{counter, state};
use super::{ArrayError, Backing, PageCache};
use crate::GpuAddr;
use crate::kernel::{Answer, Command, DeviceOp};
use crate::queue::Memory;

/// The result of a thread's part of a flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flushed {
    /// Pages that it wrote back.
    pub written: u32,
    /// Pages that it could not write back.
    pub failed: u32,
    /// Why, for the first of them.
    pub error: Option<ArrayError>,
}

/// Where threads add up the results of their parts of a flush: zeroed words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushReport(pub GpuAddr);

impl FlushReport {
    /// Pages that were written back.
    pub const WRITTEN: u64 = 0;
    /// Pages that were not.
    pub const FAILED: u64 = 4;
    /// Why, for one of them: [`ArrayError::code`].
    pub const ERROR: u64 = 8;
    /// Bytes in all.
    pub const BYTES: usize = 16;

    /// Adds a thread's part.
    #[inline(always)]
    pub fn add<M: Memory<Addr = GpuAddr>>(&self, mem: &M, flushed: &Flushed) {
        if flushed.written > 0 {
            mem.fetch_add(self.0.plus(Self::WRITTEN), flushed.written);
        }
        if let Some(error) = flushed.error {
            mem.compare_exchange(self.0.plus(Self::ERROR), 0, error.code() as u32);
            mem.fetch_add(self.0.plus(Self::FAILED), flushed.failed);
        }
    }
}

/// Writes back every dirty page of the slots `first`, `first + stride` …, one after the other. What was stored before, by
/// threads whose pins are gone, is then in the backing: perhaps in a volatile cache that has to be flushed too. No page is begun after `deadline`.
#[inline(always)]
pub fn flush_slots<M: Memory<Addr = GpuAddr>, B: Backing<M>>(
    mem: &M,
    array: &PageCache<M, B>,
    (first, stride): (u32, u32),
    deadline: u64,
) -> Flushed {
    let mut flushed = Flushed::default();
    let mut slot = first;
    while slot < array.slots(mem) {
        match array.flush_slot(mem, slot, deadline) {
            Ok(true) => flushed.written += 1,
            Ok(false) => {}
            Err(error) => {
                flushed.failed += 1;
                flushed.error = flushed.error.or(Some(error));
            }
        }
        slot = slot.saturating_add(if stride == 0 { 1 } else { stride });
    }
    flushed
}

impl<M: Memory<Addr = GpuAddr>, B: Backing<M>> PageCache<M, B> {
    /// Writes a slot's page back if it is dirty; returns whether it was.
    #[inline(always)]
    fn flush_slot(&self, mem: &M, slot: u32, deadline: u64) -> Result<bool, ArrayError> {
        let others = mem.now().saturating_add(self.limit(mem));
        let deadline = if others < deadline { others } else { deadline };
        loop {
            let seen = mem.load_acquire(self.state(mem, slot));
            if seen & state::KIND != state::VALID || seen & (state::DIRTY | state::WRITING) == 0 {
                return Ok(false);
            }
            if mem.now() >= deadline {
                return Err(ArrayError::TimedOut);
            }
            let Some(backing) = self.backing(mem) else { return Err(ArrayError::NoArray) };
            if self.begin_write_back(mem, &backing, slot, true) {
                return self.write_back(mem, &backing, slot).map(|()| true);
            }
            if seen & (state::UNSURE | state::WRITING) == state::UNSURE && !self.is_over(mem, &backing, slot)
            {
                return Err(ArrayError::WriteBack(Answer::OutcomeUnknown));
            }
            // Another thread writes it back, or has just pinned it.
            mem.pause();
        }
    }

    #[inline(never)]
    fn write_back(&self, mem: &M, backing: &B, slot: u32) -> Result<(), ArrayError> {
        self.count(mem, counter::WRITES, 1);
        let (lba, blocks) = self.blocks_of(mem, self.tag(mem, slot));
        let mut command = Command::NONE;
        let mut answer =
            backing.begin(mem, DeviceOp::Write, lba, blocks, self.offset(mem, slot), &mut command);
        while answer == Answer::Pending {
            answer = backing.test(mem, &mut command);
            if answer == Answer::Pending {
                mem.pause();
            }
        }
        self.end_write_back(mem, slot, answer, command.life())
    }
}
