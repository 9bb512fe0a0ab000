//! A job under way: its commands are launched until each has ended, and its data waited for.

use std::time::Instant;

use onehop_proto::kernel::{Exit, Outcome, Work};

use super::launch::LaunchMemory;
use super::meter::Meter;
use super::plan::{Batch, Plan};
use super::{GpuQueues, GpuReport, Spare};
use crate::canary::{Canary, Nonces};
use crate::command::describe;
use crate::{Buffer, Error, Namespace, Op, Result};

/// A command of a job, and how it stands.
pub(super) struct Item {
    pub(super) work: Work,
    /// The job that it belongs to.
    pub(super) job: usize,
    /// Where in the buffer its data starts, and how long it is.
    data: (u64, u64),
    recoveries: u32,
}

/// A job under way.
pub(super) struct Run<'a, 'm> {
    queues: &'a GpuQueues,
    op: Op,
    ns: &'a Namespace,
    buffer: &'a Buffer,
    /// Where times are to be taken.
    meter: Option<&'a mut Meter<'m>>,
    start: Instant,
    /// Where reads are guarded, the nonce of the batch.
    nonces: Option<Nonces>,
    nonce: u64,
    /// Commands in all.
    count: u64,
    /// Ranges of the buffer whose commands have succeeded since the batch began, neighbours joined.
    succeeded: Vec<(u64, u64)>,
    spare: &'a mut Spare,
    report: GpuReport,
}

impl<'a, 'm> Run<'a, 'm> {
    pub(super) fn new(
        queues: &'a GpuQueues,
        op: Op,
        ns: &'a Namespace,
        buffer: &'a Buffer,
        meter: Option<&'a mut Meter<'m>>,
        spare: &'a mut Spare,
    ) -> Self {
        let guarded = queues.drive.options.canary && op == Op::Read;
        Self {
            queues,
            op,
            ns,
            buffer,
            meter,
            start: Instant::now(),
            nonces: guarded.then(Nonces::new),
            nonce: 0,
            count: 0,
            succeeded: Vec::new(),
            spare,
            report: GpuReport::default(),
        }
    }

    pub(super) fn batches(mut self, plan: &mut Plan<'_>) -> Result<GpuReport> {
        self.report = GpuReport { bytes: plan.bytes, commands: plan.commands, ..GpuReport::default() };
        self.count = plan.commands;
        while let Some(batch) = plan.next_batch(&mut self.spare.lists)? {
            self.report.allocations += u64::from(batch.is_new);
            match self.batch(&batch) {
                Ok(()) => self.spare.lists = Some(batch.lists),
                Err(error) => {
                    self.keep_if_dead(batch);
                    return Err(error);
                }
            }
        }
        self.report.took = self.start.elapsed();
        Ok(self.report)
    }

    /// A drive that could not be reset may still reach what it was given.
    fn keep_if_dead(&self, batch: Batch) {
        let drive = &self.queues.drive;
        if drive.state().dead.is_some() {
            drive.kept.keep((batch.lists, self.buffer.clone()));
        }
    }

    /// Carries commands out. When this returns, the controller has let go of them and of their memory, or the drive is dead.
    fn batch(&mut self, batch: &Batch) -> Result<()> {
        let mut tries = 0;
        loop {
            let result = self.commands(batch);
            let missing = !self.data_arrives();
            if missing {
                let cause = "a GPU-driven read that was completed without its data".to_owned();
                self.queues.recover(cause, false)?;
            }
            result?;
            if !missing {
                return Ok(());
            }
            let drive = &self.queues.drive;
            if tries == drive.options.retries {
                let command = format!("a GPU-driven read of {} namespace {}", drive.name(), self.ns.nsid);
                return Err(Error::DataMissing { command, waited: self.queues.setup.stall });
            }
            tries += 1;
            self.report.retries += 1;
        }
    }

    fn commands(&mut self, batch: &Batch) -> Result<()> {
        self.succeeded.clear();
        self.nonce = self.nonces.as_mut().map_or(0, Nonces::next);
        let format = &self.ns.format;
        let bytes = |work: &Work| format.transfer_bytes(work.blocks.into()).unwrap_or(u64::MAX);
        let item = |(work, job, at): &(Work, usize, u64)| Item {
            work: *work,
            job: *job,
            data: (*at, bytes(work)),
            recoveries: 0,
        };
        let mut left: Vec<_> = batch.works.iter().map(item).collect();
        self.mark(&left)?;
        self.launch_all(&mut left)
    }

    /// Marks the memory of reads, where they are guarded.
    fn mark(&self, items: &[Item]) -> Result<()> {
        if self.nonces.is_none() {
            return Ok(());
        }
        let mut ranges = Vec::new();
        items.iter().for_each(|item| join(&mut ranges, item.data));
        ranges.iter().try_for_each(|range| self.canary(*range).place(self.buffer))
    }

    fn canary(&self, (offset, len): (u64, u64)) -> Canary {
        Canary::new(self.buffer, offset, len, self.nonce)
    }

    /// Waits until the data of all reads that succeeded has arrived; false if it does not.
    fn data_arrives(&mut self) -> bool {
        if self.nonces.is_none() {
            return true;
        }
        let (start, stall) = (Instant::now(), self.queues.setup.stall);
        for range in std::mem::take(&mut self.succeeded) {
            let canary = self.canary(range);
            if canary.is_gone(self.buffer) {
                continue;
            }
            self.report.late_data += 1;
            while !canary.is_gone(self.buffer) {
                if start.elapsed() >= stall {
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }

    /// Launches until every command has an end.
    fn launch_all(&mut self, left: &mut Vec<Item>) -> Result<()> {
        let queues = self.queues;
        while !left.is_empty() {
            let limit = queues.setup.limit.saturating_sub(self.start.elapsed());
            if limit.is_zero() {
                return Err(self.stopped(left, format!("its {:?} were over", queues.setup.limit)));
            }
            let meter = self.meter.as_deref_mut();
            let memory = queues.write_launch(left, meter.as_deref(), self.spare.launch.take())?;
            self.report.launches += 1;
            self.report.allocations += u64::from(memory.is_new);
            let begun = Instant::now();
            let gpu = meter.as_deref().map_or(&*queues.gpu, |meter| meter.gpu);
            let exits = queues.launch(gpu, self.ns, left.len() as u32, &memory, limit)?;
            if let Some(meter) = meter {
                meter.read(left, &memory)?;
            }
            let again = self.read_outcomes(left, &memory)?;
            self.spare.launch = Some(memory.region);
            // A stray completion says more than what it led to.
            let stray = exits.iter().find(|exit| matches!(exit, Exit::Stray(_)));
            let exit = stray.or_else(|| exits.iter().find(|exit| **exit != Exit::Finished));
            let Some(exit) = exit else {
                if again.is_empty() {
                    return Ok(());
                }
                let cause = "a GPU launch that left commands without an outcome";
                queues.recover(cause.to_owned(), true)?;
                return Err(self.stopped(&again, format!("it was {cause}; this is a defect of onehop")));
            };
            let waited = begun.elapsed();
            let recovery =
                queues.recover(format!("a GPU launch that ended with {exit:?}"), stray.is_none())?;
            if let Some(item) = again.iter().find(|item| item.recoveries > queues.drive.options.retries) {
                let (command, retries) = (self.describe(&item.work), item.recoveries);
                return Err(Error::TimedOut { command, waited, retries, recovery });
            }
            // An earlier try may have brought a part of the data.
            self.mark(&again)?;
            *left = again;
        }
        Ok(())
    }

    fn describe(&self, work: &Work) -> String {
        describe(self.op.name(), self.queues.drive.name(), self.ns.nsid, work.lba, work.blocks)
    }

    fn stopped(&self, left: &[Item], why: String) -> Error {
        Error::Launch { done: self.count.saturating_sub(left.len() as u64), count: self.count, why }
    }

    /// Adds up what ended and gives back what did not.
    fn read_outcomes(&mut self, items: &mut Vec<Item>, memory: &LaunchMemory) -> Result<Vec<Item>> {
        let mut again = Vec::new();
        let mut failed = None;
        for (i, mut item) in items.drain(..).enumerate() {
            let at = memory.outcomes + i * Outcome::BYTES as usize;
            // Earlier launches' are counted already; an item that was never started says nothing.
            let retries = memory.region.word(at + 4)?.max(item.work.tries());
            self.report.retries += u64::from(retries - item.work.tries());
            item.work = item.work.with_tries(retries);
            match Outcome::from_word(memory.region.word(at)?) {
                Outcome::Done(status) if status.is_ok() => join(&mut self.succeeded, item.data),
                Outcome::Done(status) => {
                    let command = self.describe(&item.work);
                    failed = failed.or(Some(Error::Command { command, status }));
                }
                Outcome::Pending => again.push(item),
                Outcome::InDoubt => {
                    item.recoveries += 1;
                    self.report.retries += 1;
                    again.push(item);
                }
            }
        }
        match failed {
            // Nothing may be left in the controller's hands when a caller learns that its job failed.
            Some(error) if again.is_empty() => Err(error),
            Some(error) => {
                let cause = "a GPU launch that left commands behind a failed one".to_owned();
                self.queues.recover(cause, true).and(Err(error))
            }
            None => Ok(again),
        }
    }
}

/// Adds a range, to its neighbour where it has one.
fn join(ranges: &mut Vec<(u64, u64)>, (at, len): (u64, u64)) {
    match ranges.last_mut() {
        Some((start, before)) if *start + *before == at => *before += len,
        _ => ranges.push((at, len)),
    }
}
