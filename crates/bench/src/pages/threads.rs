//! Pages by threads, each of which reads or writes a page and copies it to or from the GPU: what a program does without
//! a library.

use std::fs::File;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use onehop_gpu::{Copier, Gpu, Place, Region, Rows};
use onehop_os::{DmaMemory, HostMem};

use super::file::failed;
use super::{PageBuffer, PageMover, PageRound, own_cpu_time};
use crate::stats::Quantiles;
use crate::{Error, Result};

/// Moves pages by threads, as many as are in flight.
pub struct ThreadMover {
    file: File,
    buffer: PageBuffer,
    threads: Vec<OneThread>,
}

/// What a thread uses: for GPU memory, pinned memory and a stream of copies.
struct OneThread(Option<(Region, Box<dyn Copier>)>);

impl ThreadMover {
    /// Opens the file for this many threads.
    ///
    /// # Errors
    /// When it cannot be opened, or the GPU has no memory.
    pub fn new(
        file: &Path,
        gpu: Option<&dyn Gpu>,
        bytes: usize,
        page: usize,
        threads: usize,
    ) -> Result<Self> {
        let open =
            File::options().read(true).write(true).open(file).map_err(|e| failed("opening", file, e))?;
        let buffer = match gpu {
            None => PageBuffer::Host(HostMem::touched(bytes)?),
            Some(gpu) => PageBuffer::Gpu(gpu.alloc(Place::Vram, bytes)?),
        };
        let one = || -> Result<OneThread> {
            let (Some(gpu), PageBuffer::Gpu(region)) = (gpu, &buffer) else { return Ok(OneThread(None)) };
            let pinned = gpu.adopt(Place::PinnedHost, HostMem::touched(page)?)?;
            let copier = gpu.copier(&pinned, region)?;
            Ok(OneThread(Some((pinned, copier))))
        };
        let threads = (0..threads).map(|_| one()).collect::<Result<_>>()?;
        Ok(Self { file: open, buffer, threads })
    }
}

impl OneThread {
    fn page(&mut self, file: &File, buffer: &PageBuffer, round: &PageRound<'_>, n: usize) -> Result<()> {
        let (at, place) = (n * round.page, round.places[n]);
        let moved = |mem: &HostMem, at: usize| -> Result<()> {
            let count = if round.writes {
                mem.write_file(at, round.page, file, place)?
            } else {
                mem.read_file(at, round.page, file, place)?
            };
            if count == round.page {
                return Ok(());
            }
            Err(Error::Wrong(format!("a page at {place} has {count} bytes")))
        };
        match (&mut self.0, buffer) {
            (Some((pinned, copier)), PageBuffer::Gpu(region)) => {
                let mem =
                    pinned.host().ok_or_else(|| Error::Setup("pinned memory is not the host's".into()))?;
                if round.writes {
                    region.read_to(at, mem, 0, round.page)?;
                    return moved(mem, 0);
                }
                moved(mem, 0)?;
                copier.copy(&Rows { from: 0, to: at, row: round.page, rows: 1, step: round.page })?;
                let mark = copier.mark()?;
                Ok(copier.wait(mark)?)
            }
            (_, PageBuffer::Host(mem)) => moved(mem, at),
            (None, PageBuffer::Gpu(_)) => Err(Error::Setup("a thread without a copier".into())),
        }
    }
}

impl PageMover for ThreadMover {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn buffer(&self) -> &PageBuffer {
        &self.buffer
    }

    fn round(&mut self, round: &PageRound<'_>, latencies: &mut Quantiles) -> Result<Duration> {
        let (file, buffer, next) = (&self.file, &self.buffer, &AtomicUsize::new(0));
        let count = self.threads.len().min(round.depth);
        let together = &Barrier::new(count);
        let spans = std::thread::scope(|scope| {
            let started: Vec<_> = self.threads[..count]
                .iter_mut()
                .map(|one| {
                    scope.spawn(move || {
                        let mut latencies = Quantiles::default();
                        together.wait();
                        let start = Instant::now();
                        loop {
                            let n = next.fetch_add(1, Ordering::Relaxed);
                            if n >= round.places.len() {
                                return Ok((start, Instant::now(), latencies));
                            }
                            let begun = Instant::now();
                            one.page(file, buffer, round, n)?;
                            latencies.add(begun.elapsed().as_nanos() as u64);
                        }
                    })
                })
                .collect();
            let panicked = |_| Err(Error::Setup("a thread panicked".into()));
            started.into_iter().map(|one| one.join().unwrap_or_else(panicked)).collect::<Result<Vec<_>>>()
        })?;
        let (first, last) = (spans.iter().map(|span| span.0).min(), spans.iter().map(|span| span.1).max());
        for (_, _, mut of_thread) in spans {
            latencies.append(&mut of_thread);
        }
        Ok(first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first))
    }

    fn cpu_time(&self) -> Result<Duration> {
        Ok(own_cpu_time())
    }
}
