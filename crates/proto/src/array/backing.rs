//! What an array is read from and written back to.

use crate::GpuAddr;
use crate::kernel::{Answer, Command, DeviceOp, DeviceQueue};
use crate::queue::Memory;

/// Blocks, and commands that move them between their place and the cache's pages.
pub trait Backing<M: Memory<Addr = GpuAddr>>: Sized {
    /// The queue that an array's handle names; none if there is none. Opened for each miss only: hits in the cache do not
    /// need it.
    fn open(mem: &M, queue: GpuAddr) -> Option<Self>;
    /// Checks a command. [`Answer::Pending`]: [`Self::test`] has to be called until it ends.
    fn begin(
        &self,
        mem: &M,
        op: DeviceOp,
        lba: u64,
        blocks: u32,
        offset: u64,
        command: &mut Command,
    ) -> Answer;
    /// Moves a command on without waiting for anything. It ends in bounded time.
    fn test(&self, mem: &M, command: &mut Command) -> Answer;
    /// A number that changes once commands that ended in [`Answer::OutcomeUnknown`] before can no longer touch memory.
    fn life(&self, mem: &M) -> u32;
    /// Whether it will never execute a command again: there will be no next life.
    fn is_stopped(&self, mem: &M) -> bool;
}

impl<M: Memory<Addr = GpuAddr, Door = GpuAddr>> Backing<M> for DeviceQueue<M> {
    #[inline(always)]
    fn open(mem: &M, queue: GpuAddr) -> Option<Self> {
        DeviceQueue::open(mem, queue)
    }

    #[inline(always)]
    fn begin(
        &self,
        mem: &M,
        op: DeviceOp,
        lba: u64,
        blocks: u32,
        offset: u64,
        command: &mut Command,
    ) -> Answer {
        DeviceQueue::begin(self, mem, op, lba, blocks, offset, command)
    }

    #[inline(always)]
    fn test(&self, mem: &M, command: &mut Command) -> Answer {
        self.try_test(mem, command)
    }

    #[inline(always)]
    fn life(&self, mem: &M) -> u32 {
        DeviceQueue::life(self, mem)
    }

    #[inline(always)]
    fn is_stopped(&self, mem: &M) -> bool {
        DeviceQueue::is_stopped(self, mem)
    }
}
