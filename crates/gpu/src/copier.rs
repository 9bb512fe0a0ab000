//! Background copies between host memory and GPU memory.

use std::time::Instant;

use crate::{Error, Gpu, Region, Result};

/// Rows of bytes at equal distances in the memory that is copied from, packed in the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Offset of the first row.
    pub from: usize,
    /// Its offset in the other memory.
    pub to: usize,
    /// Bytes of a row.
    pub row: usize,
    /// How many rows.
    pub rows: usize,
    /// Distance between rows.
    pub step: usize,
}

impl Rows {
    /// Bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.row.saturating_mul(self.rows)
    }

    /// Checks that all of them lie within memory of these sizes.
    pub(crate) fn check(&self, from: usize, to: usize) -> Result<()> {
        let refused = |offset, bytes, len| Err(onehop_os::Error::OutOfRange { offset, bytes, len }.into());
        let span = self.rows.saturating_sub(1).saturating_mul(self.step).saturating_add(self.row);
        if self.rows > 1 && self.step < self.row {
            return Err(Error::NotSupported {
                what: format!("copying rows of {} bytes", self.row),
                why: format!("they overlap: they are only {} bytes apart", self.step),
            });
        }
        if self.from > from || span > from - self.from {
            return refused(self.from, span, from);
        }
        if self.to > to || self.bytes() > to - self.to {
            return refused(self.to, self.bytes(), to);
        }
        Ok(())
    }
}

/// A point between copies. They count from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Mark(pub(crate) u64);

/// Copies from one region to another, in the order in which copies were started. The source may be overwritten
/// only once the copies from it are over. Dropping it waits for all of them.
pub trait Copier: Send {
    /// Starts a copy.
    ///
    /// # Errors
    /// When the rows do not lie within the memory, or the GPU fails. The next mark covers the copies that were started.
    fn copy(&mut self, rows: &Rows) -> Result<()>;
    /// Starts all of these copies, in any order among themselves. Many in one call keep a copy engine from pausing
    /// between them.
    ///
    /// # Errors
    /// As for [`Copier::copy`]; some of them may have been started.
    fn copy_all(&mut self, all: &[Rows]) -> Result<()> {
        all.iter().try_for_each(|rows| self.copy(rows))
    }
    /// Makes a copy, and returns when it is over, with as few calls of the driver as possible.
    ///
    /// # Errors
    /// As for [`Copier::copy`] and [`Copier::wait`].
    fn copy_now(&mut self, rows: &Rows) -> Result<()> {
        self.copy(rows)?;
        let mark = self.mark()?;
        self.wait(mark)
    }
    /// A mark after all copies that were started.
    ///
    /// # Errors
    /// When the GPU fails. With [`Error::is_under_way`] the copies continue, and a later mark covers them too.
    fn mark(&mut self) -> Result<Mark>;
    /// Whether everything before a mark is over.
    ///
    /// # Errors
    /// When it failed. It is over unless [`Error::is_under_way`].
    fn is_over(&mut self, mark: Mark) -> Result<bool>;
    /// Waits until everything before a mark is over.
    ///
    /// # Errors
    /// As for [`Copier::is_over`].
    fn wait(&mut self, mark: Mark) -> Result<()>;
}

/// A copier that copies at once: for memory that the CPU reaches.
pub(crate) struct AtOnce {
    from: Region,
    to: Region,
    marks: u64,
}

impl AtOnce {
    pub(crate) fn new(from: Region, to: Region) -> Self {
        Self { from, to, marks: 0 }
    }
}

/// Bytes copied at a time.
const CHUNK: usize = 64 << 10;

impl Copier for AtOnce {
    fn copy(&mut self, rows: &Rows) -> Result<()> {
        rows.check(self.from.len(), self.to.len())?;
        let mut buffer = vec![0; CHUNK.min(rows.row)];
        for row in 0..rows.rows {
            let (from, to) = (rows.from + row * rows.step, rows.to + row * rows.row);
            let mut done = 0;
            while done < rows.row {
                let count = buffer.len().min(rows.row - done);
                self.from.read(from + done, &mut buffer[..count])?;
                self.to.write(to + done, &buffer[..count])?;
                done += count;
            }
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<Mark> {
        self.marks += 1;
        Ok(Mark(self.marks - 1))
    }

    fn is_over(&mut self, _: Mark) -> Result<bool> {
        Ok(true)
    }

    fn wait(&mut self, _: Mark) -> Result<()> {
        Ok(())
    }
}

/// The copy engine's own rate in bytes per second: copies all of `ring`, which is pinned memory, to other memory of the
/// GPU.
///
/// # Errors
/// When the GPU has no room, or fails.
pub fn copy_rate(gpu: &dyn Gpu, ring: &Region) -> Result<f64> {
    const COPIES: usize = 8;
    let bytes = ring.len();
    let to = gpu.arena(bytes)?;
    let mut copier = gpu.copier(ring, &to)?;
    let mut best = 0.0_f64;
    // The first round wakes the link.
    for _ in 0..3 {
        let start = Instant::now();
        for _ in 0..COPIES {
            copier.copy(&Rows { from: 0, to: 0, row: bytes, rows: 1, step: bytes })?;
        }
        let mark = copier.mark()?;
        copier.wait(mark)?;
        best = best.max((COPIES * bytes) as f64 / start.elapsed().as_secs_f64().max(1e-9));
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Emulated, Gpu, Place};

    #[test]
    fn rows_are_packed_and_kept_within_bounds() {
        let gpu = Emulated::new();
        let host = gpu.alloc(Place::PinnedHost, 4096).unwrap();
        let vram = gpu.alloc(Place::Vram, 4096).unwrap();
        let data: Vec<u8> = (0..4096).map(|i| i as u8).collect();
        host.write(0, &data).unwrap();
        let mut copier = gpu.copier(&host, &vram).unwrap();
        let rows = Rows { from: 10, to: 5, row: 3, rows: 4, step: 100 };
        copier.copy(&rows).unwrap();
        let mark = copier.mark().unwrap();
        copier.wait(mark).unwrap();
        assert!(copier.is_over(mark).unwrap());
        let mut got = [0; 12];
        vram.read(5, &mut got).unwrap();
        assert_eq!(got, [10, 11, 12, 110, 111, 112, 210, 211, 212, 54, 55, 56]);
        let mut back = gpu.copier(&vram, &host).unwrap();
        back.copy(&Rows { from: 5, to: 1000, row: 3, rows: 2, step: 6 }).unwrap();
        let mut got = [0; 8];
        host.read(999, &mut got).unwrap();
        assert_eq!(got, [231, 10, 11, 12, 210, 211, 212, 238]);
        for bad in [
            Rows { rows: 42, ..rows },
            Rows { to: 4090, ..rows },
            Rows { from: 4095, rows: 1, ..rows },
            Rows { step: 2, ..rows },
            Rows { step: usize::MAX, ..rows },
            Rows { row: usize::MAX, rows: 1, ..rows },
        ] {
            assert!(copier.copy(&bad).is_err(), "{bad:?}");
        }
    }
}
