//! Blocks on their way from a ring in host memory to GPU memory, copied while others are received.

use std::collections::VecDeque;
use std::sync::Arc;

use onehop_gpu::{Copier, Gpu, Mark, Region, Rows};

use crate::Result;
use crate::memory::RingMemory;

/// Slots in GPU memory: enough for copies to be under way behind each other while one block is looked at.
const SLOTS: u32 = 8;

/// Copies under way, the oldest first.
pub(crate) struct Staging<T> {
    copier: Box<dyn Copier>,
    memory: Region,
    stride: usize,
    bytes: usize,
    under_way: VecDeque<(Mark, T)>,
    /// Copies begun and slots given back, since the start.
    begun: u32,
    released: u32,
    /// Copies of which the ring's buffer has been given back to the board, from the front of `under_way`.
    settled: usize,
}

impl<T> Staging<T> {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>, memory: &RingMemory) -> Result<Self> {
        let stride = memory.shape.stride() as usize;
        let slots = gpu.arena(stride * SLOTS as usize)?;
        Ok(Self {
            copier: gpu.copier(&memory.region, &slots)?,
            memory: slots,
            stride,
            bytes: memory.shape.bytes() as usize,
            under_way: VecDeque::new(),
            begun: 0,
            released: 0,
            settled: 0,
        })
    }

    /// Whether a slot is free.
    pub(crate) fn has_room(&self) -> bool {
        self.begun.wrapping_sub(self.released) < SLOTS
    }

    /// Whether nothing is under way.
    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Begins to copy what lies at `from` in the ring.
    pub(crate) fn begin(&mut self, from: usize, what: T) -> Result<()> {
        let to = (self.begun % SLOTS) as usize * self.stride;
        self.copier.copy(&Rows { from, to, row: self.bytes, rows: 1, step: self.bytes })?;
        self.under_way.push_back((self.copier.mark()?, what));
        self.begun = self.begun.wrapping_add(1);
        Ok(())
    }

    /// How many copies have ended since this was last asked: their buffers in the ring are free.
    pub(crate) fn ended(&mut self) -> Result<u32> {
        let mut ended = 0;
        while let Some((mark, _)) = self.under_way.get(self.settled) {
            if !self.copier.is_over(*mark)? {
                break;
            }
            self.settled += 1;
            ended += 1;
        }
        Ok(ended)
    }

    /// Waits until the oldest copy has ended.
    pub(crate) fn wait_oldest(&mut self) -> Result<()> {
        if let Some((mark, _)) = self.under_way.front() {
            self.copier.wait(*mark)?;
        }
        Ok(())
    }

    /// The oldest block, whose copy has ended, in GPU memory.
    pub(crate) fn take(&mut self) -> Result<Option<(u32, Region, T)>> {
        if self.settled == 0 {
            return Ok(None);
        }
        let slot = self.begun.wrapping_sub(self.under_way.len() as u32) % SLOTS;
        let Some((_, what)) = self.under_way.pop_front() else { return Ok(None) };
        self.settled -= 1;
        Ok(Some((slot, self.slot(slot)?, what)))
    }

    fn slot(&self, slot: u32) -> Result<Region> {
        let start = slot as usize * self.stride;
        Ok(self.memory.slice(start..start + self.bytes)?)
    }

    /// The memory of every slot.
    pub(crate) fn slots(&self) -> Result<Vec<Region>> {
        (0..SLOTS).map(|slot| self.slot(slot)).collect()
    }

    /// Gives the slot of the oldest block that was taken back.
    pub(crate) fn release(&mut self) {
        self.released = self.released.wrapping_add(1);
    }

    /// Waits for all copies, and frees every slot: those of blocks that were taken and not given back, too.
    pub(crate) fn clear(&mut self) -> Result<()> {
        while !self.under_way.is_empty() {
            self.wait_oldest()?;
            self.under_way.pop_front();
        }
        (self.released, self.settled) = (self.begun, 0);
        Ok(())
    }
}
