//! The received signal: a generator whose samples are the same in every run.

use std::f64::consts::TAU;

use onehop_radio::{Format, Sample};

/// Period of a signal in samples.
const PERIOD: usize = 1 << 16;

/// A signal.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Signal {
    pub(crate) kind: SignalKind,
    /// Frequency of a tone as a fraction of the rate, rounded to a whole number of cycles per period of the generator.
    pub freq: f64,
    /// Level in dBFS: amplitude of a tone or chirp, root mean square of noise.
    pub level: f64,
    /// DC offset as a fraction of full scale.
    pub dc: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SignalKind {
    Tone,
    Noise,
    Chirp,
    Counter,
}

impl Default for Signal {
    fn default() -> Self {
        Self { kind: SignalKind::Tone, freq: 0.125, level: -6.0, dc: 0.0 }
    }
}

impl Signal {
    /// Whether sample `n` has the bits of `n`.
    #[must_use]
    pub fn is_counter(&self) -> bool {
        self.kind == SignalKind::Counter
    }

    pub(crate) const KINDS: &str = "tone, noise, chirp or counter";

    /// Sample `n` has the bits of `n`, which proves that every sample arrived.
    pub const COUNTER: Self = Self { kind: SignalKind::Counter, freq: 0.0, level: 0.0, dc: 0.0 };

    pub(crate) fn kind(name: &str) -> Option<SignalKind> {
        Some(match name {
            "tone" => SignalKind::Tone,
            "noise" => SignalKind::Noise,
            "chirp" => SignalKind::Chirp,
            "counter" => SignalKind::Counter,
            _ => return None,
        })
    }

    fn samples(&self) -> Vec<Sample> {
        let amplitude = 10f64.powf(self.level / 20.0) * 32767.0;
        let cycles = (self.freq * PERIOD as f64).round();
        let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
        let fit = |value: f64| (value + self.dc * 32768.0).round().clamp(-32768.0, 32767.0) as i16;
        let at = |n: usize| {
            let turn = |phase: f64| (amplitude * (TAU * phase).cos(), amplitude * (TAU * phase).sin());
            let (i, q) = match self.kind {
                SignalKind::Tone => turn(cycles * n as f64 / PERIOD as f64 % 1.0),
                // From the lowest frequency to the highest in one period.
                SignalKind::Chirp => turn((n as f64 / PERIOD as f64 - 1.0) * n as f64 / 2.0 % 1.0),
                SignalKind::Noise | SignalKind::Counter => {
                    let scale = amplitude / 2f64.sqrt();
                    (noise.normal() * scale, noise.normal() * scale)
                }
            };
            Sample { i: fit(i), q: fit(q) }
        };
        (0..PERIOD).map(at).collect()
    }
}

/// A generator of one signal in one format.
pub(crate) struct Generator {
    format: Format,
    /// One period in wire format; empty for a counter.
    period: Vec<u8>,
}

impl Generator {
    pub(crate) fn new(signal: &Signal, format: Format) -> Self {
        let mut period = Vec::new();
        if signal.kind != SignalKind::Counter {
            let bytes = format.bytes() as usize;
            for sample in signal.samples() {
                period.extend_from_slice(&format.bits(sample).to_le_bytes()[..bytes]);
            }
        }
        Self { format, period }
    }

    /// Writes the samples from `first` on.
    pub(crate) fn fill(&self, first: u64, out: &mut [u8]) {
        let bytes = self.format.bytes() as usize;
        if self.period.is_empty() {
            match self.format {
                Format::Ci16 => {
                    for (n, sample) in (first..).zip(out.as_chunks_mut::<4>().0) {
                        *sample = (n as u32).to_le_bytes();
                    }
                }
                Format::Ci12 => {
                    for (n, sample) in (first..).zip(out.as_chunks_mut::<3>().0) {
                        let [a, b, c, _] = (n as u32).to_le_bytes();
                        *sample = [a, b, c];
                    }
                }
            }
            return;
        }
        let mut from = (first % PERIOD as u64) as usize * bytes;
        let mut done = 0;
        while done < out.len() {
            let count = (self.period.len() - from).min(out.len() - done);
            out[done..done + count].copy_from_slice(&self.period[from..from + count]);
            done += count;
            from = 0;
        }
    }
}

/// Xorshift; sums of twelve approximate a normal distribution.
struct Noise(u64);

impl Noise {
    fn normal(&mut self) -> f64 {
        let mut sum = -6.0;
        for _ in 0..12 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            sum += (self.0 >> 11) as f64 / (1u64 << 53) as f64;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(signal: &Signal, format: Format, first: u64, count: usize) -> Vec<Sample> {
        let bytes = format.bytes() as usize;
        let mut out = vec![0; count * bytes];
        Generator::new(signal, format).fill(first, &mut out);
        let bits = |chunk: &[u8]| chunk.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
        out.chunks(bytes).map(|chunk| format.sample(bits(chunk))).collect()
    }

    #[test]
    fn a_tone_turns_by_its_frequency() {
        let signal = Signal { freq: 0.25, level: 0.0, ..Signal::default() };
        for format in Format::ALL {
            // Across the end of the period.
            let got = samples(&signal, format, PERIOD as u64 - 2, 4);
            let near = |sample: Sample, i: i32, q: i32| {
                (i32::from(sample.i) - i).abs() <= 16 && (i32::from(sample.q) - q).abs() <= 16
            };
            for (sample, (i, q)) in got.into_iter().zip([(-32767, 0), (0, -32767), (32767, 0), (0, 32767)]) {
                assert!(near(sample, i, q), "{format} {sample:?}");
            }
        }
    }

    #[test]
    fn a_counter_counts() {
        let mut out = [0; 9];
        Generator::new(&Signal::COUNTER, Format::Ci12).fill(0x1_00ff_ffff, &mut out);
        assert_eq!(out, [0xff, 0xff, 0xff, 0, 0, 0, 1, 0, 0]);
    }

    #[test]
    fn noise_has_its_level() {
        let signal = Signal { kind: SignalKind::Noise, level: -20.0, ..Signal::default() };
        let got = samples(&signal, Format::Ci16, 0, PERIOD);
        let power = |s: &Sample| f64::from(s.i).powi(2) + f64::from(s.q).powi(2);
        let mean = got.iter().map(power).sum::<f64>() / got.len() as f64 / 32768f64.powi(2);
        assert!((10.0 * mean.log10() + 20.0).abs() < 0.2, "{mean}");
    }
}
