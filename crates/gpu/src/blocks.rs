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

    fn settle(&self) {}

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

#[cfg(test)]
mod tests {
    use onehop_block::ranges::{RangeList, copy};
    use onehop_os::HostMem;

    use super::*;
    use crate::ranges::DividedRanges;
    use crate::{CopyRange, Emulated, Gpu, Place};

    #[test]
    fn ranges_are_copied_by_warps() {
        let gpu = Emulated::new();
        let memories = [Place::PinnedHost, Place::Vram, Place::PinnedHost]
            .map(|place| gpu.alloc(place, 1 << 20).unwrap());
        let data: Vec<u8> = (0..1_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        memories[0].write(0, &data).unwrap();
        // Each to another place, and then back; none is copied where it lies already.
        let (mut ranges, mut at, mut end) = (Vec::new(), 0, 1 << 20);
        for bytes in [16, 4096, 32, 4080, 4112, 20_000, 8192, 65_536, 100_000, 512] {
            end -= bytes + 48;
            ranges.push(CopyRange { from: (0, at), to: (1, end), bytes });
            at += bytes + 16;
        }
        let back: Vec<CopyRange> = ranges
            .iter()
            .map(|range| CopyRange { from: range.to, to: (2, range.from.1), ..*range })
            .collect();
        for (ranges, settles, blocks) in [(&ranges, 0, 3), (&back, 1, 2)] {
            let divided = DividedRanges::new(&memories, ranges, 100_000, |_| true);
            assert_eq!(divided.rest.len(), 1);
            let list: Vec<[u64; 4]> = divided.into.into_iter().chain(divided.out).collect();
            let words: Vec<u8> = list.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
            let memory = gpu.adopt(Place::PinnedHost, HostMem::anonymous(words.len()).unwrap()).unwrap();
            memory.write(0, &words).unwrap();
            let job = RangeList { list: memory.addr().0, count: list.len() as u32, settles };
            for number in 0..blocks {
                let view = EmulatedThread::new(gpu.space());
                copy(&Emulation { view, number, count: blocks, local: Vec::new() }, &job);
            }
        }
        for (range, back) in ranges.iter().zip(&back) {
            let (mut there, mut here) = (vec![0; range.bytes + 32], vec![0; range.bytes]);
            memories[1].read(range.to.1 - 16, &mut there).unwrap();
            memories[2].read(back.to.1, &mut here).unwrap();
            let expected =
                if range.bytes < 100_000 { &data[range.from.1..][..range.bytes] } else { &vec![0; 100_000] };
            assert!(there[16..16 + range.bytes] == *expected && here == *expected, "{range:?}");
            assert!(there[..16] == [0; 16] && there[16 + range.bytes..] == [0; 16], "{range:?}");
        }
    }
}
