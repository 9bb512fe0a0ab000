//! Compares the kernels with a CPU computation in `f64`, on the emulated GPU or a real one.

use std::f64::consts::TAU;

use onehop_gpu::Place;
use onehop_radio::{BoardLimits, Format, Sample, Shape};
use onehop_sdr::{Processor, RxOptions, Settings};

use crate::common::{LONG, bench, gpu};

/// Pseudo-random samples with all bit patterns.
fn samples(format: Format, count: u32) -> Vec<Sample> {
    let mut state = 0x1234_5678_9abc_def0u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u32
    };
    (0..count).map(|_| format.sample(next() & format.mask())).collect()
}

fn wire(format: Format, samples: &[Sample]) -> Vec<u8> {
    let one = |sample: &Sample| format.bits(*sample).to_le_bytes()[..format.bytes() as usize].to_vec();
    samples.iter().flat_map(one).collect()
}

/// The spectrum by its definition, without the mean.
fn reference(samples: &[Sample], bins: usize, dc: [f64; 2]) -> Vec<f64> {
    let weight = |n: usize| 0.5 - 0.5 * (TAU * n as f64 / bins as f64).cos();
    let unit: f64 = (0..bins).map(weight).sum::<f64>().powi(2);
    let mut power = vec![0.0; bins];
    let frames = samples.len() / bins;
    for frame in samples.chunks_exact(bins) {
        for (bin, power) in power.iter_mut().enumerate() {
            let (mut re, mut im) = (0.0, 0.0);
            for (n, sample) in frame.iter().enumerate() {
                let (i, q) = (f64::from(sample.i) / 32768.0 - dc[0], f64::from(sample.q) / 32768.0 - dc[1]);
                let (sin, cos) = (-TAU * (bin * n % bins) as f64 / bins as f64).sin_cos();
                re += weight(n) * (i * cos - q * sin);
                im += weight(n) * (i * sin + q * cos);
            }
            *power += (re * re + im * im) / unit / frames as f64;
        }
    }
    (bins / 2..bins).chain(0..bins / 2).map(|bin| 10.0 * power[bin].max(1e-20).log10()).collect()
}

#[test]
fn kernels_match_the_reference() {
    let gpu = gpu();
    for (format, log) in [(Format::Ci16, 6), (Format::Ci12, 8), (Format::Ci16, 10)] {
        let shape = Shape { format, burst_samples: 4096, bursts: 1 };
        shape.check(&BoardLimits::USDR_RX).unwrap();
        let samples = samples(format, shape.samples());
        let memory = gpu.alloc(Place::Vram, shape.bytes() as usize).unwrap();
        memory.write(0, &wire(format, &samples)).unwrap();
        let settings = Settings { gain: 0.5, remove_dc: false, log, counter: false };
        let mut processor = Processor::new(&gpu, shape, settings).unwrap();
        processor.process(&memory, 0).unwrap();
        let mut converted = vec![0; samples.len() * 8];
        processor.converted().read(0, &mut converted).unwrap();
        for (sample, pair) in samples.iter().zip(converted.as_chunks::<8>().0) {
            let float = |at: usize| f64::from(f32::from_le_bytes(pair[at..at + 4].try_into().unwrap()));
            let expected = [sample.i, sample.q].map(|value| f64::from(value) / 65536.0);
            assert!(
                (float(0) - expected[0]).abs() < 1e-6 && (float(4) - expected[1]).abs() < 1e-6,
                "{sample:?}"
            );
        }
        let measurements = processor.take().unwrap();
        let power: f64 = samples.iter().map(|s| f64::from(s.i).powi(2) + f64::from(s.q).powi(2)).sum();
        let level = 10.0 * (power / samples.len() as f64 / 32768f64.powi(2)).log10();
        assert!((measurements.level - level).abs() < 1e-9, "{} {level}", measurements.level);
        let mean = samples.iter().map(|s| f64::from(s.i)).sum::<f64>() / samples.len() as f64 / 32768.0;
        assert!((measurements.dc[0] - mean).abs() < 1e-12);
        assert_eq!(measurements.samples, u64::from(shape.samples()));
        let expected = reference(&samples, 1 << log, [0.0; 2]);
        for (bin, (got, want)) in measurements.spectrum.iter().zip(&expected).enumerate() {
            assert!((got - want).abs() < 0.01, "{format} 2^{log}: bin {bin} is {got}, should be {want}");
        }
        // `take` resets the totals.
        processor.process(&memory, 0).unwrap();
        let again = processor.take().unwrap();
        assert!((again.level - level).abs() < 1e-9 && again.samples == measurements.samples);
    }
}

#[test]
fn dc_is_removed() {
    let gpu = gpu();
    let shape = Shape { format: Format::Ci16, burst_samples: 1024, bursts: 1 };
    let tone = |n: u32| {
        let (sin, cos) = (TAU * f64::from(n) / 8.0).sin_cos();
        Sample { i: (8192.0 * cos + 3277.0) as i16, q: (8192.0 * sin - 6554.0) as i16 }
    };
    let samples: Vec<_> = (0..shape.samples()).map(tone).collect();
    let memory = gpu.alloc(Place::Vram, shape.bytes() as usize).unwrap();
    memory.write(0, &wire(Format::Ci16, &samples)).unwrap();
    let mut processor = Processor::new(&gpu, shape, Settings { log: 8, ..Settings::default() }).unwrap();
    processor.process(&memory, 0).unwrap();
    let first = processor.take().unwrap();
    assert!((first.dc[0] - 0.1).abs() < 1e-3 && (first.dc[1] + 0.2).abs() < 1e-3, "{:?}", first.dc);
    assert!(first.spectrum[128] > -20.0, "the offset is unknown in the first block");
    processor.process(&memory, 0).unwrap();
    let second = processor.take().unwrap();
    assert!(second.spectrum[128] < -60.0, "{}", second.spectrum[128]);
    // A call of `take` without samples keeps the known offset.
    assert_eq!(processor.take().unwrap().samples, 0);
    processor.process(&memory, 0).unwrap();
    let third = processor.take().unwrap();
    assert!(third.spectrum[128] < -60.0, "{}", third.spectrum[128]);
    // A tone at an eighth of the rate and a quarter of full scale.
    assert!((second.spectrum[160] - 20.0 * 0.25f64.log10()).abs() < 0.1, "{}", second.spectrum[160]);
}

#[test]
fn a_wrong_sample_is_found() {
    for format in Format::ALL {
        let bench = bench("usdr?signal=counter&rate=50M");
        let shape = bench.shape(format, 24 << 10);
        let settings = Settings { counter: true, ..Settings::default() };
        let mut processor = Processor::new(&bench.gpu, shape, settings).unwrap();
        let mut receiver = bench.receiver(&RxOptions { self_test: None, ..RxOptions::new(shape) }).unwrap();
        receiver.start().unwrap();
        for _ in 0..3 {
            let block = receiver.acquire(LONG).unwrap().unwrap();
            processor.process(block.memory(), block.first).unwrap();
        }
        assert_eq!(processor.take().unwrap().wrong, Some(0));
        let block = receiver.acquire(LONG).unwrap().unwrap();
        let at = 1001 * format.bytes() as usize;
        let mut byte = [0];
        block.memory().read(at, &mut byte).unwrap();
        block.memory().write(at, &[byte[0] ^ 0x40]).unwrap();
        processor.process(block.memory(), block.first).unwrap();
        let expected = (block.first as u32 + 1001) & format.mask();
        drop(block);
        let measurements = processor.take().unwrap();
        assert_eq!(
            (measurements.wrong, measurements.first_wrong),
            (Some(1), Some((expected, expected ^ 0x40)))
        );
    }
}
