//! Streams, and waiting for their work.

use std::ops::Range;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use onehop_os::HostMem;

use super::context::{Context, Event, Raw, WorkProgress};
use super::driver::{DevicePtr, DriverCalls, Failure};
use super::host::{self, PageRegistration};
use super::marks::Marker;
use crate::{Error, Result};

/// The stream does not wait for the default stream, which other code in this process may use.
const NON_BLOCKING: u32 = 1;
/// A priority above that of ordinary streams; lower numbers come first.
const ABOVE_OTHERS: i32 = -1;
/// A priority above that one.
const ABOVE_ALL: i32 = -2;
/// Time limit of copies and fills: a thousand times what they need.
pub(super) const LONGEST: Duration = Duration::from_secs(60);
/// Bytes of a caller copied at a time: small enough for a CPU's cache.
const CHUNK: usize = 512 << 10;
/// Number of bounce buffers that a stream keeps, for as many threads as usually copy at a time: pinning one takes longer than
/// a copy.
const IDLE: usize = 32;

/// How often to poll work.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// How long to poll without sleeping.
    pub(super) short: Duration,
    /// The longest sleep. A sleep is at most an eighth of the time waited so far.
    pub(super) nap: Duration,
}

/// Copies: small ones are over before a thread can sleep and wake.
pub(super) const COPIES: Pace = Pace { short: Duration::from_micros(30), nap: Duration::from_micros(500) };
/// Kernels.
pub(super) const KERNELS: Pace = Pace { short: Duration::from_millis(1), nap: Duration::from_micros(50) };

/// The end of a wait for work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It has succeeded.
    Over,
    /// It was lost with the context.
    Lost(Failure),
    /// It takes too long, or the driver does not report whether it has ended.
    Unended(Option<Failure>),
}

/// Polls work until it has ended, for at most `limit`.
pub(super) fn wait(limit: Duration, pace: Pace, mut progress: impl FnMut() -> WorkProgress) -> End {
    let start = Instant::now();
    loop {
        match progress() {
            WorkProgress::Over => return End::Over,
            WorkProgress::Lost(failure) => return End::Lost(failure),
            WorkProgress::Unknown(failure) => return End::Unended(Some(failure)),
            WorkProgress::Pending => {}
        }
        let waited = start.elapsed();
        if waited >= limit {
            return End::Unended(None);
        }
        if waited < pace.short {
            std::thread::yield_now();
        } else {
            std::thread::sleep((waited / 8).min(pace.nap));
        }
    }
}

/// Our memory between the GPU's and a caller's: while the GPU copies one half, the CPU copies the other.
struct Bounce {
    mem: HostMem,
    /// Events at the ends of each half's copies.
    ends: [Event; 2],
    /// Optional: copies are faster with a registration.
    _registration: Option<PageRegistration>,
}

impl Bounce {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let mem = HostMem::touched(2 * CHUNK)?;
        let _registration = host::pin(context, &mem);
        Ok(Self { mem, ends: [Event::silent(context)?, Event::silent(context)?], _registration })
    }

    fn half(&self, chunk: usize) -> *mut u8 {
        self.mem.host_ptr().wrapping_add(chunk % 2 * CHUNK)
    }
}

/// A caller's bytes, copied to or from GPU memory.
enum HostBytes<'a> {
    In(&'a [u8]),
    Out(&'a mut [u8]),
}

impl HostBytes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::In(bytes) => bytes.len(),
            Self::Out(bytes) => bytes.len(),
        }
    }

    fn chunk(&self, chunk: usize) -> Range<usize> {
        chunk * CHUNK..((chunk + 1) * CHUNK).min(self.len())
    }
}

/// A queue of GPU work that waits for no other.
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    /// Bounce buffers for callers' bytes, which are borrowed and so cannot be left to a GPU that does not finish.
    bounces: Mutex<Vec<Bounce>>,
    /// Events for reuse.
    idle: Mutex<Vec<Event>>,
    marker: Mutex<Option<Arc<Marker>>>,
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
        Ok(Self::of(context, raw))
    }

    /// A stream for a persistent kernel. Streams share a few GPU channels, in which the event at a kernel's end blocks
    /// everything after it; streams of another priority have separate channels.
    pub(super) fn apart(context: &Arc<Context>) -> Result<Self> {
        Self::with_priority(context, "making a stream for a kernel that stays", ABOVE_OTHERS)
    }

    /// A stream for kernels that may not start for a long time, which would block others in the same way.
    pub(super) fn for_marks(context: &Arc<Context>) -> Result<Self> {
        Self::with_priority(context, "making a stream for marks", ABOVE_ALL)
    }

    fn with_priority(context: &Arc<Context>, what: &str, priority: i32) -> Result<Self> {
        let mut raw = null_mut();
        context.call(what, |driver| {
            // SAFETY: `raw` lives across the call, and the context is current in it; a priority is clamped.
            unsafe { driver.stream_create_apart(&mut raw, NON_BLOCKING, priority) }
        })?;
        Ok(Self::of(context, raw))
    }

    fn of(context: &Arc<Context>, raw: sys::CUstream) -> Self {
        Self {
            context: context.clone(),
            raw,
            bounces: Mutex::default(),
            idle: Mutex::default(),
            marker: Mutex::default(),
        }
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Progress of its work.
    pub(super) fn progress(&self) -> WorkProgress {
        // SAFETY: the handle lives as long as self.
        WorkProgress::of(self.context.attempt(|driver| unsafe { driver.stream_query(self.raw) }))
    }

    /// Progress of its work, after at most `limit` if it has not ended. Its context is current.
    pub(super) fn poll(&self, driver: &DriverCalls, limit: Duration) -> WorkProgress {
        let start = Instant::now();
        loop {
            // SAFETY: the handle lives as long as self.
            let progress = WorkProgress::of(unsafe { driver.stream_query(self.raw) });
            if progress != WorkProgress::Pending || start.elapsed() >= limit {
                return progress;
            }
            std::thread::yield_now();
        }
    }

    /// Leaves what its work uses to the GPU, until it has ended. Nothing is freed before.
    pub(super) fn outlasted(self: &Arc<Self>, used: impl Send + 'static) {
        let stream = self.clone();
        self.context.driver.reclaimer.outlasted(move || {
            let _ = &used;
            matches!(stream.progress(), WorkProgress::Over | WorkProgress::Lost(_))
        });
    }

    /// The error of failed work.
    pub(super) fn error(&self, what: &str, end: End, limit: Duration) -> Error {
        match end {
            End::Lost(failure) | End::Unended(Some(failure)) => {
                self.context.driver.error(what, failure).of_begun_work()
            }
            End::Over | End::Unended(None) => {
                Error::Unended { what: what.into(), seconds: limit.as_secs_f64().ceil() as u64 }
            }
        }
    }

    /// Waits for the end of its present work.
    pub(super) fn end(&self, limit: Duration) -> End {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let event = idle().pop().map_or_else(|| Event::silent(&self.context), Ok);
        let marked = event.and_then(|event| event.record(self).map(|()| event));
        let Ok(event) = marked else { return wait(limit, COPIES, || self.progress()) };
        let end = wait(limit, COPIES, || event.progress());
        idle().push(event);
        end
    }

    /// Runs calls that enqueue work, and waits for its end. Returns what the work uses, or leaves it to the GPU.
    fn run<U: Send + 'static>(
        self: &Arc<Self>,
        what: &str,
        used: U,
        f: impl FnOnce(&DriverCalls) -> std::result::Result<(), Failure>,
    ) -> Result<U> {
        let queued = self.context.call(what, f);
        match self.end(LONGEST) {
            End::Over => queued.map(|()| used),
            end => {
                if matches!(end, End::Unended(_)) {
                    self.outlasted(used);
                }
                Err(self.error(what, end, LONGEST))
            }
        }
    }

    /// Copies between GPU memory and a caller's, through our memory.
    ///
    /// # Safety
    /// As many bytes are allocated at `at`, until the call returns; after an error, until all work is known to have
    /// ended: see [`Reclaimer::has_unfinished_work`](super::reclaim::Reclaimer::has_unfinished_work).
    unsafe fn bounced(self: &Arc<Self>, what: &str, at: DevicePtr, mut bytes: HostBytes<'_>) -> Result<()> {
        let idle = || self.bounces.lock().unwrap_or_else(PoisonError::into_inner);
        let bounce = idle().pop().map_or_else(|| Bounce::new(&self.context), Ok)?;
        // SAFETY: the caller's promise.
        let copied = unsafe { self.chunks(what, &bounce, at, &mut bytes) };
        // If one failed, another may still be running.
        let end = if copied.is_ok() { End::Over } else { wait(LONGEST, COPIES, || self.progress()) };
        if matches!(end, End::Unended(_)) {
            self.outlasted(bounce);
            return Err(self.error(what, end, LONGEST));
        }
        let mut idle = idle();
        if idle.len() < IDLE {
            idle.push(bounce);
        }
        copied
    }

    /// # Safety
    /// As for [`Self::bounced`].
    unsafe fn chunks(
        &self,
        what: &str,
        bounce: &Bounce,
        at: DevicePtr,
        bytes: &mut HostBytes<'_>,
    ) -> Result<()> {
        let count = bytes.len().div_ceil(CHUNK);
        for chunk in 0..=count {
            if chunk < count {
                // SAFETY: the caller's promise.
                unsafe { self.start_chunk(what, bounce, at, bytes, chunk) }?;
            }
            if let Some(last) = chunk.checked_sub(1) {
                match wait(LONGEST, COPIES, || bounce.ends[last % 2].progress()) {
                    End::Over => {}
                    end => return Err(self.error(what, end, LONGEST)),
                }
                let range = bytes.chunk(last);
                if let HostBytes::Out(out) = bytes {
                    let out = &mut out[range];
                    // SAFETY: the half has that many bytes, and the GPU has written them: the copy has ended.
                    unsafe { bounce.half(last).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
                }
            }
        }
        Ok(())
    }

    /// Starts copying a chunk; the one before the last that used its half has ended.
    ///
    /// # Safety
    /// As for [`Self::bounced`].
    unsafe fn start_chunk(
        &self,
        what: &str,
        bounce: &Bounce,
        at: DevicePtr,
        bytes: &HostBytes<'_>,
        chunk: usize,
    ) -> Result<()> {
        let (range, half) = (bytes.chunk(chunk), bounce.half(chunk));
        let (at, length) = (at + range.start as u64, range.len());
        if let HostBytes::In(data) = bytes {
            // SAFETY: the half has room for that many bytes, and the GPU does not read it: its last copy has ended.
            unsafe { half.copy_from_nonoverlapping(data[range].as_ptr(), length) };
        }
        self.context.call(what, |driver| match bytes {
            // SAFETY: the half holds the bytes, and is left to the GPU if the copy does not end; the caller has checked that
            // there is room for them at `at`.
            HostBytes::In(_) => unsafe { driver.copy_in(at, half.cast(), length, self.raw) },
            // SAFETY: the half has room, and is left to the GPU if the copy does not end; the caller has checked the range.
            HostBytes::Out(_) => unsafe { driver.copy_out(half.cast(), at, length, self.raw) },
        })?;
        bounce.ends[chunk % 2].record(self)
    }

    /// Copies into GPU memory.
    ///
    /// # Safety
    /// As for [`Self::bounced`].
    pub(super) unsafe fn copy_in(self: &Arc<Self>, to: DevicePtr, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.bounced("copying into GPU memory", to, HostBytes::In(data)) }
    }

    /// Copies out of GPU memory.
    ///
    /// # Safety
    /// As for [`Self::bounced`].
    pub(super) unsafe fn copy_out(self: &Arc<Self>, from: DevicePtr, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.bounced("copying out of GPU memory", from, HostBytes::Out(out)) }
    }

    /// Copies out of GPU memory to host memory, all of it.
    ///
    /// # Safety
    /// As for [`Self::bounced`], and the host memory is writable.
    pub(super) unsafe fn copy_out_to(self: &Arc<Self>, from: DevicePtr, to: &HostMem) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        let (at, bytes) = (to.host_ptr(), to.len());
        let copied = self.run("copying out of GPU memory", to.clone(), |driver| {
            // SAFETY: the memory is mapped and shared, and is left to the GPU if the copy does not end.
            unsafe { driver.copy_out(at.cast(), from, bytes, self.raw) }
        });
        copied.map(|_| ())
    }

    /// The kernels for marks, loaded on first use. While a persistent kernel runs, the driver would wait for its end
    /// before loading any.
    pub(super) fn marker(&self) -> Result<Arc<Marker>> {
        let mut slot = self.marker.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(marker) = &*slot {
            return Ok(marker.clone());
        }
        Ok(slot.insert(Arc::new(Marker::load(&self.context)?)).clone())
    }

    /// Sets bytes of GPU memory.
    ///
    /// # Safety
    /// As for [`Self::bounced`].
    pub(super) unsafe fn fill(self: &Arc<Self>, at: DevicePtr, bytes: usize, value: u8) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.run("filling GPU memory", (), |driver| {
            // SAFETY: the caller has checked that the range is allocated.
            unsafe { driver.set_bytes(at, value, bytes, self.raw) }
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (context, stream) = (self.context.clone(), Raw(self.raw));
        self.context.driver.reclaimer.dispose(move || {
            // SAFETY: nobody else has the handle; work still in the stream completes, and the stream is then freed.
            let answer = context.attempt(|driver| unsafe { driver.stream_destroy(stream.get()) });
            context.freed(answer, "destroying a stream")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT_WAIT: Duration = Duration::from_millis(5);

    #[test]
    fn work_ends_well_or_with_its_context_or_not() {
        let answers = |list: &[WorkProgress]| {
            let mut list = list.iter().copied();
            wait(Duration::from_secs(20), COPIES, || list.next().expect("it was asked after the end"))
        };
        let failure = Failure::Code("cuStreamQuery", 999);
        assert_eq!(answers(&[WorkProgress::Pending, WorkProgress::Over]), End::Over);
        assert_eq!(answers(&[WorkProgress::Pending, WorkProgress::Lost(failure)]), End::Lost(failure));
        assert_eq!(answers(&[WorkProgress::Unknown(failure)]), End::Unended(Some(failure)));
        assert_eq!(wait(SHORT_WAIT, KERNELS, || WorkProgress::Pending), End::Unended(None));
    }
}
