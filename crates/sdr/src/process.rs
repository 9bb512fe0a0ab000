//! Processing on the GPU: conversion to `f32` pairs with gain and DC removal, level measurement, power spectra.

use std::f64::consts::TAU;
use std::sync::Arc;
use std::time::Duration;

use onehop_gpu::{BlockJob, BlockKernels, Gpu, Place, Region};
use onehop_radio::Shape;
use onehop_radio::kernel::{BLOCKS, Checked, Spectrum, Totals};

use crate::{Error, Result};

/// How samples are processed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// Factor for converted samples, whose full scale is 1.
    pub gain: f32,
    /// Whether to subtract the DC offset measured in earlier samples.
    pub remove_dc: bool,
    /// Base-2 logarithm of the number of bins: 6 to 12.
    pub log: u32,
    /// Whether to check that each sample is its number: the board sends a counter.
    pub counter: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { gain: 1.0, remove_dc: true, log: 11, counter: false }
    }
}

/// Measurements of samples since the last call of [`Processor::take`].
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Measurements {
    /// Number of samples.
    pub samples: u64,
    /// Power in dBFS; a full-scale complex tone has 0.
    pub level: f64,
    /// The largest I or Q in dBFS.
    pub peak: f64,
    /// DC offset as a fraction of full scale.
    pub dc: [f64; 2],
    /// Power per bin in dBFS, the lowest frequency first.
    pub spectrum: Vec<f64>,
    /// Samples that differ from the counter; `None` if they are not checked.
    pub wrong: Option<u64>,
    /// Expected and found value of the first wrong sample.
    pub first_wrong: Option<(u32, u32)>,
}

/// Processes blocks of one shape.
pub struct Processor {
    kernels: Box<dyn BlockKernels>,
    shape: Shape,
    settings: Settings,
    converted: Region,
    totals: Region,
    checked: Region,
    window: Region,
    twiddles: Region,
    power: Region,
    /// What a full-scale tone adds to its bin in each frame.
    full_scale_power: f64,
    dc: [f32; 2],
    samples: u64,
    frames: u64,
    /// Whether no block has been processed yet.
    is_new: bool,
    gpu_time: Duration,
}

impl Processor {
    /// Allocates memory and prepares kernels.
    ///
    /// # Errors
    /// When the GPU has no memory, or blocks are too short for a spectrum.
    pub fn new(gpu: &Arc<dyn Gpu>, shape: Shape, settings: Settings) -> Result<Self> {
        let longest = shape.samples().checked_ilog2().unwrap_or(0);
        let log = settings.log.min(longest);
        if !(Spectrum::MIN_LOG..=Spectrum::MAX_LOG).contains(&log) {
            let why =
                format!("2^{log} bins of blocks of {} samples; 2^6 to 2^12 are possible", shape.samples());
            return Err(Error::NotPossible { what: "a spectrum", why });
        }
        let bins = 1usize << log;
        let vram = |bytes| gpu.alloc(Place::Vram, bytes);
        let (window, full_scale_power) = window(bins);
        let this = Self {
            kernels: gpu.block_kernels()?,
            shape,
            settings: Settings { log, ..settings },
            converted: vram(shape.samples() as usize * 8)?,
            totals: vram(BlockJob::TOTALS_BYTES)?,
            checked: vram(BlockJob::CHECKED_BYTES)?,
            window: vram(bins * 4)?,
            twiddles: vram(bins * 4)?,
            power: vram(bins * 4 * BLOCKS as usize)?,
            full_scale_power,
            dc: [0.0; 2],
            samples: 0,
            frames: 0,
            is_new: true,
            gpu_time: Duration::ZERO,
        };
        this.window.write(0, &bytes(window))?;
        this.twiddles.write(0, &bytes(twiddles(bins)))?;
        Ok(this)
    }

    /// Processes a block whose first sample has the number `first`, and waits for completion.
    ///
    /// # Errors
    /// When the memory does not hold a positive multiple of four samples, or the GPU fails.
    pub fn process(&mut self, memory: &Region, first: u64) -> Result<()> {
        self.process_all(&[(memory, first)])
    }

    /// Processes blocks in order, and waits once, for the last: starting a kernel and waiting for it takes longer than
    /// processing a small block. Each element is a block or a part of one, as returned by
    /// [`DetachedBlock::parts`](crate::DetachedBlock::parts).
    ///
    /// # Errors
    /// As for [`Self::process`].
    pub fn process_all(&mut self, blocks: &[(&Region, u64)]) -> Result<()> {
        let mut jobs = Vec::with_capacity(3 * blocks.len());
        let (mut samples, mut frames) = (0, 0);
        for (memory, first) in blocks {
            let count = self.samples_of(memory);
            self.jobs(memory, *first, count, &mut jobs)?;
            samples += u64::from(count);
            frames += u64::from(count >> self.settings.log);
        }
        if jobs.is_empty() {
            return Ok(());
        }
        self.gpu_time += self.kernels.run(&jobs)?;
        self.samples += samples;
        self.frames += frames;
        if std::mem::take(&mut self.is_new) {
            // The first blocks were processed without a known offset.
            self.update_dc(&self.totals()?);
        }
        Ok(())
    }

    /// Number of samples in this memory, at most a block's.
    fn samples_of(&self, memory: &Region) -> u32 {
        let samples = memory.len() / self.shape.format.bytes() as usize;
        u32::try_from(samples).unwrap_or(u32::MAX).min(self.shape.samples())
    }

    /// Appends the kernel jobs for a block.
    fn jobs(&self, memory: &Region, first: u64, samples: u32, jobs: &mut Vec<BlockJob>) -> Result<()> {
        let format = self.shape.format;
        let frames = samples >> self.settings.log;
        let dc = if self.settings.remove_dc { self.dc } else { [0.0; 2] };
        let from = (memory, format);
        jobs.push(BlockJob::convert(from, &self.converted, &self.totals, samples, self.settings.gain, dc)?);
        if frames > 0 {
            jobs.push(BlockJob::spectrum(
                &self.converted,
                &self.window,
                &self.twiddles,
                &self.power,
                frames,
                self.settings.log,
            )?);
        }
        if self.settings.counter {
            jobs.push(BlockJob::check(from, &self.checked, samples, first as u32)?);
        }
        Ok(())
    }

    /// The converted samples of the last block, or part of one: pairs of `f32` in GPU memory.
    #[must_use]
    pub fn converted(&self) -> &Region {
        &self.converted
    }

    /// Total processing time, measured by the GPU.
    #[must_use]
    pub fn gpu_time(&self) -> Duration {
        self.gpu_time
    }

    /// Number of bins of a spectrum.
    #[must_use]
    pub fn bins(&self) -> usize {
        1 << self.settings.log
    }

    /// The measurements since the last call.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn take(&mut self) -> Result<Measurements> {
        let totals = self.totals()?;
        let count = self.samples.max(1) as f64;
        let mean = totals.power as f64 / count / FULL_SCALE / FULL_SCALE;
        let dc = [totals.i, totals.q].map(|sum| sum as f64 / count / FULL_SCALE);
        let wrong = self.wrong()?;
        let measurements = Measurements {
            samples: self.samples,
            level: decibels(mean),
            peak: 2.0 * decibels(f64::from(totals.peak) / FULL_SCALE),
            dc,
            spectrum: self.spectrum()?,
            wrong: wrong.as_ref().map(|wrong| wrong.count),
            first_wrong: wrong.and_then(|wrong| wrong.first),
        };
        if self.samples > 0 {
            self.update_dc(&totals);
        }
        for rows in [&self.totals, &self.power, &self.checked] {
            rows.fill(0, rows.len(), 0)?;
        }
        (self.samples, self.frames) = (0, 0);
        Ok(measurements)
    }

    fn update_dc(&mut self, totals: &Totals) {
        let count = self.samples.max(1) as f64;
        self.dc = [totals.i, totals.q].map(|sum| (sum as f64 / count / FULL_SCALE) as f32);
    }

    fn totals(&self) -> Result<Totals> {
        let rows = words(&self.totals)?;
        Ok(rows
            .as_chunks()
            .0
            .iter()
            .map(|row| Totals::from_words(*row))
            .fold(Totals::default(), Totals::plus))
    }

    fn wrong(&self) -> Result<Option<Wrong>> {
        if !self.settings.counter {
            return Ok(None);
        }
        let rows: Vec<_> =
            words(&self.checked)?.as_chunks().0.iter().map(|row| Checked::from_words(*row)).collect();
        let count = rows.iter().map(|row| u64::from(row.wrong)).sum();
        let first = rows.iter().find(|row| row.wrong > 0).map(|row| (row.expected, row.found));
        Ok(Some(Wrong { count, first }))
    }

    fn spectrum(&self) -> Result<Vec<f64>> {
        let bins = self.bins();
        let mut sums = vec![0.0; bins];
        for row in words(&self.power)?.chunks_exact(bins) {
            for (sum, word) in sums.iter_mut().zip(row) {
                *sum += f64::from(f32::from_bits(*word));
            }
        }
        let gain = f64::from(self.settings.gain).powi(2);
        let scale = 1.0 / (self.full_scale_power * gain * self.frames.max(1) as f64);
        // Bin 0 goes to the middle: bins of the upper half are negative frequencies.
        let order = (bins / 2..bins).chain(0..bins / 2);
        Ok(order.map(|bin| decibels(sums[bin] * scale)).collect())
    }
}

/// The number of wrong samples, and of the first one the expected and found value.
struct Wrong {
    count: u64,
    first: Option<(u32, u32)>,
}

/// The largest magnitude of a sample.
const FULL_SCALE: f64 = 32768.0;

/// Power that is added so that silence has a finite level.
const FLOOR: f64 = 1e-20;

fn decibels(power: f64) -> f64 {
    10.0 * power.max(FLOOR).log10()
}

/// Hann's window, and what a full-scale tone adds to its bin.
fn window(bins: usize) -> (Vec<f32>, f64) {
    let weight = |n: usize| 0.5 - 0.5 * (TAU * n as f64 / bins as f64).cos();
    let sum: f64 = (0..bins).map(weight).sum();
    ((0..bins).map(|n| weight(n) as f32).collect(), sum * sum)
}

/// `exp(-2πi k/n)` for the first half.
fn twiddles(bins: usize) -> Vec<f32> {
    let turn = |k: usize| TAU * k as f64 / bins as f64;
    (0..bins / 2).flat_map(|k| [turn(k).cos() as f32, -turn(k).sin() as f32]).collect()
}

fn bytes(values: Vec<f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn words(region: &Region) -> Result<Vec<u32>> {
    let mut bytes = vec![0; region.len() / 4 * 4];
    region.read(0, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}
