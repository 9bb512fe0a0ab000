//! Checks samples of a counter, in which sample `n` has the bits of `n`: this proves that every sample arrived once and
//! in its place.

use core::mem::{offset_of, size_of};

use onehop_proto::GpuAddr;

use super::{Block, four, join, pair};
use crate::Format;

/// The kernel's arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Check {
    /// Samples in wire format, aligned to 16.
    pub from: u64,
    /// A row of [`Checked::BYTES`] for each block, which accumulates results.
    pub rows: u64,
    /// Number of samples: a multiple of 4.
    pub samples: u32,
    /// [`Format::width`].
    pub width: u32,
    /// The number of the first sample.
    pub first: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<Check>() == 32 && offset_of!(Check, samples) == 16);

impl Check {
    /// The arguments as words.
    #[must_use]
    pub const fn words(&self) -> [u64; 4] {
        let Self { from, rows, samples, width, first, pad } = *self;
        [from, rows, pair(samples, width), pair(first, pad)]
    }
}

/// A block's result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Checked {
    /// Number of wrong samples.
    pub wrong: u32,
    /// The number of the first wrong one.
    pub expected: u32,
    /// Its value.
    pub found: u32,
}

impl Checked {
    /// Bytes of a block's row.
    pub const BYTES: u64 = 16;

    /// Decodes a row.
    #[must_use]
    pub const fn from_words(words: [u32; 4]) -> Self {
        Self { wrong: words[0], expected: words[1], found: words[2] }
    }
}

/// The kernel.
#[inline(always)]
pub fn check<B: Block>(block: &B, job: &Check) {
    let format = Format::of_width(job.width).unwrap_or(Format::Ci16);
    block.each(|thread| {
        let mut found = Checked::default();
        let mut group = block.number() * block.threads() + thread;
        while group < job.samples / 4 {
            let bits = four(block, GpuAddr(job.from), format, group);
            let mut lane = 0;
            while lane < 4 {
                let expected = job.first.wrapping_add(group * 4 + lane as u32) & format.mask();
                if bits[lane] != expected {
                    if found.wrong == 0 {
                        found = Checked { wrong: 0, expected, found: bits[lane] };
                    }
                    found.wrong += 1;
                }
                lane += 1;
            }
            group += block.count() * block.threads();
        }
        let at = thread * 8;
        block.set_local(at, found.wrong);
        block.set_local(at + 1, found.expected);
        block.set_local(at + 2, found.found);
    });
    join(block, |to, from| {
        let (here, there) = (block.local(to), block.local(from));
        if here == 0 {
            block.set_local(to + 1, block.local(from + 1));
            block.set_local(to + 2, block.local(from + 2));
        }
        block.set_local(to, here.saturating_add(there));
    });
    let row = GpuAddr(job.rows).plus(u64::from(block.number()) * Checked::BYTES);
    block.each(|thread| {
        if thread == 0 {
            let before = block.load(row);
            if before == 0 {
                block.store(row.plus(4), block.local(1));
                block.store(row.plus(8), block.local(2));
            }
            block.store(row, before.saturating_add(block.local(0)));
        }
    });
}
