//! Queues of other libraries, run by their own kernels against the same null controller as ours, with the same checks:
//! every entry by its seal, every identifier of a batch once, every command by its outcome, all of them by count.
//!
//! `peer.h`, beside this crate's manifest, describes the arguments of such kernels. This crate launches none of them
//! itself, because it cannot vouch for them. The caller does, with the function that starts a kernel.

use std::time::Duration;

use onehop_controller::layout::flag;
use onehop_gpu::cuda::{Arg, Shape, Started};
use onehop_gpu::{Gpu, Place, Region};

use crate::bed::{Bed, BedSize, Controller, NSID, RingsAt, wrong};
use crate::gpu::{GpuBench, LIMIT};
use crate::{Error, Result};

/// How long a launch may take. Their kernels have no limits of their own.
const LAUNCH_LIMIT: Duration = Duration::from_secs(5);
/// Entries of a ring at most.
const MOST_ENTRIES: u32 = 65_536;
/// Threads of a block at most.
const MOST_THREADS: u32 = 1024;

/// The kernels of `peer.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerKernel {
    /// Prepares the queues' accounts.
    Prepare,
    /// Runs commands.
    Run,
}

impl PeerKernel {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prepare => "peer_prepare",
            Self::Run => "peer_run",
        }
    }
}

/// What to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerPlan {
    /// How many queues.
    pub queues: u32,
    /// Threads on each.
    pub threads: u32,
    /// Threads of a block.
    pub block: u32,
    /// Entries of each ring.
    pub entries: u32,
    /// Bytes of each queue's account.
    pub space: usize,
    /// Commands of a launch: a multiple of all threads.
    pub commands: u32,
    /// Where the rings lie.
    pub rings: RingsAt,
    /// Whether each batch is completed last command first.
    pub reverse: bool,
    /// Where the controller runs.
    pub controller: Controller,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct PeerRun {
    /// Commands per second of each launch.
    pub rates: Vec<f64>,
    /// Cycles of a multiprocessor's clock in a second, in the last launch.
    pub clock: f64,
    /// Commands whose thread took another command's completion; counted only if requested.
    pub elsewhere: usize,
}

/// The names of the outcomes of `peer.h`.
const OUTCOMES: [&str; 4] = ["left undone", "done", "failed", "given another command's completion"];
const DONE: usize = 1;
const ELSEWHERE: usize = 3;

impl PeerPlan {
    /// All threads of a launch.
    #[must_use]
    pub const fn all_threads(&self) -> u32 {
        self.queues.saturating_mul(self.threads)
    }

    fn size(&self) -> Result<BedSize> {
        let all = self.all_threads();
        let fits = (1..=MOST_THREADS).contains(&self.block) && all > 0 && all.is_multiple_of(self.block);
        let fits = fits && (2..=MOST_ENTRIES).contains(&self.entries);
        if !fits || self.commands == 0 || !self.commands.is_multiple_of(all) {
            return Err(Error::Setup(format!(
                "{} threads in blocks of {} for {} commands on rings of {} entries: blocks have 1 to {MOST_THREADS} threads \
                 and divide them, they divide the commands, and rings have 2 to {MOST_ENTRIES} entries",
                all, self.block, self.commands, self.entries
            )));
        }
        let Self { queues, entries, commands, rings, space: control, .. } = *self;
        Ok(BedSize { queues, entries, window: entries - 1, control, commands, rings, times: 0 })
    }
}

/// The memory of a plan, and how its kernels are started.
struct Peer<'a, S> {
    bed: Bed,
    list: Region,
    cycles: Region,
    plan: PeerPlan,
    flags: u32,
    start: &'a S,
}

impl GpuBench {
    /// Runs `launches` launches of the other library's kernels. With `check`, they and the controller check everything
    /// that they can, and the rates mean nothing.
    ///
    /// `start` starts one of these kernels, which has been loaded before, and does not wait for it.
    ///
    /// # Errors
    /// When the GPU fails, or an entry or outcome is wrong.
    pub fn peer<S>(&self, plan: &PeerPlan, check: bool, launches: usize, start: &S) -> Result<PeerRun>
    where
        S: Fn(PeerKernel, Shape, Arg, Duration) -> onehop_gpu::Result<Started>,
    {
        let bed = Bed::new(&self.gpu, &plan.size()?)?;
        bed.write_works()?;
        let list = self.gpu.alloc(Place::Vram, queue_bytes(&bed).len())?;
        list.write(0, &queue_bytes(&bed))?;
        let cycles = self.gpu.alloc(Place::Vram, 8)?;
        let peer = Peer { bed, list, cycles, plan: *plan, flags: check.into(), start };
        peer.prepare()?;
        let reverse = if plan.reverse { flag::REVERSE } else { 0 };
        let flags = if check { reverse | flag::CHECK_CIDS } else { reverse };
        let controller = peer.bed.start(plan.controller, &self.run(flags, LIMIT))?;
        let mut run = PeerRun { rates: Vec::new(), clock: 0.0, elsewhere: 0 };
        let measured = (0..launches).try_for_each(|_| peer.launch(&mut run));
        peer.bed.end(controller, true)?;
        // The controller's report explains more than the error.
        let seen = peer.bed.check(u64::from(plan.commands) * launches as u64);
        if let Err(Error::Gpu(error)) = measured {
            // It may still be running, so its memory is not freed.
            std::mem::forget(peer);
            return Err(wrong(&format!("{error}; {seen:?}")));
        }
        seen.and(measured)?;
        Ok(run)
    }
}

impl<S> Peer<'_, S>
where
    S: Fn(PeerKernel, Shape, Arg, Duration) -> onehop_gpu::Result<Started>,
{
    fn prepare(&self) -> Result<()> {
        let shape = Shape { blocks: self.plan.queues, threads: 1, shared: 0 };
        (self.start)(PeerKernel::Prepare, shape, self.job(), LAUNCH_LIMIT)?.wait()?;
        Ok(())
    }

    fn launch(&self, run: &mut PeerRun) -> Result<()> {
        self.bed.outcomes.fill(0, self.bed.outcomes.len(), 0)?;
        let blocks = self.plan.all_threads() / self.plan.block;
        let shape = Shape { blocks, threads: self.plan.block, shared: 0 };
        let took = (self.start)(PeerKernel::Run, shape, self.job(), LAUNCH_LIMIT)?.wait()?.as_secs_f64();
        run.elsewhere += self.outcomes()?;
        run.rates.push(f64::from(self.plan.commands) / took);
        let mut cycles = [0; 8];
        self.cycles.read(0, &mut cycles)?;
        run.clock = u64::from_le_bytes(cycles) as f64 / took;
        Ok(())
    }

    fn job(&self) -> Arg {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (bed, plan) = (&self.bed, &self.plan);
        Arg::Words(Box::new([
            self.list.addr().0,
            bed.works.addr().0,
            bed.outcomes.addr().0,
            self.cycles.addr().0,
            pair(plan.queues, plan.threads),
            pair(plan.commands, NSID),
            self.flags.into(),
        ]))
    }

    /// How many completions went to another command's thread; an error if anything else went wrong.
    fn outcomes(&self) -> Result<usize> {
        let mut bytes = vec![0; self.plan.commands as usize * 4];
        self.bed.outcomes.read(0, &mut bytes)?;
        let mut counts = [0; OUTCOMES.len()];
        for outcome in bytes.chunks_exact(4) {
            let outcome = usize::from(outcome[0]);
            *counts.get_mut(outcome).ok_or_else(|| wrong(&format!("an outcome is {outcome}")))? += 1;
        }
        if counts[DONE] + counts[ELSEWHERE] == self.plan.commands as usize {
            return Ok(counts[ELSEWHERE]);
        }
        let list: Vec<_> = counts.iter().zip(OUTCOMES).map(|(n, what)| format!("{n} {what}")).collect();
        Err(wrong(&format!("of {} commands, {}", self.plan.commands, list.join(", "))))
    }
}

/// The queues, as `struct peer_queue` has them.
fn queue_bytes(bed: &Bed) -> Vec<u8> {
    let mut bytes = Vec::new();
    for queue in &bed.queues {
        for address in [queue.sq, queue.cq, queue.sq_door, queue.cq_door, queue.control] {
            bytes.extend(address.0.to_le_bytes());
        }
        bytes.extend(u64::from(queue.sq_entries).to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_plans_are_refused() {
        let plan = PeerPlan {
            queues: 2,
            threads: 64,
            block: 32,
            entries: 128,
            space: 0,
            commands: 256,
            rings: RingsAt::Vram,
            reverse: false,
            controller: Controller::Gpu,
        };
        assert!(plan.size().is_ok());
        for bad in [
            PeerPlan { queues: 0, ..plan },
            PeerPlan { threads: 0, ..plan },
            PeerPlan { block: 0, ..plan },
            PeerPlan { block: 48, ..plan },
            PeerPlan { block: 2048, threads: 1024, commands: 2048, ..plan },
            PeerPlan { entries: 1, ..plan },
            PeerPlan { commands: 0, ..plan },
            PeerPlan { commands: 255, ..plan },
            PeerPlan { queues: u32::MAX, threads: u32::MAX, ..plan },
        ] {
            assert!(matches!(bad.size(), Err(Error::Setup(_))), "{bad:?}");
        }
    }
}
