//! Copies blocks from a ring in host memory to slots in GPU memory, while more are received.

use std::collections::VecDeque;
use std::sync::Arc;

use onehop_gpu::{Copier, Gpu, Mark, Region, Rows};

use crate::Result;
use crate::memory::RingMemory;

/// Number of slots: enough to keep copies in flight while a block is processed.
const SLOTS: u32 = 8;

/// Copies in flight, the oldest first.
pub(crate) struct Staging<T> {
    copier: Box<dyn Copier>,
    memory: Region,
    stride: usize,
    bytes: usize,
    in_flight: VecDeque<(Mark, T)>,
    /// Copies begun and slots released since the start.
    begun: u32,
    released: u32,
    /// Completed copies at the front of `in_flight`, whose ring buffers were released to the board.
    copied: usize,
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
            in_flight: VecDeque::new(),
            begun: 0,
            released: 0,
            copied: 0,
        })
    }

    /// Whether a slot is free.
    pub(crate) fn has_free_slot(&self) -> bool {
        self.begun.wrapping_sub(self.released) < SLOTS
    }

    /// Whether no copy is in flight.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Begins to copy the data at `from` in the ring.
    pub(crate) fn begin(&mut self, from: usize, what: T) -> Result<()> {
        let to = (self.begun % SLOTS) as usize * self.stride;
        self.copier.copy(&Rows { from, to, row: self.bytes, rows: 1, step: self.bytes })?;
        self.in_flight.push_back((self.copier.mark()?, what));
        self.begun = self.begun.wrapping_add(1);
        Ok(())
    }

    /// How many copies have completed since the last call. Their ring buffers are free.
    pub(crate) fn completed(&mut self) -> Result<u32> {
        let mut completed = 0;
        while let Some((mark, _)) = self.in_flight.get(self.copied) {
            if !self.copier.is_over(*mark)? {
                break;
            }
            self.copied += 1;
            completed += 1;
        }
        Ok(completed)
    }

    /// Waits until the oldest copy has completed.
    pub(crate) fn wait_oldest(&mut self) -> Result<()> {
        if let Some((mark, _)) = self.in_flight.front() {
            self.copier.wait(*mark)?;
        }
        Ok(())
    }

    /// Removes the oldest block from the queue, if its copy has completed.
    pub(crate) fn pop(&mut self) -> Result<Option<(u32, Region, T)>> {
        if self.copied == 0 {
            return Ok(None);
        }
        let slot = self.begun.wrapping_sub(self.in_flight.len() as u32) % SLOTS;
        let Some((_, what)) = self.in_flight.pop_front() else { return Ok(None) };
        self.copied -= 1;
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

    /// Releases the slot of the oldest popped block.
    pub(crate) fn release(&mut self) {
        self.released = self.released.wrapping_add(1);
    }

    /// Waits for all copies, and frees every slot, including those of popped blocks.
    pub(crate) fn clear(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.wait_oldest()?;
            self.in_flight.pop_front();
        }
        (self.released, self.copied) = (self.begun, 0);
        Ok(())
    }
}
