//! The table of mappings, in GPU memory. It grows while warps search it.
//!
//! Warps search it by bisection, without a lock. So nothing moves while they run: the simulator's bus addresses only
//! ever grow, and a new mapping goes after all others; a removed one keeps its slot with no bytes. Unused slots hold
//! the highest address. A warp reads an address as two words. If it sees only one half of a new one, it reads a value
//! between the new address and the highest one. Words are written in an order that keeps the table valid at every moment: a
//! mapping has no bytes before it has its address, and none when it loses it.

use std::collections::BTreeMap;
use std::sync::Arc;

use onehop_controller::BusMapping;
use onehop_proto::GpuAddr;

use super::{Hold, put};
use crate::{Error, Gpu, Region, Result};

const BYTES: usize = BusMapping::BYTES as usize;
/// An empty slot.
const NOWHERE: BusMapping = BusMapping { bus: !15, bytes: 0, target: GpuAddr(0) };
/// The words of each part of a range.
const BUS: [usize; 2] = [0, 1];
const LENGTH: [usize; 2] = [2, 3];
const TARGET: [usize; 2] = [4, 5];

struct Live {
    bytes: u64,
    target: GpuAddr,
    at: usize,
    memory: Hold,
}

/// The table. The [`Pairs`](super::Pairs) that it was made for know whether warps search it.
pub struct Table {
    gpu: Arc<dyn Gpu>,
    region: Region,
    room: usize,
    live: BTreeMap<u64, Live>,
    used: usize,
    /// Whether warps may search it.
    searched: bool,
    /// The memory of mappings that were removed while warps searched: one of them may still move bytes there.
    gone: Vec<Hold>,
}

impl Table {
    /// With room for `room` mappings at once, and for as many that come while warps search it.
    ///
    /// # Errors
    /// When the GPU has no memory left.
    pub fn new(gpu: &Arc<dyn Gpu>, room: usize) -> Result<Self> {
        let region = gpu.alloc_private(room * BYTES)?;
        let (gpu, live, gone) = (gpu.clone(), BTreeMap::new(), Vec::new());
        let mut table = Self { gpu, region, room, live, used: 0, searched: false, gone };
        table.compact()?;
        Ok(table)
    }

    /// Its memory, and how many slots warps search.
    pub(super) fn memory(&self) -> (&Region, u32) {
        (&self.region, self.room as u32)
    }

    /// Adds a mapping. Its bus address is above all others, and both addresses are multiples of sixteen.
    ///
    /// # Errors
    /// When the addresses are not so, the target is not memory that the GPU reaches, or there is no room.
    pub fn add(&mut self, range: BusMapping) -> Result<()> {
        let is_above = self.live.last_key_value().is_none_or(|(last, _)| *last < range.bus);
        if !is_above || !(range.bus | range.target.0).is_multiple_of(16) {
            let (bus, target) = (range.bus, range.target);
            let why = format!(
                "a mapping of {bus:#x} to {target} is not aligned to 16 bytes, or not above all others"
            );
            return Err(Error::Launch(why));
        }
        if self.used == self.room && !self.searched {
            self.compact()?;
        }
        if self.used == self.room {
            let why = format!("{} mappings came and went while queues were served", self.room);
            return Err(Error::Launch(why));
        }
        let memory = self.gpu.controllers()?.hold("mapped memory", range.target, range.bytes)?;
        let at = self.used;
        for part in [TARGET, BUS, LENGTH] {
            self.write(at, &range, part)?;
        }
        self.live.insert(range.bus, Live { bytes: range.bytes, target: range.target, at, memory });
        self.used += 1;
        Ok(())
    }

    /// Removes a mapping.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn remove(&mut self, bus: u64) -> Result<()> {
        let Some(Live { at, memory, .. }) = self.live.remove(&bus) else { return Ok(()) };
        if self.searched {
            // Before the write: if that fails, warps still find the mapping.
            self.gone.push(memory);
        }
        self.write(at, &NOWHERE, LENGTH)?;
        // Slots at the end can be reused at once.
        let used = self.live.values().map(|live| live.at + 1).max().unwrap_or(0);
        for at in (used..self.used).rev() {
            self.write(at, &NOWHERE, BUS)?;
        }
        self.used = used;
        Ok(())
    }

    fn write(&self, at: usize, range: &BusMapping, part: [usize; 2]) -> Result<()> {
        let words = range.words();
        part.into_iter().try_for_each(|i| self.region.signal(at * BYTES + 4 * i, words[i]))
    }

    /// The address of `bytes` bytes at a bus address, if they are mapped.
    pub fn find(&self, bus: u64, bytes: u64) -> Option<GpuAddr> {
        let (start, live) = self.live.range(..=bus).next_back()?;
        let offset = bus - start;
        (offset.checked_add(bytes)? <= live.bytes).then(|| live.target.plus(offset))
    }

    /// Must be called before warps search it.
    ///
    /// # Errors
    /// When the GPU fails, or warps search it already.
    pub(super) fn begin_search(&mut self) -> Result<()> {
        if self.searched {
            return Err(Error::Launch("controllers search this table already".into()));
        }
        self.compact()?;
        self.searched = true;
        Ok(())
    }

    /// Must be called after all warps that searched it have ended.
    pub(super) fn end_search(&mut self) {
        self.searched = false;
        self.gone.clear();
    }

    /// Rewrites the whole table without slots of removed mappings.
    fn compact(&mut self) -> Result<()> {
        let mut words = Vec::with_capacity(self.room * BYTES / 4);
        for (at, (bus, live)) in self.live.iter_mut().enumerate() {
            live.at = at;
            words.extend(BusMapping { bus: *bus, bytes: live.bytes, target: live.target }.words());
        }
        self.used = self.live.len();
        (self.used..self.room).for_each(|_| words.extend(NOWHERE.words()));
        put(&self.region, 0, &words)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if self.searched {
            // Warps that did not end may still move bytes there.
            std::mem::forget(std::mem::take(&mut self.live));
            std::mem::forget(std::mem::take(&mut self.gone));
            std::mem::forget(self.region.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Emulated;
    use crate::controllers::get;

    fn emulated() -> Arc<dyn Gpu> {
        Arc::new(Emulated::new())
    }

    fn range(bus: u64) -> BusMapping {
        BusMapping { bus, bytes: 4096, target: GpuAddr(bus << 8) }
    }

    fn seen(table: &Table) -> Vec<(u64, u64)> {
        let one = |at| BusMapping::from_words(&get(&table.region, at * BYTES).unwrap());
        (0..table.room).map(one).map(|range| (range.bus, range.bytes)).collect()
    }

    #[test]
    fn only_aligned_addresses_above_all_others_are_added() {
        let mut table = Table::new(&emulated(), 4).unwrap();
        table.add(range(0x20000)).unwrap();
        let (next, target) = (range(0x30000), GpuAddr(0x300_0008));
        for bad in [range(0x20000), range(0x10000), BusMapping { target, ..next }, range(0x30008)] {
            assert!(matches!(table.add(bad), Err(Error::Launch(_))), "{:#x}", bad.bus);
        }
        assert_eq!((table.find(0x20000, 4096), table.used), (Some(GpuAddr(0x200_0000)), 1));
        table.add(range(0x30000)).unwrap();
    }

    #[test]
    fn nothing_moves_while_it_is_searched() {
        let mut table = Table::new(&emulated(), 4).unwrap();
        for bus in [0x10000, 0x20000, 0x30000] {
            table.add(range(bus)).unwrap();
        }
        table.begin_search().unwrap();
        assert!(table.begin_search().is_err());
        table.remove(0x20000).unwrap();
        let none = (NOWHERE.bus, 0);
        assert_eq!(seen(&table), [(0x10000, 4096), (0x20000, 0), (0x30000, 4096), none]);
        assert_eq!(table.find(0x30010, 4080), Some(GpuAddr(0x3000010)));
        assert!(table.find(0x30010, 4081).is_none() && table.find(0x20000, 1).is_none());
        table.add(range(0x40000)).unwrap();
        assert!(table.add(range(0x50000)).is_err());
        // Slots at the end are free again.
        table.remove(0x30000).unwrap();
        table.remove(0x40000).unwrap();
        assert_eq!(seen(&table), [(0x10000, 4096), none, none, none]);
        // And all others, when no warp searches.
        table.end_search();
        for bus in [0x50000, 0x60000, 0x70000] {
            table.add(range(bus)).unwrap();
        }
        table.remove(0x50000).unwrap();
        table.add(range(0x80000)).unwrap();
        assert_eq!(seen(&table).len(), 4);
        assert!(table.add(range(0x90000)).is_err());
        assert!(table.find(0x80000, 4096).is_some() && table.find(0, 1).is_none());
    }
}
