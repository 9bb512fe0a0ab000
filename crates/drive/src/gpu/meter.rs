//! The time of each job, from what metering kernels store behind the outcomes of a launch.

use std::time::Duration;

use onehop_gpu::{Gpu, Region};
use onehop_proto::kernel::share;
use onehop_proto::kernel::times::{ITEM_BYTES, WARP_WORDS, end, items_at, warps_at};

use super::launch::LaunchMemory;
use super::run::Item;
use crate::{Error, Result};

/// The times of some jobs.
pub(super) struct Meter<'a> {
    /// The GPU with the metering kernels.
    pub(super) gpu: &'a dyn Gpu,
    /// Warps of a launch.
    warps: u32,
    /// When each job began and ended, in nanoseconds of the GPU's clock.
    spans: Vec<(f64, f64)>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(gpu: &'a dyn Gpu, warps: u32, jobs: usize) -> Self {
        Self { gpu, warps, spans: vec![(f64::INFINITY, 0.0); jobs] }
    }

    /// Bytes from a launch's first outcome to the end of its kernel's times.
    pub(super) fn end(&self, count: u32) -> u64 {
        end(count, self.warps)
    }

    /// Reads the times of a launch.
    pub(super) fn read(&mut self, items: &[Item], memory: &LaunchMemory) -> Result<()> {
        let count = items.len() as u32;
        let from =
            |at: u64, numbers: usize| numbers_at(&memory.region, memory.outcomes + at as usize, numbers);
        let times = from(items_at(count), items.len() * (ITEM_BYTES as usize / 8))?;
        let warps = from(warps_at(count), (self.warps * WARP_WORDS) as usize)?;
        let (times, warps) = (times.as_chunks::<2>().0, warps.as_chunks::<{ WARP_WORDS as usize }>().0);
        let rate = rate(warps)?;
        for (warp, index) in warps.iter().zip(0..) {
            let (first, end) = share(count, index, self.warps);
            let taken = items.iter().zip(times).take(end as usize).skip(first as usize);
            // Commands that were not begun, or were abandoned, have no times.
            for (item, [begun, ended]) in taken.filter(|(_, [begun, ended])| *begun > 0 && ended >= begun) {
                let (begun, ended) = (nanos(warp, *begun, rate), nanos(warp, *ended, rate));
                if let Some(span) = self.spans.get_mut(item.job) {
                    *span = (span.0.min(begun), span.1.max(ended));
                }
            }
        }
        Ok(())
    }

    /// The time of each job.
    pub(super) fn times(&self) -> Vec<Duration> {
        let took = |(begun, ended): &(f64, f64)| Duration::from_nanos((ended - begun).max(0.0) as u64);
        self.spans.iter().map(took).collect()
    }
}

type WarpTimes = [u64; WARP_WORDS as usize];

/// Nanoseconds of a cycle, from all warps together: a single warp may have been too short for the clock's resolution.
fn rate(warps: &[WarpTimes]) -> Result<f64> {
    let sum = |which: usize| warps.iter().map(|warp| warp[which] as f64).sum::<f64>();
    let (cycles, nanos) = (sum(3), sum(4));
    let rate = nanos / cycles;
    if !(rate > 0.01 && rate < 100.0) {
        return Err(Error::Gpu(format!("its clocks make no sense: {cycles} cycles in {nanos} ns")));
    }
    Ok(rate)
}

/// Converts a cycle of a warp's own clock to nanoseconds of the clock that all warps share.
fn nanos(warp: &WarpTimes, cycle: u64, rate: f64) -> f64 {
    let [.., first, start] = *warp;
    start as f64 + cycle.wrapping_sub(first) as i64 as f64 * rate
}

fn numbers_at(region: &Region, at: usize, count: usize) -> Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    region.read(at, &mut bytes)?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cycles_of_any_clock_become_nanoseconds_of_the_shared_one() {
        // Two cycles a nanosecond, from cycle 1000 at 5 s on; the other clock started at another value.
        let warps = [[0, 0, 0, 2000, 1000, 1000, 5_000_000_000], [0, 0, 0, 4000, 2000, 7, 5_000_000_100]];
        let rate = rate(&warps).unwrap();
        assert_eq!(nanos(&warps[0], 1500, rate), 5_000_000_250.0);
        assert_eq!(nanos(&warps[1], 307, rate), 5_000_000_250.0);
        assert!(super::rate(&[[0; 7]]).is_err());
    }
}
