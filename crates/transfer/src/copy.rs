//! Checksums and copies of GPU memory, and its comparison with the drive.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::path::Path;

use onehop_drive::{Drive, GpuJob, Namespace, Op};
use onehop_gpu::Region;
use onehop_proto::format::Format;

use crate::chunk::ranges;
use crate::engine::block_bytes;
use crate::error::{Error, Result};
use crate::progress::{Progress, check};

/// Bytes copied at a time.
const COPY_BYTES: u64 = 256 << 10;
/// Bytes read back at a time.
const VERIFY_BYTES: u64 = 4 << 20;

/// Copies `bytes` bytes through a small buffer.
pub(crate) fn copy(
    bytes: usize,
    mut from: impl FnMut(usize, &mut [u8]) -> Result<()>,
    mut to: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0; (COPY_BYTES as usize).min(bytes)];
    for (at, count) in ranges(bytes as u64, COPY_BYTES) {
        let (at, part) = (at as usize, &mut buffer[..count as usize]);
        from(at, part)?;
        to(at, part)?;
    }
    Ok(())
}

/// The CRC32C of a part of GPU memory.
///
/// # Errors
/// When the memory cannot be read.
pub fn crc32c(region: &Region, offset: usize, bytes: usize) -> Result<u32> {
    let mut crc = 0;
    let add = |_, data: &[u8]| {
        crc = crc32c::crc32c_append(crc, data);
        Ok(())
    };
    copy(bytes, |from, out| Ok(region.read(offset + from, out)?), add)?;
    Ok(crc)
}

/// Copies the first `bytes` bytes of GPU memory into a new file.
///
/// # Errors
/// When the file cannot be written; it is removed then.
pub fn save(region: &Region, bytes: usize, path: &Path, progress: &dyn Progress) -> Result<()> {
    let mut file = File::create(path).map_err(|e| Error::file("create", path, e))?;
    let from = |at, out: &mut [u8]| {
        check(progress)?;
        Ok(region.read(at, out)?)
    };
    let to = |_, data: &[u8]| {
        progress.moved(data.len() as u64);
        file.write_all(data).map_err(|e| Error::file("write", path, e))
    };
    copy(bytes, from, to).inspect_err(|_| {
        // Half a file could be mistaken for a whole one. A pipe or device is not removed.
        if path.symlink_metadata().is_ok_and(|meta| meta.is_file()) {
            let _ = std::fs::remove_file(path);
        }
    })
}

/// Copies a file of `bytes` bytes into GPU memory; memory behind them stays zero.
///
/// # Errors
/// When the file cannot be read.
pub fn load(
    file: &mut File,
    path: &Path,
    bytes: usize,
    region: &Region,
    progress: &dyn Progress,
) -> Result<()> {
    let from = |_, out: &mut [u8]| {
        check(progress)?;
        file.read_exact(out).map_err(|e| Error::file("read", path, e))
    };
    copy(bytes, from, |at, data| Ok(region.write(at, data)?))
}

/// The bytes of each block that the controller generates on a write: protection information that is transferred.
fn made_by_controller(ns: &Namespace) -> Range<u64> {
    const BYTES: u64 = Format::PI_BYTES as u64;
    let (first, end) = (ns.format.lba_bytes(), block_bytes(ns));
    match (ns.format.pi != 0 && ns.format.extended, ns.format.pi_first) {
        (false, _) => 0..0,
        (true, true) => first..first + BYTES,
        (true, false) => end - BYTES..end,
    }
}

/// Reads the blocks of a job again, by the CPU into host memory, and returns the offset in GPU memory of the first byte
/// that differs. For written blocks, bytes that the controller generates are not compared.
///
/// # Errors
/// When the blocks or the GPU's memory cannot be read.
pub fn verify(
    op: Op,
    drive: &Drive,
    ns: &Namespace,
    job: &GpuJob,
    region: &Region,
    progress: &dyn Progress,
) -> Result<Option<u64>> {
    let block = block_bytes(ns);
    let made = if op.writes() { made_by_controller(ns) } else { 0..0 };
    let step = (VERIFY_BYTES / block).max(1);
    let queue = drive.queue()?;
    let buffer = drive.buffer((step.min(job.blocks) * block) as usize)?;
    let host = buffer.host()?;
    for (done, blocks) in ranges(job.blocks, step) {
        check(progress)?;
        let (at, bytes) = ((job.offset + done * block) as usize, (blocks * block) as usize);
        queue.read(ns, job.lba + done, blocks, &buffer, 0)?;
        let (mut gpu, mut again) = (vec![0; bytes], vec![0; bytes]);
        region.read(at, &mut gpu)?;
        host.read(0, &mut again)?;
        let differs = |i: &usize| gpu[*i] != again[*i] && !made.contains(&(*i as u64 % block));
        if let Some(first) = (0..bytes).find(differs) {
            return Ok(Some((at + first) as u64));
        }
        progress.moved(bytes as u64);
    }
    Ok(None)
}
