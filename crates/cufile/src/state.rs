//! The library's process-wide state, for which the API has no handle.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use onehop_os::file_writes::WriteRoutes;
use onehop_os::handles::{Handles, HeldHandles};
use onehop_os::{ForkLocks, HeldInFork};

use crate::buffers::RegisteredBuffer;
use crate::config;
use crate::error::{Code, Failure};
use crate::files::RegisteredFile;
use crate::log::{Level, say};
use crate::machine::{self, HeldMachine};
use crate::parameters::Parameters;
use crate::stats::{self, HeldStats};
use crate::types::CuFileError;

/// Files and batches by their handles.
pub static HANDLES: Handles = Handles::new();

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// See the module.
pub struct State {
    /// How often the driver was opened explicitly.
    pub opens: u64,
    /// Whether a call opened it implicitly.
    pub implicit: bool,
    pub parameters: Parameters,
    /// Registered memory by its address.
    pub buffers: BTreeMap<usize, RegisteredBuffer>,
    /// Registered files: the descriptor's number, the file's device and inode, and the handle.
    pub files: BTreeMap<i32, (u64, u64, usize)>,
    /// Registered streams and their flags.
    pub streams: BTreeMap<usize, u32>,
    /// How GPU memory was written to files.
    pub writes: Arc<WriteRoutes>,
}

impl State {
    fn new() -> Self {
        Self {
            opens: 0,
            implicit: false,
            parameters: config::read(),
            buffers: BTreeMap::new(),
            files: BTreeMap::new(),
            streams: BTreeMap::new(),
            writes: Arc::new(WriteRoutes::unshared()),
        }
    }

    /// Whether the driver is open.
    pub fn is_open(&self) -> bool {
        self.opens > 0 || self.implicit
    }
}

/// Runs `f` with the locked state.
pub fn with_state<R>(f: impl FnOnce(&mut State) -> R) -> R {
    let mut state = lock();
    f(state.get_or_insert_with(State::new))
}

fn lock() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The locks that a thread holds while it forks, in the order of release.
struct AllHeld {
    stats: HeldStats,
    handles: HeldHandles<'static>,
    machine: HeldMachine,
    state: MutexGuard<'static, Option<State>>,
}

static HELD: HeldInFork<AllHeld> = HeldInFork::new();

impl ForkLocks for AllHeld {
    fn place() -> &'static HeldInFork<Self> {
        &HELD
    }

    fn take() -> Self {
        // In the order in which calls lock them.
        let (state, machine) = (lock(), machine::hold());
        let (handles, stats) = (HANDLES.hold(), stats::hold());
        Self { stats, handles, machine, state }
    }

    /// Forgets what a child cannot use. It reads and writes its parent's files, but the parent's threads serve batches,
    /// streams and GPUs.
    fn disown(&mut self) {
        self.handles.disown_all_but::<RegisteredFile>();
        self.machine.disown();
        self.stats.disown();
        if let Some(state) = &mut *self.state {
            state.streams.clear();
            state.writes = Arc::new(WriteRoutes::unshared());
        }
    }
}

/// Ensures that no other thread holds a lock of this library while the process forks.
fn watch_forks() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if let Err(error) = onehop_os::watch_forks::<AllHeld>()
        && !WARNED.swap(true, Ordering::Relaxed)
    {
        say(Level::Warning, &format!("children may find locks taken for ever: {error}"));
    }
}

/// Runs the body of a call. Panics are caught.
pub fn run<R>(call: &str, f: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    watch_forks();
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(failure)) => {
            say(Level::Info, &format!("{call}: {failure:?}"));
            Err(failure)
        }
        Err(_) => {
            say(Level::Error, &format!("{call}: panicked; this is a defect of onehop"));
            Err(Code::Internal.into())
        }
    }
}

/// The same for a function that returns a structure.
pub fn answer(call: &str, f: impl FnOnce() -> Result<(), Failure>) -> CuFileError {
    match run(call, f) {
        Ok(()) => CuFileError::SUCCESS,
        Err(failure) => failure.answer(),
    }
}

/// The object of a handle.
pub fn get<T: Send + Sync + 'static>(handle: *mut std::ffi::c_void) -> Option<Arc<T>> {
    HANDLES.get(handle as usize)
}
