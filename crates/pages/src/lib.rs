//! Pages of a file, moved to and from GPU memory in batches: what KV caches do.
//!
//! 1. [`Pages::open`] opens a file for a GPU.
//! 2. [`Pages::read`] and [`Pages::write`] move a batch of [`FilePage`]s between the file and regions of memory.
//! 3. [`Pages::sync`] makes what was written durable.
//! 4. [`Pages::moved`] and [`Pages::why_staged`] report which routes the bytes took.
//!
//! There are two routes. A file whose pages stay in memory is *registered* with the GPU, a window at a time: the GPU moves
//! bytes between the page cache and its memory, and no CPU touches them. A lease of the file makes other programs that
//! open it wait until the GPU has ended (`registered.rs`). Everything else is *staged*: threads read and write the file, and
//! the copy engine moves the bytes between their pinned memory and the GPU's (`staged.rs`).
#![forbid(unsafe_code)]

mod error;
mod registered;
mod staged;
mod windows;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use onehop_gpu::{Gpu, Region};
use rustix::fs::{Advice, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fadvise, futimens};

pub use error::PagesError;
use registered::{Registrations, WINDOW};
use staged::{StagedPart, Stages};

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, PagesError>;

/// A page: bytes of the file, and of one memory of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilePage {
    /// Where it lies in the file.
    pub offset: u64,
    /// The number of the memory, and the offset in it.
    pub memory: (usize, usize),
    /// How many bytes.
    pub bytes: usize,
}

/// How a file is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagesOptions {
    /// Whether pages are written, too.
    pub writes: bool,
    /// The most bytes of the file that are registered at once.
    pub registered: u64,
}

impl PagesOptions {
    /// Half of this machine's memory may be registered.
    #[must_use]
    pub fn new(writes: bool) -> Self {
        let memory = rustix::system::sysinfo();
        let bytes = u64::from(memory.mem_unit).saturating_mul(memory.totalram as u64);
        Self { writes, registered: bytes / 2 }
    }
}

/// Bytes that were moved, by route.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MovedBytes {
    /// Between the page cache and the GPU, without a CPU.
    pub registered: u64,
    /// By threads, through pinned memory.
    pub staged: u64,
}

const NOT_A_FILE: &str = "it is not a file";

/// A file whose pages are moved to and from the memory of one GPU.
pub struct Pages {
    file: Arc<File>,
    options: PagesOptions,
    registrations: Arc<Registrations>,
    stages: Stages,
    counts: [AtomicU64; 2],
}

/// The direction of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PageDirection {
    Read,
    Write,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pages {
    /// Opens a file, which must exist.
    ///
    /// # Errors
    /// When it cannot be opened, or is not a file.
    pub fn open(path: &Path, gpu: Arc<dyn Gpu>, options: PagesOptions) -> Result<Self> {
        // Opening a pipe would wait for its other end.
        if !std::fs::metadata(path).map_err(PagesError::File)?.is_file() {
            return Err(PagesError::File(io::Error::new(io::ErrorKind::InvalidInput, NOT_A_FILE)));
        }
        let file = File::options().read(true).write(options.writes).open(path);
        Self::new(file.map_err(PagesError::File)?, gpu, options)
    }

    /// The same for an open file, for reading and writing if it is to be written. Nobody may truncate it, or punch holes into it,
    /// through a duplicate of this descriptor or an older mapping: the kernel would not report that.
    ///
    /// # Errors
    /// When it is not a file.
    pub fn new(file: File, gpu: Arc<dyn Gpu>, options: PagesOptions) -> Result<Self> {
        Self::with_windows(file, gpu, options, WINDOW)
    }

    /// The same with another size of what is registered at once.
    fn with_windows(file: File, gpu: Arc<dyn Gpu>, options: PagesOptions, window: u64) -> Result<Self> {
        if !file.metadata().map_err(PagesError::File)?.is_file() {
            return Err(PagesError::File(io::Error::new(io::ErrorKind::InvalidInput, NOT_A_FILE)));
        }
        // Pages are at random places. Failure is harmless.
        let _ = fadvise(&file, 0, None, Advice::Random);
        let file = Arc::new(file);
        Ok(Self {
            registrations: Registrations::new(file.clone(), gpu.clone(), options, window),
            stages: Stages::new(file.clone(), gpu),
            file,
            options,
            counts: Default::default(),
        })
    }

    /// Registers all of the file that may be, and returns how many bytes are. Without this, a part of the file is registered in
    /// the background when its first page is moved, and its pages are staged until then.
    pub fn register(&self) -> u64 {
        self.registrations.register_all()
    }

    /// Unregisters all of the file, and returns when that is done. Until then the file counts as open, also when this has been
    /// dropped: it cannot be registered anew.
    pub fn release(&self) {
        drop(self.registrations.release());
    }

    /// Reads pages into these memories. The call returns when all of them are there. Work of the GPU that uses the memories has to
    /// have ended before it.
    ///
    /// # Errors
    /// [`PagesError::BadPage`] for a page that does not lie within its memory and the file, before anything is moved. After other
    /// errors it is unknown which pages were read.
    pub fn read(&self, memories: &[Region], pages: &[FilePage]) -> Result<()> {
        self.transfer(PageDirection::Read, memories, pages)
    }

    /// Writes pages of these memories to the file, which grows if they lie behind its end. Work of the GPU on the memories has to
    /// have ended before the call. Another program that reads the file sees them when the call has returned. Pages that overlap
    /// are written in any order.
    ///
    /// # Errors
    /// As for [`Self::read`], and when the disk is full: it is then unknown which pages were written.
    pub fn write(&self, memories: &[Region], pages: &[FilePage]) -> Result<()> {
        if !self.options.writes {
            return Err(PagesError::ReadOnly);
        }
        self.transfer(PageDirection::Write, memories, pages)
    }

    /// Returns when everything that was written is on the disk.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(PagesError::File)
    }

    /// The size of the file.
    ///
    /// # Errors
    /// When the system does not report it.
    pub fn size(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(PagesError::File)?.len())
    }

    /// Bytes that have been moved so far.
    #[must_use]
    pub fn moved(&self) -> MovedBytes {
        let [registered, staged] = [0, 1].map(|route| self.counts[route].load(Ordering::Relaxed));
        MovedBytes { registered, staged }
    }

    /// The last known reason for staging.
    #[must_use]
    pub fn why_staged(&self) -> Option<String> {
        self.registrations.why()
    }

    fn transfer(&self, direction: PageDirection, memories: &[Region], pages: &[FilePage]) -> Result<()> {
        let size = self.size()?;
        for (number, page) in pages.iter().enumerate() {
            check(page, memories, (direction == PageDirection::Read).then_some(size))
                .map_err(|why| PagesError::BadPage { page: number, why })?;
        }
        let (staged, moved) = self.registrations.transfer(direction, memories, pages)?;
        self.counts[0].fetch_add(moved, Ordering::Relaxed);
        if moved > 0 && direction == PageDirection::Write {
            self.set_time();
        }
        let bytes = staged.iter().map(|part| part.bytes as u64).sum();
        self.stages.transfer(direction, memories, staged)?;
        self.counts[1].fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Sets the file's time of modification, as a system call that writes would.
    fn set_time(&self) {
        let nanos = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let times = Timestamps { last_access: nanos(UTIME_OMIT), last_modification: nanos(UTIME_NOW) };
        // Setting times needs the file's owner; so does a lease, or CAP_LEASE.
        let _ = futimens(&self.file, &times);
    }
}

/// Checks that a page lies within its memory, and within a file of this size.
fn check(page: &FilePage, memories: &[Region], size: Option<u64>) -> std::result::Result<(), String> {
    let FilePage { offset, memory: (number, at), bytes } = *page;
    let Some(memory) = memories.get(number) else {
        return Err(format!("there is no memory {number}, only {}", memories.len()));
    };
    if at > memory.len() || bytes > memory.len() - at {
        return Err(format!("{bytes} bytes at {at} are not within the {} of its memory", memory.len()));
    }
    let end = offset.checked_add(bytes as u64).filter(|end| *end <= i64::MAX as u64);
    match (end, size) {
        (Some(end), Some(size)) if end > size => {
            Err(format!("it ends at byte {end} of the file, which has {size}"))
        }
        (Some(_), _) => Ok(()),
        (None, _) => Err(format!("{bytes} bytes at {offset} are beyond what files have")),
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some(windows) = self.registrations.release() {
            // It takes a while. If no thread can be started, it is done here.
            let _ = std::thread::Builder::new().name("onehop unregister".into()).spawn(move || drop(windows));
        }
    }
}

impl FilePage {
    /// All of it, to be staged.
    fn staged(&self, page: usize) -> StagedPart {
        StagedPart { page, offset: self.offset, memory: self.memory, bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests;
