//! Shared mode: each thread executes its own items on a queue pair that all threads share.

use super::{Exit, ItemOutcome, Job};
use crate::queue::{Bounds, Drained, Memory, Shared, SubmitError};

/// Executes the items `first`, `first + stride` … of a job, one after the other.
pub fn run_shared<M: Memory>(mem: &M, queue: &Shared<M>, job: &Job<M>, first: u32, stride: u32) -> Exit {
    // A launch that begins late, after the host has abandoned it, rings no doorbell.
    if let Err(stop) = (Bounds { deadline: job.deadline, poison: job.poison }).check(mem) {
        return stop.into();
    }
    let mut item = first;
    while item < job.count {
        if let Err(exit) = run_item(mem, queue, job, item) {
            return exit;
        }
        item = item.saturating_add(stride.max(1));
    }
    Exit::Finished
}

fn run_item<M: Memory>(mem: &M, queue: &Shared<M>, job: &Job<M>, item: u32) -> Result<(), Exit> {
    let work = job.work(mem, item);
    let (sqe, mut retries) = (work.command(job.nsid), work.tries());
    loop {
        let bounds =
            Bounds { deadline: job.deadline.min(mem.now().saturating_add(job.stall)), poison: job.poison };
        let left = |outcome: ItemOutcome, stop| {
            outcome.store(mem, job, item, retries);
            Exit::from(stop)
        };
        let token = queue.submit(mem, &sqe, &bounds).map_err(|error| match error {
            SubmitError::Stopped(stop) => left(ItemOutcome::Pending, stop),
            SubmitError::OutcomeUnknown(stop) => left(ItemOutcome::Unknown, stop),
        })?;
        let status = queue.wait(mem, &token, &bounds).map_err(|stop| left(ItemOutcome::Unknown, stop))?;
        if !job.again(status, retries) {
            ItemOutcome::Done(status).store(mem, job, item, retries);
            return Ok(());
        }
        retries += 1;
        let due = job.due(mem, status);
        let bounds = Bounds { deadline: job.deadline, poison: job.poison };
        while mem.now() < due {
            if let Err(stop) = bounds.check(mem) {
                ItemOutcome::Pending.store(mem, job, item, retries);
                return Err(stop.into());
            }
            if queue.drain(mem) != Drained::Some {
                mem.pause();
            }
        }
    }
}
