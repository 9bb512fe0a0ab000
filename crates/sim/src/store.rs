//! Storage of a drive's bytes: sparse memory, or an image file.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::engine::Blocks;
use crate::{Error, Result};

const CHUNK: usize = 64 << 10;
static ZEROS: [u8; CHUNK] = [0; CHUNK];

/// Bytes that can be read and written anywhere. Clones of a file are the same file.
pub(crate) enum Store {
    /// Chunks are allocated when first written.
    Memory { chunks: HashMap<u64, Box<[u8]>>, len: u64 },
    /// A part of a file.
    File {
        file: Arc<LockedImage>,
        /// Start of the part.
        start: u64,
    },
    /// Stored by the engine that executes the commands.
    Engine(Arc<dyn Blocks>),
}

/// An image file that no other drive can open.
pub(crate) struct LockedImage(File);

impl LockedImage {
    fn try_lock(file: File) -> std::result::Result<Self, TryLockError> {
        file.try_lock()?;
        Ok(Self(file))
    }
}

impl Drop for LockedImage {
    /// Closing the file would not unlock it if a child process was forked and has not yet started its program.
    fn drop(&mut self) {
        self.0.unlock().ok();
    }
}

impl Store {
    /// Zeroed memory.
    pub(crate) fn memory(bytes: u64) -> Self {
        Self::Memory { chunks: HashMap::new(), len: bytes }
    }

    /// Checks the range in memory; a file checks itself.
    fn check(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match self {
            Self::Memory { len, .. } if offset > *len || bytes > len - offset => {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.check(offset, out.len() as u64)?;
        match self {
            Self::File { file, start } => file.0.read_exact_at(out, start + offset),
            Self::Engine(blocks) => blocks.read(offset, out),
            Self::Memory { chunks, .. } => {
                for (chunk, from, to) in chunk_parts(offset, out.len()) {
                    let into = &mut out[to];
                    match chunks.get(&chunk) {
                        Some(bytes) => into.copy_from_slice(&bytes[from..from + into.len()]),
                        None => into.fill(0),
                    }
                }
                Ok(())
            }
        }
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len() as u64)?;
        match self {
            Self::File { file, start } => file.0.write_all_at(data, *start + offset),
            Self::Engine(blocks) => blocks.write(offset, data),
            Self::Memory { chunks, .. } => {
                for (chunk, at, part) in chunk_parts(offset, data.len()) {
                    let bytes = chunks.entry(chunk).or_insert_with(|| vec![0; CHUNK].into());
                    bytes[at..at + part.len()].copy_from_slice(&data[part]);
                }
                Ok(())
            }
        }
    }

    /// Zeroes a range; frees whole chunks of memory.
    pub(crate) fn zero(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.check(offset, bytes)?;
        let (size, end) = (CHUNK as u64, offset + bytes);
        let first_whole = offset.next_multiple_of(size).min(end);
        let last_whole = (end - end % size).max(first_whole);
        self.zero_part(offset, first_whole)?;
        self.zero_chunks(first_whole / size..last_whole / size)?;
        self.zero_part(last_whole, end)
    }

    /// Zeroes a part of one chunk.
    fn zero_part(&mut self, from: u64, to: u64) -> io::Result<()> {
        match self {
            Self::Memory { chunks, .. } if !chunks.contains_key(&(from / CHUNK as u64)) => Ok(()),
            _ => self.write(from, &ZEROS[..(to - from) as usize]),
        }
    }

    /// Zeroes whole chunks.
    fn zero_chunks(&mut self, which: std::ops::Range<u64>) -> io::Result<()> {
        match self {
            Self::Memory { chunks, .. } if which.end.saturating_sub(which.start) > chunks.len() as u64 => {
                chunks.retain(|chunk, _| !which.contains(chunk));
            }
            Self::Memory { chunks, .. } => which.for_each(|chunk| drop(chunks.remove(&chunk))),
            Self::File { .. } | Self::Engine(_) => {
                for chunk in which {
                    self.write(chunk * CHUNK as u64, &ZEROS)?;
                }
            }
        }
        Ok(())
    }
}

/// The parts of a range by chunk: the chunk, the offset in it, and the part of the caller's buffer.
fn chunk_parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let within = (at % CHUNK as u64) as usize;
        let step = (CHUNK - within).min(len - done);
        let part = (at / CHUNK as u64, within, done..done + step);
        done += step;
        Some(part)
    })
}

/// Opens an image exclusively, creating or extending it if a size is given; returns its length.
pub(crate) fn open_image(path: &Path, size: Option<u64>) -> Result<(Arc<LockedImage>, u64)> {
    let refuse = |why: &str| Error::NotAnImage { path: path.into(), why: why.into() };
    let failed = |call, hint| move |source| Error::Image { path: path.into(), call, source, hint };
    let known = std::fs::metadata(path).ok();
    match &known {
        Some(meta) if meta.is_dir() => return Err(refuse("it is a directory; give a file in it")),
        Some(meta) if !meta.is_file() => {
            return Err(refuse("it is not a regular file; a simulated drive never opens devices"));
        }
        None if size.is_none() => {
            return Err(refuse("there is no such file; size=64M would create it"));
        }
        _ => {}
    }
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .write(true)
        .create(size.is_some())
        .truncate(false)
        .open(path)
        .map_err(failed("open", "; it has to be readable and writable"))?;
    let image = LockedImage::try_lock(file).map_err(|error| match error {
        TryLockError::WouldBlock => refuse("another drive has it open; stop that one first"),
        TryLockError::Error(e) => failed("lock", "")(e),
    })?;
    let file = &image.0;
    let len = file.metadata().map_err(failed("fstat", ""))?.len();
    let len = match size {
        Some(size) if size > len => {
            file.set_len(size).map_err(failed("set_len", "; is the file system full?"))?;
            size
        }
        _ => len,
    };
    Ok((Arc::new(image), len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_keeps_no_image() {
        let path = std::env::temp_dir().join(format!("onehop-sim-lock-{}", std::process::id()));
        let (image, _) = open_image(&path, Some(4096)).unwrap();
        // As a fork does: the open file exists twice.
        let inherited = image.0.try_clone().unwrap();
        assert!(open_image(&path, None).is_err());
        drop(image);
        open_image(&path, None).unwrap();
        drop(inherited);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn memory_is_sparse_and_exact() {
        let mut store = Store::memory(200_000);
        let data: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        store.write(30_000, &data).unwrap();
        let mut out = vec![9; 100_002];
        store.read(29_999, &mut out).unwrap();
        assert_eq!((out[0], out[100_001]), (0, 0));
        assert_eq!(&out[1..100_001], &data);
        store.zero(40_000, 90_000).unwrap();
        store.read(29_999, &mut out).unwrap();
        assert_eq!(&out[1..10_001], &data[..10_000]);
        assert!(out[10_001..].iter().all(|b| *b == 0));
        assert!(store.write(1 << 40, &[1]).is_err());
    }
}
