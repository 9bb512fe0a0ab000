//! The seam to the bytes that hold a volume: an image, memory, a drive.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A source of bytes, readable at any offset. A drive wraps its own error type in [`io::Error::other`].
pub trait Blocks: Send + Sync {
    /// The number of bytes.
    fn size(&self) -> u64;

    /// Fills `out` from byte `offset` on. Any offset and length within the size may be requested.
    ///
    /// # Errors
    /// When not all of it could be read.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Bytes of a logical block, the unit of partition tables. If `None`, both usual sizes are tried.
    fn lba_bytes(&self) -> Option<u32> {
        None
    }
}

impl Blocks for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|o| self.get(o..)?.get(..out.len()));
        out.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A file or block device that holds a drive's bytes.
#[derive(Debug)]
pub struct Image {
    file: File,
    size: u64,
}

impl Image {
    /// Opens an image for reading.
    ///
    /// # Errors
    /// When it cannot be opened, or its size cannot be determined.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::from_file(File::open(path)?)
    }

    /// Wraps an image that is already open.
    ///
    /// # Errors
    /// When its size cannot be determined.
    pub fn from_file(mut file: File) -> io::Result<Self> {
        // Metadata reports no length for a block device.
        let size = file.seek(SeekFrom::End(0))?;
        Ok(Self { file, size })
    }
}

impl Blocks for Image {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }
}

/// Byte access to a drive that reads whole blocks; unaligned reads go through a buffer.
pub struct WholeBlocks<F> {
    lba_bytes: u32,
    blocks: u64,
    read: F,
}

/// Size of the buffer for unaligned reads.
const COPY_BYTES: u64 = 1 << 20;

impl<F: Fn(u64, &mut [u8]) -> io::Result<()> + Send + Sync> WholeBlocks<F> {
    /// A drive of `blocks` blocks. `read` fills a buffer of whole blocks, starting at the given block.
    ///
    /// # Panics
    /// If `lba_bytes` is zero.
    pub fn new(lba_bytes: u32, blocks: u64, read: F) -> Self {
        assert!(lba_bytes > 0, "a block has bytes");
        Self { lba_bytes, blocks, read }
    }
}

impl<F: Fn(u64, &mut [u8]) -> io::Result<()> + Send + Sync> Blocks for WholeBlocks<F> {
    fn size(&self) -> u64 {
        self.blocks.saturating_mul(self.lba_bytes.into())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let lba = u64::from(self.lba_bytes);
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.size()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if offset.is_multiple_of(lba) && (out.len() as u64).is_multiple_of(lba) {
            return (self.read)(offset / lba, out);
        }
        let mut at = offset;
        for part in out.chunks_mut(COPY_BYTES as usize) {
            let (first, end) = (at / lba, (at + part.len() as u64).div_ceil(lba));
            let mut copy = vec![0; ((end - first) * lba) as usize];
            (self.read)(first, &mut copy)?;
            part.copy_from_slice(&copy[(at - first * lba) as usize..][..part.len()]);
            at += part.len() as u64;
        }
        Ok(())
    }

    fn lba_bytes(&self) -> Option<u32> {
        Some(self.lba_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_are_read_as_bytes() {
        let disk: Vec<u8> = (0..3 << 20).map(|i: u32| (i % 251) as u8).collect();
        let blocks = WholeBlocks::new(4096, 768, |first, out: &mut [u8]| {
            assert!(out.len().is_multiple_of(4096));
            disk.read_at(first * 4096, out)
        });
        assert_eq!(blocks.size(), 3 << 20);
        for (offset, len) in
            [(0, 4096), (1, 1), (4095, 2), (8192, 0), (100, 2 << 20), (4096, 8192), ((3 << 20) - 1, 1)]
        {
            let mut out = vec![0; len];
            blocks.read_at(offset, &mut out).unwrap();
            assert!(out == disk[offset as usize..][..len], "{len} bytes at {offset}");
        }
        for (offset, len) in [(3 << 20, 1), ((3 << 20) - 1, 2), (u64::MAX, 1)] {
            assert!(blocks.read_at(offset, &mut vec![0; len]).is_err());
        }
    }
}
