//! Array kernels: the checks before one is started, so that it only accesses its own memory.

use std::time::Duration;

use onehop_proto::GpuAddr;
use onehop_proto::array::{
    DriveArray, FlushReport, GatherItem, GatherJob, HIT_WORDS, MISS_WORDS, MissList, flush_slots, read_rows,
    run_hits, run_misses, write_rows,
};
use onehop_proto::kernel::share;
use onehop_proto::queue::Memory;

use crate::{Emulated, Error, Gpu, KernelJob, Place, Region, Result};

/// A kernel's work on an array.
#[derive(Clone, Debug)]
pub struct ArrayJob {
    pub(crate) work: ArrayWork,
    /// Kept until it has ended.
    pub(crate) memory: Vec<Region>,
    /// The items, in memory that only the kernel uses: their places were checked.
    pub(crate) items: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ArrayWork {
    /// The list is empty.
    Gather(GatherJob, MissList),
    Read(GatherJob),
    Write(GatherJob),
    /// The report's address, and nanoseconds after which no new page is started.
    Flush(GpuAddr, u64),
}

/// The rows of an array, for a kernel that moves some of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArrayRows {
    /// How many the array has.
    pub count: u64,
    /// Bytes of a row.
    pub bytes: u32,
    /// Bytes from one row to the next.
    pub stride: u32,
}

/// The longest row. Split longer ones.
const MAX_ROW_BYTES: u32 = 1 << 20;

/// Runs array kernels.
pub trait ArrayKernels: Send {
    /// Attaches the array whose handle is at `array`. Its handle and its queue's are read now and not again.
    ///
    /// # Errors
    /// When there is none, or it names memory that the GPU does not have.
    fn attach(&mut self, array: GpuAddr) -> Result<()>;
    /// Runs a kernel on the array, and waits for its end; `threads` counts warps for a gather, otherwise threads.
    /// Returns its time by the GPU's clock.
    ///
    /// # Errors
    /// When no array was attached, or its memory is gone; when the kernel cannot be started, fails, or does not end
    /// within `limit`. An array's and a queue's own limits end it earlier.
    fn run(&mut self, job: &ArrayJob, threads: u32, limit: Duration) -> Result<Duration>;
}

/// Memory that is kept from one kernel to the next: while a persistent kernel runs, CUDA cannot free any.
#[derive(Default)]
pub struct ReusedMemory(Option<Region>);

impl ReusedMemory {
    /// Takes out what is kept, or new memory from `alloc` if that has fewer than `bytes` bytes.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn take(&mut self, bytes: usize, alloc: impl FnOnce(usize) -> Result<Region>) -> Result<Region> {
        match self.0.take() {
            Some(kept) if kept.len() >= bytes => Ok(kept),
            // Rounded up, so that slowly growing jobs do not need new memory each.
            _ => alloc(bytes.checked_next_power_of_two().unwrap_or(bytes)),
        }
    }

    /// Keeps memory that no kernel uses any more.
    pub fn keep(&mut self, memory: Region) {
        self.0 = Some(memory);
    }
}

impl ArrayJob {
    /// Warps gather rows into a buffer. `memory` is the buffer, and room for the answers.
    ///
    /// # Errors
    /// When a region is too short, or a number is not a multiple of 4.
    pub fn gather(
        rows: ArrayRows,
        items: &[GatherItem],
        memory: [&Region; 2],
        limit: Duration,
    ) -> Result<Self> {
        let job = job(rows, items, memory, limit)?;
        Ok(Self::new(ArrayWork::Gather(job, MissList(GpuAddr(0))), items, memory))
    }

    /// Threads read rows into a buffer, one row per thread at a time.
    ///
    /// # Errors
    /// As for [`Self::gather`].
    pub fn read(
        rows: ArrayRows,
        items: &[GatherItem],
        memory: [&Region; 2],
        limit: Duration,
    ) -> Result<Self> {
        Ok(Self::new(ArrayWork::Read(job(rows, items, memory, limit)?), items, memory))
    }

    /// Threads write rows from a buffer, one row per thread at a time.
    ///
    /// # Errors
    /// As for [`Self::gather`].
    pub fn write(
        rows: ArrayRows,
        items: &[GatherItem],
        memory: [&Region; 2],
        limit: Duration,
    ) -> Result<Self> {
        if rows.stride < rows.bytes {
            let ArrayRows { bytes, stride, .. } = rows;
            return Err(Error::Launch(format!(
                "rows of {bytes} bytes every {stride} would overwrite each other"
            )));
        }
        Ok(Self::new(ArrayWork::Write(job(rows, items, memory, limit)?), items, memory))
    }

    fn new(work: ArrayWork, items: &[GatherItem], memory: [&Region; 2]) -> Self {
        let items = items.iter().flat_map(GatherItem::words).flat_map(u32::to_le_bytes).collect();
        Self { work, memory: memory.map(Region::clone).into(), items }
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty() && !matches!(self.work, ArrayWork::Flush(..))
    }

    /// The work with its items in memory from `alloc`, and that memory.
    pub(crate) fn on(
        &self,
        alloc: impl FnOnce(usize) -> Result<Region>,
    ) -> Result<(ArrayWork, Option<Region>)> {
        if self.items.is_empty() {
            return Ok((self.work, None));
        }
        let list = match self.work {
            ArrayWork::Gather(job, _) => MissList::bytes(job.count, job.row_bytes) as usize,
            _ => 0,
        };
        let memory = alloc(self.items.len() + list)?;
        memory.write(0, &self.items)?;
        let with = |job| GatherJob { items: memory.addr(), ..job };
        let work = match self.work {
            ArrayWork::Gather(job, _) => {
                memory.fill(self.items.len(), MissList::ZEROED, 0)?;
                ArrayWork::Gather(with(job), MissList(memory.addr().plus(self.items.len() as u64)))
            }
            ArrayWork::Read(job) => ArrayWork::Read(with(job)),
            ArrayWork::Write(job) => ArrayWork::Write(with(job)),
            flush @ ArrayWork::Flush(..) => flush,
        };
        Ok((work, Some(memory)))
    }

    /// Threads write back dirty pages, and count the results in `report`.
    ///
    /// # Errors
    /// When the report is too short.
    pub fn flush(report: &Region, limit: Duration) -> Result<Self> {
        if report.len() < FlushReport::BYTES || !report.addr().0.is_multiple_of(16) {
            return Err(Error::Launch(format!("a report of {} bytes at {}", report.len(), report.addr())));
        }
        let work = ArrayWork::Flush(report.addr(), KernelJob::nanos(limit));
        Ok(Self { work, memory: vec![report.clone()], items: Vec::new() })
    }
}

/// Checks the request. The address of the items is not known yet.
fn job(
    rows: ArrayRows,
    items: &[GatherItem],
    [out, answers]: [&Region; 2],
    limit: Duration,
) -> Result<GatherJob> {
    let refuse = |why: String| Err(Error::Launch(why));
    let ArrayRows { count: all, bytes, stride } = rows;
    if bytes == 0 || bytes % 4 != 0 || stride == 0 || stride % 4 != 0 {
        return refuse(format!("rows of {bytes} bytes every {stride}: multiples of 4 are possible"));
    }
    if bytes > MAX_ROW_BYTES || all.checked_mul(stride.into()).is_none() {
        return refuse(format!(
            "{all} rows of {bytes} bytes every {stride}: at most {MAX_ROW_BYTES} bytes are possible"
        ));
    }
    for (what, region) in [("a buffer", out), ("answers", answers)] {
        if !region.addr().0.is_multiple_of(4) {
            return refuse(format!("{what} at {}, which is not a multiple of 4", region.addr()));
        }
    }
    let places = (answers.len() / 4).min(out.len() / bytes as usize);
    if let Some(item) = items.iter().find(|item| item.to as usize >= places) {
        return refuse(format!("row {} of a buffer that has {places}", item.to));
    }
    let count = u32::try_from(items.len()).map_err(|_| Error::Launch(format!("{} items", items.len())))?;
    Ok(GatherJob {
        items: GpuAddr(0),
        out: out.addr(),
        answers: answers.addr(),
        rows: all,
        limit: KernelJob::nanos(limit),
        count,
        row_bytes: bytes,
        stride,
        pad: 0,
    })
}

/// No array is attached yet.
pub(crate) fn not_attached() -> Error {
    Error::Launch("no array was attached".into())
}

/// The emulated GPU's. It checks each address when it is used.
pub(crate) struct EmulatedArrays {
    pub(crate) gpu: Emulated,
    pub(crate) array: Option<GpuAddr>,
    pub(crate) items: ReusedMemory,
}

impl ArrayKernels for EmulatedArrays {
    fn attach(&mut self, array: GpuAddr) -> Result<()> {
        self.array = Some(array);
        Ok(())
    }

    fn run(&mut self, job: &ArrayJob, threads: u32, _: Duration) -> Result<Duration> {
        let array = self.array.ok_or_else(not_attached)?;
        if job.is_empty() {
            return Ok(Duration::ZERO);
        }
        let begun = std::time::Instant::now();
        let (work, items) =
            job.on(|bytes| self.items.take(bytes, |bytes| self.gpu.alloc(Place::Vram, bytes)))?;
        let running = match work {
            ArrayWork::Gather(job, list) => {
                let hits = self.gpu.start_warps((threads, HIT_WORDS), move |warp, index| {
                    if let Ok(array) = DriveArray::open(warp, array) {
                        run_hits(warp, warp, &array, &job, list, share(job.count, index, threads));
                    }
                });
                hits?.join()?;
                self.gpu.start_warps((threads, MISS_WORDS), move |warp, _| {
                    if let Ok(array) = DriveArray::open(warp, array) {
                        run_misses(warp, warp, &array, &job, list);
                    }
                })
            }
            _ => self.gpu.start(threads, move |mem, index| {
                let Ok(array) = DriveArray::open(mem, array) else { return };
                match work {
                    ArrayWork::Read(job) => read_rows(mem, &array, &job, (index, threads)),
                    ArrayWork::Write(job) => write_rows(mem, &array, &job, (index, threads)),
                    ArrayWork::Flush(report, limit) => {
                        let deadline = mem.now().saturating_add(limit);
                        FlushReport(report).add(mem, &flush_slots(mem, &array, (index, threads), deadline));
                    }
                    ArrayWork::Gather(..) => {}
                }
            }),
        };
        running?.join()?;
        let took = begun.elapsed();
        items.into_iter().for_each(|items| self.items.keep(items));
        Ok(took)
    }
}
