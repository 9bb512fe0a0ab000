//! Bytes between GPU memory, files and host memory, and their check sums.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::path::Path;

use onehop_drive::{Drive, GpuJob, Namespace, Op};
use onehop_gpu::Region;
use onehop_proto::format::Format;

use crate::error::{CliError, Result};
use crate::progress::Bar;
use crate::stop::StopFlag;
use crate::transfer::engine::block_bytes;

/// How much is copied at a time.
const PIECE: usize = 256 << 10;
/// How much is read back at a time.
const BACK: usize = 4 << 20;

/// Copies `bytes` bytes, a piece at a time.
pub(crate) fn copy_piece(
    bytes: usize,
    mut from: impl FnMut(usize, &mut [u8]) -> Result<()>,
    mut to: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut piece = vec![0; PIECE.min(bytes)];
    let mut done = 0;
    while done < bytes {
        let count = PIECE.min(bytes - done);
        from(done, &mut piece[..count])?;
        to(done, &piece[..count])?;
        done += count;
    }
    Ok(())
}

/// The CRC32C of a part of GPU memory, and of nothing else.
pub(crate) fn crc32c(region: &Region, offset: usize, bytes: usize) -> Result<u32> {
    let mut crc = 0;
    let add = |_, data: &[u8]| {
        crc = crc32c::crc32c_append(crc, data);
        Ok(())
    };
    copy_piece(bytes, |from, out| Ok(region.read(offset + from, out)?), add)?;
    Ok(crc)
}

/// Copies the start of GPU memory into a file.
pub(crate) fn save(region: &Region, bytes: usize, path: &Path, stop: &StopFlag) -> Result<()> {
    let mut file = File::create(path).map_err(|e| CliError::file("create", path, e))?;
    let bar = Bar::new("copying out", bytes as u64);
    let from = |at, out: &mut [u8]| {
        stop.check()?;
        Ok(region.read(at, out)?)
    };
    let to = |_, data: &[u8]| {
        bar.add(data.len() as u64);
        file.write_all(data).map_err(|e| CliError::file("write", path, e))
    };
    copy_piece(bytes, from, to).inspect_err(|_| {
        // Half a file would pass for a whole one; what is no file (a pipe, a device) stays.
        if path.symlink_metadata().is_ok_and(|meta| meta.is_file()) {
            let _ = std::fs::remove_file(path);
        }
    })
}

/// Copies a file of `bytes` bytes into GPU memory; what the memory has beyond stays zero.
pub(crate) fn load(
    file: &mut File,
    path: &Path,
    bytes: usize,
    region: &Region,
    stop: &StopFlag,
) -> Result<()> {
    let from = |_, out: &mut [u8]| {
        stop.check()?;
        file.read_exact(out).map_err(|e| CliError::file("read", path, e))
    };
    copy_piece(bytes, from, |at, data| Ok(region.write(at, data)?))
}

/// The bytes of each block that the controller makes when it is written: protection information that travels.
fn made_by_controller(ns: &Namespace) -> Range<u64> {
    const BYTES: u64 = Format::PI_BYTES as u64;
    let (first, end) = (ns.format.lba_bytes(), block_bytes(ns));
    match (ns.format.pi != 0 && ns.format.extended, ns.format.pi_first) {
        (false, _) => 0..0,
        (true, true) => first..first + BYTES,
        (true, false) => end - BYTES..end,
    }
}

/// Reads the blocks of a job once more, by the CPU into host memory, and says where GPU memory first differs. What was
/// written may differ in what the controller made.
pub(crate) fn verify(
    op: Op,
    drive: &Drive,
    ns: &Namespace,
    job: &GpuJob,
    region: &Region,
    stop: &StopFlag,
) -> Result<Option<u64>> {
    let block = block_bytes(ns);
    let made = if op.writes() { made_by_controller(ns) } else { 0..0 };
    let step = (BACK as u64 / block).max(1);
    let queue = drive.queue()?;
    let buffer = drive.buffer((step.min(job.blocks) * block) as usize)?;
    let host = buffer.host()?;
    let bar = Bar::new("verifying", job.blocks.saturating_mul(block));
    let mut done = 0;
    while done < job.blocks {
        stop.check()?;
        let blocks = step.min(job.blocks - done);
        let (at, bytes) = ((job.offset + done * block) as usize, (blocks * block) as usize);
        queue.read(ns, job.lba + done, blocks, &buffer, 0)?;
        let (mut gpu, mut again) = (vec![0; bytes], vec![0; bytes]);
        region.read(at, &mut gpu)?;
        host.read(0, &mut again)?;
        let differs = |i: &usize| gpu[*i] != again[*i] && !made.contains(&(*i as u64 % block));
        if let Some(first) = (0..bytes).find(differs) {
            return Ok(Some((at + first) as u64));
        }
        bar.add(bytes as u64);
        done += blocks;
    }
    Ok(None)
}
