//! What the library keeps for its process: mounts, registered files and GPUs. The API has no handle in which it could be.

use std::collections::HashMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use onehop_usrbio::files::Files;
use onehop_usrbio::gpu::{Gpus, Mode};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::{Error, Result};

/// The registered files.
pub static FILES: LazyLock<Files> = LazyLock::new(Files::default);
static MOUNTS: LazyLock<Mutex<HashMap<PathBuf, Arc<Mount>>>> = LazyLock::new(Mutex::default);
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
    let mut all = MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(mount) = all.get(path) {
        return Ok(mount.clone());
    }
    let mount = Arc::new(Mount::open(path)?);
    all.insert(path.to_owned(), mount.clone());
    Ok(mount)
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
