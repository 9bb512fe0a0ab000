//! The state of the library in its process: handles, mounts, registered files and GPUs.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use onehop_os::handles::{Handles, HeldHandles};
use onehop_os::{ForkLocks, HeldInFork};
use onehop_usrbio::buffer::Ring;
use onehop_usrbio::files::{Files, HeldFiles};
use onehop_usrbio::gpu::{GpuChoice, Gpus, HeldGpus};
use onehop_usrbio::mount::{HeldMount, Mount};
use onehop_usrbio::ring::HeldClient;
use onehop_usrbio::{Error, Result};

/// Mounts are never removed, so that their locks can be held while the process forks.
type Mounts = BTreeMap<PathBuf, &'static Arc<Mount>>;
/// The GPUs, and the process that opened them.
type OwnGpus = Option<(u32, &'static Gpus)>;

/// Rings and buffers by their handles.
pub static HANDLES: Handles = Handles::new();
/// The registered files.
pub static FILES: LazyLock<Files> = LazyLock::new(Files::default);
static MOUNTS: RwLock<Mounts> = RwLock::new(Mounts::new());
/// Locked briefly, never while a GPU is opened.
static GPUS: Mutex<OwnGpus> = Mutex::new(None);

/// The GPUs of this process, as `HF3FS_GDR_ENABLED` selects. A forked child opens its own: it cannot use its parent's
/// CUDA GPUs, and their lock stays locked if another thread was opening one.
pub fn gpus() -> &'static Gpus {
    let own = std::process::id();
    let mut known = own_gpus();
    if let Some((_, gpus)) = known.filter(|(process, gpus)| *process == own || gpus.outlive_a_fork()) {
        return gpus;
    }
    let gpus = Gpus::new(match env_var("HF3FS_GDR_ENABLED").as_deref() {
        Some("0" | "off" | "false" | "no") => GpuChoice::Off,
        Some("emulated") => GpuChoice::Emulated,
        _ => GpuChoice::Cuda,
    });
    // Leaked: there is one for each process.
    let gpus = &*Box::leak(Box::new(gpus));
    *known = Some((own, gpus));
    gpus
}

fn own_gpus() -> MutexGuard<'static, OwnGpus> {
    GPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An environment env_var of 3FS's library.
pub fn env_var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The mount at a path. It stays open, so that the daemon knows that the program lives.
///
/// # Errors
/// When there is no mount.
pub fn mount(path: &Path) -> Result<Arc<Mount>> {
    let known = MOUNTS.read().unwrap_or_else(PoisonError::into_inner).get(path).copied();
    if let Some(mount) = known {
        return Ok(mount.clone());
    }
    // Without the lock, because the daemon may be slow. If two threads are here, the first one's mount is kept.
    let new = Arc::new(Mount::open(path)?);
    let mut all = mounts();
    let kept: &'static Arc<Mount> = all.entry(path.to_owned()).or_insert_with(|| Box::leak(Box::new(new)));
    Ok(kept.clone())
}

fn mounts() -> RwLockWriteGuard<'static, Mounts> {
    MOUNTS.write().unwrap_or_else(PoisonError::into_inner)
}

/// The guards that a thread holds while it forks, in the order of release. A child uses its parent's rings, buffers and
/// files, as programs do that fork workers.
struct AllHeld {
    // Inner locks are released first.
    _rings: Vec<HeldRing>,
    _folders: Vec<HeldMount<'static>>,
    _emulated: Option<HeldGpus<'static>>,
    _gpus: MutexGuard<'static, OwnGpus>,
    _files: HeldFiles<'static>,
    _mounts: RwLockWriteGuard<'static, Mounts>,
    _handles: HeldHandles<'static>,
}

/// A ring, and the guards of its locks.
struct HeldRing {
    _locks: HeldClient<'static>,
    _ring: Arc<Ring>,
}

impl HeldRing {
    fn new(ring: Arc<Ring>) -> Self {
        // SAFETY: the locks are in the ring, which does not move within its Arc, and which is dropped after the guards.
        let locks = unsafe { std::mem::transmute::<HeldClient<'_>, HeldClient<'static>>(ring.hold()) };
        Self { _locks: locks, _ring: ring }
    }
}

static HELD: HeldInFork<AllHeld> = HeldInFork::new();

impl ForkLocks for AllHeld {
    fn place() -> &'static HeldInFork<Self> {
        &HELD
    }

    fn take() -> Self {
        let (handles, mounts, files, gpus) = (HANDLES.hold(), mounts(), FILES.hold(), own_gpus());
        Self {
            _rings: handles.all().into_iter().map(HeldRing::new).collect(),
            _folders: mounts.values().map(|mount| mount.hold()).collect(),
            _emulated: gpus.and_then(|(_, gpus)| gpus.hold()),
            _gpus: gpus,
            _files: files,
            _mounts: mounts,
            _handles: handles,
        }
    }
}

/// Registers the fork handlers: no lock of this library may be held by another thread while the process forks.
pub fn watch_forks() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if let Err(error) = onehop_os::watch_forks::<AllHeld>()
        && !WARNED.swap(true, Ordering::Relaxed)
    {
        log(Level::Warning, &format!("child processes may find locks that are never released: {error}"));
    }
}

/// What is logged, as `HF3FS_USRBIO_LIB_LOG` selects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
pub enum Level {
    /// Failures.
    Error,
    /// Also fallbacks.
    Warning,
}

/// Logs to stderr.
pub fn log(level: Level, what: &str) {
    let least = match env_var("HF3FS_USRBIO_LIB_LOG").as_deref() {
        Some("FATAL" | "CRITICAL") => return,
        Some("ERR" | "ERROR") => Level::Error,
        _ => Level::Warning,
    };
    if level <= least {
        // Not eprintln, which panics if stderr is closed.
        let word = if level == Level::Error { "ERR" } else { "WARN" };
        let _ = onehop_os::write_to_stderr(format!("usrbio {word}: {what}\n").as_bytes());
    }
}

/// Runs the body of a call and returns its result. Panics do not leave it.
pub fn guard(call: &str, f: impl FnOnce() -> Result<c_int>) -> c_int {
    watch_forks();
    // A panic may leave only the caller's structure inconsistent.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(number)) => number,
        Ok(Err(error)) => {
            // Expected: a program learns this way that it must wait.
            if !matches!(error, Error::Full) {
                log(Level::Error, &format!("{call}: {error}"));
            }
            -error.errno()
        }
        Err(_) => {
            log(Level::Error, &format!("{call}: panicked; this is a bug in onehop"));
            -libc::EIO
        }
    }
}
