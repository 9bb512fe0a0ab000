//! What a board writes into its event page: 256 entries of 16 bytes. The page is filled with ones before it is given to the
//! board; an entry of the first lap is told by a zero in its top bit, of the second by a one, and so on.

/// Entries of a page.
pub const ENTRIES: u32 = 256;
/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 16;
/// Bytes of a page.
pub const PAGE_BYTES: usize = ENTRIES as usize * ENTRY_BYTES;
/// How often software says how far it has read.
pub const ACK_EVERY: u32 = 32;
/// The receiver has filled a buffer.
pub const RX: u32 = 0;
/// The transmitter has played a buffer.
pub const TX: u32 = 1;

/// An entry: four little-endian words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Entry(pub [u32; 4]);

impl Entry {
    /// One for the `index`th event since the page was handed over.
    #[must_use]
    pub const fn new(index: u32, event: u32, data: [u32; 3]) -> Self {
        Self([((index / ENTRIES) & 1) << 31 | event & 0x3f, data[0], data[1], data[2]])
    }

    /// Whether this is the `index`th event, or what stood there before.
    #[must_use]
    pub const fn is(self, index: u32) -> bool {
        self.0[0] >> 31 == (index / ENTRIES) & 1
    }

    /// Which event it is.
    #[must_use]
    pub const fn event(self) -> u32 {
        self.0[0] & 0x3f
    }

    /// What it tells.
    #[must_use]
    pub const fn data(self) -> [u32; 3] {
        [self.0[1], self.0[2], self.0[3]]
    }
}

/// What the event of a filled buffer tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RxReport {
    /// Blocks that were lost before this one because no buffer was free; at most 24 bits.
    pub lost: u32,
    /// The bursts that this block holds: the upper bits, one for each.
    pub bursts: u32,
    /// The lower half of the sample clock at the block's first sample, on boards that tell it.
    pub time: u32,
}

impl RxReport {
    /// Most that an event can tell of.
    pub const MOST_LOST: u32 = 0xff_ffff;

    /// What a block of so many bursts has in `bursts` when none is missing.
    #[must_use]
    pub const fn whole(bursts: u32) -> u32 {
        match bursts {
            0 => 0,
            1..32 => u32::MAX << (32 - bursts),
            _ => u32::MAX,
        }
    }

    /// From an event's data.
    #[must_use]
    pub const fn from_data(data: [u32; 3]) -> Self {
        Self { lost: data[0] & Self::MOST_LOST, bursts: data[1], time: data[2] }
    }

    /// An event's data.
    #[must_use]
    pub const fn data(self) -> [u32; 3] {
        [self.lost & Self::MOST_LOST, self.bursts, self.time]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_each_lap_differ() {
        let old = Entry([u32::MAX; 4]);
        assert!(!old.is(0) && !old.is(255));
        for index in [0, 255, 256, 511, 512] {
            let entry = Entry::new(index, RX, [1, 2, 3]);
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
}
