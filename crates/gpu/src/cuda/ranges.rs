//! Ranges copied by the GPU's copy engine, and short ones by a kernel, on a separate stream.

use std::ffi::c_void;
use std::sync::Arc;

use onehop_block::THREADS;
use onehop_block::ranges::{ENTRY_BYTES, RangeList};
use onehop_os::{DmaMemory, HostMem};

use super::context::Context;
use super::copier::{CopyLists, END, NOT_SUPPORTED, shared_ptr};
use super::driver::{DevicePtr, Failure};
use super::host::{self, PageRegistration};
use super::module::{Arg, Function, Module, Shape};
use super::stream::{self, COPIES, End, LONGEST, Stream};
use crate::ranges::{CopyRange, DividedRanges, RangeCopier};
use crate::{Region, Result};

const WHAT: &str = "copying ranges to or from GPU memory";
/// Most ranges of one call of the driver: with more, each takes longer.
const MOST: usize = 1024;
/// Entries that a kernel's list has room for at first.
const ENTRIES: usize = 4096;
/// Larger lists are not kept for later copies.
const MOST_KEPT: usize = 1 << 20;
/// Blocks of the kernel, few enough to leave the link to others: into GPU memory, and out of it.
const BLOCKS: [u32; 2] = [4, 8];

/// See [`RangeCopier`].
pub(super) struct CudaRanges {
    context: Arc<Context>,
    stream: Arc<Stream>,
    /// Whether the driver accepts many copies in one call; determined by trying.
    batches: bool,
    /// Copies ranges of fewer bytes than this.
    kernel: Option<(Function, usize)>,
    list: Option<EntryList>,
    /// What copies use that may not have ended.
    used: UsedByCopies,
}

#[derive(Default)]
struct UsedByCopies {
    memories: Vec<Region>,
    /// Lists that became too short, and the kernel that reads them.
    lists: Vec<EntryList>,
    kernel: Option<Function>,
}

/// Memory for the kernel's lists.
struct EntryList {
    mem: HostMem,
    at: DevicePtr,
    /// Bytes that kernels use which may not have ended.
    used: usize,
    _registration: PageRegistration,
}

impl EntryList {
    fn new(context: &Arc<Context>, entries: usize) -> Result<Self> {
        let mem = HostMem::touched(entries * ENTRY_BYTES as usize)?;
        let (_registration, at) = host::share(context, &mem)?;
        Ok(Self { mem, at, used: 0, _registration })
    }

    fn room(&self) -> usize {
        (self.mem.len() - self.used) / ENTRY_BYTES as usize
    }

    /// Appends entries, for which there is room. Returns their address.
    fn append(&mut self, entries: &[[u64; 4]]) -> Result<DevicePtr> {
        let at = self.at + self.used as u64;
        for entry in entries {
            let mut bytes = [0; ENTRY_BYTES as usize];
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(entry) {
                *bytes = word.to_le_bytes();
            }
            self.mem.write(self.used, &bytes)?;
            self.used += bytes.len();
        }
        Ok(at)
    }
}

impl CudaRanges {
    /// Has the driver compile the kernel.
    pub(super) fn load_kernel(context: &Arc<Context>) -> Result<Function> {
        Module::load(context, &onehop_device::BLOCKS_PTX.text())?.function("onehop_ranges")
    }

    /// With a kernel for ranges of fewer bytes than that.
    pub(super) fn new(context: &Arc<Context>, kernel: Option<(Function, usize)>) -> Result<Self> {
        // A program's stream that waits for these copies must not share a channel of the GPU with them.
        let stream = Arc::new(Stream::apart(context)?);
        let (context, used) = (context.clone(), UsedByCopies::default());
        Ok(Self { context, stream, batches: true, kernel, list: None, used })
    }

    fn one(&self, memories: &[Region], range: &CopyRange) -> Result<()> {
        let (from, to) = (&memories[range.from.0], &memories[range.to.0]);
        let (start, end) = (shared_ptr(from, range.from.1), shared_ptr(to, range.to.1));
        let (bytes, stream) = (range.bytes, self.stream.raw());
        // SAFETY: the range was checked to lie within the two regions, which are kept until the stream has ended.
        self.context.call(WHAT, |driver| unsafe {
            if from.host().is_some() {
                driver.copy_in(end, start as *const c_void, bytes, stream)
            } else if to.host().is_some() {
                driver.copy_out(end as *mut c_void, start, bytes, stream)
            } else {
                driver.copy_within(end, start, bytes, stream)
            }
        })
    }

    fn by_copy_engine(&mut self, memories: &[Region], ranges: &[CopyRange]) -> Result<()> {
        for some in ranges.chunks(MOST) {
            if self.batches {
                let mut lists = CopyLists::default();
                for range in some {
                    let from = shared_ptr(&memories[range.from.0], range.from.1);
                    lists.add(from, shared_ptr(&memories[range.to.0], range.to.1), range.bytes);
                }
                // SAFETY: every range was checked to lie within its region, which is kept until the stream has ended.
                match unsafe { lists.start(&self.context, &self.stream) } {
                    Ok(()) => continue,
                    Err(Failure::Missing(..) | Failure::Code(_, NOT_SUPPORTED)) => self.batches = false,
                    Err(failure) => return self.context.call(WHAT, |_| Err(failure)),
                }
            }
            some.iter().try_for_each(|range| self.one(memories, range))?;
        }
        Ok(())
    }

    fn by_kernel(&mut self, kernel: &Function, entries: &[[u64; 4]], is_out: bool) -> Result<()> {
        let list = match self.list.take() {
            Some(list) if list.room() >= entries.len() => list,
            old => {
                self.used.lists.extend(old.filter(|old| old.used > 0));
                EntryList::new(&self.context, entries.len().next_power_of_two().max(ENTRIES))?
            }
        };
        let list = self.list.insert(list);
        let (at, count) = (list.append(entries)?, entries.len() as u32);
        self.used.kernel = Some(kernel.clone());
        let job = RangeList { list: at, count, settles: u32::from(is_out) };
        let shape = Shape { blocks: BLOCKS[usize::from(is_out)], threads: THREADS, shared: 0 };
        // SAFETY: every range of the list was checked to lie within two regions that the kernel reaches. They, the list and the
        // kernel are kept until the stream has ended.
        unsafe { kernel.launch(&self.stream, shape, &[Arg::Words(Box::new(job.words()))]) }
    }
}

impl RangeCopier for CudaRanges {
    fn start(&mut self, memories: &[Region], ranges: &[CopyRange]) -> Result<()> {
        ranges.iter().try_for_each(|range| range.check(memories))?;
        let mut is_used = vec![false; memories.len()];
        for range in ranges.iter().filter(|range| range.bytes > 0) {
            (is_used[range.from.0], is_used[range.to.0]) = (true, true);
        }
        let used = memories.iter().zip(is_used).filter_map(|(memory, is_used)| is_used.then_some(memory));
        used.clone().try_for_each(|memory| self.context.check_copied(WHAT, memory))?;
        self.used.memories.extend(used.cloned());
        let reaches = |memory: &Region| self.context.reaches(memory.space());
        let (kernel, below) = self.kernel.clone().unzip();
        let divided = DividedRanges::new(memories, ranges, below.unwrap_or(0), reaches);
        self.by_copy_engine(memories, &divided.rest)?;
        for (entries, is_out) in [(&divided.into, false), (&divided.out, true)] {
            if let Some(kernel) = kernel.as_ref().filter(|_| !entries.is_empty()) {
                self.by_kernel(kernel, entries, is_out)?;
            }
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        match self.stream.end(LONGEST) {
            End::Over => {
                self.used = UsedByCopies::default();
                self.list.take_if(|list| list.mem.len() > MOST_KEPT);
                self.list.iter_mut().for_each(|list| list.used = 0);
                Ok(())
            }
            end => Err(self.stream.error(WHAT, end, LONGEST)),
        }
    }
}

impl Drop for CudaRanges {
    fn drop(&mut self) {
        if self.used.memories.is_empty() {
            return;
        }
        if let End::Unended(_) = stream::wait(END, COPIES, || self.stream.progress()) {
            // The GPU may still use all of it.
            self.stream.outlasted((std::mem::take(&mut self.used), self.list.take()));
        }
    }
}
