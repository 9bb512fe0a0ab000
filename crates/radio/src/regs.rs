//! The register map. Registers are 32-bit, big-endian, and numbered from 0: register `n` is at byte `4 * n` of BAR0.
//! Numbers from [`VIRTUAL`] on are registers of an indexed space: write their number in it to [`INDEX`], then access
//! the value at [`INDEX_DATA`].

/// Write: releases the next buffer of the receive ring.
pub const RX_CONFIRM: u32 = 4;
/// Write: [`RX_START`], [`RX_TIMER_RESET`], [`RX_READY`].
pub const RX_CONTROL: u32 = 5;
/// Write: selects a register of the indexed space.
pub const INDEX: u32 = 6;
/// The register of the indexed space that [`INDEX`] selects.
pub const INDEX_DATA: u32 = 7;
/// Write: address of the event page; the low bits are its number. Resets the page.
pub const NOTIFY_PAGE: u32 = 8;
/// Write: how far events have been read: see [`ack`].
pub const NOTIFY_ACK: u32 = 9;
/// Write: the next transmit buffer, upper half: see [`tx_entry`].
pub const TX_ENTRY: u32 = 12;
/// Write: the lower half of its time, which submits it.
pub const TX_TIME: u32 = 13;
/// Write: [`TX_RUN`], [`TX_RESET`].
pub const TX_CONTROL: u32 = 14;
/// Write: where an event is reported: see [`route`].
pub const ROUTE: u32 = 15;
/// Write: bit 0 feeds transmitted samples back to the receiver.
pub const LOOPBACK: u32 = 52;

/// Read: blocks lost since the last event, in the low 24 bits.
pub const RX_LOST: u32 = 5;
/// Read: the receiver's state: see [`RxStatus`].
pub const RX_STATUS: u32 = 6;
/// Read: the transmitter's state; [`TX_BUSY`], bits 8 to 13 count fetched buffers, bits 16 to 21 played ones.
pub const TX_STATUS: u32 = 28;
/// Read: number of late buffers, in the upper 16 bits.
pub const TX_LATE: u32 = 29;

/// [`TX_STATUS`]: it runs, or still fetches a buffer.
pub const TX_BUSY: u32 = 1 << 7;

/// [`RX_CONTROL`]: DMA runs.
pub const RX_START: u32 = 1;
/// [`RX_CONTROL`]: the sample clock starts from zero.
pub const RX_TIMER_RESET: u32 = 2;
/// [`RX_CONTROL`]: software is ready for buffers.
pub const RX_READY: u32 = 4;

/// [`TX_CONTROL`]: samples of 16 bits are played.
pub const TX_RUN: u32 = 3;
/// [`TX_CONTROL`]: the ring starts from its first buffer.
pub const TX_RESET: u32 = 1 << 7;

/// The first register of the indexed space.
pub const VIRTUAL: u32 = 0x1_0000;
/// The receiver's registers in the indexed space.
pub const RX_BASE: u32 = VIRTUAL;
/// The transmitter's.
pub const TX_BASE: u32 = VIRTUAL + 512;

/// From a stream's base: the bus address of each buffer.
pub const ADDRESSES: u32 = 0;
/// From the receiver's base: 8-byte words of a burst, zero-based.
pub const BURST_WORDS_Z: u32 = 32;
/// From the receiver's base: bursts of a block, zero-based.
pub const BURSTS_Z: u32 = 64;
/// From the receiver's base: bit 0 holds the front end in reset.
pub const FRONT_RESET: u32 = 96;
/// From the receiver's base: bit 0 enables three-word events.
pub const LONG_EVENTS: u32 = 100;
/// From the receiver's base: bytes of a buffer, zero-based; zero disables writes.
pub const RX_LIMIT_Z: u32 = 224;
/// From the receiver's base: commands of its front end: see [`front`].
pub const FRONT: u32 = 256;
/// From the transmitter's base: bytes of a buffer, zero-based; zero disables reads.
pub const TX_LIMIT_Z: u32 = 32;

/// Registers of the indexed space.
pub const VIRTUAL_COUNT: u32 = 1024;
/// Bytes of BAR0.
pub const BAR_BYTES: u32 = 4096;

/// The receiver's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RxStatus(pub u32);

impl RxStatus {
    /// DMA runs.
    pub const ACTIVE: u32 = 1 << 30;

    /// Whether DMA runs. Not reliable if [`Self::gone`]: then all bits are ones.
    #[must_use]
    pub const fn active(self) -> bool {
        self.0 & Self::ACTIVE != 0
    }

    /// Whether the board has left the bus.
    #[must_use]
    pub const fn gone(self) -> bool {
        self.0 == u32::MAX
    }
}

/// Commands of the receiver's front end, written to [`FRONT`]: the upper four bits are the kind.
pub mod front {
    /// Samples of a burst, zero-based, in the low bits.
    pub const SAMPLES_Z: u32 = 0;
    /// The format of a burst: see [`format`].
    pub const FORMAT: u32 = 1;
    /// An order: see [`START`], [`STOP`].
    pub const ORDER: u32 = 3;
    /// Order: nothing; the blocks in the upper bits are held in reset.
    pub const IDLE: u32 = 0;
    /// Order: start the flow of samples.
    pub const START: u32 = 2;
    /// Order: stop it.
    pub const STOP: u32 = 4;
    /// Everything in reset.
    pub const RESET_ALL: u32 = 1 << 8 | 1 << 13 | 1 << 14 | 1 << 15;
    /// Format: one channel of I and Q.
    pub const ONE_CHANNEL: u32 = 1;

    /// Encodes a command.
    #[must_use]
    pub const fn command(what: u32, value: u32) -> u32 {
        what << 28 | value & 0x0fff_ffff
    }

    /// Kind and value of a command.
    #[must_use]
    pub const fn parts(command: u32) -> (u32, u32) {
        (command >> 28, command & 0x0fff_ffff)
    }

    /// The value of a format command: code of the sample's width, 8-byte words of a burst, bursts that fit the FIFO.
    #[must_use]
    pub const fn format(width: u32, words: u32, fifo: u32) -> u32 {
        width & 3 | ONE_CHANNEL << 2 | ((words.wrapping_sub(1)) & 0x1fff) << 5 | (fifo & 0x3ff) << 18
    }

    /// Width, channel code and words of a format command's value.
    #[must_use]
    pub const fn format_parts(value: u32) -> (u32, u32, u32) {
        (value & 3, value >> 2 & 7, (value >> 5 & 0x1fff) + 1)
    }
}

/// The value of [`NOTIFY_ACK`] after the events before number `read` of page `page` were read; counted over two laps.
#[must_use]
pub const fn ack(page: u32, read: u32) -> u32 {
    page << 16 | (read.wrapping_sub(1) << 1) & 0x3ff
}

/// The value of [`ROUTE`] that reports an event in a page, with that page's interrupt.
#[must_use]
pub const fn route(event: u32, page: u32) -> u32 {
    event | page << 8 | 1 << 16
}

/// The values of [`TX_ENTRY`] and [`TX_TIME`] for a buffer; without a time it is played at once.
#[must_use]
pub const fn tx_entry(samples: u32, time: Option<u64>) -> [u32; 2] {
    let count = (samples.wrapping_sub(1) & 0x7fff) << 15;
    match time {
        Some(time) => [(time >> 32) as u32 & 0x7fff | count, time as u32],
        None => [0x4000_7fff | count, u32::MAX],
    }
}

/// Samples and time of a transmit buffer.
#[must_use]
pub const fn tx_parts(entry: u32, time: u32) -> (u32, Option<u64>) {
    let samples = (entry >> 15 & 0x7fff) + 1;
    if entry & 0x4000_0000 != 0 {
        return (samples, None);
    }
    (samples, Some(((entry & 0x7fff) as u64) << 32 | time as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back() {
        for (samples, time) in [(1, None), (32768, Some(0)), (777, Some(0x7fff_ffff_ffff))] {
            let [entry, low] = tx_entry(samples, time);
            assert_eq!(tx_parts(entry, low), (samples, time));
        }
        assert_eq!(front::parts(front::command(front::FORMAT, 7)), (front::FORMAT, 7));
        assert_eq!(front::format_parts(front::format(2, 3072, 2)), (2, front::ONE_CHANNEL, 3072));
        assert_eq!(ack(0, 32), 62);
        assert_eq!(ack(1, 512), 1 << 16 | 0x3fe);
    }
}
