//! Power spectra: windowed frames, a radix-2 FFT in local memory, and accumulated squares of its bins.

use core::mem::{offset_of, size_of};

use onehop_proto::GpuAddr;

use super::{Block, pair};

/// The kernel's arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Spectrum {
    /// Pairs of `f32`.
    pub from: u64,
    /// The window: an `f32` for each bin.
    pub window: u64,
    /// `exp(-2πi k/n)` for `k` below `n / 2`: pairs of `f32`.
    pub twiddles: u64,
    /// A row of bins of `f32` for each block, which accumulates results.
    pub power: u64,
    /// Number of contiguous frames.
    pub frames: u32,
    /// Base-2 logarithm of a frame's samples: [`Self::MIN_LOG`] to [`Self::MAX_LOG`].
    pub log: u32,
}

const _: () = assert!(size_of::<Spectrum>() == 40 && offset_of!(Spectrum, frames) == 32);

impl Spectrum {
    /// Logarithm of the shortest frame.
    pub const MIN_LOG: u32 = 6;
    /// Logarithm of the longest frame, which fills 32 KiB of local memory.
    pub const MAX_LOG: u32 = 12;

    /// The arguments as words.
    #[must_use]
    pub const fn words(&self) -> [u64; 5] {
        let Self { from, window, twiddles, power, frames, log } = *self;
        [from, window, twiddles, power, pair(frames, log)]
    }

    /// Words of local memory for frames of this logarithm.
    #[must_use]
    pub const fn local_words(log: u32) -> u32 {
        2 << log
    }
}

#[derive(Clone, Copy)]
struct Complex(f32, f32);

#[inline(always)]
fn float<B: Block>(block: &B, base: u64, index: u32) -> f32 {
    f32::from_bits(block.load(GpuAddr(base).plus(u64::from(index) * 4)))
}

#[inline(always)]
fn get<B: Block>(block: &B, index: u32) -> Complex {
    Complex(f32::from_bits(block.local(index * 2)), f32::from_bits(block.local(index * 2 + 1)))
}

#[inline(always)]
fn set<B: Block>(block: &B, index: u32, value: Complex) {
    block.set_local(index * 2, value.0.to_bits());
    block.set_local(index * 2 + 1, value.1.to_bits());
}

/// Adds the power spectra of this block's share of the frames to its row.
#[inline(always)]
pub fn spectrum<B: Block>(block: &B, job: &Spectrum) {
    let mut frame = block.number();
    while frame < job.frames {
        load_frame(block, job, frame);
        let mut stage = 0;
        while stage < job.log {
            butterflies(block, job, stage);
            stage += 1;
        }
        add_power(block, job);
        frame += block.count();
    }
}

/// Loads windowed samples in the order of an in-place transform.
#[inline(always)]
fn load_frame<B: Block>(block: &B, job: &Spectrum, frame: u32) {
    let bins = 1 << job.log;
    let start = GpuAddr(job.from).plus(u64::from(frame) * (bins as u64) * 8);
    block.each(|thread| {
        let mut at = thread;
        while at < bins {
            let weight = float(block, job.window, at);
            let (i, q) = (float(block, start.0, at * 2), float(block, start.0, at * 2 + 1));
            set(block, at.reverse_bits() >> (32 - job.log), Complex(i * weight, q * weight));
            at += block.threads();
        }
    });
}

#[inline(always)]
fn butterflies<B: Block>(block: &B, job: &Spectrum, stage: u32) {
    let (half, count) = (1 << stage, 1 << (job.log - 1));
    block.each(|thread| {
        let mut at = thread;
        while at < count {
            let within = at & (half - 1);
            let low = (at >> stage << (stage + 1)) + within;
            let turn = (within << (job.log - 1 - stage)) * 2;
            let (cos, sin) = (float(block, job.twiddles, turn), float(block, job.twiddles, turn + 1));
            let (a, b) = (get(block, low), get(block, low + half));
            let b = Complex(b.0 * cos - b.1 * sin, b.0 * sin + b.1 * cos);
            set(block, low, Complex(a.0 + b.0, a.1 + b.1));
            set(block, low + half, Complex(a.0 - b.0, a.1 - b.1));
            at += block.threads();
        }
    });
}

#[inline(always)]
fn add_power<B: Block>(block: &B, job: &Spectrum) {
    let bins = 1 << job.log;
    let row = GpuAddr(job.power).plus(u64::from(block.number()) * (bins as u64) * 4);
    block.each(|thread| {
        let mut at = thread;
        while at < bins {
            let Complex(re, im) = get(block, at);
            let place = row.plus(u64::from(at) * 4);
            let sum = f32::from_bits(block.load(place)) + (re * re + im * im);
            block.store(place, sum.to_bits());
            at += block.threads();
        }
    });
}
