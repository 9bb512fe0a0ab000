//! File systems and extent maps of a drive, and how a file becomes commands.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use onehop_drive::{Buffer, Drive, GpuJob, IoQueue, Namespace};
use onehop_files::{
    BlockRun, Blocks, Blockwise, DriveId, Extent, ExtentMap, NvmeIds, Volume, Which, WholeBlocks,
};
use onehop_gpu::Region;
use onehop_load::{LocalFile, Source};
use onehop_proto::identify::NamespaceId;

use crate::chunk::ranges;
use crate::error::{Error, Result};
use crate::progress::{Progress, check};

/// Size limit of an extent map, enough for some million extents.
const MOST_MAP: u64 = 100_000_000;

/// Bytes read at a time to find a file.
const READ_BYTES: u64 = 128 << 10;

/// Bytes of a file compared at a time.
const VERIFY_BYTES: u64 = 1 << 20;

/// CPU reads of the drive: for directories, not for data.
struct DriveReader {
    queue: IoQueue,
    ns: Namespace,
    buffer: Buffer,
    block: u64,
}

impl DriveReader {
    fn read(&self, lba: u64, out: &mut [u8]) -> io::Result<()> {
        let mut lba = lba;
        for part in out.chunks_mut(READ_BYTES as usize) {
            let blocks = part.len() as u64 / self.block;
            self.queue.read(&self.ns, lba, blocks, &self.buffer, 0).map_err(io::Error::other)?;
            self.buffer.host().map_err(io::Error::other)?.read(0, part).map_err(io::Error::other)?;
            lba += blocks;
        }
        Ok(())
    }
}

/// A drive's bytes, for reading its file systems.
///
/// # Errors
/// When the namespace's blocks have metadata, or the drive has no free queue.
pub fn blocks(drive: &Drive, ns: &Namespace) -> Result<Arc<dyn Blocks>> {
    let block = ns.format.lba_bytes();
    if ns.format.transfer_bytes(1) != Some(block) {
        return Err(Error::not_possible(
            format!("reading files of namespace {}", ns.nsid),
            "its blocks carry metadata, which no file system knows of",
            "Read its blocks: --lba, --blocks",
        ));
    }
    let reader = DriveReader {
        queue: drive.queue()?,
        ns: ns.clone(),
        buffer: drive.buffer(READ_BYTES as usize)?,
        block,
    };
    let reader = Mutex::new(reader);
    let read =
        move |lba: u64, out: &mut [u8]| reader.lock().unwrap_or_else(PoisonError::into_inner).read(lba, out);
    Ok(Arc::new(WholeBlocks::new(block as u32, ns.blocks, read)))
}

/// Opens the file system of a drive, or of one of its partitions.
///
/// # Errors
/// When there is no supported file system, or several and no partition was named.
pub fn open(blocks: &Arc<dyn Blocks>, partition: Option<Which>) -> Result<Volume> {
    Ok(Volume::open(blocks.clone(), partition.unwrap_or_default())?)
}

/// Parses a partition: a number, or `none` for the whole drive.
///
/// # Errors
/// When it is neither, in words.
pub fn parse_partition(text: &str) -> std::result::Result<Which, String> {
    match text {
        "none" => Ok(Which::Whole),
        number => {
            number.parse().map(Which::Partition).map_err(|_| "not a partition's number, nor `none`".into())
        }
    }
}

/// The drive's identity for extent maps.
///
/// # Errors
/// When the drive does not respond.
pub fn drive_id(drive: &Drive, ns: &Namespace) -> Result<DriveId> {
    let (controller, view) = (drive.identity().controller(), ns.identify());
    // With leading blanks, which Linux includes in its identifiers.
    let mut ids = NvmeIds {
        vendor: controller.vid(),
        serial: &controller.bytes()[4..24],
        model: &controller.bytes()[24..64],
        nsid: ns.nsid,
        uuid: [0; 16],
        nguid: view.nguid(),
        eui64: view.eui64(),
        lba_bytes: ns.format.lba_bytes() as u32,
        blocks: ns.blocks,
    };
    for id in drive.namespace_ids(ns)? {
        match id {
            NamespaceId::Uuid(uuid) => ids.uuid = uuid,
            NamespaceId::Nguid(nguid) => ids.nguid = nguid,
            NamespaceId::Eui64(eui64) => ids.eui64 = eui64,
            _ => {}
        }
    }
    Ok(DriveId::nvme(&ids))
}

/// Reads extent maps of this drive.
///
/// # Errors
/// When the file cannot be read, is not a map, or is of another drive.
pub fn read_maps(path: &Path, drive: &Drive, ns: &Namespace) -> Result<Vec<ExtentMap>> {
    let file = LocalFile::open(path)?;
    let length = file.bytes();
    if length > MOST_MAP {
        let path = path.display().to_string();
        return Err(Error::LongMap { path, bytes: length, most: MOST_MAP });
    }
    let mut bytes = vec![0; length as usize];
    file.read_at(0, &mut bytes)?;
    let maps = ExtentMap::parse_all(&bytes)?;
    let id = drive_id(drive, ns)?;
    maps.iter().try_for_each(|map| map.check_drive(&id))?;
    Ok(maps)
}

/// A part of a file, as whole blocks of the drive, and bytes that need no read.
#[derive(Clone, Debug)]
pub struct Span {
    /// Includes the bytes around the part in its first and last block.
    pub parts: Blockwise,
    /// Offset of the part in memory.
    pub skip: u64,
    /// Its length.
    pub bytes: u64,
    /// Bytes of memory that it takes, in whole blocks.
    pub memory: u64,
}

impl Span {
    /// The part of `len` bytes from `offset` on, or up to the end, of a file with these extents.
    ///
    /// # Errors
    /// When the file ends before `offset`, or the drive's blocks are larger than its file system's.
    pub fn new(extents: &[Extent], size: u64, offset: u64, len: Option<u64>, block: u64) -> Result<Self> {
        let bytes = size.saturating_sub(offset).min(len.unwrap_or(u64::MAX));
        if offset > size {
            return Err(Error::Offset { offset, bytes: size });
        }
        let start = offset / block * block;
        let (skip, end) = (offset - start, offset + bytes);
        let mut parts = Blockwise::default();
        if bytes > 0 {
            parts.add(extents, start..end, 0, block)?;
        }
        Ok(Self { parts, skip, bytes, memory: (end - start).next_multiple_of(block).max(block) })
    }

    /// The reads that fetch it.
    #[must_use]
    pub fn jobs(&self) -> Vec<GpuJob> {
        jobs(&self.parts.runs, 0)
    }

    /// Writes the bytes that need no read. Memory without any is already zero.
    ///
    /// # Errors
    /// When the memory cannot be written.
    pub fn fill(&self, region: &Region) -> Result<()> {
        self.parts.inline.iter().try_for_each(|(at, data)| Ok(region.write(*at as usize, data)?))
    }
}

/// Runs of blocks as jobs, with `base` added to their places in memory.
#[must_use]
pub fn jobs(runs: &[BlockRun], base: u64) -> Vec<GpuJob> {
    runs.iter().map(|run| GpuJob { lba: run.lba, blocks: run.blocks, offset: base + run.at }).collect()
}

/// Compares GPU memory with a second read of the part by the CPU, and returns the first byte of the part that differs.
/// `read` fetches the part's bytes from an offset on.
///
/// # Errors
/// When either cannot be read.
pub fn verify(
    span: &Span,
    region: &Region,
    read: impl Fn(u64, &mut [u8]) -> Result<usize>,
    progress: &dyn Progress,
) -> Result<Option<u64>> {
    for (done, count) in ranges(span.bytes, VERIFY_BYTES) {
        check(progress)?;
        let (mut want, mut got) = (vec![0; count as usize], vec![0; count as usize]);
        let read = read(done, &mut want)?;
        region.read((span.skip + done) as usize, &mut got)?;
        let differs = want.iter().zip(&got).position(|(a, b)| a != b);
        if let Some(at) = differs.or((read < count as usize).then_some(read)) {
            return Ok(Some(done + at as u64));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use onehop_files::Place;

    use super::*;

    #[test]
    fn parts_of_files_start_within_a_block() {
        let extent = |offset, len, place| Extent { offset, len, place };
        let extents = [
            extent(0, 8192, Place::Drive(1 << 20)),
            extent(8192, 4096, Place::Zeros),
            extent(12_288, 5000, Place::Drive(4096)),
        ];
        let span = |offset, len| Span::new(&extents, 17_288, offset, len, 512).unwrap();
        let all = span(0, None);
        let jobs =
            [GpuJob { lba: 2048, blocks: 16, offset: 0 }, GpuJob { lba: 8, blocks: 10, offset: 12_288 }];
        assert_eq!(
            (all.jobs(), all.parts.zero_bytes(), all.skip, all.bytes),
            (jobs.to_vec(), 4096, 0, 17_288)
        );
        assert_eq!(all.memory, 17_408);
        let part = span(513, Some(10));
        assert_eq!((part.jobs(), part.skip), (vec![GpuJob { lba: 2049, blocks: 1, offset: 0 }], 1));
        let tail = span(17_000, Some(99_999));
        assert_eq!((tail.bytes, tail.jobs()[0].offset, tail.skip), (288, 0, 17_000 % 512));
        assert_eq!((span(17_288, None).bytes, span(9000, Some(0)).jobs().len()), (0, 0));
        assert!(Span::new(&extents, 17_288, 17_289, None, 512).is_err());
    }
}
