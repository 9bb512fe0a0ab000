//! A file of a mounted file system: Linux reads it, with direct I/O or from its page cache, and the GPU's copy engine
//! copies it; or NVIDIA's cuFile does both.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use onehop_gpu::{Copier, Gpu, GpuFile, GpuFiles, Mark, Place, Region, Rows};
use onehop_os::page_cache::{is_in_memory, open_direct, open_direct_writable};
use onehop_os::{HostMem, Reads, cycles};

use super::{Cell, Move, NotMeasurable, PreparedRoute, SweepLane, SweepTarget};
use crate::stats::Quantiles;
use crate::{Error, Result};

const ROUTES: [&str; 9] = [
    "cufile",
    "cpu/pinned",
    "cpu/memcpy",
    "cpu/cached",
    "gpu/tier3",
    "gpu/posted",
    "gpu/tier2",
    "gpu/tier1",
    "cpu/direct",
];
/// Most threads that wait for a block each.
const MOST_THREADS: u32 = 256;
/// Time limit of a read past the page cache.
const PATIENCE: Duration = Duration::from_secs(60);
/// Parts of the memory that a thread reads the page cache into: one is filled while the other is copied.
const SLOTS: usize = 2;
/// The largest alignment that direct I/O needs.
const ALIGNMENT: usize = 4096;
const UPPER_BOUNDS: &str =
    "latencies are upper bounds: the end of a block's copy is noticed after the next block's read";
const SYNC_APART: &str = "latencies leave out the sync at the end of a pass, which the rate includes";

/// A file that may be read, and perhaps written.
pub struct FileTarget {
    path: PathBuf,
    /// Through the page cache.
    cached: Arc<File>,
    /// With direct I/O, and its alignment.
    direct: std::result::Result<(Arc<File>, u64), String>,
    bytes: u64,
    gpu: Arc<dyn Gpu>,
    cufile: std::result::Result<Arc<dyn GpuFiles>, String>,
}

impl FileTarget {
    /// Opens a file; its first `bytes` bytes are used, or all.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(path: &Path, writable: bool, bytes: Option<u64>, gpu: Arc<dyn Gpu>) -> Result<Self> {
        let failed = |call, source| Error::File { call, path: path.display().to_string(), source };
        let file = File::options().read(true).write(writable).open(path).map_err(|e| failed("open", e))?;
        let meta = file.metadata().map_err(|e| failed("look at", e))?;
        if !meta.is_file() {
            return Err(Error::Setup(format!("{}: only regular files can be measured", path.display())));
        }
        let open = if writable { open_direct_writable } else { open_direct };
        let direct = match open(&file) {
            _ if is_in_memory(&file) => {
                Err("its file system lies in memory: there is nothing but the page cache".into())
            }
            Ok(Some((direct, rules))) if rules.memory <= 4096 => {
                Ok((Arc::new(direct), rules.offset.max(1).into()))
            }
            Ok(_) => Err("its file system does not support O_DIRECT".into()),
            Err(error) => Err(error.to_string()),
        };
        let cufile = gpu.files().map_err(|error| error.to_string());
        let bytes = bytes.map_or(meta.len(), |bytes| bytes.min(meta.len()));
        Ok(Self { path: path.into(), cached: Arc::new(file), direct, bytes, gpu, cufile })
    }

    fn attempt(
        &self,
        route: &str,
        cell: &Cell,
        bytes: usize,
    ) -> Result<std::result::Result<PreparedRoute, NotMeasurable>> {
        let way = match route {
            "cpu/pinned" => self.pinned(cell, bytes),
            "cpu/memcpy" => self.copied(cell, bytes, |memory| self.memcpy(cell, memory)),
            "cpu/cached" => self.copied(cell, bytes, |memory| self.by_cache(cell, memory)),
            _ => self.by_cufile(cell, bytes),
        };
        match way {
            Ok(way) => Ok(Ok(way)),
            Err(Lacking::Why(why)) => Ok(Err(NotMeasurable(why))),
            Err(Lacking::Failed(error)) => Err(error),
        }
    }

    /// Past the page cache, many blocks at once from one thread: reads with copies behind them, writes with copies before.
    fn pinned(&self, cell: &Cell, bytes: usize) -> std::result::Result<PreparedRoute, Lacking> {
        let file = self.direct(cell.block)?;
        let memory = self.gpu.arena(bytes)?;
        let mut lanes: Vec<Box<dyn SweepLane>> = Vec::new();
        for _ in 0..cell.threads {
            let ring = self.gpu.alloc(Place::PinnedHost, cell.block as usize * cell.depth as usize)?;
            let host = host_of(&ring)?;
            let disk = Reads::new(host.clone(), cell.depth).map_err(|e| Lacking::Why(e.to_string()))?;
            let (file, block, depth) = (file.clone(), cell.block as usize, cell.depth as usize);
            if cell.io.writes() {
                let memory = memory.clone();
                lanes.push(Box::new(WriteLane { file, disk, host, memory, block, depth }));
                continue;
            }
            let copier = self.gpu.copier(&ring, &memory)?;
            lanes.push(Box::new(RingLane { file, reads: disk, copier, block, depth }));
        }
        Ok(PreparedRoute { lanes, memory, threads: cell.threads, depth: cell.depth, note: None })
    }

    /// A route whose threads wait for each of their blocks: a depth of 8 takes eight threads.
    fn copied(
        &self,
        cell: &Cell,
        bytes: usize,
        lane: impl Fn(&Region) -> std::result::Result<(Box<dyn SweepLane>, Option<String>), Lacking>,
    ) -> std::result::Result<PreparedRoute, Lacking> {
        self.waiting(cell, self.gpu.arena(bytes)?, lane)
    }

    fn waiting(
        &self,
        cell: &Cell,
        memory: Region,
        lane: impl Fn(&Region) -> std::result::Result<(Box<dyn SweepLane>, Option<String>), Lacking>,
    ) -> std::result::Result<PreparedRoute, Lacking> {
        let threads = cell.threads.saturating_mul(cell.depth).min(MOST_THREADS);
        let (mut lanes, mut note) = (Vec::new(), None);
        for _ in 0..threads {
            let (lane, remark) = lane(&memory)?;
            lanes.push(lane);
            note = remark;
        }
        Ok(PreparedRoute { lanes, memory, threads, depth: 1, note })
    }

    fn memcpy(
        &self,
        cell: &Cell,
        memory: &Region,
    ) -> std::result::Result<(Box<dyn SweepLane>, Option<String>), Lacking> {
        let (file, note) = match self.direct(cell.block) {
            Ok(file) => (file, None),
            Err(Lacking::Why(why)) => (self.cached.clone(), Some(format!("out of the page cache: {why}"))),
            Err(failed) => return Err(failed),
        };
        let (memory, block) = (memory.clone(), cell.block as usize);
        if !cell.io.writes() {
            return Ok((Box::new(CopyLane { file, data: Aligned::new(block), memory }), note));
        }
        // Make data durable that may be only in the page cache.
        let sync = note.is_some();
        let note = note.map(|note| format!("{note}; {SYNC_APART}"));
        Ok((Box::new(CopyOutLane { file, host: HostMem::touched(block)?, memory, block, sync }), note))
    }

    fn by_cache(
        &self,
        cell: &Cell,
        memory: &Region,
    ) -> std::result::Result<(Box<dyn SweepLane>, Option<String>), Lacking> {
        let block = cell.block as usize;
        if cell.io.writes() {
            let (file, host, memory) = (self.cached.clone(), HostMem::touched(block)?, memory.clone());
            let lane = CopyOutLane { file, host, memory, block, sync: true };
            return Ok((Box::new(lane), Some(SYNC_APART.into())));
        }
        let ring = self.gpu.alloc(Place::PinnedHost, block * SLOTS)?;
        let (host, copier) = (host_of(&ring)?, self.gpu.copier(&ring, memory)?);
        let lane = CacheLane { file: self.cached.clone(), host, copier, block };
        Ok((Box::new(lane), Some(UPPER_BOUNDS.into())))
    }

    fn by_cufile(&self, cell: &Cell, bytes: usize) -> std::result::Result<PreparedRoute, Lacking> {
        let cufile = self.cufile.as_ref().map_err(|why| Lacking::Why(why.clone()))?;
        let file = self.direct.as_ref().map_or(&self.cached, |(file, _)| file);
        let memory = self.gpu.alloc(Place::Vram, bytes)?;
        let mut note = cufile.how().to_owned();
        let registered = match cufile.register(&memory) {
            Ok(registered) => Some(Arc::from(registered)),
            Err(error) => {
                note = format!("{note}; by a buffer of its own, because it refused our memory ({error})");
                None
            }
        };
        let opened = cufile.open(file.clone()).map_err(|error| Lacking::Why(error.to_string()))?;
        let opened: Arc<dyn GpuFile> = Arc::from(opened);
        let mut way = self.waiting(cell, memory, |memory| {
            let (opened, memory, registered) = (opened.clone(), memory.clone(), registered.clone());
            let (block, writes) = (cell.block as usize, cell.io.writes());
            Ok((
                Box::new(CuFileLane { opened, memory, block, writes, _registered: registered })
                    as Box<dyn SweepLane>,
                None,
            ))
        })?;
        way.note = Some(note);
        Ok(way)
    }

    /// The file past the page cache, for blocks of this size.
    fn direct(&self, block: u64) -> std::result::Result<Arc<File>, Lacking> {
        match &self.direct {
            Err(why) => Err(Lacking::Why(why.clone())),
            Ok((_, unit)) if !block.is_multiple_of(*unit) => {
                Err(Lacking::Why(format!("past the page cache this file is read in blocks of {unit} bytes")))
            }
            Ok((file, _)) => Ok(file.clone()),
        }
    }
}

/// Why there is no lane: it is not possible, or something failed.
enum Lacking {
    Why(String),
    Failed(Error),
}

impl<E: Into<Error>> From<E> for Lacking {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

fn host_of(region: &Region) -> std::result::Result<HostMem, Lacking> {
    use onehop_os::DmaMemory;
    region.host().cloned().ok_or_else(|| Lacking::Why("the GPU has no memory that the CPU reaches".into()))
}

impl SweepTarget for FileTarget {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn unit(&self) -> u64 {
        1
    }

    fn routes(&self) -> &'static [&'static str] {
        &ROUTES
    }

    fn open(
        &self,
        route: &str,
        cell: &Cell,
        bytes: u64,
    ) -> Result<std::result::Result<PreparedRoute, NotMeasurable>> {
        if route.starts_with("gpu/") || route == "cpu/direct" {
            let why =
                "the file's file system is mounted, so Linux drives the drive: detach it and measure with -d";
            return Ok(Err(NotMeasurable(why.into())));
        }
        let bytes = usize::try_from(bytes).map_err(|_| Error::Setup("a pass is too large".into()))?;
        self.attempt(route, cell, bytes)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let path = || self.path.display().to_string();
        self.cached.read_exact_at(out, at).map_err(|source| Error::File {
            call: "read",
            path: path(),
            source,
        })
    }
}

fn short(at: u64, got: usize, block: usize) -> Error {
    Error::Wrong(format!("only {got} of {block} bytes were read at byte {at}: the file has become shorter"))
}

/// Reads past the page cache by io_uring, into pinned memory.
struct RingLane {
    file: Arc<File>,
    reads: Reads,
    copier: Box<dyn Copier>,
    block: usize,
    depth: usize,
}

/// A block that is being copied.
struct Copying {
    stage: usize,
    begun: u64,
    mark: Mark,
}

impl SweepLane for RingLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        let mut free: Vec<usize> = (0..self.depth).collect();
        // What is being read into each part of the ring, and since when.
        let mut reading: Vec<(Move, u64)> = vec![(Move { at: 0, slot: 0 }, 0); self.depth];
        let mut copying: Vec<Copying> = Vec::new();
        let mut next = moves.iter();
        loop {
            while let Some(stage) = free.pop() {
                let Some(m) = next.next() else {
                    free.push(stage);
                    break;
                };
                reading[stage] = (*m, cycles());
                self.reads.begin(stage as u64, &self.file, m.at, stage * self.block, self.block)?;
            }
            if free.len() == self.depth {
                return Ok(());
            }
            self.reads.submit()?;
            let (mut i, before) = (0, free.len());
            while let Some(copy) = copying.get(i) {
                if self.copier.is_over(copy.mark)? {
                    times.add(cycles().saturating_sub(copy.begun));
                    free.push(copying.swap_remove(i).stage);
                } else {
                    i += 1;
                }
            }
            if free.len() == before && copying.is_empty() {
                self.reads.wait(PATIENCE)?;
            }
            while let Some(end) = self.reads.ended() {
                let stage = end.name as usize;
                let (m, begun) = reading[stage];
                let got =
                    end.result.map_err(|source| Error::File { call: "read", path: String::new(), source })?;
                if got != self.block {
                    return Err(short(m.at, got, self.block));
                }
                let (from, to, row) = (stage * self.block, m.slot as usize, self.block);
                self.copier.copy(&Rows { from, to, row, rows: 1, step: row })?;
                copying.push(Copying { stage, begun, mark: self.copier.mark()? });
            }
        }
    }
}

/// Copies into pinned memory and writes from there past the page cache by io_uring, one block while others are written.
struct WriteLane {
    file: Arc<File>,
    disk: Reads,
    host: HostMem,
    memory: Region,
    block: usize,
    depth: usize,
}

impl SweepLane for WriteLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        let mut free: Vec<usize> = (0..self.depth).collect();
        let mut begun = vec![0; self.depth];
        let mut next = moves.iter();
        loop {
            while let Some(stage) = free.pop() {
                let Some(m) = next.next() else {
                    free.push(stage);
                    break;
                };
                begun[stage] = cycles();
                let at = stage * self.block;
                self.memory.read_to(m.slot as usize, &self.host, at, self.block)?;
                self.disk.begin_write(stage as u64, &self.file, m.at, at, self.block)?;
                // The disk should not wait for the next block's copy.
                self.disk.submit()?;
            }
            if free.len() == self.depth {
                return Ok(());
            }
            self.disk.wait(PATIENCE)?;
            while let Some(end) = self.disk.ended() {
                let put = end.result.map_err(|source| Error::File {
                    call: "write",
                    path: String::new(),
                    source,
                })?;
                whole(put, self.block)?;
                let stage = end.name as usize;
                times.add(cycles().saturating_sub(begun[stage]));
                free.push(stage);
            }
        }
    }
}

/// Refuses a block that was written in part.
fn whole(put: usize, block: usize) -> Result<()> {
    match put == block {
        true => Ok(()),
        false => Err(Error::Wrong(format!("{put} of {block} bytes were written: the disk is full"))),
    }
}

/// Reads out of the page cache into pinned memory, one part while the other is copied.
struct CacheLane {
    file: Arc<File>,
    host: HostMem,
    copier: Box<dyn Copier>,
    block: usize,
}

impl SweepLane for CacheLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        let mut slots: [Option<(Mark, u64)>; SLOTS] = [None; SLOTS];
        for (i, m) in moves.iter().enumerate() {
            let slot = i % SLOTS;
            self.settle(&mut slots[slot], times)?;
            let (begun, from) = (cycles(), slot * self.block);
            let got = self.host.read_file(from, self.block, &self.file, m.at)?;
            if got != self.block {
                return Err(short(m.at, got, self.block));
            }
            self.copier.copy(&Rows {
                from,
                to: m.slot as usize,
                row: self.block,
                rows: 1,
                step: self.block,
            })?;
            slots[slot] = Some((self.copier.mark()?, begun));
        }
        (0..SLOTS).try_for_each(|i| self.settle(&mut slots[(moves.len() + i) % SLOTS], times))
    }
}

impl CacheLane {
    fn settle(&mut self, slot: &mut Option<(Mark, u64)>, times: &mut Quantiles) -> Result<()> {
        if let Some((mark, begun)) = slot.take() {
            self.copier.wait(mark)?;
            times.add(cycles().saturating_sub(begun));
        }
        Ok(())
    }
}

/// Memory of the process that direct I/O takes, all of it touched.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let memory = vec![1; len + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }
}

/// Reads into ordinary memory and copies from there, one block after the other.
struct CopyLane {
    file: Arc<File>,
    data: Aligned,
    memory: Region,
}

impl SweepLane for CopyLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        let block = self.data.len;
        for m in moves {
            let begun = cycles();
            let got = read_up_to(&self.file, self.data.bytes(), m.at)?;
            if got != block {
                return Err(short(m.at, got, block));
            }
            self.memory.write(m.slot as usize, self.data.bytes())?;
            times.add(cycles().saturating_sub(begun));
        }
        Ok(())
    }
}

/// Reads as much as there is.
fn read_up_to(file: &File, to: &mut [u8], at: u64) -> Result<usize> {
    let mut done = 0;
    while done < to.len() {
        match file.read_at(&mut to[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(source) => return Err(Error::File { call: "read", path: String::new(), source }),
        }
    }
    Ok(done)
}

/// Copies into ordinary memory and writes from there, one block after the other.
struct CopyOutLane {
    file: Arc<File>,
    host: HostMem,
    memory: Region,
    block: usize,
    /// Whether written data is made durable: it may be in the page cache only.
    sync: bool,
}

impl SweepLane for CopyOutLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        for m in moves {
            let begun = cycles();
            self.memory.read_to(m.slot as usize, &self.host, 0, self.block)?;
            whole(self.host.write_file(0, self.block, &self.file, m.at)?, self.block)?;
            times.add(cycles().saturating_sub(begun));
        }
        if self.sync {
            let failed = |source| Error::File { call: "sync", path: String::new(), source };
            self.file.sync_data().map_err(failed)?;
        }
        Ok(())
    }
}

/// Reads and writes by cuFile.
struct CuFileLane {
    opened: Arc<dyn GpuFile>,
    memory: Region,
    block: usize,
    writes: bool,
    // Kept until no lane uses the memory any more.
    _registered: Option<Arc<dyn Send + Sync>>,
}

impl SweepLane for CuFileLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        for m in moves {
            let part = self.memory.slice(m.slot as usize..m.slot as usize + self.block)?;
            let begun = cycles();
            let moved =
                if self.writes { self.opened.write(&part, m.at)? } else { self.opened.read(&part, m.at)? };
            times.add(cycles().saturating_sub(begun));
            if moved != self.block {
                return Err(short(m.at, moved, self.block));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use onehop_gpu::Emulated;

    use super::*;
    use crate::results::IoType;
    use crate::sweep::{Effort, Sweep};

    #[test]
    fn memory_for_direct_io_is_aligned() {
        for len in [1, 4096, 123_457] {
            let mut data = Aligned::new(len);
            assert_eq!((data.bytes().len(), data.bytes().as_ptr().addr() % ALIGNMENT), (len, 0));
        }
    }

    #[test]
    fn rows_say_what_their_latencies_leave_out() {
        let path = std::env::temp_dir().join(format!("onehop-bench-file-{}", std::process::id()));
        let bytes: Vec<u8> = (0..256_u32 << 10).map(|i| (i.wrapping_mul(77_777) >> 9) as u8).collect();
        std::fs::write(&path, bytes).unwrap();
        let target = FileTarget::open(&path, true, None, Arc::new(Emulated::new())).unwrap();
        let effort = Effort { bytes: 64 << 10, ops: 16, time: Duration::from_millis(1), repeats: 2 };
        let none = |_: &str, _: IoType| None;
        let row = |io, route| {
            let cell = Cell { io, block: 4096, depth: 2, threads: 1 };
            Sweep::new(&target, effort, &none).cell(&cell, &[route], &mut |_| true).unwrap().remove(0)
        };
        for (io, route, words) in [
            (IoType::Read, "cpu/cached", "upper bounds"),
            (IoType::RandWrite, "cpu/cached", "leave out the sync"),
        ] {
            let row = row(io, route);
            assert!(row.result.is_some() && row.note.as_deref().unwrap().contains(words), "{row:?}");
        }
        // The bytes are right in both directions, with no more copies than a plain program makes.
        assert!(row(IoType::Read, "cpu/memcpy").result.unwrap().verified);
        assert!(row(IoType::Write, "cpu/memcpy").result.unwrap().verified);
        std::fs::remove_file(&path).unwrap();
    }
}
