//! Streams, and what waits for work in them.

use std::ops::Range;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use onehop_os::{HostMem, Marks};

use super::context::{Context, Event, Progress, Raw};
use super::driver::{Calls, DevicePtr, Failure};
use super::host::{self, Registration};
use super::marks::Marker;
use crate::{Error, Result};

/// The stream does not wait for the default stream, which other code in this process may use.
const NON_BLOCKING: u32 = 1;
/// A priority above that of all other streams; lower numbers come first.
const ABOVE_OTHERS: i32 = -1;
/// How long copies and fills may take: a thousand times what they do.
pub(super) const LONGEST: Duration = Duration::from_secs(60);
/// Bytes of callers that are copied at a time: small enough for a CPU's cache.
const PIECE: usize = 512 << 10;
/// How many bounce buffers a stream keeps.
const IDLE: usize = 4;

/// How often to ask about work.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// How long without a rest.
    pub(super) short: Duration,
    /// The longest rest. One takes an eighth of the time that was waited, at most.
    pub(super) nap: Duration,
}

/// Copies: small ones are over before a thread can be put to sleep and woken.
pub(super) const COPIES: Pace = Pace { short: Duration::from_micros(30), nap: Duration::from_micros(500) };
/// Kernels.
pub(super) const KERNELS: Pace = Pace { short: Duration::from_millis(1), nap: Duration::from_micros(50) };

/// What became of work that was waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It has ended well.
    Over,
    /// It has ended with the context.
    Lost(Failure),
    /// It takes too long, or the driver does not say whether it has ended.
    Unended(Option<Failure>),
}

/// Asks about work until it has ended, and at most so long.
pub(super) fn wait(limit: Duration, pace: Pace, mut progress: impl FnMut() -> Progress) -> End {
    let start = Instant::now();
    loop {
        match progress() {
            Progress::Over => return End::Over,
            Progress::Lost(failure) => return End::Lost(failure),
            Progress::Unknown(failure) => return End::Unended(Some(failure)),
            Progress::Pending => {}
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

/// Memory of ours between the GPU's and a caller's: while one half is copied by the GPU, the CPU copies the other.
struct Bounce {
    mem: HostMem,
    /// The ends of the copies of each half.
    ends: [Event; 2],
    /// Copies to and from it need none; they are faster with one.
    _registration: Option<Registration>,
}

impl Bounce {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let mem = HostMem::touched(2 * PIECE)?;
        let _registration = host::pin(context, &mem);
        Ok(Self { mem, ends: [Event::silent(context)?, Event::silent(context)?], _registration })
    }

    fn half(&self, piece: usize) -> *mut u8 {
        self.mem.host_ptr().wrapping_add(piece % 2 * PIECE)
    }
}

/// A caller's bytes, to be copied to GPU memory or from there.
enum Bytes<'a> {
    In(&'a [u8]),
    Out(&'a mut [u8]),
}

impl Bytes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::In(bytes) => bytes.len(),
            Self::Out(bytes) => bytes.len(),
        }
    }

    fn piece(&self, piece: usize) -> Range<usize> {
        piece * PIECE..((piece + 1) * PIECE).min(self.len())
    }
}

/// A queue of work on the GPU that waits for no other.
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    /// Bounce buffers for callers' bytes, which are borrowed and could not be left to a GPU that does not end.
    bounces: Mutex<Vec<Bounce>>,
    /// Events to be used again.
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
        Ok(Self {
            context: context.clone(),
            raw,
            bounces: Mutex::default(),
            idle: Mutex::default(),
            marker: Mutex::default(),
        })
    }

    /// A stream for a kernel that stays. Streams share a few channels of the GPU, in which the mark of a kernel's end holds
    /// up whatever comes after it; those of another priority have channels of their own.
    pub(super) fn apart(context: &Arc<Context>) -> Result<Self> {
        let mut raw = null_mut();
        context.call("making a stream for a kernel that stays", |driver| {
            // SAFETY: `raw` lives across the call, and the context is current in it; a priority is clamped.
            unsafe { driver.stream_create_apart(&mut raw, NON_BLOCKING, ABOVE_OTHERS) }
        })?;
        Ok(Self {
            context: context.clone(),
            raw,
            bounces: Mutex::default(),
            idle: Mutex::default(),
            marker: Mutex::default(),
        })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// How far the work in it is.
    pub(super) fn progress(&self) -> Progress {
        // SAFETY: the handle lives as long as self.
        Progress::of(self.context.attempt(|driver| unsafe { driver.stream_query(self.raw) }))
    }

    /// Leaves to the GPU what the work in it uses, until it has ended. Nothing is freed before that.
    pub(super) fn outlasted(self: &Arc<Self>, used: impl Send + 'static) {
        let stream = self.clone();
        self.context.driver.reclaimer.outlasted(move || {
            let _ = &used;
            matches!(stream.progress(), Progress::Over | Progress::Lost(_))
        });
    }

    /// The error of work that did not end well.
    pub(super) fn error(&self, what: &str, end: End, limit: Duration) -> Error {
        match end {
            End::Lost(failure) | End::Unended(Some(failure)) => self.context.driver.error(what, failure),
            End::Over | End::Unended(None) => Error::Unended { what: what.into(), seconds: limit.as_secs() },
        }
    }

    /// Waits for the end of what is in it now.
    fn end(&self) -> End {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let event = idle().pop().map_or_else(|| Event::silent(&self.context), Ok);
        let marked = event.and_then(|event| event.record(self).map(|()| event));
        let Ok(event) = marked else { return wait(LONGEST, COPIES, || self.progress()) };
        let end = wait(LONGEST, COPIES, || event.progress());
        idle().push(event);
        end
    }

    /// Runs calls that put work into it, and waits for the end of that. What the work uses comes back, or is left to the GPU.
    fn run<U: Send + 'static>(
        self: &Arc<Self>,
        what: &str,
        used: U,
        f: impl FnOnce(&Calls) -> std::result::Result<(), Failure>,
    ) -> Result<U> {
        let queued = self.context.call(what, f);
        match self.end() {
            End::Over => queued.map(|()| used),
            end => {
                if matches!(end, End::Unended(_)) {
                    self.outlasted(used);
                }
                Err(self.error(what, end, LONGEST))
            }
        }
    }

    /// Copies between GPU memory and a caller's, through memory of ours.
    ///
    /// # Safety
    /// As many bytes are allocated at `at`, until the call returns.
    unsafe fn bounced(self: &Arc<Self>, what: &str, at: DevicePtr, mut bytes: Bytes<'_>) -> Result<()> {
        let idle = || self.bounces.lock().unwrap_or_else(PoisonError::into_inner);
        let bounce = idle().pop().map_or_else(|| Bounce::new(&self.context), Ok)?;
        // SAFETY: the caller's promise.
        let copied = unsafe { self.pieces(what, &bounce, at, &mut bytes) };
        // Where one failed, another may still be under way.
        let end = if copied.is_ok() { End::Over } else { wait(LONGEST, COPIES, || self.progress()) };
        if matches!(end, End::Unended(_)) {
            self.outlasted(bounce);
            return copied;
        }
        let mut idle = idle();
        if idle.len() < IDLE {
            idle.push(bounce);
        }
        copied
    }

    /// # Safety
    /// As for [`Self::bounced`].
    unsafe fn pieces(&self, what: &str, bounce: &Bounce, at: DevicePtr, bytes: &mut Bytes<'_>) -> Result<()> {
        let count = bytes.len().div_ceil(PIECE);
        for piece in 0..=count {
            if piece < count {
                // SAFETY: the caller's promise.
                unsafe { self.start_piece(what, bounce, at, bytes, piece) }?;
            }
            if let Some(last) = piece.checked_sub(1) {
                match wait(LONGEST, COPIES, || bounce.ends[last % 2].progress()) {
                    End::Over => {}
                    end => return Err(self.error(what, end, LONGEST)),
                }
                let range = bytes.piece(last);
                if let Bytes::Out(out) = bytes {
                    let out = &mut out[range];
                    // SAFETY: the half has that many bytes, and the GPU has written them: the copy has ended.
                    unsafe { bounce.half(last).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
                }
            }
        }
        Ok(())
    }

    /// Begins to copy a piece; the one before the last that used its half has ended.
    ///
    /// # Safety
    /// As for [`Self::bounced`].
    unsafe fn start_piece(
        &self,
        what: &str,
        bounce: &Bounce,
        at: DevicePtr,
        bytes: &Bytes<'_>,
        piece: usize,
    ) -> Result<()> {
        let (range, half) = (bytes.piece(piece), bounce.half(piece));
        let (at, length) = (at + range.start as u64, range.len());
        if let Bytes::In(data) = bytes {
            // SAFETY: the half has room for that many bytes, and the GPU does not read it: its last copy has ended.
            unsafe { half.copy_from_nonoverlapping(data[range].as_ptr(), length) };
        }
        self.context.call(what, |driver| match bytes {
            // SAFETY: the half holds the bytes, and is left to the GPU if the copy does not end; the caller has checked that
            // there is room for them at `at`.
            Bytes::In(_) => unsafe { driver.copy_in(at, half.cast(), length, self.raw) },
            // SAFETY: the half has room, and is left to the GPU if the copy does not end; the caller has checked the range.
            Bytes::Out(_) => unsafe { driver.copy_out(half.cast(), at, length, self.raw) },
        })?;
        bounce.ends[piece % 2].record(self)
    }

    /// Copies into GPU memory.
    ///
    /// # Safety
    /// As many bytes are allocated at `to`, until the call returns.
    pub(super) unsafe fn copy_in(self: &Arc<Self>, to: DevicePtr, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.bounced("copying into GPU memory", to, Bytes::In(data)) }
    }

    /// Copies out of GPU memory.
    ///
    /// # Safety
    /// As many bytes are allocated at `from`, until the call returns.
    pub(super) unsafe fn copy_out(self: &Arc<Self>, from: DevicePtr, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.bounced("copying out of GPU memory", from, Bytes::Out(out)) }
    }

    /// Copies out of GPU memory to host memory, all of it.
    ///
    /// # Safety
    /// As many bytes are allocated at `from`, until the call returns, and the host memory is writable.
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

    /// Loads the kernels for marks: while a kernel runs that stays, the driver would wait for its end before it loads any.
    pub(super) fn load_marker(&self) -> Result<()> {
        self.marker(&mut self.marker.lock().unwrap_or_else(PoisonError::into_inner)).map(|_| ())
    }

    fn marker(&self, slot: &mut Option<Arc<Marker>>) -> Result<Arc<Marker>> {
        if let Some(marker) = slot {
            return Ok(marker.clone());
        }
        Ok(slot.insert(Arc::new(Marker::load(&self.context)?)).clone())
    }

    /// Runs a kernel for marks that stand side by side, and `after` when it has ended. One at a time: they share a counter. What
    /// the kernel uses is left to the GPU if it does not end.
    fn by_marker<R, T>(
        self: &Arc<Self>,
        what: &str,
        begin: impl FnOnce(&Marker) -> Result<R>,
        after: impl FnOnce(R) -> Result<T>,
    ) -> Result<T> {
        let mut slot = self.marker.lock().unwrap_or_else(PoisonError::into_inner);
        let marker = self.marker(&mut slot)?;
        let begun = begin(&marker);
        match self.end() {
            End::Over => begun.and_then(after),
            end => {
                if matches!(end, End::Unended(_)) {
                    self.outlasted(marker);
                }
                Err(self.error(what, end, LONGEST))
            }
        }
    }

    /// Puts a word in several places of GPU memory.
    ///
    /// # Safety
    /// All of them are allocated, until the call returns.
    pub(super) unsafe fn mark(self: &Arc<Self>, memory: DevicePtr, marks: &Marks) -> Result<()> {
        if Marker::takes(memory, marks) {
            // SAFETY: the caller's promise. `by_marker` waits for the end. A kernel that does not end keeps the marker, and nothing of this
            // process is freed until it has.
            let begin = |marker: &Marker| unsafe { marker.mark(self, memory, marks) };
            return self.by_marker("marking GPU memory", begin, Ok);
        }
        let (at, pitch, height) = (memory + marks.first, marks.step as usize, marks.count as usize);
        self.run("marking GPU memory", (), |driver| {
            [(0, marks.word as u32), (4, (marks.word >> 32) as u32)].into_iter().try_for_each(
                |(half, value)| {
                    // SAFETY: the caller has checked that every place is allocated.
                    unsafe { driver.set_column(at + half, pitch, value, 1, height, self.raw) }
                },
            )
        })
    }

    /// How many of the places still hold the word.
    ///
    /// # Safety
    /// As for [`Self::mark`].
    pub(super) unsafe fn marks_left(self: &Arc<Self>, memory: DevicePtr, marks: &Marks) -> Result<u64> {
        if Marker::takes(memory, marks) {
            // SAFETY: as for `mark`.
            let begin = |marker: &Marker| unsafe { marker.count(self, memory, marks) };
            return self.by_marker("counting marks in GPU memory", begin, |counter| {
                let mut left = [0; 4];
                // SAFETY: the counter has four bytes and lives as long as the marker.
                unsafe { self.copy_out(counter, &mut left) }?;
                Ok(u32::from_le_bytes(left).into())
            });
        }
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
        let words = self.run("looking at marks in GPU memory", words, |driver| {
            // SAFETY: there is a word for each place, and they are left to the GPU if the copy does not end; the caller has
            // checked that every place is allocated.
            unsafe { driver.copy_column(&copy, self.raw) }
        })?;
        Ok(words.iter().filter(|word| **word == marks.word).count() as u64)
    }

    /// Sets bytes of GPU memory.
    ///
    /// # Safety
    /// The range is allocated, until the call returns.
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
            // SAFETY: nobody else has the handle; work that is still in the stream goes on, and is then given up.
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
        let answers = |list: &[Progress]| {
            let mut list = list.iter().copied();
            wait(Duration::from_secs(20), COPIES, || list.next().expect("it was asked after the end"))
        };
        let failure = Failure::Code("cuStreamQuery", 999);
        assert_eq!(answers(&[Progress::Pending, Progress::Over]), End::Over);
        assert_eq!(answers(&[Progress::Pending, Progress::Lost(failure)]), End::Lost(failure));
        assert_eq!(answers(&[Progress::Unknown(failure)]), End::Unended(Some(failure)));
        assert_eq!(wait(SHORT_WAIT, KERNELS, || Progress::Pending), End::Unended(None));
    }
}
