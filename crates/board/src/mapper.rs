//! Bus addresses for the board, as its machine would assign them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use onehop_os::{Allocations, BusRange, DmaMemory, Error, HostMem, Mapped, Mapper, Result};
use onehop_proto::BusAddr;

use crate::config::{BoardConfig, Iommu, P2p};
use crate::space::BoardBus;

/// First address of an IOMMU, and of memory that a driver allocates.
const FIRST: u64 = 0x1000_0000;
/// First address of scattered memory without an IOMMU; every other page is used.
const SCATTERED: u64 = 0x8000_0000;
const PAGE: usize = 4096;

/// Assigns the simulated board's bus addresses.
pub struct BoardMapper {
    space: Arc<BoardBus>,
    iommu: Iommu,
    p2p: P2p,
    bar: u64,
    next: AtomicU64,
    next_scattered: AtomicU64,
    next_peer: AtomicU64,
    /// Memory from [`Mapper::alloc`]: contiguous, like a driver's coherent memory.
    own: Allocations<()>,
}

impl BoardMapper {
    pub(crate) fn new(space: Arc<BoardBus>, config: &BoardConfig) -> Self {
        Self {
            space,
            iommu: config.iommu,
            p2p: config.p2p,
            bar: config.bar,
            next: AtomicU64::new(FIRST),
            next_scattered: AtomicU64::new(SCATTERED),
            next_peer: AtomicU64::new(0),
            own: Allocations::default(),
        }
    }

    /// Number of mapped ranges.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.space.count()
    }

    fn refuse(&self, why: &str) -> Error {
        Error::CannotMap { mapper: self.name().into(), why: why.into() }
    }

    /// The ranges of some memory, with their addresses.
    fn place(&self, mem: &HostMem, peer: bool) -> Result<Vec<(u64, HostMem)>> {
        let bytes = (mem.len() as u64).next_multiple_of(PAGE as u64);
        let take = |from: &AtomicU64| from.fetch_add(bytes + PAGE as u64, Ordering::Relaxed);
        if self.iommu == Iommu::Translated || !peer && self.own.find(mem).is_some() {
            return Ok(vec![(take(&self.next), mem.clone())]);
        }
        if peer {
            return Ok(vec![(self.bar + take(&self.next_peer), mem.clone())]);
        }
        let start = self.next_scattered.fetch_add(bytes * 2, Ordering::Relaxed);
        let piece = |at: usize| {
            let end = mem.len().min(at + PAGE);
            Ok((start + 2 * at as u64, mem.slice(at..end)?))
        };
        (0..mem.len()).step_by(PAGE).map(piece).collect()
    }
}

impl Mapper for BoardMapper {
    fn name(&self) -> &str {
        match self.iommu {
            Iommu::Translated => "the simulated board's IOMMU",
            Iommu::Off => "the simulated board's bus",
        }
    }

    fn alloc(&self, bytes: usize) -> Result<HostMem> {
        Ok(self.own.add(HostMem::anonymous(bytes)?, ()))
    }

    fn map(&self, memory: &dyn DmaMemory) -> Result<Mapped> {
        let peer = memory.gpu_addr().is_some();
        if peer && self.p2p == P2p::Refused {
            return Err(self.refuse(
                "the GPU's driver refused the attachment: no peer-to-peer between these two devices",
            ));
        }
        let mem = memory.host().ok_or_else(|| {
            self.refuse("the simulated board writes through the CPU, which cannot access this GPU's memory")
        })?;
        let pieces = self.place(mem, peer)?;
        let runs =
            pieces.iter().map(|(at, mem)| BusRange { addr: BusAddr(*at), len: mem.len() as u64 }).collect();
        let reached =
            self.space.add(pieces, peer).ok_or_else(|| self.refuse("its bus addresses are used up"))?;
        Ok(Mapped::new(runs, Box::new(reached)))
    }
}
