//! A GPU's primary context, and the events in it.

use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;
use onehop_proto::GpuAddr;

use super::driver::{Driver, DriverCalls, Failure, Meaning, NOT_READY, Relaxed};
use super::live::{MemoryHold, Touched};
use super::memory::DeviceMemory;
use super::reclaim::Freed;
use super::stream::Stream;
use crate::region::{AddressSpace, ContextKey};
use crate::{Error, Region, Result};

/// CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
const ALREADY_ENABLED: i32 = 704;

/// The primary context of one GPU: the one that all other libraries in this process use.
pub(super) struct Context {
    pub(super) driver: Arc<Driver>,
    pub(super) device: i32,
    raw: sys::CUcontext,
    /// Set for a context that the program created, and may destroy. Others are retained here.
    of_program: Option<ProgramContext>,
    /// Contexts of other devices whose memory kernels of this one reach.
    peers: Mutex<Vec<ContextKey>>,
}

// SAFETY: a CUcontext is a handle that any thread may make current; the driver locks what is in it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(driver: &Arc<Driver>, device: i32) -> Result<Arc<Self>> {
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call, and `device` came from cuDeviceGet.
        let retained = driver.relaxed().and_then(|calls| unsafe { calls.context_retain(&mut raw, device) });
        retained.map_err(|failure| driver.error(format!("opening GPU {device}"), failure))?;
        Ok(Arc::new(Self { driver: driver.clone(), device, raw, of_program: None, peers: Mutex::default() }))
    }

    /// A context that the program created. Once the program has destroyed it, calls in it fail.
    ///
    /// # Safety
    /// The program has not destroyed it yet.
    pub(super) unsafe fn of_program(
        driver: &Arc<Driver>,
        device: i32,
        raw: sys::CUcontext,
    ) -> Result<Arc<Self>> {
        let error = |failure| driver.error("using a context of the program's", failure);
        let calls = driver.relaxed().map_err(error)?;
        // SAFETY: the caller's promise.
        let of_program = Some(unsafe { ProgramContext::new(&calls, raw) }.map_err(error)?);
        Ok(Arc::new(Self { driver: driver.clone(), device, raw, of_program, peers: Mutex::default() }))
    }

    /// Whether the program has destroyed it, and everything in it.
    pub(super) fn is_destroyed(&self) -> bool {
        let seen = || self.driver.relaxed().and_then(|calls| self.check_there(&calls));
        self.of_program.is_some() && seen() == Err(Failure::Destroyed)
    }

    /// Fails once the program has destroyed it.
    fn check_there(&self, calls: &DriverCalls) -> std::result::Result<(), Failure> {
        self.of_program.as_ref().map_or(Ok(()), |context| context.check(calls, self.raw))
    }

    /// Its identity.
    pub(super) fn key(&self) -> ContextKey {
        ContextKey { device: self.device, made: self.of_program.as_ref().map(|context| context.id) }
    }

    /// Whether it is the one of this handle.
    pub(super) fn is(&self, raw: sys::CUcontext) -> bool {
        self.raw == raw
    }

    /// Lets kernels of this context reach all of another GPU's plain allocations, present and future.
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
        // SAFETY: `other` is retained, or is the program's, which had not destroyed it just now (see `attempt`). No flags are defined.
        let enable = |driver: &DriverCalls| unsafe { driver.peer_enable(other.raw, 0) };
        match self.attempt(|driver| other.check_there(driver).and_then(|()| enable(driver))) {
            Err(failure) if failure.code() != Some(ALREADY_ENABLED) => Err(self.driver.error(what, failure)),
            _ => {
                self.peers.lock().unwrap_or_else(PoisonError::into_inner).push(other.key());
                Ok(())
            }
        }
    }

    /// Whether its kernels reach memory of such addresses.
    pub(super) fn reaches(&self, space: AddressSpace) -> bool {
        match space {
            AddressSpace::Model | AddressSpace::Everything(_) => false,
            AddressSpace::Cuda => true,
            AddressSpace::Context(key) | AddressSpace::Alone(key) if key == self.key() => true,
            // Peer access does not cover mapped memory: a kernel that tried would lose its context.
            AddressSpace::Alone(_) => false,
            AddressSpace::Context(key) => {
                self.peers.lock().unwrap_or_else(PoisonError::into_inner).contains(&key)
            }
        }
    }

    /// Refuses memory that its kernels do not reach: one that tried would destroy the context and everything in it.
    pub(super) fn check(&self, what: &str, memory: &Region) -> Result<()> {
        if self.reaches(memory.space()) {
            return Ok(());
        }
        let why = "the memory is of another GPU or another context, of no one allocation, or emulated".into();
        Err(Error::NotSupported { what: what.into(), why })
    }

    /// Refuses memory that its copies do not reach.
    pub(super) fn check_copied(&self, what: &str, memory: &Region) -> Result<()> {
        match memory.space() {
            AddressSpace::Everything(key) if key == self.key() => Ok(()),
            _ => self.check(what, memory),
        }
    }

    /// Refuses memory of other contexts: a statement about it would concern another GPU's memory.
    pub(super) fn check_own(&self, what: &str, memory: &Region) -> Result<()> {
        let key = self.key();
        if [AddressSpace::Context(key), AddressSpace::Alone(key)].contains(&memory.space()) {
            return Ok(());
        }
        let why = "the memory is host memory, of another GPU or another context, or emulated".into();
        Err(Error::NotSupported { what: what.into(), why })
    }

    /// Memory of its own or registered memory, whose addresses kernels may get.
    pub(super) fn region(&self, at: GpuAddr, memory: DeviceMemory) -> Region {
        let key = self.key();
        let space = if memory.is_plain() { AddressSpace::Context(key) } else { AddressSpace::Alone(key) };
        let (bytes, memory) = (memory.bytes, Arc::new(memory));
        self.driver.live.add(at, bytes, space, &(memory.clone() as MemoryHold));
        Region::on_device(at, bytes, memory).in_space(space)
    }

    /// Memory of its own whose addresses callers may not give to kernels.
    pub(super) fn unlisted(&self, at: GpuAddr, memory: DeviceMemory) -> Region {
        Region::on_device(at, memory.bytes, Arc::new(memory)).in_space(AddressSpace::Context(self.key()))
    }

    /// Holds the memory that a kernel accesses.
    pub(super) fn hold(&self, touched: &[Touched]) -> Result<Vec<MemoryHold>> {
        let hold = |one: &Touched| {
            self.driver.live.hold(one, |space| self.reaches(space)).ok_or_else(|| {
                let Touched { what, at, bytes } = one;
                Error::Launch(format!("{what}, {bytes} bytes at {at}, is not memory that this GPU reaches"))
            })
        };
        touched.iter().map(hold).collect()
    }

    /// Runs a call in this context; its error says what was being done.
    pub(super) fn call<R>(
        &self,
        what: &str,
        f: impl FnOnce(&DriverCalls) -> std::result::Result<R, Failure>,
    ) -> Result<R> {
        self.attempt(f).map_err(|failure| self.driver.error(what, failure))
    }

    /// The same, with the failure unchanged.
    pub(super) fn attempt<R>(
        &self,
        f: impl FnOnce(&DriverCalls) -> std::result::Result<R, Failure>,
    ) -> std::result::Result<R, Failure> {
        let calls = self.driver.relaxed()?;
        self.check_there(&calls)?;
        // SAFETY: the context is retained as long as `self` lives; or it is the program's, which had not destroyed it just now. A
        // program may destroy no context during a call that uses it; docs/cufile.md says until when work of ours does.
        unsafe { calls.context_push(self.raw) }?;
        let _entered = Entered(&calls);
        f(&calls)
    }

    /// The result of a call that frees something.
    pub(super) fn freed(&self, answer: std::result::Result<(), Failure>, what: &str) -> Freed {
        self.driver.freed(answer, what)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.of_program.is_some() {
            return;
        }
        // With the last reference the driver waits for all work of the GPU.
        let (driver, device) = (self.driver.clone(), self.device);
        self.driver.reclaimer.enqueue(move || {
            // SAFETY: it was retained once by `open`, and nothing created in it is left: everything holds an Arc of the
            // context, which is gone.
            let answer = driver.relaxed().and_then(|calls| unsafe { calls.context_release(device) });
            driver.freed(answer, "releasing a GPU's context")
        });
    }
}

/// Identifies a context of the program. The driver reuses the handle of a destroyed one for another, and does not
/// notice a destroyed one until it is used: then it fails or crashes.
struct ProgramContext {
    /// Unlike the handle, it is never reused in this process.
    id: u64,
}

impl ProgramContext {
    /// # Safety
    /// The context exists.
    unsafe fn new(calls: &DriverCalls, raw: sys::CUcontext) -> std::result::Result<Self, Failure> {
        let mut id = 0;
        // SAFETY: `id` lives across the call, and the context exists.
        unsafe { calls.context_id(raw, &mut id) }.map(|()| Self { id })
    }

    /// Whether the handle still belongs to this context.
    fn check(&self, calls: &DriverCalls, raw: sys::CUcontext) -> std::result::Result<(), Failure> {
        /// CUDA_ERROR_INVALID_VALUE, _INVALID_CONTEXT, _INVALID_HANDLE and _CONTEXT_IS_DESTROYED.
        const NONE: [i32; 4] = [1, 201, 400, 709];
        let mut now = 0;
        // SAFETY: `now` lives across the call. Of all functions that take a context this one answers with an error for the handle
        // of one that was destroyed, as tests/cuda/contexts.rs shows.
        match unsafe { calls.context_id(raw, &mut now) } {
            Ok(()) if now == self.id => Ok(()),
            Ok(()) => Err(Failure::Destroyed),
            Err(Failure::Code(_, code)) if NONE.contains(&code) => Err(Failure::Destroyed),
            Err(failure) => Err(failure),
        }
    }
}

/// Makes a context current on this thread while it lives.
struct Entered<'a>(&'a Relaxed<'a>);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call; this thread pushed the context that is popped.
        let _ = unsafe { self.0.context_pop(&mut raw) };
    }
}

/// Progress of work on the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WorkProgress {
    /// It has succeeded.
    Over,
    /// It is still running, as far as is known.
    Pending,
    /// It has ended with the context.
    Lost(Failure),
    /// The driver does not report it.
    Unknown(Failure),
}

impl WorkProgress {
    pub(super) fn of(answer: std::result::Result<(), Failure>) -> Self {
        match answer {
            Ok(()) => Self::Over,
            Err(failure) if failure.code() == Some(NOT_READY) => Self::Pending,
            Err(failure) => match failure.meaning() {
                Meaning::Capture => Self::Pending,
                Meaning::Lost => Self::Lost(failure),
                Meaning::Other => Self::Unknown(failure),
            },
        }
    }
}

/// A driver handle that is about to be released.
pub(super) struct Raw<T>(pub(super) *mut T);

// SAFETY: any thread may release a driver handle; nobody dereferences it.
unsafe impl<T> Send for Raw<T> {}

impl<T> Raw<T> {
    /// The handle. A method, so that closures capture the wrapper and not the handle.
    pub(super) fn get(&self) -> *mut T {
        self.0
    }
}

/// A point in a stream.
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

    /// An event without timing or interrupt: the copy engine makes no pause for it.
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
            driver.event_record(self.raw, stream.raw())
        })
    }

    /// Progress of the work before it.
    pub(super) fn progress(&self) -> WorkProgress {
        // SAFETY: the handle lives as long as self.
        WorkProgress::of(self.context.attempt(|driver| unsafe { driver.event_query(self.raw) }))
    }

    /// The time from an earlier event of the same stream to this one, by the GPU's clock; both have occurred.
    pub(super) fn since(&self, earlier: &Self) -> Result<Duration> {
        let mut ms = 0.0;
        // SAFETY: `ms` lives across the call, and both handles live.
        self.context.call("asking how long a kernel took", |driver| unsafe {
            driver.event_elapsed(&mut ms, earlier.raw, self.raw)
        })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let (context, event) = (self.context.clone(), Raw(self.raw));
        self.context.driver.reclaimer.dispose(move || {
            // SAFETY: nobody else has the handle; the driver allows it before the event has occurred.
            let answer = context.attempt(|driver| unsafe { driver.event_destroy(event.get()) });
            context.freed(answer, "destroying an event")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_elsewhere_does_not_end_work() {
        let progress = |code| WorkProgress::of(Err(Failure::Code("cuEventQuery", code)));
        assert_eq!(WorkProgress::of(Ok(())), WorkProgress::Over);
        for code in [NOT_READY, 900, 901, 906, 907] {
            assert_eq!(progress(code), WorkProgress::Pending, "{code}");
        }
        for code in [700, 719] {
            assert!(matches!(progress(code), WorkProgress::Lost(_)), "{code}");
        }
        for code in [1, 4, 999] {
            assert!(matches!(progress(code), WorkProgress::Unknown(_)), "{code}");
        }
    }
}
