//! How the threads of a load that needs a ring are started.

use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use onehop_os::HostMem;

use super::SLOTS;
use super::crew::{Crew, Job, Lane, Shared};
use super::desk::Desk;
use super::direct::{Reader, Supply};
use super::threads::Filler;
use crate::error::Result;
use crate::plan::Chunk;

/// A load whose threads are being started. They need no GPU to begin with.
pub(super) struct Start<'a> {
    pub(super) crew: Crew,
    pub(super) arrived: &'a [Sender<Result<Chunk>>],
    pub(super) ring: &'a HostMem,
    /// Bytes of a slot for what the page cache has, and for the parts that are read past it.
    pub(super) slot: usize,
    pub(super) part: usize,
    /// A copy engine is best kept busy from one place; copies that the CPU makes itself go on side by side.
    pub(super) real: bool,
}

impl Start<'_> {
    fn memory(&self, range: Range<usize>) -> Result<HostMem> {
        Ok(self.ring.slice(range).map_err(onehop_gpu::Error::from)?)
    }

    /// The threads that copy out of the page cache. Gives their desks, each with its part of the ring.
    pub(super) fn fillers(
        &mut self,
        threads: usize,
        disk: Option<Sender<Job>>,
    ) -> Result<Vec<(Arc<Desk>, Range<usize>)>> {
        let fillers = if self.real { threads } else { threads.min(1) };
        let share = fillers * SLOTS * self.slot;
        let starts = (0..threads * SLOTS * self.slot).step_by(share.max(1));
        let desks: Vec<_> =
            starts.map(|start| (Arc::new(Desk::new(fillers, SLOTS)), start..start + share)).collect();
        for (desk, range) in &desks {
            for index in 0..fillers {
                let (ring, desk, disk) = (self.memory(range.clone())?, desk.clone(), disk.clone());
                let filler = Filler { index, ring, slot_bytes: self.slot, desk, disk };
                let fill = move |shared: &Shared| filler.run(shared);
                self.crew.spawn("reads cached bytes", self.arrived, fill)?;
            }
        }
        Ok(desks)
    }

    /// The threads that read past the page cache, into the ring's last part. Gives those that share a way to the GPU, which they
    /// wait for, each with its part of the ring.
    pub(super) fn readers(
        &mut self,
        first: usize,
        count: usize,
        supply: &Supply,
    ) -> Result<Vec<(Waiting, Range<usize>)>> {
        let together = if self.real { count } else { count.min(1) };
        let end = first + count * self.part;
        let shares = (first..end).step_by((together * self.part).max(1));
        shares
            .map(|start| {
                let waiting = (0..together).map(|index| {
                    let ((waiting, lane), at) = (channel(), start + index * self.part);
                    let ring = self.memory(at..at + self.part)?;
                    let reader = Reader { ring, supply: supply.clone(), lane, index };
                    let read = move |shared: &Shared| reader.run(shared);
                    self.crew.spawn("reads from the disk", self.arrived, read)?;
                    Ok(waiting)
                });
                Ok((waiting.collect::<Result<_>>()?, start..start + together * self.part))
            })
            .collect()
    }
}

/// Threads that wait for the way of their copies.
pub(super) type Waiting = Vec<Sender<Arc<Mutex<Lane>>>>;
