//! A call under way.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::file::{Filled, Room};
use super::rows::RowList;
use super::{ALIGN, CallCounters, CallFile, CountGuard, Target};

/// How long the state of memory from the start of a call is trusted: a query takes as long as the copy of a small read.
const FRESH: Duration = Duration::from_micros(100);

/// Why a call did not move its bytes.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The file could not be read or written.
    #[error("{0}")]
    File(#[from] io::Error),
    /// The GPU failed, or refuses the memory.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// The memory was freed during the call.
    #[error("the GPU memory was freed, or has been allocated again since")]
    Gone,
    /// This GPU has not ended copies that their callers abandoned, and has no slot left for others.
    #[error(
        "{gpu} has not ended earlier copies, which hold all {slots} slots that it may use; check the GPU"
    )]
    HeldSlots {
        /// Its name.
        gpu: String,
        /// Slots that it holds.
        slots: usize,
    },
    /// Neither the disk nor the GPU responded. Of a write that the kernel was carrying out by then, the end was waited for.
    #[error("nothing has arrived for {0:?}: the disk that has the file, or the GPU, does not answer")]
    Stalled(Duration),
}

impl CallError {
    pub(super) fn of_memory(error: onehop_os::Error) -> Self {
        match error {
            onehop_os::Error::System { source, .. } => Self::File(source),
            other => Self::Gpu(other.into()),
        }
    }
}

impl From<crate::Error> for CallError {
    fn from(error: crate::Error) -> Self {
        match error {
            crate::Error::Gpu(error) => Self::Gpu(error),
            other => Self::File(io::Error::other(other)),
        }
    }
}

/// Whether memory is still what it was when a call began.
type IsThere = dyn Fn() -> bool + Send + Sync;

/// Where the bytes of a call go, or come from.
pub struct Destination {
    /// The GPU that has the memory.
    pub target: Target,
    /// Its address.
    pub at: usize,
    /// Called before later chunks are copied; none if the state is unknown.
    pub is_there: Option<Box<IsThere>>,
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Destination({:#x} of GPU {})", self.at, self.target.index)
    }
}

/// What a call reads, or the file that it writes.
pub(super) enum CallSource {
    File(Arc<CallFile>),
    FileToWrite(Arc<CallFile>),
    Rows(RowList),
}

impl CallSource {
    /// Reads into memory.
    pub(super) fn fill(
        &self,
        room: Room<'_>,
        at: u64,
        bytes: usize,
        counts: &CallCounters,
    ) -> Result<Filled, CallError> {
        match self {
            Self::File(file) | Self::FileToWrite(file) => file.fill(room, at, bytes, counts),
            Self::Rows(list) => list.fill(room, at, bytes, counts),
        }
    }
}

/// The progress of a call.
struct CallProgress {
    /// Bytes from its start on before the first chunk that was short or failed.
    whole: usize,
    failed: Option<CallError>,
}

pub(super) struct Call {
    pub(super) source: CallSource,
    pub(super) at: u64,
    pub(super) bytes: usize,
    chunk: usize,
    pub(super) memory: Destination,
    begun: Instant,
    /// The next chunk that no thread has taken.
    next: AtomicUsize,
    /// Chunks that have not ended.
    left: AtomicUsize,
    has_failed: AtomicBool,
    /// Threads that write to the file.
    storing: AtomicUsize,
    progress: Mutex<CallProgress>,
}

impl Call {
    /// `bytes` is not 0, and `chunk` a multiple of [`ALIGN`], or of the rows.
    pub(super) fn new(source: CallSource, at: u64, bytes: usize, chunk: usize, memory: Destination) -> Self {
        let mut call = Self {
            source,
            at,
            bytes,
            chunk,
            memory,
            begun: Instant::now(),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            has_failed: AtomicBool::new(false),
            storing: AtomicUsize::new(0),
            progress: Mutex::new(CallProgress { whole: bytes, failed: None }),
        };
        *call.left.get_mut() = call.chunks();
        call
    }

    /// The file that it writes.
    pub(super) fn file_to_write(&self) -> Option<&CallFile> {
        match &self.source {
            CallSource::FileToWrite(file) => Some(file),
            CallSource::File(_) | CallSource::Rows(_) => None,
        }
    }

    /// Bytes of the file before its start with which the first chunk would begin.
    fn skipped(&self) -> usize {
        (self.at % ALIGN) as usize
    }

    pub(super) fn chunks(&self) -> usize {
        (self.skipped() + self.bytes).div_ceil(self.chunk)
    }

    /// Where a chunk begins in the file, and its bytes.
    pub(super) fn range(&self, chunk: usize) -> (u64, usize) {
        let start = (chunk * self.chunk).saturating_sub(self.skipped());
        let end = ((chunk + 1) * self.chunk - self.skipped()).min(self.bytes);
        (self.at + start as u64, end - start)
    }

    /// Where a chunk is in the GPU's memory.
    pub(super) fn place(&self, chunk: usize) -> usize {
        self.memory.at + (self.range(chunk).0 - self.at) as usize
    }

    /// The next chunk that no thread has taken.
    pub(super) fn take(&self) -> Option<usize> {
        let chunk = self.next.fetch_add(1, Ordering::AcqRel);
        (chunk < self.chunks()).then_some(chunk)
    }

    /// Chunks that no thread has taken.
    pub(super) fn not_taken(&self) -> usize {
        self.chunks().saturating_sub(self.next.load(Ordering::Acquire))
    }

    pub(super) fn left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    /// Whether its memory is still what it was when it began.
    pub(super) fn is_memory_there(&self) -> bool {
        self.begun.elapsed() < FRESH || self.memory.is_there.as_ref().is_none_or(|is_there| is_there())
    }

    /// Nothing more is started for it.
    pub(super) fn abandon(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }

    /// Writes to the file, unless the call has failed.
    pub(super) fn store(&self, store: impl FnOnce() -> Result<usize, CallError>) -> Result<usize, CallError> {
        // First, so that after `abandon` either this thread is seen, or it sees that.
        self.storing.fetch_add(1, Ordering::SeqCst);
        let _storing = CountGuard(&self.storing);
        if self.has_failed() { Ok(0) } else { store() }
    }

    /// Whether a thread writes to the file. Of a call that was abandoned, none begins to.
    pub(super) fn is_storing(&self) -> bool {
        self.storing.load(Ordering::SeqCst) > 0
    }

    /// Records that a chunk has ended, with this many bytes.
    pub(super) fn finish(&self, chunk: usize, bytes: usize) {
        let (at, wanted) = self.range(chunk);
        if bytes < wanted {
            let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
            progress.whole = progress.whole.min((at - self.at) as usize + bytes);
        }
        self.left.fetch_sub(1, Ordering::AcqRel);
    }

    /// Records that the call has failed.
    pub(super) fn note(&self, error: CallError) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.whole = 0;
        progress.failed.get_or_insert(error);
        drop(progress);
        self.abandon();
    }

    /// Records that a chunk has failed.
    pub(super) fn fail(&self, chunk: usize, error: CallError) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let start = (self.range(chunk).0 - self.at) as usize;
        if progress.failed.is_none() || start < progress.whole {
            progress.failed = Some(error);
        }
        progress.whole = progress.whole.min(start);
        drop(progress);
        self.abandon();
        self.left.fetch_sub(1, Ordering::AcqRel);
    }

    /// Records that a chunk was not started because others failed.
    pub(super) fn skip(&self, chunk: usize) {
        self.finish(chunk, 0);
    }

    /// The result, once all chunks have ended.
    pub(super) fn result(&self) -> Result<usize, CallError> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        match progress.failed.take() {
            // As by write(2): what was written before the disk was full is reported, the error by the next call.
            Some(CallError::File(_)) if self.file_to_write().is_some() && progress.whole > 0 => {
                Ok(progress.whole)
            }
            Some(error) => Err(error),
            None => Ok(progress.whole),
        }
    }
}
