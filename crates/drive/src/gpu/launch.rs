//! Launches: what a kernel is given, how it is watched, and what is done when it fails.

use std::sync::atomic::Ordering;
use std::time::Duration;

use onehop_gpu::{Gpu, KernelJob, Launch, Place, Region, Running};
use onehop_proto::kernel::{Exit, Outcome, Work};
use onehop_proto::queue::NO_CID;

use super::meter::Meter;
use super::{GpuMode, GpuQueues, Item, poison};
use crate::slots::retry_delays;
use crate::{Error, Namespace, Result};

/// The memory of one launch.
pub(super) struct LaunchMemory {
    pub(super) region: Region,
    works: usize,
    pub(super) outcomes: usize,
}

impl GpuQueues {
    pub(super) fn write_launch(&self, items: &[Item], meter: Option<&Meter<'_>>) -> Result<LaunchMemory> {
        let works = 0;
        let outcomes = items.len() * Work::BYTES as usize;
        let count = items.len() as u32;
        let ends = u64::from(count) * u64::from(Outcome::BYTES);
        let bytes = outcomes + meter.map_or(ends, |meter| meter.end(count)) as usize;
        let region = self.gpu.alloc(Place::PinnedHost, bytes)?;
        for (i, item) in items.iter().enumerate() {
            let mut words = [0; Work::BYTES as usize];
            for (to, word) in words.chunks_exact_mut(4).zip(item.work.words()) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            region.write(works + i * Work::BYTES as usize, &words)?;
        }
        Ok(LaunchMemory { region, works, outcomes })
    }

    /// Runs a kernel to its end. When this fails, the controller has let go of what the kernel gave it.
    pub(super) fn launch(
        &self,
        gpu: &dyn Gpu,
        ns: &Namespace,
        count: u32,
        memory: &LaunchMemory,
        limit: Duration,
    ) -> Result<Vec<Exit>> {
        let started = {
            let mut state = self.drive.alive()?;
            // A reset since the last launch may have found another namespace; the next one has to wait for the state.
            ns.check(&self.drive.control)?;
            let queues = self.cell.ensure(&self.drive, &mut state, &*self.gpu)?;
            let job = KernelJob {
                works: memory.region.addr().plus(memory.works as u64),
                outcomes: memory.region.addr().plus(memory.outcomes as u64),
                count,
                nsid: ns.nsid,
                retries: self.drive.options.retries,
                retry_delay: retry_delays(&self.drive),
                stall: self.setup.stall,
                limit,
                poison: self.cell.poison_addr(),
            };
            let launch = match self.setup.mode {
                GpuMode::Owner => Launch::Owner(queues),
                GpuMode::Shared { threads } => Launch::Shared(queues, threads),
            };
            let started = gpu.launch(&launch, &job);
            self.cell.running.store(started.is_ok(), Ordering::Release);
            started
        };
        let exits = started.map_err(Error::from).and_then(|running| self.watch(running));
        if let Err(error) = &exits {
            // Nobody knows what it handed over before it failed.
            self.recover(format!("a GPU launch that failed: {error}"), true)?;
        }
        exits
    }

    /// Waits for a launch, and ends it when the controller fails.
    fn watch(&self, running: Box<dyn Running>) -> Result<Vec<Exit>> {
        while !running.is_done() {
            std::thread::sleep(Duration::from_micros(200));
            match self.drive.control.status() {
                Ok(status) if !status.cfs() => {}
                _ => self.cell.poison(poison::FAILED),
            }
            if let Ok(mut state) = self.drive.admin.try_lock() {
                // What the drive has to tell is only noted: somebody who asks for events has it served.
                state.admin.look();
            }
        }
        let exits = running.join();
        self.cell.running.store(false, Ordering::Release);
        let mut exits = exits?;
        if self.cell.has_strays()? {
            exits.push(Exit::Stray(NO_CID));
        }
        Ok(exits)
    }
}
