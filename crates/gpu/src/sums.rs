//! Checksums of GPU memory, computed by the GPU.

use onehop_block::crc32c::{self, GpuRange};

use crate::jobs::{BlockJob, BlockKernels};
use crate::{Error, Gpu, Place, Region, Result};

/// Ranges that are summed at a time: `go_on` is called between two batches.
const BATCH: usize = 1024;

/// Sums memory of a GPU by kernels of its own.
pub struct Sums {
    kernels: Box<dyn BlockKernels>,
    tables: Region,
}

impl Sums {
    /// Loads the kernel and its tables.
    ///
    /// # Errors
    /// When there is none for this GPU, or no memory for them.
    pub fn new(gpu: &dyn Gpu) -> Result<Self> {
        let mut bytes = Vec::with_capacity(crc32c::TABLE_WORDS as usize * 4);
        crc32c::tables(|word| bytes.extend(word.to_le_bytes()));
        let tables = gpu.alloc(Place::Vram, bytes.len())?;
        tables.write(0, &bytes)?;
        Ok(Self { kernels: gpu.block_kernels()?, tables })
    }

    /// The CRC32C of each of these ranges of a region, given as offset and length. `None` if `go_on`, which is called
    /// now and then, returns false.
    ///
    /// # Errors
    /// When a range is not within the region, or the GPU fails.
    pub fn crc32c(
        &mut self,
        gpu: &dyn Gpu,
        region: &Region,
        ranges: &[(u64, u64)],
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<u32>>> {
        let mut sums = Vec::with_capacity(ranges.len());
        for batch in ranges.chunks(BATCH) {
            if !go_on() {
                return Ok(None);
            }
            self.batch(gpu, region, batch, &mut sums)?;
        }
        Ok(Some(sums))
    }

    fn batch(
        &mut self,
        gpu: &dyn Gpu,
        region: &Region,
        batch: &[(u64, u64)],
        sums: &mut Vec<u32>,
    ) -> Result<()> {
        let len = region.len() as u64;
        let mut ranges = Vec::with_capacity(batch.len());
        for &(at, bytes) in batch {
            if at > len || bytes > len - at {
                let why = format!("{bytes} bytes at {at} of {len} are to be summed");
                return Err(Error::Launch(why));
            }
            ranges.push(GpuRange { at: region.addr().plus(at), bytes });
        }
        let total: u64 = ranges.iter().map(GpuRange::chunks).sum();
        let out = gpu.alloc(Place::Vram, (total as usize * 4).max(16))?;
        let mut jobs = Vec::new();
        let mut to = 0;
        for range in ranges.iter().filter(|range| range.chunks() > 0) {
            jobs.push(BlockJob::sum(region, *range, &self.tables, (&out, to))?);
            to += range.chunks();
        }
        if !jobs.is_empty() {
            self.kernels.run(&jobs)?;
        }
        let mut bytes = vec![0; total as usize * 4];
        out.read(0, &mut bytes)?;
        let mut chunks = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        sums.extend(ranges.iter().map(|range| range.finish(chunks.by_ref().take(range.chunks() as usize))));
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_the_sums_that_others_compute() {
        let gpu = crate::Emulated::new();
        let mut sums = Sums::new(&gpu).unwrap();
        let data: Vec<u8> = (0..3 * crc32c::CHUNK + 100).map(|i| (i * 131 + i / 97) as u8).collect();
        let region = gpu.alloc(Place::Vram, data.len()).unwrap();
        region.write(0, &data).unwrap();
        let len = data.len() as u64;
        let ranges =
            [(0, len), (7, 0), (1, 1), (33, crc32c::CHUNK), (len - 5, 5), (64, 2 * crc32c::CHUNK + 3)];
        let found = sums.crc32c(&gpu, &region, &ranges, &|| true).unwrap().unwrap();
        for ((at, bytes), sum) in ranges.into_iter().zip(found) {
            assert_eq!(
                sum,
                ::crc32c::crc32c(&data[at as usize..(at + bytes) as usize]),
                "{bytes} bytes at {at}"
            );
        }
        assert_eq!(sums.crc32c(&gpu, &region, &ranges, &|| false).unwrap(), None);
        let all = region.len() as u64;
        for beyond in [(0, all + 1), (all + 1, 0), (u64::MAX, 2), (1, u64::MAX)] {
            assert!(sums.crc32c(&gpu, &region, &[beyond], &|| true).is_err(), "{beyond:?}");
        }
    }
}
