//! `onehop._native.Job`: a load under way. A thread of its own does it, so that Python goes on, and Ctrl-C is answered at
//! once, whatever the disk or the GPU do.

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

use crate::device::DeviceSpec;
use crate::drive::OpenDrive;
use crate::error::{Error, Result};
use crate::lent::Brought;
use crate::model::Dim;
use crate::outcome::Outcome;
use crate::pool::Pool;
use crate::tensor::Tensor;
use crate::views::TensorSeries;
use task::LoadTask;

/// How long Python is not asked whether somebody pressed Ctrl-C.
pub(crate) const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long a load that is cancelled is waited for: its memory is given back then, in all likelihood.
const END: Duration = Duration::from_secs(1);

/// Poll interval for the memory of a bounded stream while Python waits.
const POOL_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What is to be loaded, and how.
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

/// What the tensors lie in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TensorMemory {
    /// An arena of ours. Each tensor is handed out as it arrives.
    Own,
    /// An arena that Python allocates, if it is a GPU's. No tensor is handed out: Python makes views of the arena.
    Arena,
    /// So many bytes, used again as tensors die; on a GPU they are Python's.
    Bounded(u64),
}

/// Where the bytes come from, and how.
pub(crate) enum LoadOrigin {
    /// Files of this machine.
    Files(engine::Options),
    /// A drive that onehop drives by itself.
    Drive(Arc<OpenDrive>, onehop_transfer::RouteOptions),
}

/// What of the model.
pub(crate) enum LoadScope {
    Selection(Selection),
    /// A part of one tensor, and how it is looked at.
    Part {
        tensor: Entry,
        part: Part,
        view: PartView,
    },
}

/// The elements of a part that are given away.
pub(crate) struct PartView {
    pub dims: Vec<Dim>,
}

enum LoadEvent {
    Tensor(Box<Tensor>),
    /// The arena, if it is the CPU's; in its place so many bytes that Python has to bring.
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
    /// The memory of a stream that is bounded, and the GPU if it is one's.
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

/// A drive's load counts whole blocks, of which there may be more than bytes of tensors, or fewer.
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

/// A load under way. Dropping it ends it.
#[pyclass(frozen, module = "onehop")]
pub(crate) struct Job {
    /// None once it was dropped in a forked child.
    events: Mutex<Option<Receiver<LoadEvent>>>,
    bring: Mutex<Option<Sender<Brought>>>,
    process: u32,
    shared: Arc<JobShared>,
    /// Whether there is nothing more to come: it was said how the load ended.
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

    /// Whether this is a child of the process that began the load. The thread that loads is not there, and whatever it or
    /// another thread had locked when the process forked stays locked.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// What comes next. Whoever takes the end says so before another can look.
    fn receive(&self, limit: Duration) -> std::result::Result<LoadEvent, RecvTimeoutError> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let event = events.as_ref().ok_or(RecvTimeoutError::Disconnected)?.recv_timeout(limit);
        if matches!(event, Ok(LoadEvent::Done(_))) {
            self.over.store(true, Ordering::Release);
        }
        event
    }

    /// The next event; none at the end, or when the time is over.
    fn wait(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<Waited> {
        let begun = Instant::now();
        let poll = if self.shared.pool.get().is_some() { POOL_POLL_INTERVAL } else { SIGNAL_POLL_INTERVAL };
        if self.is_forked() {
            let why =
                "this load was begun before a fork, by the parent, which goes on with it: load in the child";
            return Err(Error::Asked(why.into()).into());
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
                // Whatever had been handed out when it was asked would have come.
                Err(RecvTimeoutError::Timeout) if stuck.is_some() && self.is_stuck() == stuck => {
                    if let Some(bytes) = self.grow(stuck.unwrap_or_default())? {
                        return Ok(Waited::Event(LoadEvent::Wanted(bytes)));
                    }
                }
                Err(RecvTimeoutError::Timeout) if limit.is_some_and(|limit| begun.elapsed() >= limit) => {
                    return Ok(Waited::Nothing);
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Another thread of Python may have been told of the end.
                Err(RecvTimeoutError::Disconnected) if self.over.load(Ordering::Acquire) => {
                    return Ok(Waited::Over);
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Lost.into()),
            }
        }
    }
}

/// What came of waiting.
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
    /// The memory of a bounded stream; none in a forked child, where another thread may have had it locked at the fork.
    fn pool(&self) -> Option<&Pool> {
        self.shared.pool.get().filter(|_| !self.is_forked()).map(|(pool, _)| &**pool)
    }

    fn is_stuck(&self) -> Option<usize> {
        self.shared.pool.get().and_then(|(pool, _)| pool.is_stuck())
    }

    /// Lets a stream that is stuck have more memory; gives the bytes that Python has to bring for that.
    fn grow(&self, bytes: usize) -> Result<Option<usize>> {
        let Some((pool, _)) = self.shared.pool.get() else { return Ok(None) };
        Ok(if pool.grow(bytes)? { None } else { Some(bytes) })
    }
}

#[pymethods]
impl Job {
    /// The next tensor whose bytes are all there; None when there are no more; a number of bytes that `bring` has to be
    /// called with; and False when none of these came in so many seconds.
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

    /// Gives the load GPU memory: `bytes` bytes at `at`, those of the tensor `owner`, which keeps them allocated. Nothing else uses
    /// them.
    fn bring(&self, py: Python<'_>, at: u64, bytes: usize, owner: &Bound<'_, PyAny>) -> PyResult<()> {
        let brought = Brought::of_tensor(at, bytes, owner)?;
        if let Some((pool, Some(gpu))) = self.shared.pool.get() {
            // The driver may have its calls wait for those of other threads, which may wait for the interpreter.
            let region = py.detach(|| brought.into_region(gpu))?;
            pool.add(region);
            return Ok(());
        }
        let bring = self.bring.lock().unwrap_or_else(PoisonError::into_inner);
        // Where the load is over, what next() says tells why.
        bring.as_ref().map(|bring| bring.send(brought));
        Ok(())
    }

    /// How the tensors of an arena lie in it. To be asked once the arena is there.
    fn layout(&self) -> Result<Vec<TensorSeries>> {
        let layout = self.shared.layout.lock().unwrap_or_else(PoisonError::into_inner).take();
        layout.ok_or(Error::Lost)
    }

    /// Of memory whose tensors have died, a name for the fence behind which it is used again; None where there is none.
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

    /// How the load went, once it is over.
    #[getter]
    fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes of tensors that have arrived so far, and all that are to come.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        (self.shared.bytes.load(Ordering::Acquire), self.shared.total.load(Ordering::Acquire))
    }

    /// Has the load end as soon as what is under way allows, and waits a second for that. What the disk or the GPU never
    /// answer goes on alone.
    fn cancel(&self, py: Python<'_>) {
        if self.over.load(Ordering::Acquire) || self.is_forked() {
            return;
        }
        self.shared.stop();
        py.detach(|| {
            let start = Instant::now();
            while start.elapsed() < END
                && !matches!(self.receive(SIGNAL_POLL_INTERVAL), Err(RecvTimeoutError::Disconnected))
            {
            }
        });
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.is_forked() {
            // Dropping it might wait for a thread that was sending when the process forked.
            std::mem::forget(self.events.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            std::mem::forget(self.bring.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            return;
        }
        self.shared.stop();
    }
}
