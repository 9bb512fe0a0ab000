//! The seam to whatever holds the bytes: an image, memory, a drive.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that can be read anywhere. A drive answers in its own error type, put into [`io::Error::other`].
pub trait Blocks: Send + Sync {
    /// How many bytes there are.
    fn size(&self) -> u64;

    /// Fills `out` from byte `offset` on. Any offset and length within the size will be asked for.
    ///
    /// # Errors
    /// When not all of it could be read.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Bytes of a logical block, which partition tables count in. Where it is not known, both usual sizes are tried.
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
    /// Opens an image to be read.
    ///
    /// # Errors
    /// When it cannot be opened, or has no size.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::from_file(File::open(path)?)
    }

    /// An image that is open already.
    ///
    /// # Errors
    /// When it has no size.
    pub fn from_file(mut file: File) -> io::Result<Self> {
        // A block device has no length in its metadata.
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
