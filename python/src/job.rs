//! `onehop._native.Job`: a running load. It has its own thread, so that Python continues and handles Ctrl-C at once,
//! even if the disk or GPU hangs.

mod placed;
mod task;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use onehop_gpu::cuda::CudaGpu;
use onehop_load::engine::{self, Stopper};
use onehop_load::group::Group;
use onehop_load::model::Tensor as Entry;
use onehop_load::{Model, Part, Selection};
use onehop_transfer::Progress;
use pyo3::prelude::*;

use crate::borrowed::BorrowedMemory;
use crate::device::DeviceSpec;
use crate::drive::OpenDrive;
use crate::error::{Error, Result};
use crate::model::Dim;
use crate::outcome::Outcome;
use crate::pool::Pool;
use crate::tensor::Tensor;
use crate::views::TensorSeries;
use task::LoadTask;

/// How often Python is polled for Ctrl-C.
pub(crate) const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long to wait for a cancelled load, after which its memory is usually free.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// Poll interval for the memory of a bounded stream while Python waits.
const POOL_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What to load, and how.
pub(crate) struct LoadRequest {
    pub model: Arc<Model>,
    pub device: DeviceSpec,
    pub wanted: LoadScope,
    pub origin: LoadOrigin,
    pub memory: TensorMemory,
    pub verify: bool,
    pub manifest: Option<PathBuf>,
    pub measure_limit: bool,
    /// The processes that load together, and what must be the same for all: the cuts.
    pub group: Option<(Group, Vec<String>)>,
}

/// The memory of tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TensorMemory {
    /// Our own arena. Each tensor is handed out as it arrives.
    Own,
    /// An arena that Python allocates, if it is a GPU's. No tensor is handed out: Python makes views of the arena.
    Arena,
    /// This many bytes, reused as tensors are freed; Python's on a GPU.
    Bounded(u64),
}

/// The source of the bytes, and its options.
pub(crate) enum LoadOrigin {
    /// Local files.
    Files(engine::Options),
    /// A drive that onehop drives itself.
    Drive(Arc<OpenDrive>, onehop_transfer::RouteOptions),
}

/// Which tensors.
pub(crate) enum LoadScope {
    Selection(Selection),
    /// A part of one tensor, and its view.
    Part {
        tensor: Entry,
        part: Part,
        view: PartView,
    },
}

/// The elements of a part that are exported.
pub(crate) struct PartView {
    pub dims: Vec<Dim>,
}

enum LoadEvent {
    Tensor(Box<Tensor>),
    /// The arena, if it is the CPU's. Otherwise `Wanted` bytes, which Python has to bring.
    Arena(Box<Tensor>),
    Wanted(usize),
    Done(Result<Box<Outcome>>),
}

#[derive(Default)]
struct JobShared {
    stop: AtomicBool,
    /// Ends the engine, once there is one.
    stopper: Mutex<Option<Stopper>>,
    bytes: AtomicU64,
    total: AtomicU64,
    /// The layout of an arena that Python makes views of, until it has them.
    layout: Mutex<Option<Vec<TensorSeries>>>,
    /// The memory of a bounded stream, and its GPU if it has one.
    pool: OnceLock<(Arc<Pool>, Option<CudaGpu>)>,
}

impl JobShared {
    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        if let Some(stopper) = &*self.stopper.lock().unwrap_or_else(PoisonError::into_inner) {
            stopper.stop();
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A drive's load counts whole blocks, which may be more or fewer bytes than the tensors.
impl Progress for JobShared {
    fn moved(&self, bytes: u64) {
        let most = self.total.load(Ordering::Acquire);
        let add = |now: u64| Some(now.saturating_add(bytes).min(most));
        let _ = self.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
    }

    fn is_cancelled(&self) -> bool {
        self.is_stopped()
    }
}

/// A running load. Dropping it ends it.
#[pyclass(frozen, module = "onehop")]
pub(crate) struct Job {
    /// None once dropped in a forked child.
    events: Mutex<Option<Receiver<LoadEvent>>>,
    bring: Mutex<Option<Sender<BorrowedMemory>>>,
    process: u32,
    shared: Arc<JobShared>,
    /// Whether nothing more will come: the end was received.
    over: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
}

impl Job {
    pub(crate) fn start(request: LoadRequest) -> Result<Self> {
        let ((sender, events), (bring, brought)) = (channel(), channel());
        let shared = Arc::<JobShared>::default();
        let (start, has_met) = (Instant::now(), AtomicBool::new(false));
        let work = LoadTask { request, shared: shared.clone(), sender, brought, start, has_met };
        let thread = std::thread::Builder::new().name("onehop load".into());
        thread.spawn(move || work.run()).map_err(Error::Thread)?;
        Ok(Self {
            events: Mutex::new(Some(events)),
            bring: Mutex::new(Some(bring)),
            process: std::process::id(),
            shared,
            over: AtomicBool::new(false),
            outcome: Mutex::default(),
        })
    }

    /// Whether this is a child of the process that began the load. It lacks the loading thread, and what other threads
    /// had locked at the fork stays locked.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// The next event. The end is marked before another thread can check.
    fn receive(&self, limit: Duration) -> std::result::Result<LoadEvent, RecvTimeoutError> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let event = events.as_ref().ok_or(RecvTimeoutError::Disconnected)?.recv_timeout(limit);
        if matches!(event, Ok(LoadEvent::Done(_))) {
            self.over.store(true, Ordering::Release);
        }
        event
    }

    /// The next event; none at the end, or after the limit.
    fn wait(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<Waited> {
        let begun = Instant::now();
        let poll = if self.shared.pool.get().is_some() { POOL_POLL_INTERVAL } else { SIGNAL_POLL_INTERVAL };
        if self.is_forked() {
            let why = "this load was started before a fork and belongs to the parent: start one in the child";
            return Err(Error::Request(why.into()).into());
        }
        loop {
            py.check_signals().inspect_err(|_| self.cancel(py))?;
            if self.shared.is_stopped() {
                return Err(Error::from(onehop_load::Error::Cancelled).into());
            }
            if self.over.load(Ordering::Acquire) {
                return Ok(Waited::Over);
            }
            let stuck = self.is_stuck();
            match py.detach(|| self.receive(poll.min(limit.unwrap_or(poll)))) {
                Ok(event) => return Ok(Waited::Event(event)),
                // Anything handed out before that check would have arrived.
                Err(RecvTimeoutError::Timeout) if stuck.is_some() && self.is_stuck() == stuck => {
                    if let Some(bytes) = self.grow(stuck.unwrap_or_default())? {
                        return Ok(Waited::Event(LoadEvent::Wanted(bytes)));
                    }
                }
                Err(RecvTimeoutError::Timeout) if limit.is_some_and(|limit| begun.elapsed() >= limit) => {
                    return Ok(Waited::Nothing);
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Another Python thread may have received the end.
                Err(RecvTimeoutError::Disconnected) if self.over.load(Ordering::Acquire) => {
                    return Ok(Waited::Over);
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Lost.into()),
            }
        }
    }
}

/// The result of a wait.
enum Waited {
    Event(LoadEvent),
    Over,
    Nothing,
}

/// The same for Python.
#[derive(IntoPyObject)]
pub(crate) enum JobStep {
    Tensor(Py<Tensor>),
    Wanted(usize),
    Nothing(bool),
    Over(Option<bool>),
}

impl Job {
    /// The memory of a bounded stream; none in a forked child, as another thread may have held its lock at the fork.
    fn pool(&self) -> Option<&Pool> {
        self.shared.pool.get().filter(|_| !self.is_forked()).map(|(pool, _)| &**pool)
    }

    fn is_stuck(&self) -> Option<usize> {
        self.shared.pool.get().and_then(|(pool, _)| pool.is_stuck())
    }

    /// Gives a stuck stream more memory; returns the bytes that Python has to bring for that.
    fn grow(&self, bytes: usize) -> Result<Option<usize>> {
        let Some((pool, _)) = self.shared.pool.get() else { return Ok(None) };
        Ok(if pool.grow(bytes)? { None } else { Some(bytes) })
    }
}

#[pymethods]
impl Job {
    /// The next tensor whose bytes have all arrived; None at the end; a number of bytes to call `bring` with; or False
    /// if none of these came within `limit` seconds.
    #[pyo3(signature = (limit=None))]
    fn next(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<JobStep> {
        let limit = limit.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default());
        Ok(match self.wait(py, limit)? {
            Waited::Over => JobStep::Over(None),
            Waited::Nothing => JobStep::Nothing(false),
            Waited::Event(LoadEvent::Tensor(tensor) | LoadEvent::Arena(tensor)) => {
                JobStep::Tensor(Py::new(py, *tensor)?)
            }
            Waited::Event(LoadEvent::Wanted(bytes)) => JobStep::Wanted(bytes),
            Waited::Event(LoadEvent::Done(outcome)) => {
                *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(*outcome?);
                JobStep::Over(None)
            }
        })
    }

    /// Gives the load GPU memory: `bytes` bytes at `at`, in the tensor `owner`, which keeps them allocated. Nothing
    /// else uses them.
    fn bring(&self, py: Python<'_>, at: u64, bytes: usize, owner: &Bound<'_, PyAny>) -> PyResult<()> {
        let brought = BorrowedMemory::of_tensor(at, bytes, owner)?;
        if let Some((pool, Some(gpu))) = self.shared.pool.get() {
            // The driver may wait for calls of other threads, which may wait for the interpreter.
            let region = py.detach(|| brought.into_region(gpu))?;
            pool.add(region);
            return Ok(());
        }
        let bring = self.bring.lock().unwrap_or_else(PoisonError::into_inner);
        // If the load is over, next() reports why.
        bring.as_ref().map(|bring| bring.send(brought));
        Ok(())
    }

    /// The layout of tensors in the arena. Call it once, after the arena exists.
    fn layout(&self) -> Result<Vec<TensorSeries>> {
        let layout = self.shared.layout.lock().unwrap_or_else(PoisonError::into_inner).take();
        layout.ok_or(Error::Lost)
    }

    /// The number of the fence after which memory of freed tensors is reused; None if there is none.
    fn dead(&self) -> Option<u64> {
        self.pool()?.dead()
    }

    /// The GPU has passed that fence.
    fn fenced(&self, fence: u64) {
        if let Some(pool) = self.pool() {
            pool.fenced(fence);
        }
    }

    /// Bytes by which the memory of a bounded stream has grown.
    #[getter]
    fn grown(&self) -> usize {
        self.pool().map_or(0, Pool::grown)
    }

    /// The load's outcome, once it is over.
    #[getter]
    fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes of tensors that have arrived so far, and their total.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        (self.shared.bytes.load(Ordering::Acquire), self.shared.total.load(Ordering::Acquire))
    }

    /// Ends the load as soon as pending operations allow, and waits up to a second. Operations that the disk or GPU
    /// never ends are left.
    fn cancel(&self, py: Python<'_>) {
        if self.over.load(Ordering::Acquire) || self.is_forked() {
            return;
        }
        self.shared.stop();
        py.detach(|| {
            let start = Instant::now();
            while start.elapsed() < CANCEL_TIMEOUT
                && !matches!(self.receive(SIGNAL_POLL_INTERVAL), Err(RecvTimeoutError::Disconnected))
            {
            }
        });
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.is_forked() {
            // Dropping it might wait for a thread that was sending at the fork.
            std::mem::forget(self.events.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            std::mem::forget(self.bring.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            return;
        }
        self.shared.stop();
    }
}
