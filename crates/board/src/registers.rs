//! The board's state, as registers show and change it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_radio::event::{self, EventEntry, RxReport};
use onehop_radio::{BUFFERS, BoardLimits, Format, Shape, regs};

use crate::space::BoardBus;
use crate::transmit::Tx;
use crate::violation::{BoardRule, Book};
use crate::{BoardConfig, BoardStats, Flow};

/// The receiver's settings when it was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Setup {
    pub shape: Shape,
    pub addresses: [u32; BUFFERS as usize],
}

/// The receiver.
#[derive(Default)]
pub(crate) struct Rx {
    /// Samples flow once DMA and front end are started and software is ready.
    pub dma: bool,
    pub front: bool,
    pub ready: bool,
    pub samples_z: u32,
    pub format: u32,
    pub setup: Option<Setup>,
    /// Counts starts and stops, so that a block being filled is dropped after a stop.
    pub epoch: u64,
    /// A block is being filled.
    pub busy: bool,
    pub filled: u64,
    pub confirmed: u64,
    /// Blocks since the start, including lost ones.
    pub blocks: u64,
    pub lost_since: u32,
    pub clock: BlockClock,
}

/// When blocks are due: one each period since a moment.
#[derive(Clone, Copy)]
pub(crate) struct BlockClock {
    since: Instant,
    /// Blocks since then.
    taken: u64,
}

impl Default for BlockClock {
    fn default() -> Self {
        Self { since: Instant::now(), taken: 0 }
    }
}

impl BlockClock {
    /// A clock of which one block is due at `now`.
    pub(crate) fn due_at(now: Instant, period: f64) -> Self {
        let since = now.checked_sub(Duration::from_secs_f64(period)).unwrap_or(now);
        Self { since, taken: 0 }
    }

    /// Blocks that are due.
    pub(crate) fn due(&self, now: Instant, period: f64) -> u64 {
        ((now.saturating_duration_since(self.since).as_secs_f64() / period) as u64).saturating_sub(self.taken)
    }

    /// When the next block is due.
    pub(crate) fn next(&self, period: f64) -> Instant {
        self.since + Duration::from_secs_f64((self.taken + 1) as f64 * period)
    }

    pub(crate) fn take(&mut self, blocks: u64) {
        self.taken += blocks;
    }
}

/// Number of remembered flows.
const FLOWS: usize = 64;

/// The state behind the lock.
pub(crate) struct BoardState {
    pub config: Arc<BoardConfig>,
    pub space: Arc<BoardBus>,
    pub book: Arc<Book>,
    pub stats: BoardStats,
    pub flows: VecDeque<Flow>,
    index: u32,
    indexed: Vec<u32>,
    page: Option<u64>,
    routed: u32,
    written: u64,
    acked: u64,
    pub loopback: bool,
    /// Transmitted samples that have not been received yet.
    pub looped: VecDeque<u8>,
    pub rx: Rx,
    pub tx: Tx,
    /// An interrupt is due once the lock is released.
    pub raised: bool,
    pub ended: bool,
}

impl BoardState {
    pub(crate) fn new(config: Arc<BoardConfig>, space: Arc<BoardBus>, book: Arc<Book>) -> Self {
        Self {
            config,
            space,
            book,
            stats: BoardStats::default(),
            flows: VecDeque::new(),
            index: 0,
            indexed: vec![0; regs::VIRTUAL_COUNT as usize],
            page: None,
            routed: 0,
            written: 0,
            acked: 0,
            loopback: false,
            looped: VecDeque::new(),
            rx: Rx::default(),
            tx: Tx::default(),
            raised: false,
            ended: false,
        }
    }

    /// Restores the power-on state. Statistics are kept.
    pub(crate) fn reset(&mut self) {
        let epoch = self.rx.epoch + 1;
        let (stats, flows, ended) = (self.stats, std::mem::take(&mut self.flows), self.ended);
        let (rx_busy, tx) = (self.rx.busy, Tx { busy: self.tx.busy, stale: self.tx.busy, ..Tx::default() });
        *self = Self::new(self.config.clone(), self.space.clone(), self.book.clone());
        (self.rx.epoch, self.stats, self.flows) = (epoch, stats, flows);
        (self.rx.busy, self.tx, self.ended) = (rx_busy, tx, ended);
    }

    fn breach(&self, rule: BoardRule, detail: impl Into<String>) {
        self.book.note(rule, detail);
    }

    /// A register of the indexed space.
    pub(crate) fn indexed(&self, register: u32) -> u32 {
        self.indexed.get((register - regs::VIRTUAL) as usize).copied().unwrap_or_default()
    }

    pub(crate) fn read(&self, register: u32) -> u32 {
        match register {
            regs::RX_LOST => self.lost_since(),
            regs::RX_STATUS => self.rx_status(),
            regs::INDEX_DATA => self.indexed.get(self.index as usize).copied().unwrap_or(u32::MAX),
            regs::TX_STATUS => self.tx.status(),
            regs::TX_LATE => self.tx.late << 16,
            _ => 0,
        }
    }

    fn rx_status(&self) -> u32 {
        let active = if self.rx.setup.is_some() || self.rx.busy { regs::RxStatus::ACTIVE } else { 0 };
        (self.rx.confirmed & 0x3f) as u32 | ((self.rx.filled & 0x3f) as u32) << 8 | active
    }

    pub(crate) fn write(&mut self, register: u32, value: u32) {
        match register {
            regs::RX_CONFIRM => self.confirm(),
            regs::RX_CONTROL => self.rx_control(value),
            regs::INDEX if value >= regs::VIRTUAL_COUNT => {
                self.breach(BoardRule::Index, format!("register {value:#x} of the indexed space"));
            }
            regs::INDEX => self.index = value,
            regs::INDEX_DATA => self.write_indexed(value),
            regs::NOTIFY_PAGE => {
                self.page = (value & !0xfff != 0).then_some(u64::from(value & !0xfff));
                (self.written, self.acked) = (0, 0);
            }
            regs::NOTIFY_ACK => self.ack(value & 0x3ff),
            regs::TX_ENTRY => self.tx.entry = value,
            regs::TX_TIME => self.post(value),
            regs::TX_CONTROL => self.tx.control(value),
            regs::ROUTE if value & 1 << 16 != 0 => self.routed |= 1 << (value & 0x1f),
            regs::ROUTE => self.routed &= !(1 << (value & 0x1f)),
            regs::LOOPBACK => {
                self.loopback = value & 1 != 0;
                self.looped.clear();
                self.rx.clock = BlockClock::default();
            }
            _ => {}
        }
    }

    fn write_indexed(&mut self, value: u32) {
        let register = regs::VIRTUAL + self.index;
        if register == regs::RX_BASE + regs::FRONT {
            return self.front(value);
        }
        let of_rx = register - regs::RX_BASE;
        let shapes = of_rx < 32 || matches!(of_rx, regs::BURST_WORDS_Z | regs::BURSTS_Z | regs::RX_LIMIT_Z);
        if self.rx.setup.is_some() && shapes {
            self.breach(BoardRule::Running, format!("register {register:#x} written while samples flow"));
        }
        let addresses = [regs::RX_BASE, regs::TX_BASE];
        let is_address = addresses.iter().any(|base| (*base..*base + BUFFERS).contains(&register));
        if is_address && !value.is_multiple_of(4096) {
            self.breach(BoardRule::Alignment, format!("buffer register {register:#x} = {value:#x}"));
        }
        self.indexed[self.index as usize] = value;
    }

    fn front(&mut self, value: u32) {
        match regs::front::parts(value) {
            (regs::front::SAMPLES_Z, samples_z) => self.rx.samples_z = samples_z,
            (regs::front::FORMAT, format) => self.rx.format = format,
            (regs::front::ORDER, order) if order & 0xff == regs::front::START => {
                self.rx.front = true;
                self.start_if_ready();
            }
            (regs::front::ORDER, _) => {
                self.rx.front = false;
                self.stop();
            }
            _ => self.breach(BoardRule::Shape, format!("front end command {value:#x}")),
        }
    }

    fn rx_control(&mut self, value: u32) {
        if value & regs::RX_READY != 0 {
            self.rx.ready = true;
            return self.start_if_ready();
        }
        if value & regs::RX_TIMER_RESET != 0 {
            (self.rx.filled, self.rx.confirmed, self.rx.blocks, self.rx.lost_since) = (0, 0, 0, 0);
        }
        self.rx.dma = value & regs::RX_START != 0;
        if self.rx.dma {
            self.start_if_ready();
        } else {
            self.rx.ready = false;
            self.stop();
        }
    }

    fn stop(&mut self) {
        if self.rx.setup.take().is_some() {
            self.rx.epoch += 1;
            self.looped.clear();
        }
    }

    fn start_if_ready(&mut self) {
        if !(self.rx.dma && self.rx.front && self.rx.ready) || self.rx.setup.is_some() {
            return;
        }
        if self.page.is_none() || self.routed & 1 << event::RX == 0 {
            return self.breach(BoardRule::Events, "samples are started without a page for their events");
        }
        match self.setup() {
            Ok(setup) => {
                self.rx.setup = Some(setup);
                self.flows.push_back(Flow { block_samples: setup.shape.samples(), ..Flow::default() });
                if self.flows.len() > FLOWS {
                    self.flows.pop_front();
                }
                self.rx.epoch += 1;
                self.rx.clock = BlockClock::default();
                // The sample clock continues; only a reset sets it back.
                self.stats.starts += 1;
            }
            Err((rule, why)) => self.breach(rule, why),
        }
    }

    /// Checks the settings, and combines them.
    fn setup(&self) -> Result<Setup, (BoardRule, String)> {
        let (width, channels, words) = regs::front::format_parts(self.rx.format);
        let wrong = |why: String| (BoardRule::Shape, why);
        let format =
            Format::of_width(width).ok_or_else(|| wrong(format!("samples of width code {width}")))?;
        if channels != regs::front::ONE_CHANNEL {
            return Err(wrong(format!("channel code {channels}; this board has one channel")));
        }
        let of_rx = |register: u32| self.indexed(regs::RX_BASE + register);
        let bursts = of_rx(regs::BURSTS_Z).saturating_add(1);
        let shape = Shape { format, burst_samples: self.rx.samples_z.saturating_add(1), bursts };
        let limits = BoardLimits { max_bytes: self.config.max_bytes, ..BoardLimits::USDR_RX };
        if shape.burst_samples > limits.max_burst_samples || bursts > limits.max_bursts {
            return Err(wrong(format!("{bursts} bursts of {} samples", shape.burst_samples)));
        }
        shape.check(&limits).map_err(|broken| wrong(broken.to_string()))?;
        let said = [words, of_rx(regs::BURST_WORDS_Z).saturating_add(1)].map(|words| words.saturating_mul(8));
        if said != [shape.burst_bytes(); 2] {
            return Err(wrong(format!(
                "bursts of {said:?} bytes, whose samples have {}",
                shape.burst_bytes()
            )));
        }
        let limit = of_rx(regs::RX_LIMIT_Z);
        if limit == 0 || shape.bytes() > limit.saturating_add(1) {
            return Err((
                BoardRule::Limit,
                format!("blocks of {} bytes in buffers of {limit} + 1", shape.bytes()),
            ));
        }
        let mut addresses = [0; BUFFERS as usize];
        for (buffer, addr) in (0..).zip(&mut addresses) {
            *addr = of_rx(regs::ADDRESSES + buffer);
        }
        Ok(Setup { shape, addresses })
    }

    fn confirm(&mut self) {
        if self.rx.confirmed >= self.rx.filled {
            return self.breach(
                BoardRule::Confirm,
                format!("buffer {} was released without being filled", self.rx.confirmed),
            );
        }
        self.rx.confirmed += 1;
    }

    fn ack(&mut self, pointer: u32) {
        if self.written == 0 {
            return;
        }
        let ahead = (u64::from(pointer >> 1) + 513 - (self.acked % 512)) % 512;
        if ahead > self.written - self.acked {
            return self.breach(
                BoardRule::Ack,
                format!("pointer {pointer:#x} with {} events written", self.written),
            );
        }
        self.acked += ahead;
    }

    /// Writes an event, if it is routed.
    pub(crate) fn write_event(&mut self, what: u32, data: [u32; 3]) {
        let Some(page) = self.page.filter(|_| self.routed & 1 << what != 0) else { return };
        if self.written - self.acked >= u64::from(event::ENTRIES) {
            return self
                .breach(BoardRule::EventOverrun, format!("{} events, {} read", self.written, self.acked));
        }
        let EventEntry(words) = EventEntry::new((self.written % 512) as u32, what, data);
        let at = page + self.written % u64::from(event::ENTRIES) * event::ENTRY_BYTES as u64;
        let mut bytes = [0; 12];
        for (part, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&words[1..]) {
            *part = word.to_le_bytes();
        }
        let wrote = self.space.write(at + 4, &bytes).and_then(|()| self.space.write_word(at, words[0]));
        if let Err(missed) = wrote {
            self.breach(missed.rule(), format!("an event at bus {at:#x}"));
        }
        self.written += 1;
        self.raised = true;
    }

    /// Records lost blocks: those that had no buffer, or of which no burst arrived.
    pub(crate) fn lose_blocks(&mut self, blocks: u64) {
        self.rx.blocks += blocks;
        let since = u64::from(self.rx.lost_since).saturating_add(blocks);
        self.rx.lost_since = since.min(RxReport::MOST_LOST.into()) as u32;
        self.stats.sent_blocks += blocks;
        self.stats.lost_blocks += blocks;
        if let Some(flow) = self.flows.back_mut() {
            flow.sent_blocks += blocks;
            flow.lost_blocks += blocks;
        }
    }

    /// Records a block that was written, except for `missing` samples.
    pub(crate) fn fill_block(&mut self, missing: u64) {
        self.rx.blocks += 1;
        self.stats.sent_blocks += 1;
        self.stats.missing_samples += missing;
        if let Some(flow) = self.flows.back_mut() {
            flow.sent_blocks += 1;
            flow.missing_samples += missing;
        }
    }

    /// The bursts of the next block that arrive, one bit each, starting with the lowest.
    pub(crate) fn arriving(&self, bursts: u32) -> u32 {
        self.config.missing.map_or(u32::MAX, |missing| missing.arriving(self.rx.blocks, bursts))
    }

    /// How many of these blocks have no burst, of which the first has none.
    pub(crate) fn without_burst(&self, blocks: u64) -> u64 {
        if self.config.missing.is_some_and(|missing| missing.every == 1) { blocks } else { 1 }
    }

    /// Whether no buffer is free.
    pub(crate) fn is_full(&self) -> bool {
        self.rx.filled - self.rx.confirmed >= u64::from(BUFFERS)
    }

    /// Blocks lost since the last event, if this board reports them.
    pub(crate) fn lost_since(&self) -> u32 {
        if self.config.losses_unreported { 0 } else { self.rx.lost_since }
    }

    /// How long samples take, in seconds: at high rates, less than a `Duration` can hold.
    pub(crate) fn seconds(&self, samples: u32) -> f64 {
        f64::from(samples) / self.config.rate
    }
}
