//! Pages that threads move between the file and pinned memory, and the copy engine between that and the GPU's.
//!
//! A batch is cut into chunks. The calling thread works through them, and helpers take some where there is more than one.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_gpu::{CopyRange, Gpu, Place, RangeCopier, Region};
use onehop_os::HostMem;
use onehop_os::file_writes::{FileSource, FileWrites, WriteRoutes};

use crate::{PageDirection, PagesError, Result, lock};

/// Pinned bytes of a thread, and the most of a chunk.
const STAGE: usize = 1 << 20;
/// The least of a chunk, if there are threads to share a batch with: waking one takes as long as copying this.
const LEAST: usize = 128 << 10;
/// Below this, a kernel copies faster than the copy engine, which needs no room on the GPU.
const KERNEL_BELOW: usize = 32 << 10;
/// The most threads for one file, the caller's among them.
const MOST_THREADS: usize = 16;
/// How long the end of the threads is waited for.
const CLOSE: Duration = Duration::from_secs(5);
/// How long a batch may make no progress.
const STALL: Duration = Duration::from_secs(120);

/// A part of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StagedPart {
    /// The page's number in the list.
    pub page: usize,
    /// Where it lies in the file.
    pub offset: u64,
    /// The number of its memory, and the offset in it.
    pub memory: (usize, usize),
    pub bytes: usize,
}

/// Pinned memory, and a copier for it.
struct Stage {
    memory: Region,
    host: HostMem,
    copier: Box<dyn RangeCopier>,
}

struct StagedBatch {
    direction: PageDirection,
    memories: Vec<Region>,
    parts: Vec<StagedPart>,
    /// Parts of each chunk.
    chunks: Vec<Range<usize>>,
    next: AtomicUsize,
    failed: AtomicBool,
    end: Mutex<StagedEnd>,
    ended: Condvar,
}

struct StagedEnd {
    /// Chunks that have not ended.
    left: usize,
    error: Option<PagesError>,
}

/// The threads and the pinned memory of a file.
pub(crate) struct Stages {
    inner: Arc<StagesInner>,
    helpers: Arc<HelperCount>,
    process: u32,
}

/// Helpers that still have the file open.
#[derive(Default)]
struct HelperCount {
    running: Mutex<usize>,
    ended: Condvar,
}

struct StagesInner {
    file: Arc<File>,
    writes: FileWrites,
    gpu: Arc<dyn Gpu>,
    threads: usize,
    idle: Mutex<Vec<Stage>>,
    work: Mutex<StagedWork>,
    more: Condvar,
}

#[derive(Default)]
struct StagedWork {
    batches: VecDeque<Arc<StagedBatch>>,
    started: usize,
    asleep: usize,
    closed: bool,
}

impl Drop for Stages {
    /// Waits for the helpers, so that the file is closed afterwards; not for one whose disk does not answer.
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A child that was forked has no helpers.
            return;
        }
        lock(&self.inner.work).closed = true;
        self.inner.more.notify_all();
        let (running, limit) = (lock(&self.helpers.running), CLOSE);
        let _ = self.helpers.ended.wait_timeout_while(running, limit, |running| *running > 0);
    }
}

impl Stages {
    pub(crate) fn new(file: Arc<File>, gpu: Arc<dyn Gpu>) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let inner = Arc::new(StagesInner {
            file,
            writes: FileWrites::new(Arc::new(WriteRoutes::unshared()), 0),
            gpu,
            threads,
            idle: Mutex::default(),
            work: Mutex::default(),
            more: Condvar::new(),
        });
        Self { inner, helpers: Arc::default(), process: std::process::id() }
    }

    pub(crate) fn transfer(
        &self,
        direction: PageDirection,
        memories: &[Region],
        parts: Vec<StagedPart>,
    ) -> Result<()> {
        let (parts, chunks) = chunks(parts, self.inner.threads);
        if parts.is_empty() {
            return Ok(());
        }
        let left = chunks.len();
        let batch = Arc::new(StagedBatch {
            direction,
            memories: memories.to_vec(),
            parts,
            chunks,
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            end: Mutex::new(StagedEnd { left, error: None }),
            ended: Condvar::new(),
        });
        self.ask_for_help(&batch, left - 1);
        self.inner.work_on(&batch);
        let done = batch.wait();
        lock(&self.inner.work).batches.retain(|other| !Arc::ptr_eq(other, &batch));
        done
    }

    fn ask_for_help(&self, batch: &Arc<StagedBatch>, wanted: usize) {
        let inner = &self.inner;
        let wanted = wanted.min(inner.threads - 1);
        if wanted == 0 {
            return;
        }
        let mut work = lock(&inner.work);
        work.batches.push_back(batch.clone());
        let missing = wanted.saturating_sub(work.asleep).min(inner.threads - 1 - work.started);
        for _ in 0..wanted.min(work.asleep) {
            inner.more.notify_one();
        }
        for _ in 0..missing {
            let (inner, helpers) = (inner.clone(), self.helpers.clone());
            *lock(&helpers.running) += 1;
            let end = HelperEnd(helpers);
            let help = move || {
                let _end = end;
                // Dropped first.
                let inner = inner;
                inner.help();
            };
            // If none can be started, the caller does it all.
            if std::thread::Builder::new().name("onehop pages".into()).spawn(help).is_ok() {
                work.started += 1;
            }
        }
    }
}

/// One helper less when it is dropped.
struct HelperEnd(Arc<HelperCount>);

impl Drop for HelperEnd {
    fn drop(&mut self) {
        *lock(&self.0.running) -= 1;
        self.0.ended.notify_all();
    }
}

/// Cuts parts into chunks for so many threads. No part is longer than a chunk.
fn chunks(parts: Vec<StagedPart>, threads: usize) -> (Vec<StagedPart>, Vec<Range<usize>>) {
    let all: usize = parts.iter().map(|part| part.bytes).sum();
    let most = all.div_ceil(2 * threads).clamp(LEAST, STAGE);
    let (mut cut, mut chunks) = (Vec::with_capacity(parts.len()), Vec::new());
    let (mut first, mut bytes) = (0, 0);
    for mut part in parts {
        while part.bytes > 0 {
            let now = part.bytes.min(most);
            if bytes + now > most {
                chunks.push(first..cut.len());
                (first, bytes) = (cut.len(), 0);
            }
            cut.push(StagedPart { bytes: now, ..part });
            bytes += now;
            part.offset += now as u64;
            part.memory.1 += now;
            part.bytes -= now;
        }
    }
    if first < cut.len() {
        chunks.push(first..cut.len());
    }
    (cut, chunks)
}

impl StagesInner {
    /// A helper's loop, until the file is closed.
    fn help(self: &Arc<Self>) {
        let mut work = lock(&self.work);
        loop {
            while work.batches.front().is_some_and(|batch| batch.is_taken()) {
                work.batches.pop_front();
            }
            if work.closed {
                return;
            }
            if let Some(batch) = work.batches.front().cloned() {
                drop(work);
                self.work_on(&batch);
                drop(batch);
                work = lock(&self.work);
                continue;
            }
            work.asleep += 1;
            work = self.more.wait(work).unwrap_or_else(PoisonError::into_inner);
            work.asleep -= 1;
        }
    }

    fn work_on(&self, batch: &StagedBatch) {
        let mut stage = None;
        while let Some(chunk) = batch.take() {
            let done = match batch.failed.load(Ordering::Acquire) {
                true => Ok(()),
                false => self.execute(batch, chunk, &mut stage),
            };
            batch.end(done);
        }
        lock(&self.idle).extend(stage);
    }

    fn stage(&self) -> Result<Stage> {
        let idle = lock(&self.idle).pop();
        if let Some(stage) = idle {
            return Ok(stage);
        }
        let host = HostMem::touched(STAGE).map_err(onehop_gpu::Error::from)?;
        let memory = self.gpu.adopt(Place::PinnedHost, host.clone())?;
        Ok(Stage { memory, host, copier: self.gpu.range_copier(KERNEL_BELOW)? })
    }

    /// Moves a chunk. After a failure its stage is not used again: the GPU may still use it.
    fn execute(&self, batch: &StagedBatch, chunk: Range<usize>, stage: &mut Option<Stage>) -> Result<()> {
        let mut own = match stage.take() {
            Some(stage) => stage,
            None => self.stage()?,
        };
        let parts = &batch.parts[chunk];
        match batch.direction {
            PageDirection::Read => {
                each_run(parts, |offset, at, bytes| {
                    match own.host.read_file(at, bytes, &self.file, offset).map_err(plain)? {
                        read if read == bytes => Ok(()),
                        _ => Err(io::ErrorKind::UnexpectedEof.into()),
                    }
                })?;
                own.copy(batch, parts)?;
            }
            PageDirection::Write => {
                own.copy(batch, parts)?;
                each_run(parts, |offset, at, bytes| {
                    let mut done = 0;
                    while done < bytes {
                        // After a part, an error is only reported by the next call.
                        let from = FileSource { mem: &own.host, at: at + done, len: bytes - done };
                        match self.writes.write(&self.file, from, offset + done as u64, || Ok(()))? {
                            0 => return Err(io::ErrorKind::WriteZero.into()),
                            written => done += written,
                        }
                    }
                    Ok(())
                })?;
            }
        }
        *stage = Some(own);
        Ok(())
    }
}

/// Calls `each` for runs of parts that follow each other in the file: where a run lies there and in the stage, and its bytes.
fn each_run(parts: &[StagedPart], mut each: impl FnMut(u64, usize, usize) -> io::Result<()>) -> Result<()> {
    let mut at = 0;
    let follows = |one: &StagedPart, next: &StagedPart| one.offset + one.bytes as u64 == next.offset;
    for run in parts.chunk_by(follows) {
        let bytes = run.iter().map(|part| part.bytes).sum();
        each(run[0].offset, at, bytes).map_err(|source| PagesError::Page { page: run[0].page, source })?;
        at += bytes;
    }
    Ok(())
}

impl Stage {
    /// Copies parts to the stage, packed, or from there.
    fn copy(&mut self, batch: &StagedBatch, parts: &[StagedPart]) -> Result<()> {
        let mut memories = vec![self.memory.clone()];
        let (mut last, mut at) = (None, 0);
        let mut ranges = Vec::with_capacity(parts.len());
        for part in parts {
            let ((number, offset), bytes) = (part.memory, part.bytes);
            if last.replace(number) != Some(number) {
                memories.push(batch.memories[number].clone());
            }
            let (stage, memory) = ((0, at), (memories.len() - 1, offset));
            at += bytes;
            ranges.push(match batch.direction {
                PageDirection::Read => CopyRange { from: stage, to: memory, bytes },
                PageDirection::Write => CopyRange { from: memory, to: stage, bytes },
            });
        }
        self.copier.start(&memories, &ranges)?;
        Ok(self.copier.wait()?)
    }
}

impl StagedBatch {
    /// The next chunk that no thread has taken.
    fn take(&self) -> Option<Range<usize>> {
        let next = self.next.fetch_add(1, Ordering::AcqRel);
        self.chunks.get(next).cloned()
    }

    fn is_taken(&self) -> bool {
        self.next.load(Ordering::Acquire) >= self.chunks.len()
    }

    fn end(&self, done: Result<()>) {
        let mut end = lock(&self.end);
        if let Err(error) = done {
            self.failed.store(true, Ordering::Release);
            end.error.get_or_insert(error);
        }
        end.left -= 1;
        if end.left == 0 {
            self.ended.notify_all();
        }
    }

    /// Waits for the chunks that others work on.
    fn wait(&self) -> Result<()> {
        let mut end = lock(&self.end);
        let (mut left, mut since) = (end.left, Instant::now());
        while end.left > 0 {
            end = self.ended.wait_timeout(end, STALL / 16).unwrap_or_else(PoisonError::into_inner).0;
            if end.left != left {
                (left, since) = (end.left, Instant::now());
            } else if since.elapsed() >= STALL {
                self.failed.store(true, Ordering::Release);
                return Err(PagesError::Stalled(STALL));
            }
        }
        end.error.take().map_or(Ok(()), Err)
    }
}

/// The system's error.
fn plain(error: onehop_os::Error) -> io::Error {
    match error {
        onehop_os::Error::System { source, .. } => source,
        other => io::Error::other(other),
    }
}
