//! The GPUs of this process, the engine that serves them, and the threads for batches and streams.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use onehop_gpu::cuda::{Cuda, CudaGpu, Device, Pointer, StreamState, StreamWork};
use onehop_load::engine::calls::{CallEngine, Destination, Target};
use onehop_proto::GpuAddr;

use crate::error::{Code, Failure};
use crate::executor::Executor;
use crate::log::{Level, say};
use crate::slots::{PATIENCE, SlotPool};
use crate::state::run;

/// CUDA_ERROR_DEINITIALIZED.
const DEINITIALIZED: i32 = 4;

/// A machine, and its process.
type Own = Option<(u32, &'static Machine)>;

static MACHINE: Mutex<Own> = Mutex::new(None);

/// See the module.
pub struct Machine {
    cuda: Option<Cuda>,
    engine: OnceLock<Result<CallEngine, i32>>,
    /// By the GPU's number and the program's context.
    gpus: Mutex<BTreeMap<(u32, usize), Arc<OpenGpu>>>,
    /// For batches, whose operations may wait for the GPU.
    pub executor: Executor,
    /// For operations in streams: its threads never call CUDA.
    pub stream_executor: Executor,
}

/// A GPU on which the program has memory or streams.
struct OpenGpu {
    gpu: CudaGpu,
    target: Mutex<Option<Target>>,
    streams: Mutex<Streams>,
    /// Signals that [`Self::streams`] were made, or could not be.
    streams_made: Condvar,
}

#[derive(Default)]
struct Streams {
    is_making: bool,
    made: Option<Result<Arc<StreamGpu>, Failure>>,
}

/// What operations in the streams of one context need.
pub struct StreamGpu {
    pub gpu: CudaGpu,
    pub ordinal: u32,
    pub work: StreamWork,
    pub slots: SlotPool,
}

impl OpenGpu {
    fn target(&self, machine: &Machine) -> Result<Target, Failure> {
        let mut known = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = &*known {
            return Ok(target.clone());
        }
        // SAFETY: only this library's calls use it, each for the memory that its program named. The program promises
        // that the memory stays allocated, and nothing enforces it: until the call or operation has ended, as the API
        // asks; and after an error that may leave a copy in progress, until the GPU has answered, as docs/cufile.md
        // asks. The check before copies that it is still the same memory (`Destination::is_there`) only makes a mistake
        // rarer.
        let all = unsafe { self.gpu.all_memory() }?;
        Ok(known.insert(machine.engine()?.add_gpu(Arc::new(self.gpu.clone()), all)?).clone())
    }

    fn lock_streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resources for operations in streams. A separate thread creates them: the driver may wait for streams when it
    /// loads a kernel and pins memory, and a program that holds a stream back must get its own thread back.
    fn streams(self: &Arc<Self>, ordinal: u32) -> Result<Arc<StreamGpu>, Failure> {
        let mut streams = self.lock_streams();
        if streams.made.is_none() && !streams.is_making {
            let open = self.clone();
            let thread = std::thread::Builder::new().name("onehop setup".into());
            let make = move || {
                let made = run("making what streams need", || StreamGpu::new(&open.gpu, ordinal));
                *open.lock_streams() = Streams { is_making: false, made: Some(made) };
                open.streams_made.notify_all();
            };
            thread.spawn(make).map_err(|_| Code::NoMemory)?;
            streams.is_making = true;
        }
        let waited = self.streams_made.wait_timeout_while(streams, PATIENCE, |streams| streams.is_making);
        let mut streams = waited.unwrap_or_else(PoisonError::into_inner).0;
        match &streams.made {
            Some(Ok(made)) => Ok(made.clone()),
            Some(Err(failure)) => {
                let failure = *failure;
                // The next call tries again.
                streams.made = None;
                Err(failure)
            }
            None => {
                let what = "the driver does not pin memory and load a kernel while streams are held back";
                say(Level::Error, &format!("{what}: register a stream (cuFileStreamRegister) before"));
                Err(Code::NoMemory.into())
            }
        }
    }
}

impl StreamGpu {
    fn new(gpu: &CudaGpu, ordinal: u32) -> Result<Arc<Self>, Failure> {
        let (work, slots) = (gpu.stream_work()?, SlotPool::new(gpu)?);
        Ok(Arc::new(Self { gpu: gpu.clone(), ordinal, work, slots }))
    }
}

/// The machine of this process. A forked child gets a new one: its parent's threads and GPUs are not its own.
pub fn machine() -> &'static Machine {
    if let Some(machine) = if_started() {
        return machine;
    }
    // Without the lock: the CUDA driver may fork a program while it starts, and a fork takes the lock.
    let made = Machine::new();
    let own = std::process::id();
    let mut known = lock();
    match *known {
        // Another thread was faster.
        Some((process, machine)) if process == own => machine,
        _ => {
            let machine: &'static Machine = Box::leak(Box::new(made));
            *known = Some((own, machine));
            machine
        }
    }
}

/// The machine, if one was created.
pub fn if_started() -> Option<&'static Machine> {
    lock().filter(|(process, _)| *process == std::process::id()).map(|(_, machine)| machine)
}

fn lock() -> MutexGuard<'static, Own> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lock, for a thread that forks.
pub struct HeldMachine(MutexGuard<'static, Own>);

impl HeldMachine {
    /// Forgets the machine in a child, without dropping it.
    pub fn disown(&mut self) {
        *self.0 = None;
    }
}

/// Takes the lock.
pub fn hold() -> HeldMachine {
    HeldMachine(lock())
}

impl Machine {
    fn new() -> Self {
        let cuda = match Cuda::load() {
            Ok(cuda) => Some(cuda),
            Err(why) => {
                say(Level::Warning, &format!("all memory is taken for host memory: {why}"));
                None
            }
        };
        Self {
            cuda,
            engine: OnceLock::new(),
            gpus: Mutex::default(),
            executor: Executor::new("onehop cufile"),
            stream_executor: Executor::new("onehop streams"),
        }
    }

    /// Whether there is a GPU driver.
    pub fn has_cuda(&self) -> bool {
        self.cuda.is_some()
    }

    /// The GPUs.
    pub fn devices(&self) -> Result<Vec<Device>, Failure> {
        let cuda = self.cuda.as_ref().ok_or(Failure::Cuda(100))?;
        Ok(cuda.devices()?)
    }

    /// The engine.
    pub fn engine(&self) -> Result<&CallEngine, Failure> {
        let made =
            self.engine.get_or_init(|| CallEngine::new().map_err(|error| Failure::from(error).number()));
        made.as_ref().map_err(|errno| Failure::System(*errno))
    }

    /// The engine, if it was started.
    pub fn started_engine(&self) -> Option<&CallEngine> {
        self.engine.get()?.as_ref().ok()
    }

    fn open(&self, pointer: &Pointer) -> Result<Arc<OpenGpu>, Failure> {
        let key = (pointer.ordinal, pointer.context);
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        // The driver may have reused the handle of a destroyed context for another one.
        if let Some(open) = gpus.get(&key).filter(|open| !open.gpu.is_destroyed()) {
            return Ok(open.clone());
        }
        let cuda = self.cuda.as_ref().ok_or(Failure::Cuda(100))?;
        // SAFETY: either it has no context, and the primary one is opened; or the driver has just reported it
        // for memory or a stream that the program keeps during the call, and so it keeps their context.
        let gpu = unsafe { cuda.open_for(pointer) }?;
        let (target, streams, streams_made) = Default::default();
        let open = Arc::new(OpenGpu { gpu, target, streams, streams_made });
        gpus.insert(key, open.clone());
        Ok(open)
    }

    /// Forgets a GPU and a context that failed: the program may have destroyed the context.
    pub fn forget(&self, ordinal: u32, context: usize) {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.remove(&(ordinal, context));
    }

    /// The primary context of a GPU that is open, or of the first. The program may destroy any other context meanwhile:
    /// it has promised nothing of contexts that the call does not name.
    fn any_gpu(&self) -> Result<Arc<OpenGpu>, Failure> {
        let open = {
            let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
            gpus.keys().next().map(|(ordinal, _)| *ordinal)
        };
        self.open(&pointer_to(open.unwrap_or(0), 0))
    }

    /// CUDA's information about a pointer; `None` for host memory.
    pub fn pointer(&self, at: usize) -> Result<Option<Pointer>, Failure> {
        let Some(cuda) = &self.cuda else { return Ok(None) };
        let at = GpuAddr(at as u64);
        let found = match cuda.pointer(at) {
            Ok(found) => Ok(found),
            // For a thread without a context of its own.
            Err(_) => self.any_gpu().and_then(|open| Ok(open.gpu.pointer(at)?)),
        };
        match found {
            // CUDA has ended, before the process, and all memory of GPUs with it.
            Err(Failure::Cuda(DEINITIALIZED)) => Ok(None),
            found => found,
        }
    }

    /// GPU memory as a destination for the engine.
    pub fn destination(&'static self, pointer: Pointer, at: usize) -> Result<Destination, Failure> {
        let open = self.open(&pointer)?;
        let target = open.target(self)?;
        let is_there = move || {
            let now = open.gpu.pointer(GpuAddr(at as u64));
            now.is_ok_and(|now| now.is_some_and(|now| now.id == pointer.id))
        };
        Ok(Destination { target, at, is_there: Some(Box::new(is_there)) })
    }

    /// See [`Cuda::stream_state`].
    ///
    /// # Safety
    /// The same.
    pub unsafe fn stream_state(&self, stream: *mut c_void) -> Result<StreamState, Failure> {
        let cuda = self.cuda.as_ref().ok_or(Failure::Cuda(100))?;
        // SAFETY: the caller's promise.
        Ok(unsafe { cuda.stream_state(stream) }?)
    }

    /// What operations in the streams of a context need.
    pub fn stream_gpu(&self, ordinal: u32, context: usize) -> Result<Arc<StreamGpu>, Failure> {
        self.open(&pointer_to(ordinal, context))?.streams(ordinal)
    }
}

/// As a pointer into memory of a context.
fn pointer_to(ordinal: u32, context: usize) -> Pointer {
    Pointer { ordinal, id: 0, context, is_managed: false }
}
