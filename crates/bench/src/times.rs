//! The times that the measuring kernels recorded: when each command began and ended, and what their warps did meanwhile.

use onehop_gpu::Region;
use onehop_proto::kernel::times::{ITEM_BYTES, WARP_WORDS, end, items_at, warps_at};

use crate::Result;
use crate::bed::wrong;
use crate::stats::{Quantiles, median};

/// The results.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Times {
    /// Nanoseconds of a command, from when its warp began to write its entry until its outcome was written down.
    pub(crate) p50_ns: Option<f64>,
    pub(crate) p99_ns: Option<f64>,
    /// How many commands these are of.
    pub(crate) samples: u64,
    /// A warp's cycles for a command.
    pub(crate) cycles_submit: f64,
    pub(crate) cycles_complete: f64,
}

/// Bytes that the times of `commands` commands and `warps` warps take after the outcomes.
pub(crate) fn bytes(commands: u32, warps: u32) -> usize {
    (end(commands, warps) - u64::from(commands) * 8) as usize
}

/// Reads them from where the outcomes of a job lie.
pub(crate) fn read(outcomes: &Region, commands: u32, warps: u32) -> Result<Times> {
    let from = |at: u64, count: usize| -> Result<Vec<u64>> {
        let mut bytes = vec![0; count * 8];
        outcomes.read(at as usize, &mut bytes)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    };
    let items = from(items_at(commands), commands as usize * (ITEM_BYTES as usize / 8))?;
    evaluate(&items, &from(warps_at(commands), (warps * WARP_WORDS) as usize)?)
}

fn evaluate(items: &[u64], warps: &[u64]) -> Result<Times> {
    let (items, warps) = (items.as_chunks::<2>().0, warps.as_chunks::<{ WARP_WORDS as usize }>().0);
    // Each multiprocessor has its own clock; all run at one rate.
    let mut rates: Vec<_> =
        warps.iter().map(|[_, _, _, cycles, nanos, ..]| *nanos as f64 / *cycles as f64).collect();
    let nanos = median(&mut rates);
    if !(nanos > 0.01 && nanos < 100.0) {
        return Err(wrong(&format!("a cycle took {nanos} ns")));
    }
    let mut all = Quantiles::default();
    for [begun, ended] in items {
        if *begun == 0 || ended < begun {
            return Err(wrong(&format!("a command began at cycle {begun} and ended at {ended}")));
        }
        all.add(ended - begun);
    }
    let sum =
        |which: usize| warps.iter().map(|warp| warp[which] as f64).sum::<f64>() / items.len().max(1) as f64;
    Ok(Times {
        p50_ns: all.median().map(|cycles| cycles * nanos),
        p99_ns: all.per_mille(990).map(|cycles| cycles * nanos),
        samples: all.count(),
        cycles_submit: sum(1),
        cycles_complete: sum(2),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_become_nanoseconds_and_shares() {
        let items: Vec<u64> = (1..=1000).flat_map(|i| [1000, 1000 + 2 * i]).collect();
        let warps = [500, 3000, 2000, 1000, 500, 7, 7, 0, 1000, 1000, 2000, 1000, 7, 7];
        let times = evaluate(&items, &warps).unwrap();
        assert_eq!((times.p50_ns, times.p99_ns, times.samples), (Some(500.5), Some(990.0), 1000));
        assert_eq!((times.cycles_submit, times.cycles_complete), (4.0, 3.0));
        let few = evaluate(&items[..200], &warps).unwrap();
        assert_eq!((few.p50_ns, few.p99_ns, few.samples), (Some(50.5), None, 100));
    }

    #[test]
    fn missing_times_are_an_error() {
        assert!(evaluate(&[5, 6, 0, 0], &[0, 0, 0, 10, 10, 0, 0]).is_err());
        assert!(evaluate(&[5, 4], &[0, 0, 0, 10, 10, 0, 0]).is_err());
        assert!(evaluate(&[5, 6], &[0; 7]).is_err());
    }

    #[test]
    fn the_times_follow_the_outcomes() {
        assert_eq!(bytes(16, 2), 16 * 16 + 2 * 56);
        assert!(bytes(1, 1) >= 120 + 16 + 56);
    }
}
