//! Kernels that work on data, on a separate stream.

use std::sync::Arc;
use std::time::Duration;

use onehop_radio::kernel::THREADS;

use super::context::{Context, Event};
use super::module::{Arg, Function, Module, Shape};
use super::stream::{self, End, Pace, Stream};
use crate::jobs::{BlockJob, BlockKernels, BlockWork};
use crate::{Error, Result};

/// They end within milliseconds; this is for a GPU that others keep busy.
const LIMIT: Duration = Duration::from_secs(10);
/// Blocks come every millisecond at the most.
const PACE: Pace = Pace { short: Duration::ZERO, nap: Duration::from_micros(20) };
const WHAT: &str = "kernels that work on data";

/// See [`BlockKernels`].
pub(super) struct CudaBlocks {
    context: Arc<Context>,
    convert: Function,
    spectrum: Function,
    check: Function,
    sum: Function,
    stream: Arc<Stream>,
    begun: Event,
    done: Event,
    /// Kernels did not end.
    stuck: bool,
}

impl CudaBlocks {
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context, &onehop_device::BLOCKS_PTX.text())?;
        Ok(Self {
            context: context.clone(),
            convert: module.function("onehop_samples_convert")?,
            spectrum: module.function("onehop_samples_spectrum")?,
            check: module.function("onehop_samples_check")?,
            sum: module.function("onehop_crc32c")?,
            stream: Arc::new(Stream::new(context)?),
            begun: Event::new(context)?,
            done: Event::new(context)?,
            stuck: false,
        })
    }

    fn start(&self, job: &BlockJob) -> Result<()> {
        let (function, words): (_, Box<[u64]>) = match &job.work {
            BlockWork::Convert(work) => (&self.convert, Box::new(work.words())),
            BlockWork::Spectrum(work) => (&self.spectrum, Box::new(work.words())),
            BlockWork::Check(work) => (&self.check, Box::new(work.words())),
            BlockWork::Sum(work) => (&self.sum, Box::new(work.words())),
        };
        let shape = Shape { blocks: job.blocks, threads: THREADS, shared: job.local_words() * 4 };
        // SAFETY: the job's regions were checked to hold everything that it refers to, except that a sum loads
        // whole granules of 16 bytes: up to 15 bytes beyond each end of its region, in the same page, which it
        // ignores. The regions live until the kernel has ended: `run` waits for that, and leaves them to one that
        // does not end.
        unsafe { function.launch(&self.stream, shape, &[Arg::Words(words)]) }
    }

    /// Waits for the end of everything that was started. Kernels that do not end keep the jobs' memory and their code.
    fn wait(&mut self, jobs: &[BlockJob]) -> Result<()> {
        match stream::wait(LIMIT, PACE, || self.stream.progress()) {
            End::Over => Ok(()),
            end => {
                self.stuck = true;
                if matches!(end, End::Unended(_)) {
                    // All functions are in one module.
                    self.stream.outlasted((jobs.to_vec(), self.sum.clone()));
                }
                Err(self.stream.error(WHAT, end, LIMIT))
            }
        }
    }
}

impl BlockKernels for CudaBlocks {
    fn run(&mut self, jobs: &[BlockJob]) -> Result<Duration> {
        if self.stuck {
            return Err(Error::Launch(format!("{WHAT} before these did not end")));
        }
        let memory = || jobs.iter().flat_map(|job| &job.memory);
        memory().try_for_each(|memory| self.context.check(WHAT, memory))?;
        self.begun.record(&self.stream)?;
        let started = jobs.iter().try_for_each(|job| self.start(job));
        let marked = self.done.record(&self.stream);
        self.wait(jobs)?;
        started.and(marked)?;
        self.done.since(&self.begun)
    }
}
