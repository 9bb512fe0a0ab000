//! A row: warm-up, repeats, and the check of its bytes.

use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use onehop_gpu::Region;
use onehop_os::StopSignal;
use rustix::time::{ClockId, clock_gettime};

use super::order::{Order, mix};
use super::{Effort, Move, PreparedRoute, SweepLane, SweepTarget, shares};
use crate::results::{IoType, Measured};
use crate::stats::{Clock, Quantiles, median};
use crate::{Error, Result};

/// Passes of a repeat at most.
const MOST_PASSES: u64 = 1 << 20;
/// The content of memory before a read: bytes that a drive is unlikely to hold.
const POISON: u8 = 0xa7;

/// The right bytes for one cell.
pub(crate) struct Data<'a> {
    target: &'a dyn SweepTarget,
    writes: bool,
    /// For reads: the bytes of each place, read by another route.
    expected: Vec<u8>,
    /// Bytes that arrived, or that are to be written.
    buffer: Vec<u8>,
    seed: u64,
}

impl<'a> Data<'a> {
    pub(crate) fn new(target: &'a dyn SweepTarget, order: &Order, io: IoType) -> Result<Self> {
        let bytes = usize::try_from(order.bytes()).map_err(|_| too_large())?;
        let mut expected = Vec::new();
        if !io.writes() {
            expected = vec![0; bytes];
            for (place, out) in order.places.iter().zip(expected.chunks_exact_mut(order.block as usize)) {
                target.read(*place, out)?;
            }
        }
        Ok(Self { target, writes: io.writes(), expected, buffer: vec![0; bytes], seed: 0 })
    }

    /// Before a repeat: fills memory with bytes that differ from those to be read, or with bytes to write that were never
    /// written before.
    fn before(&mut self, memory: &Region) -> Result<()> {
        if !self.writes {
            return Ok(memory.fill(0, self.buffer.len(), POISON)?);
        }
        self.seed += 1;
        for (i, word) in self.buffer.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = mix(i as u64 ^ self.seed << 40).to_le_bytes();
        }
        Ok(memory.write(0, &self.buffer)?)
    }

    /// After a repeat, of which this was the last pass: every byte is compared.
    fn after(&mut self, memory: &Region, order: &Order, shares: &[Range<usize>], pass: u64) -> Result<()> {
        if !self.writes {
            memory.read(0, &mut self.buffer)?;
        }
        let block = order.block as usize;
        let (mut moves, mut back) = (Vec::new(), vec![0; block]);
        for share in shares {
            order.moves(share, pass, &mut moves);
            let turn = (pass % share.len().max(1) as u64) as usize;
            for (i, Move { at, slot }) in moves.iter().enumerate() {
                let got = &self.buffer[*slot as usize..][..block];
                let right = if self.writes {
                    self.target.read(*at, &mut back)?;
                    &back[..]
                } else {
                    &self.expected[(share.start + (i + turn) % share.len()) * block..][..block]
                };
                if got != right {
                    let first = got.iter().zip(right).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(Error::WrongBytes { at: at + first as u64 });
                }
            }
        }
        Ok(())
    }
}

fn too_large() -> Error {
    Error::Setup("the bytes of a pass do not fit into the memory of this machine".into())
}

/// The time of some passes.
struct Took {
    wall: Duration,
    cpu: Duration,
    times: Quantiles,
}

/// Measures a route.
pub(crate) fn measure(
    mut way: PreparedRoute,
    order: &Order,
    data: &mut Data<'_>,
    (effort, stop): (&Effort, &StopSignal),
    clock: &Clock,
) -> Result<Measured> {
    let parts = shares(order.places.len(), way.lanes.len());
    // The count of passes continues from repeat to repeat, so that bytes of an earlier pass are never right for this
    // one.
    let mut done = 0;
    let mut repeat = |way: &mut PreparedRoute, passes: u64, clock: Option<&Clock>| -> Result<Took> {
        data.before(&way.memory)?;
        let took = run(&mut way.lanes, (order, &parts), done..done + passes, clock, stop)?;
        done += passes;
        data.after(&way.memory, order, &parts, done - 1)?;
        Ok(took)
    };
    // The first pass touches all memory; the second shows how long one takes.
    let first = repeat(&mut way, 1, None)?.wall;
    let once = if first < effort.time { repeat(&mut way, 1, None)?.wall } else { first };
    let passes = (effort.time.as_nanos() / once.as_nanos().max(1)).clamp(1, MOST_PASSES.into()) as u64;
    let (mut all, mut times) = (Vec::new(), Quantiles::default());
    for _ in 0..effort.repeats.max(1) {
        let mut took = repeat(&mut way, passes, None)?;
        times.append(&mut took.times);
        all.push((took.wall.as_secs_f64(), took.cpu.as_nanos() as f64));
    }
    // If measuring times costs something, they come from one more repeat, and the mean from the others.
    let apart = times.is_empty();
    if apart {
        times = repeat(&mut way, passes, Some(clock))?.times;
    }
    let ops = passes * order.places.len() as u64;
    let in_flight = (f64::from(way.threads) * f64::from(way.depth)).min(order.places.len() as f64);
    Ok(evaluate(&all, (apart, &mut times), ops, order.block, in_flight, clock))
}

/// Runs every lane on its own thread, all from the same moment on. With a clock, lanes measure times that otherwise do
/// not.
fn run(
    lanes: &mut [Box<dyn SweepLane>],
    (order, parts): (&Order, &[Range<usize>]),
    passes: Range<u64>,
    clock: Option<&Clock>,
    stop: &StopSignal,
) -> Result<Took> {
    let barrier = Barrier::new(lanes.len() + 1);
    std::thread::scope(|scope| {
        let started: Vec<_> = lanes
            .iter_mut()
            .zip(parts)
            .map(|(lane, part)| {
                let (barrier, mut passes) = (&barrier, passes.clone());
                scope.spawn(move || {
                    let (mut moves, mut times) = (Vec::with_capacity(part.len()), Quantiles::default());
                    barrier.wait();
                    // By its own clock: the thread that started it may not be running when it begins.
                    let begun = Instant::now();
                    let result = passes.try_for_each(|pass| {
                        if stop.is_set() {
                            return Err(Error::Stopped);
                        }
                        order.moves(part, pass, &mut moves);
                        match clock {
                            Some(clock) => lane.timed_pass(&moves, &mut times, clock),
                            None => lane.pass(&moves, &mut times),
                        }
                    });
                    result.map(|()| (times, begun, Instant::now()))
                })
            })
            .collect();
        let cpu = cpu_time();
        barrier.wait();
        let (mut times, mut span) = (Quantiles::default(), None::<(Instant, Instant)>);
        for thread in started {
            let panicked = |_| Error::Wrong("a thread of the sweep panicked".into());
            let (mut part, begun, ended) = thread.join().map_err(panicked)??;
            times.append(&mut part);
            span =
                span.map_or(Some((begun, ended)), |(first, last)| Some((first.min(begun), last.max(ended))));
        }
        let wall = span.map_or(Duration::ZERO, |(first, last)| last - first);
        Ok(Took { wall, cpu: cpu_time().saturating_sub(cpu), times })
    })
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn evaluate(
    all: &[(f64, f64)],
    (apart, times): (bool, &mut Quantiles),
    ops: u64,
    block: u64,
    in_flight: f64,
    clock: &Clock,
) -> Measured {
    let bytes = (ops * block) as f64;
    let gbps_each: Vec<f64> = all.iter().map(|(seconds, _)| bytes / 1e9 / seconds.max(1e-9)).collect();
    let gbps = median(&mut gbps_each.clone());
    let iops = gbps * 1e9 / block as f64;
    let mut cpu: Vec<f64> = all.iter().map(|(_, nanos)| nanos / bytes).collect();
    let repeats = all.len() as u64;
    let us = |cycles: f64| clock.ns(cycles) / 1e3;
    // Little's law: blocks in flight are blocks a second times the latency of each.
    let mean = if apart { in_flight / iops * 1e6 } else { us(times.mean()) };
    Measured {
        data_set_kib: bytes * repeats as f64 / 1024.0,
        io_size_kib: block as f64 / 1024.0,
        throughput_gib: gbps * 1e9 / f64::from(1 << 30),
        avg_latency_us: mean,
        ops: ops * repeats,
        total_time: all.iter().map(|(seconds, _)| seconds).sum(),
        gbps,
        gbps_each,
        iops,
        p50_us: times.median().map(us),
        p99_us: times.per_mille(990).map(us),
        p999_us: times.per_mille(999).map(us),
        latency_samples: times.count(),
        latency_apart: apart,
        cpu_ns_per_byte: median(&mut cpu),
        limit: None,
        of_limit: None,
        verified: true,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_say_of_how_many_blocks_they_are_and_from_where() {
        let clock = Clock::calibrate();
        let all = [(1.0, 1e9), (2.0, 1e9)];
        let mut times = Quantiles::default();
        (0..1500).for_each(|_| times.add(clock.cycles(Duration::from_micros(10))));
        // The same set for mean and percentiles; p99.9 would need more of it.
        let with = evaluate(&all, (false, &mut times), 1000, 4096, 4.0, &clock);
        assert_eq!((with.ops, with.latency_samples, with.latency_apart), (2000, 1500, false));
        assert!((with.avg_latency_us - 10.0).abs() < 0.1 && (with.p99_us.unwrap() - 10.0).abs() < 0.1);
        assert_eq!(with.p999_us, None);
        // The median of two repeats is their mean.
        assert!((with.gbps - (4.096e-3 + 2.048e-3) / 2.0).abs() < 1e-9, "{}", with.gbps);
        // Percentiles of an extra repeat are marked; the mean is of the others.
        let apart = evaluate(&all, (true, &mut times), 1000, 4096, 4.0, &clock);
        assert!(apart.latency_apart && apart.latency_samples == 1500);
        assert!((apart.avg_latency_us - 4.0 / apart.iops * 1e6).abs() < 1e-6);
    }
}
