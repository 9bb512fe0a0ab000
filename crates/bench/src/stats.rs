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

/// The median of what was measured; 0 of nothing.
#[must_use]
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Quantiles of latencies in cycles.
#[derive(Default)]
pub struct Quantiles(Vec<u32>);

impl Quantiles {
    /// Takes note of one.
    pub fn add(&mut self, cycles: u64) {
        self.0.push(u32::try_from(cycles).unwrap_or(u32::MAX));
    }

    /// Takes all of another's.
    pub fn append(&mut self, other: &mut Self) {
        self.0.append(&mut other.0);
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The mean; 0 of nothing.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.0.iter().map(|cycles| f64::from(*cycles)).sum::<f64>() / self.0.len().max(1) as f64
    }

    /// The value below which this share of them lies; 0 of nothing.
    pub fn at(&mut self, share: f64) -> f64 {
        self.0.sort_unstable();
        let index = (self.0.len() as f64 * share) as usize;
        self.0.get(index.min(self.0.len().saturating_sub(1))).copied().unwrap_or(0).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_medians() {
        let mut all = Quantiles::default();
        (0..100).rev().for_each(|i| all.add(i));
        assert_eq!((all.at(0.5), all.at(0.99), all.at(1.0)), (50.0, 99.0, 99.0));
        assert_eq!(Quantiles::default().at(0.5), 0.0);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut []), 0.0);
    }
}
