//! Medians, quantiles, and cycles as nanoseconds.

use std::time::{Duration, Instant};

use onehop_os::cycles;

/// How many cycles of the time-stamp counter make a nanosecond.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    per_ns: f64,
}

impl Clock {
    /// Measures it, in 20 ms.
    #[must_use]
    pub fn calibrate() -> Self {
        let (start, from) = (Instant::now(), cycles());
        while start.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        Self { per_ns: (cycles() - from) as f64 / start.elapsed().as_nanos() as f64 }
    }

    /// Cycles as nanoseconds.
    #[must_use]
    pub fn ns(&self, cycles: f64) -> f64 {
        cycles / self.per_ns
    }

    /// A time in cycles.
    #[must_use]
    pub fn cycles(&self, time: Duration) -> u64 {
        (time.as_nanos() as f64 * self.per_ns) as u64
    }

    /// Billions of cycles per second.
    #[must_use]
    pub fn ghz(&self) -> f64 {
        self.per_ns
    }
}

/// The median, of an even count the mean of the middle two; 0 if there are no values. Sorts the values.
#[must_use]
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.get(middle) {
        None => 0.0,
        Some(upper) if values.len() % 2 == 1 => *upper,
        Some(upper) => f64::midpoint(values[middle - 1], *upper),
    }
}

/// Samples that have to lie beyond a percentile for it to be given: p99 needs 1000 samples, p99.9 needs 10 000.
pub const BEYOND: u64 = 10;

/// Latencies in cycles, and their percentiles.
#[derive(Default)]
pub struct Quantiles {
    samples: Vec<u64>,
    sorted: bool,
}

impl Quantiles {
    /// Adds a latency.
    pub fn add(&mut self, cycles: u64) {
        self.samples.push(cycles);
        self.sorted = false;
    }

    /// Moves all of another's into this one.
    pub fn append(&mut self, other: &mut Self) {
        self.samples.append(&mut other.samples);
        self.sorted = false;
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.samples.len() as u64
    }

    /// The mean; 0 if there are none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.samples.iter().map(|cycles| *cycles as f64).sum::<f64>() / self.samples.len().max(1) as f64
    }

    fn sorted(&mut self) -> &[u64] {
        if !self.sorted {
            self.samples.sort_unstable();
            self.sorted = true;
        }
        &self.samples
    }

    /// The median, of an even count the mean of the middle two; none if there are none.
    pub fn median(&mut self) -> Option<f64> {
        let all = self.sorted();
        let upper = *all.get(all.len() / 2)? as f64;
        let lower = all[(all.len() - 1) / 2] as f64;
        Some(f64::midpoint(lower, upper))
    }

    /// The percentile in thousandths, by nearest rank: the smallest latency that at least this share of all does not
    /// exceed. `None` if fewer than [`BEYOND`] samples lie beyond it: it would be chance.
    pub fn per_mille(&mut self, share: u64) -> Option<f64> {
        let all = self.sorted();
        // In integers: in floating point 0.99 times a count is a little off, and the rank may be one too high.
        let rank = (all.len() as u64 * share).div_ceil(1000);
        let beyond = all.len() as u64 - rank.min(all.len() as u64);
        let at = rank.checked_sub(1).filter(|_| beyond >= BEYOND)?;
        all.get(at as usize).map(|cycles| *cycles as f64)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(samples: impl IntoIterator<Item = u64>) -> Quantiles {
        let mut all = Quantiles::default();
        samples.into_iter().for_each(|i| all.add(i));
        all
    }

    #[test]
    fn medians_of_even_counts_lie_between_the_middle_two() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&mut [7.0]), 7.0);
        assert_eq!(median(&mut []), 0.0);
        assert_eq!(of([3, 1]).median(), Some(2.0));
        assert_eq!(of([3, 1, 2]).median(), Some(2.0));
        assert_eq!(of([]).median(), None);
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut all = of((1..=10_000).rev());
        assert_eq!((all.per_mille(990), all.per_mille(999)), (Some(9900.0), Some(9990.0)));
        assert_eq!((all.median(), all.mean(), all.count()), (Some(5000.5), 5000.5, 10_000));
        // What is added later counts, too.
        all.append(&mut of(std::iter::repeat_n(0, 10_000)));
        assert_eq!(all.median(), Some(0.5));
        assert_eq!(all.per_mille(990), Some(9800.0));
    }

    #[test]
    fn a_percentile_needs_ten_samples_beyond_it() {
        assert_eq!(of(0..999).per_mille(990), None);
        assert_eq!(of(1..=1000).per_mille(990), Some(990.0));
        assert_eq!(of(0..9_999).per_mille(999), None);
        assert_eq!(of(1..=10_000).per_mille(999), Some(9990.0));
        assert_eq!(of([]).per_mille(990), None);
        assert_eq!(of(0..76).per_mille(990), None);
    }

    #[test]
    fn long_latencies_are_not_clipped() {
        let long = u64::from(u32::MAX) * 8;
        assert_eq!(of(std::iter::repeat_n(long, 2000)).per_mille(990), Some(long as f64));
        assert_eq!(of([long; 2]).mean(), long as f64);
    }
}
