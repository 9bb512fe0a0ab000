//! The transmitter's half of the board.

use std::collections::VecDeque;
use std::time::Instant;

use onehop_radio::{BUFFERS, BoardLimits, event, regs};

use crate::registers::BoardState;
use crate::violation::BoardRule;

/// Number of transmitted bytes to keep.
const KEPT: usize = 1 << 20;

/// A submitted buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TxBuffer {
    pub addr: u32,
    pub bytes: u32,
    pub time: Option<u64>,
}

impl TxBuffer {
    pub(crate) fn samples(&self) -> u32 {
        self.bytes / 4
    }
}

/// The transmitter.
#[derive(Default)]
pub(crate) struct Tx {
    pub entry: u32,
    pub running: bool,
    pub queue: VecDeque<TxBuffer>,
    /// When the first of them has been played.
    pub due: Option<Instant>,
    pub busy: bool,
    /// The buffer being played was submitted before a reset.
    pub stale: bool,
    pub posted: u64,
    pub played: u64,
    pub late: u32,
    /// Played samples.
    pub clock: u64,
    /// The last transmitted samples.
    pub sent: VecDeque<u8>,
}

impl Tx {
    pub(crate) fn status(&self) -> u32 {
        ((self.posted & 0x3f) as u32) << 8
            | ((self.played & 0x3f) as u32) << 16
            | if self.running || self.busy { regs::TX_BUSY } else { 0 }
    }

    pub(crate) fn control(&mut self, value: u32) {
        if value & regs::TX_RESET != 0 {
            let (busy, sent) = (self.busy, std::mem::take(&mut self.sent));
            *self = Self { busy, stale: busy, sent, ..Self::default() };
        }
        self.running = value & 3 == regs::TX_RUN;
        if !self.running {
            self.queue.clear();
            self.due = None;
        }
    }
}

impl BoardState {
    /// Submits a buffer.
    pub(crate) fn post(&mut self, time: u32) {
        let (samples, time) = regs::tx_parts(self.tx.entry, time);
        let breach = |why: String| self.book.note(BoardRule::Transmit, why);
        if self.tx.posted - self.tx.played >= u64::from(BUFFERS) {
            return breach(format!("buffer {} while all {BUFFERS} wait", self.tx.posted));
        }
        let bytes = samples * 4;
        let limit = self.indexed(regs::TX_BASE + regs::TX_LIMIT_Z);
        if limit == 0 || bytes > limit.saturating_add(1).min(BoardLimits::USDR_TX.max_bytes) {
            return breach(format!("{bytes} bytes in buffers of {limit} + 1"));
        }
        let buffer = (self.tx.posted % u64::from(BUFFERS)) as u32;
        let addr = self.indexed(regs::TX_BASE + regs::ADDRESSES + buffer);
        self.tx.posted += 1;
        self.tx.queue.push_back(TxBuffer { addr, bytes, time });
    }

    /// Records the samples of a played buffer.
    pub(crate) fn played(&mut self, buffer: &TxBuffer, data: &[u8]) {
        self.tx.late += u32::from(buffer.time.is_some_and(|time| time < self.tx.clock));
        let samples = u64::from(buffer.samples());
        self.tx.clock += samples;
        self.tx.played += 1;
        self.stats.transmitted_samples += samples;
        self.tx.sent.extend(data);
        let over = self.tx.sent.len().saturating_sub(KEPT);
        self.tx.sent.drain(..over);
        // They are not received without a receiver.
        if self.loopback && self.rx.setup.is_some() {
            self.looped.extend(data);
        }
        let data = [self.tx.status(), self.tx.late << 16, self.tx.clock as u32];
        self.write_event(event::TX, data);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::BoardConfig;
    use crate::config::P2p;
    use crate::space::BoardBus;

    #[test]
    fn a_buffer_being_fetched_keeps_the_transmitter_busy() {
        let mut tx = Tx { busy: true, running: true, ..Tx::default() };
        for stop in [0, regs::TX_RESET] {
            tx.control(stop);
            assert!(!tx.running);
            assert_eq!(tx.status() & regs::TX_BUSY, regs::TX_BUSY);
        }
        tx.busy = false;
        assert_eq!(tx.status() & regs::TX_BUSY, 0);
    }

    #[test]
    fn samples_that_no_receiver_hears_are_not_kept() {
        let space = BoardBus::new(P2p::Works, 32);
        let mut state = BoardState::new(BoardConfig::default().into(), space, Arc::default());
        state.loopback = true;
        for _ in 0..100 {
            state.played(&TxBuffer { addr: 0, bytes: 4096, time: None }, &[0; 4096]);
        }
        assert_eq!((state.looped.len(), state.tx.sent.len()), (0, 100 * 4096));
    }
}
