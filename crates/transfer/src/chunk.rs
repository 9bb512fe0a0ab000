//! Cuts work into chunks: jobs, so that progress is reported and cancellation is noticed; ranges of bytes, so that
//! copies need little memory. All chunking happens here.

use std::collections::VecDeque;
use std::time::Duration;

use onehop_drive::GpuJob;

/// The first and smallest chunk.
const FIRST_BYTES: u64 = 1 << 20;
/// The largest chunk, unless the route has less memory.
pub(crate) const MOST_BYTES: u64 = 256 << 20;
/// Upper limit of a chunk's duration.
const LONG: Duration = Duration::from_millis(200);
/// A chunk that takes less may be followed by a larger one.
const SHORT: Duration = Duration::from_millis(50);

/// Cuts `total` into ranges of at most `step`: start and length of each.
pub(crate) fn ranges(total: u64, step: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = step.max(1);
    (0..total.div_ceil(step)).map(move |i| (i * step, step.min(total - i * step)))
}

/// The rest of a job, and the size of the next chunk.
pub(crate) struct Chunks {
    left: VecDeque<GpuJob>,
    block: u64,
    /// Blocks per command: chunks consist of whole commands.
    step: u64,
    bytes: u64,
    most: u64,
}

impl Chunks {
    /// Chunks of at most `most` bytes, for jobs on blocks of `block` bytes with `command` bytes per command.
    pub(crate) fn new(jobs: &[GpuJob], block: u64, command: u64, most: u64) -> Self {
        let block = block.max(1);
        let step = (command.min(most) / block).clamp(1, 1 << 16);
        let bytes = FIRST_BYTES.min(most);
        Self { left: jobs.iter().copied().collect(), block, step, bytes, most }
    }

    /// Chunks that all have `bytes` bytes, as far as whole commands allow.
    pub(crate) fn of_size(jobs: &[GpuJob], block: u64, command: u64, bytes: u64) -> Self {
        Self { bytes, ..Self::new(jobs, block, command, bytes) }
    }

    /// The next chunk; empty when nothing is left.
    pub(crate) fn take(&mut self) -> Vec<GpuJob> {
        let mut room = (self.bytes / self.block / self.step).max(1) * self.step;
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

    /// Adapts to the duration of a chunk.
    pub(crate) fn learn(&mut self, took: Duration) {
        if took < SHORT {
            self.bytes = (self.bytes * 2).min(self.most);
        } else if took > LONG {
            self.bytes = (self.bytes / 2).max(FIRST_BYTES.min(self.most));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_job_once() {
        let cases = [
            (512, 128 << 10, MOST_BYTES),
            (4096, 4096, MOST_BYTES),
            (520, 131_072, 4 << 20),
            (65536, 4096, 4 << 20),
            // A command that is longer than the staging memory.
            (4096, 64 << 20, 4 << 20),
        ];
        for (block, command, most) in cases {
            let jobs = [
                GpuJob { lba: 7, blocks: 10_000, offset: 0 },
                GpuJob { lba: 50_000, blocks: 1, offset: 10_000 * block },
                GpuJob { lba: 90_000, blocks: 3, offset: 10_001 * block },
            ];
            let mut chunks = Chunks::new(&jobs, block, command, most);
            let mut seen = Vec::new();
            loop {
                let chunk = chunks.take();
                if chunk.is_empty() {
                    break;
                }
                assert!(chunk.iter().map(|job| job.blocks * block).sum::<u64>() <= most, "{block}");
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

    #[test]
    fn ranges_cover_every_byte_once() {
        assert_eq!(ranges(0, 4).count(), 0);
        assert_eq!(ranges(9, 4).collect::<Vec<_>>(), [(0, 4), (4, 4), (8, 1)]);
        assert_eq!(ranges(8, 4).collect::<Vec<_>>(), [(0, 4), (4, 4)]);
        assert_eq!(ranges(3, 0).collect::<Vec<_>>(), [(0, 1), (1, 1), (2, 1)]);
    }
}
