//! Launches: a kernel's arguments, its supervision, and the recovery when it fails.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, KernelJob, Launch, Region, Running};
use onehop_proto::kernel::{Exit, ItemOutcome, WorkItem};
use onehop_proto::queue::NO_CID;

use super::meter::Meter;
use super::run::Item;
use super::{GpuMode, GpuQueues, poison};
use crate::slots::retry_delays;
use crate::{Error, Namespace, Result};

/// How often a launch is polled.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// How often its ended commands are counted.
pub(super) const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);
/// How long a kernel may take to start, because of other programs' kernels.
const LAUNCH_GRACE: Duration = Duration::from_secs(5);
/// How long a kernel may take to end once it is asked to. Kernels poll the word all the time.
const POISON_TIMEOUT: Duration = Duration::from_secs(2);

/// The memory of one launch.
pub(super) struct LaunchMemory {
    /// The commands, and behind them their outcomes.
    pub(super) region: Region,
    pub(super) outcomes: usize,
}

impl LaunchMemory {
    /// The outcome of each of the first `count` commands so far.
    pub(super) fn outcomes(&self, count: u32) -> impl Iterator<Item = ItemOutcome> {
        let word = |i: u32| self.region.word(self.outcomes + (i * ItemOutcome::BYTES) as usize);
        (0..count).map(move |i| word(i).map_or(ItemOutcome::Pending, ItemOutcome::from_word))
    }

    /// How many of the first `count` commands have an outcome.
    fn ended(&self, count: u32) -> u32 {
        self.outcomes(count).filter(|outcome| *outcome != ItemOutcome::Pending).count() as u32
    }
}

/// How a launch is supervised.
pub(super) struct Watching<'a> {
    /// How long it may take.
    pub(super) limit: Duration,
    /// Called now and then; the launch is cancelled when it returns false.
    pub(super) progress: &'a mut dyn FnMut(&LaunchMemory) -> bool,
}

impl GpuQueues {
    /// Bytes of a launch's memory.
    pub(super) fn launch_bytes(&self, count: usize, meter: Option<&Meter<'_>>) -> usize {
        let ends = count * ItemOutcome::BYTES as usize;
        count * WorkItem::BYTES as usize + meter.map_or(ends, |meter| meter.end(count as u32) as usize)
    }

    /// Describes the commands of a launch in memory that is long enough.
    pub(super) fn write_launch(
        &self,
        items: &[Item],
        meter: Option<&Meter<'_>>,
        region: Region,
    ) -> Result<LaunchMemory> {
        let outcomes = items.len() * WorkItem::BYTES as usize;
        region.fill(outcomes, self.launch_bytes(items.len(), meter) - outcomes, 0)?;
        for (i, item) in items.iter().enumerate() {
            let mut words = [0; WorkItem::BYTES as usize];
            for (to, word) in words.chunks_exact_mut(4).zip(item.work.words()) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            region.write(i * WorkItem::BYTES as usize, &words)?;
        }
        Ok(LaunchMemory { region, outcomes })
    }

    /// Starts a kernel, which retries commands up to `retries` times and ends at `end`; returns how long it may take,
    /// or `None` if the creation of its queues took until `end`. When this fails, the controller no longer has any
    /// command of the kernel.
    pub(super) fn start(
        &self,
        gpu: &dyn Gpu,
        ns: &Namespace,
        (count, retries): (u32, u32),
        memory: &LaunchMemory,
        end: Option<Instant>,
    ) -> Result<Option<(Box<dyn Running>, Duration)>> {
        let mut state = self.drive.alive()?;
        let queues = self.cell.ensure(&self.drive, &mut state, ns, end)?;
        let limit = end.map_or(self.setup.limit, |end| end.saturating_duration_since(Instant::now()));
        if limit.is_zero() {
            return Ok(None);
        }
        let job = KernelJob {
            works: memory.region.addr(),
            outcomes: memory.region.addr().plus(memory.outcomes as u64),
            count,
            nsid: ns.nsid,
            retries,
            retry_delay: retry_delays(&self.drive).map(KernelJob::nanos),
            stall: KernelJob::nanos(self.setup.stall),
            limit: KernelJob::nanos(limit),
            poison: self.cell.poison_addr(),
            zero: 0,
        };
        let launch = match self.setup.mode {
            GpuMode::Owner => Launch::Owner(queues),
            GpuMode::Shared { threads } => Launch::Shared(queues, threads),
        };
        let started = gpu.launch(&launch, &job);
        let may_run = started.as_ref().map_or_else(onehop_gpu::Error::is_under_way, |_| true);
        self.cell.running.store(may_run, Ordering::Release);
        drop(state);
        let started = started.or_else(|error| {
            if error.is_under_way() {
                self.leave_to_kernel(memory);
            }
            // A kernel that did not begin has done nothing, and the controller must not be reset under one that may
            // have begun.
            self.failed(error.into(), true)
        })?;
        Ok(Some((started, limit)))
    }

    /// Runs a kernel to its end; returns how it ended and how long it ran. When this fails, the controller no longer
    /// has any command of the kernel.
    pub(super) fn finish(
        &self,
        running: Box<dyn Running>,
        memory: &LaunchMemory,
        count: u32,
        watching: Watching<'_>,
    ) -> Result<(Vec<Exit>, Duration)> {
        // A kernel that was killed may have left half an entry, or rung a doorbell unnoticed: only a reset ends that. A
        // kernel that may not have ended may still ring: its queues are deleted, and their numbers not used again.
        let ended = self.watch(running, memory, count, watching);
        ended.or_else(|error| self.failed(error, self.cell.is_abandoned()))
    }

    /// It is unknown which commands a failed launch has submitted.
    fn failed<T>(&self, error: Error, polite: bool) -> Result<T> {
        self.recover(format!("a GPU launch that failed: {error}"), polite)?;
        Err(error)
    }

    /// Waits for a launch, and ends it when the controller fails. A kernel that neither makes progress nor ends is
    /// abandoned, with all memory that it may touch.
    fn watch(
        &self,
        running: Box<dyn Running>,
        memory: &LaunchMemory,
        count: u32,
        Watching { limit, progress }: Watching<'_>,
    ) -> Result<(Vec<Exit>, Duration)> {
        // If a launch has not begun when its time is over, the wait ends.
        let most = limit.saturating_add(self.setup.stall);
        let mut idle = Idle::new(self.longest_idle_time().min(most));
        while !running.is_done() {
            std::thread::sleep(POLL_INTERVAL);
            if idle.is_due() && (idle.is_too_long(memory.ended(count)) || !progress(memory)) {
                self.cell.poison(poison::OVER);
                if !ends_within(&*running, POISON_TIMEOUT) {
                    return Err(self.abandon(running, memory, idle.limit));
                }
                break;
            }
            match self.drive.control.status() {
                Ok(status) if !status.cfs() => {}
                _ => self.cell.poison(poison::FAILED),
            }
            if let Ok(mut state) = self.drive.admin.try_lock() {
                // Events are only noted here: they are handled when the caller asks for events.
                state.admin.look();
            }
        }
        let took = running.took().unwrap_or_default();
        let exits = running.join();
        if exits.as_ref().is_err_and(onehop_gpu::Error::is_under_way) {
            self.leave_to_kernel(memory);
        } else {
            self.cell.running.store(false, Ordering::Release);
        }
        let mut exits = exits?;
        if self.cell.has_unexpected_completions()? {
            exits.push(Exit::UnexpectedCompletion(NO_CID));
        }
        Ok((exits, took))
    }

    /// How long a healthy kernel may go without ending a command: it ends by itself when the controller stalls, but may wait
    /// before it tries a command again.
    pub(super) fn longest_idle_time(&self) -> Duration {
        let delay = retry_delays(&self.drive).into_iter().max().unwrap_or_default();
        self.setup.stall.saturating_add(delay).saturating_add(LAUNCH_GRACE)
    }

    /// Keeps everything that a kernel may still reach for as long as this process lives.
    fn leave_to_kernel(&self, memory: &LaunchMemory) {
        self.cell.abandon(&self.drive);
        std::mem::forget(memory.region.clone());
    }

    /// Abandons a kernel that does not stop.
    fn abandon(&self, running: Box<dyn Running>, memory: &LaunchMemory, waited: Duration) -> Error {
        running.abandon();
        self.leave_to_kernel(memory);
        Error::Gpu(format!(
            "a kernel on {} did not end a command within {waited:?}, and did not stop when asked to. Another kernel may occupy \
             the whole GPU: a kernel that waits for this transfer must leave room for it. The queues and their memory are left to the \
             kernel, and the drive stays open, until this process ends",
            self.gpu.name()
        ))
    }
}

/// How long a launch has gone without ending a command.
struct Idle {
    limit: Duration,
    since: Instant,
    looked: Instant,
    ended: u32,
}

impl Idle {
    fn new(limit: Duration) -> Self {
        let now = Instant::now();
        Self { limit, since: now, looked: now, ended: 0 }
    }

    /// Whether the next check is due.
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = now - self.looked >= (self.limit / 8).min(PROGRESS_INTERVAL);
        if is_due {
            self.looked = now;
        }
        is_due
    }

    /// Whether no command has ended for too long; `ended` have by now.
    fn is_too_long(&mut self, ended: u32) -> bool {
        let now = Instant::now();
        if ended != self.ended {
            (self.ended, self.since) = (ended, now);
        }
        now - self.since >= self.limit
    }
}

fn ends_within(running: &dyn Running, limit: Duration) -> bool {
    let start = Instant::now();
    while !running.is_done() {
        if start.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    true
}
