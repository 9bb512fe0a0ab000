//! Copies by the GPU's copy engine, on a separate stream.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use onehop_os::DmaMemory;

use super::context::{Context, Event, WorkProgress};
use super::driver::{DevicePtr, DriverCalls, Failure};
use super::stream::{self, COPIES, End, LONGEST, Stream};
use crate::copier::{Copier, Mark, Rows};
use crate::{Error, Region, Result};

const WHAT: &str = "copying to or from GPU memory";
/// How long a dropped copier waits for its copies.
pub(super) const END: Duration = Duration::from_secs(10);
/// CUDA_ERROR_NOT_SUPPORTED.
pub(super) const NOT_SUPPORTED: c_int = 801;

/// See [`Copier`].
pub(super) struct CudaCopier {
    context: Arc<Context>,
    stream: Arc<Stream>,
    /// Whether the driver accepts many copies in one call; determined by trying.
    batches: bool,
    /// Marks not yet known to be over, the oldest first.
    marks: VecDeque<(Mark, Event)>,
    /// Events for reuse.
    idle: Vec<Event>,
    next: u64,
    // Kept until the stream has ended.
    from: Region,
    to: Region,
}

/// An address of a region in the address space that the CPU and the GPU share.
pub(super) fn shared_ptr(region: &Region, at: usize) -> DevicePtr {
    let base = region.host().map_or(region.addr().0, |host| host.host_ptr() as DevicePtr);
    base.wrapping_add(at as u64)
}

/// Copies that are started by one call. The engine does not pause between them for some microseconds, as it does between
/// separate copies: 2 MiB each are as fast as 64 MiB.
#[derive(Default)]
pub(super) struct CopyLists {
    to: Vec<DevicePtr>,
    from: Vec<DevicePtr>,
    bytes: Vec<usize>,
}

impl CopyLists {
    pub(super) fn add(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) {
        self.from.push(from);
        self.to.push(to);
        self.bytes.push(bytes);
    }

    /// Starts the copies, none of which is empty.
    ///
    /// # Safety
    /// Every range stays allocated until the stream has ended.
    pub(super) unsafe fn start(
        mut self,
        context: &Context,
        stream: &Stream,
    ) -> std::result::Result<(), Failure> {
        if self.to.is_empty() {
            return Ok(());
        }
        let anywhere =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut how = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: anywhere,
            dstLocHint: anywhere,
            flags: 0,
        };
        let (mut first, stream) = (0, stream.raw());
        context.attempt(|driver| {
            // SAFETY: the caller's promise; the lists are equally long and live across the call, and the one way is that of all
            // from 0 on.
            unsafe {
                driver.copy_batch(
                    self.to.as_mut_ptr(),
                    self.from.as_mut_ptr(),
                    self.bytes.as_mut_ptr(),
                    self.to.len(),
                    &mut how,
                    &mut first,
                    1,
                    stream,
                )
            }
        })
    }
}

impl CudaCopier {
    /// Copies between memories that the context reaches.
    pub(super) fn new(context: &Arc<Context>, from: &Region, to: &Region) -> Result<Self> {
        // A caller's stream that waits for these copies must not share a channel of the GPU with them.
        let stream = if to.is_everything() { Stream::apart(context)? } else { Stream::new(context)? };
        Ok(Self {
            context: context.clone(),
            stream: Arc::new(stream),
            batches: true,
            marks: VecDeque::new(),
            idle: Vec::new(),
            next: 0,
            from: from.clone(),
            to: to.clone(),
        })
    }

    /// In the address space that the CPU and the GPU share.
    fn source_ptr(&self, at: usize) -> DevicePtr {
        shared_ptr(&self.from, at)
    }

    fn target_ptr(&self, at: usize) -> DevicePtr {
        shared_ptr(&self.to, at)
    }

    fn one(&self, from: usize, to: usize, bytes: usize) -> Result<()> {
        // SAFETY: the range was checked to lie within the two regions, which are kept until the stream has ended.
        self.context.call(WHAT, |driver| unsafe { self.start_one(driver, from, to, bytes) })
    }

    /// # Safety
    /// The range lies within the two regions.
    unsafe fn start_one(
        &self,
        driver: &DriverCalls,
        from: usize,
        to: usize,
        bytes: usize,
    ) -> std::result::Result<(), Failure> {
        let (from, to, stream) = (self.source_ptr(from), self.target_ptr(to), self.stream.raw());
        // SAFETY: the caller's promise; the regions are kept until the stream has ended.
        unsafe {
            if self.from.host().is_some() {
                driver.copy_in(to, from as *const c_void, bytes, stream)
            } else if self.to.host().is_some() {
                driver.copy_out(to as *mut c_void, from, bytes, stream)
            } else {
                driver.copy_within(to, from, bytes, stream)
            }
        }
    }

    /// Copies whole rows by one call.
    fn batch(&self, all: &[Rows]) -> std::result::Result<(), Failure> {
        let mut lists = CopyLists::default();
        for rows in all {
            lists.add(self.source_ptr(rows.from), self.target_ptr(rows.to), rows.row);
        }
        // SAFETY: every range was checked to lie within the two regions, which are kept until the stream has ended.
        unsafe { lists.start(&self.context, &self.stream) }
    }

    /// Progress of everything before a mark.
    fn progress(&mut self, mark: Mark) -> WorkProgress {
        while let Some((first, event)) = self.marks.front() {
            if *first > mark {
                break;
            }
            match event.progress() {
                WorkProgress::Over => self.idle.extend(self.marks.pop_front().map(|(_, event)| event)),
                other => return other,
            }
        }
        WorkProgress::Over
    }

    fn rows(&self, rows: &Rows) -> Result<()> {
        let host = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let kind = |region: &Region| if region.host().is_some() { host } else { device };
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: kind(&self.from),
            srcHost: self.source_ptr(rows.from) as *const c_void,
            srcPitch: rows.step,
            dstMemoryType: kind(&self.to),
            dstDevice: self.target_ptr(rows.to),
            dstPitch: rows.row,
            WidthInBytes: rows.row,
            Height: rows.rows,
            srcXInBytes: 0,
            srcY: 0,
            srcDevice: self.source_ptr(rows.from),
            srcArray: std::ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstHost: self.target_ptr(rows.to) as *mut c_void,
            dstArray: std::ptr::null_mut(),
        };
        let stream = self.stream.raw();
        // SAFETY: as for `one`, with rows and distances that were checked.
        self.context.call(WHAT, |driver| unsafe { driver.copy_column(&copy, stream) })
    }
}

impl Copier for CudaCopier {
    fn copy(&mut self, rows: &Rows) -> Result<()> {
        rows.check(self.from.len(), self.to.len())?;
        match (rows.row, rows.rows) {
            (0, _) | (_, 0) => Ok(()),
            (row, 1) => self.one(rows.from, rows.to, row),
            // The driver limits distances; rows this far apart are long enough to be copied one by one.
            _ if rows.step > MOST_PITCH => (0..rows.rows)
                .try_for_each(|i| self.one(rows.from + i * rows.step, rows.to + i * rows.row, rows.row)),
            _ => self.rows(rows),
        }
    }

    fn copy_all(&mut self, all: &[Rows]) -> Result<()> {
        let (whole, others): (Vec<Rows>, Vec<Rows>) =
            all.iter().partition(|rows| rows.rows == 1 && rows.row > 0);
        if self.batches && whole.len() > 1 {
            whole.iter().try_for_each(|rows| rows.check(self.from.len(), self.to.len()))?;
            match self.batch(&whole) {
                Ok(()) => return others.iter().try_for_each(|rows| self.copy(rows)),
                Err(Failure::Missing(..) | Failure::Code(_, NOT_SUPPORTED)) => self.batches = false,
                Err(failure) => return self.context.call(WHAT, |_| Err(failure)),
            }
        }
        all.iter().try_for_each(|rows| self.copy(rows))
    }

    fn copy_now(&mut self, rows: &Rows) -> Result<()> {
        rows.check(self.from.len(), self.to.len())?;
        if rows.rows == 1 && rows.row > 0 {
            let progress = self.context.call(WHAT, |driver| {
                // SAFETY: the range was checked just now.
                unsafe { self.start_one(driver, rows.from, rows.to, rows.row) }?;
                // Entering the context anew for each question would take longer than the answer.
                Ok(self.stream.poll(driver, COPIES.short))
            })?;
            if progress == WorkProgress::Over {
                return Ok(());
            }
        } else {
            self.copy(rows)?;
        }
        let mark = self.mark()?;
        self.wait(mark)
    }

    fn mark(&mut self) -> Result<Mark> {
        let event = self.idle.pop().map_or_else(|| Event::silent(&self.context), Ok);
        let marked = event.and_then(|event| event.record(&self.stream).map(|()| event));
        let event = marked.map_err(Error::of_begun_work)?;
        let mark = Mark(self.next);
        self.next += 1;
        self.marks.push_back((mark, event));
        Ok(mark)
    }

    fn is_over(&mut self, mark: Mark) -> Result<bool> {
        match self.progress(mark) {
            WorkProgress::Over => Ok(true),
            WorkProgress::Pending => Ok(false),
            WorkProgress::Lost(failure) | WorkProgress::Unknown(failure) => {
                Err(self.context.driver.error(WHAT, failure).of_begun_work())
            }
        }
    }

    fn wait(&mut self, mark: Mark) -> Result<()> {
        match stream::wait(LONGEST, COPIES, || self.progress(mark)) {
            End::Over => Ok(()),
            end => Err(self.stream.error(WHAT, end, LONGEST)),
        }
    }
}

/// CU_DEVICE_ATTRIBUTE_MAX_PITCH is 2 GiB less a byte on every GPU; this is well below.
const MOST_PITCH: usize = 1 << 30;

impl Drop for CudaCopier {
    fn drop(&mut self) {
        if let End::Unended(_) = stream::wait(END, COPIES, || self.stream.progress()) {
            // The GPU may still read the one and write the other.
            self.stream.outlasted((self.from.clone(), self.to.clone()));
        }
    }
}
