//! Kernels of arrays.

use std::sync::Arc;
use std::time::Duration;

use onehop_device::Ptx;
use onehop_device::params::{HITS_SHARED_BYTES, LANES, MISSES_SHARED_BYTES};
use onehop_proto::GpuAddr;
use onehop_proto::array::{ArrayHandle, WAYS, counter, directory_bytes};
use onehop_proto::kernel::{Handle, KernelQueue, signal, tally};
use onehop_proto::prp::{MAX_PAGE_SHIFT, MIN_PAGE_SHIFT, PrebuiltPrpLists};

use super::code::Code;
use super::gpu::CudaGpu;
use super::kernels::{self, KernelCall};
use super::launch::Used;
use super::live::{MemoryHold, Touched};
use super::module::{Arg, Shape};
use crate::arrays::{ArrayJob, ArrayKernels, ArrayWork, ReusedMemory, not_attached};
use crate::{Error, Gpu, Region, Result};

const WHAT: &str = "a kernel of an array";

/// Lanes that read missed pages. 1 024 are slower than 256.
const MOST_MISSES: u32 = 256;

/// Threads of a block: the shared memory of its warps fits the default limit of every GPU.
const THREADS: u32 = 256;

const KERNELS: [&str; 5] = [
    "onehop_array_hits",
    "onehop_array_misses",
    "onehop_array_read",
    "onehop_array_write",
    "onehop_array_flush",
];

#[cfg(feature = "arrays")]
const PTX: Option<Ptx> = Some(onehop_device::ARRAY_PTX);
#[cfg(not(feature = "arrays"))]
const PTX: Option<Ptx> = None;

/// See [`ArrayKernels`].
pub(super) struct CudaArrays {
    gpu: CudaGpu,
    code: Code,
    attached: Option<Attached>,
    /// The items of jobs. No other code reaches them.
    items: ReusedMemory,
}

impl CudaArrays {
    pub(super) fn load(gpu: &CudaGpu) -> Result<Self> {
        let Some(ptx) = PTX else {
            let why = "this program was built without the feature `arrays` of onehop-gpu".into();
            return Err(Error::NotSupported { what: "arrays".into(), why });
        };
        let code = gpu.load_code(&ptx.text())?;
        // All of them now: the driver loads no kernel while a persistent one runs.
        for name in KERNELS {
            code.registers(name)?;
        }
        Ok(Self { gpu: gpu.clone(), code, attached: None, items: ReusedMemory::default() })
    }
}

/// An array that kernels work on.
struct Attached {
    /// Its handle and its queue's, as checked: no other code can write these.
    handles: Region,
    /// All memory that they refer to.
    touched: Vec<Touched>,
    /// Commands that can be in flight.
    depth: u32,
}

/// Offset of the queue's handle in [`Attached::handles`].
const QUEUE: usize = (ArrayHandle::BYTES as usize).next_multiple_of(128);

impl Attached {
    fn new(gpu: &CudaGpu, at: GpuAddr) -> Result<Self> {
        let none = |what: &str, at| Error::Launch(format!("there is no {what} at {at}"));
        let array = ArrayHandle::from_words(&read(gpu, at)?).ok_or_else(|| none("array", at))?;
        let queue_at = GpuAddr(array.queue);
        let queue = Handle::from_words(&read(gpu, queue_at)?).ok_or_else(|| none("queue", queue_at))?;
        let touched = touched(&array, &queue)?;
        gpu.0.context.hold(&touched)?;
        let handles = gpu.alloc_private(QUEUE + Handle::BYTES as usize)?;
        let array = ArrayHandle { queue: handles.addr().plus(QUEUE as u64).0, ..array };
        handles.write(0, &le_bytes(&array.words()))?;
        handles.write(QUEUE, &le_bytes(&queue.words()))?;
        Ok(Self { handles, touched, depth: queue.sq_entries.min(queue.cq_entries) })
    }
}

/// Reads words of GPU memory.
fn read<const WORDS: usize>(gpu: &CudaGpu, at: GpuAddr) -> Result<[u32; WORDS]> {
    let mut bytes = vec![0; WORDS * 4];
    let held = gpu.0.context.hold(&[Touched { what: "a handle", at, bytes: bytes.len() as u64 }])?;
    // SAFETY: the memory is live, of this length, and held across the call; after an error it is freed only when
    // all work has ended.
    unsafe { gpu.0.copies.copy_out(at.0, &mut bytes) }?;
    drop(held);
    let mut words = [0; WORDS];
    for (word, four) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = four.try_into().map_or(0, u32::from_le_bytes);
    }
    Ok(words)
}

fn le_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The memory that an array's kernels reach by its handles.
fn touched(array: &ArrayHandle, queue: &Handle) -> Result<Vec<Touched>> {
    if !(MIN_PAGE_SHIFT..=MAX_PAGE_SHIFT).contains(&queue.page_shift) {
        return Err(Error::Launch(format!("a queue with pages of 2^{} bytes", queue.page_shift)));
    }
    let aligned = [
        (queue.sq | queue.cq, 64),
        (queue.control | queue.pages | queue.lists, 8),
        (queue.sq_door | queue.cq_door | queue.signals | queue.inside | array.counters, 4),
        (array.directory | array.data, 16),
    ];
    if let Some((at, to)) = aligned.iter().find(|(at, to)| !at.is_multiple_of(*to)) {
        return Err(Error::Launch(format!(
            "an array or its queue has memory that is not aligned to {to} ({at:#x})"
        )));
    }
    let pages = queue.bytes.div_ceil(1 << queue.page_shift);
    let lists = PrebuiltPrpLists::new(queue.page_shift).list_pages(pages);
    let of = |what, at, bytes| Touched { what, at: GpuAddr(at), bytes };
    let mut all = kernels::shared(&KernelQueue {
        sq: GpuAddr(queue.sq),
        cq: GpuAddr(queue.cq),
        sq_door: GpuAddr(queue.sq_door),
        cq_door: GpuAddr(queue.cq_door),
        control: GpuAddr(queue.control),
        sq_entries: queue.sq_entries,
        cq_entries: queue.cq_entries,
        ..KernelQueue::default()
    })?;
    all.extend([
        of("a queue's signals", queue.signals, u64::from(signal::LOST) + 4),
        of("a queue's counts", queue.inside, u64::from(tally::WRITES) + 4),
        of("the addresses of a queue's data", queue.pages, pages * 8),
        of("an array's directory", array.directory, directory_bytes(array.pages)),
        of("an array's counters", array.counters, u64::from(counter::BYTES)),
        // If a set has fewer, only the directory's words say which ways are in use.
        of("an array's pages", array.data, u64::from(array.pages.max(WAYS)) << array.page_shift),
    ]);
    if lists > 0 {
        all.push(of("the addresses of a queue's lists", queue.lists, lists * 8));
    }
    Ok(all)
}

impl ArrayKernels for CudaArrays {
    fn attach(&mut self, array: GpuAddr) -> Result<()> {
        self.attached = Some(Attached::new(&self.gpu, array)?);
        Ok(())
    }

    fn run(&mut self, job: &ArrayJob, threads: u32, limit: Duration) -> Result<Duration> {
        let array = self.attached.as_ref().ok_or_else(not_attached)?;
        if job.is_empty() {
            return Ok(Duration::ZERO);
        }
        let context = &self.gpu.0.context;
        job.memory.iter().try_for_each(|memory| context.check(WHAT, memory))?;
        let mut held = context.hold(&array.touched)?;
        let (work, items) = job.on(|bytes| self.items.take(bytes, |bytes| self.gpu.alloc_private(bytes)))?;
        held.push(Arc::new((array.handles.clone(), job.memory.clone(), items.clone())) as MemoryHold);
        let words = |words: &[u64]| Arg::Words(words.into());
        // The name, the arguments between the array and the number of threads, that number, and each warp's shared memory.
        let calls = match &work {
            ArrayWork::Gather(job, list) => {
                let args = || vec![words(&job.words()), Arg::U64(list.0.0)];
                let hits = threads.saturating_mul(LANES);
                // A lane for each command in flight. More only contend for the queue.
                let misses = hits.min(array.depth.next_multiple_of(LANES)).min(MOST_MISSES);
                vec![
                    ("onehop_array_hits", args(), hits, HITS_SHARED_BYTES),
                    ("onehop_array_misses", args(), misses, MISSES_SHARED_BYTES),
                ]
            }
            ArrayWork::Read(job) => vec![("onehop_array_read", vec![words(&job.words())], threads, 0)],
            ArrayWork::Write(job) => vec![("onehop_array_write", vec![words(&job.words())], threads, 0)],
            ArrayWork::Flush(report, limit) => {
                vec![("onehop_array_flush", vec![Arg::U64(report.0), Arg::U64(*limit)], threads, 0)]
            }
        };
        let mut took = Duration::ZERO;
        for (name, mut args, threads, shared) in calls {
            args.insert(0, Arg::U64(array.handles.addr().0));
            args.push(Arg::U32(threads));
            let shape = Shape {
                blocks: threads.div_ceil(THREADS),
                threads: THREADS,
                shared: shared * (THREADS / LANES),
            };
            let function = self.code.function(name)?;
            let call = KernelCall { function: &function, shape, args };
            let used = Used { memory: None, _held: held.clone() };
            // What the handles refer to is live memory of this GPU, a peer or the host, and held until the kernel has
            // ended. The kernel checks control memory against the rings before it becomes an address.
            // SAFETY: the job's regions hold everything that its items refer to. Items, their list of misses and both
            // handles are in memory that no safe call reaches; that of items and list is this job's until its kernels
            // have ended. What the handles refer to: see above. With any content of the directory, a cache slot is a
            // way of one of the handle's sets. The list has room for every part of every item. Only the first half of a
            // gather appends to it, and has ended before the second.
            let mut running = unsafe { self.gpu.start(name, &call, limit, used) }?;
            running.wait()?;
            took += running.took()?;
        }
        items.into_iter().for_each(|items| self.items.keep(items));
        Ok(took)
    }
}
