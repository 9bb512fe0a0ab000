//! Files on a drive that onehop drives: its file system is read by ourselves, and a file becomes commands.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use onehop_drive::{Buffer, Drive, GpuJob, IoQueue, Namespace};
use onehop_files::{Extent, File, Place, Volume, Which, WholeBlocks};
use onehop_gpu::Region;

use crate::error::{CliError, Result};

/// How much of a drive is read at a time to find a file.
const PIECE: u64 = 128 << 10;

/// The drive as the CPU reads it: for directories, not for data.
struct Reader {
    queue: IoQueue,
    ns: Namespace,
    buffer: Buffer,
    block: u64,
}

impl Reader {
    fn read(&self, lba: u64, out: &mut [u8]) -> io::Result<()> {
        let mut lba = lba;
        for part in out.chunks_mut(PIECE as usize) {
            let blocks = part.len() as u64 / self.block;
            self.queue.read(&self.ns, lba, blocks, &self.buffer, 0).map_err(io::Error::other)?;
            self.buffer.host().map_err(io::Error::other)?.read(0, part).map_err(io::Error::other)?;
            lba += blocks;
        }
        Ok(())
    }
}

/// Opens the file system on a drive, or on one of its partitions.
pub(crate) fn open(drive: &Drive, ns: &Namespace, partition: Option<u32>) -> Result<Volume> {
    let block = ns.format.lba_bytes();
    if ns.format.transfer_bytes(1) != Some(block) {
        return Err(CliError::not_possible(
            format!("reading files of namespace {}", ns.nsid),
            "its blocks carry metadata, which no file system knows of",
            "Read its blocks: --lba, --blocks",
        ));
    }
    let reader =
        Reader { queue: drive.queue()?, ns: ns.clone(), buffer: drive.buffer(PIECE as usize)?, block };
    let reader = Mutex::new(reader);
    let read =
        move |lba: u64, out: &mut [u8]| reader.lock().unwrap_or_else(PoisonError::into_inner).read(lba, out);
    let which = partition.map_or(Which::Auto, Which::Partition);
    Ok(Volume::open(Arc::new(WholeBlocks::new(block as u32, ns.blocks, read)), which)?)
}

/// A part of a file, as commands and what needs none.
#[derive(Debug)]
pub(crate) struct Span {
    /// Whole blocks, each to its place; what comes with them beside the part is in the first and last block.
    pub jobs: Vec<GpuJob>,
    /// Bytes that the file system keeps among its own: where they go, and they themselves.
    pub inline: Vec<(u64, Vec<u8>)>,
    /// Bytes that are nowhere: holes, and what was never written.
    pub zeros: u64,
    /// Where the part starts in memory.
    pub skip: u64,
    /// Its length.
    pub bytes: u64,
    /// Bytes of memory that it takes, whole blocks.
    pub memory: u64,
}

impl Span {
    /// The bytes from `offset` on, `len` or as many as there are, of a file with these extents.
    pub(crate) fn new(
        extents: &[Extent],
        size: u64,
        offset: u64,
        len: Option<u64>,
        block: u64,
    ) -> Result<Self> {
        let bytes = size.saturating_sub(offset).min(len.unwrap_or(u64::MAX));
        if offset > size {
            return Err(CliError::Usage(format!("--offset {offset}: the file has {size} bytes")));
        }
        let start = offset / block * block;
        let (skip, end) = (offset - start, offset + bytes);
        let memory = (end - start).next_multiple_of(block).max(block);
        let mut span = Self { jobs: Vec::new(), inline: Vec::new(), zeros: 0, skip, bytes, memory };
        for extent in extents.iter().filter(|e| e.offset < end && e.offset + e.len > start && bytes > 0) {
            span.take(extent, (start, end), block)?;
        }
        Ok(span)
    }

    fn take(&mut self, extent: &Extent, (start, end): (u64, u64), block: u64) -> Result<()> {
        let first = extent.offset.max(start);
        let last = (extent.offset + extent.len).min(end);
        let within = first - extent.offset;
        match &extent.place {
            Place::Zeros => self.zeros += last - first,
            Place::Inline(data) => {
                let part = data.get(within as usize..(within + last - first) as usize).unwrap_or_default();
                self.inline.push((first - start, part.to_vec()));
            }
            Place::Drive(at) => {
                let from = at + within;
                if !from.is_multiple_of(block) || !(first - start).is_multiple_of(block) {
                    return Err(CliError::not_possible(
                        "reading this file by whole blocks",
                        format!(
                            "its bytes from {first} on start at byte {from} of the drive, within a block of {block}"
                        ),
                        "Use a drive whose blocks are no larger than the file system's",
                    ));
                }
                let blocks = (last - first).div_ceil(block);
                self.jobs.push(GpuJob { lba: from / block, blocks, offset: first - start });
            }
        }
        Ok(())
    }

    /// Puts what needs no command into its place. Memory that nothing is read into is zero already.
    pub(crate) fn fill(&self, region: &Region) -> Result<()> {
        self.inline.iter().try_for_each(|(at, data)| Ok(region.write(*at as usize, data)?))
    }
}

/// Where GPU memory first differs from what the CPU reads of the file once more.
pub(crate) fn verify(
    volume: &Volume,
    file: &File,
    offset: u64,
    span: &Span,
    region: &Region,
    check: impl Fn() -> Result<()>,
) -> Result<Option<u64>> {
    const STEP: u64 = 1 << 20;
    let mut done = 0;
    while done < span.bytes {
        check()?;
        let count = STEP.min(span.bytes - done) as usize;
        let (mut want, mut got) = (vec![0; count], vec![0; count]);
        let read = volume.read(file, offset + done, &mut want)?;
        region.read((span.skip + done) as usize, &mut got)?;
        let differs = want.iter().zip(&got).position(|(a, b)| a != b);
        if let Some(at) = differs.or((read < count).then_some(read)) {
            return Ok(Some(done + at as u64));
        }
        done += count as u64;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, len: u64, place: Place) -> Extent {
        Extent { offset, len, place }
    }

    #[test]
    fn parts_of_files_become_whole_blocks() {
        let extents = [
            extent(0, 8192, Place::Drive(1 << 20)),
            extent(8192, 4096, Place::Zeros),
            extent(12_288, 5000, Place::Drive(4096)),
        ];
        let span = |offset, len| Span::new(&extents, 17_288, offset, len, 512).unwrap();
        let all = span(0, None);
        let jobs =
            [GpuJob { lba: 2048, blocks: 16, offset: 0 }, GpuJob { lba: 8, blocks: 10, offset: 12_288 }];
        assert_eq!((all.jobs.as_slice(), all.zeros, all.skip, all.bytes), (&jobs[..], 4096, 0, 17_288));
        assert_eq!(all.memory, 17_408);
        let part = span(513, Some(10));
        assert_eq!((part.jobs.as_slice(), part.skip), (&[GpuJob { lba: 2049, blocks: 1, offset: 0 }][..], 1));
        let tail = span(17_000, Some(99_999));
        assert_eq!((tail.bytes, tail.jobs[0].offset, tail.skip), (288, 0, 17_000 % 512));
        assert_eq!((span(17_288, None).bytes, span(9000, Some(0)).jobs.len()), (0, 0));
        assert!(Span::new(&extents, 17_288, 17_289, None, 512).is_err());
    }

    #[test]
    fn blocks_that_are_too_large_and_inline_bytes() {
        let small = [extent(0, 1024, Place::Drive(1024))];
        assert!(Span::new(&small, 1024, 0, None, 4096).is_err());
        let inline = [extent(0, 60, Place::Inline((0..60).collect()))];
        let span = Span::new(&inline, 60, 10, Some(20), 512).unwrap();
        assert_eq!((span.inline.len(), span.inline[0].0, span.inline[0].1.len()), (1, 0, 30));
        assert_eq!(span.skip, 10);
    }
}
