//! Bus addresses for the board, as its machine would assign them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use onehop_os::{Allocations, BusRange, DmaMemory, Error, HostMem, Mapped, Mapper, Result};
use onehop_proto::BusAddr;

use crate::config::{BoardConfig, Iommu, P2p};
use crate::space::{BoardBus, Reached};

/// First address of an IOMMU, and of memory that a driver allocates.
const FIRST: u64 = 0x1000_0000;
/// First address of scattered memory without an IOMMU; every other page is used.
const SCATTERED: u64 = 0x8000_0000;
/// First address of a GPU's BAR below 4 GiB.
pub(crate) const LOW_BAR: u64 = 0xd000_0000;
/// The end of what 32 bits address.
const END: u64 = 1 << 32;
const PAGE: usize = 4096;

/// A range of bus addresses. They are assigned again only after all others, so that late accesses miss.
struct BusWindow {
    first: u64,
    end: u64,
    next: AtomicU64,
}

impl BusWindow {
    fn new(first: u64, end: u64) -> Self {
        Self { first, end, next: AtomicU64::new(first) }
    }

    /// The next `bytes` bytes, which may still be in use. What does not fit gets the first address.
    fn take(&self, bytes: u64) -> u64 {
        let place = |next: u64| {
            if next.checked_add(bytes).is_some_and(|end| end <= self.end) { next } else { self.first }
        };
        let step = |next| Some(place(next).saturating_add(bytes));
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).map_or(self.first, place)
    }

    /// How often memory of this size fits, and more than once.
    fn tries(&self, bytes: u64) -> u64 {
        (self.end - self.first) / bytes.max(1) + 2
    }
}

/// Assigns the simulated board's bus addresses.
pub struct BoardMapper {
    space: Arc<BoardBus>,
    iommu: Iommu,
    p2p: P2p,
    joined: BusWindow,
    scattered: BusWindow,
    peer: BusWindow,
    /// Memory from [`Mapper::alloc`]: contiguous, like a driver's coherent memory.
    own: Allocations<()>,
}

impl BoardMapper {
    pub(crate) fn new(space: Arc<BoardBus>, config: &BoardConfig) -> Self {
        let translated = config.iommu == Iommu::Translated;
        Self {
            space,
            iommu: config.iommu,
            p2p: config.p2p,
            joined: BusWindow::new(FIRST, if translated { END } else { SCATTERED }),
            scattered: BusWindow::new(SCATTERED, LOW_BAR),
            peer: BusWindow::new(config.bar, if config.bar < END { END } else { config.bar + END }),
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

    /// Maps some memory; returns its ranges as well.
    fn place(&self, mem: &HostMem, peer: bool) -> Result<Option<(Vec<BusRange>, Reached)>> {
        let bytes = (mem.len() as u64).next_multiple_of(PAGE as u64);
        let (window, bytes) = match self.iommu {
            Iommu::Translated => (&self.joined, bytes + PAGE as u64),
            Iommu::Off if peer => (&self.peer, bytes + PAGE as u64),
            Iommu::Off if self.own.find(mem).is_some() => (&self.joined, bytes + PAGE as u64),
            Iommu::Off => (&self.scattered, bytes * 2),
        };
        let is_scattered = std::ptr::eq(window, &self.scattered);
        for _ in 0..window.tries(bytes) {
            let start = window.take(bytes);
            let page = |at: usize| {
                let end = mem.len().min(at + PAGE);
                Ok((start + 2 * at as u64, mem.slice(at..end)?))
            };
            let parts = if is_scattered {
                (0..mem.len()).step_by(PAGE).map(page).collect::<Result<_>>()?
            } else {
                vec![(start, mem.clone())]
            };
            let run = |(at, mem): &(u64, HostMem)| BusRange { addr: BusAddr(*at), len: mem.len() as u64 };
            let runs = parts.iter().map(run).collect();
            if let Some(reached) = self.space.add(parts, peer) {
                return Ok(Some((runs, reached)));
            }
        }
        Ok(None)
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
        let placed = self.place(mem, peer)?;
        let (runs, reached) = placed.ok_or_else(|| self.refuse("its bus addresses are used up"))?;
        Ok(Mapped::new(runs, Box::new(reached)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_never_run_out_while_memory_is_unmapped_again() {
        for options in ["usdr", "usdr?iommu=off"] {
            let board = crate::Board::new(BoardConfig::parse(options).unwrap()).unwrap();
            let mapper = board.mapper();
            let [page, ring] = [4096, 96 << 20].map(|bytes| mapper.alloc(bytes).unwrap());
            let scattered = HostMem::anonymous(8192).unwrap();
            let held = [mapper.map(&page).unwrap(), mapper.map(&scattered).unwrap()];
            let mut last = 0;
            for _ in 0..100 {
                let mapped = mapper.map(&ring).unwrap();
                let at = mapped.contiguous().unwrap().0;
                assert!(at != last && at >= FIRST && at + (96 << 20) <= END, "{at:#x}");
                last = at;
            }
            assert_eq!(mapper.mappings(), if options == "usdr" { 2 } else { 3 });
            // What does not fit is refused.
            let all: Vec<_> = std::iter::from_fn(|| mapper.map(&ring).ok()).take(100).collect();
            assert!((10..50).contains(&all.len()), "{}", all.len());
            drop(held);
        }
    }
}
