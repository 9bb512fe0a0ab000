//! An open array.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, ExportedQueue, GpuMode, GpuSetup, IoQueue, Namespace};
use onehop_gpu::{ArrayJob, ArrayKernels, ArrayRows, Gpu, Place, Region, ReusedMemory};
use onehop_proto::GpuAddr;
use onehop_proto::array::{
    ArrayError, ArrayHandle, FlushReport, GatherItem, MAX_PAGE_BYTES, MIN_PAGE_BYTES, WAYS, broken_pages,
    counter, directory_bytes, directory_words, is_in_use,
};

use crate::{ArrayOptions, ArrayStats, Error, Result};

/// Offsets of counters and directory after the handle, each on cache lines of its own.
const COUNTERS: usize = (ArrayHandle::BYTES as usize).next_multiple_of(128);
const DIRECTORY: usize = COUNTERS + counter::BYTES as usize;

/// Maximum warps and threads of a kernel: the emulated GPU's are threads of this machine.
const MOST_WARPS: u32 = 4096;
const MOST_THREADS: u32 = 1 << 16;
const MOST_EMULATED: u32 = 32;

/// The initial content of answers, which differs from every [`ArrayError::code`].
const NO_ANSWER: u8 = 0x80;

/// How often the host checks whether a closed array is still used.
const CLOSING_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// An open array. Dropping it discards what was not flushed.
pub struct Array {
    /// `None` once it was revoked.
    exported: Option<ExportedQueue>,
    /// For flushes of the drive.
    queue: IoQueue,
    ns: Namespace,
    gpu: Arc<dyn Gpu>,
    launcher: Mutex<Launcher>,
    /// Handle, counters, directory.
    memory: Region,
    /// The cache's pages.
    pages: Region,
    bytes: u64,
    slots: u32,
    options: ArrayOptions,
}

/// Runs one kernel at a time.
struct Launcher {
    kernels: Box<dyn ArrayKernels>,
    /// Where kernels leave their results.
    results: ReusedMemory,
}

/// The result of moving rows.
#[derive(Debug)]
#[must_use = "some of the rows may have failed"]
pub struct MovedRows {
    /// Kernel time by the GPU's clock.
    pub took: Duration,
    /// The rows that were not moved: their index in the list, and why.
    pub failed: Vec<(usize, ArrayError)>,
}

/// The result of a flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flushed {
    /// Pages that were written back.
    pub written: u32,
}

impl Array {
    /// Opens the blocks of a namespace as an array for kernels of a GPU.
    ///
    /// # Errors
    /// When the sizes are invalid, the drive is open for reading only and the array is not, or there is no memory or
    /// queue.
    pub fn open(
        drive: &Drive,
        gpu: Arc<dyn Gpu>,
        ns: &Namespace,
        blocks: Range<u64>,
        options: ArrayOptions,
    ) -> Result<Self> {
        let mut kernels = gpu.array_kernels()?;
        let (page_shift, block_shift) = check(drive, ns, &blocks, &options)?;
        let slots = slots(&options)?;
        let setup = GpuSetup {
            mode: GpuMode::Shared { threads: 1 },
            depth: options.depth,
            stall: options.stall,
            limit: options.limit,
            ..GpuSetup::new(options.placement)
        };
        // A directory with wrong words could name any way.
        let bytes = (slots.max(WAYS) as usize) << page_shift;
        let (pages, buffer) = drive.gpu_buffer(&*gpu, options.placement.data, bytes)?;
        let directory = directory_bytes(slots) as usize;
        let memory = gpu.alloc(Place::Vram, DIRECTORY + directory)?;
        let words: Vec<u8> = directory_words(slots).flat_map(u32::to_le_bytes).collect();
        memory.write(DIRECTORY, &words)?;
        memory.fill(COUNTERS, counter::BYTES as usize, 0)?;
        let queue = drive.queue()?;
        let exported = drive.gpu_queues(gpu.clone(), setup)?.export(ns, &buffer, options.writable)?;
        let at = |offset: usize| memory.addr().plus(offset as u64).0;
        let handle = ArrayHandle {
            queue: exported.handle().0,
            directory: at(DIRECTORY),
            data: pages.addr().0,
            offset: 0,
            lba: blocks.start,
            blocks: blocks.end - blocks.start,
            limit: nanos(options.patience),
            counters: at(COUNTERS),
            pages: slots,
            page_shift,
            block_shift,
            writable: u32::from(options.writable),
        };
        let words: Vec<u8> = handle.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write(0, &words)?;
        kernels.attach(memory.addr())?;
        let bytes = handle.blocks << block_shift;
        let launcher = Mutex::new(Launcher { kernels, results: ReusedMemory::default() });
        let (exported, ns) = (Some(exported), ns.clone());
        Ok(Self { exported, queue, ns, gpu, launcher, memory, pages, bytes, slots, options })
    }

    /// The GPU address of the array's handle, for kernels. They must end before the array is closed or dropped.
    #[must_use]
    pub fn handle(&self) -> GpuAddr {
        self.memory.addr()
    }

    /// Bytes of the array.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pages of the cache.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.slots
    }

    /// Describes rows of `bytes` bytes, each starting `stride` bytes after the one before.
    #[must_use]
    pub fn rows(&self, bytes: u32, stride: u32) -> ArrayRows {
        let count = match self.bytes.checked_sub(u64::from(bytes)) {
            Some(left) => left / u64::from(stride.max(1)) + 1,
            None => 0,
        };
        ArrayRows { count, bytes, stride }
    }

    /// The cache's statistics.
    ///
    /// # Errors
    /// When the GPU's memory cannot be read.
    pub fn stats(&self) -> Result<ArrayStats> {
        ArrayStats::read(&self.memory.slice(COUNTERS..DIRECTORY)?)
    }

    /// Checks that the drive still serves the array.
    ///
    /// # Errors
    /// Why it does not.
    pub fn check(&self) -> Result<()> {
        Ok(self.exported.as_ref().map_or(Ok(()), ExportedQueue::check)?)
    }

    /// Ends all waits of kernels for the drive, now and in future.
    pub fn stop(&self) {
        if let Some(exported) = &self.exported {
            exported.stop();
        }
    }

    /// Gathers rows into `out`, in the order of `ids`. The GPU gets them sorted, so neighbours share their pages.
    ///
    /// # Errors
    /// [`Error::Rows`] when the array has fewer such rows; when `out` is too short, or the kernel failed. Rows that fail are
    /// in the result.
    pub fn gather(&self, rows: ArrayRows, ids: &[u64], out: &Region) -> Result<MovedRows> {
        self.gather_items(rows, in_order(ids), out)
    }

    /// The same for rows that go to any places of `out`.
    ///
    /// # Errors
    /// As for [`Self::gather`].
    pub fn gather_items(&self, rows: ArrayRows, items: Vec<GatherItem>, out: &Region) -> Result<MovedRows> {
        let warps = (items.len() as u32).div_ceil(32).clamp(1, self.most(MOST_WARPS));
        self.move_rows(ArrayJob::gather, rows, items, out, warps)
    }

    /// Reads rows as [`Self::gather`] does, by threads that each pin a page and copy from it.
    ///
    /// # Errors
    /// As for [`Self::gather`].
    pub fn read(&self, rows: ArrayRows, ids: &[u64], out: &Region) -> Result<MovedRows> {
        self.move_rows(ArrayJob::read, rows, in_order(ids), out, self.threads(ids.len()))
    }

    /// Writes rows from `from`, in the order of `ids`. Among duplicates, which one is written last is undefined.
    ///
    /// # Errors
    /// As for [`Self::gather`].
    pub fn scatter(&self, rows: ArrayRows, ids: &[u64], from: &Region) -> Result<MovedRows> {
        self.move_rows(ArrayJob::write, rows, in_order(ids), from, self.threads(ids.len()))
    }

    /// Writes back every dirty page and makes it durable on the drive. This covers all writes of kernels that have
    /// ended, and of pins that were released.
    ///
    /// # Errors
    /// The drive's error when pages that were written are not durable; otherwise [`Error::NotWritten`] when pages could
    /// not be written.
    pub fn flush(&self) -> Result<Flushed> {
        let mut flushed = Flushed { written: 0 };
        if !self.options.writable {
            return Ok(flushed);
        }
        let (limit, threads) = (self.options.limit.saturating_mul(2), self.threads(self.slots as usize));
        let job = |report: &Region| ArrayJob::flush(report, limit);
        let (_, report) = self.run((FlushReport::BYTES, 0), threads, limit, job)?;
        let word = |at: u64| report.get(at as usize / 4).copied().unwrap_or_default();
        flushed.written = word(FlushReport::WRITTEN) as u32;
        let failed = word(FlushReport::FAILED) as u32;
        // Even if some pages failed: the others become durable. An error here comes first, because the drive reports lost
        // writes only once, and pages that failed are still dirty at the next flush.
        self.queue.flush(&self.ns)?;
        if failed > 0 {
            let error = ArrayError::from_code(word(FlushReport::ERROR)).unwrap_or(ArrayError::TimedOut);
            return Err(Error::NotWritten { failed, error });
        }
        Ok(flushed)
    }

    /// The pages whose last write-back failed, and why. They are still in the cache.
    ///
    /// # Errors
    /// When the GPU's memory cannot be read.
    pub fn broken(&self) -> Result<Vec<(u64, ArrayError)>> {
        Ok(broken_pages(&self.directory()?).collect())
    }

    /// Flushes the array and deletes its queue. No kernel may use it any more. The cache is gone afterwards, even if it has
    /// pages that could not be written: to try again, call [`Self::flush`] until it succeeds, then this.
    ///
    /// # Errors
    /// As for [`Self::flush`]; otherwise when threads of a kernel did not leave the queue, or did not release pages. What
    /// these may use stays allocated.
    pub fn close(mut self) -> Result<()> {
        let flushed = self.flush();
        let ended = self.end();
        flushed?;
        ended
    }

    fn end(&mut self) -> Result<()> {
        let Some(exported) = self.exported.take() else { return Ok(()) };
        // This ends all waits for the drive.
        exported.stop();
        let ended = match self.wait_until_unused() {
            Ok(()) => exported.revoke().map_err(Error::from),
            // A kernel that holds pages calls the queue for the next one.
            Err(error @ Error::InUse { .. }) => {
                exported.abandon();
                Err(error)
            }
            // The GPU does not answer. The queue handles that by itself.
            Err(error) => {
                let _ = exported.revoke();
                Err(error)
            }
        };
        if ended.is_err() {
            std::mem::forget((self.memory.clone(), self.pages.clone()));
        }
        ended
    }

    /// Waits until no page is pinned or being read.
    fn wait_until_unused(&self) -> Result<()> {
        let (begun, patience) = (Instant::now(), self.options.patience);
        while is_in_use(&self.directory()?) {
            if begun.elapsed() >= patience {
                return Err(Error::InUse { patience });
            }
            std::thread::sleep(CLOSING_POLL_INTERVAL);
        }
        Ok(())
    }

    fn directory(&self) -> Result<Vec<u32>> {
        let mut bytes = vec![0; directory_bytes(self.slots) as usize];
        self.memory.read(DIRECTORY, &mut bytes)?;
        Ok(words(&bytes).map(|word| word as u32).collect())
    }

    fn most(&self, real: u32) -> u32 {
        if self.gpu.simulated() { MOST_EMULATED } else { real }
    }

    fn threads(&self, count: usize) -> u32 {
        (count as u32).clamp(1, self.most(MOST_THREADS))
    }

    fn move_rows(
        &self,
        job: fn(ArrayRows, &[GatherItem], [&Region; 2], Duration) -> onehop_gpu::Result<ArrayJob>,
        rows: ArrayRows,
        mut items: Vec<GatherItem>,
        buffer: &Region,
        threads: u32,
    ) -> Result<MovedRows> {
        let most = self.rows(rows.bytes, rows.stride).count;
        if rows.count > most {
            return Err(Error::Rows { rows, most });
        }
        let Some(last) = items.iter().map(|item| item.to as usize).max() else {
            return Ok(MovedRows { took: Duration::ZERO, failed: Vec::new() });
        };
        items.sort_unstable_by_key(|item| item.row);
        let limit = self.options.limit;
        let job = |answers: &Region| job(rows, &items, [buffer, answers], limit);
        let (took, answers) = self.run(((last + 1) * 4, NO_ANSWER), threads, limit, job)?;
        // Threads answer all rows, unless they do not find the array.
        let error = |code| ArrayError::from_code(code).unwrap_or(ArrayError::NoArray);
        let answer = |place: usize| answers.get(place).copied().unwrap_or(i32::from(NO_ANSWER));
        items.sort_unstable_by_key(|item| item.to);
        let answered = items.iter().map(|item| (item.to as usize, answer(item.to as usize)));
        let failed = answered.filter(|(_, code)| *code != 0).map(|(place, code)| (place, error(code)));
        Ok(MovedRows { took, failed: failed.collect() })
    }

    /// Runs a kernel that starts no new page after `limit`. It has `bytes` bytes of results, which are `value` at
    /// first. Returns its time, and the results as words.
    fn run(
        &self,
        (bytes, value): (usize, u8),
        threads: u32,
        limit: Duration,
        job: impl FnOnce(&Region) -> onehop_gpu::Result<ArrayJob>,
    ) -> Result<(Duration, Vec<i32>)> {
        let mut launcher = self.launcher.lock().unwrap_or_else(PoisonError::into_inner);
        let Launcher { kernels, results } = &mut *launcher;
        let memory = results.take(bytes, |bytes| self.gpu.alloc(Place::Vram, bytes))?;
        let job = match memory.fill(0, bytes, value).and_then(|()| job(&memory)) {
            Ok(job) => job,
            Err(refused) => {
                results.keep(memory);
                return Err(refused.into());
            }
        };
        // A page in progress may wait for others, be written back and be read.
        let last = self.options.patience.saturating_add(self.options.limit.saturating_mul(3));
        // After an error the kernel may still run, and use the memory.
        let took = kernels.run(&job, threads, limit.saturating_add(last))?;
        let mut read = vec![0; bytes];
        memory.read(0, &mut read)?;
        results.keep(memory);
        Ok((took, words(&read).collect()))
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // There is no caller to report an error to.
        let _ = self.end();
    }
}

/// Rows that go to the places of their numbers in the list.
fn in_order(ids: &[u64]) -> Vec<GatherItem> {
    (0..).zip(ids).map(|(to, row)| GatherItem { row: *row, to, pad: 0 }).collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = i32> {
    bytes.as_chunks().0.iter().map(|four| i32::from_le_bytes(*four))
}

/// The page size and block size as powers of two.
fn check(drive: &Drive, ns: &Namespace, blocks: &Range<u64>, options: &ArrayOptions) -> Result<(u32, u32)> {
    let refuse = |why: String| Err(Error::Refused(why));
    if blocks.is_empty() || blocks.end > ns.blocks {
        return refuse(format!("blocks {blocks:?} of a namespace that has {}", ns.blocks));
    }
    let (block, data) = (ns.format.transfer_bytes(1).unwrap_or(0), ns.format.data_bytes(1).unwrap_or(0));
    if block != data || !block.is_power_of_two() {
        return refuse(format!("blocks of {data} bytes that travel as {block}"));
    }
    let page = u64::from(options.page_bytes);
    if !page.is_power_of_two()
        || page < block
        || !(MIN_PAGE_BYTES..=MAX_PAGE_BYTES).contains(&options.page_bytes)
    {
        return refuse(format!(
            "pages of {page} bytes; possible are powers of two from {} to {MAX_PAGE_BYTES}",
            u64::from(MIN_PAGE_BYTES).max(block)
        ));
    }
    let most = drive.identity().max_transfer;
    if page > most {
        return refuse(format!("pages of {page} bytes, and the drive moves at most {most} by one command"));
    }
    Ok((page.trailing_zeros(), block.trailing_zeros()))
}

/// Pages of the cache: whole sets, or less than one set.
fn slots(options: &ArrayOptions) -> Result<u32> {
    let pages = options.cache_bytes / u64::from(options.page_bytes.max(1));
    let pages = if pages < 8 { pages } else { pages / 8 * 8 };
    match u32::try_from(pages) {
        Ok(1..) => Ok(pages as u32),
        _ => Err(Error::Refused(format!(
            "a cache of {} bytes with pages of {}",
            options.cache_bytes, options.page_bytes
        ))),
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
