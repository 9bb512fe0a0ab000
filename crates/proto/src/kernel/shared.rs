//! Shared mode: each thread carries out its own items on a queue pair that all threads share.

use super::{Exit, Job, Outcome};
use crate::queue::{Bounds, Done, Memory, Shared, SubmitError};

/// Carries out the items `first`, `first + stride` … of a job, one after the other.
pub fn run_shared<M: Memory>(mem: &M, queue: &Shared<M>, job: &Job<M>, first: u32, stride: u32) -> Exit {
    let mut item = first;
    while item < job.count {
        if let Err(exit) = carry_out(mem, queue, job, item) {
            return exit;
        }
        item = item.saturating_add(stride.max(1));
    }
    Exit::Finished
}

fn carry_out<M: Memory>(mem: &M, queue: &Shared<M>, job: &Job<M>, item: u32) -> Result<(), Exit> {
    let sqe = job.command(mem, item);
    let mut retries = 0;
    loop {
        let bounds =
            Bounds { deadline: job.deadline.min(mem.now().saturating_add(job.stall)), poison: job.poison };
        let in_doubt = |stop| {
            Outcome::InDoubt.store(mem, job, item, retries);
            Exit::from(stop)
        };
        let token = match queue.submit(mem, &sqe, &bounds) {
            Ok(token) => token,
            Err(SubmitError::Stopped(stop)) => return Err(stop.into()),
            Err(SubmitError::InDoubt(stop)) => return Err(in_doubt(stop)),
        };
        let Done { status, .. } = queue.wait(mem, &token, &bounds).map_err(in_doubt)?;
        if !job.again(status, retries) {
            Outcome::Done(status).store(mem, job, item, retries);
            return Ok(());
        }
        retries += 1;
        let due = job.due(mem, status);
        let bounds = Bounds { deadline: job.deadline, poison: job.poison };
        while mem.now() < due {
            bounds.check(mem)?;
            if !queue.drain(mem) {
                mem.pause();
            }
        }
    }
}
