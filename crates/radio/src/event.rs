//! The event page of a board: 256 entries of 16 bytes. It is filled with ones before the board gets it. New entries
//! have a top bit of zero in the first lap, one in the second, and so on.

use core::iter::FusedIterator;

use crate::Shape;

/// Entries of a page.
pub const ENTRIES: u32 = 256;
/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 16;
/// Bytes of a page.
pub const PAGE_BYTES: usize = ENTRIES as usize * ENTRY_BYTES;
/// How often software acknowledges events.
pub const ACK_EVERY: u32 = 32;
/// The receiver has filled a buffer.
pub const RX: u32 = 0;
/// The transmitter has played a buffer.
pub const TX: u32 = 1;

/// An entry: four little-endian words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventEntry(pub [u32; 4]);

impl EventEntry {
    /// The entry for event number `index` since the page was set up.
    #[must_use]
    pub const fn new(index: u32, event: u32, data: [u32; 3]) -> Self {
        Self([((index / ENTRIES) & 1) << 31 | event & 0x3f, data[0], data[1], data[2]])
    }

    /// Whether this is event number `index`, rather than a former one.
    #[must_use]
    pub const fn is(self, index: u32) -> bool {
        self.0[0] >> 31 == (index / ENTRIES) & 1
    }

    /// The kind of event.
    #[must_use]
    pub const fn event(self) -> u32 {
        self.0[0] & 0x3f
    }

    /// The event's data.
    #[must_use]
    pub const fn data(self) -> [u32; 3] {
        [self.0[1], self.0[2], self.0[3]]
    }
}

/// The event of a filled buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RxReport {
    /// Blocks that were lost before this one because no buffer was free; at most 24 bits.
    pub lost: u32,
    /// The present bursts of this block: one bit each, the last burst's on top.
    pub bursts: u32,
    /// The lower half of the sample clock at the block's first sample, on boards that report it.
    pub time: u32,
}

impl RxReport {
    /// Largest number of lost blocks in an event.
    pub const MOST_LOST: u32 = 0xff_ffff;

    /// The value of `bursts` for a block in which none is missing.
    #[must_use]
    pub const fn whole(bursts: u32) -> u32 {
        match bursts {
            0 => 0,
            1..32 => u32::MAX << (32 - bursts),
            _ => u32::MAX,
        }
    }

    /// The value of `bursts` for a block that holds the bursts in `which`, starting with the lowest bit.
    #[must_use]
    pub const fn holding(bursts: u32, which: u32) -> u32 {
        match bursts {
            0 => 0,
            1..=32 => which << (32 - bursts),
            _ => which,
        }
    }

    /// The samples that a block of this shape holds. The board writes the present bursts contiguously from the start of
    /// the buffer; the rest of the buffer is stale.
    #[must_use]
    pub const fn extents(self, shape: Shape) -> Extents {
        let left = match shape.bursts {
            0 => 0,
            1..=32 => self.bursts >> (32 - shape.bursts),
            _ => self.bursts,
        };
        Extents { left, burst: 0, at: 0, burst_samples: shape.burst_samples }
    }

    /// Decodes an event's data.
    #[must_use]
    pub const fn from_data(data: [u32; 3]) -> Self {
        Self { lost: data[0] & Self::MOST_LOST, bursts: data[1], time: data[2] }
    }

    /// Encodes an event's data.
    #[must_use]
    pub const fn data(self) -> [u32; 3] {
        [self.lost & Self::MOST_LOST, self.bursts, self.time]
    }
}

/// Samples of a block that are contiguous in its buffer and in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Index of the first one in the buffer.
    pub at: u32,
    /// Number of the first one, counted from the block's first, including missing ones.
    pub first: u32,
    /// Number of samples.
    pub samples: u32,
}

/// The extents of a block, in order.
#[derive(Clone, Debug)]
pub struct Extents {
    /// The remaining bursts, one bit each, starting with the lowest.
    left: u32,
    /// Number of the next burst, and how many earlier ones are present.
    burst: u32,
    at: u32,
    burst_samples: u32,
}

impl Extents {
    /// Their total number of samples.
    #[must_use]
    pub const fn samples(&self) -> u32 {
        self.left.count_ones() * self.burst_samples
    }
}

impl Iterator for Extents {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        let missing = self.left.trailing_zeros();
        self.left = self.left.checked_shr(missing)?;
        let there = self.left.trailing_ones();
        self.left = self.left.checked_shr(there).unwrap_or(0);
        let [at, first, samples] = [self.at, self.burst + missing, there].map(|n| n * self.burst_samples);
        self.at += there;
        self.burst += missing + there;
        Some(Extent { at, first, samples })
    }
}

impl FusedIterator for Extents {}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::Format;

    #[test]
    fn entries_of_each_lap_differ() {
        let old = EventEntry([u32::MAX; 4]);
        assert!(!old.is(0) && !old.is(255));
        for index in [0, 255, 256, 511, 512] {
            let entry = EventEntry::new(index, RX, [1, 2, 3]);
            assert!(entry.is(index) && !entry.is(index + 256) && entry.event() == RX);
        }
    }

    #[test]
    fn bursts_are_the_upper_bits() {
        assert_eq!(RxReport::whole(1), 1 << 31);
        assert_eq!(RxReport::whole(32), u32::MAX);
        let report = RxReport { lost: 3, bursts: RxReport::whole(4), time: 9 };
        assert_eq!(RxReport::from_data(report.data()), report);
    }

    #[test]
    fn present_bursts_are_packed() {
        let extents = |bursts, which| {
            let report = RxReport { bursts: RxReport::holding(bursts, which), ..RxReport::default() };
            let extents = report.extents(Shape { format: Format::Ci16, burst_samples: 16, bursts });
            assert_eq!(extents.samples(), extents.clone().map(|extent| extent.samples).sum());
            extents.map(|Extent { at, first, samples }| (at, first, samples)).collect::<Vec<_>>()
        };
        assert_eq!(extents(4, 0b1111), [(0, 0, 64)]);
        assert_eq!(extents(4, 0b1110), [(0, 16, 48)]);
        assert_eq!(extents(4, 0b0111), [(0, 0, 48)]);
        assert_eq!(extents(4, 0b1001), [(0, 0, 16), (16, 48, 16)]);
        assert_eq!(extents(4, 0), []);
        assert_eq!(extents(1, 1), [(0, 0, 16)]);
        assert_eq!(extents(32, u32::MAX), [(0, 0, 512)]);
        assert_eq!(extents(32, 1 << 31), [(0, 496, 16)]);
        assert_eq!(extents(0, u32::MAX), []);
        let every_other = extents(32, 0x5555_5555);
        assert_eq!((every_other.len(), every_other[15]), (16, (240, 480, 16)));
        for bursts in 1..=32 {
            let all = u32::MAX >> (32 - bursts);
            assert_eq!(RxReport::holding(bursts, all), RxReport::whole(bursts));
        }
    }
}
