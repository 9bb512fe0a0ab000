//! What the library keeps for its process: handles, mounts, registered files and GPUs. The API has no place for them.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock, RwLockWriteGuard};

use onehop_os::handles::{Handles, HeldHandles};
use onehop_usrbio::files::{Files, HeldFiles};
use onehop_usrbio::gpu::{Gpus, Mode};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::{Error, Result};

type Mounts = BTreeMap<PathBuf, Arc<Mount>>;

/// Rings and buffers by their handles.
pub static HANDLES: Handles = Handles::new();
/// The registered files.
pub static FILES: LazyLock<Files> = LazyLock::new(Files::default);
static MOUNTS: RwLock<Mounts> = RwLock::new(Mounts::new());
/// The GPUs, as `HF3FS_GDR_ENABLED` allows.
pub static GPUS: LazyLock<Gpus> = LazyLock::new(|| {
    Gpus::new(match variable("HF3FS_GDR_ENABLED").as_deref() {
        Some("0" | "off" | "false" | "no") => Mode::Off,
        Some("emulated") => Mode::Emulated,
        _ => Mode::Cuda,
    })
});

/// A variable that the original reads, too.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The mount at a path. It is kept, so that the daemon sees that the program lives.
///
/// # Errors
/// When there is none.
pub fn mount(path: &Path) -> Result<Arc<Mount>> {
    let known = MOUNTS.read().unwrap_or_else(PoisonError::into_inner).get(path).cloned();
    if let Some(mount) = known {
        return Ok(mount);
    }
    // Without the lock, as the daemon may take its time. Of two threads that are here at once the first one's mount is kept.
    let new = Arc::new(Mount::open(path)?);
    let mut all = mounts();
    Ok(all.entry(path.to_owned()).or_insert_with(|| new.clone()).clone())
}

fn mounts() -> RwLockWriteGuard<'static, Mounts> {
    MOUNTS.write().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread holds while it forks.
type AllHeld = (HeldHandles<'static>, RwLockWriteGuard<'static, Mounts>, HeldFiles<'static>);

thread_local! {
    static HELD: Cell<Option<AllHeld>> = const { Cell::new(None) };
}

/// A child uses the rings, buffers and files of its parent, as programs do that fork their workers: no lock may be another
/// thread's while the process forks.
pub fn watch_forks() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::AcqRel) {
        return;
    }
    LazyLock::force(&FILES);
    if let Err(error) = onehop_os::at_fork(before_fork, after_fork, after_fork) {
        tell(Level::Warning, &format!("children may find locks taken for ever: {error}"));
    }
}

extern "C" fn before_fork() {
    // A thread that forks while it ends has no place for the locks, and takes none.
    let _ = HELD.try_with(|held| held.set(Some((HANDLES.hold(), mounts(), FILES.hold()))));
}

extern "C" fn after_fork() {
    let _ = HELD.try_with(Cell::take);
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
        let _ =
            std::io::Write::write_all(&mut std::io::stderr(), format!("usrbio {word}: {what}\n").as_bytes());
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
