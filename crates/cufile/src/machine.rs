//! The GPUs of this process, the engine that serves them, and the threads that carry out what nobody waits for.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use onehop_gpu::cuda::{Cuda, CudaGpu, Device, Pointer, Queued, StreamState};
use onehop_gpu::{Gpu, Place, Region};
use onehop_load::engine::calls::{CallEngine, Destination, Target};
use onehop_proto::GpuAddr;

use crate::error::{Code, Failure};
use crate::executor::Executor;
use crate::log::{Level, say};

/// Bytes of the words that streams wait on: as many operations as there are words may be under way.
const WORDS: usize = 64 << 10;

/// A machine, and the process that it is of.
type Own = Option<(u32, &'static Machine)>;

static MACHINE: Mutex<Own> = Mutex::new(None);

/// See the module.
pub struct Machine {
    cuda: Option<Cuda>,
    engine: OnceLock<Result<CallEngine, i32>>,
    /// By the GPU's number and the program's context.
    gpus: Mutex<BTreeMap<(u32, usize), Arc<OpenGpu>>>,
    words: Mutex<Option<Words>>,
    pub executor: Executor,
}

/// A GPU that the program has memory of.
struct OpenGpu {
    gpu: CudaGpu,
    target: Target,
}

/// Words of pinned memory that streams wait on.
struct Words {
    memory: Region,
    /// Words that no operation uses, and how often each was used: a stream waits for that count.
    free: Vec<(usize, u32)>,
}

/// A word that a stream waits on.
pub struct Word {
    memory: Region,
    offset: usize,
    value: u32,
}

/// The machine of this process. A child that was forked has another: its parent's threads and GPUs are not its own.
pub fn machine() -> &'static Machine {
    let own = std::process::id();
    let mut known = lock();
    match *known {
        Some((process, machine)) if process == own => machine,
        _ => {
            let machine: &'static Machine = Box::leak(Box::new(Machine::new()));
            *known = Some((own, machine));
            machine
        }
    }
}

/// The machine, if it was needed so far.
pub fn if_started() -> Option<&'static Machine> {
    lock().filter(|(process, _)| *process == std::process::id()).map(|(_, machine)| machine)
}

fn lock() -> MutexGuard<'static, Own> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Its lock, for a thread that forks.
pub struct HeldMachine(#[allow(dead_code, reason = "held and not looked at")] MutexGuard<'static, Own>);

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
            words: Mutex::default(),
            executor: Executor::new(),
        }
    }

    /// Whether there is a GPU's driver.
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

    /// The engine, if it was needed so far.
    pub fn started_engine(&self) -> Option<&CallEngine> {
        self.engine.get()?.as_ref().ok()
    }

    fn open(&self, pointer: &Pointer) -> Result<Arc<OpenGpu>, Failure> {
        let key = (pointer.ordinal, pointer.context);
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = gpus.get(&key) {
            return Ok(open.clone());
        }
        let cuda = self.cuda.as_ref().ok_or(Failure::Cuda(100))?;
        // SAFETY: the driver has just said so of memory that the program keeps during the call.
        let gpu = unsafe { cuda.open_for(pointer) }?;
        // SAFETY: the calls of this library alone use it, each for the memory that its program named: the API asks that it
        // stays allocated until the call, or the operation, has ended.
        let all = unsafe { gpu.all_memory() }?;
        let target = self.engine()?.add_gpu(&gpu, all)?;
        let open = Arc::new(OpenGpu { gpu, target });
        gpus.insert(key, open.clone());
        Ok(open)
    }

    /// Forgets a GPU that failed: the program may have destroyed the context.
    pub fn forget(&self, pointer: &Pointer) {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.remove(&(pointer.ordinal, pointer.context));
    }

    /// A GPU that is open, or the primary context of this one.
    fn any_gpu(&self, ordinal: u32) -> Result<Arc<OpenGpu>, Failure> {
        let open = self.gpus.lock().unwrap_or_else(PoisonError::into_inner).values().next().cloned();
        open.map_or_else(|| self.open(&Pointer { ordinal, id: 0, context: 0 }), Ok)
    }

    /// What is known of a pointer: none for host memory.
    pub fn pointer(&self, at: usize) -> Result<Option<Pointer>, Failure> {
        let Some(cuda) = &self.cuda else { return Ok(None) };
        let at = GpuAddr(at as u64);
        match cuda.pointer(at) {
            Ok(found) => Ok(found),
            // A thread that has no context of its own.
            Err(_) => Ok(self.any_gpu(0)?.gpu.pointer(at)?),
        }
    }

    /// GPU memory as the engine takes it.
    pub fn destination(&'static self, pointer: Pointer, at: usize) -> Result<Destination, Failure> {
        let open = self.open(&pointer)?;
        let target = open.target.clone();
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

    /// A word for a stream of this GPU to wait on.
    pub fn word(&self, ordinal: u32) -> Result<Word, Failure> {
        // Before the lock: it may register memory.
        let open = self.any_gpu(ordinal)?;
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if words.is_none() {
            let memory = open.gpu.alloc(Place::PinnedHost, WORDS)?;
            let free = (0..WORDS / 4).rev().map(|index| (index * 4, 0)).collect();
            *words = Some(Words { memory, free });
        }
        let words = words.as_mut().ok_or(Code::Internal)?;
        let (offset, used) = words.free.pop().ok_or(Code::NoMemory)?;
        Ok(Word { memory: words.memory.clone(), offset, value: used.wrapping_add(1) })
    }

    /// Lets the stream that waits on a word go on.
    pub fn release(&self, word: Word) {
        let Word { memory, offset, value } = word;
        if let Err(error) = memory.signal(offset, value) {
            say(Level::Error, &format!("a stream waits for ever: {error}"));
            return;
        }
        // An old wait that has not seen its value yet sees a larger one.
        if let Some(words) = &mut *self.words.lock().unwrap_or_else(PoisonError::into_inner) {
            words.free.push((offset, value));
        }
    }

    /// See [`Cuda::call_and_wait`].
    ///
    /// # Safety
    /// The same.
    pub unsafe fn call_and_wait(
        &self,
        stream: *mut c_void,
        function: extern "C" fn(*mut c_void),
        argument: *mut c_void,
        word: &Word,
    ) -> Result<Queued, Failure> {
        let cuda = self.cuda.as_ref().ok_or(Failure::Cuda(100))?;
        let word = (&word.memory, word.offset, word.value);
        // SAFETY: the caller's promise; the words live as long as the process.
        Ok(unsafe { cuda.call_and_wait(stream, function, argument, word) }?)
    }
}
