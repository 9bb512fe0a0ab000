//! The memory of a ring: allocated, mapped for the board, and checked against the board's rules.

use std::sync::Arc;

use onehop_gpu::{Gpu, Place, Region};
use onehop_os::{HostMem, Mapped};
use onehop_radio::{BUFFERS, BoardLimits, RingAddresses, Shape, regs};

use crate::{Card, Result, SampleRoute};

/// A ring of buffers. The mapping is dropped before the memory.
pub(crate) struct RingMemory {
    _mapped: Mapped,
    pub region: Region,
    pub ring: RingAddresses,
    pub shape: Shape,
}

impl RingMemory {
    /// Allocates memory for a route.
    pub(crate) fn new(
        card: &Card,
        gpu: &Arc<dyn Gpu>,
        shape: Shape,
        limits: &BoardLimits,
        route: SampleRoute,
    ) -> Result<Self> {
        shape.check(limits)?;
        let bytes = shape.ring_bytes() as usize;
        let (region, mapped) = match route {
            SampleRoute::Direct => {
                let region = gpu.arena(bytes)?;
                let mapped = card.mapper.map(&region)?;
                (region, mapped)
            }
            SampleRoute::Pinned => {
                let memory: HostMem = card.mapper.alloc(bytes)?;
                let mapped = card.mapper.map(&memory)?;
                (gpu.adopt(Place::PinnedHost, memory)?, mapped)
            }
        };
        let runs = mapped.runs().iter().map(|run| (run.addr.0, run.len));
        let ring = RingAddresses::plan(&shape, limits, runs)?;
        Ok(Self { _mapped: mapped, region, ring, shape })
    }

    /// Writes the buffer addresses to the board's registers.
    pub(crate) fn program(&self, card: &Card, base: u32) {
        for (register, addr) in (base + regs::ADDRESSES..).zip(self.ring.0) {
            card.write(register, addr);
        }
    }

    /// The range of a block in the region.
    pub(crate) fn range(&self, buffer: u32) -> std::ops::Range<usize> {
        let start = (u64::from(buffer % BUFFERS) * self.shape.stride()) as usize;
        start..start + self.shape.bytes() as usize
    }

    /// The memory of a block.
    pub(crate) fn block(&self, buffer: u32) -> Result<Region> {
        Ok(self.region.slice(self.range(buffer))?)
    }
}
