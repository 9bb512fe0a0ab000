//! The threads that copy out of the page cache, or read from a server, into the ring's slots.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use onehop_os::HostMem;

use super::choice::{Opened, Origin, mostly_cached};
use super::crew::{Job, Shared};
use super::desk::{Desk, Full};
use crate::error::{Error, Result};
use crate::plan::Chunk;

/// One of them.
pub(super) struct Filler {
    pub(super) index: usize,
    pub(super) ring: HostMem,
    pub(super) slot_bytes: usize,
    pub(super) desk: Arc<Desk>,
    /// To whom it hands chunks that are not in the page cache.
    pub(super) disk: Option<Sender<Job>>,
}

impl Filler {
    pub(super) fn run(&self, shared: &Shared) -> Result<()> {
        while let Some(slot) = self.desk.slot(self.index, shared)?
            && let Some(job) = self.fill(shared, slot)?
        {
            let arrived = Some(job.chunk.clone());
            self.desk.hand_in(Full { slot, filler: self.index, job, arrived })?;
        }
        self.desk.finish(shared)
    }

    /// Fills a slot with the next chunk that is not the disk's; none when there are no more, or the load was given up.
    fn fill(&self, shared: &Shared, slot: usize) -> Result<Option<Job>> {
        while let Some(job) = shared.next() {
            if self.read(shared, slot, &job.chunk)? {
                return Ok(Some(job));
            }
            if self.disk.as_ref().is_none_or(|disk| disk.send(job).is_err()) {
                // Whoever reads there has ended, and has told why.
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Reads a chunk, unless it is sooner read past the page cache.
    fn read(&self, shared: &Shared, slot: usize, chunk: &Chunk) -> Result<bool> {
        let Some(source) = shared.sources.get(chunk.file) else { return Err(Error::Incomplete) };
        let valid = chunk.reads.iter().map(|read| read.valid).sum();
        match &source.origin {
            Origin::Local(file) => {
                if !self.read_local(slot, source, file, chunk)? {
                    return Ok(false);
                }
                shared.cached_bytes.fetch_add(valid, Ordering::Relaxed);
            }
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
                shared.remote_bytes.fetch_add(valid, Ordering::Relaxed);
            }
        }
        Ok(true)
    }

    /// The same of a file. The kernel is asked what it has of the chunk right before it is read: to ask for all of 16 GiB
    /// beforehand takes some milliseconds.
    fn read_local(&self, slot: usize, source: &Opened, file: &File, chunk: &Chunk) -> Result<bool> {
        if source.direct.is_some() && !mostly_cached(file, chunk) {
            return Ok(false);
        }
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
        Ok(true)
    }
}
