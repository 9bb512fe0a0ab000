//! The threads that copy out of the page cache, or read from a server, into the ring's slots.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use onehop_os::HostMem;

use super::choice::{Opened, Origin};
use super::crew::Shared;
use super::desk::{Desk, Full};
use crate::error::{Error, Result};
use crate::plan::{Chunk, Read};

/// One of them.
pub(super) struct Filler {
    pub(super) index: usize,
    pub(super) ring: HostMem,
    pub(super) slot_bytes: usize,
    pub(super) desk: Arc<Desk>,
}

impl Filler {
    pub(super) fn run(&self, shared: &Shared) -> Result<()> {
        while let Some(slot) = self.desk.slot(self.index, shared)?
            && let Some(job) = shared.next()
        {
            self.fill(shared, slot, &job.chunk)?;
            self.desk.hand_in(Full { slot, job, filler: self.index })?;
        }
        self.desk.finish(shared)
    }

    fn fill(&self, shared: &Shared, slot: usize, chunk: &Chunk) -> Result<()> {
        let Some(source) = shared.sources.get(chunk.file) else { return Err(Error::Incomplete) };
        for read in &chunk.reads {
            let to = slot * self.slot_bytes + read.slot as usize;
            match &source.origin {
                Origin::Local(file) => {
                    self.read_cached(to, source, file, read)?;
                    shared.cached_bytes.fetch_add(read.valid, Ordering::Relaxed);
                }
                Origin::Server(server) => {
                    let mut take = |at: u64, data: &[u8]| {
                        Ok(self.ring.write(to + at as usize, data).map_err(onehop_gpu::Error::from)?)
                    };
                    let go_on = || !shared.is_stopped();
                    let retries = server.fetch(read.offset, read.valid, &go_on, &mut take)?;
                    shared.retries.fetch_add(retries, Ordering::Relaxed);
                    shared.remote_bytes.fetch_add(read.valid, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    fn read_cached(&self, to: usize, source: &Opened, file: &File, read: &Read) -> Result<()> {
        let wanted = read.valid as usize;
        let failed = |source: std::io::Error, name: &str| Error::Read {
            file: name.into(),
            offset: read.offset,
            bytes: read.valid,
            source,
        };
        let got = self
            .ring
            .read_file(to, wanted, file, read.offset)
            .map_err(|e| failed(std::io::Error::other(e), &source.name))?;
        if got < wanted {
            return Err(Error::Ended {
                file: source.name.clone(),
                offset: read.offset,
                bytes: read.valid,
                length: source.bytes,
            });
        }
        Ok(())
    }
}
