//! The self-test of a board. Each step checks actual effects, not only what the board reports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_gpu::Gpu;
use onehop_os::Deadline;
use onehop_radio::{BUFFERS, Shape, regs};

use crate::{
    Error, Measurements, Processor, Receiver, Result, RxOptions, SampleRoute, Session, Settings, Transmitter,
    TxOptions, Watch,
};

/// Parameters of the test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SelfTest {
    /// How samples are packed into blocks.
    pub shape: Shape,
    /// Whether the board sends a counter, so that every sample can be checked.
    pub counter: bool,
    /// Time limit for a block to arrive.
    pub limit: Duration,
}

/// A step and its result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Its name.
    pub name: &'static str,
    /// Whether it passed; `None` if it could not be tested.
    pub passed: Option<bool>,
    /// What was observed.
    pub found: String,
    /// How to fix it or to make it testable; empty if unknown.
    pub fix: String,
}

/// The result of a step without an error.
enum Observation {
    /// It works.
    Works(String),
    /// It could not be verified; `fix` is how to.
    Unverified { found: String, fix: &'static str },
}

impl Step {
    fn new(name: &'static str, outcome: Result<Observation>) -> Self {
        match outcome {
            Ok(Observation::Works(found)) => Self { name, passed: Some(true), found, fix: String::new() },
            Ok(Observation::Unverified { found, fix }) => Self { name, passed: None, found, fix: fix.into() },
            Err(error) => {
                Self { name, passed: Some(false), found: first_reason(&error), fix: first_fix(&error) }
            }
        }
    }
}

fn first_reason(error: &Error) -> String {
    match error {
        Error::NoRoute(list) => list.first().map_or_else(String::new, |no| no.reason.clone()),
        other => other.reason(),
    }
}

fn first_fix(error: &Error) -> String {
    match error {
        Error::NoRoute(list) => list.first().map_or_else(String::new, |no| no.fix.clone()),
        other => other.fix(),
    }
}

/// Number of times the stream is started and stopped.
const STARTS: u32 = 20;
/// Number of blocks to check.
const BLOCKS: u32 = 64;
/// Blocks over which the time per block is measured.
const TIMED: u32 = 4;
/// Duration of the stall in blocks: more than the ring has buffers, so that it overflows.
const STALLED: u32 = BUFFERS + 8;
/// Minimum duration of the stall.
const MIN_STALL: Duration = Duration::from_millis(50);
/// Interval between calls of `watch`.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

const WITH_COUNTER: &str = "Have the board send a counter (signal=counter)";

/// Runs all steps. `watch` gets the number of filled buffers from steps that fill the ring, and 0 from the others.
///
/// # Errors
/// [`Error::Cancelled`]; all other errors are results of a step.
pub fn self_test(
    session: &Arc<Session>,
    gpu: &Arc<dyn Gpu>,
    test: &SelfTest,
    watch: Watch<'_>,
) -> Result<Vec<Step>> {
    let run = SelfTestRun { session, gpu, test };
    let mut steps = vec![Step::new("registers", registers(session))];
    let mut route = None;
    for (name, by) in [("rx to GPU memory", SampleRoute::Direct), ("rx to host memory", SampleRoute::Pinned)]
    {
        let proved = run.prove(by, &mut *watch);
        if proved.is_ok() {
            route = route.or(Some(by));
        }
        steps.push(Step::new(name, proved));
    }
    match route {
        Some(route) => run.receive(route, &mut *watch, &mut steps)?,
        None => {
            let untested =
                || Ok(Observation::Unverified { found: "not tried: no route works".into(), fix: "" });
            let names = ["start and stop", "clock", "samples", "overflow"];
            steps.extend(names.map(|name| Step::new(name, untested())));
        }
    }
    for (name, by) in
        [("tx from GPU memory", SampleRoute::Direct), ("tx from host memory", SampleRoute::Pinned)]
    {
        steps.push(Step::new(name, run.transmit(by, &mut *watch)));
    }
    if !watch(0) {
        return Err(Error::Cancelled);
    }
    Ok(steps)
}

/// Returns an error if the test was cancelled.
type CancelCheck<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The board, the GPU, and the test's parameters.
struct SelfTestRun<'a> {
    session: &'a Arc<Session>,
    gpu: &'a Arc<dyn Gpu>,
    test: &'a SelfTest,
}

impl SelfTestRun<'_> {
    fn prove(&self, route: SampleRoute, watch: Watch<'_>) -> Result<Observation> {
        let SelfTest { shape, limit, .. } = *self.test;
        let options = RxOptions { shape, only: Some(route), self_test: Some(limit) };
        Receiver::open_watched(self.session, self.gpu, &options, watch)?;
        let bytes = shape.bytes();
        Ok(Observation::Works(format!(
            "all {BUFFERS} buffers of {bytes} bytes were written where the board reports"
        )))
    }

    /// The steps for a receiver, on a route that works.
    fn receive(&self, route: SampleRoute, watch: Watch<'_>, steps: &mut Vec<Step>) -> Result<()> {
        let options = RxOptions { shape: self.test.shape, only: Some(route), self_test: None };
        let open = || Receiver::open(self.session, self.gpu, &options);
        let check_cancelled: CancelCheck<'_> = &mut || if watch(0) { Ok(()) } else { Err(Error::Cancelled) };
        steps.push(Step::new(
            "start and stop",
            open().and_then(|receiver| self.starts(receiver, check_cancelled)),
        ));
        let [clock, samples] = match open().and_then(|receiver| self.samples(receiver, check_cancelled)) {
            Ok((errors, measurements)) => [self.clock(errors), self.counted(&measurements)],
            Err(error) => {
                let fix = "See the step `samples`";
                [
                    Ok(Observation::Unverified { found: "not tried: no samples arrived".into(), fix }),
                    Err(error),
                ]
            }
        };
        steps.extend([Step::new("clock", clock), Step::new("samples", samples)]);
        steps.push(Step::new(
            "overflow",
            open().and_then(|receiver| self.overflow(receiver, check_cancelled)),
        ));
        check_cancelled()
    }

    fn starts(&self, mut receiver: Receiver, check_cancelled: CancelCheck<'_>) -> Result<Observation> {
        let start = Instant::now();
        for _ in 0..STARTS {
            receiver.start()?;
            self.next(&mut receiver, None, check_cancelled)?;
            receiver.stop()?;
        }
        Ok(Observation::Works(format!("{STARTS} times with a block each, in {:.1?}", start.elapsed())))
    }

    /// Acquires the next block and processes it; returns the number of samples lost before it.
    fn next(
        &self,
        receiver: &mut Receiver,
        processor: Option<&mut Processor>,
        check_cancelled: CancelCheck<'_>,
    ) -> Result<u64> {
        let deadline = Deadline::after(self.test.limit);
        let block = loop {
            check_cancelled()?;
            if let Some(block) = receiver.acquire(deadline.left().min(WATCH_INTERVAL))? {
                break block.hold();
            }
            if deadline.passed() {
                return Err(no_event(self.test.limit));
            }
        };
        if let Some(processor) = processor {
            let parts = block.parts()?;
            let parts: Vec<_> = parts.iter().map(|(memory, first)| (memory, *first)).collect();
            processor.process_all(&parts)?;
        }
        receiver.release();
        Ok(block.lost)
    }

    fn processor(&self) -> Result<Processor> {
        let SelfTest { shape, counter, .. } = *self.test;
        Processor::new(self.gpu, shape, Settings { counter, ..Settings::default() })
    }

    /// Receives for a while; returns the number of blocks with a wrong time, and the measurements.
    fn samples(
        &self,
        mut receiver: Receiver,
        check_cancelled: CancelCheck<'_>,
    ) -> Result<(u64, Measurements)> {
        let mut processor = self.processor()?;
        receiver.start()?;
        for _ in 0..BLOCKS {
            self.next(&mut receiver, Some(&mut processor), check_cancelled)?;
        }
        receiver.stop()?;
        Ok((receiver.counts().clock_errors, processor.take()?))
    }

    fn clock(&self, errors: u64) -> Result<Observation> {
        if !self.session.card().profile.reports_time {
            let found = "this board's events contain no time".into();
            return Ok(Observation::Unverified { found, fix: "" });
        }
        if errors > 0 {
            let what = format!("{errors} of {BLOCKS} blocks have a time that differs from the sample count");
            return Err(Error::Lost { what, fix: "Check whether events are lost".into() });
        }
        Ok(Observation::Works(format!("{BLOCKS} blocks, each with the time that the sample count gives")))
    }

    fn counted(&self, measurements: &Measurements) -> Result<Observation> {
        if let Some(what) = wrong(measurements) {
            return Err(Error::Lost { what, fix: "Compare with cpu/pinned".into() });
        }
        if measurements.wrong.is_some() {
            return Ok(Observation::Works(format!(
                "{} samples, each equal to its number",
                measurements.samples
            )));
        }
        let found = format!(
            "{} samples at {:.1} dBFS arrived; this signal cannot show whether each is right",
            measurements.samples, measurements.level
        );
        Ok(Observation::Unverified { found, fix: WITH_COUNTER })
    }

    /// Lets the ring overflow, and checks the reported losses against the board's clock and the values of the samples
    /// after them.
    fn overflow(&self, mut receiver: Receiver, check_cancelled: CancelCheck<'_>) -> Result<Observation> {
        let mut processor = self.processor()?;
        receiver.start()?;
        self.next(&mut receiver, None, check_cancelled)?;
        let start = Instant::now();
        for _ in 0..TIMED {
            self.next(&mut receiver, None, check_cancelled)?;
        }
        let stall =
            (start.elapsed() / TIMED * STALLED).clamp(MIN_STALL, (10 * self.test.limit).max(MIN_STALL));
        let end = Instant::now() + stall;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            check_cancelled()?;
            std::thread::sleep(left.min(WATCH_INTERVAL));
        }
        let mut lost = 0;
        for _ in 0..BLOCKS {
            lost += self.next(&mut receiver, Some(&mut processor), check_cancelled)?;
        }
        receiver.stop()?;
        let errors = receiver.counts().clock_errors;
        let late =
            (errors > 0).then(|| format!("{errors} blocks have a time that differs from the sample count"));
        if let Some(what) = wrong(&processor.take()?).or(late) {
            let what = format!("{lost} samples were reported lost, which is wrong: {what}");
            return Err(Error::Lost { what, fix: "Check whether events are lost".into() });
        }
        if lost == 0 {
            let found = format!("nothing was lost although no block was acquired for {stall:.1?}");
            let fix = "A board that waits (patient=1) loses nothing. Otherwise use smaller buffers (--buffer), which fill sooner";
            return Ok(Observation::Unverified { found, fix });
        }
        let evidence = match (self.session.card().profile.reports_time, self.test.counter) {
            (true, true) => "the clock and the samples after them agree",
            (true, false) => "the clock agrees",
            (false, true) => "the samples after them agree",
            (false, false) => {
                let found = format!("{lost} samples were reported lost; nothing shows whether that is all");
                return Ok(Observation::Unverified { found, fix: WITH_COUNTER });
            }
        };
        Ok(Observation::Works(format!("{lost} samples were lost on purpose, and reported; {evidence}")))
    }

    /// Transmits a pattern, and compares what comes back through the loopback.
    fn transmit(&self, route: SampleRoute, watch: Watch<'_>) -> Result<Observation> {
        let limit = self.test.limit;
        let bytes = self.test.shape.bytes().min(64 << 10);
        let options = TxOptions { bytes, only: Some(route), self_test: limit };
        if !watch(0) {
            return Err(Error::Cancelled);
        }
        let mut transmitter = Transmitter::open_untested(self.session, self.gpu, &options, route)?;
        if self.session.card().profile.loopback {
            transmitter.prove(self.gpu, limit)?;
            let found = format!("{BUFFERS} buffers with a pattern came back through the loopback");
            return Ok(Observation::Works(found));
        }
        let caveat = "; this board has no loopback that could show what it read";
        if route == SampleRoute::Direct {
            return Ok(Observation::Unverified { found: format!("not tried{caveat}"), fix: "" });
        }
        let samples = transmitter.bytes() / 4;
        for _ in 0..2 * BUFFERS {
            let block = transmitter.acquire(limit)?.ok_or_else(|| no_event(limit))?;
            block.memory().fill(0, block.memory().len(), 0)?;
            block.submit(samples, None)?;
        }
        if !transmitter.drain(limit)? {
            return Err(no_event(limit));
        }
        let found = format!("{} buffers were reported as played{caveat}", transmitter.posted());
        Ok(Observation::Unverified { found, fix: "" })
    }
}

/// How samples differ from the counter; `None` if all are right or unchecked.
fn wrong(measurements: &Measurements) -> Option<String> {
    let (count, (expected, found)) =
        (measurements.wrong.filter(|count| *count > 0)?, measurements.first_wrong?);
    let samples = measurements.samples;
    Some(format!("{count} of {samples} samples are wrong, first {found:#x} instead of {expected:#x}"))
}

fn registers(session: &Session) -> Result<Observation> {
    let card = session.card();
    let status = card.read(regs::RX_STATUS);
    if regs::RxStatus(status).gone() {
        return Err(Error::Gone { board: card.name.clone() });
    }
    // While the receiver is stopped, its buffer addresses can be written and read back.
    for value in [0x5a5a_5000, 0] {
        card.write(regs::RX_BASE, value);
        let back = card.read(regs::RX_BASE);
        if back != value {
            let what = format!("register {:#x} holds {back:#x} after {value:#x} was written", regs::RX_BASE);
            return Err(Error::ImpossibleReport { board: card.name.clone(), what });
        }
    }
    Ok(Observation::Works(format!("the receiver's state is {status:#x}; its registers keep written values")))
}

fn no_event(limit: Duration) -> Error {
    Error::Lost {
        what: format!("the board reported no event for {limit:.1?}"),
        fix: "Check its clock, and whether its events arrive".into(),
    }
}
