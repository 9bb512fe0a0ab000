//! Pages by onehop's library for programs, [`Pages`]: batches of as many as are in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};
use onehop_pages::{FilePage, Pages, PagesOptions};

use super::{PageBuffer, PageFile, PageMover, PageRound, own_cpu_time};
use crate::stats::Quantiles;
use crate::{Error, Result};

/// Moves pages by batches.
pub struct LibraryMover {
    pages: Pages,
    memory: [Region; 1],
    buffer: PageBuffer,
}

impl LibraryMover {
    /// Opens the file anew, so that there is one opening, as a lease needs; for reading only unless it is to be written, as files on
    /// disks need. All of it that may be is registered.
    ///
    /// # Errors
    /// When it cannot be opened, or the GPU has no memory.
    pub fn new(file: &mut PageFile, gpu: Arc<dyn Gpu>, bytes: usize, writes: bool) -> Result<Self> {
        let memory = gpu.alloc(Place::Vram, bytes)?;
        let pages = Pages::new(file.open_anew(writes)?, gpu, PagesOptions::new(writes)).map_err(refused)?;
        pages.register();
        Ok(Self { pages, buffer: PageBuffer::Gpu(memory.clone()), memory: [memory] })
    }
}

impl Drop for LibraryMover {
    fn drop(&mut self) {
        // The next one can then register the file.
        self.pages.release();
    }
}

fn refused(error: onehop_pages::PagesError) -> Error {
    Error::Wrong(error.to_string())
}

impl PageMover for LibraryMover {
    fn name(&self) -> &'static str {
        // Which route the bytes took.
        if self.pages.moved().staged == 0 { "registered" } else { "staged" }
    }

    fn buffer(&self) -> &PageBuffer {
        &self.buffer
    }

    fn round(&mut self, round: &PageRound<'_>, latencies: &mut Quantiles) -> Result<Duration> {
        let all: Vec<FilePage> = round
            .places
            .iter()
            .enumerate()
            .map(|(n, place)| FilePage { offset: *place, memory: (0, n * round.page), bytes: round.page })
            .collect();
        let start = Instant::now();
        for batch in all.chunks(round.depth) {
            let begun = Instant::now();
            let moved = match round.writes {
                true => self.pages.write(&self.memory, batch),
                false => self.pages.read(&self.memory, batch),
            };
            moved.map_err(refused)?;
            let nanos = begun.elapsed().as_nanos() as u64;
            batch.iter().for_each(|_| latencies.add(nanos));
        }
        Ok(start.elapsed())
    }

    fn cpu_time(&self) -> Result<Duration> {
        Ok(own_cpu_time())
    }
}
