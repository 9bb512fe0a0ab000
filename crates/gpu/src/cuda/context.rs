//! A GPU's primary context, and the streams and events in it.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use onehop_os::{HostMem, Marks};

use super::driver::{DevicePtr, Driver, Failure, NOT_READY};
use crate::{Error, Result};

/// CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
const ALREADY_ENABLED: i32 = 704;
/// The stream does not wait for the default stream, which other code in this process may use.
const NON_BLOCKING: u32 = 1;
/// A priority above that of all other streams; lower numbers come first.
const ABOVE_OTHERS: i32 = -1;

/// The primary context of one GPU: the one that every other library in this process uses as well.
pub(super) struct Context {
    pub(super) driver: Arc<Driver>,
    pub(super) device: i32,
    raw: sys::CUcontext,
}

// SAFETY: a CUcontext is a handle that any thread may make current; the driver locks what is in it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(driver: &Arc<Driver>, device: i32) -> Result<Arc<Self>> {
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call, and `device` came from cuDeviceGet.
        unsafe { driver.context_retain(&mut raw, device) }
            .map_err(|failure| driver.error(format!("opening GPU {device}"), failure))?;
        Ok(Arc::new(Self { driver: driver.clone(), device, raw }))
    }

    /// Lets kernels of this context reach all of another GPU's memory that was plainly allocated, now and later.
    pub(super) fn reach(&self, other: &Self) -> Result<()> {
        let what = format!("letting GPU {} into the memory of GPU {}", self.device, other.device);
        let mut can = 0;
        // SAFETY: `can` lives across the call.
        self.call(&what, |driver| unsafe { driver.peer_can(&mut can, self.device, other.device) })?;
        if can == 0 {
            return Err(Error::NotSupported {
                what,
                why: "the two have no way to each other (nvidia-smi topo -p2p w shows which have)".into(),
            });
        }
        // SAFETY: the other context is retained, and no flags are defined.
        match self.attempt(|driver| unsafe { driver.peer_enable(other.raw, 0) }) {
            Err(failure) if failure.code() != Some(ALREADY_ENABLED) => Err(self.driver.error(what, failure)),
            _ => Ok(()),
        }
    }

    /// Makes it the calling thread's current context until the result is dropped.
    pub(super) fn enter(&self) -> std::result::Result<Entered<'_>, Failure> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { self.driver.context_push(self.raw) }?;
        Ok(Entered { context: self, _this_thread: PhantomData })
    }

    /// Runs a call in this context, and makes its failure an error that says what was being done.
    pub(super) fn call<R>(
        &self,
        what: &str,
        f: impl FnOnce(&Driver) -> std::result::Result<R, Failure>,
    ) -> Result<R> {
        self.attempt(f).map_err(|failure| self.driver.error(what, failure))
    }

    /// The same, with the failure as it is.
    pub(super) fn attempt<R>(
        &self,
        f: impl FnOnce(&Driver) -> std::result::Result<R, Failure>,
    ) -> std::result::Result<R, Failure> {
        let _entered = self.enter()?;
        f(&self.driver)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once by `open`, and nothing made in it is left: all of it holds an Arc of this.
        let _ = unsafe { self.driver.context_release(self.device) };
    }
}

/// See [`Context::enter`]. Stays on its thread: what is popped must be what was pushed there.
pub(super) struct Entered<'a> {
    context: &'a Context,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call; this thread pushed the context that is popped.
        let _ = unsafe { self.context.driver.context_pop(&mut raw) };
    }
}

/// A queue of work on the GPU that waits for no other.
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: a CUstream is a handle that any thread may use; the driver orders the calls.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call, and the context is current in it.
        context.call("making a stream", |driver| unsafe { driver.stream_create(&mut raw, NON_BLOCKING) })?;
        Ok(Self { context: context.clone(), raw })
    }

    /// A stream for a kernel that stays. Streams share a few channels of the GPU, in which the mark of a kernel's end holds
    /// up whatever comes after it; those of another priority have channels of their own.
    pub(super) fn apart(context: &Arc<Context>) -> Result<Self> {
        let mut raw = null_mut();
        context.call("making a stream for a kernel that stays", |driver| {
            // SAFETY: `raw` lives across the call, and the context is current in it; a priority is clamped.
            unsafe { driver.stream_create_apart(&mut raw, NON_BLOCKING, ABOVE_OTHERS) }
        })?;
        Ok(Self { context: context.clone(), raw })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Copies into GPU memory. The caller has checked that the range is allocated.
    pub(super) fn copy_in(&self, to: DevicePtr, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let from = data.as_ptr().cast::<c_void>();
        self.context.call("copying into GPU memory", |driver| {
            // SAFETY: `data` is borrowed until the stream was waited for; `to` has room for it, as the caller checked.
            unsafe { driver.copy_in(to, from, data.len(), self.raw) }?;
            // SAFETY: the stream lives as long as self.
            unsafe { driver.stream_wait(self.raw) }
        })
    }

    /// Copies out of GPU memory. The caller has checked that the range is allocated.
    pub(super) fn copy_out(&self, from: DevicePtr, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let to = out.as_mut_ptr().cast::<c_void>();
        self.context.call("copying out of GPU memory", |driver| {
            // SAFETY: `out` is borrowed until the stream was waited for; `from` has that many bytes, as the caller checked.
            unsafe { driver.copy_out(to, from, out.len(), self.raw) }?;
            // SAFETY: the stream lives as long as self.
            unsafe { driver.stream_wait(self.raw) }
        })
    }

    /// Copies out of GPU memory to host memory, all of it. The caller has checked that the range is allocated, and the host
    /// memory writable.
    pub(super) fn copy_out_to(&self, from: DevicePtr, to: &HostMem) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.context.call("copying out of GPU memory", |driver| {
            // SAFETY: `to` is mapped and shared memory, which outlives the call; the stream is waited for before it returns.
            unsafe { driver.copy_out(to.host_ptr().cast(), from, to.len(), self.raw) }?;
            // SAFETY: the stream lives as long as self.
            unsafe { driver.stream_wait(self.raw) }
        })
    }

    /// Puts a word in several places of GPU memory. The caller has checked that all of them are allocated.
    pub(super) fn mark(&self, memory: DevicePtr, marks: &Marks) -> Result<()> {
        let (at, pitch, height) = (memory + marks.first, marks.step as usize, marks.count as usize);
        self.context.call("marking GPU memory", |driver| {
            for (half, value) in [(0, marks.word as u32), (4, (marks.word >> 32) as u32)] {
                // SAFETY: the caller has checked that every place is allocated.
                unsafe { driver.set_column(at + half, pitch, value, 1, height, self.raw) }?;
            }
            // SAFETY: the stream lives as long as self.
            unsafe { driver.stream_wait(self.raw) }
        })
    }

    /// How many of the places still hold the word. The caller has checked that all of them are allocated.
    pub(super) fn marks_left(&self, memory: DevicePtr, marks: &Marks) -> Result<u64> {
        let mut words = vec![0_u64; marks.count as usize];
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: memory + marks.first,
            srcPitch: marks.step as usize,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            dstHost: words.as_mut_ptr().cast(),
            dstPitch: Marks::BYTES as usize,
            WidthInBytes: Marks::BYTES as usize,
            Height: marks.count as usize,
            srcXInBytes: 0,
            srcY: 0,
            srcHost: std::ptr::null(),
            srcArray: null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstDevice: 0,
            dstArray: null_mut(),
        };
        self.context.call("looking at marks in GPU memory", |driver| {
            // SAFETY: `words` has a word for each place and is borrowed until the stream was waited for; the caller has
            // checked that every place is allocated.
            unsafe { driver.copy_column(&copy, self.raw) }?;
            // SAFETY: the stream lives as long as self.
            unsafe { driver.stream_wait(self.raw) }
        })?;
        Ok(words.iter().filter(|word| **word == marks.word).count() as u64)
    }

    /// Sets bytes of GPU memory. The caller has checked that the range is allocated.
    pub(super) fn fill(&self, at: DevicePtr, bytes: usize, value: u8) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.call("filling GPU memory", |driver| {
            // SAFETY: the caller has checked that the range is allocated.
            unsafe { driver.set_bytes(at, value, bytes, self.raw) }?;
            // SAFETY: the stream lives as long as self.
            unsafe { driver.stream_wait(self.raw) }
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle; work that is still in the stream goes on, and is then given up.
        let _ = self.context.attempt(|driver| unsafe { driver.stream_destroy(self.raw) });
    }
}

/// A point in a stream's work.
pub(super) struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: a CUevent is a handle that any thread may use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call, and the context is current in it.
        context.call("making an event", |driver| unsafe { driver.event_create(&mut raw, 0) })?;
        Ok(Self { context: context.clone(), raw })
    }

    /// An event that keeps no time, and interrupts nobody: the copy engine makes no pause for it.
    pub(super) fn silent(context: &Arc<Context>) -> Result<Self> {
        const DISABLE_TIMING: u32 = 2;
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call, and the context is current in it.
        context.call("making an event", |driver| unsafe { driver.event_create(&mut raw, DISABLE_TIMING) })?;
        Ok(Self { context: context.clone(), raw })
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles live, and are of the context that is current.
        self.context.call("marking the end of a launch", |driver| unsafe {
            driver.event_record(self.raw, stream.raw)
        })
    }

    /// Whether the work before it has ended; an error if it failed.
    pub(super) fn is_over(&self, what: &str) -> Result<bool> {
        // SAFETY: the handle lives as long as self.
        match self.context.attempt(|driver| unsafe { driver.event_query(self.raw) }) {
            Ok(()) => Ok(true),
            Err(failure) if failure.code() == Some(NOT_READY) => Ok(false),
            Err(failure) => Err(self.error(what, failure)),
        }
    }

    /// The time from an earlier event of the same stream to this one, by the GPU's clock; both have come to pass.
    pub(super) fn since(&self, earlier: &Self) -> Result<Duration> {
        let mut ms = 0.0;
        // SAFETY: `ms` lives across the call, and both handles live.
        self.context.call("asking how long a kernel took", |driver| unsafe {
            driver.event_elapsed(&mut ms, earlier.raw, self.raw)
        })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    fn error(&self, what: &str, failure: Failure) -> Error {
        self.context.driver.error(what, failure)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle; the driver allows it before the event has come to pass.
        let _ = self.context.attempt(|driver| unsafe { driver.event_destroy(self.raw) });
    }
}
