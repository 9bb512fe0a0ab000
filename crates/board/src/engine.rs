//! The thread that moves samples: into receive buffers when blocks are due, and out of transmit buffers.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use onehop_radio::event::{self, RxReport};
use onehop_radio::{BUFFERS, Format};

use crate::board::BoardInner;
use crate::registers::{BlockClock, BoardState, Setup};
use crate::signal::Generator;
use crate::space::Missed;
use crate::transmit::TxBuffer;
use crate::violation::BoardRule;

/// Longest sleep: register accesses wake the thread.
const IDLE: Duration = Duration::from_millis(100);
/// Shortest sleep after losses, during which others get the lock.
const SHORTEST: Duration = Duration::from_micros(50);

impl Missed {
    pub(crate) fn rule(self) -> BoardRule {
        match self {
            Self::Unmapped => BoardRule::Unmapped,
            Self::NoMaster => BoardRule::BusMaster,
            Self::Mask => BoardRule::Mask,
            Self::ReadOnly => BoardRule::ReadOnly,
        }
    }
}

/// The thread's next step.
enum PlayerStep {
    /// Fill a buffer with a block.
    Fill(DueBlock),
    /// Play a buffer.
    Play(TxBuffer),
    /// Sleep.
    Wait(Duration),
    End,
}

/// A block to be filled.
struct DueBlock {
    setup: Setup,
    buffer: usize,
    first: u64,
    /// The bursts that arrive, one bit each, starting with the lowest.
    bursts: u32,
    epoch: u64,
    /// Transmitted samples, if those are received.
    looped: Option<Vec<u8>>,
}

/// Generators in use, and a buffer for a block.
#[derive(Default)]
struct Tools {
    generators: Vec<(Format, Generator)>,
    room: Vec<u8>,
}

pub(crate) fn run(inner: &BoardInner) {
    let mut tools = Tools::default();
    let mut state = inner.state();
    loop {
        match next(&mut state) {
            PlayerStep::End => return,
            PlayerStep::Wait(time) => {
                let waited = inner.wake.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner);
                state = waited.0;
                continue;
            }
            PlayerStep::Fill(block) => {
                drop(state);
                fill(inner, &block, &mut tools);
                state = inner.state();
                filled(&mut state, &block);
            }
            PlayerStep::Play(buffer) => {
                drop(state);
                let data = fetch(inner, &buffer);
                state = inner.state();
                state.tx.busy = false;
                let stale = std::mem::take(&mut state.tx.stale);
                if state.tx.running && !stale {
                    state.played(&buffer, &data);
                }
            }
        }
        if std::mem::take(&mut state.raised) {
            drop(state);
            inner.interrupt();
            state = inner.state();
        }
    }
}

fn next(state: &mut BoardState) -> PlayerStep {
    if state.ended {
        return PlayerStep::End;
    }
    // Before more is played, so that no more than a block and a buffer is ever kept.
    if let Some(fill) = next_looped(state) {
        return fill;
    }
    let played = match next_played(state) {
        Ok(buffer) => return PlayerStep::Play(buffer),
        Err(time) => time,
    };
    match next_block(state) {
        PlayerStep::Wait(time) => PlayerStep::Wait(time.min(played)),
        work => work,
    }
}

/// The next buffer that has been played by now; otherwise the time until there may be one.
fn next_played(state: &mut BoardState) -> Result<TxBuffer, Duration> {
    let waiting = state.tx.queue.front().copied().filter(|_| state.tx.running);
    let Some(buffer) = waiting else { return Err(IDLE) };
    let now = Instant::now();
    let time = |buffer: &TxBuffer| Duration::from_secs_f64(state.seconds(buffer.samples()));
    let due = state.tx.due.unwrap_or_else(|| now + time(&buffer));
    let next = state.tx.queue.get(1).map(|next| due + time(next));
    if now < due {
        state.tx.due = Some(due);
        return Err(due - now);
    }
    state.tx.queue.pop_front();
    (state.tx.due, state.tx.busy) = (next, true);
    Ok(buffer)
}

fn next_block(state: &mut BoardState) -> PlayerStep {
    let Some(setup) = state.rx.setup.filter(|_| !state.loopback) else { return PlayerStep::Wait(IDLE) };
    let period = state.seconds(setup.shape.samples());
    loop {
        let now = Instant::now();
        let (due, next) = (state.rx.clock.due(now, period), state.rx.clock.next(period));
        if due == 0 {
            return PlayerStep::Wait(next.saturating_duration_since(now));
        }
        if state.is_full() && state.config.patient {
            // The clock stands still until software has released a buffer.
            state.rx.clock = BlockClock::due_at(now, period);
            return PlayerStep::Wait(IDLE);
        }
        state.stats.most_behind = state.stats.most_behind.max(now.saturating_duration_since(next));
        let (lost, bursts) = match state.arriving(setup.shape.bursts) {
            // At once: at high rates, more become due while they are counted one by one.
            _ if state.is_full() => (due, 0),
            // A block without any burst takes no buffer.
            0 => (state.without_burst(due), 0),
            bursts => (0, bursts),
        };
        state.rx.clock.take(lost.max(1));
        if state.config.patient {
            // A clock that waits does not catch up either.
            state.rx.clock = BlockClock::default();
        }
        if lost == 0 {
            return fill_next(state, setup, bursts, None);
        }
        state.lose_blocks(lost);
        if lost == due {
            return PlayerStep::Wait(
                SHORTEST.max(state.rx.clock.next(period).saturating_duration_since(now)),
            );
        }
    }
}

/// In loopback, samples are received as soon as they fill a block. Like others, a block is lost without a free buffer.
fn next_looped(state: &mut BoardState) -> Option<PlayerStep> {
    let setup = state.rx.setup?;
    let bytes = setup.shape.bytes() as usize;
    let blocks = state.looped.len() / bytes;
    if state.is_full() {
        state.looped.drain(..blocks * bytes);
        state.lose_blocks(blocks as u64);
        return None;
    }
    let block = (blocks > 0).then(|| state.looped.drain(..bytes).collect())?;
    Some(fill_next(state, setup, u32::MAX, Some(block)))
}

fn fill_next(state: &mut BoardState, setup: Setup, bursts: u32, looped: Option<Vec<u8>>) -> PlayerStep {
    let first = state.rx.blocks * u64::from(setup.shape.samples());
    let buffer = (state.rx.filled % u64::from(BUFFERS)) as usize;
    state.rx.busy = true;
    PlayerStep::Fill(DueBlock { setup, buffer, first, bursts, epoch: state.rx.epoch, looped })
}

/// Writes the present bursts of a block into its buffer, contiguously.
fn fill(inner: &BoardInner, block: &DueBlock, tools: &mut Tools) {
    let shape = block.setup.shape;
    tools.room.resize(shape.bytes() as usize, 0);
    match &block.looped {
        Some(data) => tools.room.copy_from_slice(data),
        None => tools.generate(&inner.config.signal, shape.format, block.first),
    }
    let base = u64::from(block.setup.addresses[block.buffer]);
    let bursts = tools.room.chunks(shape.burst_bytes() as usize).enumerate();
    let arriving = bursts.filter(|(n, _)| block.bursts >> n & 1 == 1).map(|(_, burst)| burst);
    for (at, burst) in (base..).step_by(shape.burst_bytes() as usize).zip(arriving) {
        if let Err(missed) = inner.space.write(at, burst) {
            let what = format!("buffer {}, {} bytes at bus {at:#x}", block.buffer, burst.len());
            inner.book.note(missed.rule(), what);
            return;
        }
    }
}

impl Tools {
    fn generate(&mut self, signal: &crate::Signal, format: Format, first: u64) {
        if !self.generators.iter().any(|(known, _)| *known == format) {
            self.generators.push((format, Generator::new(signal, format)));
        }
        if let Some((_, generator)) = self.generators.iter().find(|(known, _)| *known == format) {
            generator.fill(first, &mut self.room);
        }
    }
}

/// Reports a filled buffer, unless the receiver was stopped meanwhile.
fn filled(state: &mut BoardState, block: &DueBlock) {
    state.rx.busy = false;
    if state.rx.epoch != block.epoch {
        return;
    }
    let shape = block.setup.shape;
    let bursts = RxReport::holding(shape.bursts, block.bursts);
    let missing = (shape.bursts - bursts.count_ones()) * shape.burst_samples;
    state.fill_block(missing.into());
    state.rx.filled += 1;
    let report = RxReport {
        lost: state.lost_since(),
        bursts,
        time: if state.config.reports_time { block.first as u32 } else { 0 },
    };
    state.rx.lost_since = 0;
    state.write_event(event::RX, report.data());
}

/// Reads a transmit buffer.
fn fetch(inner: &BoardInner, buffer: &TxBuffer) -> Vec<u8> {
    let mut data = vec![0; buffer.bytes as usize];
    if let Err(missed) = inner.space.read(u64::from(buffer.addr), &mut data) {
        inner.book.note(missed.rule(), format!("{} bytes to transmit at bus {:#x}", data.len(), buffer.addr));
    }
    data
}
