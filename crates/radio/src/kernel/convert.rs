//! Converts samples to pairs of `f32` with gain and DC removal, and measures their level.

use core::mem::{offset_of, size_of};

use onehop_proto::GpuAddr;

use super::{Block, add_sum, four, join, local_sum, pair, set_local_sum};
use crate::Format;

/// The kernel's arguments.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[repr(C)]
pub struct Convert {
    /// Samples in wire format, aligned to 16.
    pub from: u64,
    /// Destination of the pairs of `f32`, aligned to 16.
    pub to: u64,
    /// A row of [`Totals::BYTES`] for each block, which accumulates results.
    pub totals: u64,
    /// Number of samples: a multiple of 4.
    pub samples: u32,
    /// [`Format::width`].
    pub width: u32,
    /// Final factor for samples; full scale is 1.
    pub gain: f32,
    /// DC offset to subtract from I; full scale is 1.
    pub dc_i: f32,
    /// DC offset to subtract from Q.
    pub dc_q: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<Convert>() == 48 && offset_of!(Convert, samples) == 24);

impl Convert {
    /// The arguments as words.
    #[must_use]
    pub const fn words(&self) -> [u64; 6] {
        let Self { from, to, totals, samples, width, gain, dc_i, dc_q, pad } = *self;
        let (gain, dc_i, dc_q) = (gain.to_bits(), dc_i.to_bits(), dc_q.to_bits());
        [from, to, totals, pair(samples, width), pair(gain, dc_i), pair(dc_q, pad)]
    }
}

/// Sums over samples, before DC removal and gain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Sum of I; full scale is 32768.
    pub i: i64,
    /// Sum of Q.
    pub q: i64,
    /// Sum of the squares of both.
    pub power: u64,
    /// The largest magnitude of an I or a Q.
    pub peak: u32,
}

impl Totals {
    /// Bytes of a block's row.
    pub const BYTES: u64 = 32;

    /// Decodes a row.
    #[must_use]
    pub const fn from_words(words: [u32; 8]) -> Self {
        const fn wide(low: u32, high: u32) -> u64 {
            low as u64 | (high as u64) << 32
        }
        Self {
            i: wide(words[0], words[1]) as i64,
            q: wide(words[2], words[3]) as i64,
            power: wide(words[4], words[5]),
            peak: words[6],
        }
    }

    /// The sum of both.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            i: self.i.wrapping_add(other.i),
            q: self.q.wrapping_add(other.q),
            power: self.power.wrapping_add(other.power),
            peak: if self.peak > other.peak { self.peak } else { other.peak },
        }
    }
}

/// The kernel.
#[inline(always)]
pub fn convert<B: Block>(block: &B, job: &Convert) {
    let format = Format::of_width(job.width).unwrap_or(Format::Ci16);
    block.each(|thread| {
        let mut sum = Totals::default();
        let mut group = block.number() * block.threads() + thread;
        while group < job.samples / 4 {
            let bits = four(block, GpuAddr(job.from), format, group);
            let to = GpuAddr(job.to).plus(u64::from(group) * 32);
            let mut half = 0;
            while half < 2 {
                let [a, b] = [bits[half * 2], bits[half * 2 + 1]];
                let (first, second) = (one(job, format, a, &mut sum), one(job, format, b, &mut sum));
                let words = [first[0], first[1], second[0], second[1]];
                block.store_four(to.plus(half as u64 * 16), words);
                half += 1;
            }
            group += block.count() * block.threads();
        }
        let at = thread * 8;
        set_local_sum(block, at, sum.i as u64);
        set_local_sum(block, at + 2, sum.q as u64);
        set_local_sum(block, at + 4, sum.power);
        block.set_local(at + 6, sum.peak);
    });
    join(block, |to, from| {
        for sum in [0, 2, 4] {
            let both = local_sum(block, to + sum).wrapping_add(local_sum(block, from + sum));
            set_local_sum(block, to + sum, both);
        }
        block.set_local(to + 6, block.local(to + 6).max(block.local(from + 6)));
    });
    let row = GpuAddr(job.totals).plus(u64::from(block.number()) * Totals::BYTES);
    block.each(|thread| {
        if thread == 0 {
            for sum in [0, 2, 4] {
                add_sum(block, row.plus(u64::from(sum) * 4), local_sum(block, sum));
            }
            let peak = row.plus(24);
            block.store(peak, block.load(peak).max(block.local(6)));
        }
    });
}

/// Converts one sample to the bits of two `f32`.
#[inline(always)]
fn one(job: &Convert, format: Format, bits: u32, sum: &mut Totals) -> [u32; 2] {
    let sample = format.sample(bits);
    let (i, q) = (i64::from(sample.i), i64::from(sample.q));
    sum.i += i;
    sum.q += q;
    sum.power += (i * i + q * q) as u64;
    let peak = u32::from(sample.i.unsigned_abs()).max(u32::from(sample.q.unsigned_abs()));
    sum.peak = sum.peak.max(peak);
    let scaled = |value: i16, dc: f32| ((f32::from(value) * (1.0 / 32768.0) - dc) * job.gain).to_bits();
    [scaled(sample.i, job.dc_i), scaled(sample.q, job.dc_q)]
}
