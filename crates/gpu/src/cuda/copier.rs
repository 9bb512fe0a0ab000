//! Copies by the GPU's copy engine, on a stream of their own.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use onehop_os::{DmaMemory, HostMem};

use super::context::{Context, Event, Stream};
use super::driver::DevicePtr;
use crate::copier::{Copier, Mark, Rows};
use crate::{Error, Region, Result};

const WHAT: &str = "copying to GPU memory";

/// See [`Copier`].
pub(super) struct CudaCopier {
    context: Arc<Context>,
    stream: Stream,
    /// Points that have not been seen to be over, the oldest first.
    marks: VecDeque<(Mark, Event)>,
    /// Events to be used again.
    idle: Vec<Event>,
    next: u64,
    host: HostMem,
    // Kept until the stream has come to its end.
    from: Region,
    to: Region,
}

impl CudaCopier {
    pub(super) fn new(context: &Arc<Context>, from: &Region, to: &Region) -> Result<Self> {
        let host = from.host().cloned().ok_or_else(|| Error::NotSupported {
            what: WHAT.into(),
            why: "it is to come from memory that the CPU does not reach".into(),
        })?;
        Ok(Self {
            context: context.clone(),
            stream: Stream::new(context)?,
            marks: VecDeque::new(),
            idle: Vec::new(),
            next: 0,
            host,
            from: from.clone(),
            to: to.clone(),
        })
    }

    fn host_ptr(&self, at: usize) -> *const c_void {
        self.host.host_ptr().wrapping_add(at).cast()
    }

    fn device_ptr(&self, at: usize) -> DevicePtr {
        self.to.addr().plus(at as u64).0
    }

    fn one(&self, from: usize, to: usize, bytes: usize) -> Result<()> {
        let (from, to, stream) = (self.host_ptr(from), self.device_ptr(to), self.stream.raw());
        // SAFETY: the range was checked to lie within the two regions, which are kept until the stream has ended.
        self.context.call(WHAT, |driver| unsafe { driver.copy_in(to, from, bytes, stream) })
    }

    fn rows(&self, rows: &Rows) -> Result<()> {
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: self.host_ptr(rows.from),
            srcPitch: rows.step,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: self.device_ptr(rows.to),
            dstPitch: rows.row,
            WidthInBytes: rows.row,
            Height: rows.rows,
            srcXInBytes: 0,
            srcY: 0,
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstHost: std::ptr::null_mut(),
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
            // The driver has a limit for distances; such rows are long enough to go one by one.
            _ if rows.step > MOST_PITCH => (0..rows.rows)
                .try_for_each(|i| self.one(rows.from + i * rows.step, rows.to + i * rows.row, rows.row)),
            _ => self.rows(rows),
        }
    }

    fn mark(&mut self) -> Result<Mark> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => Event::waitable(&self.context)?,
        };
        event.record(&self.stream)?;
        let mark = Mark(self.next);
        self.next += 1;
        self.marks.push_back((mark, event));
        Ok(mark)
    }

    fn is_over(&mut self, mark: Mark) -> Result<bool> {
        while let Some((first, event)) = self.marks.front() {
            if *first > mark {
                break;
            }
            if !event.is_over(WHAT)? {
                return Ok(false);
            }
            self.idle.extend(self.marks.pop_front().map(|(_, event)| event));
        }
        Ok(true)
    }

    fn wait(&mut self, mark: Mark) -> Result<()> {
        let at = self.marks.partition_point(|(first, _)| *first < mark);
        match self.marks.get(at) {
            Some((_, event)) => event.wait(WHAT)?,
            None => return Ok(()),
        }
        self.idle.extend(self.marks.drain(..=at).map(|(_, event)| event));
        Ok(())
    }
}

/// CU_DEVICE_ATTRIBUTE_MAX_PITCH is 2 GiB less a byte on every GPU there is; kept well below.
const MOST_PITCH: usize = 1 << 30;

impl Drop for CudaCopier {
    fn drop(&mut self) {
        let stream = self.stream.raw();
        // SAFETY: the stream lives; when this returns nothing reads the host memory any more, or the context is broken and
        // runs nothing.
        let _ = self.context.attempt(|driver| unsafe { driver.stream_wait(stream) });
    }
}
