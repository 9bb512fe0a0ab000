//! Transmitting. The board reads the buffers. Far fewer machines forward a device's reads of GPU memory than its
//! writes, so GPU memory is used only if the board's loopback proves that reads work.

use std::sync::Arc;
use std::time::Duration;

use onehop_gpu::{Gpu, Region};
use onehop_os::Deadline;
use onehop_radio::{BUFFERS, Format, Shape, regs};

use crate::memory::RingMemory;
use crate::rx::{Receiver, RxOptions};
use crate::session::{DirectionClaim, Session, stop_tx};
use crate::{Card, Error, Result, SampleRoute, UnavailableRoute};

/// How to transmit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxOptions {
    /// Size of a buffer of 16-bit samples, in bytes.
    pub bytes: u32,
    /// Use only this route.
    pub only: Option<SampleRoute>,
    /// Time limit of the self-test for each buffer.
    pub self_test: Duration,
}

/// A transmitter. Dropping it stops the board before its memory is freed.
pub struct Transmitter {
    memory: Option<RingMemory>,
    route: SampleRoute,
    why_not_better: Vec<UnavailableRoute>,
    posted: u64,
    claim: DirectionClaim,
}

/// A free buffer that a GPU kernel may fill; [`TxBlock::submit`] queues it.
pub struct TxBlock<'a> {
    transmitter: &'a mut Transmitter,
    memory: Region,
}

impl TxBlock<'_> {
    /// The buffer.
    #[must_use]
    pub fn memory(&self) -> &Region {
        &self.memory
    }

    /// Queues its first `samples` samples, to be played at `time` of the sample clock, or at once. All writes to the
    /// buffer must have completed, including those of kernels.
    ///
    /// # Errors
    /// When `samples` is zero, or exceeds the buffer.
    pub fn submit(self, samples: u32, time: Option<u64>) -> Result<()> {
        let capacity = (self.memory.len() / 4) as u32;
        if samples == 0 || samples > capacity {
            let why = format!("a buffer holds 1 to {capacity} samples");
            return Err(Error::NotPossible { what: "transmitting a block", why });
        }
        let card = self.transmitter.card();
        let [entry, low] = regs::tx_entry(samples, time);
        card.write(regs::TX_ENTRY, entry);
        card.write(regs::TX_TIME, low);
        self.transmitter.posted += 1;
        Ok(())
    }
}

impl Transmitter {
    /// Opens the best route that works, or the requested one. The test of reads of GPU memory uses the board's
    /// receiver, which must be free.
    ///
    /// # Errors
    /// When no route works, with the reason for each.
    pub fn open(session: &Arc<Session>, gpu: &Arc<dyn Gpu>, options: &TxOptions) -> Result<Self> {
        let (mut transmitter, why_not_better) =
            SampleRoute::best(options.only, |route| Self::by_route(session, gpu, options, route))?;
        transmitter.why_not_better = why_not_better;
        Ok(transmitter)
    }

    fn by_route(
        session: &Arc<Session>,
        gpu: &Arc<dyn Gpu>,
        options: &TxOptions,
        route: SampleRoute,
    ) -> Result<Self> {
        let mut transmitter = Self::open_untested(session, gpu, options, route)?;
        if route == SampleRoute::Direct {
            transmitter.prove(gpu, options.self_test)?;
            transmitter.start()?;
        }
        Ok(transmitter)
    }

    /// Opens a route without testing the board's reads.
    pub(crate) fn open_untested(
        session: &Arc<Session>,
        gpu: &Arc<dyn Gpu>,
        options: &TxOptions,
        route: SampleRoute,
    ) -> Result<Self> {
        let claim = session.claim(false)?;
        let limits = session.card().profile.tx;
        let shape = Shape::of_bytes(Format::Ci16, &limits, options.bytes)?;
        let memory = RingMemory::new(session.card(), gpu, shape, &limits, route)?;
        let mut transmitter =
            Self { memory: Some(memory), route, why_not_better: Vec::new(), posted: 0, claim };
        transmitter.start()?;
        Ok(transmitter)
    }

    fn card(&self) -> &Card {
        self.claim.session().card()
    }

    fn ring(&self) -> Result<&RingMemory> {
        self.memory.as_ref().ok_or_else(|| Error::Gone { board: self.card().name.clone() })
    }

    /// The path of the samples: the board reads GPU memory, or host memory that the GPU writes.
    #[must_use]
    pub fn route(&self) -> SampleRoute {
        self.route
    }

    /// Why no better route works.
    #[must_use]
    pub fn why_not_better(&self) -> &[UnavailableRoute] {
        &self.why_not_better
    }

    /// Size of a buffer in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.memory.as_ref().map_or(0, |memory| memory.shape.bytes())
    }

    /// Number of submitted buffers.
    #[must_use]
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// Number of buffers that were submitted too late for their time.
    #[must_use]
    pub fn late(&self) -> u32 {
        self.card().read(regs::TX_LATE) >> 16
    }

    fn start(&mut self) -> Result<()> {
        self.halt()?;
        self.claim.session().reset_played()?;
        self.posted = 0;
        let (card, memory) = (self.card(), self.ring()?);
        memory.program(card, regs::TX_BASE);
        card.write(regs::TX_BASE + regs::TX_LIMIT_Z, memory.shape.bytes() - 1);
        card.write(regs::TX_CONTROL, regs::TX_RESET);
        card.write(regs::TX_CONTROL, regs::TX_RUN);
        Ok(())
    }

    fn halt(&mut self) -> Result<()> {
        if let Err(error) = stop_tx(self.card()) {
            // The board may still read the memory, so it must not be reused.
            std::mem::forget(self.memory.take());
            return Err(error);
        }
        Ok(())
    }

    /// The next free buffer, if one becomes free in time.
    ///
    /// # Errors
    /// When the board is gone or reports something impossible.
    pub fn acquire(&mut self, limit: Duration) -> Result<Option<TxBlock<'_>>> {
        let least = (self.posted + 1).saturating_sub(u64::from(BUFFERS));
        if self.played(least, limit)?.is_none() {
            return Ok(None);
        }
        let memory = self.ring()?.block((self.posted % u64::from(BUFFERS)) as u32)?;
        Ok(Some(TxBlock { transmitter: self, memory }))
    }

    fn played(&self, least: u64, limit: Duration) -> Result<Option<u64>> {
        let played = self.claim.session().played(least, Deadline::after(limit))?;
        if played.is_some_and(|played| played > self.posted) {
            let what = "more buffers were played than submitted".to_owned();
            return Err(Error::ImpossibleReport { board: self.card().name.clone(), what });
        }
        Ok(played)
    }

    /// Waits until all submitted buffers are played, up to `limit` for each; returns whether they were.
    ///
    /// # Errors
    /// As for [`Self::acquire`].
    pub fn drain(&self, limit: Duration) -> Result<bool> {
        let mut played = self.played(0, Duration::ZERO)?;
        while let Some(count) = played
            && count < self.posted
        {
            played = self.played(count + 1, limit)?;
        }
        Ok(played.is_some())
    }

    /// Tests through the loopback that the board reads the contents of its buffers, and stops it.
    pub(crate) fn prove(&mut self, gpu: &Arc<dyn Gpu>, limit: Duration) -> Result<()> {
        if !self.card().profile.loopback {
            return Err(Error::Lost {
                what: "this board has no loopback that could prove its reads of GPU memory".into(),
                fix: "Use cpu/pinned: the board then reads host memory, which the GPU writes".into(),
            });
        }
        let session = self.claim.session().clone();
        let limits = session.card().profile.rx;
        let shape = Shape::of_bytes(Format::Ci16, &limits, self.bytes())?;
        let options = RxOptions { shape, only: Some(SampleRoute::Pinned), self_test: None };
        let mut receiver = Receiver::open(&session, gpu, &options).map_err(|error| match error {
            // Transmitting from host memory needs no such test.
            Error::Busy { .. } => Error::Lost {
                what: "the board's receiver is in use, so its loopback cannot prove that it reads GPU memory"
                    .into(),
                fix: "Open the transmitter before the receiver, or use cpu/pinned".into(),
            },
            other => other,
        })?;
        self.start()?;
        session.card().write(regs::LOOPBACK, 1);
        let proved = self.compare_echo(&mut receiver, shape, limit);
        session.card().write(regs::LOOPBACK, 0);
        receiver.stop()?;
        self.halt()?;
        proved
    }

    fn compare_echo(&mut self, receiver: &mut Receiver, shape: Shape, limit: Duration) -> Result<()> {
        let route = self.route;
        receiver.start()?;
        for round in 0..BUFFERS {
            let pattern: Vec<u8> = (0..shape.samples())
                .flat_map(|n| (n.wrapping_add(round << 20)).wrapping_mul(0x9e37_79b9).to_le_bytes())
                .collect();
            let block = self.acquire(limit)?.ok_or_else(|| no_echo(round, route))?;
            block.memory().write(0, &pattern)?;
            block.submit(shape.samples(), None)?;
            let back = receiver.acquire(limit)?.ok_or_else(|| no_echo(round, route))?;
            let mut got = vec![0; pattern.len()];
            back.memory().read(0, &mut got)?;
            if got != pattern {
                let wrong = got.iter().zip(&pattern).filter(|(a, b)| a != b).count();
                return Err(Error::Lost {
                    what: format!(
                        "the board read {wrong} of {} bytes of buffer {round} incorrectly",
                        pattern.len()
                    ),
                    fix: reads_fix(route).into(),
                });
            }
        }
        Ok(())
    }
}

fn no_echo(round: u32, route: SampleRoute) -> Error {
    let what = format!("the samples of buffer {round} did not come back");
    Error::Lost { what, fix: reads_fix(route).into() }
}

/// The fix for a board that does not read the contents of its buffers.
fn reads_fix(route: SampleRoute) -> &'static str {
    match route {
        SampleRoute::Direct => {
            "The machine does not forward the board's reads of GPU memory (few do): use cpu/pinned"
        }
        SampleRoute::Pinned => "Check whether the IOMMU refuses the board's reads of host memory (dmesg)",
    }
}

impl Drop for Transmitter {
    fn drop(&mut self) {
        if self.memory.is_some() && self.halt().is_ok() {
            self.card().write(regs::TX_BASE + regs::TX_LIMIT_Z, 0);
        }
    }
}
