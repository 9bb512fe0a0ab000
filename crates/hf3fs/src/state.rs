//! What the library keeps for its process: handles, mounts, registered files and GPUs. The API has no place for them.

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

/// Mounts are never forgotten, so that a lock of one can be held while the process forks.
type Mounts = BTreeMap<PathBuf, &'static Arc<Mount>>;
/// GPUs, and the process that they are of.
type OwnGpus = Option<(u32, &'static Gpus)>;

/// Rings and buffers by their handles.
pub static HANDLES: Handles = Handles::new();
/// The registered files.
pub static FILES: LazyLock<Files> = LazyLock::new(Files::default);
static MOUNTS: RwLock<Mounts> = RwLock::new(Mounts::new());
/// Locked for a moment only, and never while a GPU is opened.
static GPUS: Mutex<OwnGpus> = Mutex::new(None);

/// The GPUs of this process, as `HF3FS_GDR_ENABLED` allows. A child that was forked while another thread opened one would find
/// its parent's locked for ever, and could not use them: it has its own.
pub fn gpus() -> &'static Gpus {
    let own = std::process::id();
    let mut known = own_gpus();
    if let Some((_, gpus)) = known.filter(|(process, gpus)| *process == own || gpus.outlive_a_fork()) {
        return gpus;
    }
    let gpus = Gpus::new(match variable("HF3FS_GDR_ENABLED").as_deref() {
        Some("0" | "off" | "false" | "no") => GpuChoice::Off,
        Some("emulated") => GpuChoice::Emulated,
        _ => GpuChoice::Cuda,
    });
    // One for each process, as long as that lives.
    let gpus = &*Box::leak(Box::new(gpus));
    *known = Some((own, gpus));
    gpus
}

fn own_gpus() -> MutexGuard<'static, OwnGpus> {
    GPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A variable that the original reads, too.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The mount at a path. It is kept, so that the daemon sees that the program lives.
///
/// # Errors
/// When there is none.
pub fn mount(path: &Path) -> Result<Arc<Mount>> {
    let known = MOUNTS.read().unwrap_or_else(PoisonError::into_inner).get(path).copied();
    if let Some(mount) = known {
        return Ok(mount.clone());
    }
    // Without the lock, as the daemon may take its time. Of two threads that are here at once the first one's mount is kept.
    let new = Arc::new(Mount::open(path)?);
    let mut all = mounts();
    let kept: &'static Arc<Mount> = all.entry(path.to_owned()).or_insert_with(|| Box::leak(Box::new(new)));
    Ok(kept.clone())
}

fn mounts() -> RwLockWriteGuard<'static, Mounts> {
    MOUNTS.write().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread holds while it forks, in the order of release. A child uses the rings, buffers and files of its parent, as
/// programs do that fork their workers.
struct AllHeld {
    // Those within the others' go first.
    _rings: Vec<HeldRing>,
    _folders: Vec<HeldMount<'static>>,
    _emulated: Option<HeldGpus<'static>>,
    _gpus: MutexGuard<'static, OwnGpus>,
    _files: HeldFiles<'static>,
    _mounts: RwLockWriteGuard<'static, Mounts>,
    _handles: HeldHandles<'static>,
}

/// The locks of a ring, and the ring.
struct HeldRing {
    _locks: HeldClient<'static>,
    _ring: Arc<Ring>,
}

impl HeldRing {
    fn new(ring: Arc<Ring>) -> Self {
        // SAFETY: the locks lie in the ring, which does not move within its Arc, and which is dropped after their guards.
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

/// No lock of this library may be another thread's while the process forks.
pub fn watch_forks() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if let Err(error) = onehop_os::watch_forks::<AllHeld>()
        && !WARNED.swap(true, Ordering::Relaxed)
    {
        tell(Level::Warning, &format!("children may find locks taken for ever: {error}"));
    }
}

/// How much is told, by `HF3FS_USRBIO_LIB_LOG`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
pub enum Level {
    /// What failed.
    Error,
    /// What went another way.
    Warning,
}

/// Tells somebody who reads stderr.
pub fn tell(level: Level, what: &str) {
    let least = match variable("HF3FS_USRBIO_LIB_LOG").as_deref() {
        Some("FATAL" | "CRITICAL") => return,
        Some("ERR" | "ERROR") => Level::Error,
        _ => Level::Warning,
    };
    if level <= least {
        // Not eprintln: it would panic where stderr is closed.
        let word = if level == Level::Error { "ERR" } else { "WARN" };
        let _ = onehop_os::write_to_stderr(format!("usrbio {word}: {what}\n").as_bytes());
    }
}

/// Runs what a call does, and gives its number. A panic goes no further than this.
pub fn guard(call: &str, f: impl FnOnce() -> Result<c_int>) -> c_int {
    watch_forks();
    // What a panic leaves behind is the caller's structure, of which nothing was filled in.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(number)) => number,
        Ok(Err(error)) => {
            // That is how programs find out that they have to wait.
            if !matches!(error, Error::Full) {
                tell(Level::Error, &format!("{call}: {error}"));
            }
            -error.errno()
        }
        Err(_) => {
            tell(Level::Error, &format!("{call}: panicked; this is a defect of onehop"));
            -libc::EIO
        }
    }
}
