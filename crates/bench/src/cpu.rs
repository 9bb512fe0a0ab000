//! The CPU's queue: one thread, one queue pair, batches as deep as the queue.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use onehop_drive::{Buffer, Drive, Io, IoQueue, Namespace, Op, Options};
use onehop_os::{ControllerBackend, StopSignal, cycles};

use crate::stats::{Clock, Quantiles, median};
use crate::{Error, QueueCost, Result};

/// The drive that queue costs are measured against: the null controller, run within the doorbell write.
pub const NULL_DRIVE: &str = "mem:64M?null=1&workers=0&mqes=4095";

/// How long a row is measured.
const ROW_TIME: Duration = Duration::from_millis(300);
/// How many parts a row is measured in; the result is their median.
const PARTS: u32 = 15;
/// How often the controller by itself is measured.
const CEILINGS: u32 = 5;

/// A queue pair to measure.
pub struct CpuQueue {
    drive: Drive,
    queue: IoQueue,
    ns: Namespace,
    buffer: Buffer,
    depth: u32,
    blocks: u32,
    /// Whether the drive is [`NULL_DRIVE`], whose own share is known.
    null: bool,
}

/// What a batch took, in cycles for each command.
struct BatchCycles {
    submit: f64,
    complete: f64,
}

impl CpuQueue {
    /// Opens a drive for it; every wait for it ends once `stop` is set. `block` is the size of a command.
    ///
    /// # Errors
    /// When the drive cannot be opened, or does not support such commands.
    pub fn open(port: ControllerBackend, depth: u32, block: u64, stop: StopSignal) -> Result<Self> {
        let null = port.name.strip_prefix("sim:") == Some(NULL_DRIVE);
        // A null controller moves no data, so there is none to wait for.
        let options = Options { depth, queues: 1, canary: !null, stop, ..Options::default() };
        let drive = Drive::open(port, options)?;
        let queue = drive.queue()?;
        if queue.depth() < depth {
            return Err(Error::Setup(format!("the controller's queues are {} deep at most", queue.depth())));
        }
        let first = drive.namespaces().first().cloned();
        let ns = first.ok_or_else(|| Error::Setup("the drive has no namespace".into()))?;
        let blocks = u32::try_from(ns.format.blocks_within(block)).unwrap_or(u32::MAX);
        if blocks == 0 || ns.format.transfer_bytes(blocks.into()) != Some(block) {
            let unit = ns.format.transfer_bytes(1).unwrap_or(0);
            return Err(Error::Setup(format!(
                "{block} bytes are not a multiple of the drive's blocks of {unit} bytes"
            )));
        }
        let buffer = drive.buffer(depth as usize * block as usize)?;
        Ok(Self { drive, queue, ns, buffer, depth, blocks, null })
    }

    /// The measured drive.
    #[must_use]
    pub fn drive(&self) -> &Drive {
        &self.drive
    }

    /// Submits as many commands as the queue is deep, with one doorbell, and takes them all.
    ///
    /// # Errors
    /// When a command fails.
    pub fn batch(&self, tokens: &mut VecDeque<onehop_drive::Token>) -> Result<()> {
        self.timed(tokens).map(|_| ())
    }

    fn io(&self, i: u32) -> Io<'_> {
        let bytes = self.ns.format.transfer_bytes(self.blocks.into()).unwrap_or(0);
        // A division would cost a tenth of the measured time.
        let at = u64::from(i) * u64::from(self.blocks);
        let lba = if at + u64::from(self.blocks) <= self.ns.blocks { at } else { 0 };
        Io::new(Op::Read, lba, self.blocks, &self.buffer, u64::from(i) * bytes)
    }

    fn timed(&self, tokens: &mut VecDeque<onehop_drive::Token>) -> Result<BatchCycles> {
        let start = cycles();
        let mut batch = self.queue.batch()?;
        for i in 0..self.depth {
            tokens.push_back(batch.submit(&self.ns, &self.io(i))?);
        }
        drop(batch);
        let submitted = cycles();
        let mut failed = None;
        while !tokens.is_empty() {
            let before = tokens.len();
            self.queue.test_front(tokens, |_, end| {
                if let Err(error) = end {
                    failed.get_or_insert(error);
                }
            });
            if tokens.len() == before
                && let Some(token) = tokens.pop_front()
            {
                // No completion was ready: wait as a user would, with the time-out ladder behind it.
                self.queue.wait(token)?;
            }
        }
        let done = cycles();
        let count = f64::from(self.depth);
        failed.map_or(
            Ok(BatchCycles {
                submit: (submitted - start) as f64 / count,
                complete: (done - submitted) as f64 / count,
            }),
            |error| Err(error.into()),
        )
    }

    /// Measures a row.
    ///
    /// # Errors
    /// When a command fails, or wrong data comes back from a drive that keeps data.
    pub fn row(&self, clock: &Clock) -> Result<QueueCost> {
        self.check_data()?;
        let mut tokens = VecDeque::with_capacity(self.depth as usize);
        let warm_up = Instant::now();
        while warm_up.elapsed() < ROW_TIME / 10 {
            self.batch(&mut tokens)?;
        }
        let (mut rates, mut submits, mut completes) = (Vec::new(), Vec::new(), Vec::new());
        let mut latencies = Quantiles::default();
        for _ in 0..PARTS {
            let (start, mut batches) = (Instant::now(), 0u64);
            let (mut submit, mut complete) = (0.0, 0.0);
            while start.elapsed() < ROW_TIME / PARTS {
                let from = cycles();
                let batch = self.timed(&mut tokens)?;
                latencies.add(cycles() - from);
                submit += batch.submit;
                complete += batch.complete;
                batches += 1;
            }
            rates.push(batches as f64 * f64::from(self.depth) / start.elapsed().as_secs_f64());
            submits.push(submit / batches as f64);
            completes.push(complete / batches as f64);
        }
        let iops = median(&mut rates);
        Ok(QueueCost {
            side: "cpu",
            mode: "owner",
            queues: 1,
            depth: self.depth,
            threads: 1,
            block: self.ns.format.transfer_bytes(self.blocks.into()).unwrap_or(0),
            iops,
            ns_per_command: 1e9 / iops,
            p50_ns: latencies.median().map(|cycles| clock.ns(cycles)),
            p99_ns: latencies.per_mille(990).map(|cycles| clock.ns(cycles)),
            latency_of: "batch",
            latency_samples: latencies.count(),
            cycles_submit: Some(median(&mut submits)),
            cycles_complete: Some(median(&mut completes)),
            timed_iops: None,
            controller_ns: if self.null { Some(ceiling(self.depth)?) } else { None },
            regs: None,
        })
    }

    /// Reads the same blocks twice, by different commands: a drive that gives different bytes is not measured.
    fn check_data(&self) -> Result<()> {
        let block = self.ns.format.transfer_bytes(1).unwrap_or(0);
        let whole = self.drive.buffer(self.blocks as usize * block as usize)?;
        let single = self.drive.buffer(block as usize)?;
        self.queue.read(&self.ns, 0, self.blocks.into(), &whole, 0)?;
        for lba in 0..u64::from(self.blocks.min(16)) {
            self.queue.read(&self.ns, lba, 1, &single, 0)?;
            let one = single.host()?.to_vec(0, block as usize).map_err(onehop_drive::Error::from)?;
            let other = whole
                .host()?
                .to_vec((lba * block) as usize, block as usize)
                .map_err(onehop_drive::Error::from)?;
            if one != other {
                return Err(Error::WrongData { lba });
            }
        }
        Ok(())
    }
}

/// Nanoseconds of the null controller alone for a command, in batches of this depth: the median of five measurements.
///
/// # Errors
/// When memory for its queues cannot be allocated.
pub fn ceiling(depth: u32) -> Result<f64> {
    let rounds = (200_000 / depth.max(1)).max(100);
    let one = |_| onehop_sim::null_ceiling(4096, depth, rounds);
    let mut all = (0..CEILINGS).map(one).collect::<std::result::Result<Vec<f64>, _>>()?;
    Ok(median(&mut all))
}
