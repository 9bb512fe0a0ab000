//! The volatile write cache, stored inversely: the medium holds the latest writes, and the cache holds the previous
//! content, so that a power loss can undo unflushed writes.

use std::collections::{HashMap, VecDeque};

/// Maximum unflushed units; beyond that the oldest reach the medium.
const UNITS: usize = 8192;

/// The content of a unit of a few blocks before its unflushed writes.
pub(crate) struct Unit {
    /// Which of its blocks have unflushed writes.
    pub dirty: u64,
    /// Their old data, at their offset in the unit.
    pub data: Box<[u8]>,
    /// Their old metadata, likewise.
    pub meta: Box<[u8]>,
}

/// The unflushed writes of a namespace.
pub(crate) struct Cache {
    blocks: u64,
    units: HashMap<u64, Unit>,
    order: VecDeque<u64>,
}

/// The part of a range that lies in one unit.
pub(crate) struct UnitPart {
    /// The unit.
    pub unit: u64,
    /// Its blocks, as bits.
    pub mask: u64,
}

impl Cache {
    /// A cache for blocks of this many bytes.
    pub(crate) fn new(lba: u32) -> Self {
        let blocks = u64::from(4096 / lba.min(4096));
        Self { blocks, units: HashMap::new(), order: VecDeque::new() }
    }

    /// Blocks of a unit.
    pub(crate) fn unit_blocks(&self) -> u64 {
        self.blocks
    }

    /// The units that a range of blocks touches.
    pub(crate) fn parts(&self, slba: u64, count: u64) -> impl Iterator<Item = UnitPart> + use<> {
        let per = self.blocks;
        let end = slba + count;
        let first = slba / per;
        let last = if count == 0 { first } else { end.div_ceil(per) };
        (first..last).map(move |unit| {
            let base = unit * per;
            let from = slba.max(base) - base;
            let to = end.min(base + per) - base;
            let bits = to - from;
            let ones = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
            UnitPart { unit, mask: ones << from }
        })
    }

    /// The blocks whose old content is not stored yet.
    pub(crate) fn unknown(&self, part: &UnitPart) -> u64 {
        part.mask & !self.units.get(&part.unit).map_or(0, |u| u.dirty)
    }

    /// The unit, for storing old content; `fresh` makes its buffers.
    pub(crate) fn unit(&mut self, unit: u64, fresh: impl FnOnce() -> Unit) -> &mut Unit {
        if !self.units.contains_key(&unit) {
            self.order.push_back(unit);
            if self.order.len() > UNITS
                && let Some(oldest) = self.order.pop_front()
            {
                self.units.remove(&oldest);
            }
        }
        self.units.entry(unit).or_insert_with(fresh)
    }

    /// Blocks have reached the medium.
    pub(crate) fn settled(&mut self, slba: u64, count: u64) {
        if self.units.is_empty() {
            return;
        }
        for part in self.parts(slba, count) {
            if let Some(unit) = self.units.get_mut(&part.unit) {
                unit.dirty &= !part.mask;
            }
        }
    }

    /// Everything has reached the medium.
    pub(crate) fn flush(&mut self) {
        self.units.clear();
        self.order.clear();
    }

    /// Power loss: returns what has to be restored, by unit.
    pub(crate) fn lose(&mut self) -> Vec<(u64, Unit)> {
        self.order.clear();
        self.units.drain().collect()
    }
}
