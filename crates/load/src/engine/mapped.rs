//! A thread that has the GPU take bytes out of the page cache by itself: it maps a stretch of the file, registers the pages
//! with the GPU, to be read, and copies from there. No processor touches the bytes. Registering is the driver's and the
//! kernel's work, a page at a time, and keeps other copies waiting: it is for machines where it was seen to be quicker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use onehop_gpu::{Copier, Gpu, Mark, Place, Region, Rows};
use onehop_os::HostMem;

use super::Shared;
use crate::error::{Error, Result};
use crate::plan::Chunk;

/// Bytes of a stretch: registering pages costs by the call, too.
const STRETCH: u64 = 64 << 20;

/// What the thread works with.
pub(super) struct Mapper {
    pub(super) gpu: Arc<dyn Gpu>,
    pub(super) arena: Region,
    pub(super) arrived: Sender<Result<Chunk>>,
}

/// A stretch on its way.
struct Stretch {
    chunks: Vec<Chunk>,
    copier: Box<dyn Copier>,
    mark: Mark,
}

pub(super) fn run(shared: &Shared, mapper: &Mapper) -> Result<()> {
    let result = work(shared, mapper);
    shared.may_return.store(false, Ordering::Release);
    result
}

fn work(shared: &Shared, mapper: &Mapper) -> Result<()> {
    let mut last = None;
    loop {
        let chunks = shared.stretch(STRETCH);
        if chunks.is_empty() {
            return settle(shared, mapper, last);
        }
        let next = match mapper.copy(shared, &chunks) {
            Ok((copier, mark)) => Stretch { chunks, copier, mark },
            Err(Error::Gpu(_)) => {
                // This GPU does not register such pages, or no more of them: the other threads do what is left.
                shared.give_back(chunks);
                return settle(shared, mapper, last);
            }
            Err(error) => return Err(error),
        };
        settle(shared, mapper, last.replace(next))?;
    }
}

/// Waits for a stretch and tells that it has arrived; its pages are let go.
fn settle(shared: &Shared, mapper: &Mapper, stretch: Option<Stretch>) -> Result<()> {
    let Some(mut stretch) = stretch else { return Ok(()) };
    stretch.copier.wait(stretch.mark)?;
    for chunk in stretch.chunks {
        let bytes: u64 = chunk.reads.iter().map(|read| read.valid).sum();
        shared.cached_bytes.fetch_add(bytes, Ordering::Relaxed);
        let _ = mapper.arrived.send(Ok(chunk));
    }
    Ok(())
}

impl Mapper {
    fn copy(&self, shared: &Shared, chunks: &[Chunk]) -> Result<(Box<dyn Copier>, Mark)> {
        let file =
            chunks.first().and_then(|chunk| shared.sources.get(chunk.file)).ok_or(Error::Incomplete)?;
        let reads = || chunks.iter().flat_map(|chunk| &chunk.reads);
        let start = reads().map(|read| read.offset).min().unwrap_or(0);
        let end = reads().map(|read| read.offset + read.valid).max().unwrap_or(0);
        let bytes = (end - start).next_multiple_of(4096) as usize;
        let pages = HostMem::of_file_at(&file.file, start, bytes).map_err(|_| Error::Ended {
            file: file.name.clone(),
            offset: start,
            bytes: end - start,
            length: file.bytes,
        })?;
        let pages = self.gpu.adopt(Place::PinnedHost, pages)?;
        let mut copier = self.gpu.copier(&pages, &self.arena)?;
        for chunk in chunks {
            // One read: places in the slot are places in the file.
            let Some(read) = chunk.reads.first() else { continue };
            let from = (read.offset - start) as usize;
            for copy in &chunk.copies {
                copier.copy(&Rows {
                    from: from + (copy.slot - read.slot) as usize,
                    to: copy.to as usize,
                    row: copy.row as usize,
                    rows: copy.rows as usize,
                    step: copy.step as usize,
                })?;
            }
        }
        let mark = copier.mark()?;
        Ok((copier, mark))
    }
}
