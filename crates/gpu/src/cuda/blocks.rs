//! Kernels that work on data, on a stream of their own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_radio::kernel::THREADS;

use super::context::{Context, Event, Stream};
use super::module::{Arg, Function, Module, Shape};
use crate::jobs::{BlockJob, BlockKernels, Work};
use crate::{Error, Result};

/// They end by themselves, within milliseconds; this is for a GPU that others keep busy.
const LIMIT: Duration = Duration::from_secs(10);
/// How long to sleep between looks: blocks come every millisecond at the most.
const LOOK: Duration = Duration::from_micros(20);
const WHAT: &str = "kernels that work on data";

/// See [`BlockKernels`].
pub(super) struct CudaBlocks {
    convert: Function,
    spectrum: Function,
    check: Function,
    sum: Function,
    stream: Stream,
    begun: Event,
    done: Event,
    /// Kernels that did not end, with all that they use.
    stuck: bool,
}

impl CudaBlocks {
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context, onehop_device::BLOCKS_PTX)?;
        Ok(Self {
            convert: module.function("onehop_samples_convert")?,
            spectrum: module.function("onehop_samples_spectrum")?,
            check: module.function("onehop_samples_check")?,
            sum: module.function("onehop_crc32c")?,
            stream: Stream::new(context)?,
            begun: Event::new(context)?,
            done: Event::new(context)?,
            stuck: false,
        })
    }

    fn start(&self, job: &BlockJob) -> Result<()> {
        let (function, words): (_, Box<[u64]>) = match &job.work {
            Work::Convert(work) => (&self.convert, Box::new(work.words())),
            Work::Spectrum(work) => (&self.spectrum, Box::new(work.words())),
            Work::Check(work) => (&self.check, Box::new(work.words())),
            Work::Sum(work) => (&self.sum, Box::new(work.words())),
        };
        let shape = Shape { blocks: job.blocks, threads: THREADS, shared: job.local_words() * 4 };
        // SAFETY: the job's regions were checked to hold all that it names. They live until the kernel has ended: `run`
        // waits for that, and leaves them to a kernel that does not end.
        unsafe { function.launch(&self.stream, shape, &[Arg::Words(words)]) }
    }

    fn wait(&self) -> Result<()> {
        let until = Instant::now() + LIMIT;
        while !self.done.is_over(WHAT)? {
            if Instant::now() >= until {
                let why = format!("{WHAT} did not end within {LIMIT:?}; their memory is left to them");
                return Err(Error::Launch(why));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl BlockKernels for CudaBlocks {
    fn run(&mut self, jobs: &[BlockJob]) -> Result<Duration> {
        if self.stuck {
            return Err(Error::Launch(format!("{WHAT} before these did not end")));
        }
        self.begun.record(&self.stream)?;
        let started = jobs.iter().try_for_each(|job| self.start(job));
        if let Err(error) = self.done.record(&self.stream).and_then(|()| self.wait()) {
            self.stuck = true;
            std::mem::forget(jobs.to_vec());
            return Err(error);
        }
        started?;
        self.done.since(&self.begun)
    }
}
