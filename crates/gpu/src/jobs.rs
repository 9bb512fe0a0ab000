//! Kernels that work on data: the checks before one is started, so that it only accesses its own memory.

use std::time::Duration;

use onehop_block::crc32c::{self, GpuRange, Sum};
use onehop_radio::Format;
use onehop_radio::kernel::{self, BLOCKS, Check, Checked, Convert, Spectrum, Totals};

use crate::{Error, Region, Result};

/// Maximum blocks of a sum: each loads the tables, and no GPU runs more at once.
const SUM_BLOCKS: u64 = 1024;

/// A kernel's work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BlockWork {
    Convert(Convert),
    Spectrum(Spectrum),
    Check(Check),
    Sum(Sum),
}

/// A kernel with the memory that it works on.
#[derive(Clone, Debug)]
pub struct BlockJob {
    pub(crate) work: BlockWork,
    pub(crate) blocks: u32,
    /// Kept until it has ended.
    pub(crate) memory: Vec<Region>,
}

/// Runs such kernels.
pub trait BlockKernels: Send {
    /// Runs jobs one after the other, and waits for the last. Returns their time by the GPU's clock.
    ///
    /// # Errors
    /// When they cannot be started, or fail.
    fn run(&mut self, jobs: &[BlockJob]) -> Result<Duration>;
}

/// Checks that a region has this many bytes, 16-byte aligned.
fn holds(what: &str, region: &Region, bytes: u64) -> Result<()> {
    if (region.len() as u64) < bytes || !region.addr().0.is_multiple_of(16) {
        let at = region.addr();
        let why = format!("{what} needs {bytes} bytes on a multiple of 16, and has {} at {at}", region.len());
        return Err(Error::Launch(why));
    }
    Ok(())
}

fn fours(samples: u32) -> Result<()> {
    if samples == 0 || !samples.is_multiple_of(4) {
        return Err(Error::Launch(format!("{samples} samples are not a multiple of 4")));
    }
    Ok(())
}

impl BlockJob {
    /// Bytes of the rows of totals of [`Self::convert`].
    pub const TOTALS_BYTES: usize = (Totals::BYTES * BLOCKS as u64) as usize;
    /// Bytes of the rows of [`Self::check`].
    pub const CHECKED_BYTES: usize = (Checked::BYTES * BLOCKS as u64) as usize;

    /// Converts samples to pairs of `f32`, minus the DC offset, times a gain; adds to the totals' rows.
    ///
    /// # Errors
    /// When a region is too short.
    pub fn convert(
        (from, format): (&Region, Format),
        to: &Region,
        totals: &Region,
        samples: u32,
        gain: f32,
        dc: [f32; 2],
    ) -> Result<Self> {
        fours(samples)?;
        holds("the samples", from, u64::from(samples) * u64::from(format.bytes()))?;
        holds("what they become", to, u64::from(samples) * 8)?;
        holds("the totals", totals, Self::TOTALS_BYTES as u64)?;
        let work = BlockWork::Convert(Convert {
            from: from.addr().0,
            to: to.addr().0,
            totals: totals.addr().0,
            samples,
            width: format.width(),
            gain,
            dc_i: dc[0],
            dc_q: dc[1],
            pad: 0,
        });
        Ok(Self { work, blocks: BLOCKS, memory: vec![from.clone(), to.clone(), totals.clone()] })
    }

    /// Adds the power spectra of frames of `1 << log` pairs of `f32` to the rows of `power`.
    ///
    /// # Errors
    /// When a region is too short, or the frames are.
    pub fn spectrum(
        from: &Region,
        window: &Region,
        twiddles: &Region,
        power: &Region,
        frames: u32,
        log: u32,
    ) -> Result<Self> {
        if !(Spectrum::MIN_LOG..=Spectrum::MAX_LOG).contains(&log) || frames == 0 {
            return Err(Error::Launch(format!(
                "{frames} frames of 2^{log} samples; 2^6 to 2^12 are possible"
            )));
        }
        let bins = 1u64 << log;
        holds("the frames", from, bins * 8 * u64::from(frames))?;
        holds("the window", window, bins * 4)?;
        holds("the twiddles", twiddles, bins * 4)?;
        holds("the power", power, bins * 4 * u64::from(BLOCKS))?;
        let [from_at, window_at, twiddles_at, power_at] = [from, window, twiddles, power].map(|r| r.addr().0);
        let work = BlockWork::Spectrum(Spectrum {
            from: from_at,
            window: window_at,
            twiddles: twiddles_at,
            power: power_at,
            frames,
            log,
        });
        Ok(Self { work, blocks: BLOCKS, memory: [from, window, twiddles, power].map(Region::clone).into() })
    }

    /// Checks whether samples are those of a counter from `first` on; adds to the rows.
    ///
    /// # Errors
    /// When a region is too short.
    pub fn check((from, format): (&Region, Format), rows: &Region, samples: u32, first: u32) -> Result<Self> {
        fours(samples)?;
        holds("the samples", from, u64::from(samples) * u64::from(format.bytes()))?;
        holds("the rows", rows, Self::CHECKED_BYTES as u64)?;
        let (from_at, rows_at, width) = (from.addr().0, rows.addr().0, format.width());
        let work = BlockWork::Check(Check { from: from_at, rows: rows_at, samples, width, first, pad: 0 });
        Ok(Self { work, blocks: BLOCKS, memory: vec![from.clone(), rows.clone()] })
    }

    /// The bare remainders of a range's chunks, written to `out` from word `to` on; [`GpuRange::finish`] makes a CRC32C
    /// of them.
    ///
    /// # Errors
    /// When a region is too short, or the range is not within its own.
    pub(crate) fn sum(
        region: &Region,
        range: GpuRange,
        tables: &Region,
        (out, to): (&Region, u64),
    ) -> Result<Self> {
        let (start, end) = (region.addr().0, region.addr().0 + region.len() as u64);
        if range.at.0 < start || range.at.0.checked_add(range.bytes).is_none_or(|last| last > end) {
            let why = format!("{} bytes at {} are not within the memory to be summed", range.bytes, range.at);
            return Err(Error::Launch(why));
        }
        let job = range.job(tables.addr(), out.addr().plus(to * 4));
        holds("the tables", tables, u64::from(crc32c::TABLE_WORDS) * 4)?;
        holds("the remainders", out, (to + job.chunks()) * 4)?;
        let blocks = job.chunks().min(SUM_BLOCKS) as u32;
        Ok(Self {
            work: BlockWork::Sum(job),
            blocks,
            memory: [region, tables, out].map(Region::clone).into(),
        })
    }

    /// Words of local memory of a block.
    pub(crate) fn local_words(&self) -> u32 {
        match self.work {
            BlockWork::Spectrum(job) => Spectrum::local_words(job.log),
            BlockWork::Convert(_) | BlockWork::Check(_) => kernel::LOCAL_WORDS,
            BlockWork::Sum(_) => crc32c::LOCAL_WORDS,
        }
    }
}
