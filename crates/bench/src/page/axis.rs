//! Axes: where a value lies, and which values are labelled.

/// How values are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// Evenly, from 0 on.
    Linear,
    /// By their logarithm: each factor takes the same room.
    Log,
}

/// An axis of some pixels.
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis for values up to `high`; a logarithmic one begins at the smallest.
    pub(super) fn new(scale: Scale, values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let usable = |value: &f64| value.is_finite() && (scale == Scale::Linear || *value > 0.0);
        let high = values.clone().filter(usable).fold(0.0, f64::max);
        let low = values.filter(usable).fold(f64::INFINITY, f64::min);
        let (low, high) = match scale {
            Scale::Linear if high <= 0.0 => (0.0, 1.0),
            Scale::Linear => (0.0, high * 1.08),
            Scale::Log if !low.is_finite() || high <= 0.0 => (1.0, 10.0),
            Scale::Log if high / low < 1.5 => (low / 2.0, high * 2.0),
            Scale::Log => (low / 1.2, high * 1.2),
        };
        Self { scale, low, high, from, to }
    }

    /// The position of a value in pixels; values beyond the axis are placed at its end.
    pub(super) fn at(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log if value <= 0.0 => 0.0,
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Whether the axis shows a value.
    pub(super) fn shows(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// The values that are labelled: about six.
    pub(super) fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = nice((self.high - self.low) / 5.0);
                (0..=12).map(|i| f64::from(i) * step).take_while(|value| *value <= self.high).collect()
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10();
                let factors: &[f64] = match decades {
                    d if d <= 1.2 => &[1.0, 2.0, 5.0],
                    d if d <= 3.0 => &[1.0, 3.0],
                    _ => &[1.0],
                };
                let first = self.low.log10().floor() as i32;
                let all = (first..=first + 20)
                    .flat_map(|power| factors.iter().map(move |factor| factor * 10_f64.powi(power)));
                all.filter(|value| self.shows(*value)).collect()
            }
        }
    }
}

/// The smallest of 1, 2, 2.5, 5 times a power of ten that is at least the value.
fn nice(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let found = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|factor| factor * power >= step * 0.999);
    found.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        for values in [[0.0, 55.1], [0.003, 0.9], [1.0, 1e6], [0.0, 0.0], [7.0, 7.0]] {
            for scale in [Scale::Linear, Scale::Log] {
                let axis = Axis::new(scale, values.into_iter(), 0.0, 100.0);
                let ticks = axis.ticks();
                assert!((1..=14).contains(&ticks.len()), "{values:?} {scale:?} {ticks:?}");
                assert!(
                    ticks.iter().all(|tick| axis.shows(*tick) && (0.0..=100.0).contains(&axis.at(*tick)))
                );
            }
        }
        let axis = Axis::new(Scale::Linear, [10.0].into_iter(), 0.0, 100.0);
        assert_eq!(axis.ticks(), [0.0, 2.5, 5.0, 7.5, 10.0]);
        assert_eq!((axis.at(-5.0), axis.at(1e9), axis.at(f64::NAN).is_nan()), (0.0, 100.0, true));
    }
}
