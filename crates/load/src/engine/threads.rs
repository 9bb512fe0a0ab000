//! Threads that copy from the page cache, or read from a server, into the ring's slots.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use onehop_os::HostMem;

use super::choice::{LoadSource, Origin, cached};
use super::direct::UncachedQueue;
use super::narrow::pack;
use super::slot_pool::{Full, SlotPool};
use super::worker_pool::{LoadPart, LoadShared};
use crate::error::{Error, Result};
use crate::plan::Chunk;

/// Poll interval of a thread whose chunks for the disk exceed the queue.
const SLOT_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// One of these threads.
pub(super) struct Filler {
    pub(super) index: usize,
    pub(super) ring: HostMem,
    pub(super) slot_bytes: usize,
    pub(super) slots: Arc<SlotPool>,
    /// The queue for chunks that are not in the page cache.
    pub(super) disk: Option<UncachedQueue>,
}

impl Filler {
    pub(super) fn run(&self, shared: &LoadShared) -> Result<()> {
        let mut last = [None; 2];
        while let Some(slot) = self.slots.slot(self.index, || shared.is_stopped())?
            && let Some(chunk) = self.fill(shared, slot)?
        {
            let arrived = Some(chunk.clone());
            self.slots.hand_in(Full { slot, filler: self.index, part: LoadPart { chunk, arrived } })?;
            last = [Some(slot), last[0]];
        }
        // Nothing displaces them from this core's private caches any more.
        for slot in last.into_iter().flatten() {
            self.ring.demote(slot * self.slot_bytes, self.slot_bytes).map_err(onehop_gpu::Error::from)?;
        }
        self.slots.finish(|| shared.is_stopped())
    }

    /// Fills a slot with the next chunk that is not for the disk; `None` if there are no more, or the load was
    /// cancelled.
    fn fill(&self, shared: &LoadShared, slot: usize) -> Result<Option<Chunk>> {
        while let Some(mut chunk) = shared.next() {
            if !shared.wait_for_memory(&chunk, || self.slots.try_attend())? {
                return Ok(None);
            }
            if self.read(shared, slot, &chunk)? {
                pack(&self.ring, slot * self.slot_bytes, &mut chunk)?;
                return Ok(Some(chunk));
            }
            let Some(disk) = &self.disk else { return Err(Error::Incomplete) };
            while disk.is_full() && !shared.is_stopped() {
                std::thread::sleep(SLOT_POLL_INTERVAL);
                self.slots.try_attend()?;
            }
            if !disk.send(chunk) {
                // The readers have ended and reported why.
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Reads a chunk, unless it is faster to read it past the page cache.
    fn read(&self, shared: &LoadShared, slot: usize, chunk: &Chunk) -> Result<bool> {
        let Some(source) = shared.sources.get(chunk.file) else { return Err(Error::Incomplete) };
        match &source.origin {
            Origin::Local(file) => return self.read_local(shared, slot, source, file, chunk),
            Origin::Server(server) => {
                for read in &chunk.reads {
                    let to = slot * self.slot_bytes + read.slot as usize;
                    let mut take = |at: u64, data: &[u8]| {
                        Ok(self.ring.write(to + at as usize, data).map_err(onehop_gpu::Error::from)?)
                    };
                    let go_on = || !shared.is_stopped();
                    let retries = server.fetch(read.offset, read.valid, &go_on, &mut take)?;
                    shared.retries.fetch_add(retries, Ordering::Relaxed);
                }
                shared.remote_bytes.fetch_add(chunk.valid(), Ordering::Relaxed);
            }
        }
        Ok(true)
    }

    /// The same for a local file. The page cache is queried just before each read: a query for all of 16 GiB takes some
    /// milliseconds.
    fn read_local(
        &self,
        shared: &LoadShared,
        slot: usize,
        source: &LoadSource,
        file: &File,
        chunk: &Chunk,
    ) -> Result<bool> {
        let there = match cached(source, file, chunk) {
            // If less than half is cached, the disk is read in any case.
            Ok(there) if source.direct.is_some() && there * 2 < chunk.valid() => return Ok(false),
            Ok(there) => there,
            Err(why) => {
                shared.why_unknown.get_or_init(|| why.to_string());
                if source.direct.is_some() {
                    return Ok(false);
                }
                0
            }
        };
        for read in &chunk.reads {
            let (to, wanted) = (slot * self.slot_bytes + read.slot as usize, read.valid as usize);
            let got = self.ring.read_file(to, wanted, file, read.offset).map_err(|e| Error::Read {
                file: source.name.clone(),
                offset: read.offset,
                bytes: read.valid,
                source: std::io::Error::other(e),
            })?;
            if got < wanted {
                return Err(Error::Ended {
                    file: source.name.clone(),
                    offset: read.offset,
                    bytes: read.valid,
                    length: source.bytes,
                });
            }
        }
        shared.cached_bytes.fetch_add(there, Ordering::Relaxed);
        shared.through_bytes.fetch_add(chunk.valid() - there, Ordering::Relaxed);
        Ok(true)
    }
}
