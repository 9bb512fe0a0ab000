//! What has to be seen before samples are believed: one step after the other, each by what happened and not by what was
//! reported.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_gpu::Gpu;
use onehop_radio::{Limits, Shape, regs};

use crate::{
    Error, Processor, Receiver, Result, Route, RxOptions, Session, Settings, Transmitter, TxOptions,
};

/// A step, and how it came out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Its name.
    pub name: &'static str,
    /// Whether it went well; none where it could not be tried.
    pub passed: Option<bool>,
    /// What was seen.
    pub found: String,
    /// What would mend it, or nothing.
    pub fix: String,
}

impl Step {
    fn new(name: &'static str, outcome: std::result::Result<String, Error>) -> Self {
        match outcome {
            Ok(found) => Self { name, passed: Some(true), found, fix: String::new() },
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

/// How often the stream is started and stopped.
const STARTS: u32 = 20;
/// How many blocks are looked at.
const BLOCKS: u64 = 64;

/// Goes through all steps. `counter` says that the board sends a counter, so that every sample can be checked; `limit` is
/// how long a block may take to come.
#[must_use]
pub fn self_test(
    session: &Arc<Session>,
    gpu: &Arc<dyn Gpu>,
    shape: Shape,
    counter: bool,
    limit: Duration,
) -> Vec<Step> {
    let mut steps = vec![Step::new("registers", registers(session))];
    for (name, route) in [("rx to GPU memory", Route::Direct), ("rx to host memory", Route::Pinned)] {
        let options = RxOptions { shape, only: Some(route), self_test: Some(limit) };
        let proved = Receiver::open(session, gpu, &options).map(|_| {
            format!("all 32 buffers of {} bytes were written where the board says so", shape.bytes())
        });
        steps.push(Step::new(name, proved));
    }
    let best = || Receiver::open(session, gpu, &RxOptions { shape, only: None, self_test: Some(limit) });
    steps.push(Step::new("start and stop", best().and_then(|receiver| starts(receiver, limit))));
    let counted = best().and_then(|receiver| samples(receiver, gpu, counter, limit));
    steps.push(Step::new("samples", counted));
    steps.push(Step::new("overflow", best().and_then(|receiver| overflow(receiver, limit))));
    let options = |route| TxOptions { bytes: 64 << 10, only: Some(route), self_test: limit };
    let read = Transmitter::open(session, gpu, &options(Route::Direct));
    let read = read.map(|_| "what lies in GPU memory is what the board reads there".to_owned());
    let step = Step::new("tx from GPU memory", read);
    // A board without a loopback cannot be asked.
    let untried = step.passed == Some(false) && !session.card().profile.loopback;
    steps.push(Step { passed: if untried { None } else { step.passed }, ..step });
    steps.push(Step::new("tx from host memory", transmit(session, gpu, &options(Route::Pinned), limit)));
    steps
}

fn registers(session: &Session) -> Result<String> {
    let card = session.card();
    let status = card.read(regs::RX_STATUS);
    if regs::RxStatus(status).gone() {
        return Err(Error::Gone { board: card.name.clone() });
    }
    // Buffer addresses that nobody uses now can be written and read back.
    for value in [0x5a5a_5000, 0] {
        card.write(regs::RX_BASE, value);
        let back = card.read(regs::RX_BASE);
        if back != value {
            let what = format!("register {:#x} holds {back:#x} after {value:#x} was written", regs::RX_BASE);
            return Err(Error::Confused { board: card.name.clone(), what });
        }
    }
    Ok(format!("the receiver's state is {status:#x}; its registers keep what is written"))
}

fn starts(mut receiver: Receiver, limit: Duration) -> Result<String> {
    let begun = Instant::now();
    for _ in 0..STARTS {
        receiver.start()?;
        if receiver.acquire(limit)?.is_none() {
            return Err(silent(limit));
        }
        receiver.stop()?;
    }
    Ok(format!("{STARTS} times, a block each time, in {:.1?}", begun.elapsed()))
}

fn samples(mut receiver: Receiver, gpu: &Arc<dyn Gpu>, counter: bool, limit: Duration) -> Result<String> {
    let shape = receiver.shape().ok_or_else(|| silent(limit))?;
    let mut processor = Processor::new(gpu, shape, Settings { counter, ..Settings::default() })?;
    receiver.start()?;
    for _ in 0..BLOCKS {
        let block = receiver.acquire(limit)?.ok_or_else(|| silent(limit))?;
        processor.process(block.memory(), block.first)?;
    }
    receiver.stop()?;
    let (sight, counts) = (processor.take()?, receiver.counts());
    if counts.clock_errors > 0 {
        let what =
            format!("{} of {BLOCKS} blocks have another time than counting gives", counts.clock_errors);
        return Err(Error::Lost { what, fix: "See whether events are lost".into() });
    }
    match (sight.wrong, sight.first_wrong) {
        (Some(wrong), Some((expected, found))) => Err(Error::Lost {
            what: format!(
                "{wrong} of {} samples are wrong, first {found:#x} instead of {expected:#x}",
                sight.samples
            ),
            fix: "Use cpu/pinned, and compare".into(),
        }),
        (Some(_), None) => Ok(format!("{} samples, each the one that its number says", sight.samples)),
        _ => Ok(format!(
            "{} samples at {:.1} dBFS; this signal cannot tell whether each is the right one",
            sight.samples, sight.level
        )),
    }
}

/// Lets the ring run over, and counts.
fn overflow(mut receiver: Receiver, limit: Duration) -> Result<String> {
    let shape = receiver.shape().ok_or_else(|| silent(limit))?;
    receiver.start()?;
    let deadline = Instant::now() + limit;
    let mut first_gap = None;
    while first_gap.is_none() && Instant::now() < deadline {
        // Nobody takes blocks for as long as it takes to fill the ring more than once.
        std::thread::sleep(Duration::from_millis(50));
        for _ in 0..64 {
            match receiver.acquire(limit)? {
                Some(block) if block.lost > 0 => {
                    first_gap = Some(block.lost);
                    break;
                }
                Some(_) => {}
                None => return Err(silent(limit)),
            }
        }
    }
    receiver.stop()?;
    let (counts, per_block) = (receiver.counts(), u64::from(shape.samples()));
    let Some(gap) = first_gap else {
        return Ok(format!("none in {limit:.1?}: the ring holds more than the board sends meanwhile"));
    };
    if gap % per_block != 0 || counts.clock_errors > 0 {
        let what =
            format!("a gap of {gap} samples in blocks of {per_block}, {} wrong times", counts.clock_errors);
        return Err(Error::Lost { what, fix: "See whether events are lost".into() });
    }
    Ok(format!("{gap} samples were lost on purpose, and reported; the clock agrees"))
}

fn transmit(
    session: &Arc<Session>,
    gpu: &Arc<dyn Gpu>,
    options: &TxOptions,
    limit: Duration,
) -> Result<String> {
    let mut transmitter = Transmitter::open(session, gpu, options)?;
    let samples = transmitter.bytes() / 4;
    for _ in 0..2 * onehop_radio::BUFFERS {
        let block = transmitter.acquire(limit)?.ok_or_else(|| silent(limit))?;
        block.memory().fill(0, block.memory().len(), 0)?;
        block.submit(samples, None)?;
    }
    if !transmitter.drain(limit)? {
        return Err(silent(limit));
    }
    let most = Limits::USDR_TX.max_bytes;
    Ok(format!(
        "{} buffers of {} bytes (at most {most}) were played",
        transmitter.posted(),
        transmitter.bytes()
    ))
}

fn silent(limit: Duration) -> Error {
    Error::Lost {
        what: format!("the board told nothing for {limit:.1?}"),
        fix: "See what it is clocked with, and whether its events arrive".into(),
    }
}
