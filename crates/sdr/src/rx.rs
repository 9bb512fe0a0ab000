//! Receiving.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use onehop_gpu::{Gpu, Region};
use onehop_os::Deadline;
use onehop_radio::event::{Extent, Extents, RxReport};
use onehop_radio::{BUFFERS, Format, Shape, regs};

use crate::memory::RingMemory;
use crate::session::{DirectionClaim, Session, stop_rx};
use crate::staging::Staging;
use crate::{Card, Error, Result, SampleRoute, UnavailableRoute, Watch, proof};

/// How to receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxOptions {
    /// How samples are packed into blocks.
    pub shape: Shape,
    /// Use only this route.
    pub only: Option<SampleRoute>,
    /// Time limit for each of the 32 blocks of the self-test; `None` to skip the test. Then nothing proves that the
    /// machine forwards the board's writes.
    pub self_test: Option<Duration>,
}

impl RxOptions {
    /// Any route, with the self-test.
    #[must_use]
    pub fn new(shape: Shape) -> Self {
        Self { shape, only: None, self_test: Some(Duration::from_secs(2)) }
    }
}

/// Counters since the start, in samples unless stated otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Blocks acquired.
    pub blocks: u64,
    /// Samples in those blocks.
    pub delivered: u64,
    /// Samples that the board reported as lost.
    pub lost: u64,
    /// Number of losses.
    pub gaps: u64,
    /// Blocks with missing bursts.
    pub partial: u64,
    /// Blocks whose time stamp differs from the sample count, and losses at the maximum that a board can report. From
    /// the first one on, sample numbers are wrong.
    pub clock_errors: u64,
}

/// A block that has arrived.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    first: u64,
    lost: u64,
    missing: u64,
    pub(crate) extents: Extents,
    clock_error: bool,
}

impl Arrival {
    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }
}

/// A receiver. Dropping it stops the board before its memory is freed.
pub struct Receiver {
    staging: Option<Staging<Arrival>>,
    memory: Option<RingMemory>,
    route: SampleRoute,
    why_not_better: Vec<UnavailableRoute>,
    counts: Counts,
    running: bool,
    /// Held blocks, the oldest first; `true` for a block that was dropped in the meantime.
    held: VecDeque<bool>,
    /// The next buffer that the board fills, and the number of the sample that follows the last block.
    next: u32,
    position: u64,
    claim: DirectionClaim,
}

/// A block of samples in GPU memory. Dropping it releases the block.
pub struct Block<'a> {
    receiver: &'a mut Receiver,
    block: DetachedBlock,
    /// Whether [`Receiver::release`] releases the block, not dropping this.
    held: bool,
}

/// A block without a lifetime, released by [`Receiver::release`].
#[derive(Clone, Debug)]
pub struct DetachedBlock {
    /// Its samples, until it is released.
    pub memory: Region,
    /// The number of its first sample since the start.
    pub first: u64,
    /// Samples that were lost just before it.
    pub lost: u64,
    /// Samples missing within it; [`Self::extents`] are the others.
    pub missing: u64,
    /// Its index in [`Receiver::buffers`].
    pub handle: u32,
    extents: Extents,
    format: Format,
}

impl DetachedBlock {
    /// The numbers and positions of its samples. If bursts are missing, the others are stored contiguously from the
    /// start of the buffer, and the rest of the buffer is stale.
    #[must_use]
    pub fn extents(&self) -> Extents {
        self.extents.clone()
    }

    /// The memory of each extent, and the number of its first sample since the start: the input of
    /// [`Processor::process_all`](crate::Processor::process_all).
    ///
    /// # Errors
    /// Never for the memory of a block: it is not shorter than the extents.
    pub fn parts(&self) -> Result<Vec<(Region, u64)>> {
        let bytes = self.format.bytes() as usize;
        let part = |extent: Extent| {
            let (at, samples) = (extent.at as usize, extent.samples as usize);
            Ok((self.memory.slice(at * bytes..(at + samples) * bytes)?, self.first + u64::from(extent.first)))
        };
        self.extents().map(part).collect()
    }
}

impl Deref for Block<'_> {
    type Target = DetachedBlock;

    fn deref(&self) -> &DetachedBlock {
        &self.block
    }
}

impl Block<'_> {
    /// Detaches the block from the borrow, so that more blocks can be acquired. [`Receiver::release`] releases held
    /// blocks in the order of arrival; starting the receiver releases all.
    #[must_use]
    pub fn hold(mut self) -> DetachedBlock {
        self.held = true;
        self.block.clone()
    }

    /// Its samples in GPU memory, as the board sent them.
    #[must_use]
    pub fn memory(&self) -> &Region {
        &self.block.memory
    }

    /// How samples are packed.
    #[must_use]
    pub fn shape(&self) -> Option<Shape> {
        self.receiver.shape()
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        let receiver = &mut self.receiver;
        match (self.held, receiver.held.is_empty()) {
            (true, _) => receiver.held.push_back(false),
            // Buffers are released in order, so this one waits for held ones before it.
            (false, false) => receiver.held.push_back(true),
            (false, true) => receiver.release_buffer(),
        }
    }
}

impl Receiver {
    /// Opens the best route that works, or the requested one.
    ///
    /// # Errors
    /// When no route works, with the reason for each.
    pub fn open(session: &Arc<Session>, gpu: &Arc<dyn Gpu>, options: &RxOptions) -> Result<Self> {
        Self::open_watched(session, gpu, options, &mut |_| true)
    }

    /// Like [`Self::open`]. Several times a second, `watch` gets the number of the ring's 32 buffers filled so far in
    /// the self-test. It cancels by returning `false`.
    ///
    /// # Errors
    /// As for [`Self::open`], and [`Error::Cancelled`].
    pub fn open_watched(
        session: &Arc<Session>,
        gpu: &Arc<dyn Gpu>,
        options: &RxOptions,
        watch: Watch<'_>,
    ) -> Result<Self> {
        let (mut receiver, why_not_better) = SampleRoute::best(options.only, |route| {
            Self::by_route(session, gpu, options, route, &mut *watch)
        })?;
        receiver.why_not_better = why_not_better;
        Ok(receiver)
    }

    fn by_route(
        session: &Arc<Session>,
        gpu: &Arc<dyn Gpu>,
        options: &RxOptions,
        route: SampleRoute,
        watch: Watch<'_>,
    ) -> Result<Self> {
        let claim = session.claim(true)?;
        let limits = session.card().profile.rx;
        let memory = RingMemory::new(session.card(), gpu, options.shape, &limits, route)?;
        let mut receiver = Self {
            staging: None,
            memory: Some(memory),
            route,
            why_not_better: Vec::new(),
            counts: Counts::default(),
            running: false,
            held: VecDeque::new(),
            next: 0,
            position: 0,
            claim,
        };
        if let Some(limit) = options.self_test {
            proof::prove(&mut receiver, limit, watch)?;
        }
        if route == SampleRoute::Pinned {
            receiver.staging = Some(Staging::new(gpu, receiver.ring()?)?);
        }
        Ok(receiver)
    }

    pub(crate) fn card(&self) -> &Card {
        self.session().card()
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        self.claim.session()
    }

    pub(crate) fn ring(&self) -> Result<&RingMemory> {
        self.memory.as_ref().ok_or_else(|| Error::Gone { board: self.card().name.clone() })
    }

    /// The path of the samples.
    #[must_use]
    pub fn route(&self) -> SampleRoute {
        self.route
    }

    /// Why no better route works.
    #[must_use]
    pub fn why_not_better(&self) -> &[UnavailableRoute] {
        &self.why_not_better
    }

    /// How samples are packed; `None` after the board failed to stop.
    #[must_use]
    pub fn shape(&self) -> Option<Shape> {
        self.memory.as_ref().map(|memory| memory.shape)
    }

    /// The bus addresses of the buffers.
    #[must_use]
    pub fn addresses(&self) -> [u32; BUFFERS as usize] {
        self.memory.as_ref().map_or([0; BUFFERS as usize], |memory| memory.ring.0)
    }

    /// The GPU memory of all blocks: the ring, or the slots into which blocks are copied.
    ///
    /// # Errors
    /// When the board failed to stop.
    pub fn buffers(&self) -> Result<Vec<Region>> {
        match &self.staging {
            Some(staging) => staging.slots(),
            None => (0..BUFFERS).map(|buffer| self.ring()?.block(buffer)).collect(),
        }
    }

    /// Releases the oldest held block; returns whether there was one.
    pub fn release(&mut self) -> bool {
        if self.held.pop_front().is_none() {
            return false;
        }
        self.release_buffer();
        while self.held.front() == Some(&true) {
            self.held.pop_front();
            self.release_buffer();
        }
        true
    }

    fn release_buffer(&mut self) {
        match &mut self.staging {
            Some(staging) => staging.release(),
            None => self.card().write(regs::RX_CONFIRM, 0),
        }
    }

    /// The counters since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Starts the flow of samples, from sample 0 on.
    ///
    /// # Errors
    /// When the board is gone, or does not stop.
    pub fn start(&mut self) -> Result<()> {
        self.halt()?;
        if let Some(staging) = &mut self.staging {
            staging.clear()?;
        }
        self.session().discard_filled()?;
        (self.counts, self.next, self.position) = (Counts::default(), 0, 0);
        self.held.clear();
        let (card, memory) = (self.card(), self.ring()?);
        let Shape { format, burst_samples, bursts } = memory.shape;
        let words = memory.shape.burst_bytes() / 8;
        card.write(regs::RX_BASE + regs::FRONT_RESET, 1);
        card.write(regs::RX_BASE + regs::FRONT_RESET, 0);
        card.write(regs::RX_CONTROL, regs::RX_TIMER_RESET);
        memory.program(card, regs::RX_BASE);
        card.write(regs::RX_BASE + regs::BURST_WORDS_Z, words - 1);
        card.write(regs::RX_BASE + regs::BURSTS_Z, bursts - 1);
        card.write(regs::RX_BASE + regs::LONG_EVENTS, 1);
        card.write(regs::RX_BASE + regs::RX_LIMIT_Z, memory.shape.bytes() - 1);
        card.front(regs::front::ORDER, regs::front::RESET_ALL);
        card.front(regs::front::SAMPLES_Z, burst_samples - 1);
        card.front(regs::front::ORDER, regs::front::IDLE);
        let fifo = card.profile.rx.fifo_bytes / memory.shape.burst_bytes();
        card.front(regs::front::FORMAT, regs::front::format(format.width(), words, fifo));
        card.write(regs::RX_CONTROL, regs::RX_START);
        card.front(regs::front::ORDER, regs::front::START);
        card.write(regs::RX_CONTROL, regs::RX_READY);
        self.running = true;
        Ok(())
    }

    /// Stops the flow of samples. Blocks that have already arrived can still be acquired.
    ///
    /// # Errors
    /// When the board is gone, or does not stop; its memory then stays allocated.
    pub fn stop(&mut self) -> Result<()> {
        if !self.running {
            return Ok(());
        }
        self.halt()?;
        if self.card().profile.reports_tail {
            let blocks = u64::from(self.card().read(regs::RX_LOST) & RxReport::MOST_LOST);
            self.counts.lost += blocks * u64::from(self.ring()?.shape.samples());
            self.counts.gaps += u64::from(blocks > 0);
            self.counts.clock_errors += u64::from(blocks == u64::from(RxReport::MOST_LOST));
        }
        Ok(())
    }

    fn halt(&mut self) -> Result<()> {
        self.running = false;
        let stopped = stop_rx(self.card());
        if let Err(error) = stopped {
            // The board may still write to the memory, so it must not be reused.
            std::mem::forget(self.memory.take());
            return Err(error);
        }
        Ok(())
    }

    /// The next block, if it arrives within `limit`; after a stop, the next block that had arrived.
    ///
    /// # Errors
    /// When the board is gone or reports something impossible, or the GPU fails.
    pub fn acquire(&mut self, limit: Duration) -> Result<Option<Block<'_>>> {
        let deadline = Deadline::after(if self.running { limit } else { Duration::ZERO });
        let found = match self.route {
            SampleRoute::Direct => self.arrival(deadline)?,
            SampleRoute::Pinned => self.copied(deadline)?,
        };
        let Some((handle, memory, arrival)) = found else { return Ok(None) };
        let Arrival { first, lost, missing, extents, clock_error } = arrival;
        let shape = self.ring()?.shape;
        self.counts.blocks += 1;
        self.counts.delivered += u64::from(shape.samples()) - missing;
        self.counts.lost += lost + missing;
        self.counts.gaps += u64::from(lost + missing > 0);
        self.counts.partial += u64::from(missing > 0);
        self.counts.clock_errors += u64::from(clock_error);
        let format = shape.format;
        let block = DetachedBlock { memory, first, lost, missing, handle, extents, format };
        Ok(Some(Block { receiver: self, block, held: false }))
    }

    /// The next block that has arrived in the ring.
    pub(crate) fn arrival(&mut self, deadline: Deadline) -> Result<Option<(u32, Region, Arrival)>> {
        let Some(report) = self.session().filled(deadline)? else { return Ok(None) };
        let memory = self.ring()?;
        let (block, shape) = (memory.block(self.next)?, memory.shape);
        let samples = u64::from(shape.samples());
        let lost = u64::from(report.lost) * samples;
        let first = self.position + lost;
        let extents = report.extents(shape);
        let missing = samples - u64::from(extents.samples());
        let clock_error = report.lost == RxReport::MOST_LOST
            || self.card().profile.reports_time && report.time != first as u32;
        let handle = self.next;
        self.next = (self.next + 1) % BUFFERS;
        self.position = first + samples;
        Ok(Some((handle, block, Arrival { first, lost, missing, extents, clock_error })))
    }

    /// The next block that has arrived and been copied to GPU memory.
    fn copied(&mut self, deadline: Deadline) -> Result<Option<(u32, Region, Arrival)>> {
        loop {
            let has_free_slot = self.staging.as_ref().is_some_and(Staging::has_free_slot);
            let is_idle = self.staging.as_ref().is_none_or(Staging::is_empty);
            // Blocks that have arrived are copied at once. Wait for more only if no copy is in flight.
            let deadline = if is_idle { deadline } else { Deadline::after(Duration::ZERO) };
            let arrived = if has_free_slot { self.arrival(deadline)? } else { None };
            let from = match &arrived {
                Some((buffer, ..)) => self.ring()?.range(*buffer).start,
                None => 0,
            };
            let Some(staging) = &mut self.staging else { return Ok(None) };
            let has_begun = arrived.is_some();
            if let Some((.., arrival)) = arrived {
                staging.begin(from, arrival)?;
            }
            if !has_begun {
                staging.wait_oldest()?;
            }
            let (completed, found) = (staging.completed()?, if has_begun { None } else { staging.pop()? });
            for _ in 0..completed {
                self.card().write(regs::RX_CONFIRM, 0);
            }
            if found.is_some() || !has_begun {
                return Ok(found);
            }
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // If the board does not stop, `halt` leaks the memory.
        if self.memory.is_some() && self.halt().is_ok() {
            self.card().write(regs::RX_BASE + regs::RX_LIMIT_Z, 0);
            for buffer in 0..BUFFERS {
                self.card().write(regs::RX_BASE + regs::ADDRESSES + buffer, 0);
            }
        }
    }
}
