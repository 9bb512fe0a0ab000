//! A thread that copies out of the page cache: it fills one slot while the other is on its way to the GPU.

use std::sync::atomic::Ordering;

use super::SLOTS;
use super::crew::{Job, Lane, Marks, Shared};
use crate::error::{Error, Result};
use crate::plan::Chunk;

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
        let wanted = read.valid as usize;
        let failed = |source: std::io::Error, name: &str| Error::Read {
            file: name.into(),
            offset: read.offset,
            bytes: read.valid,
            source,
        };
        let got = lane
            .ring
            .read_file(to, wanted, &source.file, read.offset)
            .map_err(|e| failed(std::io::Error::other(e), &source.name))?;
        if got < wanted {
            return Err(Error::Ended {
                file: source.name.clone(),
                offset: read.offset,
                bytes: read.valid,
                length: source.bytes,
            });
        }
        shared.cached_bytes.fetch_add(read.valid, Ordering::Relaxed);
    }
    Ok(())
}
