//! Transfers a file of a drive, or a range of its blocks, into GPU memory.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use onehop_drive::{Drive, GpuJob, Namespace, Op};
use onehop_files::{Blocks, Extent, ExtentMap, FileKind, Which, read_extents};
use onehop_gpu::Region;

use crate::copy;
use crate::engine::{Engine, TransferSetup, block_bytes};
use crate::error::{Error, Result, was_stopped};
use crate::outcome::TransferOutcome;
use crate::progress::Progress;
use crate::volume::{self, Span};

/// How blocks are verified.
const BY_CPU: &str = "compared with what the CPU read into host memory";

/// A file on a drive: the places of its bytes, and how it was found.
pub struct FileOnDrive {
    /// Its path in the file system.
    pub path: String,
    /// The file system's name.
    pub file_system: String,
    /// Its length.
    pub bytes: u64,
    /// Where its bytes are.
    pub extents: Vec<Extent>,
    /// Notes of the file system's reader, such as that it was not unmounted cleanly.
    pub notes: Vec<String>,
    map: Option<ExtentMap>,
    pub(crate) blocks: Arc<dyn Blocks>,
}

/// A part of a file in GPU memory.
pub struct FileRead {
    /// The requested bytes.
    pub data: Region,
    /// Where they come from.
    pub span: Span,
    /// How the transfer went; its bytes are the requested ones.
    pub outcome: TransferOutcome,
    /// Number of extents of the drive that were read.
    pub ranges: usize,
    /// Bytes that were read, in whole blocks.
    pub read_bytes: u64,
    /// The memory with whole blocks.
    memory: Region,
    offset: u64,
}

impl FileOnDrive {
    /// Finds a file in the drive's own file system.
    ///
    /// # Errors
    /// When the file system is not supported, or does not have the file.
    pub fn by_file_system(
        drive: &Drive,
        ns: &Namespace,
        path: &Path,
        partition: Option<Which>,
    ) -> Result<Self> {
        let blocks = volume::blocks(drive, ns)?;
        let volume = volume::open(&blocks, partition)?;
        let file = volume.lookup(path.as_os_str().as_bytes())?;
        if file.kind != FileKind::File {
            return Err(Error::NoFile { path: path.display().to_string(), kind: file.kind.name() });
        }
        Ok(Self {
            path: path.display().to_string(),
            file_system: volume.fs_name().to_owned(),
            bytes: file.id.len,
            extents: volume.extents(&file)?.to_vec(),
            notes: volume.notes().to_vec(),
            map: None,
            blocks,
        })
    }

    /// Finds a file in an extent map; if the map has several, the one with this path.
    ///
    /// # Errors
    /// When the map is of another drive, or the file is ambiguous.
    pub fn by_map(drive: &Drive, ns: &Namespace, map: &Path, path: Option<&Path>) -> Result<Self> {
        let mut maps = volume::read_maps(map, drive, ns)?;
        let names: Vec<_> = maps.iter().map(|map| map.file.path.display().to_string()).collect();
        maps.retain(|map| path.is_none_or(|path| map.file.path == path));
        let (Some(map), true) = (maps.pop(), maps.is_empty()) else {
            return Err(Error::WhichFile(names.join(", ")));
        };
        Ok(Self {
            path: map.file.path.display().to_string(),
            file_system: map.file.fs.clone(),
            bytes: map.file.id.len,
            extents: map.extents()?,
            notes: Vec::new(),
            map: Some(map),
            blocks: volume::blocks(drive, ns)?,
        })
    }

    /// Reads `len` bytes from `offset` on, or up to the end of the file, into GPU memory by the best route that works.
    ///
    /// # Errors
    /// As for [`Engine::open`] and [`Engine::transfer`], and when the file ends before `offset`.
    pub fn read(
        &self,
        setup: &TransferSetup<'_>,
        offset: u64,
        len: Option<u64>,
        progress: &dyn Progress,
    ) -> Result<FileRead> {
        let TransferSetup { drive, ns, gpu, .. } = *setup;
        let span = Span::new(&self.extents, self.bytes, offset, len, block_bytes(ns))?;
        let (engine, memory) = Engine::open(setup, span.memory)?;
        let jobs = span.jobs();
        let mut moved = engine.transfer(Op::Read, ns, &jobs, &memory, progress)?;
        span.fill(&memory.region)?;
        let read_bytes = std::mem::replace(&mut moved.bytes, span.bytes);
        let data = memory.region.slice(span.skip as usize..(span.skip + span.bytes) as usize)?;
        let outcome = TransferOutcome::new(drive, gpu, &engine, &moved, None);
        Ok(FileRead { data, span, outcome, ranges: jobs.len(), read_bytes, memory: memory.region, offset })
    }

    /// Compares what was read with the file, and the drive with the extent map if there is one. Records the result in
    /// the outcome, and returns any mismatch.
    ///
    /// # Errors
    /// When the comparison fails.
    pub fn verify(&self, read: &mut FileRead, progress: &dyn Progress) -> Result<Option<Error>> {
        let by = match &self.map {
            Some(map) => {
                if let Err(why) = map.verify(&*self.blocks) {
                    if was_stopped(&why) {
                        return Err(why.into());
                    }
                    read.outcome.judge(false, "the drive compared with the map's checksums");
                    return Ok(Some(why.into()));
                }
                "the drive compared with the map's checksums, and every byte with what the CPU read of the file"
            }
            None => "compared with what the CPU read of the file",
        };
        let again =
            |at, out: &mut [u8]| Ok(read_extents(&*self.blocks, &self.extents, read.offset + at, out)?);
        let differs = volume::verify(&read.span, &read.memory, again, progress)?;
        read.outcome.judge(differs.is_none(), by);
        Ok(differs.map(|at| {
            let from = read.offset + at;
            Error::Mismatch(format!("GPU memory and file differ from byte {from} of the file on"))
        }))
    }
}

/// Blocks in GPU memory.
pub struct BlocksRead {
    /// Their bytes.
    pub data: Region,
    /// How the transfer went.
    pub outcome: TransferOutcome,
    job: GpuJob,
}

/// Reads blocks into GPU memory by the best route that works.
///
/// # Errors
/// As for [`Engine::open`] and [`Engine::transfer`], and when the namespace does not have the blocks.
pub fn read_blocks(
    setup: &TransferSetup<'_>,
    lba: u64,
    blocks: u64,
    progress: &dyn Progress,
) -> Result<BlocksRead> {
    let TransferSetup { drive, ns, gpu, .. } = *setup;
    let job = GpuJob { lba, blocks, offset: 0 };
    let bytes = bytes_of(ns, lba, blocks)?;
    let (engine, memory) = Engine::open(setup, bytes)?;
    let moved = engine.transfer(Op::Read, ns, &[job], &memory, progress)?;
    let outcome = TransferOutcome::new(drive, gpu, &engine, &moved, None);
    Ok(BlocksRead { data: memory.region.slice(0..bytes as usize)?, outcome, job })
}

impl BlocksRead {
    /// Reads the blocks again by the CPU and compares every byte. Records the result in the outcome, and returns any
    /// mismatch.
    ///
    /// # Errors
    /// When the comparison fails.
    pub fn verify(
        &mut self,
        drive: &Drive,
        ns: &Namespace,
        progress: &dyn Progress,
    ) -> Result<Option<Error>> {
        verify_blocks(Op::Read, (drive, ns), &self.job, &self.data, &mut self.outcome, progress)
    }
}

/// Compares GPU memory with the blocks that were read into it or written from it. Records the result in the outcome,
/// and returns any mismatch.
///
/// # Errors
/// When the comparison fails.
pub fn verify_blocks(
    op: Op,
    (drive, ns): (&Drive, &Namespace),
    job: &GpuJob,
    region: &Region,
    outcome: &mut TransferOutcome,
    progress: &dyn Progress,
) -> Result<Option<Error>> {
    let differs = copy::verify(op, drive, ns, job, region, progress)?;
    outcome.judge(differs.is_none(), BY_CPU);
    outcome.look_again(drive);
    Ok(differs.map(|at| {
        let place =
            format!("byte {at} (block {})", job.lba.saturating_add(at / block_bytes(ns).max(1)));
        Error::Mismatch(format!(
            "GPU memory and drive differ from {place} on: some write to GPU memory was lost, or somebody wrote to the \
             drive meanwhile"
        ))
    }))
}

/// The size of `blocks` blocks, which must be within the namespace.
///
/// # Errors
/// When they are not, or their size exceeds 64 bits.
pub fn bytes_of(ns: &Namespace, lba: u64, blocks: u64) -> Result<u64> {
    onehop_proto::format::check_range(ns.blocks, lba, blocks)
        .map_err(|source| onehop_drive::Error::Range { nsid: ns.nsid, source })?;
    ns.format.transfer_bytes(blocks).ok_or(Error::TooManyBlocks { blocks })
}
