//! The part of a drive that holds one volume, with a small cache: walking directories and trees reads the same blocks
//! repeatedly.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{Blocks, Error, Result};

/// Bytes of a cache line: a drive reads this much in about the time of one block.
const LINE: u64 = 16 << 10;
/// Cache lines: 4 MiB, direct-mapped.
const LINES: u64 = 256;

type CacheLine = (u64, Box<[u8]>);

/// The volume's bytes; offsets are relative to its start.
pub(crate) struct Window {
    blocks: Arc<dyn Blocks>,
    start: u64,
    len: u64,
    cache: Mutex<Vec<Option<CacheLine>>>,
}

impl Window {
    /// The window of `len` bytes at `start`, cut at the end of the drive.
    pub(crate) fn new(blocks: Arc<dyn Blocks>, start: u64, len: u64) -> Self {
        let len = len.min(blocks.size().saturating_sub(start));
        Self { blocks, start, len, cache: Mutex::new(Vec::new()) }
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Reads metadata, through the cache.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.is_empty() {
            cache.resize_with(LINES as usize, || None);
        }
        let (mut at, mut out) = (offset, out);
        while !out.is_empty() {
            let (line, within) = (at / LINE, (at % LINE) as usize);
            let slot = &mut cache[(line % LINES) as usize];
            let bytes = match slot {
                Some((number, bytes)) if *number == line => bytes,
                _ => &mut slot.insert((line, self.line(line)?)).1,
            };
            let part = (bytes.len() - within).min(out.len());
            let (now, later) = out.split_at_mut(part);
            now.copy_from_slice(&bytes[within..within + part]);
            out = later;
            at += part as u64;
        }
        Ok(())
    }

    /// Reads metadata into a new buffer. The caller bounds `len`.
    pub(crate) fn vec(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.check(offset, len)?;
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads file data at a byte of the drive. It bypasses the cache: it is large and rarely read twice.
    pub(crate) fn read_drive(&self, position: u64, out: &mut [u8]) -> Result<()> {
        let len = out.len();
        self.blocks.read_at(position, out).map_err(|source| Error::Read { offset: position, len, source })
    }

    fn line(&self, line: u64) -> Result<Box<[u8]>> {
        let offset = line * LINE;
        let mut bytes = vec![0; (self.len - offset).min(LINE) as usize];
        self.read_drive(self.start + offset, &mut bytes)?;
        Ok(bytes.into())
    }

    fn check(&self, offset: u64, len: usize) -> Result<()> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::damaged(
                "volume",
                format!("{len} bytes at {offset} were requested, but it has only {}", self.len),
            )),
        }
    }
}
