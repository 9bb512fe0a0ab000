//! A long job in pieces that take about a tenth of a second, so that bars move and Ctrl-C is heard.

use std::collections::VecDeque;
use std::time::Duration;

use onehop_drive::GpuJob;

/// The first chunk, and the smallest.
const FIRST_BYTES: u64 = 1 << 20;
/// The largest.
const MOST_BYTES: u64 = 256 << 20;
/// What a chunk should take at most.
const LONG: Duration = Duration::from_millis(200);
/// A chunk that takes less may be followed by a longer one.
const SHORT: Duration = Duration::from_millis(50);

/// What is left of a job, and how much of it to do next.
pub(crate) struct Chunks {
    left: VecDeque<GpuJob>,
    block: u64,
    /// Blocks of one command: chunks are made of whole commands.
    step: u64,
    bytes: u64,
}

impl Chunks {
    /// A job on blocks of `block` bytes, of which one command moves `command` bytes.
    pub(crate) fn new(jobs: &[GpuJob], block: u64, command: u64) -> Self {
        let step = (command / block.max(1)).clamp(1, 1 << 16);
        Self { left: jobs.iter().copied().collect(), block, step, bytes: FIRST_BYTES }
    }

    /// The next chunk; empty when nothing is left.
    pub(crate) fn take(&mut self) -> Vec<GpuJob> {
        let mut room = (self.bytes / self.block.max(1) / self.step).max(1) * self.step;
        let mut chunk = Vec::new();
        while room > 0
            && let Some(job) = self.left.front_mut()
        {
            let blocks = job.blocks.min(room);
            chunk.push(GpuJob { blocks, ..*job });
            room -= blocks;
            if blocks == job.blocks {
                self.left.pop_front();
            } else {
                *job = GpuJob {
                    lba: job.lba + blocks,
                    blocks: job.blocks - blocks,
                    offset: job.offset + blocks * self.block,
                };
            }
        }
        chunk
    }

    /// Learns how long a chunk took.
    pub(crate) fn learn(&mut self, took: Duration) {
        if took < SHORT {
            self.bytes = (self.bytes * 2).min(MOST_BYTES);
        } else if took > LONG {
            self.bytes = (self.bytes / 2).max(FIRST_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_job_once() {
        for (block, command) in [(512, 128 << 10), (4096, 4096), (520, 131_072), (65536, 4096)] {
            let jobs = [
                GpuJob { lba: 7, blocks: 10_000, offset: 0 },
                GpuJob { lba: 50_000, blocks: 1, offset: 10_000 * block },
                GpuJob { lba: 90_000, blocks: 3, offset: 10_001 * block },
            ];
            let mut chunks = Chunks::new(&jobs, block, command);
            let mut seen = Vec::new();
            loop {
                let chunk = chunks.take();
                if chunk.is_empty() {
                    break;
                }
                chunks.learn(Duration::from_millis(seen.len() as u64 * 20 % 300));
                seen.extend(chunk.iter().flat_map(|j| {
                    let (lba, offset) = (j.lba, j.offset);
                    (0..j.blocks).map(move |i| (lba + i, offset + i * block))
                }));
            }
            let whole =
                jobs.iter().flat_map(|j| (0..j.blocks).map(move |i| (j.lba + i, j.offset + i * block)));
            assert!(seen.into_iter().eq(whole), "{block}");
        }
    }
}
