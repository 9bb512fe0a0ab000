//! The files of one QEMU: socket, log, images and memory; removed when dropped.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::QemuOptions;
use crate::{Error, Result};

/// Memory that is never written to a disk.
const MEMORY_DIR: &str = "/dev/shm";

/// The places of one QEMU's files.
pub(super) struct Files {
    dir: PathBuf,
    ram: PathBuf,
}

impl Files {
    /// Creates the directory and the memory file.
    pub(super) fn make(options: &QemuOptions) -> Result<Self> {
        let (dir, name) = new_dir()?;
        let shared = Path::new(MEMORY_DIR);
        let ram = if room(shared) > options.ram_bytes { shared.join(name) } else { dir.join("ram") };
        let files = Self { dir, ram };
        sized(&files.ram, options.ram_bytes)?;
        Ok(files)
    }

    /// Creates the images that the options do not name.
    pub(super) fn images(&self, options: &QemuOptions) -> Result<Vec<PathBuf>> {
        let image = |nsid: u32| match &options.image {
            Some(given) if nsid == 1 => Ok(given.clone()),
            _ => {
                let path = self.dir.join(format!("disk{nsid}.img"));
                sized(&path, options.disk_bytes).map(|()| path)
            }
        };
        (1..=options.namespaces).map(image).collect()
    }

    /// QEMU's qtest socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("qt.sock")
    }

    /// The guest's memory.
    pub(super) fn ram(&self) -> PathBuf {
        self.ram.clone()
    }

    /// The directory of the other files.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A new file for QEMU's stderr.
    pub(super) fn log_file(&self) -> Result<File> {
        File::create(self.log_path()).map_err(|e| Error::bed("making QEMU's log", e))
    }

    /// QEMU's stderr.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("qemu.log")
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // A failure leaves a file in a temporary directory, and can no longer be reported.
        let _ = fs::remove_file(&self.ram);
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Creates a directory with a unique name: tests run in threads and in processes.
fn new_dir() -> Result<(PathBuf, String)> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let stem = format!("onehop-qtest-{}-{:x}", std::process::id(), now.as_nanos());
    let mut count = 0;
    loop {
        let name = format!("{stem}-{count}");
        let dir = std::env::temp_dir().join(&name);
        match fs::create_dir(&dir) {
            Ok(()) => return Ok((dir, name)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists && count < 1000 => count += 1,
            Err(e) => return Err(Error::bed(format!("making the directory {}", dir.display()), e)),
        }
    }
}

/// Creates a sparse file of this size.
fn sized(path: &Path, bytes: u64) -> Result<()> {
    let made = File::create_new(path).and_then(|file| file.set_len(bytes));
    made.map_err(|e| Error::bed(format!("making {} of {bytes} bytes", path.display()), e))
}

/// Bytes that can still be stored in a directory: missing memory would show up much later, as a fatal signal.
fn room(dir: &Path) -> u64 {
    rustix::fs::statvfs(dir).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize))
}
