//! A thread that copies out of the page cache, or reads from a server: it fills one slot while the other is on its way to the GPU.

use std::fs::File;
use std::sync::atomic::Ordering;

use super::SLOTS;
use super::choice::{Opened, Origin};
use super::crew::{Job, Lane, Marks, Shared};
use crate::error::{Error, Result};
use crate::plan::{Chunk, Read};

pub(super) fn run(shared: &Shared, lane: &mut Lane) -> Result<()> {
    let mut slots: [Option<(Marks, Job)>; SLOTS] = [const { None }; SLOTS];
    let mut at = 0;
    while let Some(job) = shared.next() {
        settle(lane, &mut slots[at])?;
        fill(shared, lane, at, &job.chunk)?;
        slots[at] = Some((lane.copy(at, &job)?, job));
        at = (at + 1) % SLOTS;
    }
    for _ in 0..SLOTS {
        settle(lane, &mut slots[at])?;
        at = (at + 1) % SLOTS;
    }
    Ok(())
}

/// Waits until a slot may be filled again, and tells that what was in it has arrived.
fn settle(lane: &mut Lane, slot: &mut Option<(Marks, Job)>) -> Result<()> {
    if let Some((marks, job)) = slot.take() {
        lane.wait(&marks)?;
        lane.tell(job);
    }
    Ok(())
}

fn fill(shared: &Shared, lane: &Lane, slot: usize, chunk: &Chunk) -> Result<()> {
    let Some(source) = shared.sources.get(chunk.file) else { return Err(Error::Incomplete) };
    for read in &chunk.reads {
        let to = slot * lane.slot + read.slot as usize;
        match &source.origin {
            Origin::Local(file) => {
                from_cache(lane, to, source, file, read)?;
                shared.cached_bytes.fetch_add(read.valid, Ordering::Relaxed);
            }
            Origin::Server(server) => {
                let mut take = |at: u64, data: &[u8]| {
                    Ok(lane.ring.write(to + at as usize, data).map_err(onehop_gpu::Error::from)?)
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

fn from_cache(lane: &Lane, to: usize, source: &Opened, file: &File, read: &Read) -> Result<()> {
    let wanted = read.valid as usize;
    let failed = |source: std::io::Error, name: &str| Error::Read {
        file: name.into(),
        offset: read.offset,
        bytes: read.valid,
        source,
    };
    let got = lane
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
