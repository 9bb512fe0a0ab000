//! Blocks of the emulated GPU: one CPU thread is all threads of a block in turn.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_block::crc32c;
use onehop_proto::GpuAddr;
use onehop_proto::queue::Memory;
use onehop_radio::kernel::{self, Block, THREADS};

use crate::Result;
use crate::jobs::{BlockJob, BlockKernels, BlockWork};
use crate::space::{EmulatedThread, Space};

struct Emulation {
    view: EmulatedThread,
    number: u32,
    count: u32,
    local: Vec<Cell<u32>>,
}

impl Block for Emulation {
    fn number(&self) -> u32 {
        self.number
    }

    fn count(&self) -> u32 {
        self.count
    }

    fn threads(&self) -> u32 {
        THREADS
    }

    fn each(&self, f: impl FnMut(u32)) {
        (0..THREADS).for_each(f);
    }

    fn load(&self, at: GpuAddr) -> u32 {
        self.view.load(at)
    }

    fn load_four(&self, at: GpuAddr) -> [u32; 4] {
        self.view.load_constant(at)
    }

    fn store(&self, at: GpuAddr, value: u32) {
        self.view.store(at, value);
    }

    fn store_four(&self, at: GpuAddr, words: [u32; 4]) {
        for (i, word) in (0..).zip(words) {
            self.view.store(at.plus(i * 4), word);
        }
    }

    fn local(&self, index: u32) -> u32 {
        self.local[index as usize].get()
    }

    fn set_local(&self, index: u32, value: u32) {
        self.local[index as usize].set(value);
    }
}

/// Runs the kernels on the calling thread, block after block.
pub(crate) struct InTurn(pub(crate) Arc<Space>);

impl BlockKernels for InTurn {
    fn run(&mut self, jobs: &[BlockJob]) -> Result<Duration> {
        let begun = Instant::now();
        for job in jobs {
            crate::emulated::catch(|| self.one(job))?;
        }
        Ok(begun.elapsed())
    }
}

impl InTurn {
    fn one(&self, job: &BlockJob) {
        for number in 0..job.blocks {
            // Code must not rely on what another block left there.
            let local = (0..job.local_words()).map(|i| Cell::new(0x7fc0_0000 | i)).collect();
            let block = Emulation { view: EmulatedThread::new(&self.0), number, count: job.blocks, local };
            match &job.work {
                BlockWork::Convert(work) => kernel::convert(&block, work),
                BlockWork::Spectrum(work) => kernel::spectrum(&block, work),
                BlockWork::Check(work) => kernel::check(&block, work),
                BlockWork::Sum(work) => crc32c::sum(&block, work),
            }
        }
    }
}
