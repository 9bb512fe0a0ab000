//! A running job: launches its commands until each has ended, and waits for its data.

use std::time::{Duration, Instant};

use onehop_gpu::{Place, Running};
use onehop_os::StopSignal;
use onehop_proto::kernel::{Exit, ItemOutcome, WorkItem};

use super::launch::{LaunchMemory, PROGRESS_INTERVAL, Watching};
use super::meter::Meter;
use super::plan::{BatchPlan, CommandBatch};
use super::{GpuQueues, Spare};
use crate::Moved;
use crate::canary::{Canary, Nonces};
use crate::command::describe;
use crate::doubts::Doubts;
use crate::options::STOP_PATIENCE;
use crate::queue::CANCEL_GRACE;
use crate::slots::{may_retry, retry_delays};
use crate::{Buffer, Error, Namespace, Op, Result};

const MISSING: &str = "a GPU-driven read that was completed without its data";

/// A command of a job, and its state.
pub(super) struct Item {
    pub(super) work: WorkItem,
    /// The index of its job.
    pub(super) job: usize,
    /// Offset and length of its data in the buffer.
    data: (u64, u64),
    recoveries: u32,
    /// It has failed, and may be tried again from this time on.
    due: Option<Instant>,
}

/// A batch that is ready for its launch: described, marked and stored.
struct PreparedBatch {
    batch: CommandBatch,
    /// The commands that have not ended yet.
    items: Vec<Item>,
    memory: LaunchMemory,
    /// The mark in the memory of its reads.
    nonce: u64,
    /// When its last launch began.
    launched: Instant,
    /// Ranges of the buffer whose commands have succeeded, but whose data was not there yet. Neighbours are joined.
    missing: Vec<(u64, u64)>,
}

/// Reports progress to the caller, who may cancel.
struct Watcher<'a> {
    progress: &'a mut dyn FnMut(u64) -> bool,
    /// The drive's request to stop, which cancels as well.
    stop: &'a StopSignal,
    /// Bytes of the current batch that were reported.
    reported: u64,
    /// When it was called last.
    asked: Instant,
    cancelled: bool,
}

impl Watcher<'_> {
    /// Reports how many bytes of the current batch were moved. Returns whether to go on.
    fn report(&mut self, moved: u64) -> bool {
        let more = moved.saturating_sub(self.reported);
        self.reported += more;
        self.cancelled |= !(self.progress)(more) | self.stop.is_set();
        self.asked = Instant::now();
        !self.cancelled
    }

    /// Whether to go on, for waits without progress. Calls `progress` now and then.
    fn goes_on(&mut self) -> bool {
        if self.asked.elapsed() < PROGRESS_INTERVAL { !self.cancelled } else { self.report(self.reported) }
    }

    /// Sleeps until `end`, or until the job is cancelled. Returns whether to go on.
    fn sleep_until(&mut self, end: Instant) -> bool {
        while self.goes_on() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(PROGRESS_INTERVAL));
        }
        false
    }
}

/// A running launch.
struct StartedLaunch {
    running: Box<dyn Running>,
    at: Instant,
    limit: Duration,
}

/// A running job.
pub(super) struct Run<'a, 'm> {
    queues: &'a GpuQueues,
    op: Op,
    ns: &'a Namespace,
    buffer: &'a Buffer,
    /// For measuring times.
    meter: Option<&'a mut Meter<'m>>,
    watcher: Watcher<'a>,
    start: Instant,
    /// For guarded reads.
    nonces: Option<Nonces>,
    /// Commands in all, and those whose batch has ended.
    count: u64,
    done: u64,
    spare: &'a mut Spare,
    report: Moved,
    /// Set once the GPU failed to check whether data had arrived. It is not asked again, which might take as long once
    /// more.
    blind: bool,
    doubts: Doubts,
}

impl<'a, 'm> Run<'a, 'm> {
    pub(super) fn new(
        queues: &'a GpuQueues,
        op: Op,
        ns: &'a Namespace,
        buffer: &'a Buffer,
        start: Instant,
        spare: &'a mut Spare,
        (meter, progress): (Option<&'a mut Meter<'m>>, &'a mut dyn FnMut(u64) -> bool),
    ) -> Self {
        let guarded = queues.drive.options.canary && op == Op::Read;
        Self {
            queues,
            op,
            ns,
            buffer,
            meter,
            watcher: Watcher {
                progress,
                stop: &queues.drive.control.stop,
                reported: 0,
                asked: start,
                cancelled: false,
            },
            start,
            nonces: guarded.then(Nonces::new),
            count: 0,
            done: 0,
            spare,
            report: Moved::default(),
            blind: false,
            doubts: Doubts::default(),
        }
    }

    /// Runs all batches of a plan, one launch after the other. While one runs, the data of the last batch is checked
    /// and the next batch prepared. When this returns, the controller no longer has any of the commands or their
    /// memory, or the drive is dead.
    pub(super) fn transfer(mut self, plan: &mut BatchPlan<'_>) -> Result<(Moved, Doubts)> {
        self.report = Moved { bytes: plan.bytes, commands: plan.commands, ..Moved::default() };
        self.count = plan.commands;
        self.reserve(plan)?;
        let mut next = self.prepare(plan)?;
        let mut before: Option<PreparedBatch> = None;
        while let Some(mut current) = next.take() {
            let started = match self.start_launch(&mut current) {
                Ok(started) => started,
                Err(error) => return Err(self.fail(error, before.into_iter().chain([current]))),
            };
            let looked = before.as_mut().map_or(Ok(false), |ended| self.look_for_data(ended));
            if matches!(looked, Ok(true))
                && let Some(ended) = before.take()
            {
                self.reuse(ended);
            }
            let prepared = looked.and_then(|_| self.prepare(plan));
            match self.finish(started, &mut current).and(prepared) {
                Ok(prepared) => next = prepared,
                Err(error) => return Err(self.fail(error, before.into_iter().chain([current]))),
            }
            self.done += current.batch.works.len() as u64;
            let goes_on = self.watcher.report(current.batch.bytes);
            self.watcher.reported = 0;
            if before.is_some() || next.is_none() || !goes_on {
                self.settle(before.take().into_iter().chain([current]).collect())?;
            } else {
                before = Some(current);
            }
            if !goes_on {
                return Err(self.cancelled(self.done));
            }
        }
        self.report.took = self.start.elapsed();
        Ok((self.report, self.doubts))
    }

    /// Allocates memory for two batches of a long plan, so that none is allocated while a kernel runs: the GPU's driver may
    /// wait for the kernel to end.
    fn reserve(&mut self, plan: &BatchPlan<'_>) -> Result<()> {
        let Spare { lists, launch } = &mut *self.spare;
        let (list_bytes, launch_bytes) =
            (plan.list_bytes(), self.queues.launch_bytes(plan.room(), self.meter.as_deref()));
        lists.retain(|lists| lists.mem.len() as u64 >= list_bytes);
        launch.retain(|region| region.len() >= launch_bytes);
        let batches = usize::from(plan.commands > 0) + usize::from(plan.is_long());
        while lists.len() < batches {
            lists.push(plan.alloc_lists()?);
            self.report.allocations += 1;
        }
        while launch.len() < batches {
            launch.push(self.queues.gpu.alloc(Place::PinnedHost, launch_bytes)?);
            self.report.allocations += 1;
        }
        Ok(())
    }

    /// The next batch, ready for its launch.
    fn prepare(&mut self, plan: &mut BatchPlan<'_>) -> Result<Option<PreparedBatch>> {
        let Some(slices) = plan.next_slices() else { return Ok(None) };
        let lists = match self.spare.lists.pop() {
            Some(lists) => lists,
            None => {
                self.report.allocations += 1;
                plan.alloc_lists()?
            }
        };
        let batch = plan.describe_all(slices, lists)?;
        self.ready(batch).map(Some)
    }

    /// Marks the memory of a batch, and stores it for a launch.
    fn ready(&mut self, batch: CommandBatch) -> Result<PreparedBatch> {
        let nonce = self.nonces.as_mut().map_or(0, Nonces::next);
        let bytes = |work: &WorkItem| self.ns.format.transfer_bytes(work.blocks.into()).unwrap_or(u64::MAX);
        let item = |(work, job, at): &(WorkItem, usize, u64)| Item {
            work: *work,
            job: *job,
            data: (*at, bytes(work)),
            recoveries: 0,
            due: None,
        };
        let items: Vec<_> = batch.works.iter().map(item).collect();
        self.mark(&items, nonce)?;
        let bytes = self.queues.launch_bytes(items.len(), self.meter.as_deref());
        // Memory that was allocated for a repeated batch may be shorter.
        let memory = match self.spare.launch.extract_if(.., |region| region.len() >= bytes).next() {
            Some(region) => region,
            None => {
                self.report.allocations += 1;
                self.queues.gpu.alloc(Place::PinnedHost, bytes)?
            }
        };
        let memory = self.queues.write_launch(&items, self.meter.as_deref(), memory)?;
        Ok(PreparedBatch { batch, items, memory, nonce, launched: Instant::now(), missing: Vec::new() })
    }

    /// Keeps the memory of a finished batch for the next one.
    fn reuse(&mut self, ended: PreparedBatch) {
        self.spare.lists.push(ended.batch.lists);
        self.spare.launch.push(ended.memory.region);
    }

    /// Takes all commands of these batches from the controller; returns the error that ended them.
    fn fail(&mut self, error: Error, batches: impl Iterator<Item = PreparedBatch>) -> Error {
        let mut batches: Vec<_> = batches.collect();
        let missing = !matches!(self.data_arrives(&mut batches), Ok(true));
        let error = match missing.then(|| self.queues.recover(MISSING.to_owned(), false)) {
            Some(Err(recovery)) => recovery,
            _ => error,
        };
        self.keep_if_dead(batches);
        error
    }

    /// A drive that could not be reset may still reach their memory.
    fn keep_if_dead(&self, batches: Vec<PreparedBatch>) {
        let drive = &self.queues.drive;
        if drive.state().dead.is_some() {
            let lists: Vec<_> = batches.into_iter().map(|batch| batch.batch.lists).collect();
            drive.quarantine.keep((lists, self.buffer.clone()));
        }
    }

    /// Waits for the data of batches that have ended. Those whose data does not come are repeated.
    fn settle(&mut self, mut batches: Vec<PreparedBatch>) -> Result<()> {
        let arrived = match self.data_arrives(&mut batches) {
            Ok(arrived) => arrived,
            Err(error) => return Err(self.fail(error, batches.into_iter())),
        };
        if !arrived {
            let now = Instant::now();
            if let Err(error) = self.queues.recover(MISSING.to_owned(), false) {
                self.keep_if_dead(batches);
                return Err(error);
            }
            if self.watcher.cancelled {
                return Err(self.cancelled(self.done));
            }
            let missing = batches.extract_if(.., |batch| !batch.missing.is_empty()).collect::<Vec<_>>();
            missing
                .into_iter()
                .try_for_each(|batch| self.carry_out_again(batch.batch, now - batch.launched))?;
        }
        batches.into_iter().for_each(|batch| self.reuse(batch));
        Ok(())
    }

    /// Repeats a batch whose data did not come, after a reset. `waited` is how long it was waited for.
    fn carry_out_again(&mut self, mut batch: CommandBatch, mut waited: Duration) -> Result<()> {
        let drive = &self.queues.drive;
        // All of it was reported before.
        self.watcher.reported = batch.bytes;
        for _ in 0..drive.options.retries {
            if !self.watcher.goes_on() {
                return Err(self.cancelled(self.done));
            }
            self.report.retries += 1;
            let mut current = self.ready(batch)?;
            let ended =
                self.start_launch(&mut current).and_then(|started| self.finish(started, &mut current));
            if let Err(error) = ended {
                return Err(self.fail(error, [current].into_iter()));
            }
            let mut current = [current];
            match self.data_arrives(&mut current) {
                Ok(true) => {
                    current.into_iter().for_each(|batch| self.reuse(batch));
                    self.watcher.reported = 0;
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) => return Err(self.fail(error, current.into_iter())),
            }
            let [current] = current;
            waited = current.launched.elapsed();
            let recovered = self.queues.recover(MISSING.to_owned(), false);
            if let Err(error) = recovered {
                self.keep_if_dead(vec![current]);
                return Err(error);
            }
            batch = current.batch;
        }
        let command = format!("a GPU-driven read of {} namespace {}", drive.name(), self.ns.nsid);
        Err(Error::DataMissing { command, waited })
    }

    /// Marks the memory of guarded reads.
    fn mark(&self, items: &[Item], nonce: u64) -> Result<()> {
        if self.nonces.is_none() {
            return Ok(());
        }
        let mut ranges = Vec::new();
        items.iter().for_each(|item| join(&mut ranges, item.data));
        let place = |range: &(u64, u64)| self.canary(*range, nonce).place(self.buffer, self.patience());
        let marked = ranges.iter().try_for_each(place);
        marked.map_err(|error| self.queues.drive.control.or_interrupted(self.unmarked("mark memory", &error)))
    }

    /// How long the GPU may take for marks: as long as for a command, within the job's limit.
    fn patience(&self) -> Duration {
        let setup = &self.queues.setup;
        let left = setup.limit.saturating_sub(self.start.elapsed());
        let longest = self.queues.longest_idle_time().min(left.max(setup.stall));
        if self.watcher.cancelled { longest.min(STOP_PATIENCE) } else { longest }
    }

    /// The error of a GPU that did not mark its memory in time, with the likely cause.
    fn unmarked(&self, what: &str, error: &Error) -> Error {
        Error::Gpu(format!(
            "{} did not {what} for a read: {error}. Another kernel may occupy the whole GPU: a kernel that waits for this \
             transfer must leave room for it",
            self.queues.gpu.name()
        ))
    }

    fn canary(&self, (offset, len): (u64, u64), nonce: u64) -> Canary {
        Canary::new(self.buffer, offset, len, nonce)
    }

    /// Whether all data of a batch that has ended is there.
    ///
    /// # Errors
    /// When the GPU fails to check, and every time after that.
    fn look_for_data(&mut self, batch: &mut PreparedBatch) -> Result<bool> {
        if self.nonces.is_none() {
            batch.missing.clear();
        }
        if self.blind && !batch.missing.is_empty() {
            return Err(Error::Gpu("it is unknown whether the data of a read has arrived".to_owned()));
        }
        let (nonce, patience, mut failed) = (batch.nonce, self.patience(), None);
        batch.missing.retain(|range| {
            if failed.is_some() {
                return true;
            }
            let gone = self.canary(*range, nonce).is_gone(self.buffer, patience);
            !gone.unwrap_or_else(|error| {
                failed = Some(error);
                false
            })
        });
        match failed {
            None => Ok(batch.missing.is_empty()),
            Some(error) => {
                self.blind = true;
                Err(self.unmarked("look for data", &error))
            }
        }
    }

    /// Waits until all data of batches that have ended is there; false if it does not come, or not soon once the job was
    /// cancelled.
    ///
    /// # Errors
    /// When the GPU fails to check.
    fn data_arrives(&mut self, batches: &mut [PreparedBatch]) -> Result<bool> {
        let (start, stall) = (Instant::now(), self.queues.setup.stall);
        for batch in batches {
            if self.look_for_data(batch)? {
                continue;
            }
            self.report.late_data += batch.missing.len() as u64;
            while !self.look_for_data(batch)? {
                let patience = if self.watcher.goes_on() { stall } else { stall.min(CANCEL_GRACE) };
                if start.elapsed() >= patience {
                    return Ok(false);
                }
                std::thread::yield_now();
            }
        }
        Ok(true)
    }

    fn start_launch(&mut self, batch: &mut PreparedBatch) -> Result<StartedLaunch> {
        let queues = self.queues;
        let over = |run: &Self| run.stopped(batch, format!("its {:?} were over", queues.setup.limit));
        // No delay exceeds what a clock counts.
        let end = self.start.checked_add(queues.setup.limit);
        if end.is_some_and(|end| Instant::now() >= end) {
            return Err(over(self));
        }
        let gpu = self.meter.as_deref().map_or(&*queues.gpu, |meter| meter.gpu);
        let at = Instant::now();
        // A kernel cannot mark memory again before a retry.
        let retries = if self.nonces.is_some() { 0 } else { queues.drive.options.retries };
        let count = (batch.items.len() as u32, retries);
        let started = queues.start(gpu, self.ns, count, &batch.memory, end)?;
        let (running, limit) = started.ok_or_else(|| over(self))?;
        batch.launched = at;
        self.report.launches += 1;
        Ok(StartedLaunch { running, at, limit })
    }

    /// Waits for a launch, and launches again until every command has an end.
    fn finish(&mut self, mut started: StartedLaunch, batch: &mut PreparedBatch) -> Result<()> {
        let queues = self.queues;
        loop {
            let StartedLaunch { running, at, limit } = started;
            let count = batch.items.len() as u32;
            let (watcher, items) = (&mut self.watcher, &batch.items);
            let left: u64 = items.iter().map(|item| item.data.1).sum();
            let before = batch.batch.bytes.saturating_sub(left);
            let mut progress = |memory: &LaunchMemory| watcher.report(before + moved(items, memory));
            let watching = Watching { limit, progress: &mut progress };
            let (exits, took) = queues.finish(running, &batch.memory, count, watching)?;
            self.report.kernel_time += took;
            let metered = self.meter.as_deref_mut().map(|meter| meter.read(&batch.items, &batch.memory));
            // An unexpected completion explains more than the other exits that it led to.
            let unexpected = exits.iter().find(|exit| matches!(exit, Exit::UnexpectedCompletion(_)));
            let exit = unexpected.or_else(|| exits.iter().find(|exit| **exit != Exit::Finished));
            batch.items = self.read_outcomes(batch, exit.is_some())?;
            let again = &batch.items;
            if let Some(exit) = exit {
                match unexpected {
                    Some(_) => self.doubts.unexpected += 1,
                    None => self.doubts.losses += 1,
                }
                let waited = at.elapsed();
                let recovery =
                    queues.recover(format!("a GPU launch that ended with {exit:?}"), unexpected.is_none())?;
                if self.watcher.cancelled && !again.is_empty() {
                    return Err(self.cancelled(self.ended(batch)));
                }
                if let Some(item) = again.iter().find(|item| item.recoveries > queues.drive.options.retries) {
                    // The first try is no retry.
                    let (command, retries) = (self.describe(&item.work), item.recoveries - 1);
                    return Err(Error::TimedOut { command, waited, retries, recovery });
                }
            } else if again.iter().any(|item| item.due.is_none()) {
                let cause = "a GPU launch that left commands without an outcome";
                queues.recover(cause.to_owned(), true)?;
                return Err(self.stopped(batch, format!("it was {cause}; this is a defect of onehop")));
            }
            // Not earlier: after a launch that ended early, the controller still has commands.
            metered.transpose()?;
            if again.is_empty() {
                return Ok(());
            }
            // Nothing is begun after the job's limit.
            let end = self.start.checked_add(queues.setup.limit);
            let due = again.iter().filter_map(|item| item.due).max();
            let due = due.map(|due| end.map_or(due, |end| due.min(end)));
            if self.watcher.cancelled || due.is_some_and(|due| !self.watcher.sleep_until(due)) {
                return Err(self.cancelled(self.ended(batch)));
            }
            // An earlier try may have brought a part of the data.
            self.mark(again, batch.nonce)?;
            let region = batch.memory.region.clone();
            batch.memory = queues.write_launch(again, self.meter.as_deref(), region)?;
            started = self.start_launch(batch)?;
        }
    }

    fn describe(&self, work: &WorkItem) -> String {
        describe(self.op.name(), self.queues.drive.name(), self.ns.nsid, work.lba, work.blocks)
    }

    /// The error of a job that its caller cancelled after `done` commands.
    fn cancelled(&self, done: u64) -> Error {
        self.queues.drive.control.or_interrupted(Error::Cancelled { done, count: self.count })
    }

    fn stopped(&self, batch: &PreparedBatch, why: String) -> Error {
        Error::Launch { done: self.ended(batch), count: self.count, why }
    }

    /// How many commands have ended, with those of the current batch.
    fn ended(&self, batch: &PreparedBatch) -> u64 {
        self.done + (batch.batch.works.len() - batch.items.len()) as u64
    }

    /// Counts the commands that ended, and returns those that did not or must be tried again. `is_cut_off`: the kernel ended
    /// before its commands did.
    fn read_outcomes(&mut self, batch: &mut PreparedBatch, is_cut_off: bool) -> Result<Vec<Item>> {
        let PreparedBatch { items, memory, missing, .. } = batch;
        let drive = &self.queues.drive;
        let delays = retry_delays(drive);
        let mut again = Vec::new();
        let mut failed = None;
        for (i, mut item) in items.drain(..).enumerate() {
            let at = memory.outcomes + i * ItemOutcome::BYTES as usize;
            // Retries of earlier launches are counted already; an item that was never started has no count.
            let retries = memory.region.word(at + 4)?.max(item.work.tries());
            let has_failed = retries > item.work.tries();
            self.report.retries += u64::from(retries - item.work.tries());
            item.work = item.work.with_tries(retries);
            item.due = None;
            match ItemOutcome::from_word(memory.region.word(at)?) {
                ItemOutcome::Done(status) if status.is_ok() => join(missing, item.data),
                // Only where the kernel does not try it again itself.
                ItemOutcome::Done(status) if may_retry(status) && retries < drive.options.retries => {
                    item.due = Some(Instant::now() + delays[usize::from(status.crd())]);
                    item.work = item.work.with_tries(retries + 1);
                    self.report.retries += 1;
                    again.push(item);
                }
                ItemOutcome::Done(status) => {
                    let command = self.describe(&item.work);
                    failed = failed.or(Some(Error::Command { command, status }));
                }
                ItemOutcome::Pending => {
                    // The kernel waited to retry it. Neither its CRD nor when it failed is known: the longest delay covers
                    // what is left.
                    if is_cut_off && has_failed {
                        item.due = delays.into_iter().max().map(|delay| Instant::now() + delay);
                    }
                    again.push(item);
                }
                ItemOutcome::Unknown => {
                    item.recoveries += 1;
                    self.report.retries += 1;
                    again.push(item);
                }
            }
        }
        match failed {
            // The controller must have no command left when a caller learns that its job failed.
            Some(error) if again.is_empty() => Err(error),
            Some(error) => {
                let cause = "a GPU launch that left commands behind a failed one".to_owned();
                self.queues.recover(cause, true).and(Err(error))
            }
            None => Ok(again),
        }
    }
}

/// Bytes of the items that have succeeded by now.
fn moved(items: &[Item], memory: &LaunchMemory) -> u64 {
    let ended = items.iter().zip(memory.outcomes(items.len() as u32));
    let well = ended.filter(|(_, outcome)| matches!(outcome, ItemOutcome::Done(status) if status.is_ok()));
    well.map(|(item, _)| item.data.1).sum()
}

/// Adds a range, to its neighbour where it has one.
fn join(ranges: &mut Vec<(u64, u64)>, (at, len): (u64, u64)) {
    match ranges.last_mut() {
        Some((start, before)) if *start + *before == at => *before += len,
        _ => ranges.push((at, len)),
    }
}
